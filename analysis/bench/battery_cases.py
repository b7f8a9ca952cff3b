"""Inputs and programs of the battery; values come from integers, so that no device makes others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.bench.battery_complex import complex_calls
from analysis.bench.battery_edges import edge_calls, layouts
from analysis.bench.battery_suite import suite_calls
from analysis.bench.battery_values import aten, large, plain, specials

__all__ = ["cases"]


_UNARY = """
neg abs relu sqrt reciprocal exp log log1p expm1 tanh erf erfc sigmoid rsqrt sin cos silu gelu floor ceil trunc round
sign sgn isnan isinf isfinite signbit logical_not leaky_relu elu softplus hardtanh hardswish mish celu clone
"""
_BINARY = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
logical_and logical_or logical_xor rsub.Tensor clamp_min.Tensor clamp_max.Tensor sigmoid_backward tanh_backward
silu_backward gelu_backward hardswish_backward mish_backward
"""
_SCALAR: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("add.Scalar", (0.1, 0.7)),
    ("sub.Scalar", (0.1,)),
    ("rsub.Scalar", (0.1,)),
    ("mul.Scalar", (0.1,)),
    ("mul.Tensor", (0.1,)),
    ("div.Scalar", (3.0,)),
    ("div.Tensor", (3.0,)),
    ("pow.Tensor_Scalar", (2,)),
    ("pow.Tensor_Scalar", (3,)),
    ("pow.Tensor_Scalar", (-1,)),
    ("pow.Tensor_Scalar", (0.5,)),
    ("pow.Tensor_Scalar", (-0.5,)),
    ("pow.Tensor_Scalar", (1.3,)),
    ("clamp", (-1.0, 1.0)),
    ("clamp_min", (0.0,)),
    ("clamp_max", (-0.0,)),
    ("eq.Scalar", (0.5,)),
    ("lt.Scalar", (0.1,)),
    ("le.Scalar", (0.1,)),
    ("gt.Scalar", (0.1,)),
    ("ge.Scalar", (0.1,)),
    ("ne.Scalar", (0.0,)),
)


def _elementwise() -> None:
    for x, y in (specials(), large()):
        for name in _UNARY.split():
            aten(name, x)
        for name in _BINARY.split():
            aten(name, x, y)
        for name, args in _SCALAR:
            aten(name, x, *args)
        aten("threshold_backward", x, y, 0)
        for weight in (0.3, 0.7):
            aten("lerp.Scalar", x, y, weight)
        aten("lerp.Tensor", x, y, y)
        aten("addcmul", x, y, x, value=0.3)
        aten("addcdiv", x, y, x, value=-0.3)
        aten("add.Tensor", x, y, alpha=0.3)
        aten("sub.Tensor", x, y, alpha=-1.7)
        aten("where.self", x > y, x, y)
        aten("masked_fill.Scalar", x, x.isnan(), 0.0)
        for scale, bad in ((3.1, 0.0), (3e38, 0.0), (1e-38, 1.0), (3.1, torch.nan)):
            scaler = torch.tensor(scale), torch.ones((), dtype=torch.int32), torch.tensor(bad)
            aten("_amp_update_scale", *scaler, 1.7, 0.3, 2)
        aten("nan_to_num", x)
        aten("add_.Tensor", x.clone(), y)
        aten("_foreach_mul.Scalar", [x, y], 0.3)
        aten("_foreach_add.List", [x, y], [y, x])
        aten("gelu", x, approximate="tanh")


def _reductions() -> None:
    a, b = large()
    ties = (plain(37, 41, seed=3) * 2.0).round()
    for x in (a, b, a.nan_to_num(0.0, 1.0, -1.0), ties, specials()[0]):
        aten("sum", x)
        aten("mean", x)
        aten("max", x)
        aten("min", x)
        aten("norm.Scalar", x)
        for order in (1, 2, float("inf")):
            aten("linalg_vector_norm", x, order)
            aten("norm.ScalarOpt_dim_dtype", x, order, [0], False, dtype=torch.float32)
        for dim in range(x.dim()):
            for name in ("sum.dim_IntList", "mean.dim", "var.correction", "std.correction", "var_mean.correction"):
                aten(name, x, [dim])
            for name in ("amax", "amin", "logsumexp"):
                aten(name, x, [dim], True)
            for name in ("max.dim", "min.dim", "argmax", "argmin", "sort", "cumsum"):
                aten(name, x, dim)
            aten("_softmax", x, dim, False)
            aten("_log_softmax", x, dim, False)
            aten("_safe_softmax", x, dim)
            aten("topk", x, 5, dim)
        aten("any", x != 0)
        aten("all", x != 0)


