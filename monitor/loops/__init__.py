"""Somebody's own training loop as evidence: the captured program of a step, its interpreter and its recorder.

The public name is ``monitor.Recorder``; the modules here are loaded when they are first used.
"""

__all__: list[str] = []
