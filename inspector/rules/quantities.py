"""The quantities that rules bound, of the runs of an inspection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from firmware_sim import TICK, Roofline, Work
from inspector.inspection.document import ChipEvidence, LineageEvidence, ReplayEvidence
from inspector.inspection.lineage import flop_of, most_flop_of
from inspector.inspection.provenance import unseen_text
from inspector.inspection.slack import untold_flop
from inspector.inspection.transcripts import Transcript
from inspector.rules.jobs import Group, groups_of, id_of
from inspector.rules.rule_files import Rule
from inspector.rules.truth import Truth
from monitor.declaration.slots import overlay
from monitor.programs.paths import is_agreed
from monitor.replay.ledger import Kind
from monitor.replay.steps import execution_of

__all__ = ["QUANTITIES", "Basis", "Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found of one thing that it bounds.

    Attributes:
        labs: whom it is about.
        text: what was found, in words.
        value: the quantity; None where it is unknown.
        where: run, chip, device or the like.
    """

    labs: tuple[str, ...]
    truth: Truth
    text: str
    value: int | float | None
    where: Mapping[str, Any]

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "labs": list(self.labs),
            "result": self.truth.value,
            "text": self.text,
            "value": self.value,
            **self.where,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What an inspection has found, as far as quantities follow from it.

    Attributes:
        transcripts: of all runs.
        lineages, replays: parts of a verdict's evidence.
        reports: of the drawn chips, also of those that were sold.
        owners: of each chip its lab.
        unseen: by lab, runs that its chips took part in and that are not among these.
    """

    transcripts: Sequence[Transcript]
    lineages: Sequence[LineageEvidence]
    replays: Sequence[ReplayEvidence]
    reports: Sequence[ChipEvidence]
    owners: Mapping[str, str]
    unseen: Mapping[str, Sequence[str]]


def flop(rule: Rule, basis: Basis) -> Iterator[Finding]:
    """Compute of runs, chains, labs or jobs, as their programs need it.

    Beyond products written as such, elementwise work can hide others: a cap that only their upper bound exceeds, or
    behind which lies an uncounted past, is undecided. So is one that only slack exceeds, which chips signed.
    Runs that are not handed over are part of a lab and of a job.
    """
    transcripts, lineages = basis.transcripts, basis.lineages
    least = {id_of(item): flop_of([item]) for item in transcripts}
    signed = {id_of(item): untold_flop(item, basis.reports) for item in transcripts}
    unknown = {line["run_id"]: line["past_unknown"] for line in lineages}
    for group in groups_of(rule, transcripts, lineages, least):
        runs, wide = [id_of(item) for item in group.items], [id_of(item) for item in group.wide]
        past = None if rule.about["per"] == "run" else next(filter(None, map(unknown.get, wide)), None)
        labs = sorted({item.run.metadata.lab for item in group.wide})
        left_out = (
            [run for lab in labs for run in basis.unseen.get(lab, ())] if rule.about["per"] in ("lab", "job") else []
        )
        past = past or (unseen_text(left_out) if left_out else None)
        most, uncovered = most_flop_of(group.wide), sum(map(signed.__getitem__, wide))
        upper = None if past or most is None else most + uncovered
        value = sum(map(least.__getitem__, runs))
        truth = rule.judge(value, upper)
        text = f"{group.what} takes {value} FLOP"
        text += f", and its chips signed {uncovered} that could have been anything" if uncovered else ""
        if truth is Truth.UNDECIDED:
            text += f", and more may lie behind: {past}" if past else f", and up to {upper or 'an unknown number'}"
        where = {"runs": [item.run.name for item in group.items], "run_ids": runs}
        yield Finding(labs=_answering(group), truth=truth, text=text, value=value, where=where)


def _answering(group: Group) -> tuple[str, ...]:
    """Who answers for runs: the lab whose they are, and none whose model it only took over."""
    return (group.lab,)


def hyper(rule: Rule, basis: Basis) -> Iterator[Finding]:
    """A hyper-parameter in all groups of each run, as declared and in every step.

    A rate that other numbers make mean something else (``monitor.declaration.ranges``) holds no rule.
    """
    name = rule.about["parameter"]
    for item in basis.transcripts:
        where = item.run.where
        labs = (item.run.metadata.lab,)
        text = f"run {item.run.name}: {name}"
        values = [value for group in _used(item) for value in _parts(group.get(name))]
        if not values:
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=f"{text} is not declared", value=None, where=where)
        elif any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=f"{text} is no number", value=None, where=where)
        elif (loose := _loose(name, item)) is not None:
            text += " is bound to no arithmetic" if loose == name else f" does not govern {loose!a:.200}"
            text += f": {item.execution.unbound[loose]}"
            yield Finding(labs=labs, truth=Truth.UNDECIDED, text=text, value=None, where=where)
        else:
            odd = next((value for value in values if not rule.holds(Fraction(value))), None)
            truth = Truth.PASS if odd is None else Truth.FAIL
            shown = f"lies in {min(values)!r} … {max(values)!r}"
            agreed = _agreed(item)
            shown += f", and does not govern {agreed[0]!a:.200} and {len(agreed) - 1} more, as agreed" if agreed else ""
            value = max(values) if odd is None else odd
            groups = item.execution.groups if name == "lr" else []
            beyond = [f"{what} {why}" for group in groups for what, why in group.outside.items()]
            beyond += ["its numbers were not followed"] if name == "lr" and not groups else []
            gains = [group.gain for group in groups if group.gain is not None]
            shown += f", which other numbers multiply by up to {max(gains):.4g}" if gains and not beyond else ""
            most, words = _largest(item, basis.replays if groups else ())
            shown += f"; {words}" if most is not None else ""
            if beyond and truth is Truth.PASS:
                truth, shown = Truth.UNDECIDED, f"{shown}, but {', '.join(beyond)}"
            yield Finding(labs=labs, truth=truth, text=f"{text} {shown}", value=value, where=where)


def _loose(name: str, item: Transcript) -> str | None:
    """What a hyper-parameter does not govern: itself, or a tensor that was not agreed on; None if all is as it says."""
    unbound, free = item.execution.unbound, item.agreed.always("free")
    tensors = (each for each in sorted(unbound) if "/" in each and not is_agreed(each, free))
    return name if name in unbound else next(tensors, None)


def _agreed(item: Transcript) -> list[str]:
    """Tensors into which gradients, or batches past every loss, were agreed to bring something."""
    paths = {path.tensor for path in item.execution.paths.agreed}
    return sorted({each for each in item.execution.unbound if "/" in each} | paths)


def change(rule: Rule, basis: Basis) -> Iterator[Finding]:
    """The largest change of a weight in a replayed step of each run, over the rate of its group in that step."""
    for item in basis.transcripts:
        most, text = _largest(item, basis.replays)
        if (agreed := _agreed(item)) and most is not None:
            text += f", and {agreed[0]!a:.200} and {len(agreed) - 1} more are not measured"
        truth = Truth.UNDECIDED if most is None else Truth.PASS if rule.holds(most) else Truth.FAIL
        labs, text = (item.run.metadata.lab,), f"run {item.run.name}: {text}"
        yield Finding(labs=labs, truth=truth, text=text, value=most, where=item.run.where)


def _largest(item: Transcript, replays: Sequence[ReplayEvidence]) -> tuple[float | None, str]:
    """The largest change in replays that reach what was committed, with the same in words; None where unknown."""
    mine = [each for each in replays if each["run_id"] == item.run.manifest.run and each["equal"]]
    ratios = [ratio for each in mine for ratio in each["largest_changes"]]
    known = [ratio for ratio in ratios if ratio is not None]
    most = max(known, default=None) if len(known) == len(ratios) else None
    if not ratios:
        return most, "no step of it was replayed"
    moved = "where its rate is 0, or to what is no number" if most is None else f"by up to {most:.4g} rates"
    return most, f"in {sum(each['measured_steps'] for each in mine)} replayed steps a weight changes {moved}"


def _used(item: Transcript) -> Iterator[Mapping[str, Any]]:
    """The declared groups, and those of each step; what no step has used is bounded too."""
    yield from item.run.declared.groups
    for leaf in item.leaves[1:]:
        if any(execution_of(leaf).hyper):
            yield from overlay(item.run.declared.groups, execution_of(leaf).hyper)


def _parts(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


_COUNTERS = {"meter": "FLOP", "clock": "busy µs"}
"""Kinds of rules about a chip's report, with their units."""
_EXPLAINED = (Kind.REPEATS, Kind.BEHIND, Kind.CUTS)
"""What a chip may count outside declared steps without blame, as far as slack is allowed."""


