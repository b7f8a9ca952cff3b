"""Direct forms give the bits of the operator table's rows, for every kind of number, shape and layout, or decline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from firmware_sim.errors import CallerError, DeviceError
from monitor.numerics import recording
from monitor.numerics.engines.cpu.exact.philox import fill_mask
from monitor.numerics.engines.cpu.fused import norm_kernels as _norm_kernels
from monitor.numerics.engines.cpu.fused import softmax_kernels as _softmax_kernels
from monitor.numerics.engines.cpu.fused.elementwise import is_plain, overlaps_partly
from monitor.numerics.exact import philox

_aten = torch.ops.aten
_SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    float("inf"),
    float("-inf"),
    1e-45,
    -1e-45,
    1.1754944e-38,
    3.4028235e38,
    -3.4028235e38,
)
_NANS = (0x7FC00000, -0x00400000, 0x7F800001, 0x7FC12345)


def _numbers(*shape: int, seed: int = 0, special: bool = True) -> Tensor:
    """Gaussian numbers of many sizes; every third one is special, among them NaNs of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    if not special:
        return x
    bits = torch.tensor(_SPECIAL).view(torch.int32).tolist() + list(_NANS)
    pool = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    drawn = pool[torch.randint(0, len(pool), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 1 / 3, drawn, x)


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
        return value.contiguous().view(integers[value.dtype]) if value.dtype in integers else value
    return [_bits(one) for one in value] if isinstance(value, list | tuple) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return one is other or bool(one == other)


def _run(numerics: str, call: Callable[..., Any], arguments: tuple[Any, ...], direct: bool) -> tuple[Any, Any, Any]:
    """(result, arguments afterwards, counts) of a call on copies of its tensors, with direct forms or without."""
    copies = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
    with recording(numerics) as session:
        if not direct:
            session._fused = {}
        out = call(*copies)
    return out, copies, session.statistics.operators


def _agree(call: Callable[..., Any], *arguments: Any, numerics: str = "exact") -> None:
    fast, fast_arguments, fast_counts = _run(numerics, call, arguments, True)
    slow, slow_arguments, slow_counts = _run(numerics, call, arguments, False)
    assert _same(fast, slow)
    assert _same(fast_arguments, slow_arguments)
    assert fast_counts == slow_counts
    strides = [
        [x.stride() for x in (out if isinstance(out, tuple) else (out,)) if x is not None] for out in (fast, slow)
    ]
    assert strides[0] == strides[1]


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


_SHAPES = ((), (0,), (1,), (3, 5), (257,), (2, 3, 131))
_BINARY = ("add", "sub", "mul", "div")
_CONSTANTS = (0.1, -3, 0, 1e-30, 2.0**60, float("nan"), float("inf"))


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_two_tensors_or_a_tensor_and_a_number(shape: tuple[int, ...], numerics: str) -> None:
    x, y = _numbers(*shape, seed=1), _numbers(*shape, seed=2)
    for name in _BINARY:
        for suffix in ("", "_"):
            packet = getattr(_aten, name + suffix)
            _agree(packet.Tensor, x, y, numerics=numerics)
            for constant in _CONSTANTS:
                _agree(packet.Scalar, x, constant, numerics=numerics)
                _agree(packet.Tensor, x, constant, numerics=numerics)
    for constant in _CONSTANTS:
        _agree(lambda x, y, c=constant: _aten.add.Tensor(x, y, alpha=c), x, y, numerics=numerics)
        _agree(lambda x, y, c=constant: _aten.add_.Tensor(x, y, alpha=c), x, y, numerics=numerics)
        _agree(_aten.rsub.Scalar, x, constant, numerics=numerics)


def test_numbers_that_fp32_does_not_hold_are_left_to_the_row() -> None:
    x = _numbers(50, seed=1)
    _agree(_aten.mul.Tensor, x, 1e40)
    _agree(_aten.mul.Tensor, x, 2**53 + 1)
    _agree(_aten.add.Scalar, x, (1 << 60) + (1 << 36) + 1)
    with pytest.raises(RuntimeError, match="overflow"), recording("exact"):
        x.lerp_(x, 1e40)


@pytest.mark.parametrize("shape", _SHAPES)
def test_operators_of_optimizers(shape: tuple[int, ...]) -> None:
    x, a, b = (_numbers(*shape, seed=seed) for seed in range(3))
    for suffix in ("", "_"):
        for weight in (0.1, -0.3, 0.5, 0.9, 1.0, 2.5):
            _agree(getattr(_aten, f"lerp{suffix}").Scalar, x, a, weight)
        for name in ("addcmul", "addcdiv"):
            packet = getattr(_aten, name + suffix)
            _agree(packet.default, x, a, b)
            for value in (1, 1.0, -0.01, 0.999, 3):
                _agree(lambda x, a, b, p=packet, v=value: p.default(x, a, b, value=v), x, a, b)
        for name in ("sqrt", "reciprocal", "relu"):
            _agree(getattr(_aten, name + suffix).default, x)
    for name in ("neg", "abs"):
        _agree(getattr(_aten, name).default, x)
    _agree(_aten.threshold_backward.default, x, a, 0)
    _agree(_aten.copy_.default, x, a)


@pytest.mark.parametrize("shape", _SHAPES)
def test_slopes_of_activations(shape: tuple[int, ...]) -> None:
    grad, x = _numbers(*shape, seed=3), _numbers(*shape, seed=4)
    for name in ("sigmoid_backward", "tanh_backward", "silu_backward", "gelu_backward"):
        _agree(getattr(_aten, name).default, grad, x)
    _agree(lambda g, x: _aten.gelu_backward.default(g, x, approximate="tanh"), grad, x)


def test_pieces_of_several_threads(threads: int) -> None:
    x, a, b = (_numbers(300_001, seed=seed) for seed in range(3))
    _agree(_aten.addcdiv_.default, x, a, b)
    _agree(_aten.mul.Tensor, x, a)
    _agree(_aten.relu.default, x)
    _agree(_aten.gelu_backward.default, x, a)


def test_an_operand_may_be_the_target_itself() -> None:
    x, a = _numbers(1001, seed=5), _numbers(1001, seed=6)
    _agree(lambda x: x.mul_(x), x)
    _agree(lambda x: x.addcmul_(x, x, value=0.3), x)
    _agree(lambda x, a: a.addcdiv_(x, x, value=0.3), x, a)
    _agree(lambda x: x.copy_(x), x)


def test_operands_that_overlap_partly_are_declined() -> None:
    memory = _numbers(100, seed=7)
    x, y = memory[1:], memory[:-1]
    assert all(map(is_plain, (x, y)))
    assert overlaps_partly(x, y)
    _agree(lambda m: m[1:].lerp_(m[:-1], 0.3), memory)
    assert not overlaps_partly(memory[:50], memory[50:])


def test_other_layouts_and_types_take_the_row() -> None:
    x, y = _numbers(6, 8, seed=8), _numbers(8, 6, seed=9)
    _agree(lambda x, y: x + y.t(), x, y)
    _agree(lambda x, y: x.t().mul_(y), x, y)
    _agree(lambda x, y: x * y[:, 0], x, y)
    _agree(lambda x, y: x.div_(y[:, :1].t()), x, y)
    _agree(lambda x, y: x[:, ::2] - y.t()[:, ::2], x, y)
    _agree(lambda x, _: x * torch.tensor(0.1, dtype=torch.float64), x, y)
    _agree(lambda x, _: x.add_(torch.arange(8)), x, y)
    _agree(lambda x, y: x.copy_(y.t().double()), x, y)
    _agree(lambda x, y: (x > 0) * y.t(), x, y)
    _agree(lambda x, y: x.bfloat16() + y.t().bfloat16(), x, y)
    _agree(lambda x, _: x.to(torch.float64) * 3.0, x, y)


def _rows(rows: int, width: int) -> Tensor:
    """Rows with every kind of extreme: ordinary, equal, masked, all masked, infinite, with a NaN, all zeros."""
    x = _numbers(rows, width, seed=10, special=False).clamp(-30, 30)
    x[1] = 0.25
    x[2, 1:] = float("-inf")
    x[3] = float("-inf")
    x[4, 0] = float("inf")
    x[5, -1] = float("nan")
    x[6] = -0.0
    x[7, 0] = torch.tensor(-0x00400000, dtype=torch.int32).view(torch.float32)
    x[8] = torch.linspace(-200, 200, width)
    return x


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1500])
def test_softmax(width: int) -> None:
    x = _rows(40, width)
    grad = _numbers(40, width, seed=11)
    for name in ("_softmax", "_log_softmax"):
        _agree(getattr(_aten, name).default, x, 1, False)
        _agree(getattr(_aten, name).default, x, -1, False)
        _agree(getattr(_aten, name).default, x, 0, False)
        _agree(getattr(_aten, name).default, x.reshape(5, 8, width), 2, False)
        y = getattr(_aten, name).default(x, 1, False)
        slope = getattr(_aten, f"{name}_backward_data").default
        _agree(slope, grad, y, 1, torch.float32)
        _agree(slope, grad, y, 0, torch.float32)


