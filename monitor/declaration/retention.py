"""Which checkpoints of a run stay on disk: the first, the last few, and ever sparser ones before them."""

from __future__ import annotations

__all__ = ["is_retained"]


def is_retained(step: int, committed: int, *, every: int, keep: int | None) -> bool:
    """Tell whether the checkpoint of a step has to be there once so many steps are committed.

    Count checkpoints from 0. The one whose number has the largest power of two 2^v as divisor stays while fewer than
    ``keep`` · 2^v have come after it. So the last ``keep`` stay, at most ``keep`` for each v, of n checkpoints no more
    than 1 + ``keep`` · (1 + log2 n); those ``age`` old lie at most max(1, 2 · ``age`` / ``keep``) apart; and what is
    released once is never asked for again.

    Args:
        every: steps from one checkpoint to the next, of which the newest comes with the step after its own.
        keep: how many of the newest stay; None for all.
    """
    number, newest = step // every, max(committed - 1, 0) // every
    return keep is None or number == 0 or newest - number < keep * (number & -number)
