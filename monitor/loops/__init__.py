"""What a caller's loop holds, model, optimizers and further objects, as one state in the memory of chips."""
