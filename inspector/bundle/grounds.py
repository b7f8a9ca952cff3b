"""What in a bundle nobody but its signers can have made up, and what contradicts the runs in it.

A chip's record that a lab's head contradicts, work that a device cannot have done, and a cluster's replay that departs
from what the lab signed: by the same laws as in an inspection (``inspection.history``, ``replay.result``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from firmware_sim import LogRecord, RecordKind
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Roofline, VerifyingKey
from inspector.bundle.clusters import of_cluster
from inspector.bundle.contents import Bundle
from inspector.bundle.replays import SignedReplay
from inspector.bundle.runs import HeldRun
from inspector.inspection.agreement import statements_of
from inspector.inspection.answers import EvidenceSource
from inspector.inspection.cases import OpenedCase, open_case
from inspector.inspection.commits import Pace
from inspector.inspection.document import Evidence
from inspector.inspection.guards import Guard
from inspector.inspection.history import other_root, other_state
from inspector.inspection.mid_step_snapshots import InsideStep, committed_after
from inspector.inspection.ownership import span_named
from inspector.inspection.past_spans import holds_deposit
from inspector.inspection.provenance import is_listed, is_sound
from inspector.inspection.sampling import challenge_seed, run_seed, witness_draw
from inspector.inspection.trust import NotCountersigned, Trust
from inspector.inspection.verdict import Findings
from inspector.inspection.witnesses import witness_in
from monitor.declaration.countersignature import Countersigned, in_force
from monitor.replay.steps import execution_of

_NONCE_BYTES = 32

__all__ = [
    "HeldChip",
    "chip_grounds",
    "chips_in",
    "compared_inside",
    "difference",
    "inside_difference",
    "pace_grounds",
    "signed_replay",
    "terms_of",
    "witnessed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChip:
    """A drawn chip whose evidence is sound, or a span of one that its lab has no more."""

    chip: str
    lab: str
    case: OpenedCase
    past: bool

    def records_of(self, run: HeldRun) -> tuple[int, list[LogRecord]]:
        """Which shard of a run it holds, and its records of that run: none where it takes no part in it."""
        if self.chip not in run.metadata.chips or self.lab != run.lab:
            return 0, []
        records = [record for record in self.case.records if record.run_id.hex() == run.run_id]
        return run.metadata.chips.index(self.chip), records


def signed_replay(content: bytes, trust: Trust) -> tuple[VerifyingKey, SignedReplay]:
    """A replay's result and the known cluster that signed it; EvidenceError if none did."""
    return of_cluster(content, trust, SignedReplay.open, "a replay")


def chips_in(bundle: Bundle, trust: Trust) -> list[HeldChip]:
    """The drawn chips whose evidence is sound: what they signed counts, from whatever source."""
    found = []
    stated = bundle.predicate["evidence"].get("chips", [])
    nonces = {each["chip"]: bytes.fromhex(each["nonce"]) for each in stated}
    if len(nonces) < len(stated):
        raise EvidenceError("the verdict states one chip twice")
    if any(nonces[each["chip"]].hex() != each["nonce"] for each in stated):
        raise EvidenceError("a nonce that the verdict states is malformed")
    agreed = {trust.nonce, *(nonce for _, nonce in trust.challenges.values())}
    if any(nonce and (len(nonce) != _NONCE_BYTES or nonce in agreed) for nonce in nonces.values()):
        raise EvidenceError("a nonce that the verdict states is not 32 bytes, or was agreed before the draw")
    for chip in sorted({path.split("/")[1] for path in bundle.items if path.startswith("chips/")}):
        findings = Findings()
        span = span_named(chip, trust)
        files = {
            path.rpartition("/")[2]: each for path, each in bundle.items.items() if path.startswith(f"chips/{chip}/")
        }
        if span is None or not (holds_deposit(span, files, trust) if span.why else is_listed(chip, trust, findings)):
            continue
        nonce = nonces.get(chip) or None
        source = EvidenceSource(name="bundle", read=_reader(bundle, chip), nonce=nonce, deposited=bool(span.why))
        case = findings.read(partial(open_case, span.chip, source, trust, None, span))
        if case is not None and is_sound(case, trust, findings):
            found.append(HeldChip(chip=span.chip, lab=span.lab, case=case, past=bool(span.why)))
    return found


def _reader(bundle: Bundle, chip: str) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        path = f"chips/{chip}/{name}"
        if path not in bundle.items:
            raise EvidenceError(f"the bundle does not contain {path}")
        return bundle.items[path]

    return read


