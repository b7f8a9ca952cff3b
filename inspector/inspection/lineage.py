"""Runs that continue others: the weights that each took over, and the FLOP of all of them together.

A lab could split a training that is too large into a chain of short runs (Shavit 2023, section 4). So a run declares
where its weights come from (``monitor.declaration.origin``); what the inspector holds of its ancestors is compared and
added up, and under a cap nothing is accepted whose past was not counted. A parent counts once what was taken over from
it was found there: to name another's run without that links no one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from firmware_sim import Unaudited
from firmware_sim.errors import EvidenceError
from inspector.inspection.disclosure import ThinRun
from inspector.inspection.document import Evidence, LineageEvidence
from inspector.inspection.guards import Guard
from inspector.inspection.slack import untold_flop
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from monitor.declaration.origin import TAKEN_OVER, Origin, Parent
from monitor.programs.bits import same_bytes

__all__ = ["check_signed", "examine_lineages", "kind_of", "lineage_text", "past_unknown"]


def examine_lineages(
    transcripts: Sequence[Transcript], trust: Trust, findings: Findings, *, replayed: bool = True
) -> list[LineageEvidence]:
    """Check what each run took over from its parent, and the rule on total compute; say where each comes from.

    Args:
        replayed: initialisations are executed in the same inspection.
    """
    known = {item.run.manifest.run: item for item in transcripts}
    parents: dict[str, Transcript] = {}
    for item in transcripts:
        parent = item.run.declared.origin.parent
        if parent is None or parent.run not in known:
            continue
        check = partial(check_taken_over, item, known[parent.run], parent)
        found = findings.check(Guard.INITIALISATION, check, **item.run.where)
        if found is not None:
            parents[item.run.manifest.run] = known[parent.run]
        for fresh in found or ():
            text = f"{item.run.name}: {fresh!a:.200} is neither taken over from the parent nor zero"
            findings.doubt(text, **item.run.where)
    lines = []
    for item in transcripts:
        chain = chain_of(item, parents)
        taken = parents.get(item.run.manifest.run)
        first = chain[0].run
        lines.append(
            LineageEvidence(
                run=item.run.name,
                run_id=item.run.manifest.run,
                origin=kind_of(item.run.declared.origin),
                parent=None if taken is None else taken.run.manifest.run,
                chain=[each.run.name for each in chain],
                chain_flop=flop_of(chain),
                chain_most_flop=most_flop_of(chain),
                past_unknown=past_unknown(
                    first.declared.origin, first.name, chain[0].execution.brings, replayed=replayed
                ),
            )
        )
    if trust.maximum_flop is not None:
        _check_cap(transcripts, lines, trust.maximum_flop, findings)
    return lines


def chain_of(item: Transcript, parents: Mapping[str, Transcript]) -> list[Transcript]:
    """A run after all its ancestors, the oldest first; none is its own, since ids are digests of declarations.

    Args:
        parents: by a run's id, the one from which it took over what it declares to.
    """
    chain = [item]
    while (parent := parents.get(chain[0].run.manifest.run)) is not None:
        chain.insert(0, parent)
    return chain


def flop_of(items: Iterable[Transcript]) -> int:
    """Declared FLOP of all steps of runs and of the work outside them; ``execution`` compares both with programs."""
    return sum(sum(leaf.flop for leaf in item.leaves) + item.execution.outside.flop for item in items)


def most_flop_of(items: Iterable[Transcript]) -> int | None:
    """FLOP that their steps take at most, with products that elementwise work could hide; None where it is unknown."""
    found = [(item.execution.most_flop, item.execution.outside.flop) for item in items]
    known = [flop + outside for flop, outside in found if flop is not None]
    return sum(known) if len(known) == len(found) else None


def kind_of(origin: Origin) -> str:
    """Where a run starts from: ``parent``, ``initialisation``, ``supplied`` or ``seed``."""
    if origin.parent is not None:
        return "parent"
    if origin.initialisation is not None:
        return "initialisation"
    return "supplied" if origin.is_supplied else "seed"


def past_unknown(origin: Origin, name: str, brings: str | None, *, replayed: bool) -> str | None:
    """Why one cannot count what was computed before a run, whose initialisation brings this."""
    if origin.initialisation is not None:
        if not replayed:
            return f"the initialisation of {name} was not executed here; `inspect` executes it"
        return None if brings == "" else f"the initialisation of {name} brings {brings or 'unknown content'}"
    if origin.parent is not None:
        text = f"run {origin.parent.run[:16]}…, which {name} continues, is not among the inspected ones"
        return f"{text}, or was not found in its start"
    return f"the weights that {name} starts from were supplied" if origin.is_supplied else None


def check_taken_over(child: Transcript, ancestor: Transcript, parent: Parent) -> list[str]:
    """The child starts with the tensors of its parent's final state, bit for bit.

    Returns the names of tensors that were not taken over and hold something else than zeros.

    Raises:
        EvidenceError: the parent did not end in the declared state, or the child does not start with it.
        Unaudited: no party that may see the states has compared them.
    """
    name, run = ancestor.run.name, ancestor.run
    final = run.declared.steps
    ended_there = run.finished and len(ancestor.leaves) == final + 1
    if not ended_there or parent.step != final or str(ancestor.leaves[final].state.root) != parent.state:
        raise EvidenceError(
            f"the run declares that it continues the final state of {name}, but step {parent.step} is not that state"
        )
    if isinstance(child.run, ThinRun):  # a cluster names what is neither taken over nor zero
        if not set(TAKEN_OVER) <= set(parent.kinds) or None in (child.models.get(0), ancestor.models.get(final)):
            raise Unaudited(f"no one has compared the start of {child.run.name} with what {name} ended with")
        if child.models[0] != ancestor.models[final]:
            raise EvidenceError(f"step 0: {child.run.name} does not start with the weights that {name} ended with")
        return []
    ended, begun = run.checkpoint(final), child.run.checkpoint(0)
    fresh = []
    for tensor, value in sorted(begun.items()):
        if tensor.partition("/")[0] not in parent.kinds:
            fresh += [tensor] if torch.count_nonzero(value) else []
        elif tensor not in ended or not _is_same(value, ended[tensor]):
            raise EvidenceError(
                f"step 0: {tensor!a:.200} is not what {name} ended with, although the run declares that it continues it"
            )
    return fresh


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and same_bytes(one, other)


def _check_cap(
    transcripts: Sequence[Transcript], lines: Sequence[LineageEvidence], most: int, findings: Findings
) -> None:
    """The rule on total compute (Shavit 2023, section 2), over all declared runs of each lab and over each chain."""
    labs: dict[str, list[Transcript]] = {}
    for item in transcripts:
        labs.setdefault(item.run.metadata.lab, []).append(item)
    for lab, items in labs.items():
        if flop_of(items) > most:
            text = f"lab {lab} declares {flop_of(items)} FLOP, more than the {most} that the rules allow"
            findings.add(Guard.RULES, text, lab=lab)
        elif _is_above(most_flop_of(items), most):
            text = f"lab {lab} declares {flop_of(items)} FLOP of products, but the rules allow {most}; "
            text += f"with what elementwise work can hide it is {most_flop_of(items) or 'unknown'}"
            findings.doubt(text, lab=lab)
    for item, line in zip(transcripts, lines, strict=True):
        where, text = item.run.where, f"the chain {' → '.join(line['chain'])} takes {line['chain_flop']} FLOP"
        if exceeds(line, line["chain_flop"], most):
            findings.add(Guard.RULES, f"{text}, more than the {most} that the rules allow", **where)
        elif exceeds(line, line["chain_most_flop"], most):
            text += f" of products, but the rules allow {most}; with what elementwise work can hide it is "
            findings.doubt(f"{text}{line['chain_most_flop'] or 'unknown'}", **where)
        if line["past_unknown"]:
            text = f"{line['run']}: past FLOP is unknown, and the rules allow {most}: {line['past_unknown']}"
            findings.doubt(text, **where)


def check_signed(transcripts: Sequence[Transcript], evidence: Evidence, trust: Trust, findings: Findings) -> None:
    """Under the rule on total compute, slack that chips signed counts too: it may have been anything."""
    most = trust.maximum_flop
    if most is None:
        return
    labs: dict[str, list[Transcript]] = {}
    for item in transcripts:
        labs.setdefault(item.run.metadata.lab, []).append(item)
    for lab, items in labs.items():
        signed = sum(untold_flop(item, [*evidence["chips"], *evidence["past_spans"]]) for item in items)
        whole = most_flop_of(items)
        if signed and whole is not None and whole <= most < whole + signed:
            text = f"lab {lab} declares up to {whole} FLOP, and its chips signed {signed} more that could have been "
            findings.doubt(f"{text}anything; the rules allow {most}", lab=lab)


def exceeds(line: LineageEvidence, flop: int | None, most: int) -> bool:
    """Whether a run and those that it continues take more than that, by a count of all of them."""
    return len(line["chain"]) > 1 and _is_above(flop, most)


def _is_above(flop: int | None, most: int) -> bool:
    """What was not counted may be anything."""
    return flop is None or flop > most


def lineage_text(lines: Sequence[LineageEvidence]) -> str:
    """What an acceptance adds about where runs come from, given each lineage."""
    text = ""
    for line in lines:
        if len(line["chain"]) > 1:
            text += f"; {' → '.join(line['chain'])} take {line['chain_flop']} FLOP"
        if line["origin"] == "initialisation" and not line["past_unknown"]:
            text += f"; {line['run']} starts from what its declared initialisation computes"
    for reason in sorted({line["past_unknown"] for line in lines if line["past_unknown"] is not None}):
        text += f"; past FLOP is unknown: {reason}"
    return text
