"""Gradients that no declared number governs: in tensors of the state, and in programs that only compute.

A tensor that takes one past all updates is a weight, whatever it is called. A program that takes a derivative and keeps
it in nothing of the state may train what its batch carries, all the more where its results come back in a later batch.
Who countersigns the tensor, or the program, by name agrees to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from inspector.inspection.agreement import Agreement
from inspector.inspection.document import ReplayEvidence
from inspector.inspection.paths import FEW, PathReport
from inspector.inspection.verdict import Findings
from monitor.declaration.slots import numbered
from monitor.declaration.statement import Declaration
from monitor.declaration.values import Made
from monitor.programs.paths import is_agreed
from monitor.replay.returned_results import MOST_RETURNED
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

if TYPE_CHECKING:
    from inspector.inspection.transcripts import Transcript

__all__ = ["check_differentiating", "check_returned", "check_tensors", "made_of_weights", "returned_text", "ungoverned"]

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
    names = sorted(name for name in unbound if "/" in name and not is_agreed(name, agreed.always("free")))
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