def _products() -> None:
    for m, k, n in ((1, 1, 1), (3, 5, 7), (33, 129, 65), (128, 512, 96)):
        a, b = plain(m, k, seed=m), plain(k, n, seed=n)
        aten("mm", a, b)
        aten("mm", b.t(), a.t())
        aten("addmm", plain(n, seed=4), a, b, beta=0.5, alpha=1.5)
        aten("bmm", a.expand(3, m, k), b.expand(3, k, n) * plain(3, 1, 1, seed=5))
        aten("baddbmm", plain(3, m, n), a.expand(3, m, k), b.expand(3, k, n), beta=0.5, alpha=1.5)
        aten("mv", a, b[:, 0])
        aten("dot", a[0], b[:, 0])
    bad = plain(4, 4).clone()
    bad[1, 2], bad[3, 3] = float("inf"), float("nan")
    aten("mm", bad, plain(4, 4))


def _indexing() -> None:
    x, source = plain(50, 9), plain(400, 9, seed=6) * 1e3
    index = torch.arange(400) * 7 % 50
    aten("index_add", x, 0, index, source)
    aten("scatter_add", x, 0, index[:, None].expand(400, 9), source)
    aten("index_put", x, [index], source, True)
    aten("index_put", x, [index[:50]], source[:50], False)
    aten("embedding_dense_backward", source, index, 50, 3, False)
    aten("index.Tensor", x, [index])
    aten("index_select", x, 0, index)
    aten("gather", x, 0, index[:9].reshape(1, 9))
    aten("scatter.value", x, 0, index[:, None], 1.5)
    aten("tril", x)
    aten("triu", x, 1)
    aten("flip", x, [0])
    aten("roll", x, [3], [0])
    aten("cat", [x, x], 1)
    aten("constant_pad_nd", x, [1, 2], 0.5)


