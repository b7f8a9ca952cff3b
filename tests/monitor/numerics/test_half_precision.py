"""BF16 and FP16 operands: the FP32 operator on widened operands, each result rounded once; equal on every device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from analysis.bench.battery_edges import edge_calls
from inspector.devices import DEVICES
from monitor.numerics import UnsupportedOperator, execute, recording
from monitor.numerics.operators import operator_table
from monitor.numerics.reference.matmul import matmul_by_integers

BACKENDS = ("rounded", "exact")
TYPES = (torch.bfloat16, torch.float16)
SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}
NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def bits(x: Tensor) -> list[int]:
    return [value & 0xFFFF for value in x.contiguous().reshape(-1).view(torch.int16).tolist()]


def from_bits(values: list[int], dtype: torch.dtype) -> Tensor:
    signed = [value - (1 << 16) if value >> 15 else value for value in values]
    return torch.tensor(signed, dtype=torch.int16).view(dtype)


def rounded_once(x: Tensor, dtype: torch.dtype) -> list[int]:
    """Bits of FP32 values rounded to nearest even in rational numbers, one after the other."""
    out = []
    finest = SMALLEST_EXPONENT[dtype] - SIGNIFICAND[dtype] + 1
    largest = Fraction(float(torch.finfo(dtype).max))
    for value, negative in zip(x.reshape(-1).tolist(), torch.signbit(x).reshape(-1).tolist(), strict=True):
        sign = 0x8000 if negative else 0
        if value != value:
            out.append(NAN[dtype])
            continue
        if abs(value) == float("inf"):
            out.append(sign | bits(torch.tensor(float("inf"), dtype=dtype))[0])
            continue
        exact = abs(Fraction(value))
        exponent = finest
        while exact / Fraction(2) ** exponent >= 1 << SIGNIFICAND[dtype]:
            exponent += 1
        near = Fraction(round(exact / Fraction(2) ** exponent)) * Fraction(2) ** exponent
        out.append(sign | bits(torch.tensor(float("inf") if near > largest else float(near), dtype=dtype))[0])
    return out


def run(numerics: str, operator: str, *args: Any, **kwargs: Any) -> Any:
    return execute(numerics, f"aten.{operator}", args, kwargs, entries=None)


patterns = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC1, 0x7F7F, 0x7BFF, 0x0080, 0x3F80]),
)

UNARY = """
exp log log1p expm1 tanh erf erfc sigmoid rsqrt sin cos silu gelu sqrt reciprocal neg abs relu round leaky_relu softplus
elu hardswish mish
"""
BINARY = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default tanh_backward.default
sigmoid_backward.default silu_backward.default gelu_backward.default
"""


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(patterns, patterns), min_size=1, max_size=60), st.sampled_from(TYPES))
def test_elementwise_operators_round_their_fp32_result_once(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    x, y = from_bits([a for a, _ in pairs], dtype), from_bits([b for _, b in pairs], dtype)
    calls: list[tuple[str, tuple[Any, ...]]] = [(f"{name}.default", (x,)) for name in UNARY.split()] + [
        (name, (x, y)) for name in BINARY.split()
    ]
    calls += [("mul.Tensor", (x, 0.1)), ("add.Tensor", (x, 1e-3)), ("pow.Tensor_Scalar", (x, 1.3))]
    calls += [("lerp.Scalar", (x, y, 0.3)), ("addcmul.default", (x, y, x)), ("addcdiv.default", (x, y, x))]
    for operator, args in calls:
        wide = [value.float() if isinstance(value, Tensor) else value for value in args]
        out = run("exact", operator, *args)
        assert out.dtype == dtype
        assert bits(out) == rounded_once(run("exact", operator, *wide), dtype), operator


def wide(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(wide(one) for one in value)
    return value.float() if isinstance(value, Tensor) and value.dtype in TYPES else value


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value for one in leaves(part)]


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_every_class_of_operators_rounds_its_fp32_results_once(data: st.DataObject, dtype: torch.dtype) -> None:
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    drawn = data.draw(st.lists(patterns, min_size=2 * rows * columns, max_size=2 * rows * columns))
    x, y = from_bits(drawn, dtype).reshape(2, rows, columns)
    seen = set()
    for name, args, kwargs in edge_calls(x, y):
        operator = name if "." in name else f"{name}.default"
        if operator_table()[f"aten.{operator}"].kind == "exact" or torch.float32 in args:
            continue
        got = leaves(run("exact", operator, *args, **kwargs))
        for half, single in zip(got, leaves(run("exact", operator, *wide(args), **kwargs)), strict=True):
            if single.dtype == torch.float32:
                assert half.dtype == dtype, name
                assert bits(half) == rounded_once(single, dtype), name
            else:
                assert torch.equal(half, single), name
        seen.add(operator)
    assert len(seen) >= 80


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(TYPES))
def test_products_and_sums_accumulate_in_fp32(data: st.DataObject, dtype: torch.dtype) -> None:
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    a = from_bits(data.draw(st.lists(patterns, min_size=m * k, max_size=m * k)), dtype).reshape(m, k)
    b = from_bits(data.draw(st.lists(patterns, min_size=k * n, max_size=k * n)), dtype).reshape(k, n)
    assert bits(run("exact", "mm.default", a, b)) == rounded_once(matmul_by_integers(a.float(), b.float()), dtype)
    total = run("exact", "sum.dim_IntList", a, [1])
    assert bits(total) == rounded_once(run("exact", "sum.dim_IntList", a.float(), [1]), dtype)
    softmax = run("exact", "_softmax.default", a, 1, False)
    assert bits(softmax) == rounded_once(run("exact", "_softmax.default", a.float(), 1, False), dtype)


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_overflow_subnormals_ties_and_nan(dtype: torch.dtype, numerics: str) -> None:
    """Sums are exact in FP32, so that the one rounding is seen."""
    top = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    assert run(numerics, "add.Tensor", top, top).item() == float("inf")
    assert run(numerics, "mm.default", top[None], -top[:, None]).item() == -float("inf")
    tiny = from_bits([1], dtype)
    assert bits(run(numerics, "mul.Tensor", tiny, 3.0)) == [3]
    assert bits(run(numerics, "mul.Tensor", tiny, -0.25)) == [0x8000]
    step = 2.0 ** -(SIGNIFICAND[dtype] - 1)
    one = torch.ones(1, dtype=dtype)
    assert run(numerics, "add.Tensor", one, one * step * 0.5).item() == 1.0
    assert run(numerics, "add.Tensor", one * (1 + step), one * step * 0.5).item() == 1.0 + 2 * step
    ones = torch.full((4096,), step, dtype=dtype)
    assert run(numerics, "sum.default", ones).item() == 4096 * step
    for operator, args in {
        "sub.Tensor": (top * float("inf"), top * float("inf")),
        "mul.Tensor": (from_bits([0xFFFF], dtype), one),
        "log.default": (-one,),
        "mm.default": (from_bits([0xFFFF], dtype)[None], one[None]),
        "_to_copy.default": (from_bits([0xFFFF], dtype),),
        "maximum.default": (from_bits([0xFFFF], dtype), one),
    }.items():
        assert bits(run(numerics, operator, *args)) == [NAN[dtype]], operator


