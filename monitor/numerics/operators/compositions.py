"""Compositions of operators of the table: PyTorch's own, and those that it lacks or has for some devices only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators.indexing import require_places
from monitor.numerics.operators.row import Code, Row

__all__ = [
    "SPELLED",
    "adaptive_average_3d",
    "adaptive_average_3d_backward",
    "addbmm",
    "angle",
    "composition",
    "distances",
    "distances_backward",
    "entered",
    "from_columns",
    "index_copy",
    "index_fill",
    "masked_index",
    "masked_scatter_backward",
    "multilabel_margin",
    "multilabel_margin_backward",
    "next_scale",
    "own_distances",
    "own_distances_backward",
    "renorm",
    "replication_backward",
    "rms_norm",
    "rms_norm_backward",
    "shrink_backward",
    "spell",
    "trilinear",
    "weight_norm_backward",
]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """PyTorch's composition for devices without a kernel, used on all."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    added = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(torch.pow(x, 2).mean(dims, keepdim=True) + added)
    normal = x * inverse
    return (normal if weight is None else normal * weight), inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], inverse: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of that composition, operator by operator as autograd takes them."""
    split = x.dim() - len(shape)
    scaled = grad if weight is None else grad * weight
    slope = (scaled * x).sum(list(range(split, x.dim())), keepdim=True) * -0.5 * inverse.pow(3)
    grad_x = scaled * inverse + torch.div(slope.expand(x.shape), math.prod(shape)) * (x * 2.0)
    grad_weight = None
    if weight is not None and output_mask[1]:
        grad_weight = grad * (x * inverse)
        if split:
            grad_weight = grad_weight.sum(list(range(split)))
    return grad_x if output_mask[0] else None, grad_weight


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of v · g / ‖v‖, the norm over all dimensions but one (Salimans and Kingma 2016, equation 3)."""
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True)
    inner = grad - v * torch.div(along, norms * norms)
    return torch.div(g, norms) * inner, torch.div(along, norms)


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The product of three tensors with dimensions of one added, summed over some dimensions."""
    wide = []
    for each, places in ((a, expand_a), (b, expand_b), (c, expand_c)):
        for place in sorted(places):
            each = each.unsqueeze(place)
        wide.append(each)
    product = wide[0] * wide[1] * wide[2]
    return product.sum(list(summed)) if summed else product


def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """x·beta + alpha·Σ a_i b_i, as one product along all of i and k."""
    return torch.addmm(x, a.transpose(0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2]), beta=beta, alpha=alpha)


def distances(a: Tensor, b: Tensor, order: float = 2.0, _: int | None = None) -> Tensor:
    """Norms of the differences of all rows of two matrices."""
    found: Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), order, -1)
    return found


def _slope_of_norm(grad: Tensor, rest: Tensor, order: float, length: Tensor) -> Tensor:
    """Gradient of a norm of the last dimension; zero where the norm is (PyTorch's convention)."""
    grad, length = grad.unsqueeze(-1), length.unsqueeze(-1)
    if order == 0:
        return torch.zeros_like(grad * rest)
    if order == 1:
        return grad * rest.sign()
    if order == float("inf"):
        return grad * rest.sign() * (rest.abs() == length)
    scaled = rest if order == 2 else rest * rest.abs().pow(order - 2)
    whole = grad * scaled / (length if order == 2 else length.pow(order - 1))
    return torch.where((length == 0) | (rest == 0), torch.zeros_like(whole), whole)


def distances_backward(grad: Tensor, a: Tensor, b: Tensor, order: float, length: Tensor) -> Tensor:
    return _slope_of_norm(grad, a.unsqueeze(-2) - b.unsqueeze(-3), order, length).sum(-2)


def own_distances(x: Tensor, order: float = 2.0) -> Tensor:
    """Norms of the differences of each two rows of a matrix, of the earlier row first."""
    first, second = torch.ones(len(x), len(x), device=x.device).triu(1).nonzero().unbind(1)
    found: Tensor = torch.linalg.vector_norm(x[first] - x[second], order, -1)
    return found


def own_distances_backward(grad: Tensor, x: Tensor, order: float, length: Tensor) -> Tensor:
    first, second = torch.ones(len(x), len(x), device=x.device).triu(1).nonzero().unbind(1)
    slope = _slope_of_norm(grad, x[first] - x[second], order, length)
    return torch.zeros_like(x).index_add(0, first, slope).index_add(0, second, -slope)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Slices go to places along a dimension; of several for one place the last. None is counted from the end."""
    require_places(index, x.shape[dim] if x.dim() else 1)
    if x.dim() == 0:
        return index_copy(x.reshape(1), 0, index.reshape(-1), source.reshape(1)).reshape(())
    places: list[Tensor | None] = [None] * (dim % x.dim()) + [index.reshape(-1)]
    return torch.ops.aten.index_put.default(x, places, source)  # type: ignore[no-any-return]


def index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """A number goes to places along a dimension, which may be counted from the end."""
    wide = x if x.dim() else x.reshape(1)
    places: list[Tensor | None] = [None] * (dim % wide.dim()) + [index.reshape(-1)]
    filling = torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.ops.aten.index_put.default(wide, places, filling).reshape(x.shape)  # type: ignore[no-any-return]


def masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    """Places, from the end if negative and the nearest if outside; where the mask is not, the fill."""
    held = [None if each is None else each.clamp(-size, size - 1) for each, size in zip(indices, x.shape, strict=False)]
    found: Tensor = torch.ops.aten.index.Tensor(x, held)
    return torch.where(mask, found, torch.full((), fill, dtype=x.dtype, device=x.device))


def angle(x: Tensor) -> Tensor:
    """π where a real number is negative, else 0; a NaN stays."""
    turned = torch.where(x < 0, torch.full_like(x, math.pi), torch.zeros_like(x))
    return torch.where(x.isnan(), x, turned)


def from_columns(
    x: Tensor, size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:  # fmt: skip
    """Each place of an image takes the sum of what lies over it in all columns, in no order."""
    batch = x if x.dim() == 3 else x[None]
    height, width = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    channels = batch.shape[1] // (kernel[0] * kernel[1])
    places = torch.arange(height * width, dtype=torch.float32, device=x.device).reshape(1, 1, height, width)
    where = torch.ops.aten.im2col.default(places, kernel, dilation, [0, 0], stride)[0].to(torch.int64)
    flat = batch.reshape(len(batch) * channels, -1)
    out = torch.zeros((len(flat), height * width), dtype=x.dtype, device=x.device)
    out = out.index_add(1, where.reshape(-1), flat).reshape(len(batch), channels, height, width)
    out = out[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]].contiguous()
    return out if x.dim() == 3 else out[0]


def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """Of ``hardshrink`` and ``softshrink``: nothing where −limit ≤ x ≤ limit."""
    return torch.where((x >= -limit) & (x <= limit), torch.zeros_like(grad), grad)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """What went to the mask's places, in their order, and zeros for what was not taken."""
    taken = torch.masked_select(grad, mask)
    rest = torch.zeros(max(torch.Size(sizes).numel() - len(taken), 0), dtype=grad.dtype, device=grad.device)
    return torch.cat([taken, rest]).view(sizes)


def renorm(x: Tensor, order: float, dim: int, limit: float) -> Tensor:
    """Slices along a dimension whose norm is above the limit are scaled to it."""
    others = [each for each in range(x.dim()) if each != dim % x.dim()]
    length = torch.linalg.vector_norm(x, order, others, keepdim=True)
    return x * torch.where(length > limit, limit / (length + 1e-7), torch.ones_like(length))


def _against_labels(rows: Tensor, labels: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels before the first −1; by how much each lies less than 1 above each class; which of these pairs count."""
    given = torch.cumprod((labels >= 0).to(torch.int64), 1) == 1
    chosen = torch.where(given, labels, torch.zeros_like(labels))
    short = 1.0 - torch.gather(rows, 1, chosen).unsqueeze(2) + rows.unsqueeze(1)
    return chosen, short, (short > 0) & given.unsqueeze(2) & (own == 0).unsqueeze(1)


def multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss, and which classes are labels; PyTorch's decomposition counts what lies behind the first −1, too."""
    rows, labels = (each.reshape(-1, x.shape[-1] if x.dim() else 1) for each in (x, target))
    given = torch.cumprod((labels >= 0).to(torch.int64), 1) == 1
    places = torch.arange(rows.shape[1], device=x.device)
    own = (given.unsqueeze(2) & (labels.unsqueeze(2) == places)).any(1).to(x.dtype)
    _, short, counted = _against_labels(rows, labels, own)
    losses = torch.div(torch.where(counted, short, torch.zeros_like(short)).sum([1, 2]), rows.shape[1])
    loss = losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses
    return (loss[0] if reduction == 0 and x.dim() < 2 else loss), own.reshape(target.shape)


def multilabel_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, mine: Tensor) -> Tensor:
    """Each label of a sample against each class that is none of its labels, where they lie less than 1 apart."""
    rows, labels, own = (each.reshape(-1, x.shape[-1] if x.dim() else 1) for each in (x, target, mine))
    chosen, short, counted = _against_labels(rows, labels, own)
    size = rows.shape[1] * (len(rows) if reduction == 1 else 1)
    share = torch.where(counted, torch.full_like(short, 1.0 / size), torch.zeros_like(short))
    pushed = torch.zeros_like(rows).scatter_add(1, chosen, share.sum(2))
    slope = share.sum(1) - pushed
    return (slope * grad.reshape(-1, 1)).reshape(x.shape)


def _cells(x: Tensor, size: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """The place of each cell, and what of x lies in it: places ⌊i·n/m⌋ … ⌈(i+1)·n/m⌉ − 1 of n."""
    for places in itertools.product(*(range(each) for each in size)):
        each = zip(places, size, x.shape[-3:], strict=True)
        yield (..., *places), (..., *(slice(i * n // m, -(-(i + 1) * n // m)) for i, m, n in each))


def adaptive_average_3d(x: Tensor, size: Sequence[int]) -> Tensor:
    """Means over cells that may overlap, one dimension's bounds after another; each cell is one sum."""
    cells = [x[inside].mean([-3, -2, -1]) for _, inside in _cells(x, size)]
    return torch.stack(cells, -1).reshape(*x.shape[:-3], *size)


def adaptive_average_3d_backward(grad: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for place, inside in _cells(x, grad.shape[-3:]):
        area = x[inside].shape[-3:].numel()
        total[inside] += torch.div(grad[place], area)[..., None, None, None]
    return total


def replication_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Each place of x takes the sum of the gradients of its copies."""
    rank = len(padding) // 2
    for axis in range(rank):
        before, after = padding[2 * axis], padding[2 * axis + 1]
        size = x.shape[x.dim() - 1 - axis]
        source = (torch.arange(size + before + after, device=x.device) - before).clamp(0, size - 1)
        shape = list(grad.shape)
        shape[x.dim() - 1 - axis] = size
        grad = torch.zeros(shape, dtype=grad.dtype, device=grad.device).index_add(x.dim() - 1 - axis, source, grad)
    return grad


def next_scale(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> tuple[Tensor, Tensor]:
    """Scale and count of good steps of a gradient scaler after a step, factors applied in FP64 as on a CPU."""
    wide, count, bad = scale.double(), tracker + 1, found != 0
    grown, due = (wide * growth).to(scale.dtype), count == interval
    kept = torch.where(due & torch.isfinite(grown), grown, scale)
    return torch.where(bad, (wide * backoff).to(scale.dtype), kept), torch.where(bad | due, 0, count)


def _update_scale(scale: Tensor, tracker: Tensor, *given: Any) -> Tensor:
    made = torch.ops.aten._amp_update_scale.default(scale, tracker, *given)
    tracker.copy_(made[1])
    return scale.copy_(made[0])


def _unscale(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    for gradient in gradients:
        found.masked_fill_(torch.isfinite(gradient).all().logical_not(), 1.0)
        gradient.mul_(inverse)


def _read(x: Tensor) -> Any:
    return torch.ops.aten._local_scalar_dense.default(x)


SPELLED: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.equal.default: lambda a, b: a.shape == b.shape and _read((a == b).all()),
    torch.ops.aten.allclose.default: lambda *args: _read(torch.ops.aten.isclose.default.decompose(*args).all()),
    torch.ops.aten._trilinear.default: trilinear,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    torch.ops.aten._amp_update_scale_.default: _update_scale,
}
"""Operators that a step never holds, but the calls that they are spelled as: comparisons, the last of which reads a
value (no NaN is equal), a product of three factors, whose work could not be counted by its shapes, and what a gradient
scaler does."""


@contextmanager
def entered(mode: TorchDispatchMode) -> Iterator[None]:
    """While it is open, the calls of a composition come to the session as well."""
    TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]


def spell(mode: TorchDispatchMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """The result of an operator of SPELLED, by calls that come to the session."""
    with entered(mode):
        return SPELLED[func](*args, **kwargs)


def composition(row: Row, func: OpOverload) -> Code | None:
    """Composition of an overload of a ``decomposed`` row: the row's own code, or PyTorch's decomposition.

    An in-place overload without one takes that of the functional overload.
    """
    from torch._decomp import decomposition_table

    _, name, overload = row.name.split(".")
    return (
        row.code
        or decomposition_table.get(func)
        or decomposition_table.get(getattr(getattr(torch.ops.aten, name), overload))
    )