def _moves_of(x: Tensor) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Calls that take one tensor first, and their other arguments."""
    return (
        ("alias", ()),
        ("as_strided", ([3, 4], [2, 3], 1)),
        ("diagonal", ()),
        ("unfold", (1, 3, 2)),
        ("narrow", (0, 1, 3)),
        ("movedim.int", (0, 1)),
        ("split.Tensor", (4,)),
        ("split_with_sizes", ([2, 4],)),
        ("unsafe_split.Tensor", (4,)),
        ("unbind.int", ()),
        ("squeeze", ()),
        ("squeeze.dims", ([0],)),
        ("new_full", ([3], 0.1)),
        ("new_zeros", ([3],)),
        ("new_ones", ([3],)),
        ("fill.Tensor", (torch.tensor(0.1),)),
        ("masked_fill.Tensor", (x > 0, torch.tensor(0.1))),
        ("clamp.Tensor", (torch.tensor(-0.5), torch.tensor(0.5))),
        ("any.dim", (1,)),
        ("all.dim", (1,)),
        ("nonzero", ()),
        ("isfinite", ()),
        ("isneginf", ()),
        ("isposinf", ()),
        ("select_scatter", (x[0], 0, 2)),
        ("slice_scatter", (x[:2], 0, 1, 3)),
        ("index_copy", (0, torch.tensor([3, 1]), x[:2])),
        ("index_fill.int_Scalar", (0, torch.tensor([3, 1]), 0.1)),
        ("addr", (x[:, 0], x[0])),
        ("addmv", (plain(6, 5), plain(5))),
        ("logaddexp", (x,)),
        ("sinc", ()),
        ("hardtanh_backward", (x, -1.0, 1.0)),
        ("_softmax_backward_data", (x, 1, torch.float32)),
        ("scatter.src", (0, torch.full((1, 8), 2), x[:1])),
        ("lift_fresh_copy", ()),
    )


def _movement() -> None:
    x, n = plain(6, 8), torch.arange(48).reshape(6, 8)
    for name, args in _moves_of(x):
        aten(name, x[:, 0] if name == "addmv" else x, *args)
    for name, other in (("bitwise_and", 5), ("bitwise_or", 5), ("bitwise_xor", 5), ("remainder", 5), ("fmod", 5)):
        aten(f"{name}.Scalar", n, other)
        aten(f"{name}.Tensor", n, n.flip(0) + 1)
    aten("floor_divide", n, n.flip(0) + 1)
    aten("div.Tensor_mode", n, n.flip(0) + 1, rounding_mode="floor")
    aten("pow.Scalar", 2.5, x)
    aten("pixel_shuffle", x.reshape(1, 4, 3, 4), 2)
    aten("nll_loss2d_forward", x.reshape(1, 3, 4, 4), n[:2].reshape(1, 4, 4) % 3, None, 1, -100)
    aten("embedding", x, n[0] % 6)
    aten("eye", 5)
    aten("sort.stable", x, stable=True)
    aten("arange.start", 3, 9)
    aten("arange.start_step", 3, 90, 7)
    aten("arange.start_step", 0.1, 90, 0.3)
    aten("nll_loss2d_backward", x[0, 0], x.reshape(1, 3, 4, 4), n[:2].reshape(1, 4, 4) % 3, None, 1, -100, x[0, 1])
    aten("slice_backward", x, [12, 8], 0, 2, 8, 1)
    aten("diagonal_copy", x)
    aten("im2col", x[None, None], [2, 2], [1, 1], [0, 0], [1, 1])
    aten("_unsafe_index.Tensor", x, [n[0] % 6])
    aten("_unsafe_index_put", x, [n[0] % 6], x[0], True)
    aten("div.Scalar_mode", n, 5, rounding_mode="trunc")
    aten("pow.Tensor_Tensor", n % 4, n % 3)
    aten("_foreach_copy", [x], [x * 2])
    aten("_foreach_zero", [x])
    aten("_foreach_div.Tensor", [x], torch.tensor(3.0))
    aten("_foreach_mul.Tensor", [x, x[0]], torch.tensor(0.3))
    aten("_foreach_norm.Scalar", [x, x[0]], 2)
    for suffix in ("abs", "exp", "neg", "reciprocal", "rsqrt", "sign", "sqrt"):
        aten(f"_foreach_{suffix}", [x.abs(), x[0].abs()])
    for suffix in ("add", "sub", "mul", "div", "maximum", "minimum"):
        aten(f"_foreach_{suffix}.List", [x, x[0]], [x.flip(0), x[1]])
    for suffix in ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max"):
        aten(f"_foreach_{suffix}.Scalar", [x.abs(), x[0].abs()], 0.3)
    for suffix in ("add", "sub", "mul", "div"):
        aten(f"_foreach_{suffix}.ScalarList", [x, x[0]], [0.3, 0.7])
    for suffix in ("addcmul", "addcdiv"):
        aten(f"_foreach_{suffix}.Scalar", [x], [x], [x.abs()], 0.3)
        aten(f"_foreach_{suffix}.ScalarList", [x], [x], [x.abs()], [0.3])
        aten(f"_foreach_{suffix}.Tensor", [x], [x], [x.abs()], torch.tensor([0.3]))
    aten("_foreach_lerp.List", [x], [x.flip(0)], [x.abs()])
    aten("_foreach_lerp.ScalarList", [x, x[0]], [x.flip(0), x[1]], [0.3, 0.7])


def _randomness() -> None:
    torch.manual_seed(17)
    x = torch.empty(1001)
    x.uniform_(-1.0, 2.0)
    x.normal_(0.5, 2.0)
    x.bernoulli_(0.3)
    torch.rand(33)
    torch.randn(1003)
    torch.randint(-5, 50, (77,))
    torch.randperm(101)
    for name, args in (("randn_like", ()), ("rand_like", ()), ("bernoulli.p", (0.4,))):
        aten(name, x, *args)
    aten("bernoulli", x.abs() * 0.1)
    aten("native_dropout_backward", x, x > 0, 1.25)
    x.random_(5)
    x.random_(-3, 5)
    aten("native_dropout", plain(501), 0.2, True)


def _edges() -> None:
    """Special values, empty matrices, strides of zero and others, results in place and in ``out=``."""
    special, other = specials()
    x, y = special[:15].reshape(3, 5), other[20:35].reshape(3, 5)
    pairs = [(x, y), (x[:1].expand(3, 5), y[:1].expand(3, 5)), (x[:, :1].expand(3, 5), y[:, 3:4].expand(3, 5))]
    pairs += [(layouts(x)[name], layouts(y)[name]) for name in ("columns", "strided")]
    pairs += [(x[:rows, :columns], y[:rows, :columns]) for rows, columns in ((1, 1), (0, 3), (3, 0), (0, 0))]
    for a, b in pairs:
        for name, args, kwargs in edge_calls(a, b):
            with contextlib.suppress(RuntimeError, IndexError, ValueError):
                aten(name, *args, **kwargs)
    for value in special[:32]:
        for name in ("exp", "log", "neg", "sum", "mean", "gelu", "reciprocal"):
            aten(name, value)
        aten("mul.Tensor", value, other[0])
        aten("_log_softmax", value, 0, False)
    aten("repeat", x, [2, 3])
    for name in ("add_.Tensor", "mul_.Tensor", "div_.Tensor", "sub_.Tensor"):
        aten(name, layouts(x)["columns"], y)
    torch.add(x, y, alpha=0.3, out=torch.zeros(5, 3).t())
    torch.sum(x, dim=1, out=torch.empty(3))
    torch.mm(x, y.t(), out=torch.empty(3, 3))
    torch.max(x, 1, out=(torch.empty(3), torch.empty(3, dtype=torch.int64)))


def _every_half(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All 65,536 numbers of a half-precision type, and the same in another order."""
    values = torch.arange(1 << 16, dtype=torch.int32) - (1 << 15)
    return tuple(v.to(torch.int16).view(dtype) for v in (values, (values * 40503 + 7).to(torch.int16)))  # type: ignore[return-value]


