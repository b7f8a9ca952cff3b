"""The numbers that runs executed, in words: what no rule explains, and what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspector.inspection.run_evidence import Execution
from monitor.declaration.statement import is_hyper_name

__all__ = ["ChangedNumber", "UsedGroup", "changes_text", "listed", "numbers_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedGroup:
    """A parameter group as its run used it.

    Attributes:
        numbers: what was declared, but for schedules.
        gain: what the numbers multiply its rate by at most; None where nothing bounds it.
        outside: each number that lies outside of its range in some step, with that in words.
    """

    optimizer: str
    numbers: Mapping[str, Any]
    gain: float | None
    outside: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedNumber:
    """A hyper-parameter that some step uses otherwise than declared.

    Attributes:
        group: number of its parameter group.
        first, last: its values in the first and the last step that updates.
        span: lowest and highest value, where all are numbers.
    """

    group: int
    name: str
    declared: object
    first: object
    last: object
    span: tuple[float, float] | None

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        span = {} if self.span is None else dict(zip(("lowest", "highest"), self.span, strict=True))
        return {name: getattr(self, name) for name in ("group", "name", "declared", "first", "last")} | span

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChangedNumber:
        """What ``to_json`` returned."""
        span = (data["lowest"], data["highest"]) if "lowest" in data else None
        return cls(**{name: each for name, each in data.items() if name not in ("lowest", "highest")}, span=span)


def numbers_text(reports: Sequence[Execution]) -> str:
    """What an acceptance adds about the numbers of runs, given their reports as ``to_json`` returns them."""
    text = ""
    free = sum(slot["count"] for report in reports for slot in report["slots"] if slot["explained_by"] == "nothing")
    if free:
        text += f"; {free} numbers change from step to step without a rule, as agreed"
    shares = sum(slot["count"] for report in reports for slot in report["slots"] if slot["explained_by"] == "average")
    if shares:
        text += f"; {shares} numbers that change say how much an average of weights takes of each, and do nothing else"
    unbound = sorted({name for report in reports for name in report["not_bound"]})
    if unbound:
        text += f"; not bound to the arithmetic, as agreed: {listed(unbound)}"
    taken = sorted(
        {each["program"][:16] for report in reports for each in report["direct_paths"].get("differentiating", ())}
    )
    if taken:
        text += f"; programs that only compute and differentiate, as agreed: {', '.join(f'{each}…' for each in taken)}"
    written = [(name, each) for report in reports for name, each in report["declared_writes"].items()]
    if written:
        text += f"; written outside the updates, from the state alone: {_written(written)}"
    odd = {
        f"{listed([name])} {text}": None
        for report in reports
        for each in report["declared_groups"]
        for name, text in each["outside"].items()
    }
    if odd:
        text += f"; beyond their ranges, so that rates bound no change of weights: {', '.join(odd)}"
    changed = [ChangedNumber.from_json(line) for report in reports for line in report["changed_hyper_parameters"]]
    if changed:
        text += f"; hyper-parameters that change: {changes_text(changed)}"
    return text


def listed(names: Sequence[str]) -> str:
    """Names of hyper-parameters or tensors; those that a lab has made up only shown as ASCII."""
    return ", ".join(name if is_hyper_name(name) else ascii(name)[:60] for name in names)


def _written(writes: Sequence[tuple[str, Mapping[str, Any]]], most: int = 4) -> str:
    """Declared writes in words; the report lists those that there is no room for."""
    parts = []
    for name, each in writes[:most]:
        operators = ", ".join(f"{operator!a:.60}" for operator in each["operators"][:most])
        taken = ", ".join(f"{source!a:.100}" for source in each["takes"][:most])
        parts.append(f"{name!a:.100} ({operators} of {taken})")
    return ", ".join(parts) + (f" and {len(writes) - most} more" if len(writes) > most else "")


def changes_text(lines: Sequence[ChangedNumber], most: int = 4) -> str:
    """Changed hyper-parameters in words; the report lists those that there is no room for."""
    parts = []
    for line in lines[:most]:
        span = "" if line.span is None else f" in {_shown(line.span[0])} … {_shown(line.span[1])}"
        parts.append(
            f"{listed([line.name])} of group {line.group} (declared {_shown(line.declared)}) from "
            f"{_shown(line.first)} to {_shown(line.last)}{span}"
        )
    return ", ".join(parts) + (f" and {len(lines) - most} more" if len(lines) > most else "")


def _shown(value: object) -> str:
    return ascii(value)[:60]
