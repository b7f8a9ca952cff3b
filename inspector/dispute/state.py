"""A state that two parties commit to otherwise, though they agree on its tensors: its first block decides.

Each party opens the tree of its own commitment, from the subtrees in its leaf down to the first block that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import BlockSlice, block_elements, hash_blocks
from inspector.dispute.messages import CheckedProver
from inspector.dispute.openings import Source
from inspector.dispute.tiles import TileRuling
from monitor.declaration.statement import Declaration
from monitor.programs.trace import content_of

__all__ = ["decide_state"]


def decide_state(
    parties: Sequence[CheckedProver], step: int, declared: Declaration, names: Sequence[str], inputs: Sequence[Source]
) -> TileRuling:
    """Which parties commit to the block that the agreed tensors have.

    Args:
        step: after which the states are.
        names: of the tensors, ``kind/name``.
        inputs: these tensors.

    Raises:
        EvidenceError: no party opens a tensor, or it is another one than was declared.
        Failure: a party has lost by its answer.
    """
    place, hashes = _first_block(parties, step, declared.layout.subtrees)
    key, blocks = next((key, blocks) for key, blocks in declared.layout.blocks.items() if place in blocks)
    name, number = "/".join(key), place - blocks.start
    source = inputs[names.index(name)]
    entry = next(each for each in declared.state if (each.kind, each.name) == key)
    shape, length = tuple(entry.shape), block_elements(entry.dtype, tuple(entry.shape))
    if (source.dtype, source.shape) != (entry.dtype, shape):
        raise EvidenceError(f"{name!a:.100} is not committed with the type and shape that were declared")
    stop = min((number + 1) * length, torch.Size(shape).numel())
    content = content_of(source.fetch(torch.arange(number * length, stop)))
    (true,) = hash_blocks([BlockSlice(*key, entry.dtype, shape, blocks.start, number, content)])
    return TileRuling({party: each == true.hash for party, each in hashes.items()}, f"block {number} of {name}")


def _first_block(
    parties: Sequence[CheckedProver], step: int, subtrees: Sequence[tuple[int, int]]
) -> tuple[int, dict[str, bytes]]:
    """The first block that differs, and its hash as each party has it."""
    below = {party.name: party.leaf(step).state.hashes for party in parties}
    trees = list(subtrees)
    while True:
        first, second = below.values()
        number = next(at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
        (start, size), hashes = trees[number], {name: each[number] for name, each in below.items()}
        if size == 1:
            return start, hashes
        parties[0].traffic.rounds += 1
        below = {party.name: party.blocks(step, start, size, hashes[party.name]) for party in parties}
        width = size // len(next(iter(below.values())))
        trees = [(place, width) for place in range(start, start + size, width)]
