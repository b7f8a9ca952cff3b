"""Paths by which batches and constants reach the new state past every loss, and which of them were agreed.

The analysis may name a path too many, so that one which was not agreed leaves the verdict open. A witness proves that a
batch takes one: where a replayed segment runs such a program, one of its steps runs on altered batches with all
gradients zero (``monitor.replay.witness``), and the state differs. Where the analysis names no path nothing is looked
for: that would take three more steps of each segment, and honest labs would pay for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from firmware_sim.errors import EvidenceError
from inspector.inspection.agreement import Agreement
from inspector.inspection.guards import Guard
from inspector.inspection.verdict import Findings
from inspector.replay.segment import Segment
from monitor.declaration.statement import Declaration
from monitor.programs import Path
from monitor.programs.paths import FEW, PathsSoFar
from monitor.programs.paths import is_agreed as matches
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers
from monitor.replay.steps import execution_of

if TYPE_CHECKING:
    from inspector.inspection.transcripts import Transcript

__all__ = [
    "FEW",
    "Looks",
    "PathReport",
    "Witness",
    "check_paths",
    "check_witness",
    "find_paths",
    "looks_in",
    "witness_in",
]

Looks = Mapping[str, list[Any]]
"""By segment: the step whose batch is altered, the draw that alters it, and tensors of which nothing is said."""

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


def looks_in(transcript: Transcript, draws: Mapping[Segment, bytes]) -> Looks:
    """What a replay is to look for: by segment a step, the draw of altered batches, and tensors that were agreed.

    Segments none of whose steps runs a program with a path that was not agreed are left out.

    Args:
        draws: of the segments that are replayed.
    """
    programs = {path.program for path in transcript.execution.paths.not_agreed}
    names = [f"{each.kind}/{each.name}" for each in transcript.run.declared.state] if programs else []
    looks: dict[str, list[Any]] = {}
    for segment, drawn in draws.items():
        every = range(segment.start + 1, segment.stop + 1)
        steps = [step for step in every if execution_of(transcript.leaves[step]).program in programs]
        if steps:
            step = steps[int.from_bytes(drawn[:8], "big") % len(steps)]
            agreed = [name for name in names if matches(name, transcript.agreed.at(step).direct_paths)]
            looks[str(segment.index)] = [step, drawn.hex(), agreed]
    return looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A tensor of the new state that a step's batch changes though every gradient is zero.

    Attributes:
        shard: number of the chip that holds the element.
        values: what the recorded batch leaves in the element, and each altered one.
        others: how many tensors more it changes.
    """

    step: int
    tensor: str
    element: int
    shard: int
    values: tuple[float, ...]
    others: int

    @property
    def text(self) -> str:
        """In words."""
        recorded, *altered = (f"{value:.9g}" for value in self.values)
        more = f" (and {self.others} tensors more)" if self.others else ""
        return (
            f"step {self.step}: with all gradients zero element {self.element} of {self.tensor!a:.200}{more} becomes "
            f"{recorded} on the recorded batch, and {' and '.join(altered)} on altered ones: the batch reaches it "
            "without passing a loss, which was not agreed"
        )


def witness_in(found: Sequence[Any] | None, declared: Declaration, agreed: Collection[str]) -> Witness | None:
    """What a replay found (``SegmentReplay.witness``), where it proves a path that was not agreed.

    Few numbers in buffers, and single ones, prove nothing by themselves: running losses are such.

    Raises:
        LookupError, TypeError, ValueError: it has another form.
    """
    if found is None:
        return None
    step, _, differences = found
    strange = [(declared.state[place], element, values) for place, element, values in differences]
    strange = [entry for entry in strange if not matches(f"{entry[0].kind}/{entry[0].name}", agreed)]
    sizes = [prod(state.shape) for state, _, _ in strange]
    if sum(sizes) <= FEW and all(
        state.kind == "buffer" or size == 1 for (state, *_), size in zip(strange, sizes, strict=True)
    ):
        return None
    state, element, values = strange[max(range(len(strange)), key=sizes.__getitem__)]
    key = (state.kind, state.name)
    [shard] = [
        number
        for number, slices in enumerate(declared.layout.shards)
        if any(each.key == key and each.offset <= element < each.offset + each.elements for each in slices)
    ]
    return Witness(
        step=step,
        tensor="/".join(key),
        element=element,
        shard=shard,
        values=tuple(map(float, values)),
        others=len(strange) - 1,
    )


def check_witness(
    transcript: Transcript, found: Sequence[Any] | None, look: Sequence[Any] | None, device: str, findings: Findings
) -> None:
    """What a replay found of a path that was not agreed is a finding of ``Guard.PROGRAM``.

    Args:
        look: what it was to look for (``looks_in``).

    Raises:
        LookupError, TypeError, ValueError: it looked for something else, or its answer is malformed.
    """
    if (None if found is None else list(found[:2])) != (None if look is None else list(look[:2])):
        raise ValueError("it tested a different path of the batch from the one that it was asked to test")
    if found is None:
        return
    run, agreed = transcript.run, transcript.agreed.at(found[0]).direct_paths
    program = execution_of(transcript.leaves[found[0]]).program
    witness = witness_in(found, run.declared, agreed)
    if witness is None or program in agreed:
        return
    paths = (path for path in transcript.execution.paths.not_agreed if path.program == program)
    path = next((path for path in paths if path.tensor == witness.tensor), None)
    where = {
        **run.where,
        "device": device,
        "chip": run.metadata.chips[witness.shard],
        "step": witness.step,
        "program": program,
        "tensor": witness.tensor,
        "element": witness.element,
        "values": list(witness.values),
        "draw": found[1],
        "operator": None if path is None else path.operator,
        "source": None if path is None else path.source,
    }
    findings.add(Guard.PROGRAM, f"{witness.text}; altered and run on {device}", **where)
