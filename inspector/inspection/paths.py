"""What reaches the new state past every loss: batches and constants by direct paths, and gradients past all updates.

The analysis may name a path too many, so that one which was not agreed leaves the verdict open; a replay looks for its
proof (``witnesses``). A tensor that takes a gradient past all updates is a weight, whatever it is called. A program
that takes a derivative and keeps it in nothing of the state may train what its batch carries, all the more where its
results come back in a later batch. Who countersigns the tensor, or the program, by name agrees to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.inspection.agreement import Agreement
from inspector.inspection.guards import Guard
from inspector.inspection.verdict import Findings
from monitor.declaration.slots import numbered
from monitor.declaration.statement import Declaration
from monitor.declaration.values import Made
from monitor.programs import Path
from monitor.programs.paths import FEW, PathsSoFar
from monitor.programs.paths import is_agreed as matches
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = [
    "FEW",
    "PathReport",
    "check_differentiating",
    "check_paths",
    "check_tensors",
    "find_paths",
    "made_of_weights",
    "ungoverned",
]


_MOST = 8


def ungoverned(declared: Declaration, paths: PathReport) -> dict[str, str]:
    """Tensors that take a gradient by numbers that nothing declares, ``kind/name``, each with the reason.

    Weights of groups that declare numbers are none: these numbers are bound, or said not to be.
    """
    governed = {f"weight/{name}" for name in numbered(declared)}
    return {
        each.tensor: f"{each.operator} in program {each.program[:16]}… adds a gradient to it outside all updates"
        for each in paths.gradients
        if each.tensor not in governed
    }


def made_of_weights(made: Mapping[Made, int], declared: Declaration, paths: PathReport) -> dict[str, str]:
    """Tensors that are made of weights and that losses read, ``kind/name``, each with the reason.

    Left out are buffers of few numbers in all, and those that a batch reaches, which are paths; but not the statistics
    of a batch norm that normalised what a gradient had part in.
    """
    reached = {each.tensor for each in (*paths.not_agreed, *paths.agreed, *paths.few_numbers)}
    plain = {each.tensor for each in paths.running_statistics}
    sizes = {f"{each.kind}/{each.name}": prod(each.shape) for each in declared.state}
    found = {
        each.name: f"the weights that the loss reads in step {step} are computed from those that the optimizer "
        f"updates, by {each.operator}, and are neither a copy nor an average of them"
        for each, step in sorted(made.items(), key=lambda item: (item[0].name, item[1], item[0].operator))
        if not (each.dirty and each.name in (reached if each.graded else reached | plain))
    }
    few = sum(sizes[name] if name.startswith("buffer/") else FEW + 1 for name in found)
    return found if few > FEW else {}


def check_tensors(unbound: Mapping[str, str], agreed: Agreement, findings: Findings, where: Mapping[str, Any]) -> None:
    """Tensors that are bound to no number leave the verdict open, unless they were agreed on by name."""
    names = sorted(name for name in unbound if "/" in name and not matches(name, agreed.always("free")))
    if names:
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        text = (
            f"not bound to the arithmetic: {', '.join(f'{name!a:.200}' for name in names[:_MOST])}{more}, since "
            f"{unbound[names[0]]}; make it a parameter of the optimizer, or have an inspectorate sign "
            f"`declare countersign --free {names[0]!a:.200}`{agreed.how_to_amend}"
        )
        findings.doubt(text, tensors=names[:_MOST], **where)


def check_differentiating(
    leaves: Sequence[Leaf], paths: PathReport, agreed: Agreement, findings: Findings, where: Mapping[str, Any]
) -> None:
    """Programs that only compute, and differentiate, leave the verdict open unless they were agreed on by name.

    An initialisation has no batch, and carries nothing.
    """
    steps = {execution_of(leaf).program: leaf.step for leaf in reversed(leaves[1:])}
    asked = [each.program for each in paths.differentiating if not each.agreed]
    for digest, step in ((each, steps[each]) for each in asked if each in steps):
        text = (
            f"step {step}: program {digest[:16]}… takes a derivative and stores it in no tensor of the state, so it "
            f"may train what its batch carries; an inspectorate that agrees signs `declare countersign "
            f"--direct-path {digest}`{agreed.how_to_amend}"
        )
        findings.doubt(text, step=step, program=digest, **where)


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
