"""Errors of the numerics, cut by who is to blame."""

from __future__ import annotations

from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["LogContradiction", "UnsupportedOperator"]


class UnsupportedOperator(CallerError):
    """An operator that is neither shown exact on every device nor implemented here; fail closed."""

    def __init__(self, operator: str, remedy: str) -> None:
        self.operator = operator
        self.remedy = remedy
        super().__init__(f"{operator} is not supported under controlled numerics: {remedy}")


class LogContradiction(EvidenceError):
    """A rounding log that no honest device could have written.

    Attributes:
        call: index of the ATen call within the step.
        operator: the ATen overload, such as ``aten.mm.default`` (empty where no call belongs to the entry).
        part: the call's sub-operation.
        element: flat index into its result, or None.
        size: elements of that result, where an element is named.
        rule: the rule that was broken.
    """

    def __init__(
        self, *, call: int, operator: str, element: int | None, rule: str, part: int = 0, size: int = 0
    ) -> None:
        self.call = call
        self.part, self.size = part, size
        self.operator = operator
        self.element = element
        self.rule = rule
        where = f"call {call}" + (f" ({operator})" if operator else "")
        where += f", element {element}" if element is not None else ""
        super().__init__(f"rounding log contradicts the arithmetic at {where}: {rule}")