@pytest.mark.parametrize("form", ["_softmax", "_log_softmax"])
def test_rows_that_a_kernel_leaves_undecided_are_taken_from_the_row(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = _rows(20, 50), _numbers(20, 50, seed=12, special=False)
    y = getattr(_aten, form).default(x, 1, False)

    def blind(begin: int, end: int, *arguments: Any) -> None:
        arguments[-1][begin:end] = True

    for kernel in ("softmax_rows", "log_softmax_rows", "softmax_slope_rows", "log_softmax_slope_rows"):
        monkeypatch.setattr(_softmax_kernels, kernel, blind)
    _agree(getattr(_aten, form).default, x, 1, False)
    _agree(getattr(_aten, f"{form}_backward_data").default, grad, y, 1, torch.float32)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(special: bool, affine: bool) -> None:
    for shape, inner in (((7, 33), (33,)), ((2, 5, 1200), (1200,)), ((3, 4, 6), (4, 6)), ((5, 1), (1,)), ((9,), (9,))):
        x, grad = _numbers(*shape, seed=13, special=special), _numbers(*shape, seed=14, special=special)
        weight, bias = (_numbers(*inner, seed=15), _numbers(*inner, seed=16)) if affine else (None, None)
        _agree(_aten.native_layer_norm.default, x, list(inner), weight, bias, 1e-5)
        _, centre, scale = _aten.native_layer_norm.default(x, list(inner), weight, bias, 1e-5)
        slope = _aten.native_layer_norm_backward.default
        for mask in ([True, affine, affine], [False, affine, False], [True, False, affine]):
            _agree(slope, grad, x, list(inner), centre, scale, weight, bias, mask)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm(special: bool, affine: bool) -> None:
    for shape in ((6, 5), (4, 3, 7, 9), (2, 3, 40, 40)):
        x, grad = _numbers(*shape, seed=17, special=special), _numbers(*shape, seed=18, special=special)
        if special:
            x[:, 0] = torch.randn(x[:, 0].shape, generator=torch.Generator().manual_seed(19))
        channels = shape[1]
        weight, bias = (_numbers(channels, seed=20), _numbers(channels, seed=21)) if affine else (None, None)
        running = (torch.zeros(channels), torch.ones(channels))
        _agree(_aten.native_batch_norm.default, x, weight, bias, *running, True, 0.1, 1e-5)
        _agree(_aten.native_batch_norm.default, x, weight, bias, None, None, True, 0.1, 1e-5)
        _agree(_aten.native_batch_norm.default, x, weight, bias, *running, False, 0.1, 1e-5)
        _, saved, scale = _aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)
        for mask in ([True, affine, affine], [False, affine, affine]):
            arguments = (grad, x, weight, *running, saved, scale, True, 1e-5, mask)
            _agree(_aten.native_batch_norm_backward.default, *arguments)


