"""The geometry of convolutions and pools, in one place: which input and output places a filter's offset joins.

Along one dimension, offset k of a filter joins output ``to`` with input ``to·stride − padding + k·dilation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Axis", "ConvolutionShape", "places"]


def places(size: int, kernel: int, stride: int, dilation: int, zeros: int) -> int:
    """Output places along a dimension of ``size`` with that many zeros around it."""
    return (size + zeros - dilation * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension: input and output sizes, and what joins them."""

    size: int
    places: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def seen(self, to: int) -> list[tuple[int, int]]:
        """(filter offset, input index) that an output index sees."""
        return [(k, at) for k in range(self.kernel) if 0 <= (at := self._input(to, k)) < self.size]

    def reached(self, at: int) -> list[tuple[int, int]]:
        """(filter offset, output index) that an input index reaches."""
        return [(k, to) for k in range(self.kernel) for to in range(self.places) if self._input(to, k) == at]

    def met(self, k: int) -> list[tuple[int, int]]:
        """(output index, input index) that meet at a filter offset."""
        return [(to, at) for to in range(self.places) if 0 <= (at := self._input(to, k)) < self.size]

    def _input(self, to: int, k: int) -> int:
        return to * self.stride - self.padding + k * self.dilation


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape:
    """Stride, padding and dilation for each spatial dimension, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls, rank: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> ConvolutionShape:
        """The shape for ``rank`` spatial dimensions; a single number counts for all."""
        wide = (tuple(values) * (rank if len(values) == 1 else 1) for values in (stride, padding, dilation))
        each = dict(zip(("stride", "padding", "dilation"), wide, strict=True))
        return cls(**each, groups=groups)

    def lifted(self) -> ConvolutionShape:
        """A 1-D convolution as a 2-D one of height 1."""
        return ConvolutionShape(
            stride=(1, *self.stride), padding=(0, *self.padding), dilation=(1, *self.dilation), groups=self.groups
        )

    def out_size(self, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Spatial sizes of the result."""
        each = zip(sizes, kernel, self.stride, self.dilation, self.padding, strict=True)
        return tuple(places(size, k, jump, step, 2 * pad) for size, k, jump, step, pad in each)

    def in_size(self, sizes: Sequence[int], kernel: Sequence[int], extra: Sequence[int]) -> tuple[int, ...]:
        """Spatial sizes of a transposed convolution's result: of the input whose gradient it is."""
        more = (0,) * (len(kernel) - len(extra)) + tuple(extra)
        each = zip(sizes, kernel, self.stride, self.padding, self.dilation, more, strict=True)
        return tuple((n - 1) * jump - 2 * pad + step * (k - 1) + 1 + add for n, k, jump, pad, step, add in each)

    def axes(self, sizes: Sequence[int], places: Sequence[int], kernel: Sequence[int]) -> list[Axis]:
        """Each spatial dimension with its input and output size."""
        each = zip(sizes, places, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [
            Axis(size=size, places=to, kernel=k, stride=jump, padding=pad, dilation=step)
            for size, to, k, jump, pad, step in each
        ]
