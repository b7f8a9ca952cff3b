"""Reads the leaves of recorded runs."""

from __future__ import annotations

from monitor.transcript.leaf import Execution, Leaf

__all__ = ["execution_of"]


def execution_of(leaf: Leaf) -> Execution:
    """How a step was carried out; the test fails where its leaf does not say that."""
    assert leaf.execution is not None
    return leaf.execution
