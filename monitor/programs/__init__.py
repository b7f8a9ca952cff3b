"""What a program is, for the person who agrees to it: its compute, its memory, and where its data end up."""

from monitor.programs.facts import Facts, facts_of, peak_bytes
from monitor.programs.flop import Compute, compute_of
from monitor.programs.paths import Path, direct_paths

__all__ = ["Compute", "Facts", "Path", "compute_of", "direct_paths", "facts_of", "peak_bytes"]