@pytest.mark.parametrize("dtype", TYPES)
def test_conversions_are_to_nearest_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-(1 << 31), 1 << 31, (1000,), generator=generator).to(torch.int32).view(torch.float32)
    edges = [65504.0, 65519.0, 65520.0, 3.3895e38, 3.3961e38, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134, -0.0]
    x = torch.cat([x, torch.tensor(edges), 1.0 + torch.arange(64) * 2.0**-13])
    assert bits(run("exact", "_to_copy.default", x, dtype=dtype)) == rounded_once(x, dtype)
    target = torch.zeros(x.shape, dtype=dtype)
    run("exact", "copy_.default", target, x)
    assert bits(target) == rounded_once(x, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_in_place_and_out_variants_write_the_same_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    x, y = (torch.randn(5, 7, generator=generator).to(dtype) for _ in range(2))
    for operator, args in {"add": (y,), "mul": (y,), "div": (y,)}.items():
        wanted = run("exact", f"{operator}.Tensor", x, *args)
        target = x.clone().t().contiguous().t()
        assert run("exact", f"{operator}_.Tensor", target, *args) is target
        assert torch.equal(target, wanted)
        with recording("exact"):
            out = getattr(torch, operator)(x, *args, out=torch.empty_like(x))
        assert torch.equal(out, wanted)
    pair = [x.clone(), y.clone()]
    with recording("exact"):
        single = x.clone().add_(y.float() * 1e-3)
        torch._foreach_mul_(pair, 0.3)
        total, wanted = torch.sum(x, dim=1, out=torch.empty(5, dtype=dtype)), x.sum(1)
    assert torch.equal(single, (x.float() + y.float() * 1e-3).to(dtype))
    assert torch.equal(pair[1], (y.float() * 0.3).to(dtype))
    assert torch.equal(total, wanted)
    with pytest.raises(UnsupportedOperator, match=r"aten\.add\.out.*out= of type torch\.float32"), recording("exact"):
        torch.add(x, y, out=torch.empty(5, 7))


@pytest.mark.parametrize("numerics", BACKENDS)
def test_running_statistics_in_half_precision_are_updated(numerics: str) -> None:
    x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    half, single = nn.BatchNorm2d(3).bfloat16(), nn.BatchNorm2d(3)
    with recording(numerics):
        half(x.bfloat16())
        single(x.bfloat16().float())
    ours, theirs = half.state_dict(), single.state_dict()
    for name in ("running_mean", "running_var"):
        assert torch.equal(ours[name], theirs[name].bfloat16())
    assert not torch.equal(ours["running_mean"], torch.zeros(3, dtype=torch.bfloat16))


class Types:
    """Observer that collects the types of every operator's results."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[torch.dtype, ...]]] = {}

    def before(self, *_: Any) -> None:
        """Nothing to see yet."""

    def after(self, index: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        values = out if isinstance(out, list | tuple) else [out]
        kinds = tuple(value.dtype for value in values if isinstance(value, Tensor) and value.numel())
        self.seen.setdefault(str(func), set()).add(kinds)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()), (2, 3, 8, 8)),
    "pools": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.GroupNorm(1, 4)), (2, 4, 8, 8)),
    "activations": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.SiLU(), nn.LayerNorm(4)), (5, 6)),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_results_have_the_types_of_native_operators(name: str, dtype: torch.dtype, mixed: bool) -> None:
    """In a mixed model the norms keep FP32 weights, and thus FP32 statistics."""
    make, shape = LAYERS[name]
    seen = []
    for numerics in ("native", "exact"):
        module = make().to(dtype)
        for part in module.modules():
            if mixed and isinstance(part, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d):
                part.float()
        x = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7).to(dtype).requires_grad_()
        observer = Types()
        with sdpa_kernel(SDPBackend.MATH), recording(numerics, observer=observer):
            out = module(x)
            torch.autograd.backward((out * out).mean())
        seen.append(observer.seen)
        assert x.grad is not None
        assert x.grad.dtype == dtype
    native, exact = seen
    copies = {"aten.clone.default", "aten._unsafe_view.default", "aten.view.default"}
    assert native.keys() - copies == exact.keys() - copies
    assert all(native[name] == exact[name] for name in native.keys() - copies)


def test_a_requested_type_converts_operands_first() -> None:
    x = torch.tensor([1.0 + 2.0**-9, 1.0 + 2.0**-9, 256.0])
    out = run("exact", "sum.dim_IntList", x, [0], dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.item() == 258.0
    wide = run("exact", "sum.dim_IntList", x.bfloat16(), [0], dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert run("exact", "cumsum.default", x, 0, dtype=torch.bfloat16).tolist() == [1.0, 2.0, 258.0]
    with recording("exact"):
        assert torch.randn(3, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.rand_like(x, dtype=torch.float16).dtype == torch.float16


def test_asking_for_types_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.numerics.operators import widening as _widening

    drawn: list[list[int]] = []
    for _ in range(2):
        monkeypatch.setattr(_widening, "_types", {} if not drawn else _widening._types)
        torch.manual_seed(3)
        with recording("exact"):
            x = torch.ops.aten.randn.default([4], dtype=torch.bfloat16)
            y = torch.rand_like(x)
        drawn.append([*bits(x), *bits(y), *torch.get_rng_state().tolist()])
    assert drawn[0] == drawn[1]


def test_types_mix_as_in_aten() -> None:
    half, single = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    assert run("exact", "add.Tensor", half, single).dtype == torch.float32
    assert run("exact", "add.Tensor", half, single[0]).dtype == torch.bfloat16
    assert run("exact", "add.Tensor", half, half.half()).dtype == torch.float32
    assert run("exact", "div.Tensor", half, torch.tensor([2, 4])).dtype == torch.bfloat16
    assert run("exact", "sort.default", half)[1].dtype == torch.int64


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_casts_that_it_makes_and_no_operator_inside_another_is_cast(
    numerics: str, dtype: torch.dtype
) -> None:
    x = torch.linspace(-3, 2, 25).reshape(5, 5)
    with recording(numerics):
        half = x.to(dtype)
        wanted = F.linear(half, half), x @ x, F.mse_loss(x, x * 2), (half @ half).float().sum()
    with torch.autocast("cpu", dtype=dtype), recording(numerics):
        with torch.autocast("cpu", enabled=False):
            plain = x @ x
        found = F.linear(x, x), plain, F.mse_loss(x, x * 2), (x @ x).float().sum()
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.dtype, bits(mine.float())) == (theirs.dtype, bits(theirs.float()))


def test_an_operator_whose_type_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.numerics.operators import widening as _widening

    def unknown(*_: Any) -> Any:
        raise NotImplementedError("no shape function")

    monkeypatch.setattr(_widening, "_imitation", unknown)
    monkeypatch.setattr(_widening, "_types", {})
    with pytest.raises(UnsupportedOperator, match=r"aten\.exp\.default.*type of its result"):
        run("exact", "exp.default", torch.ones(2, dtype=torch.bfloat16))


CHILD = Path(__file__).with_name("training_child.py")
FAMILIES = ("native", "avx2", "sse41")
STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by device; the first records the rounding logs that the others replay."""
    folder = tmp_path_factory.mktemp("half")
    out: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        jobs: list[dict[str, Any]] = []
        for dtype in ("bfloat16", "float16"):
            for numerics in ("native", "exact", "rounded"):
                name = f"{numerics}-{dtype}"
                replay = name if numerics == "rounded" and family != "native" else None
                jobs.append({"name": name, "numerics": numerics, "replay": replay, "options": {"dtype": dtype}})
        shared = {"folder": str(folder), "kinds": ["gpt", "cnn"], "steps": STEPS}
        done = subprocess.run(
            [sys.executable, str(CHILD), json.dumps([{**shared, **job} for job in jobs])],
            env={**DEVICES[family].process_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results = json.loads(done.stdout.strip().splitlines()[-1])
        out[family] = {job["name"]: result for job, result in zip(jobs, results, strict=True)}
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_half_precision_training_is_bit_equal(trained: dict[str, dict[str, Any]], kind: str, dtype: str) -> None:
    for numerics in ("exact", "rounded"):
        digests = [run[f"{numerics}-{dtype}"][kind]["digests"] for run in trained.values()]
        assert all(one == digests[0] for one in digests), numerics
        assert len(set(digests[0])) == STEPS
    native = trained["native"][f"native-{dtype}"][kind]["losses"]
    exact = trained["native"][f"exact-{dtype}"][kind]["losses"]
    assert exact == pytest.approx(native, abs=0.05)
    assert exact[-1] < exact[0]


def test_native_half_precision_differs_between_these_devices(trained: dict[str, dict[str, Any]]) -> None:
    """Without this the equality above would mean nothing."""
    for dtype in ("bfloat16", "float16"):
        assert len({run[f"native-{dtype}"]["gpt"]["digests"][-1] for run in trained.values()}) >= 2
