"""Engines that compute wrongly on purpose: each is found before it serves, and replaced or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import DeviceError
from monitor.numerics import _known_convolutions, exact, known_answers
from monitor.numerics.engines import capability
from monitor.numerics.engines.capability import fp64_convolution_is_exact, fp64_gemm_is_exact, int8_gemm_is_exact
from monitor.numerics.engines.cpu.exact import matmul as _cpu_engine
from monitor.numerics.known_answers import ENGINES, require_engines
from monitor.numerics.reference.matmul import matmul_by_integers
from monitor.numerics.rounding.backend import RoundedBackend

CPU = torch.device("cpu")


def forget() -> None:
    """Let this process test its engines again."""
    capability.int8_serves.cache_clear()
    capability.require_fp64.cache_clear()
    require_engines.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


class Forged(TorchDispatchMode):
    """Replaces results of some operators; ``called`` counts them."""

    def __init__(self, operators: tuple[str, ...]) -> None:
        super().__init__()
        self.operators = operators
        self.called = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") not in self.operators:
            out = NotImplemented
            if func._schema.name == "aten::matmul":
                with self:
                    out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        self.called += 1
        target = kwargs.pop("out", None)
        result = self.compute(func, *args, **kwargs)
        return result if target is None else target.copy_(result)

    def compute(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Saturating(Forged):
    """int8 products of a processor before VNNI: sums of pairs saturate at 16 bits, with A made unsigned by +128."""

    def __init__(self) -> None:
        super().__init__(("_int_mm",))

    def compute(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        a, b = args[0].to(torch.int64) + 128, args[1].to(torch.int64)
        if a.shape[1] % 2:
            a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64)
        for k in range(0, a.shape[1], 2):
            pair = a[:, k, None] * b[None, k] + a[:, k + 1, None] * b[None, k + 1]
            total += pair.clamp(-(1 << 15), (1 << 15) - 1)
        return (total - 128 * b.sum(0)).to(torch.int32)


class Narrow(Forged):
    """FP64 products computed in FP32, as an emulation on hardware without FP64 might."""

    def compute(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = [x.to(torch.float32) if isinstance(x, torch.Tensor) else x for x in args]
        out = func.overloadpacket.default(*narrow, **kwargs)
        if isinstance(out, tuple):
            return tuple(x if x is None else x.to(torch.float64) for x in out)
        return out.to(args[0].dtype)


def narrow_products() -> Narrow:
    return Narrow(("mm", "bmm"))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(160, 190, generator=generator), torch.randn(190, 170, generator=generator)


def test_every_engine_of_this_machine_serves_or_is_replaced() -> None:
    states = require_engines("exact", "rounded")
    assert list(states) == [engine.name for engine in ENGINES]
    assert all(state == "serves" for name, state in states.items() if name != "int8 products")
    assert "serve" in states["int8 products"]


def test_a_saturating_int8_engine_is_replaced_and_the_bits_stay() -> None:
    a, b = operands()
    before = exact.matmul(a, b)
    forget()
    forged = Saturating()
    with forged:
        assert not int8_gemm_is_exact(CPU)
        assert require_engines("exact")["int8 products"] == "fails its test; FP64 products serve"
        tested = forged.called
        assert tested > 0
        after = exact.matmul(a, b)
        assert forged.called == tested
    assert torch.equal(after.view(torch.int32), before.view(torch.int32))
    rows = slice(40, 44)
    assert torch.equal(after[rows].view(torch.int32), matmul_by_integers(a[rows], b).view(torch.int32))


def test_all_equal_extremes_do_not_show_saturation() -> None:
    """Why the known answers mix signs: these operands come out right on an engine that is wrong."""
    a, b = torch.full((4, 8), -128, dtype=torch.int8), torch.full((8, 4), -128, dtype=torch.int8)
    right = torch._int_mm(a, b)
    with Saturating():
        assert torch.equal(torch._int_mm(a, b), right)


def test_a_wrong_fp64_product_refuses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands()
    with narrow_products():
        assert not fp64_gemm_is_exact(CPU)
        for numerics in ("exact", "rounded"):
            with pytest.raises(DeviceError, match="FP64 products"):
                require_engines(numerics)
        with pytest.raises(DeviceError, match="FP64"):
            exact.matmul(a[:3], b)
    monkeypatch.setattr(_cpu_engine, "require_fp64", lambda _: None)
    with narrow_products():  # without the guard the wrong engine gives other bits in silence
        wrong = exact.matmul(a[:3], b)
    assert not torch.equal(wrong, matmul_by_integers(a[:3], b))


def test_a_wrong_fp64_convolution_refuses_the_device_for_rounded_numerics() -> None:
    with Narrow(("convolution", "convolution_backward")):
        assert not fp64_convolution_is_exact(CPU)
        with pytest.raises(DeviceError, match="FP64 convolutions"):
            require_engines("rounded")
        require_engines("exact")
    for operator in ("convolution", "convolution_backward"):
        with Narrow((operator,)):
            assert not fp64_convolution_is_exact(CPU)
    assert fp64_convolution_is_exact(CPU)


@pytest.mark.parametrize(
    ("engine", "module", "name"),
    [
        ("exact products", exact, "matmul"),
        ("exact sums", exact, "sum"),
        ("exact sums", exact, "scatter_rows"),
        ("exact functions", exact, "unary"),
        ("exact functions", exact, "power"),
        ("order-free sums", known_answers, "order_free_sum"),
        ("exact convolutions", exact.convolution, "correlate"),
        ("exact convolutions", exact.convolution, "grad_input"),
        ("exact convolutions", exact.convolution, "grad_weight"),
        ("rounded convolutions", RoundedBackend, "convolution"),
        ("rounded convolutions", RoundedBackend, "convolution_grad_input"),
        ("rounded convolutions", RoundedBackend, "convolution_grad_weight"),
        ("random numbers", exact.philox, "bits"),
        ("FP64 functions", torch, "tanh"),
    ],
)
def test_one_wrong_unit_in_an_engine_is_found(
    engine: str, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(module, name)

    def one_off(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = right(*args, **kwargs)
        flat = out.reshape(-1).clone()
        wide = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int64: torch.int64}[flat.dtype]
        flat.view(wide)[-1] += 16 if engine == "FP64 functions" else 1
        return flat.reshape(out.shape)

    monkeypatch.setattr(module, name, one_off)
    if module is torch:
        monkeypatch.setitem(known_answers._LIBRARY, name, (one_off, known_answers._LIBRARY[name][1]))
    (tested,) = (one for one in ENGINES if one.name == engine)
    assert not tested.test(CPU)


@pytest.mark.parametrize("samples", _known_convolutions.BATCHES)
def test_convolutions_of_one_channel_are_also_tested_at_the_size_of_digits(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 × 28 places and six filters: from 50 samples on, the gradient in the filters takes the int8 engine."""
    for name, value in {"BATCHES": (samples,), "_SIZE": 28, "_FILTERS": 6}.items():
        monkeypatch.setattr(_known_convolutions, name, value)
    for cached in (_known_convolutions._operands, _known_convolutions._answers):
        cached.cache_clear()
    try:
        for name in ("exact convolutions", "rounded convolutions"):
            (tested,) = (engine for engine in ENGINES if engine.name == name)
            assert tested.test(CPU)
    finally:
        for cached in (_known_convolutions._operands, _known_convolutions._answers):
            cached.cache_clear()


def test_an_engine_that_breaks_is_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise DeviceError("no such kernel")

    monkeypatch.setattr(exact, "sum", broken)
    with pytest.raises(DeviceError, match="exact sums"):
        require_engines("exact")
    require_engines("rounded")