def counters(rule: Rule, basis: Basis) -> Iterator[Finding]:
    """What each drawn chip has signed in all its boots, to what the declared steps need of it; also one that was sold.

    Its meter counts FLOP, and its clock the time that its work takes its device at least. What its ledger knows for
    repeats of known steps, for parts of steps at power cuts and for work behind last steps counts as that, up to the
    chip's limit of slack; above, the rule is undecided. Of a lab that has runs, and of whose chips none was drawn, one
    does not know what they count.
    """
    asked = [(each["span"]["owner"] if "span" in each else basis.owners[each["chip"]], each) for each in basis.reports]
    for lab in sorted({item.run.metadata.lab for item in basis.transcripts} - {lab for lab, _ in asked}):
        text = f"no chip of lab {lab} was drawn"
        yield Finding(labs=(lab,), truth=Truth.UNDECIDED, text=text, value=None, where={})
    for lab, report in asked:
        if lab:  # else no lab had the chip
            yield _counted(rule, report, lab, basis.unseen.get(lab, ()))


def _counted(rule: Rule, report: ChipEvidence, lab: str, unseen: Sequence[str]) -> Finding:
    chip, ledger, counted = report["chip"], report["ledger"], report["counted"]
    why = "" if counted is not None else "its log begins after its first boot"
    why = "a program is unknown" if ledger is None else why
    why = unseen_text(unseen) if unseen else why
    why = why if report["sound"] else "its evidence is not sound"
    if why or ledger is None or counted is None:
        text = f"chip {chip} counts what cannot be compared with its lab's declared steps: {why}"
        return Finding(labs=(lab,), truth=Truth.UNDECIDED, text=text, value=None, where={"chip": chip})

    def amount(work: Work) -> int:
        """FLOP, or microseconds by its clock."""
        if rule.kind == "meter":
            return work.flop
        assert report["rates"] is not None, "a chip with a ledger has rates"
        return Roofline(**report["rates"]).time(work) * 1_000_000 // TICK

    def booked(*kinds: Kind) -> Work:
        each = [ledger["kinds"][kind.value] for kind in kinds]
        return Work(0, sum(work["flop"] for work in each), sum(work["moved"] for work in each))

    whole, explained = Work(0, counted["flop"], counted["moved"]), booked(*_EXPLAINED)
    slack, excused, declared = ledger["slack"], ledger["excused"], ledger["declared"]
    fits = slack["flop"] - excused["flop"] <= ledger["limit"] * declared["flop"]
    fits = fits and slack["moved"] - excused["moved"] <= ledger["limit"] * declared["moved"]
    most = amount(whole.left(explained) if fits else whole)
    least = amount(whole.left(explained + booked(Kind.BACK)))
    needed = amount(booked(Kind.DECLARED, Kind.EVALUATIONS, Kind.DEAD, Kind.OUTSIDE))
    text = (
        f"chip {chip} counts {amount(whole)} {_COUNTERS[rule.kind]}, and its lab's declared steps need {needed} of it"
    )
    if amount(explained):
        text += (
            f"; {amount(explained)} more were repeated steps, parts of steps at power cuts or work behind last steps"
        )
        text += "" if fits else ", which is more slack than is allowed"
    if needed:
        truth, value = rule.judge(Fraction(least, needed), Fraction(most, needed)), most / needed
    else:
        truth, value = Truth.FAIL if least else Truth.UNDECIDED if most else Truth.PASS, most
    return Finding(labs=(lab,), truth=truth, text=text, value=value, where={"chip": chip})


QUANTITIES: dict[str, Callable[[Rule, Basis], Iterator[Finding]]] = {
    "flop": flop,
    "hyper": hyper,
    "change": change,
    "meter": counters,
    "clock": counters,
}
"""What each kind of rules bounds; ``data`` and ``score`` need samples and weights (``.observations``)."""
