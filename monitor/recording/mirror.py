"""A copy of all that lies in the memory of chips, laid out as it lies there."""

from __future__ import annotations

import torch

from monitor.programs.bits import copy_over, same_bytes
from monitor.sharding import ShardedMemory

__all__ = ["Mirror"]


class Mirror:
    """What memory held when it last followed; whole buffers are copied and compared, not tensor by tensor.

    Attributes:
        tensors: the copies, under ``kind/name``.
    """

    def __init__(self, memory: ShardedMemory) -> None:
        self._memory = memory
        self._buffers = [buffer.clone() for buffer in memory.buffers]
        spots = memory.spots.values()
        self.tensors = {
            name: self._buffers[number].as_strided(tensor.shape, tensor.stride(), first)
            for (name, tensor), (number, first) in zip(memory.export().items(), spots, strict=True)
        }

    def follow(self) -> None:
        """Hold what lies in memory now."""
        with torch.no_grad():
            for mine, buffer in zip(self._buffers, self._memory.buffers, strict=True):
                copy_over(mine, buffer)

    def differing(self) -> list[str]:
        """Names of tensors that hold other bytes in memory than here."""
        if all(map(same_bytes, self._buffers, self._memory.buffers)):
            return []
        return [name for name, tensor in self._memory.export().items() if not same_bytes(tensor, self.tensors[name])]
