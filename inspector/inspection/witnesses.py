"""What a replay finds of batches that reach the state past every loss, and of results that come back in a batch.

A witness proves that a batch takes a path that was not agreed: where a replayed segment runs a program with one, one of
its steps runs on altered batches with all gradients zero (``monitor.replay.witness``), and the state differs. Where the
analysis names no path nothing is looked for: that would take three more steps of each segment, and honest labs would
pay for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from inspector.inspection.document import ReplayEvidence
from inspector.inspection.guards import Guard
from inspector.inspection.transcripts import Transcript
from inspector.inspection.verdict import Findings
from inspector.replay.segment import Segment
from monitor.declaration.statement import Declaration
from monitor.programs.paths import FEW
from monitor.programs.paths import is_agreed as matches
from monitor.replay.returned_results import MOST_RETURNED
from monitor.replay.steps import execution_of

__all__ = ["Looks", "Witness", "check_returned", "check_witness", "looks_in", "returned_text", "witness_in"]

Looks = Mapping[str, list[Any]]
"""By segment: the step whose batch is altered, the draw that alters it, and tensors of which nothing is said."""


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


def check_returned(
    transcript: Transcript, returned: Sequence[Any], device: str, findings: Findings
) -> list[dict[str, object]]:
    """What a replay found of results that come back in a later batch: of a program that was not agreed a doubt.

    Raises:
        LookupError, TypeError, ValueError: its answer is malformed.
    """
    paths, found = transcript.execution.paths, []
    open_programs: Collection[str] = {
        *(each.program for each in paths.differentiating if not each.agreed),
        *(each.program for each in paths.not_agreed),
    }
    if len(returned) > MOST_RETURNED:
        raise ValueError(f"a device reports more than {MOST_RETURNED} results that a later step reads again")
    for step, later, place, elements in returned:
        if not all(type(each) is int for each in (step, later, place, elements)) or not 0 < step < later or place < 0:
            raise ValueError("a device reports a malformed result that a later step reads again")
        program, reads = (execution_of(transcript.leaves[each]).program for each in (step, later))
        name = sorted(transcript.agreed.program(transcript.run, reads).batch)[place]
        finding = {"step": step, "later": later, "batch": name, "elements": elements}
        found.append(finding)
        if program in open_programs:
            text = (
                f"step {step}: {elements} numbers that program {program[:16]}… computes come back in the batch of step "
                f"{later} as {name!a:.100}, and it takes a derivative or a path that was not agreed"
            )
            findings.doubt(text, **transcript.run.where, device=device, program=program, **finding)
    return found


def returned_text(replays: Sequence[ReplayEvidence], most: int = 4) -> str:
    """What an acceptance adds about results that come back, given the replays' evidence."""
    every = (each for replay in replays for each in replay.get("returned", ()))
    found = sorted({(each["step"], each["later"], each["batch"]) for each in every})
    shown = [f"of step {step} in that of step {later} ({name!a:.100})" for step, later, name in found[:most]]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"; results come back in a later batch: {', '.join(shown)}{more}" if found else ""
