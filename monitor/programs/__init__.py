"""What a program is, for the person who agrees to it: its compute, its memory, and where its data end up."""

from monitor.programs.flop import Compute, compute_of, flop_of

__all__ = ["Compute", "compute_of", "flop_of"]
