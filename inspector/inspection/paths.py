"""Paths by which batches and constants reach the new state past every loss, and which of them were agreed.

The analysis may name a path too many, so that one which was not agreed leaves the verdict open; a replay looks for its
proof (``witnesses``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.inspection.agreement import Agreement
from inspector.inspection.guards import Guard
from inspector.inspection.verdict import Findings
from monitor.declaration.statement import Declaration
from monitor.programs import Path
from monitor.programs.paths import FEW, PathsSoFar
from monitor.programs.paths import is_agreed as matches
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers

__all__ = [
    "FEW",
    "PathReport",
    "check_paths",
    "find_paths",
]

Consents = tuple[frozenset[str], frozenset[str]]
"""Where direct paths of a program may end, and those that lead through a gradient."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A tensor that takes a gradient past all updates, and the operator that brings it."""

    tensor: str
    program: str
    operator: str


@dataclass(frozen=True, slots=True)
class Differentiating:
    """A program that only computes, and takes a derivative; whether it was agreed on by name."""

    program: str
    agreed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """The direct paths of a run's programs, and the gradients that no update takes (``monitor.programs.paths``).

    Attributes:
        known: the programs were examined; else there is nothing to say.
    """

    known: bool = False
    not_agreed: tuple[Path, ...] = ()
    agreed: tuple[Path, ...] = ()
    running_statistics: tuple[Path, ...] = ()
    few_numbers: tuple[Path, ...] = ()
    gradients: tuple[Slope, ...] = ()
    differentiating: tuple[Differentiating, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        if not self.known:
            return {}
        kinds = ("not_agreed", "agreed", "running_statistics", "few_numbers")
        return {kind: [path.to_json() for path in getattr(self, kind)] for kind in kinds} | {
            "gradients": list(map(asdict, self.gradients)),
            "differentiating": list(map(asdict, self.differentiating)),
        }


def find_paths(
    programs: Mapping[str, Program], declared: Declaration, free: Collection[str] = (), agreed: Collection[str] = ()
) -> PathsSoFar:
    """All direct paths of a run's programs, under the declared layout of its state; ``free`` and patterns as agreed.

    Raises:
        EvidenceError: a program names memory that is not its own.
    """
    state = {f"{each.kind}/{each.name}": in_numbers(each.layout)["shape"] for each in declared.state}
    found = PathsSoFar(state, agreed)
    for digest, program in programs.items():
        found.add(digest, program, is_free=digest in free)
    return found


def check_paths(
    programs: Mapping[str, Program],
    declared: Declaration,
    agreed: Agreement,
    findings: Findings,
    where: Mapping[str, Any],
    numbers: Mapping[str, Collection[int]],
) -> PathReport:
    """Each direct path is agreed, or ends in a running statistic; any other is a doubt.

    Args:
        numbers: of the statements that count for the steps that run each program.
    """
    try:
        every = find_paths(programs, declared, agreed.once_free, agreed.always("direct_paths"))
        found = every.paths()
    except EvidenceError as error:
        findings.add(Guard.PROGRAM, str(error), **where)
        return PathReport(known=True)
    named = {program: _consents(agreed, each) for program, each in numbers.items()}
    report = PathReport(
        known=True,
        not_agreed=tuple(not_agreed(found, named)),
        agreed=tuple(path for path in found if not path.is_harmless and is_agreed(path, named)),
        running_statistics=tuple(path for path in found if path.statistic),
        few_numbers=tuple(path for path in found if path.few),
        gradients=tuple(Slope(tensor, *origin) for tensor, origin in sorted(every.slopes().items())),
        differentiating=tuple(
            Differentiating(each, each in named[each][0]) for each in sorted(every.differentiating())
        ),
    )
    for path in report.not_agreed:
        way, option = ("through a gradient", "--free") if path.graded else ("without passing a loss", "--direct-path")
        text = (
            f"program {path.program[:16]}…: {path.source!a:.200} reaches {path.tensor!a:.200} by {path.operator} "
            f"{way}, which was not agreed; an inspectorate that agrees signs `declare countersign {option} "
            f"{path.tensor!a:.200}`{agreed.how_to_amend}"
        )
        place = {"program": path.program, "tensor": path.tensor, "source": path.source, "operator": path.operator}
        findings.doubt(text, **place, **where)
    return report


def _consents(agreed: Agreement, numbers: Collection[int]) -> Consents:
    paths = agreed.always("direct_paths", numbers)
    return paths, paths | agreed.always("free", numbers)


def not_agreed(paths: Sequence[Path], named: Mapping[str, Consents]) -> list[Path]:
    """The paths that end neither in a running statistic nor in few numbers, and were not agreed."""
    return [path for path in paths if not path.is_harmless and not is_agreed(path, named)]


def is_agreed(path: Path, named: Mapping[str, Consents]) -> bool:
    """Whether lab and inspector agreed to a path: of its program by the tensor that it ends in, or as a whole."""
    paths, graded = named[path.program]
    return path.program in paths or matches(path.tensor, graded if path.graded else paths)