_HALF_UNARY = "neg abs relu sqrt reciprocal exp tanh sigmoid silu gelu round sign isnan signbit hardswish clone"
_HALF_BINARY = "add.Tensor mul.Tensor div.Tensor maximum minimum eq.Tensor lt.Tensor clamp_min.Tensor silu_backward"


def _half(dtype: torch.dtype) -> None:
    x, y = _every_half(dtype)
    single, _ = specials()
    for name in _HALF_UNARY.split():
        aten(name, x)
    for name in _HALF_BINARY.split():
        aten(name, x, y)
    for name in (
        "add.Tensor",
        "mul.Scalar",
        "eq.Scalar",
        "gt.Scalar",
        "clamp_max",
        "masked_fill.Scalar",
        "fill.Scalar",
    ):
        aten(name, x, *((x > 1,) if name == "masked_fill.Scalar" else ()), 0.1)
    aten("_to_copy", single, dtype=dtype)
    aten("_to_copy", x, dtype=torch.float32)
    aten("_to_copy", single.to(torch.float64) * (1 + 2.0**-30), dtype=dtype)
    aten("copy_", x.clone(), plain(1 << 16, seed=50))
    aten("where.self", x > y, x, y)
    aten("where.self", x.isnan(), y, plain(1 << 16, seed=51))
    aten("cat", [x, y.nan_to_num().to(torch.float32)])
    aten("constant_pad_nd", x, [1, 2], 0.1)
    aten("full_like", x, 0.1)
    aten("index_select", x, 0, torch.arange(0, 1 << 16, 37))
    aten("addcmul", x, y, x, value=0.3)
    aten("mul_.Tensor", x.clone(), y)
    aten("_foreach_add_.List", [x.clone(), y.clone()], [y, x], alpha=0.3)
    grid = (x.nan_to_num(0.0, 1.0, -1.0) * 2.0**-8).reshape(256, 256)
    for name in ("sum.dim_IntList", "mean.dim", "var.correction", "amax"):
        aten(name, x.reshape(256, 256), [1])
    for name in ("cumsum", "max.dim", "argmin"):
        aten(name, x.reshape(256, 256), 1)
    aten("_softmax", grid, 1, False)
    aten("_log_softmax", grid, 0, False)
    aten("mm", grid, grid.t())
    aten("embedding_dense_backward", grid, torch.arange(256) % 40, 40, 3, False)
    aten("index_put", grid, [torch.arange(256) % 40], grid, True)


