"""A bundle's parts, opened under the keys of those who signed them, and what in them no one else can have made up.

A lab's two heads that contradict each other, a chip's record that a head contradicts, work that a device cannot have
done, and a cluster's replay that departs from what the lab signed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from firmware_sim import RecordKind, limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Roofline, VerifyingKey, canonical, leaf_hash
from inspector.bundle.clusters import of_cluster
from inspector.bundle.contents import Bundle
from inspector.bundle.contests import Contested
from inspector.bundle.replays import SignedReplay, state_digest
from inspector.bundle.steps import Opened
from inspector.inspection.agreement import statements_of
from inspector.inspection.answers import EvidenceSource
from inspector.inspection.cases import OpenedCase, open_case
from inspector.inspection.commits import Pace
from inspector.inspection.document import Evidence
from inspector.inspection.forks import signer_of
from inspector.inspection.guards import Guard
from inspector.inspection.mid_step_snapshots import committed_after
from inspector.inspection.ownership import span_named
from inspector.inspection.past_spans import holds_deposit
from inspector.inspection.paths import witness_in
from inspector.inspection.provenance import is_listed, is_sound
from inspector.inspection.sampling import challenge_seed, run_seed, witness_draw
from inspector.inspection.trust import NotCountersigned, Trust
from inspector.inspection.verdict import Findings
from monitor.declaration.countersignature import Countersigned, in_force
from monitor.declaration.statement import Declaration
from monitor.replay.steps import execution_of
from monitor.sharding import StateDigest
from monitor.transcript.manifest import Manifest
from monitor.transcript.metadata import Metadata

__all__ = [
    "HeldChip",
    "HeldRun",
    "chip_grounds",
    "chips_in",
    "difference",
    "digest_in",
    "forks",
    "inside_difference",
    "named",
    "pace_grounds",
    "runs_in",
    "signed_replay",
    "terms_of",
    "witnessed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A run of the bundle: what its lab signed, and the steps that are opened."""

    run_id: str
    lab: str
    head: Manifest
    head_digest: str
    metadata: Metadata
    declared: Declaration
    opened: Opened

    @property
    def name(self) -> str:
        """The run in words, whatever its folder was called."""
        return f"run {self.run_id[:16]}…"

    def contested(self) -> Contested:
        """As lab and cluster may differ about it."""
        return Contested(
            lab=self.lab, run=self.run_id, head=self.head_digest, declared=self.declared, leaves=self.opened.leaves
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChip:
    """A drawn chip whose evidence is sound, or a span of one that its lab has no more."""

    chip: str
    lab: str
    case: OpenedCase
    past: bool


def named(bundle: Bundle, prefix: str) -> frozenset[bytes]:
    return frozenset(content for path, content in bundle.items.items() if path.startswith(prefix))


def runs_in(bundle: Bundle, trust: Trust) -> list[HeldRun]:
    """The runs whose steps are opened, each under the head that its lab signed."""
    found = []
    for path, content in bundle.items.items():
        if not path.endswith("/head.json"):
            continue
        run_id = path.split("/")[1]
        lab, head = signer_of(content, trust)
        if head.run != run_id:
            raise EvidenceError("a head belongs to another run")
        parts = [bundle.items.get(f"runs/{run_id}/{name}.json") for name in ("metadata", "steps")]
        if parts[0] is None or parts[1] is None:
            continue  # a run that could not be read
        metadata = Metadata.from_json(canonical.decode(parts[0], most=limits.METADATA_BYTES))
        if metadata.run_id.hex() != run_id or metadata.lab != lab:
            raise EvidenceError("a declaration belongs to another run, or another lab")
        length = max(head.steps, 0) if metadata.task.length is None else metadata.task.length
        declared = replace(metadata.task, steps=length)
        found.append(
            HeldRun(
                run_id=run_id,
                lab=lab,
                head=head,
                head_digest=digest_in(bundle, path),
                metadata=metadata,
                declared=declared,
                opened=Opened.read(parts[1], head, declared.layout),
            )
        )
    return found


def digest_in(bundle: Bundle, path: str) -> str:
    return str(bundle.predicate["items"][path])


def signed_replay(content: bytes, trust: Trust) -> tuple[VerifyingKey, SignedReplay]:
    """A replay's result and the known cluster that signed it; EvidenceError if none did."""
    return of_cluster(content, trust, SignedReplay.open, "a replay")


def chips_in(bundle: Bundle, trust: Trust) -> list[HeldChip]:
    """The drawn chips whose evidence is sound: what they signed counts, from whatever source."""
    found = []
    nonces = {each["chip"]: bytes.fromhex(each["nonce"]) for each in bundle.predicate["evidence"].get("chips", [])}
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


def forks(bundle: Bundle, runs: Iterable[HeldRun], trust: Trust) -> list[str]:
    """Heads of one run that the lab signed and that contradict each other."""
    found = []
    known = {run.run_id: run for run in runs}
    for content in sorted(named(bundle, "heads/")):
        lab, other = signer_of(content, trust)
        run = known.get(other.run)
        if run is None or run.lab != lab:
            continue
        size = other.steps + 1
        if (other.finished and run.head.finished) or run.opened.roots.get(size, other.root) != other.root:
            found.append(f"{lab} signed two heads of run {other.run} that contradict each other")
    return found


def chip_grounds(chips: Iterable[HeldChip], runs: Iterable[HeldRun]) -> list[str]:
    """Records that a chip signed, and that the head of its lab's run contradicts."""
    found = []
    for entry in chips:
        for run in runs:
            if entry.chip not in run.metadata.chips or entry.lab != run.lab:
                continue
            shard = run.metadata.chips.index(entry.chip)
            for record in entry.case.records:
                if record.run_id.hex() != run.run_id:
                    continue
                where = f"chip {entry.chip}, record {record.counter}: its "
                if record.kind is RecordKind.SNAPSHOT and not record.operators and record.step in run.opened.leaves:
                    leaf, _ = run.opened.leaves[record.step]
                    if record.digest != leaf.state.shard(shard).value:
                        found.append(f"{where}snapshot is not shard {shard} of the state of step {record.step}")
                elif record.kind is RecordKind.COMMIT:
                    root = run.opened.roots.get(record.step + 1, record.digest)
                    if record.digest != root:
                        found.append(f"{where}head of step {record.step} is not the one that the lab signed")
    return found


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
    """Where a replay departs from what the lab signed, in words; empty where it reaches every leaf.

    What a cluster cannot read accuses no one: it may have received other files than the lab's.
    """
    for replay in result.replays:
        _, start, stop = replay.segment
        leaves = run.opened.leaves
        if any(step not in leaves for step in range(start, stop + 1)):
            raise EvidenceError("the bundle does not open a step that was replayed")
        if replay.start_state != state_digest(leaves[start][0].state.to_json()):
            return f"step {start}: the state is not the one that the lab signed"
        if replay.initial_state is not None and replay.initial_state != replay.start_state:
            return "step 0: the declared initialisation does not give the state that the lab signed"
        for step, reached in enumerate(replay.leaves, start=start + 1):
            if step > stop:
                raise EvidenceError("a replay took more steps than its segment has")
            if reached != leaf_hash(leaves[step][1]):
                return f"step {step}: a replay does not give what the lab signed"
        if replay.contradicted_step is not None:
            return f"step {replay.contradicted_step}: cannot be replayed as the lab recorded it"
        if len(replay.leaves) != stop - start:
            raise EvidenceError("a replay is not complete")
    return ""


def inside_difference(result: SignedReplay, run: HeldRun, chips: Iterable[HeldChip]) -> str:
    """A snapshot inside of a step that is not what the replay passed through, in words; empty where there is none."""
    states = {
        (step, count): StateDigest.from_json(state, run.declared.layout)
        for replay in result.replays
        for step, count, state in replay.inside
    }
    for entry in chips:
        if entry.chip not in run.metadata.chips or entry.lab != run.lab:
            continue
        shard, followed = run.metadata.chips.index(entry.chip), committed_after(entry.case.records)
        for record in entry.case.records:
            if record.kind is not RecordKind.SNAPSHOT or record.run_id.hex() != run.run_id or not record.operators:
                continue
            taken = run.opened.leaves.get(record.step + 1)
            outside = 0 if taken is None else execution_of(taken[0]).outside.calls
            state = states.get((record.step + 1, record.operators - outside))
            if state is not None and followed[record.counter] and state.shard(shard).value != record.digest:
                where = f"chip {entry.chip}, record {record.counter}: its snapshot inside of step {record.step + 1}"
                return f"{where} is not what shard {shard} then holds"
    return ""


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
        if witness is not None and execution_of(run.opened.leaves[step][0]).program not in agreed:
            return witness.text
    return ""


def terms_of(run: HeldRun, trust: Trust) -> tuple[Countersigned, ...]:
    """The statements about a run; EvidenceError if one is missing, or there twice."""
    signed = [each for each in trust.agreed() if each.lab == run.lab and each.declaration == run.declared]
    try:
        return statements_of(f"run {run.run_id[:16]}…", run.run_id, signed)
    except NotCountersigned as error:
        raise EvidenceError(str(error)) from None
