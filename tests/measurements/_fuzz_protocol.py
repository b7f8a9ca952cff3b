"""What an inspection's other parties send, for ``fuzz``: bundles, a lab's messages of a round, and contests.

Bytes under a signature are signed anew before they are read, as the party that they come from could.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, canonical, decode_base64, leaf_hash, seal
from inspector.bundle.builder import bundle_of
from inspector.bundle.checker import check_bundle
from inspector.bundle.contents import Bundle, read_bundle
from inspector.bundle.contests import CLUSTER, Side, decide, hold, read_contest
from inspector.bundle.replays import REPLAY, SignedReplay, signing
from inspector.bundle.runs import HeldRun
from inspector.bundle.steps import Opened
from inspector.dispute.game import digest_of
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.replay.decisions import Decisions
from inspector.replay.pool import DevicePool
from inspector.replay.result import Replayed, state_digest
from inspector.rounds import steps
from inspector.rounds.world import INSPECTORATE, World
from inspector.wire.messages import Answer, Question
from monitor.lab.lies import conduct
from monitor.lab.prover import LabProver
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.replay.prover import RunProver
from monitor.transcript import RunFolder

__all__ = ["BundleReader", "ContestReader", "RoundReader", "prepare_bundle", "prepare_contest", "prepare_round"]

_SETTINGS = Settings(samples=1, seed="x", devices=("native",))
_REPLAYS = "replays/"
_RESULT = "application/vnd.chipwitness.game.v1+json"


def prepare_bundle(run: Path, trust: Trust, key: SigningKey, out: Path, now: datetime) -> None:
    """Inspect a run and keep the bundle; the key is the inspectorate's and the cluster's."""
    case = CaseFile()
    with DevicePool() as devices:
        verdict = inspect([run], trust, _SETTINGS, now=now, worker=signing(devices.run, key), case=case)
    out.write_bytes(bundle_of(case, verdict, trust, _SETTINGS, key))


class BundleReader:
    """Bundles as JSON: what the inspectorate signs, and the items, of the cluster what it signs."""

    def __init__(self, path: Path, trust: Trust, key: SigningKey) -> None:
        self._path, self._key = path, key
        inspectorates = trust.inspectorates | {key.verifying}
        self._trust = replace(trust, inspectorates=inspectorates, clusters=frozenset({key.verifying}))

    def seed(self) -> bytes:
        """The kept bundle."""
        bundle = Bundle.open(read_bundle(self._path), self._key.verifying)
        predicate = {name: value for name, value in bundle.predicate.items() if name != "items"}
        items = {path: self._unsigned(path, content) for path, content in bundle.items.items()}
        return canonical.encode({"predicate": predicate, "items": items})

    def read(self, data: bytes) -> None:
        """Check such a bundle; EvidenceError where it does not verify."""
        told = canonical.decode(data, most=limits.BUNDLE_BYTES)
        try:
            items = {path: self._signed(path, content) for path, content in told["items"].items()}
            signed = Bundle.sign(told["predicate"], items, self._key)
        except (LookupError, TypeError, AttributeError) as error:
            raise EvidenceError(f"nobody could sign that: {error!a}") from None
        verdict = check_bundle(signed, self._trust)
        if not verdict.evidence["verifies"]:
            raise EvidenceError(verdict.reasons[0].text)

    def _unsigned(self, path: str, content: bytes) -> Any:
        if path.startswith(_REPLAYS):
            return canonical.loads(decode_base64(canonical.loads(content)["payload"]))
        return content.decode() if content.isascii() else {"base64": base64.b64encode(content).decode()}

    def _signed(self, path: str, content: Any) -> bytes:
        if path.startswith(_REPLAYS):
            return seal(REPLAY, content, self._key)
        if isinstance(content, str):
            return content.encode(errors="replace")
        return decode_base64(content["base64"])


def prepare_round(folder: Path, run: Path, trust: Trust, now: datetime) -> None:
    """Begin a round in a world of its own."""
    world = World.create(folder, LabSide)
    world.join(trust, {"run": run})
    steps.announce(world, _SETTINGS, minutes=10, refusals=0, now=now)


class RoundReader:
    """A lab's heads, as the inspectorate reads them when it opens its secret."""

    def __init__(self, folder: Path, lab: str, key: SigningKey, now: datetime) -> None:
        self._world, self._lab, self._key, self._now = World(folder, LabSide), lab, key, now

    def seed(self, head: bytes) -> bytes:
        """What a lab with one run says."""
        return canonical.encode({"heads": [head.decode()]})

    def read(self, data: bytes) -> None:
        """Open the secret when the lab has said that; EvidenceError where it then counts as silent."""
        said = canonical.decode(data, most=limits.BUNDLE_BYTES)
        if not isinstance(said, Mapping):
            raise EvidenceError("a message is an object")
        world, key = self._world, self._world.public(INSPECTORATE)
        announced = world.read(INSPECTORATE, "announcement", INSPECTORATE, key)
        assert announced is not None
        world.send("heads", self._lab, [INSPECTORATE], said, announced.digest, self._key)
        try:
            steps.reveal(world, now=steps.past(world, "heads", self._now))
            drawn = world.read(INSPECTORATE, "draw", INSPECTORATE, key)
            if drawn is None or self._lab in drawn.predicate["silent"]:
                raise EvidenceError("the lab counts as silent")
        finally:
            for party in (INSPECTORATE, self._lab):
                for path in [*world.home(party).glob("*/*.json"), *world.home(party).glob("*/*/*.json")]:
                    if path.parts[len(world.home(party).parts)] in ("inbox", "received", "sent"):
                        path.unlink() if "-announcement." not in path.name else None


