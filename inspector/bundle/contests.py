"""A contested step, decided by one operator: a game between the lab that signed the step and a cluster.

Where a replay cluster says that a step leads elsewhere, the lab and the cluster both commit to all operators of the
step. The first one about which they differ is opened: its inputs, or those of one output tile, and nothing else. A
holder of the bundle can execute it, and then knows which of them is wrong without trusting either (Arun et al. 2025,
section 3).

Where the cluster says that the lab's rounding log cannot be obeyed, what it has of the step ends with the operator that
stopped it. The log is opened then, whose digest is in the lab's leaf, and the operator is executed under its part:
either no honest device can have written that, or none can be stopped by it.

The file is a game's evidence (``inspector.dispute.game``), in which questions name the run. Its parties are the lab and
the cluster. Its law is that of ``StepReferee``, which takes the run and the step from the bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, leaf_hash
from inspector.bundle.replays import SignedReplay
from inspector.bundle.runs import HeldRun
from inspector.dispute.claim import batch_most
from inspector.dispute.following import Follower, Recorded, rule_on_step
from inspector.dispute.game import MakeLaw, Party, Played, Terms, opened_result, record, replay
from inspector.dispute.messages import Traffic
from inspector.dispute.prover import Prover
from inspector.dispute.provider import Provider, Remote
from inspector.dispute.referee import Referee, Seat
from inspector.dispute.ruling import Ruling
from inspector.inspection.trust import Trust
from inspector.wire.desk import Desk, Local
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, RunFolder

__all__ = [
    "CLUSTER",
    "LAB",
    "Decision",
    "Side",
    "StepReferee",
    "decide",
    "departure",
    "hold",
    "read_contest",
]

LAB, CLUSTER = "lab", "cluster"
_Replays: TypeAlias = Sequence[tuple[VerifyingKey, SignedReplay]]
"""Replays of a bundle, each with the key of the cluster that signed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A party in this process: the run as it holds it, how it takes the run's steps, and its key."""

    run: RunFolder
    prover: Prover
    key: SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who is wrong about a step: ``lab``, ``cluster``, both, or none where nothing decides.

    Attributes:
        head: of the run, SHA-256 in hex.
        key: the cluster's.
        operator: that was opened, if one was.
        why: in words.
    """

    head: str
    step: int
    key: VerifyingKey
    guilty: tuple[str, ...]
    operator: str | None
    why: str

    @property
    def text(self) -> str:
        """In words."""
        opened = "" if self.operator is None else f" by opened operator {self.operator}"
        how = f"decided{opened}" if self.guilty else "not decided"
        return f"step {self.step}: {how}: {self.why}"


@dataclass(slots=True, kw_only=True)
class StepReferee(Referee):
    """The law of a game about one step, which both parties take from one state.

    Law:
        outcome    the cluster states the leaf to which the step leads, or that it cannot be taken as it was recorded.
                   If its replays say otherwise, it has lost under ``exact`` numerics. Under others nothing is decided:
                   honest devices may differ about a false rounding log.
        program    the lab opens the program that its leaf names.
        step       then ``rule_on_step`` decides between the two leaves.

    Attributes:
        contested: the run, as its lab signed it.
        at: the step.
        signed: hashes of the leaves to which the step leads by the cluster's replays; None: it cannot be taken.
    """

    contested: HeldRun
    at: int
    signed: frozenset[bytes | None]

    def begin(self) -> Ruling:
        """Rule on the step."""
        self._step = step = self.at
        layout = self.contested.declared.layout
        leaf, before = self.contested.leaf(step), self.contested.leaf(step - 1)
        mine, theirs = (Remote(seat.ask) for seat in self.seats)
        known = {step - 1: before, step: leaf}
        lab = Follower(LAB, mine, known, layout, self.traffic)
        cluster = Follower(CLUSTER, theirs, reached := dict(known), layout, self.traffic)
        stated = cluster.asked(lambda: theirs.outcome(step))
        if (leaf_hash(stated) if stated else None) not in self.signed:
            guilty = (CLUSTER,) if self.contested.declared.numerics == "exact" else ()
            text = "cluster states another result of the step than it signed in its replay"
            return Ruling(guilty=guilty, operator=None, text=text, case="contradiction")
        program = lab.asked(lambda: mine.program(execution_of(leaf).program))
        mine.most["batch"] = theirs.most["batch"] = batch_most(program)
        if stated:
            del reached[step]
            with suppress(EvidenceError):  # on which ``rule_on_step`` rules
                reached[step] = Leaf.decode(stated, layout)
        recorded = Recorded(declared=self.contested.declared, leaf=leaf, program=program)
        return rule_on_step(lab, cluster, recorded, stated, self.traffic)


def read_contest(path: Path) -> bytes:
    """A file of ``world contest``; CallerError if it cannot be read, or is none."""
    try:
        data = limits.read_file(path, limits.BUNDLE_BYTES)
        opened_result(canonical.decode(data, most=limits.BUNDLE_BYTES))
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
    except EvidenceError as error:
        raise CallerError(f"{path}: {error}; give a file that `world contest` wrote") from None
    return data


def hold(
    run: HeldRun, replays: _Replays, trust: Trust, *, lab: Side, cluster: Side, referee: SigningKey, now: datetime
) -> bytes:
    """Play the game between two parties in this process; returns its evidence.

    Raises:
        EvidenceError: as ``decide``; or a party cannot run the step again.
    """
    at, signed = _place(run, replays, cluster.key.verifying, trust)
    for side in (lab, cluster):
        side.prover.trace(at)  # what it cannot run is found here, before it signs that it refuses
    with TemporaryDirectory() as place:
        parties = []
        for name, side in ((LAB, lab), (CLUSTER, cluster)):
            answer = Provider(side.run, side.prover).answer
            desk = Desk(Path(place, name), answer, side.key, [referee.verifying], run.run_id)
            parties.append(Party(name=name, key=side.key.verifying, transport=Local(desk)))
        terms = Terms(seconds=0, task=run.run_id)
        return canonical.encode(record(parties, _law(run, at, signed), referee, terms, now).evidence)


def decide(data: bytes, runs: Sequence[HeldRun], replays: _Replays, trust: Trust) -> Decision:
    """Decide a contest by what is signed in it.

    Raises:
        EvidenceError: it is not about a step of these runs of which a cluster signed that it leads elsewhere; or it is
            not what its parties signed.
    """
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    _, raws, _, terms = opened_result(parsed)
    run = next((each for each in runs if each.run_id == terms.task), None)
    if run is None:
        raise EvidenceError("a contest is about a run that the bundle does not hold")
    key = trust.key_of(run.lab)
    other = next((each for each in trust.clusters if [key.raw.hex(), each.raw.hex()] == raws), None)
    if other is None:
        raise EvidenceError("a contest must be between the lab that signed the run and a cluster in the trust file")
    parties = [(LAB, key), (CLUSTER, other)]
    played = replay(parsed, parties, _law(run, *_place(run, replays, other, trust)), trust.witnesses)
    return _decision(run, other, played)


def _decision(run: HeldRun, key: VerifyingKey, played: Played) -> Decision:
    found = played.verdict.evidence
    return Decision(
        head=run.head_digest,
        step=found["step"],
        key=key,
        guilty=played.law.guilty,
        operator=found["operator"],
        why=played.verdict.reasons[0].text.removeprefix(f"step {found['step']}: "),
    )


def _place(run: HeldRun, replays: _Replays, cluster: VerifyingKey, trust: Trust) -> tuple[int, frozenset[bytes | None]]:
    """The first step that this cluster's replays reach otherwise than the lab signed it, and where they lead."""
    mine = (departure(each, run) for key, each in replays if (key, each.head) == (cluster, run.head_digest))
    places = [place for place in mine if place is not None]
    if not places:
        raise EvidenceError("a contest is not about a step at which a replay of its cluster departs")
    at = min(step for step, _ in places)
    if run.declared.numerics == "native":
        raise EvidenceError("steps with native numerics cannot be decided: no two devices reach the same bits")
    digest = execution_of(run.leaf(at)).program
    agreed = [each for each in trust.agreed() if each.lab == run.lab and each.declaration == run.declared]
    if not any(digest in each.programs for each in agreed):
        raise EvidenceError(f"the contested step runs program {digest[:16]}…, which was not countersigned")
    return at, frozenset(leaf for step, leaf in places if step == at)


def _law(run: HeldRun, at: int, signed: frozenset[bytes | None]) -> MakeLaw:
    def make(seats: Sequence[Seat], traffic: Traffic, name: str, branching: int) -> StepReferee:
        return StepReferee(seats, None, traffic, name, branching, contested=run, at=at, signed=signed)

    return make


def departure(result: SignedReplay, run: HeldRun) -> tuple[int, bytes | None] | None:
    """The first step that a replay reaches otherwise than the lab signed it, and the hash of the leaf it reaches.

    None means the leaf of a step that it could not take as it was recorded.
    """
    return next(filter(None, (each.departure(run.leaf) for each in result.replays)), None)
