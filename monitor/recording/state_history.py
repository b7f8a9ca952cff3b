"""What committed states held, so that weights which a loop takes back are known for what they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from firmware_sim.evidence import Node
from monitor.programs.recalled_weights import PROOF, STEP
from monitor.sharding import ShardedMemory

__all__ = ["Earlier"]

_MOST_HASHES = 1 << 17
_KINDS = ("weight", "buffer")


class Earlier:
    """Hashes of the newest committed states: as many as there are 131,072 of, and one state at least.

    Args:
        memory: the state, whose digest is taken at each commit.
    """

    def __init__(self, memory: ShardedMemory) -> None:
        self._memory = memory
        self._states: OrderedDict[int, tuple[Node, ...]] = OrderedDict()
        self._count = 0

    def remember(self, step: int) -> None:
        """Keep what the memory's last digest was made of."""
        self._states[step] = tuple(self._memory.leaves)
        self._count += len(self._states[step])
        while self._count > _MOST_HASHES and len(self._states) > 1:
            self._count -= len(self._states.popitem(last=False)[1])

    def find(self, given: Mapping[str, Tensor]) -> tuple[int, dict[str, str]] | None:
        """The state that holds most of these flat tensors as weights or buffers, of several the newest.

        Returns its step, and under which name, ``kind/name``, it holds each; None where none holds any.
        """
        places = {name: list(self._places(tensor)) for name, tensor in given.items()}
        best: tuple[int, dict[str, str]] | None = None
        for step, nodes in reversed(self._states.items()):
            hashes = {node.start: node.hash for node in nodes}
            found: dict[str, str] = {}
            for name, forms in places.items():
                for own, leaves in forms:
                    if own not in found.values() and all(hashes.get(leaf.start) == leaf.hash for leaf in leaves):
                        found[name] = own
                        break
            if found and (best is None or len(found) > len(best[1])):
                best = step, found
        return best

    def evidence(self, step: int, names: Mapping[str, str]) -> dict[str, Tensor]:
        """What else a batch has to hold that holds tensors of a state, by their names there."""
        proof = self._memory.proof(self._states[step], set(names.values()))
        return {STEP: torch.tensor([step]), PROOF: proof}

    def _places(self, tensor: Tensor) -> Iterator[tuple[str, list[Node]]]:
        """Each tensor of the state that this may be a value of, with the hashes that it would have there."""
        for (kind, name), own in self._memory.tensors.items():
            if kind in _KINDS and own.dtype == tensor.dtype and own.numel() == tensor.numel() > 0:
                key = f"{kind}/{name}"
                yield key, self._memory.leaves_of({key: tensor.reshape(own.shape)})
