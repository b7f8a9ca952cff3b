"""Training as evidence: the recorder, the state in chip memory, presets recorded like any other training."""
