"""Somebody's own training loop as evidence: the recorder, the state in chip memory, presets recorded like any loop."""