def _half_training(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8)
    )
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(plain(*parameter.shape, seed=seed) * 0.5)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)
    out = model(plain(5, 3, 6, 6, seed=60).to(dtype))
    torch.autograd.backward(F.cross_entropy(out, torch.arange(5)) + _attend(out.reshape(1, 1, 5, 8)))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()


_MODULES: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), (3, 4, 9, 8)),
    (lambda: nn.Conv2d(3, 5, (3, 2), dilation=2), (2, 3, 10, 9)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    (lambda: nn.LayerNorm((3, 6)), (4, 3, 6)),
    (lambda: nn.RMSNorm(6), (4, 6)),
    (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    (lambda: nn.BatchNorm1d(6).eval(), (4, 6)),
    (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 9, 9)),
    (lambda: nn.AvgPool2d(3, 2, 1), (2, 3, 9, 9)),
    (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 3, 7, 8)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.ELU(), nn.Softplus(), nn.LeakyReLU()), (5, 6)),
    (lambda: nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=1, dilation=(1, 1, 2), groups=2), (2, 4, 4, 6, 5)),
    (lambda: nn.ConvTranspose3d(4, 2, 2, stride=2, output_padding=1), (2, 4, 3, 3, 2)),
    (lambda: nn.MaxPool3d(2, 1), (2, 3, 4, 5, 4)),
    (lambda: nn.AvgPool3d(2, ceil_mode=True, count_include_pad=False, padding=1), (2, 3, 5, 5, 4)),
    (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 9)),
    (lambda: nn.AdaptiveMaxPool2d((3, 2)), (2, 3, 7, 8)),
    (lambda: nn.Upsample(scale_factor=1.7), (2, 3, 5)),
    (lambda: nn.Upsample(size=(7, 3)), (2, 3, 5, 4)),
    (lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 2, 3)),
    (lambda: nn.Upsample(size=7, mode="nearest-exact"), (2, 3, 5)),
    (lambda: nn.Upsample(size=(7, 3), mode="nearest-exact"), (2, 3, 5, 4)),
    (lambda: nn.Upsample(size=(2, 7, 3), mode="nearest-exact"), (1, 2, 3, 5, 4)),
    (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), (2, 3, 5)),
    (lambda: nn.Upsample(size=(7, 3), mode="bilinear"), (2, 3, 5, 4)),
    (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (2, 3, 5, 4)),
    (lambda: nn.Upsample(size=(7, 3, 5), mode="trilinear"), (1, 2, 5, 4, 3)),
    (lambda: nn.Upsample(size=(7, 3), mode="bicubic"), (2, 3, 5, 4)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5), dim=1), (4, 6)),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (8, 1, 1)), nn.PReLU(8), nn.PixelShuffle(2)), (4, 6)),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.LogSigmoid(), nn.Hardsigmoid(), nn.GELU("tanh")), (5, 6)),
)


def _attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=True).sum()


def _temporal(x: Tensor) -> Tensor:
    return F.ctc_loss(x, torch.tensor([[1, 2], [3, 3]]), torch.tensor([3, 2]), torch.tensor([2, 1]), reduction="sum")


def _experts(x: Tensor) -> Tensor:
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    rows, square = F.pad(x, (0, 2)), F.pad(x, (0, 2, 0, 2))  # native kernels take rows of whole 16 bytes
    weights = torch.stack([square, square * 2, square - 1])
    return (torch._grouped_mm(rows, weights, ends) * rows).sum()


def _bags(x: Tensor, mode: str) -> Tensor:
    ids, starts = torch.tensor([1, 4, 1, 0, 5, 5, 2]), torch.tensor([0, 3, 3, 5])
    weights = x[0].detach().abs().repeat(2)[:7].requires_grad_() if mode == "sum" else None
    return (F.embedding_bag(ids, x, starts, mode=mode, per_sample_weights=weights, padding_idx=5) * x[:4]).sum()