def test_a_norm_with_an_undecided_sum_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in _norm_kernels.__all__:
        monkeypatch.setattr(_norm_kernels, kernel, lambda begin, end, *_: 1)
    x, weight, bias = _numbers(6, 5, seed=22), _numbers(5, seed=23), _numbers(5, seed=24)
    _agree(_aten.native_layer_norm.default, x, [5], weight, bias, 1e-5)
    _, centre, scale = _aten.native_layer_norm.default(x, [5], weight, bias, 1e-5)
    arguments = (x, x, [5], centre, scale, weight, bias, [True, True, True])
    _agree(_aten.native_layer_norm_backward.default, *arguments)
    running = (torch.zeros(5), torch.ones(5))
    _agree(_aten.native_batch_norm.default, x, weight, bias, *running, True, 0.1, 1e-5)
    slope = _aten.native_batch_norm_backward.default
    _agree(slope, x, x, weight, *running, weight, bias, True, 1e-5, [True, True, True])


def test_addmm() -> None:
    a, b, bias = _numbers(9, 17, seed=25, special=False), _numbers(17, 6, seed=26, special=False), _numbers(6, seed=27)
    _agree(_aten.addmm.default, bias, a, b)
    _agree(_aten.addmm.default, _numbers(9, 6, seed=28), a, b)
    _agree(lambda bias, a, b: _aten.addmm.default(bias, a, b, beta=0.5), bias, a, b)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_loss_over_classes(rows: int) -> None:
    target = torch.tensor([0, 5, 2, -100, 1, 1, 3, 4, 0])[:rows]
    for seed in range(3):
        x = _numbers(rows, 6, seed=29 + seed, special=seed > 0)
        for reduction in (0, 1, 2):
            grad = _numbers(rows, seed=30) if reduction == 0 else torch.tensor(float("nan") if seed == 2 else 0.7)
            for weight in (None, _numbers(6, seed=31)):
                for ignored in (-100, 1):
                    kept = target.where(target != -100, 2) if ignored == 1 else target
                    _agree(_aten.nll_loss_forward.default, x, kept, weight, reduction, ignored)
                    mass = torch.tensor(float(rows))
                    _agree(_aten.nll_loss_backward.default, grad, x, kept, weight, reduction, ignored, mass)


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40])
def test_a_class_out_of_range_is_refused(bad: int) -> None:
    x, target = torch.zeros(3, 6), torch.tensor([0, bad, 1])
    with pytest.raises(IndexError, match="outside the classes"), recording("exact"):
        _aten.nll_loss_forward.default(x, target, None, 1, -100)
    with pytest.raises(IndexError, match="outside the classes"), recording("exact"):
        _aten.nll_loss_backward.default(torch.tensor(1.0), x, target, None, 1, -100, torch.tensor(3.0))


