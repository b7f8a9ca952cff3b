"""Measured error bounds of sums of products, one for each class of operators (Srivastava 2024, Alg. 3).

`python -m tests.measurements calibration` searched them on several kernel families of one machine; they promise nothing
about others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical

__all__ = ["OPERATORS", "Calibration", "Operator", "committed"]

Operator = Literal["product", "convolution", "grad-input", "grad-weight"]
OPERATORS: tuple[Operator, ...] = ("product", "convolution", "grad-input", "grad-weight")
Steps = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Thresholds in units of FP64's unit roundoff times row norm times column norm, safety factor included.

    Attributes:
        thresholds: for each operator class, in the order of OPERATORS, (largest number of terms, threshold), rising.
    """

    thresholds: tuple[Steps, ...]

    def __post_init__(self) -> None:
        if len(self.thresholds) != len(OPERATORS):
            raise CallerError(f"a calibration needs thresholds for {', '.join(OPERATORS)}")
        for steps in self.thresholds:
            terms = [most for most, _ in steps]
            if not steps or terms != sorted(set(terms)) or not all(0 < unit < math.inf for _, unit in steps):
                raise CallerError("the thresholds of an operator class must be positive, for rising numbers of terms")

    def threshold(self, operator: Operator, terms: int) -> float:
        """The threshold for sums of that many terms; infinite beyond the largest that was measured."""
        steps = self.thresholds[OPERATORS.index(operator)]
        return next((unit for most, unit in steps if terms <= most), math.inf)


@functools.cache
def committed() -> Calibration:
    """The calibration in ``data/calibration.json``, which names its hardware."""
    data = canonical.loads(resources.files(__package__).joinpath("data/calibration.json").read_text())
    found = data["thresholds"]
    return Calibration(thresholds=tuple(tuple((row[0], row[1]) for row in found[name]) for name in OPERATORS))