_LOSSES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: F.cross_entropy(x, torch.tensor([0, 1, -100, 3, 2, 1]), label_smoothing=0.1),
    lambda x: F.nll_loss(x.log_softmax(-1), torch.arange(6), reduction="sum"),
    lambda x: F.mse_loss(x, x.detach() * 0.5),
    lambda x: F.l1_loss(x, x.detach() + 0.25),
    lambda x: F.huber_loss(x, x.detach() * 0.2),
    lambda x: F.smooth_l1_loss(x, x.detach() * 3),
    lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.25)),
    lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.25)),
    lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 6), reduction="sum"),
    lambda x: _attend(x.reshape(1, 2, 3, 6)),
    lambda x: _temporal(x.reshape(3, 2, 6).log_softmax(2)),
    lambda x: torch.ctc_loss(x.reshape(6, 1, 6).log_softmax(2), torch.tensor([4, 4, 1]), [5], [3], 2),
    lambda x: x.sum() * F.embedding_bag(torch.tensor([1, 4, 1]), x.detach(), torch.tensor([0, 2])).sum(),
    lambda x: _experts(x),
    lambda x: _bags(x, "sum"),
    lambda x: _bags(x, "mean"),
    lambda x: _bags(x, "max"),
    lambda x: (
        x.prod() + x.prod(0).sum() + x.cumprod(1).sum() + x.norm(2, dim=1).sum() + torch.vdot(x[0].abs(), x[1].abs())
    ),
    lambda x: x.sum() * (torch.histc(x.detach(), 5, -1, 1).sum() + torch.aminmax(x.detach(), dim=0)[1].sum()),
    lambda x: x.sum() * torch.aminmax(x.detach())[0] * torch.histc(x.detach(), 4)[1],
    lambda x: (
        x.sum() * (x.detach() * 1e30).to(torch.int32).sum().float() * (x / x.detach()).log().to(torch.int64).sum()
    ),
    lambda x: F.multi_margin_loss(x, torch.arange(6)),
    lambda x: F.multi_margin_loss(x, torch.arange(6), p=2, margin=0.3, weight=x[0].detach().abs(), reduction="sum"),
    lambda x: (x.abs() + 0.1).pow(x.flip(0)).sum(),
    lambda x: F.normalize(x).sum() + torch.einsum("ij,kj->ik", x, x).mean() + x.cumsum(0).mean(),
)

_OPTIMIZERS: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
    lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=False),
)


def _module(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = make()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(plain(*parameter.shape, seed=seed) * 0.5)
    x = plain(*shape, seed=40).requires_grad_()
    out = module(x)
    torch.autograd.backward(out, plain(*out.shape, seed=41))


def _loss(function: Callable[[Tensor], Tensor]) -> None:
    torch.autograd.backward(function(plain(6, 6, seed=42).requires_grad_()))


def _optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(plain(1003, seed=43))
    optimizer = make([parameter])
    for step in range(2):
        parameter.grad = plain(1003, seed=44 + step)
        nn.utils.clip_grad_norm_([parameter], 1.0, foreach=False)
        optimizer.step()


def _suite() -> None:
    x, y = specials()
    suite_calls(aten, x, y, plain(8, 8, seed=50))


def _complex() -> None:
    x, y = specials()
    complex_calls(aten, x, y, plain(8, 8, seed=51))


def cases() -> Iterator[Callable[[], None]]:
    """Programs, each to be run in its own session; the inputs that they share are made outside of one."""
    specials(), large()
    yield from (_elementwise, _reductions, _products, _indexing, _movement, _randomness, _edges, _suite, _complex)
    for dtype in (torch.bfloat16, torch.float16):
        yield functools.partial(_half, dtype)
        yield functools.partial(_half_training, dtype)
    for make, shape in _MODULES:
        yield functools.partial(_module, make, shape)
    for loss in _LOSSES:
        yield functools.partial(_loss, loss)
    for optimizer in _OPTIMIZERS:
        yield functools.partial(_optimizer, optimizer)
