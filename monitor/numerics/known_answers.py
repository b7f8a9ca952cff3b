"""Known-answer tests of everything that controlled numerics compute with on this device, before it is used.

An engine that fails is replaced by a slower one with the same bits where there is one; else the device is refused.
Answers come from integers, rational arithmetic, mpmath and published test vectors, never from the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import torch
from torch import Tensor

from firmware_sim.errors import DeviceError
from monitor.numerics import exact
from monitor.numerics._known_convolutions import one_channel_is_exact
from monitor.numerics.engines.capability import fp64_convolution_is_exact, fp64_gemm_is_exact, int8_gemm_is_exact
from monitor.numerics.exact.backend import ExactBackend
from monitor.numerics.reference.bf16 import bf16_matmul_by_integers
from monitor.numerics.reference.matmul import matmul_by_integers
from monitor.numerics.reference.resolution import resolve, round_fraction
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.rounding.bounds import Bound, Formats
from monitor.numerics.rounding.sums import order_free_sum
from monitor.numerics.statistics import Statistics

__all__ = ["ENGINES", "TestedPart", "require_engines"]

_PHILOX = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
"""Philox4x32-10 of counter 0 under key 0 (Salmon et al. 2011, Random123's test vectors)."""

_POINTS = (-87.25, -9.5, -1.0, -0.3125, -1.5e-5, 2.0**-140, 1.5e-5, 0.3125, 1.0, 1.7, 9.5, 31.0, 87.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedPart:
    """Part of the arithmetic.

    Attributes:
        of: the numerics that use it.
        fallback: what takes its place, with the same bits, where the test fails; None where nothing can.
    """

    name: str
    of: frozenset[str]
    test: Callable[[torch.device], bool]
    fallback: str | None = None


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().contiguous().view(torch.int32), expected.cpu().contiguous().view(torch.int32))


def _operands() -> tuple[Tensor, Tensor]:
    """FP32 (9, 70) and (70, 8) over many binades, with a wide row, a zero row, an infinity and a NaN."""
    i = torch.arange(630, dtype=torch.int64)
    a = ((i * 2654435761 % 16777213) - 8388606).to(torch.float32).reshape(9, 70) * 2.0**-20
    b = ((i[:560] * 2246822519 % 16777213) - 8388606).to(torch.float32).reshape(70, 8) * 2.0**-33
    a[2, 5], a[3], a[4, 1], b[6, 2] = 3e7, 0.0, math.inf, math.nan
    return a, b


def _exact_products(device: torch.device) -> bool:
    """Small products, BF16's too, and one large enough for the engine that large ones take, looked at in two rows."""
    a, b = _operands()
    if not _same(exact.matmul(a.to(device), b.to(device)), matmul_by_integers(a, b)):
        return False
    for rows in (a[:4], a):  # without and with what is not finite
        halves = rows[:, :64].to(torch.bfloat16), b[:64, 3:].to(torch.bfloat16)
        found = exact.bf16_matmul(*(half.to(device)[None] for half in halves))[0]
        if not _same(found, bf16_matmul_by_integers(*halves)):
            return False
    left, right = a[:1].tile(16, 8), b[:, :1].tile(8, 1).expand(-1, 512) * torch.arange(1, 513)
    left = left * torch.arange(1, 17)[:, None]
    found = exact.matmul(left.to(device), right.to(device)).cpu()
    columns = [0, 1, 300, 511]
    return _same(found[7:9][:, columns], matmul_by_integers(left[7:9], right[:, columns]))


def _row_sums() -> tuple[Tensor, Tensor]:
    """FP32 rows with cancellation, and their correctly rounded sums."""
    i = torch.arange(3 * 257, dtype=torch.int64)
    x = ((i * 2654435761 % 16777213) - 8388606).to(torch.float32).reshape(3, 257) * 2.0**-12
    x[1, 0], x[1, 1] = 2.0**60, -(2.0**60)
    x[2] *= 2.0**-130
    sums = [round_fraction(sum((Fraction(value) for value in row), Fraction(0))) for row in x.tolist()]
    return x, torch.tensor(sums, dtype=torch.float32)


def _exact_sums(device: torch.device) -> bool:
    x, expected = _row_sums()
    x = x.to(device)
    across = exact.sum(x.t().contiguous(), [0])
    index = torch.arange(3, device=device).repeat_interleave(257)
    scattered = exact.scatter_rows(3, index, x.reshape(-1, 1)).reshape(-1)
    return all(_same(found, expected) for found in (exact.sum(x, [1]), across, scattered))


def _order_free_sums(device: torch.device) -> bool:
    """The sums of ``rounded`` drop what lies far below the largest term, so that row alone is not looked at."""
    x, expected = _row_sums()
    x, keep = x.to(device), [0, 2]
    found = order_free_sum(x, [1], False)
    return _same(found[keep], expected[keep]) and _same(order_free_sum(x.flip(1), [1], False), found)


def _domain(name: str, x: Tensor) -> Tensor:
    return x[x > 0] if name in ("log", "sqrt") else x[x > -1] if name == "log1p" else x


def _exact_functions(device: torch.device) -> bool:
    """One function of each family of kernels; the battery has them all."""
    x = torch.tensor(_POINTS, dtype=torch.float32)
    for name in ("exp", "log", "tanh", "erfc", "sin"):
        taken = _domain(name, x)
        expected = torch.tensor([resolve(name, value) for value in taken.tolist()], dtype=torch.float32)
        if not _same(exact.unary(name, taken.to(device)), expected):
            return False
    taken = _domain("log", x)
    expected = torch.tensor([resolve("pow", value, 1.25) for value in taken.tolist()], dtype=torch.float32)
    return _same(exact.power(taken.to(device), 1.25), expected)


def _exact_convolutions(device: torch.device) -> bool:
    return one_channel_is_exact(ExactBackend(Statistics()), device)


def _rounded_convolutions(device: torch.device) -> bool:
    return one_channel_is_exact(RoundedBackend(Formats(), Bound(), Statistics(), None), device)


def _philox(device: torch.device) -> bool:
    return exact.philox.bits(0, 0, 4, device).tolist() == list(_PHILOX)


_NEGLIGIBLE = 2.0**-1000
_LIBRARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Any]]] = {
    "exp": (torch.exp, mpmath.exp),
    "expm1": (torch.expm1, mpmath.expm1),
    "log": (torch.log, mpmath.log),
    "log1p": (torch.log1p, mpmath.log1p),
    "tanh": (torch.tanh, mpmath.tanh),
    "erf": (torch.erf, mpmath.erf),
    "erfc": (torch.erfc, mpmath.erfc),
    "sin": (torch.sin, mpmath.sin),
    "cos": (torch.cos, mpmath.cos),
    "sqrt": (torch.sqrt, mpmath.sqrt),
}


