"""Refereed delegation: a client orders a training from providers that it does not trust, and fetches the result."""
