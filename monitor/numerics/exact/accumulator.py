"""An exact sum of FP32 numbers that come one after another: its size does not grow with their number.

A number of FP32 is a whole number times 2^-149. The sum of each element is held as nine signed digits of 32 bits in
64-bit integers, so that 2^31 numbers can be added before a digit overflows, in any order and on any number of
processes: integers add without error. One rounding at the end gives what ``exact.sums`` gives for all terms at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.kernels.bits import canonical, check_subnormals

__all__ = ["ExactSum"]

_DIGITS = 9
_BITS = 32
_MASK = (1 << _BITS) - 1
_MOST_TERMS = 1 << 31
_BLOCK = 1 << 16
_POSITIVE, _NEGATIVE, _NAN = 1, 2, 4
_KEPT = 50
"""Bits that are converted to FP64 without error, the last of them telling whether any below was set."""


class ExactSum:
    """Sums of ``elements`` streams of FP32 numbers: 73 bytes for each.

    Attributes:
        digits: (9, elements) INT64; the sum over processes is that of their digits.
        special: (elements,) UINT8, bits: whether a positive or negative infinity or a NaN was added.
        terms: numbers added to each sum here.
    """

    def __init__(self, elements: int, device: torch.device | None = None) -> None:
        self.digits = torch.zeros((_DIGITS, elements), dtype=torch.int64, device=device)
        self.special = torch.zeros(elements, dtype=torch.uint8, device=device)
        self.terms = 0

    def add(self, values: Tensor) -> None:
        """Add one FP32 number to each sum.

        Raises:
            CallerError: another type or number of elements, or more terms than digits can hold.
        """
        if values.dtype != torch.float32 or values.numel() != len(self.special):
            raise CallerError(
                f"an exact sum of {len(self.special)} elements takes as many FP32 numbers, not {values.dtype}"
            )
        self.terms += 1
        if self.terms >= _MOST_TERMS:
            raise CallerError(f"an exact sum must have fewer than {_MOST_TERMS} terms")
        bits = values.detach().reshape(-1).contiguous().view(torch.int32)
        for start in range(0, len(bits), _BLOCK):
            self._add(bits[start : start + _BLOCK].to(torch.int64), slice(start, start + _BLOCK))

    def add_all(self, values: Tensor) -> None:
        """Add all elements of an FP32 tensor to the sum of a single stream."""
        if len(self.special) != 1 or values.dtype != torch.float32:
            raise CallerError("a sum over all elements must have one FP32 number as its result")
        self.terms += values.numel()
        if self.terms >= _MOST_TERMS:
            raise CallerError(f"an exact sum must have fewer than {_MOST_TERMS} terms")
        part = ExactSum(min(_BLOCK, values.numel()), values.device)
        for piece in torch.split(values.detach().reshape(-1), _BLOCK):
            padded = torch.zeros(len(part.special), dtype=torch.float32, device=values.device)
            padded[: len(piece)] = piece
            part.add(padded)
        self.digits += _carried(part.digits).sum(1, keepdim=True)
        for flag in (_POSITIVE, _NEGATIVE, _NAN):
            if bool((part.special & flag).any()):
                self.special |= flag

    def rounded(self) -> Tensor:
        """(elements,) FP32 of the exact sums, rounded once to nearest, ties to even; zero is +0, NaN is 0x7FC00000.

        Raises:
            DeviceError: the device flushes subnormal numbers.
        """
        check_subnormals(self.digits.device)
        out = torch.empty(len(self.special), dtype=torch.float32, device=self.digits.device)
        for start in range(0, len(out), _BLOCK):
            place = slice(start, start + _BLOCK)
            out[place] = _rounded(self.digits[:, place])
        positive, negative, nan = ((self.special & flag) != 0 for flag in (_POSITIVE, _NEGATIVE, _NAN))
        out[positive] = torch.inf
        out[negative] = -torch.inf
        out[nan | (positive & negative)] = torch.nan
        return canonical(out)

    def _add(self, bits: Tensor, place: slice) -> None:
        """Add numbers given by their bits, as non-negative or negative INT64."""
        exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7F_FFFF
        is_finite = exponent != 0xFF
        mantissa = torch.where(exponent > 0, fraction | 0x80_0000, fraction) * is_finite
        position = exponent.clamp(1, 254) - 1
        value = mantissa << (position % _BITS)
        signed = torch.where(bits < 0, -1, 1)
        first = (position // _BITS)[None]
        digits = self.digits[:, place]
        digits.scatter_add_(0, first, (signed * (value & _MASK))[None])
        digits.scatter_add_(0, first + 1, (signed * (value >> _BITS))[None])
        if not bool(is_finite.all()):
            infinite = ~is_finite & (fraction == 0)
            flags = _NAN * (~is_finite & (fraction != 0)) + _POSITIVE * (infinite & (bits >= 0))
            self.special[place] |= (flags + _NEGATIVE * (infinite & (bits < 0))).to(torch.uint8)


def _carried(digits: Tensor) -> Tensor:
    """The same numbers with all digits but the last in 0 … 2^32 - 1; the last has the sign."""
    digits = digits.clone()
    for number in range(_DIGITS - 1):
        digits[number + 1] += digits[number] >> _BITS
        digits[number] &= _MASK
    return digits


def _rounded(digits: Tensor) -> Tensor:
    digits = _carried(digits)
    is_negative = digits[-1] < 0
    digits = torch.where(is_negative, _carried(-digits), digits)
    numbers = torch.arange(_DIGITS, device=digits.device)[:, None]
    highest = torch.where(digits != 0, numbers, 0).amax(0, keepdim=True)
    top = digits.gather(0, highest)[0]
    middle = torch.where(highest > 0, digits.gather(0, (highest - 1).clamp(min=0)), 0)[0]
    rest = ((digits != 0) & (numbers < highest - 1)).any(0) | ((middle & 3) != 0)
    value = (top << 30) | (middle >> 2) | rest
    length = torch.frexp(value.to(torch.float64)).exponent.to(torch.int64)
    shift = (length - _KEPT).clamp(min=0)
    lost = (value & ((torch.ones_like(shift) << shift) - 1)) != 0
    exact = ((value >> shift) | lost).to(torch.float64)
    result = torch.ldexp(exact, shift + _BITS * highest[0] - 179).to(torch.float32)
    return torch.where(is_negative, -result, result)