def _library_functions(device: torch.device) -> bool:
    """FP64 functions of the device's library lie within 8 ulp, which the bounds of ``rounded`` take for granted."""
    x = torch.tensor(_POINTS, dtype=torch.float32).to(torch.float64)
    with mpmath.workprec(200):
        for name, (function, truth) in _LIBRARY.items():
            taken = _domain(name, x)
            for value, found in zip(taken.tolist(), function(taken.to(device)).tolist(), strict=True):
                expected = truth(mpmath.mpf(value))
                if abs(found - expected) > max(abs(expected) * 2.0**-50, _NEGLIGIBLE):
                    return False
    return True


_BOTH = frozenset(("exact", "rounded"))
_EXACT = frozenset(("exact",))
_ROUNDED = frozenset(("rounded",))

ENGINES: tuple[TestedPart, ...] = (
    TestedPart(name="int8 products", of=_EXACT, test=int8_gemm_is_exact, fallback="FP64 products"),
    TestedPart(name="FP64 products", of=_BOTH, test=fp64_gemm_is_exact),
    TestedPart(name="FP64 convolutions", of=_ROUNDED, test=fp64_convolution_is_exact),
    TestedPart(name="FP64 functions", of=_ROUNDED, test=_library_functions),
    TestedPart(name="order-free sums", of=_ROUNDED, test=_order_free_sums),
    TestedPart(name="exact products", of=_EXACT, test=_exact_products),
    TestedPart(name="exact sums", of=_EXACT, test=_exact_sums),
    TestedPart(name="exact functions", of=_EXACT, test=_exact_functions),
    TestedPart(name="exact convolutions", of=_EXACT, test=_exact_convolutions),
    TestedPart(name="rounded convolutions", of=_ROUNDED, test=_rounded_convolutions),
    TestedPart(name="random numbers", of=_BOTH, test=_philox),
)


def _state(engine: TestedPart, device: torch.device) -> str:
    try:
        passed = engine.test(device)
    except DeviceError as error:
        return f"fails: {error}"
    if passed:
        return "serves"
    return "fails its test" if engine.fallback is None else f"fails its test; {engine.fallback} serve"


@functools.cache
def require_engines(*numerics: str, device: str = "cpu") -> dict[str, str]:
    """Engines that serve in this process under the given numerics; tested once on each torch device.

    Raises:
        DeviceError: an engine fails that nothing can replace.
    """
    states = {e.name: _state(e, torch.device(device)) for e in ENGINES if e.of & set(numerics)}
    broken = [name for name, state in states.items() if not state.endswith(("serves", "serve"))]
    if broken:
        raise DeviceError(f"this device fails the known-answer test of {', '.join(broken)}; it cannot be used")
    return states