def prepare_contest(run: RunFolder, trust: Trust, key: SigningKey, out: Path, now: datetime) -> None:
    """Let the lab of a run and a cluster that lies, whose key this is, answer for the first step.

    They part where the state is committed, so that deciding executes no kernel: a fuzzer cannot compile them.
    """
    lab_key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run.folder)))
    prover = _lying(run)
    made = hold(
        _contested(run),
        [(key.verifying, _replay(run, prover))],
        replace(trust, clusters=frozenset({key.verifying})),
        lab=Side(run=run, prover=LabProver(run.folder), key=lab_key),
        cluster=Side(run=run, prover=prover, key=key),
        referee=key,
        now=now,
    )
    out.write_bytes(made)


class ContestReader:
    """What a cluster answers about a contested step: the bodies of its answers, which it signs, as the referee does."""

    def __init__(self, path: Path, run: RunFolder, trust: Trust, key: SigningKey) -> None:
        self._game, self._run = canonical.decode(read_contest(path), most=limits.BUNDLE_BYTES), _contested(run)
        self._trust, self._key = replace(trust, clusters=frozenset({key.verifying})), key
        self._replay = _replay(run, _lying(run))
        self._mine = [
            number
            for number, each in enumerate(self._game["exchanges"])
            if Question.open(canonical.encode(each["question"]), key.verifying).to == key.verifying.key_id
        ]

    def seed(self) -> bytes:
        """The cluster's answers."""
        return canonical.encode([self._game["exchanges"][number]["body"] for number in self._mine])

    def read(self, bodies: bytes) -> None:
        """Decide; EvidenceError where it is no contest, or an answer is none or lacks."""
        others = canonical.decode(bodies, most=limits.BUNDLE_BYTES)
        exchanges = list(self._game["exchanges"])
        if not isinstance(others, list) or len(others) != len(self._mine):
            raise EvidenceError("answers are a list with a body for each question")
        for number, body in zip(self._mine, others, strict=True):
            question = canonical.encode(exchanges[number]["question"])
            answer = Answer.over(question, decode_base64(body)).seal(self._key)
            exchanges[number] = {**exchanges[number], "answer": canonical.decode(answer), "body": body}
        decision = decide(self._signed(exchanges), [self._run], [(self._key.verifying, self._replay)], self._trust)
        assert decision.guilty == (CLUSTER,), decision

    def _signed(self, exchanges: list[object]) -> bytes:
        """The game with other exchanges, as its referee signs it."""
        result = canonical.decode(decode_base64(self._game["result"]["payload"]), most=limits.BUNDLE_BYTES)
        signed = seal(_RESULT, {**result, "exchanges": digest_of(exchanges)}, self._key)
        return canonical.encode({**self._game, "exchanges": exchanges, "result": canonical.decode(signed)})


def _lying(run: RunFolder) -> RunProver:
    return RunProver(run, conduct("other-learning-rate", 1))


def _replay(run: RunFolder, prover: RunProver) -> SignedReplay:
    """What a cluster with this prover signs."""
    replayed = Replayed(
        segment=(0, 0, 1),
        start_state=state_digest(run.leaf(0).state.to_json()),
        initial_state=None,
        leaves=(leaf_hash(prover.outcome(1)),),
        inside=(),
        witness=None,
        contradicted_step=None,
        decisions=Decisions(),
    )
    return SignedReplay(head=run.manifest_digest, device="native", fingerprint="f", readable=True, replays=(replayed,))


def _contested(run: RunFolder) -> HeldRun:
    return HeldRun(
        run_id=run.manifest.run,
        lab=run.metadata.lab,
        head=run.manifest,
        head_digest=run.manifest_digest,
        metadata=run.metadata,
        declared=run.declared,
        opened=Opened(leaves={leaf.step: leaf for leaf in run.load_steps()[0]}, roots={}),
    )
