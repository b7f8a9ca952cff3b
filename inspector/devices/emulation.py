"""Emulated devices: other orders of additions, on a CPU that has only its own.

An order replaces the vendor's matrix products, convolutions, sums and means in every numerics, in FP32 and FP64 and for
int8 products with int32 sums, where another order gives the same bits. Fused operators (softmax, normalisation, fused
attention) and all others keep the vendor's arithmetic. These are orders that real devices use, not those devices.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import DeviceError
from inspector.devices import ORDER
from inspector.devices.emulated_accelerator import NAME, EmulatedAccelerator
from inspector.devices.orders import EMULATED, Order, added, slices
from monitor.environment import ACCELERATOR
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.geometry import ConvolutionShape

__all__ = ["EmulatedArithmetic", "install_from_environment"]


def _product(order: Order, a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in the given order; half precisions are widened to FP32 and rounded once."""
    if a.is_complex():
        return torch.bmm(a, b)
    shape = (a.shape[0], a.shape[1], b.shape[2])
    if 0 in (*shape, a.shape[2]):
        return a.new_zeros(shape)
    if not a.is_floating_point():
        return _integer_product(order, torch.bmm, a, b)
    wide = a.dtype if a.dtype == torch.float64 else torch.float32
    return order.product(a.to(wide), b.to(wide)).to(a.dtype)


