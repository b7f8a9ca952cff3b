"""Convolutions and mean pools over any number of spatial dimensions: windows as a view, then one exact product or sum.

A convolution is one matrix product over all offsets of its filter and channels of its group, so that each element of a
result or gradient is rounded once, as in two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.operators.reductions import largest_first

__all__ = [
    "convolution",
    "convolution_grad_input",
    "convolution_grad_weight",
    "fractional_largest",
    "mean_pool",
    "mean_pool_backward",
]


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Zeros around the last dimensions; negative numbers cut places off."""
    sides = [side for pair in reversed(list(zip(before, after, strict=True))) for side in pair]
    return functional.pad(x, sides).contiguous()


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """(…, k_1, …, k_d, places_1, …, places_d) view of what each place of a filter sees in contiguous ``x``."""
    rank = len(kernel)
    sizes, steps = x.shape[-rank:], x.stride()[-rank:]
    each = list(zip(sizes, kernel, stride, dilation, strict=True))
    places = [(size - apart * (k - 1) - 1) // jump + 1 for size, k, jump, apart in each]
    offsets = [step * apart for step, apart in zip(steps, dilation, strict=True)]
    jumps = [step * jump for step, jump in zip(steps, stride, strict=True)]
    lead, strides = x.shape[:-rank], x.stride()[:-rank]
    return x.as_strided((*lead, *kernel, *places), (*strides, *offsets, *jumps))


def _columns(x: Tensor, kernel: Sequence[int], shape: ConvolutionShape, stride: Sequence[int]) -> Tensor:
    """(groups, c/groups · k, n · places) columns of padded ``x`` (n, c, …)."""
    rank, groups = len(kernel), shape.groups
    seen = _windows(x, kernel, stride, shape.dilation)
    places = seen.shape[-rank:]
    grouped = seen.reshape(len(x), groups, -1, math.prod(places))
    return grouped.permute(1, 2, 0, 3).reshape(groups, grouped.shape[2], -1)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(n, c, …) as (groups, c/groups, n · places)."""
    return (
        x.reshape(len(x), groups, x.shape[1] // groups, -1)
        .permute(1, 2, 0, 3)
        .reshape(groups, x.shape[1] // groups, -1)
    )


def _from_groups(flat: Tensor, n: int, sizes: Sequence[int]) -> Tensor:
    """The inverse: (groups, c/groups, n · places) as (n, c, …)."""
    split = flat.reshape(flat.shape[0], flat.shape[1], n, -1)
    return split.permute(2, 0, 1, 3).reshape(n, -1, *sizes)


def convolution(backend: Backend, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
    """Cross-correlation of (n, c, …) with (o, c/groups, k…), no bias."""
    kernel, groups = weight.shape[2:], shape.groups
    columns = _columns(_padded(x, shape.padding, shape.padding), kernel, shape, shape.stride)
    rows = weight.reshape(groups, len(weight) // groups, -1)
    return _from_groups(backend.matmul(rows, columns), len(x), shape.out_size(x.shape[2:], kernel))


def convolution_grad_input(
    backend: Backend, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
) -> Tensor:
    """Gradient with respect to the input: the filters turned round slide over the gradient with zeros between."""
    kernel, groups, sizes = weight.shape[2:], shape.groups, x_shape[2:]
    spread = [(places - 1) * jump + 1 for places, jump in zip(grad.shape[2:], shape.stride, strict=True)]
    wide = grad.new_zeros((*grad.shape[:2], *spread))
    places: list[Any] = [slice(None, None, jump) for jump in shape.stride]
    wide[(..., *places)] = grad
    reach = [apart * (k - 1) for k, apart in zip(kernel, shape.dilation, strict=True)]
    before = [most - pad for most, pad in zip(reach, shape.padding, strict=True)]
    after = [size + most - have - pad for size, most, have, pad in zip(sizes, reach, spread, before, strict=True)]
    columns = _columns(_padded(wide, before, after), kernel, shape, (1,) * len(kernel))
    turned = weight.flip(tuple(range(2, weight.dim())))
    rows = turned.reshape(groups, len(weight) // groups, weight.shape[1], -1).transpose(1, 2)
    return _from_groups(backend.matmul(rows.reshape(groups, weight.shape[1], -1), columns), len(grad), sizes)


def convolution_grad_weight(
    backend: Backend, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
) -> Tensor:
    """Gradient with respect to the filters."""
    kernel = weight_shape[2:]
    seen = _padded(x, shape.padding, shape.padding)
    for axis, (size, step, gap, k) in enumerate(zip(grad.shape[2:], shape.stride, shape.dilation, kernel, strict=True)):
        seen = seen.narrow(axis + 2, 0, (size - 1) * step + gap * (k - 1) + 1)
    columns = _columns(seen.contiguous(), kernel, shape, shape.stride)
    # A stride may leave places at the end of the input that no filter sees.
    return backend.matmul(_by_group(grad, shape.groups), columns.transpose(1, 2).contiguous()).reshape(weight_shape)


class _Pool:
    """Windows of a pool of this rank over the last dimensions of x, whole ones and, if asked for, started ones."""

    def __init__(
        self,
        rank: int,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        self.sizes = tuple(x.shape[-rank:])
        self.kernel, self.stride, self.padding = (
            tuple(each) * (rank if len(each) == 1 else 1) for each in (kernel, stride or kernel, padding)
        )
        self._included, self._divisor = count_include_pad, divisor_override
        self.places = tuple(self._places(axis, ceil_mode) for axis in range(rank))
        self._after = tuple(
            (to - 1) * jump + k - size - pad
            for to, jump, k, size, pad in zip(
                self.places, self.stride, self.kernel, self.sizes, self.padding, strict=True
            )
        )

    def _places(self, axis: int, ceil_mode: bool) -> int:
        size, k, jump, pad = self.sizes[axis], self.kernel[axis], self.stride[axis], self.padding[axis]
        room = size + 2 * pad - k
        count = (room + (jump - 1 if ceil_mode else 0)) // jump + 1
        return count - 1 if ceil_mode and (count - 1) * jump >= size + pad else count

    def windows(self, x: Tensor) -> Tensor:
        """(lead, k, places) of what each window sees."""
        flat = _padded(x.reshape(-1, *self.sizes), self.padding, self._after)
        seen = _windows(flat, self.kernel, self.stride, (1,) * len(self.kernel))
        return seen.reshape(len(flat), math.prod(self.kernel), math.prod(self.places))

    def divisor(self, like: Tensor) -> Tensor:
        """(places,) elements by which each sum is divided."""
        if self._divisor is not None:
            return torch.full((), self._divisor, dtype=like.dtype, device=like.device)
        total = torch.ones((), dtype=torch.int64)
        each = zip(self.places, self.stride, self.padding, self.kernel, self.sizes, strict=True)
        for to, jump, pad, k, size in each:
            start = torch.arange(to) * jump - pad
            stop = (start + k).clamp(max=size + pad)
            if not self._included:
                start, stop = start.clamp(min=0), stop.clamp(max=size)
            total = total[..., None] * (stop - start)
        return total.reshape(-1).to(like)


def mean_pool(rank: int) -> Any:
    def apply(
        backend: Backend,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        *how: Any,
        **more: Any,
    ) -> Tensor:
        """Rounded sum of each window, divided by its elements."""
        pool = _Pool(rank, x, kernel, stride, padding, *how, **more)
        total = backend.sum(pool.windows(x), [1], False)
        return torch.div(total, pool.divisor(x)).reshape(*x.shape[:-rank], *pool.places)

    return apply


def mean_pool_backward(rank: int) -> Any:
    def apply(
        backend: Backend,
        grad: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        *how: Any,
    ) -> Tensor:
        """Each element's rounded sum over the windows that see it."""
        pool = _Pool(rank, x, kernel, stride, padding, *how)
        count = math.prod(pool.sizes)
        numbers = torch.arange(1, count + 1, device=x.device).reshape(pool.sizes)
        targets = pool.windows(numbers).reshape(-1)  # 0 for the zeros around x
        share = torch.div(grad.reshape(-1, math.prod(pool.places)), pool.divisor(grad))
        rows = share[:, None].expand(-1, math.prod(pool.kernel), -1).reshape(len(share), -1).t()
        return backend.scatter_rows(count + 1, targets, rows)[1:].t().reshape(x.shape)

    return apply


def _starts(size: int, kernel: int, out: int, drawn: Tensor) -> Tensor:
    """First place of each of ``out`` windows, by each plane's number in [0, 1) (Graham 2014); the last ends the image.

    ⌊(i + u)·a⌋ − ⌊u·a⌋ with a = (size − kernel) / (out − 1), each operation rounded to FP32.
    """
    if out == 1:
        return torch.full((len(drawn), 1), size - kernel, device=drawn.device)
    step = torch.div(torch.full_like(drawn, size - kernel), torch.full_like(drawn, out - 1))
    numbers = torch.arange(out, device=drawn.device).to(torch.float32)
    found = ((numbers + drawn[:, None]) * step[:, None]).long() - (drawn * step).long()[:, None]
    found[:, -1] = size - kernel
    return found


def fractional_largest(rank: int) -> Any:
    def apply(
        _: Backend, x: Tensor, kernel: Sequence[int], size: Sequence[int], drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The largest of each window and the lowest place that holds it; a NaN is the largest."""
        if any(to + k - 1 > have for to, k, have in zip(size, kernel, x.shape[-rank:], strict=True)):
            raise CallerError("a fractional pool's windows and places do not fit into its input")
        planes = x.reshape(x.shape[:-rank].numel(), *x.shape[-rank:])
        images = 1 if x.dim() == rank + 1 else len(x)
        if len(drawn) < images or drawn.shape[1:] != (x.shape[-rank - 1], rank):
            raise CallerError(f"a fractional pool needs {rank} random numbers for each channel of each image")
        numbers = drawn[:images].reshape(len(planes), rank)
        places = torch.zeros((len(planes), 1, 1), dtype=torch.int64, device=x.device)
        for axis in range(rank):
            number = numbers[
                :, rank - 1 - axis if rank == 2 else axis
            ]  # ATen's order, which is the width's first in 2D
            starts = _starts(x.shape[axis - rank], kernel[axis], size[axis], number)
            along = starts[:, None] + torch.arange(kernel[axis], device=x.device)[:, None]
            wide = places[:, :, None, :, None] * x.shape[axis - rank] + along[:, None, :, None, :]
            places = wide.reshape(len(planes), wide.shape[1] * wide.shape[2], wide.shape[3] * wide.shape[4])
        seen = torch.gather(
            planes.reshape(len(planes), 1, x.shape[-rank:].numel()).expand(-1, places.shape[1], -1), 2, places
        )
        values, first = largest_first(seen, 1, False, True)
        index = torch.gather(places, 1, first[:, None])[:, 0]
        shape = (*x.shape[:-rank], *size)
        return values.reshape(shape), index.reshape(shape)

    return apply
