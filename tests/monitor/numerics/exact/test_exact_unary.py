"""Elementwise functions: correctly rounded, equal in both forms, IEEE special values."""

from __future__ import annotations

import math
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firmware_sim.errors import CallerError, DeviceError
from monitor.numerics.engines.cpu.exact.function_kernels import UNARY_KERNELS
from monitor.numerics.engines.eager.exact import functions as eager
from monitor.numerics.engines.eager.exact.functions import EPSILON, KERNELS, power_kernel
from monitor.numerics.exact import UNARY_FUNCTIONS, power, unary
from monitor.numerics.reference.resolution import FUNCTIONS, MP, resolve, round_fraction

INF, NAN = float("inf"), float("nan")
UNDECIDED = 1.0 + 2.0**-24  # what a kernel gives where it leaves the rounding to the resolver
NAMES = tuple(KERNELS)
SPECIALS = (
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1.1754942e-38,
    1.17549435e-38,
    1.0,
    -1.0,
    3.4028235e38,
    -3.4028235e38,
    INF,
    -INF,
    NAN,
)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def random_patterns(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def moderate(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    return x * 10.0 ** (4 * torch.rand(count, generator=generator) - 2)


def outside(name: str, x: float) -> float:
    """The correctly rounded value by mpmath at 400 bits, without the resolver's loop."""
    with MP.workprec(400):
        value = FUNCTIONS[name](MP.mpf(x))
    sign, mantissa, exponent, _ = value._mpf_
    return round_fraction((-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent)


def domain(name: str, x: float) -> bool:
    if not math.isfinite(x) or x == 0:
        return False
    if name in ("asin", "acos", "atanh", "erfinv"):
        return abs(x) < 1
    if name == "acosh":
        return x > 1
    if x < 0 and (name in ("lgamma", "digamma") or name.startswith("polygamma")):
        return -1000 < x != math.floor(x)
    if name in ("log", "log2", "log10", "sqrt", "rsqrt"):
        return x > 0
    if name == "log1p":
        return x > -1
    return abs(x) < 1000 or name in ("sin", "cos")


@pytest.mark.parametrize("name", NAMES)
def test_values_are_correctly_rounded(name: str) -> None:
    x = torch.cat([random_patterns(300, 1), moderate(300, 2)])
    got = unary(name, x).tolist()
    for argument, value in zip(x.tolist(), got, strict=True):
        if domain(name, argument):
            assert struct.pack("<f", value) == struct.pack("<f", outside(name, argument)), argument


@pytest.mark.parametrize("name", NAMES)
def test_the_fp64_error_bound_has_a_margin(name: str) -> None:
    x = moderate(400, 3)
    values = KERNELS[name](x.to(torch.float64)).tolist()
    worst = 0.0
    for argument, value in zip(x.tolist(), values, strict=True):
        if domain(name, argument) and abs(argument) > 1e-10 and value != UNDECIDED:
            with MP.workprec(200):
                exact = FUNCTIONS[name](MP.mpf(argument))
                if 1e-40 < abs(exact) < 1e38:
                    worst = max(worst, float(abs(value / exact - 1)))
    assert worst < EPSILON[name] / 4


@pytest.mark.parametrize("name", UNARY_KERNELS)
def test_compiled_kernel_equals_the_eager_reference(name: str) -> None:
    x = torch.cat([random_patterns(60_000, 4), moderate(60_000, 5), torch.tensor(SPECIALS)])
    assert torch.equal(bits(unary(name, x)), bits(eager.unary(name, x)))


WANTED = {
    "exp": (1.0, 1.0, INF, 0.0),
    "expm1": (0.0, -0.0, INF, -1.0),
    "log": (-INF, -INF, INF, NAN),
    "log1p": (0.0, -0.0, INF, NAN),
    "tanh": (0.0, -0.0, 1.0, -1.0),
    "sigmoid": (0.5, 0.5, 1.0, 0.0),
    "silu": (0.0, -0.0, INF, -0.0),
    "erf": (0.0, -0.0, 1.0, -1.0),
    "erfc": (1.0, 1.0, 0.0, 2.0),
    "gelu": (0.0, -0.0, INF, -0.0),
    "gelu_tanh": (0.0, -0.0, INF, -0.0),
    "rsqrt": (INF, -INF, 0.0, NAN),
    "sin": (0.0, -0.0, NAN, NAN),
    "cos": (1.0, 1.0, NAN, NAN),
    "sqrt": (0.0, -0.0, INF, NAN),
    "tan": (0.0, -0.0, NAN, NAN),
    "asin": (0.0, -0.0, NAN, NAN),
    "acos": (math.pi / 2, math.pi / 2, NAN, NAN),
    "atan": (0.0, -0.0, math.pi / 2, -math.pi / 2),
    "sinh": (0.0, -0.0, INF, -INF),
    "cosh": (1.0, 1.0, INF, INF),
    "asinh": (0.0, -0.0, INF, -INF),
    "acosh": (NAN, NAN, INF, NAN),
    "atanh": (0.0, -0.0, NAN, NAN),
    "exp2": (1.0, 1.0, INF, 0.0),
    "log2": (-INF, -INF, INF, NAN),
    "log10": (-INF, -INF, INF, NAN),
    "i0": (1.0, 1.0, INF, INF),
    "special_i1": (0.0, -0.0, INF, -INF),
    "special_i0e": (1.0, 1.0, 0.0, 0.0),
    "special_i1e": (0.0, -0.0, 0.0, -0.0),
    "special_erfcx": (1.0, 1.0, 0.0, INF),
    "erfinv": (0.0, -0.0, NAN, NAN),
    "lgamma": (INF, INF, INF, INF),
    "digamma": (-INF, INF, INF, NAN),
    "polygamma_1": (INF, INF, 0.0, INF),
    "polygamma_2": (-INF, -INF, -0.0, -INF),
    "polygamma_3": (INF, INF, 0.0, INF),
    "polygamma_4": (-INF, -INF, -0.0, -INF),
    "polygamma_5": (INF, INF, 0.0, INF),
    "polygamma_6": (-INF, -INF, -0.0, -INF),
}


@pytest.mark.parametrize("name", UNARY_FUNCTIONS)
def test_zeros_infinities_and_nan(name: str) -> None:
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN])
    wanted = [0x7FC00000 if v != v else struct.unpack("<i", struct.pack("<f", v))[0] for v in (*WANTED[name], NAN)]
    assert bits(unary(name, x)).tolist() == wanted
    payload = torch.tensor([0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert (bits(unary(name, payload)) == 0x7FC00000).all()


def test_many_hard_elements_are_resolved_once() -> None:
    """exp(2^-24) lies 2^-49 above a midpoint: undecided in FP64; equal elements must not each cost an evaluation."""
    x = torch.full((5000,), 2.0**-24)
    resolve.cache_clear()
    assert torch.equal(unary("exp", x), torch.full((5000,), 1 + 2.0**-23))
    assert torch.equal(unary("sigmoid", 2 * x), torch.full((5000,), 0.5))
    assert resolve.cache_info().misses <= 2


@pytest.mark.parametrize("name", ["exp", "sin", "gelu"])
def test_shapes_and_strides(name: str) -> None:
    x = moderate(60, 6).reshape(3, 4, 5)
    wanted = unary(name, x)
    assert torch.equal(unary(name, x.transpose(0, 2)), wanted.transpose(0, 2))
    assert torch.equal(unary(name, x[:, ::2]), wanted[:, ::2])
    assert torch.equal(unary(name, x[0, 0, 0]), wanted[0, 0, 0])
    assert unary(name, torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(unary(name, x.bfloat16()), unary(name, x.bfloat16().float()))


def test_misuse_is_the_callers_mistake() -> None:
    with pytest.raises(CallerError, match="no exact function 'zeta'"):
        unary("zeta", torch.ones(1))
    with pytest.raises(CallerError, match="float64"):
        unary("exp", torch.ones(1, dtype=torch.float64))
    with pytest.raises(CallerError, match="broadcast"):
        power(torch.ones(2), torch.ones(3))


def test_flush_to_zero_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        for call in (lambda: unary("exp", torch.ones(2)), lambda: eager.unary("exp", torch.ones(2))):
            with pytest.raises(DeviceError, match="flush"):
                call()
    finally:
        torch.set_flush_denormal(False)


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=1 << 40), st.integers(-160, 130))
def test_rounding_of_fractions_is_the_nearest_float(value: Fraction, exponent: int) -> None:
    scaled = value * Fraction(2) ** exponent
    got = round_fraction(scaled)
    if math.isinf(got):
        assert abs(scaled) >= Fraction(2) ** 128 * (1 - Fraction(1, 1 << 25))
        return
    tensor = torch.tensor(got, dtype=torch.float32)
    assert tensor.item() == got
    for neighbour in (torch.nextafter(tensor, torch.tensor(INF)), torch.nextafter(tensor, torch.tensor(-INF))):
        if torch.isfinite(neighbour):
            here, there = abs(Fraction(got) - scaled), abs(Fraction(neighbour.item()) - scaled)
            even = int(bits(tensor)) % 2 == 0
            assert here < there or (here == there and even)


POWERS = [
    (4097.0, 2.0, 16785408.0),
    (3.0, 16.0, 43046720.0),
    (9.0, 1.5, 27.0),
    (2.0, -150.0, 0.0),
    (-2.0, -149.0, -(2.0**-149)),
    (-8.0, 1 / 3, NAN),
    (-0.0, 3.0, -0.0),
    (-0.0, -3.0, -INF),
    (0.0, -2.0, INF),
    (-INF, 3.0, -INF),
    (-INF, -2.0, 0.0),
    (-1.0, INF, 1.0),
    (0.5, INF, 0.0),
    (0.5, -INF, INF),
    (NAN, 0.0, 1.0),
    (1.0, NAN, 1.0),
    (NAN, 1.0, NAN),
    (1e30, 2.0, INF),
    (5.0, -1.0, 0.2),
]


@pytest.mark.parametrize(("x", "y", "wanted"), POWERS)
def test_power_special_values_and_ties(x: float, y: float, wanted: float) -> None:
    expected = bits(torch.tensor(wanted, dtype=torch.float32))
    base, exponent = torch.tensor(x), torch.tensor(y)
    assert torch.equal(bits(power(base, y)), expected)
    assert torch.equal(bits(power(base, exponent)), expected)
    assert torch.equal(bits(eager.power(base[None], exponent[None]))[0], expected)


def test_power_is_correctly_rounded_and_equal_in_both_forms() -> None:
    x, y = moderate(40_000, 7).abs(), moderate(40_000, 8)
    x[:9000], y[:9000] = random_patterns(9000, 9), random_patterns(9000, 10)
    y[9000:12000] = torch.round(y[9000:12000])
    x[9000:10000] *= -1
    got = power(x, y)
    assert torch.equal(bits(got), bits(eager.power(x, y)))
    for base, exponent, value in zip(
        x[12000:12300].tolist(), y[12000:12300].tolist(), got[12000:12300].tolist(), strict=True
    ):
        with mpmath.workprec(400):
            exact = mpmath.power(mpmath.mpf(base), mpmath.mpf(exponent))
        _, mantissa, scale, _ = exact._mpf_
        if abs(scale) < 100_000:
            assert value == round_fraction(Fraction(int(mantissa)) * Fraction(2) ** scale)


def test_power_error_bound_has_a_margin() -> None:
    x, y = moderate(3000, 11).abs(), moderate(3000, 12)
    values = power_kernel(x.to(torch.float64), y.to(torch.float64)).tolist()
    worst = 0.0
    for base, exponent, value in zip(x.tolist(), y.tolist(), values, strict=True):
        if 1e-45 < value < 1e38:
            with mpmath.workprec(200):
                worst = max(worst, float(abs(value / mpmath.power(base, exponent) - 1)))
    assert worst < EPSILON["pow"] / 4


def test_power_broadcasts() -> None:
    x, y = moderate(12, 13).abs().reshape(3, 4), torch.tensor([0.5, 2.0, -1.0, 3.0])
    for j in range(4):
        assert torch.equal(power(x, y)[:, j], power(x[:, j], y[j].item()))


def test_what_a_process_asks_of_mpmath_changes_no_value(switching):
    """Threads that resolve at once, while another one sets mpmath's own precision: the same bits, and its precision."""
    arguments = [(name, x) for name in ("lgamma", "digamma", "polygamma_2", "erfinv") for x in (-0.7, 0.3, 0.9)]
    expected = [resolve(name, x) for name, x in arguments]
    before, ended = mpmath.mp.prec, threading.Event()

    def set_precision():
        while not ended.is_set():
            with mpmath.workprec(20):
                time.sleep(0)

    with ThreadPoolExecutor(4) as threads:
        other = threads.submit(set_precision)
        jobs = [threads.submit(resolve.__wrapped__, name, x) for _ in range(20) for name, x in arguments]
        try:
            found = [job.result() for job in jobs]
        finally:
            ended.set()
        other.result()
    assert found == expected * 20
    assert mpmath.mp.prec == before
