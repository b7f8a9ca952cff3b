"""Dropout whose masks are a function of the run's seed and the number of the step, with nothing outside the state.

torch's generator is state that no checkpoint holds and no operator shows: a replay that starts in the middle of a run,
or a referee that executes a single operator, could not draw the same numbers. Here key and step lie in the model's
buffers, so chips hold them and checkpoints restore them, and the cipher is written out in integer operators without
overflow, exact on every device and in every numerics.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError

__all__ = ["MaskStream", "Masks"]

_WORD = 0xFFFF_FFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_PER_BLOCK = 8


class MaskStream(nn.Module):
    """Source of the masks of one model; call it once at the start of each forward pass.

    An element is dropped where its 16-bit number lies below t = round(probability·2^16), and the others are scaled by
    2^16/(2^16 - t), so that the mean is kept. The numbers are Philox4x32-10 (Salmon et al. 2011) under a 64-bit key
    from the seed, each 32-bit word giving its low and then its high half; the counter is
    (block within the step, number of the step, 0, 0): word for word
    ``monitor.numerics.exact.philox.bits(key, step << 32, …)``.

    Attributes:
        key: int64 [2], low and high word of the key.
        passes: int64 scalar, forward passes in training mode so far; the step's own pass counts.
    """

    key: Tensor
    passes: Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise CallerError(f"a dropout probability must lie in [0, 1), not {probability}")
        self.threshold = round(probability * 65536)
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def seed_from(self, seed: int) -> None:
        """Set the key from a run's seed and the number of passes to 0."""
        key = hashlib.sha256(f"chipwitness/dropout/{seed}".encode()).digest()
        words = [int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")]
        self.key.copy_(torch.tensor(words, dtype=torch.int64))
        self.passes.zero_()

    def forward(self) -> Masks:
        """Begin a pass."""
        if not self.training:
            return Masks(self.threshold, (), self.passes)
        self.passes.add_(1)
        low, high = self.key.unbind(0)
        keys = []
        for _ in range(_ROUNDS):
            keys.append((low, high))
            low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
        return Masks(self.threshold, keys, self.passes)


class Masks:
    """The masks of one forward pass, drawn in order; all ones where there are no round keys."""

    def __init__(self, threshold: int, keys: Sequence[tuple[Tensor, Tensor]], step: Tensor) -> None:
        self._threshold = threshold
        self._keys = keys
        self._step = step
        self._next_block = 0

    def draw(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
        """Factors to multiply tensors of these shapes with: 0 or the scale; they start at a fresh block."""
        if not self._keys:
            return [torch.ones(tuple(shape), dtype=dtype, device=self._step.device) for shape in shapes]
        counts = [math.prod(shape) for shape in shapes]
        total = sum(counts)
        blocks = -(-total // _PER_BLOCK)
        words = self._words(blocks)
        kept = [half for word in words for half in (word & 0xFFFF >= self._threshold, word >= self._threshold << 16)]
        scale = 65536 / (65536 - self._threshold)
        factors = torch.stack(kept, dim=1).reshape(-1)[:total].to(dtype) * scale
        return [part.view(tuple(shape)) for part, shape in zip(torch.split(factors, counts), shapes, strict=True)]

    def _words(self, blocks: int) -> list[Tensor]:
        """The four words of each of the next blocks, int64 [blocks] in [0, 2^32)."""
        start, stop = self._next_block, self._next_block + blocks
        if stop > 1 << 32:
            raise CallerError("a forward pass can draw at most 2^35 dropout numbers")
        self._next_block = stop
        c0 = torch.arange(start, stop, device=self._step.device)
        c1 = self._step & _WORD
        c2 = c3 = torch.zeros_like(c1)
        for k0, k1 in self._keys:
            high_0, low_0 = _multiply(c0, _MULTIPLIERS[0])
            high_1, low_1 = _multiply(c2, _MULTIPLIERS[1])
            c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        return [c0, c1, c2, c3]


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of x·constant for x in [0, 2^32) and a constant in [2^31, 2^32).

    The product with constant - 2^32 lies in (-2^63, 0], so that int64 holds it; x·2^32 is what it lacks.
    """
    product = x * (constant - (1 << 32))
    return ((product >> 32) + x) & _WORD, product & _WORD