@pytest.mark.parametrize("special", [False, True])
def test_max_pooling(special: bool) -> None:
    x = _numbers(2, 3, 9, 11, seed=32, special=False)
    for kernel, stride, padding in (([2, 2], [2, 2], [0, 0]), ([3, 3], [1, 1], [1, 1]), ([3, 2], [2, 1], [1, 0])):
        out, index = _aten.max_pool2d_with_indices.default(x, kernel, stride, padding)
        grad = _numbers(*out.shape, seed=33, special=special)
        arguments = (x, kernel, stride, padding, [1, 1], False)
        _agree(_aten.max_pool2d_with_indices_backward.default, grad, *arguments, index)
        # Whole numbers sum to ties and cancel.
        _agree(_aten.max_pool2d_with_indices_backward.default, grad.nan_to_num(0, 0, 0).round(), *arguments, index)
    index[0, 0, 0, 0] = 1 << 50
    with pytest.raises(CallerError, match="out of bounds"), recording("exact"):
        _aten.max_pool2d_with_indices_backward.default(grad, *arguments, index)


def test_shapes_that_do_not_fit_never_reach_a_kernel() -> None:
    x, short = _numbers(4, 6, 5, seed=34), torch.ones(3)
    with recording("exact"):
        calls: tuple[Callable[[], Any], ...] = (
            lambda: _aten.native_layer_norm_backward.default(x, x, [7], short, short, None, None, [True, True, True]),
            lambda: _aten.native_batch_norm.default(x, short, None, None, None, True, 0.1, 1e-5),
            lambda: _aten.native_batch_norm_backward.default(
                x, x, None, None, None, short, short, True, 1e-5, [True, True, True]
            ),
            lambda: _aten._softmax_backward_data.default(x, x[:2], 2, torch.float32),
            lambda: _aten.addmm.default(short, x[0], x[0].t()),
        )
        for call in calls:
            with pytest.raises(RuntimeError):
                call()


@pytest.mark.parametrize("count", [0, 1, 5, 1023, 4096, 300_001])
def test_dropout_masks_are_the_words_of_the_stream(count: int) -> None:
    for p in (0.0, 0.1, 0.9, 1.0):
        out = torch.full((count,), float("nan"))
        fill_mask(out, 77, 5, int(p * 2.0**32))
        assert torch.equal(out, (philox.bits(77, 5, count) < int(p * 2.0**32)).float())
    torch.manual_seed(count)
    state = torch.get_rng_state()
    fast = _run("exact", lambda x: x.bernoulli_(0.3), (torch.zeros(count),), True)[0]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert torch.equal(fast, _run("exact", lambda x: x.bernoulli_(0.3), (torch.zeros(count),), False)[0])
    assert torch.equal(after, torch.get_rng_state())


def test_autograd_still_sees_what_was_overwritten() -> None:
    x = torch.ones(4, requires_grad=True)
    with recording("exact"):
        y = x * 2.0
        z = y * y
        with torch.no_grad():
            y.mul_(3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(z.sum())


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormals")
    try:
        for call in (lambda x: x * x, lambda x: x.mul_(2.0), lambda x: torch.softmax(x, 0), lambda x: torch.relu(x)):
            with pytest.raises(DeviceError, match="flushes subnormal"), recording("exact"):
                call(torch.ones(3))
    finally:
        torch.set_flush_denormal(False)


def test_exact_numerics_have_the_most_fused_kernels_and_native_ones_none() -> None:
    kernels = {name: set(recording(name)._fused) for name in ("exact", "rounded", "native")}
    assert not kernels["native"]
    assert kernels["rounded"] < kernels["exact"]
    assert len(kernels["rounded"]) > 30
    assert torch.ops.aten.sqrt_.default in kernels["rounded"]
    assert torch.ops.aten._softmax.default in kernels["exact"]
