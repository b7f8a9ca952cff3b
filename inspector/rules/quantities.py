"""The quantities that rules bound, of the runs of an inspection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from firmware_sim import NO_WORK, TICK, Roofline
from inspector.inspection.lineage import chain_of, flop_of, most_flop_of
from inspector.inspection.provenance import unseen_text
from inspector.inspection.slack import untold_flop
from inspector.inspection.transcripts import Transcript
from inspector.rules.reading import Rule
from inspector.rules.truth import Truth
from monitor.declaration.slots import overlay
from monitor.replay.steps import execution_of

__all__ = ["COUNTERS", "Finding", "counters", "flop", "hyper", "jobs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found of one thing that it bounds.

    Attributes:
        labs: whom it is about.
        text: what was found, in words.
        value: the quantity; None where nobody knows it.
        where: run, chip, device or the like.
    """

    labs: tuple[str, ...]
    truth: Truth
    text: str
    value: int | float | None
    where: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "labs": list(self.labs),
            "result": self.truth.value,
            "text": self.text,
            "value": self.value,
            **self.where,
        }


def flop(
    rule: Rule,
    transcripts: Sequence[Transcript],
    lineages: Sequence[Mapping[str, Any]],
    unseen: Mapping[str, Sequence[str]],
    reports: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Finding]:
    """Compute of runs, chains, labs or jobs, as their programs need it.

    Beyond products written as such, elementwise work can hide others: a cap that only their upper bound exceeds, or
    behind which lies a past that nobody counted, is undecided. So is one that only slack exceeds, which chips signed.

    Args:
        reports: of the drawn chips.
        unseen: by lab, runs that its chips took part in and that are not among these: of a lab or a job they are part.
    """
    known = {item.run.manifest.run: item for item in transcripts}
    unknown = {line["run_id"]: line["past_unknown"] for line in lineages}
    for what, items in _groups(rule, transcripts, known):
        where = {"runs": [item.run.name for item in items], "run_ids": [item.run.manifest.run for item in items]}
        labs = tuple(sorted({item.run.metadata.lab for item in items}))
        least, most = flop_of(items), most_flop_of(items)
        past = None if rule.about["per"] == "run" else next(filter(None, map(unknown.get, where["run_ids"])), None)
        left_out = [run for lab in labs for run in unseen.get(lab, ())] if rule.about["per"] in ("lab", "job") else []
        past = past or (unseen_text(left_out) if left_out else None)
        signed = sum(untold_flop(item, reports) for item in items)
        most = None if most is None else most + signed
        upper = None if past else most
        text = f"{what} takes {least} FLOP"
        text += f", and its chips signed {signed} that could have been anything" if signed else ""
        if rule.at_most is not None and least > rule.at_most:
            truth = Truth.FAIL
        elif upper is None or (rule.at_most is not None and upper > rule.at_most):
            truth = Truth.UNDECIDED
            text += f", and more may lie behind: {past}" if past else f", and up to {most or 'nobody knows how many'}"
        else:
            truth = Truth.PASS if rule.holds(least) else Truth.FAIL
        yield Finding(labs=labs, truth=truth, text=text, value=least, where=where)


def _groups(
    rule: Rule, transcripts: Sequence[Transcript], known: Mapping[str, Transcript]
) -> Iterator[tuple[str, list[Transcript]]]:
    per = rule.about["per"]
    if per == "run":
        yield from ((f"run {item.run.name}", [item]) for item in transcripts)
    elif per == "chain":
        for item in transcripts:
            chain = chain_of(item, known)
            yield f"the chain {' → '.join(each.run.name for each in chain)}", chain
    elif per == "lab":
        for lab in sorted({item.run.metadata.lab for item in transcripts}):
            yield f"lab {lab}", [item for item in transcripts if item.run.metadata.lab == lab]
    else:
        for items in jobs_of(transcripts, rule.about["links"]):
            labs = {item.run.metadata.lab for item in items}
            yield f"the job of {len(items)} runs of {len(labs)} labs", items


def jobs_of(transcripts: Sequence[Transcript], links: Iterable[str]) -> list[list[Transcript]]:
    """Runs of any labs, put together where a link joins them (``reading.LINKS``), however far apart."""
    wanted = set(links)
    starts = {str(item.leaves[0].state.root) for item in transcripts} if "start" in wanted else set()
    groups: list[tuple[set[str], list[Transcript]]] = []
    for item in transcripts:
        marks, together = _marks(item, wanted, starts), [item]
        apart = []
        for others, members in groups:
            if marks & others:
                marks, together = marks | others, members + together
            else:
                apart.append((others, members))
        groups = [*apart, (marks, together)]
    return [members for _, members in groups]


