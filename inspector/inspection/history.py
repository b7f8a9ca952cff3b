"""A run as its lab signed it, whole or as far as it is shown, and what contradicts it.

An inspection holds all leaves of a run. Who checks its bundle holds those that the bundle opens. Both ask the questions
of this module; what is not shown contradicts nothing.
"""

from __future__ import annotations

from typing import Protocol

from firmware_sim import LogRecord
from monitor.transcript.manifest import Manifest

__all__ = ["History", "are_forked", "other_root", "other_state"]


class History(Protocol):
    """The leaves and heads that a lab signed of a run."""

    def has_root(self, size: int, root: bytes) -> bool | None:
        """Whether its first ``size`` leaves have this root; None where that is not shown."""

    def has_state(self, step: int, shard: int, digest: bytes) -> bool | None:
        """Whether a step left a state whose shard of this number has this digest; None where that is not shown."""


def are_forked(history: History, head: Manifest, other: Manifest) -> bool:
    """Whether another head cannot be one of the same run, whichever of the two was signed first.

    Args:
        head: of ``history``.
    """
    return (head.finished and other.finished) or history.has_root(other.steps + 1, other.root) is False


def other_root(chip: str, record: LogRecord, history: History) -> str:
    """In words, that a chip heard of a step with another head than the lab's; empty where nothing shows that."""
    if history.has_root(record.step + 1, record.digest) is not False:
        return ""
    return f"chip {chip}, record {record.counter}: step {record.step} was committed with another log head"


def other_state(chip: str, record: LogRecord, step: int, shard: int, history: History) -> str:
    """In words, that a chip's snapshot is not of the state after a step; empty where nothing shows that."""
    if history.has_state(step, shard, record.digest) is not False:
        return ""
    text = f"chip {chip}, record {record.counter}: the snapshot claimed for step {step} is not shard {shard} of any "
    return f"{text}declared state at that step"