def _integer_product(order: Order, vendor: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    parts = slices(order.cuts(a.shape[-1]))[::-1]
    return added([vendor(a[..., part], b[..., part, :]) for part in parts])


def _sum(
    order: Order, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Sum over dimensions, all where none is given; integers become int64, as torch has it."""
    if dtype is not None:
        x = x.to(dtype)
    if x.is_complex():
        return torch.sum(x, list(dims or range(x.dim())), keepdim)
    if not x.is_floating_point():
        x = x.to(torch.int64)
    gone = sorted({dim % max(x.dim(), 1) for dim in dims} if dims else range(x.dim()))
    kept = [dim for dim in range(x.dim()) if dim not in gone]
    outer = math.prod(x.shape[dim] for dim in kept)
    rows = x.permute([*kept, *gone]).reshape(outer, -1) if x.numel() else x.new_zeros((outer, 1))
    if not x.is_floating_point():
        flat = added([rows[:, part].sum(1) for part in slices(order.cuts(rows.shape[1]))[::-1]])
    else:
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        flat = order.total(rows.to(wide)).to(x.dtype) if outer else rows.sum(1)
    return flat.reshape([1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim in kept])


def _mean(
    order: Order, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    terms = math.prod(x.shape[dim] for dim in dims) if dims else x.numel()
    return _sum(order, x, dims, keepdim, dtype=dtype) / terms


def _mm(order: Order, a: Tensor, b: Tensor) -> Tensor:
    return _product(order, a[None], b[None])[0]


def _combined(base: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """beta·base + alpha·product, each operation rounded; base is not read where beta is 0."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return (base if beta == 1 else base * beta) + product


def _addmm(order: Order, base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _combined(base, _mm(order, a, b), beta, alpha)


def _baddbmm(order: Order, base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _combined(base, _product(order, a, b), beta, alpha)


def _mv(order: Order, a: Tensor, x: Tensor) -> Tensor:
    return _mm(order, a, x[:, None])[:, 0]


def _addmv(order: Order, base: Tensor, a: Tensor, x: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _combined(base, _mv(order, a, x), beta, alpha)


def _dot(order: Order, a: Tensor, b: Tensor) -> Tensor:
    return _mm(order, a[None], b[:, None])[0, 0]


def _int_mm(order: Order, a: Tensor, b: Tensor) -> Tensor:
    return _integer_product(order, torch._int_mm, a, b)


class _Window:
    """A convolution (not a transposed one) with its filter's sizes, for any number of spatial dimensions."""

    def __init__(self, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]):
        self.kernel = list(kernel)
        self.shape = ConvolutionShape.of(len(kernel), stride, padding, dilation, 1)

    def places(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Output sizes."""
        return self.shape.out_size(sizes, self.kernel)

    def padded(self, x: Tensor) -> Tensor:
        """x with a margin of zeros."""
        return torch.constant_pad_nd(x, [width for pad in reversed(self.shape.padding) for width in (pad, pad)])

    def at(self, offset: Sequence[int], sizes: Sequence[int]) -> Any:
        """Index into padded memory of what one element of the filter meets at each place."""
        each = zip(offset, self.shape.dilation, self.shape.stride, self.places(sizes), strict=True)
        return (..., *(slice(at * step, at * step + (count - 1) * jump + 1, jump) for at, step, jump, count in each))

    def offsets(self) -> list[tuple[int, ...]]:
        """Positions of a filter's elements."""
        return list(pairs(*(range(k) for k in self.kernel)))

    def patches(self, x: Tensor) -> Tensor:
        """(n, c, …) → (n, c·kernel, places)."""
        padded = self.padded(x)
        stacked = torch.stack([padded[self.at(offset, x.shape[2:])] for offset in self.offsets()], 2)
        return stacked.reshape(x.shape[0], x.shape[1] * len(self.offsets()), -1)


def _correlate(order: Order, x: Tensor, weight: Tensor, window: _Window, groups: int) -> Tensor:
    """Filters times patches, for each group."""
    outs = []
    for part, filters in zip(x.chunk(groups, 1), weight.chunk(groups), strict=True):
        left = filters.reshape(filters.shape[0], -1).expand(x.shape[0], -1, -1)
        outs.append(_product(order, left, window.patches(part)))
    return torch.cat(outs, 1).reshape(x.shape[0], weight.shape[0], *window.places(x.shape[2:]))


def _spread(order: Order, grad: Tensor, sizes: Sequence[int], weight: Tensor, window: _Window, groups: int) -> Tensor:
    """Transpose of ``_correlate`` in x, with spatial ``sizes``: products of filters and gradients, added by offset."""
    outs = []
    for part, filters in zip(grad.chunk(groups, 1), weight.chunk(groups), strict=True):
        left = filters.reshape(filters.shape[0], -1).t().expand(grad.shape[0], -1, -1)
        columns = _product(order, left, part.reshape(*part.shape[:2], -1))
        columns = columns.reshape(grad.shape[0], weight.shape[1], -1, *part.shape[2:])
        padded = window.padded(grad.new_zeros((grad.shape[0], weight.shape[1], *sizes)))
        for index, offset in enumerate(window.offsets()):
            padded[window.at(offset, sizes)] += columns[:, :, index]
        for dim, (pad, size) in enumerate(zip(window.shape.padding, sizes, strict=True), start=2):
            padded = padded.narrow(dim, pad, size)
        outs.append(padded)
    return torch.cat(outs, 1)


def _filters(order: Order, grad: Tensor, x: Tensor, shape: Sequence[int], window: _Window, groups: int) -> Tensor:
    """Transpose of ``_correlate`` in the filters: one product over samples and places for each group."""
    outs = []
    for gradient, part in zip(grad.chunk(groups, 1), x.chunk(groups, 1), strict=True):
        left = gradient.transpose(0, 1).reshape(gradient.shape[1], -1)
        right = window.patches(part).transpose(1, 2).reshape(left.shape[1], -1)
        outs.append(_mm(order, left, right))
    return torch.cat(outs).reshape(list(shape))


def _convolution(
    order: Order,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    window = _Window(weight.shape[2:], stride, padding, dilation)
    if transposed:
        extra = list(output_padding) * (len(window.kernel) if len(output_padding) == 1 else 1)
        sizes = window.shape.in_size(x.shape[2:], window.kernel, extra)
        out = _spread(order, x, sizes, weight, window, groups)
    else:
        out = _correlate(order, x, weight, window, groups)
    return out if bias is None else out + bias.reshape(-1, *[1] * len(window.kernel))


def _convolution_backward(
    order: Order,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    window = _Window(weight.shape[2:], stride, padding, dilation)
    to_input = to_weight = to_bias = None
    if mask[0] and transposed:
        to_input = _correlate(order, grad, weight, window, groups)
    elif mask[0]:
        to_input = _spread(order, grad, x.shape[2:], weight, window, groups)
    if mask[1]:
        small, large = (x, grad) if transposed else (grad, x)
        to_weight = _filters(order, small, large, weight.shape, window, groups)
    if mask[2]:
        to_bias = _sum(order, grad, [0, *range(2, grad.dim())])
    return to_input, to_weight, to_bias


_OPERATORS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": _product,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "mv": _mv,
    "addmv": _addmv,
    "dot": _dot,
    "_int_mm": _int_mm,
    "sum.dim_IntList": _sum,
    "sum.IntList_out": _sum,
    "sum": _sum,
    "mean.dim": _mean,
    "mean.out": _mean,
    "mean": _mean,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}

_MOVEMENT = frozenset(
    ("contiguous", "expand_as", "flatten", "item", "narrow", "reshape", "resolve_conj", "resolve_neg", "to", "view_as")
)
"""Operators that torch defines by others and that only move or convert values."""


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether torch defines an operator by others, among which there may be products and sums."""
    if func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _MOVEMENT:
        return False
    name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@functools.cache
def _handler(func: OpOverload) -> tuple[Callable[..., Any], bool] | None:
    """What computes an overload in place of the vendor, and whether it writes to its first argument."""
    if func.namespace != "aten":
        return None
    name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
    for base, in_place in ((name, False), (name.removesuffix("_"), name.endswith("_"))):
        found = _OPERATORS.get(f"{base}.{overload}")
        if found is None and overload in ("", "out"):
            found = _OPERATORS.get(base)
        if found is not None:
            return found, in_place
    return None


class EmulatedArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in an emulated order while entered. A session entered later lies above it and calls into it."""

    def __init__(self, name: str) -> None:
        """CPU arithmetic in the order ``name`` of EMULATED; DeviceError where there is no such order."""
        super().__init__()  # type: ignore[no-untyped-call]
        if name not in EMULATED:
            raise DeviceError(f"there is no emulated order {name!r}; known: {', '.join(EMULATED)}")
        self._order = EMULATED[name]()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _handler(func)
        if found is None:
            if not _is_composite(func):
                return func(*args, **kwargs)
            with self:
                return func.decompose(*args, **kwargs)
        places = {value.device.type for value in args if isinstance(value, Tensor)}
        if "meta" in places:
            return func(*args, **kwargs)
        if places != {"cpu"}:
            raise DeviceError(f"an emulated order computes on the CPU only; {func} has operands elsewhere")
        handler, in_place = found
        target = args[0] if in_place else kwargs.pop("out", None)
        result = handler(self._order, *args, **kwargs)
        if target is None:
            return result
        if target.shape != result.shape:
            target.resize_(result.shape)
        return target.copy_(result)


def install_from_environment() -> str | None:
    """Compute as the environment says for the rest of this thread.

    That is in the order that ``ORDER`` names, and on the emulated accelerator where that is the process's accelerator.

    Returns:
        The order's name, or None without one.

    Raises:
        DeviceError: there is no such order, or engines may compute in other threads, where it would not hold.
    """
    name = os.environ.get(ORDER)
    if name is not None:
        if torch.get_num_threads() != 1:
            raise DeviceError("an emulated order of additions works in one thread only; set OMP_NUM_THREADS=1")
        EmulatedArithmetic(name).__enter__()  # type: ignore[no-untyped-call]
    if os.environ.get(ACCELERATOR) == NAME:
        EmulatedAccelerator().__enter__()
    return name
