"""What a party says in a dispute: commitments to lists, and openings of them (RFC 9162)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUBTREES", "Opening", "TraceHead"]

SUBTREES = 1 << 10
"""A tree of more blocks is opened by the hashes of so many subtrees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A leaf of a tree with its inclusion proof."""

    leaf: bytes
    proof: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHead:
    """Commitment to the operators of one step: their number and RFC 9162 root."""

    size: int
    root: bytes