def chip_grounds(chips: Iterable[HeldChip], runs: Iterable[HeldRun]) -> list[str]:
    """Records that a chip signed, and that the head of its lab's run contradicts."""
    found = []
    for entry in chips:
        for run in runs:
            shard, records = entry.records_of(run)
            for record in records:
                if record.kind is RecordKind.COMMIT:
                    found.append(other_root(entry.chip, record, run))
                elif record.kind is RecordKind.SNAPSHOT and not record.operators:
                    found.append(other_state(entry.chip, record, record.step, shard, run))
    return list(filter(None, found))


def pace_grounds(chips: Iterable[HeldChip], rates: Mapping[str, Roofline]) -> list[str]:
    """Work that a chip signed, and that its device, of these rates, cannot have done between two beacons."""
    findings = Findings()
    for entry in chips:
        if entry.chip in rates:
            law = Pace(entry.chip, rates[entry.chip], entry.case.since)
            for record in entry.case.records:
                findings.check(Guard.TIME, partial(law.take, record), chip=entry.chip)
    return [each.text for each in findings.found]


def difference(result: SignedReplay, run: HeldRun) -> str:
    """Where a replay departs from what the lab signed, in words; empty where no leaf that it reaches differs.

    What a cluster cannot read accuses no one: it may have received other files than the lab's.
    """
    begins = run.declared.origin.initialisation is not None
    for replay in result.replays:
        _, start, stop = replay.segment
        leaves = [run.leaf(step) for step in range(start, stop + 1)]
        if not replay.begins_with(leaves[0].state):
            return f"step {start}: the state is not the one that the lab signed"
        if begins and not start and replay.initial_state not in (None, replay.start_state):
            return "step 0: the declared initialisation does not give the state that the lab signed"
        if departure := replay.departure(run.leaf):
            step, reached = departure
            stopped, other = "cannot be replayed as the lab recorded it", "a replay does not give what the lab signed"
            return f"step {step}: {stopped if reached is None else other}"
    return ""


def inside_difference(result: SignedReplay, run: HeldRun, chips: Iterable[HeldChip]) -> str:
    """A snapshot inside of a step that is not what the replay passed through, in words; empty where there is none."""
    return next((each.text() for each, is_shown in compared_inside(result, run, chips) if is_shown is False), "")


def compared_inside(
    result: SignedReplay, run: HeldRun, chips: Iterable[HeldChip]
) -> Iterator[tuple[InsideStep, bool | None]]:
    """The snapshots that chips certainly took inside of replayed steps, and whether the replay holds each.

    None means that it passed through no such state.
    """
    snapshots = [each for entry in chips for each in _inside(entry, run) if each.is_certain]
    for replay in result.replays:
        _, start, stop = replay.segment
        states = replay.states(run.declared.layout)
        yield from ((each, each.is_shown(states)) for each in snapshots if start < each.step <= stop)


def _inside(entry: HeldChip, run: HeldRun) -> Iterator[InsideStep]:
    """The snapshots that a chip took inside of steps of a run that are opened."""
    (shard, records), is_followed = entry.records_of(run), committed_after(entry.case.records)
    for record in records:
        taken = run.opened.leaves.get(record.step + 1)
        if record.kind is not RecordKind.SNAPSHOT or taken is None:
            continue
        operators = record.operators - execution_of(taken).outside.calls
        if record.operators and operators > 0:
            yield InsideStep(
                chip=entry.chip,
                run_id=run.run_id,
                record=record.counter,
                shard=shard,
                step=taken.step,
                operators=operators,
                digest=record.digest,
                is_certain=is_followed[record.counter],
            )


def witnessed(result: SignedReplay, run: HeldRun, trust: Trust, evidence: Evidence) -> str:
    """What a replay found on altered batches of a path that was not agreed, in words; empty where that is nothing."""
    for replay in result.replays:
        if replay.witness is None:
            continue
        terms = terms_of(run, trust)
        (index, start, stop), (step, drawn, _) = replay.segment, replay.witness
        seed = run_seed(challenge_seed(evidence["draw"]["secret"], evidence["draw"]["heads"]), run.run_id)
        if drawn != witness_draw(seed, index).hex() or not start < step <= stop:
            raise EvidenceError("batches were not altered as the secret gives")
        agreed = in_force(terms, step)[-1].direct_paths if terms else frozenset[str]()
        witness = witness_in(replay.witness, run.declared, agreed)
        if witness is not None and execution_of(run.leaf(step)).program not in agreed:
            return witness.text
    return ""


def terms_of(run: HeldRun, trust: Trust) -> tuple[Countersigned, ...]:
    """The statements about a run; EvidenceError if one is missing, or there twice."""
    signed = [each for each in trust.agreed() if each.lab == run.lab and each.declaration == run.declared]
    try:
        return statements_of(f"run {run.run_id[:16]}…", run.run_id, signed)
    except NotCountersigned as error:
        raise EvidenceError(str(error)) from None
