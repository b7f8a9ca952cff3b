"""The engine for any device: each primitive in eager PyTorch, from operations that every device rounds alike."""
