"""Gradients that no declared number governs: in tensors of the state, and in programs that only compute.

A tensor that takes one past all updates is a weight, whatever it is called. A program that takes a derivative and keeps
it in nothing of the state may train what its batch carries, all the more where its results come back in a later batch.
Who countersigns the tensor, or the program, by name agrees to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from inspector.inspection.agreement import Agreement
from inspector.inspection.paths import FEW, PathReport
from inspector.inspection.verdict import Findings
from monitor.declaration.slots import numbered
from monitor.declaration.statement import Declaration
from monitor.declaration.values import Made
from monitor.programs.paths import is_agreed
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["check_differentiating", "check_tensors", "made_of_weights", "ungoverned"]

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
