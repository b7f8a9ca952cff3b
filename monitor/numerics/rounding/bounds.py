"""Error bounds of operators under rounded numerics: how far two devices may lie apart, and in which formats.

For each element of a result they are in ``engines.eager.rounded.result_bounds``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from firmware_sim.errors import CallerError
from monitor.numerics.rounding.calibration import Calibration, Operator, committed

__all__ = ["BOUNDS", "Bound", "Formats", "bound_named"]

Format = Literal["float64", "float32", "bfloat16"]

_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """A pair of formats: order-sensitive operators compute in one, their results are rounded to the grid of the other.

    (float64, float32) is the pair of Srivastava 2024; (float32, bfloat16) is today's mixed-precision practice.
    """

    compute: Format = "float64"
    grid: Format = "float32"

    def __post_init__(self) -> None:
        if (self.compute, self.grid) not in (("float64", "float32"), ("float32", "bfloat16")):
            raise CallerError(
                f"rounding does not support the formats ({self.compute}, {self.grid}); take (float64, float32) or "
                "(float32, bfloat16)"
            )

    @property
    def unit_roundoff(self) -> float:
        """Half the relative spacing of the compute format."""
        return _UNIT_ROUNDOFF[self.compute]

    @property
    def grid_bits(self) -> int:
        """Significand bits of the grid, the implicit one included."""
        return 24 if self.grid == "float32" else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Error bound of a sum of K products, as a factor of row norm × column norm.

    - ``worst-case``: γ_K = K·u/(1 − K·u), for every order of summation, with or without FMA.
    - ``probabilistic``: min(γ_K, λ·√K·u), Higham and Mary 2019, fails with probability
      ≤ 2·exp(−λ²/2) for each addition.
    - ``calibrated``: min(γ_K, τ·u) with a τ for each class of operators and number of terms, or min(γ_K, λ·√K·u),
      measured on real devices (Srivastava 2024, Alg. 3); promises nothing.

    ``calibration`` gives the τ of a calibrated bound in (float64, float32); without it λ is ``factor``.
    ``contradictions`` is the number of entries of one step that may break the rules because a bound that is not a
    worst case failed; such entries are followed and counted. It must be 0 for ``worst-case``.
    ``check`` switches the rules off; it exists for tests that show what the rules are for.
    ``is_referee`` judges for both sides: a rule is broken where no honest device could have written the entry, and what
    an honest device could still object to is counted (``Statistics.open``).
    """

    kind: Literal["worst-case", "probabilistic", "calibrated"] = "worst-case"
    factor: float = 10.0
    calibration: Calibration | None = None
    contradictions: int = 0
    check: bool = True
    is_referee: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("worst-case", "probabilistic", "calibrated"):
            raise CallerError(f"unknown error bound {self.kind!r}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise CallerError(f"the factor of an error bound must be positive and finite, got {self.factor}")
        if self.contradictions < 0 or (self.kind == "worst-case" and self.contradictions):
            raise CallerError(
                f"contradictions must be 0 for a worst-case bound, and at least 0 for others, not {self.contradictions}"
            )

        if self.calibration is not None and self.kind != "calibrated":
            raise CallerError(f"a {self.kind} bound takes no calibration")

    def of_products(self, terms: int, formats: Formats, operator: Operator = "product") -> float:
        """Factor c such that |computed − true| ≤ c·‖row‖·‖column‖ for a sum of ``terms`` products.

        A product of two grid values is exact in the compute format, so one term has no error at all. The factor
        1 + 2^-20 covers the roundings made while the bound itself is computed.

        Raises:
            CallerError: the worst case in these formats is no bound any more at this many terms.
        """
        if terms <= 1:
            return 0.0
        spread = terms * formats.unit_roundoff
        if self.kind == "worst-case":
            if formats.compute != "float64":
                raise CallerError(
                    "worst-case bounds cover the whole bfloat16 grid; take a probabilistic or calibrated bound"
                )
            return spread / (1.0 - spread) * (1.0 + 2.0**-20)
        if self.calibration is not None:
            if formats.compute != "float64":
                raise CallerError("this calibration was measured in FP64; give a factor instead")
            likely = self.calibration.threshold(operator, terms) * formats.unit_roundoff
        else:
            likely = self.factor * math.sqrt(terms) * formats.unit_roundoff
        return min(spread / (1.0 - spread) if spread < 0.5 else math.inf, likely) * (1.0 + 2.0**-20)

    def worst_ratio(self, terms: int, formats: Formats, operator: Operator = "product") -> float:
        """The worst case of a sum of ``terms`` products in units of β, at least 1; infinite where there is none."""
        spread = terms * formats.unit_roundoff
        beta = self.of_products(terms, formats, operator)
        return 1.0 if beta == 0 else (max(spread / (1.0 - spread) / beta, 1.0) if spread < 1.0 else math.inf)

    def of_functions(self, formats: Formats) -> float:
        """Relative bound for a function of the device's mathematical library: 16 unit roundoffs (8 ulp)."""
        return 16.0 * formats.unit_roundoff


BOUNDS = ("worst-case", "probabilistic", "calibrated")


def bound_named(name: str) -> Bound:
    """The bound that a run of this kind takes.

    Probabilistic: λ = 11, so that 2·exp(−λ²/2) ≤ 1.1e-26 for each addition and 1e-6 for a run of up to 9e19 additions
    (resnet50-cifar at batch 16 makes about 6e10 a step).

    Raises:
        CallerError: there is no such bound.
    """
    if name == "worst-case":
        return Bound()
    if name == "probabilistic":
        return Bound(kind="probabilistic", factor=11.0)
    if name == "calibrated":
        return Bound(kind="calibrated", calibration=committed())
    raise CallerError(f"unknown error bound {name!r}; known: {', '.join(BOUNDS)}")