def _marks(item: Transcript, links: set[str], starts: set[str]) -> set[str]:
    """What a run shares with others of its job."""
    run, found = item.run, {f"run {item.run.manifest.run}"}
    parent = run.declared.origin.parent
    if "parent" in links and parent is not None:
        found.add(f"run {parent.run}")
    if "start" in links:
        states = {str(leaf.state.root) for leaf in item.leaves}
        found |= {f"state {state}" for state in states & starts}
    if "data" in links and "set" in run.metadata.data:
        found.add(f"data {run.metadata.data['set']}")
    if "program" in links:
        found |= {f"program {execution_of(leaf).program}" for leaf in item.leaves[1:]}
    return found


def hyper(rule: Rule, transcripts: Sequence[Transcript]) -> Iterator[Finding]:
    """A hyper-parameter in all groups of each run, as declared and in every step."""
    name = rule.about["parameter"]
    for item in transcripts:
        where = item.run.where
        labs = (item.run.metadata.lab,)
        text = f"run {item.run.name}: {name}"
        values = [value for group in _used(item) for value in _parts(group.get(name))]
        if not values:
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=f"{text} is not declared", value=None, where=where)
        elif any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=f"{text} is no number", value=None, where=where)
        elif name in item.execution.unbound:
            text += f" is bound to no arithmetic: {item.execution.unbound[name]}"
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=text, value=None, where=where)
        else:
            odd = next((value for value in values if not rule.holds(Fraction(value))), None)
            truth = Truth.PASS if odd is None else Truth.FAIL
            shown = f"lies in {min(values)!r} … {max(values)!r}"
            value = max(values) if odd is None else odd
            yield Finding(labs=labs, truth=truth, text=f"{text} {shown}", value=value, where=where)


def _used(item: Transcript) -> Iterator[Mapping[str, Any]]:
    """The declared groups, and those of each step; what no step has used is bounded too."""
    yield from item.run.declared.groups
    for leaf in item.leaves[1:]:
        if any(execution_of(leaf).hyper):
            yield from overlay(item.run.declared.groups, execution_of(leaf).hyper)


def _parts(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


COUNTERS = {"meter": ("flop", "FLOP"), "clock": ("busy_us", "busy µs")}
"""By kind of rule, what of a chip's report it is about, with its unit."""


def counters(
    rule: Rule,
    transcripts: Sequence[Transcript],
    reports: Sequence[Mapping[str, Any]],
    owners: Mapping[str, str],
    unseen: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """What each drawn chip has signed in all its boots, to what the declared steps need of it.

    Its meter counts FLOP, and its clock the time that its work takes its device at least. Of a lab that has runs, and
    of whose chips none was drawn, nobody knows what they count.

    Args:
        unseen: by lab, runs that its chips have worked on and that are not handed over.
    """
    asked = {owners[report["chip"]] for report in reports}
    for lab in sorted({item.run.metadata.lab for item in transcripts} - asked):
        text = f"no chip of lab {lab} was drawn"
        yield Finding(labs=(lab,), truth=Truth.UNDECIDED, text=text, value=None, where={})
    key, unit = COUNTERS[rule.kind]
    for report in reports:
        chip = report["chip"]
        lab = owners[chip]
        counted, where = (report["counted"] or {}).get(key), {"chip": chip}
        mine = [item for item in transcripts if chip in item.run.metadata.chips and item.run.metadata.lab == lab]
        known = all(item.execution.works is not None for item in mine) and report["rates"] is not None
        needed = _needed(rule.kind, mine, report) if known else 0
        text = f"chip {chip} counts {'what' if counted is None else counted} {unit}, and its lab's declared steps need "
        text += f"{needed} of it"
        why = _unknown(report, unseen.get(lab, ()), known=known)
        if why or counted is None:
            yield Finding(labs=(lab,), truth=Truth.UNDECIDED, text=f"{text}; {why}", value=None, where=where)
            continue
        if not needed:
            truth = Truth.FAIL if counted else Truth.PASS
            yield Finding(labs=(lab,), truth=truth, text=text, value=counted, where=where)
            continue
        ratio = Fraction(counted, needed)
        truth = Truth.PASS if rule.holds(ratio) else Truth.FAIL
        yield Finding(labs=(lab,), truth=truth, text=text, value=float(ratio), where=where)


def _unknown(report: Mapping[str, Any], unseen: Sequence[str], *, known: bool) -> str:
    """Why nobody can compare what a chip counts with what was declared; "" if anybody can."""
    if not report["sound"]:
        return "its evidence is not sound"
    if unseen:
        return unseen_text(unseen)
    if not known:
        return "a program is unknown"
    if report["power_gaps"]:
        return "its power was cut, and what it did before that, or did again, is unknown"
    return "" if report["counted"] is not None else "its log begins after its first boot"


def _needed(kind: str, mine: Sequence[Transcript], report: Mapping[str, Any]) -> int:
    """FLOP, or microseconds by its clock, that its lab's steps need of a chip."""
    work = NO_WORK
    for item in mine:
        needs = item.needs(report["chip"])
        work += sum((needs.of(leaf.step) for leaf in item.leaves[1:]), NO_WORK).share(*needs.share)
    return work.flop if kind == "meter" else Roofline(**report["rates"]).time(work) * 1_000_000 // TICK
