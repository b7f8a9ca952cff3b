"""What a replay cluster signs: digests of the steps that it took again, and counts of what rounding logs decided.

A result has a fixed form without free text, weights or samples. What leaves the cluster by it are digests without a
salt, by which somebody who can compute a step tells that a guess of its batch is right, and a witness's few values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import DeviceError, EvidenceError
from firmware_sim.evidence import (
    SigningKey,
    VerifyingKey,
    canonical,
    leaf_hash,
    open_sealed,
    seal,
)
from firmware_sim.evidence.canonical import JsonObject
from inspector.bundle.clusters import head_and_predicate, statement_about
from inspector.bundle.examinations import EXAMINATION, sign_examination
from inspector.replay.decisions import Decisions
from inspector.replay.scheduler import Answer, Job, Worker

__all__ = [
    "REPLAY",
    "REPLAY_PREDICATE",
    "Replayed",
    "SignedReplay",
    "check_signed",
    "sign_replay",
    "signing",
    "state_digest",
]

REPLAY = "application/vnd.chipwitness.replay.v2+json"
"""DSSE payload type of a cluster's result."""
REPLAY_PREDICATE = "https://chipwitness.org/replay/v2"
_KEYS = {"device", "fingerprint", "readable", "replays"}
_REPLAY_KEYS = {
    *("segment", "start_state", "initial_state", "leaves", "inside", "witness", "contradicted_step", "decisions"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One segment taken again.

    Attributes:
        segment: number, first state's step, last step.
        start_state: ``state_digest`` of the state that the replay began with.
        initial_state: of what the declared initialisation gives; None where none was executed.
        leaves: RFC 9162 hash of the leaf of each step that was taken.
        inside: step, operators that had run, and opened root of each state inside of a step that was asked for.
        witness: step, draw, and for each tensor that the step's batch changes past every loss its place in the declared
            state, an element and its values (``inspection.paths``), all that leaves a cluster of a state; None where
            nothing was looked for.
        contradicted_step: the step that could not be taken as recorded; None if all could.
        decisions: what rounding logs decided.
    """

    segment: tuple[int, int, int]
    start_state: str
    initial_state: str | None
    leaves: tuple[bytes, ...]
    inside: tuple[tuple[int, int, str], ...]
    witness: tuple[int, str, tuple[tuple[int, int, tuple[float, ...]], ...]] | None
    contradicted_step: int | None
    decisions: Decisions

    @classmethod
    def of(cls, replay: Mapping[str, Any]) -> Replayed:
        """From what a device returned for a segment; KeyError, ValueError or TypeError if it has another form."""
        index, start, stop = replay["segment"]
        initial, contradiction = replay["initial_state"], replay["contradiction"]
        return cls(
            segment=(int(index), int(start), int(stop)),
            start_state=state_digest(replay["start_state"]),
            initial_state=None if initial is None else state_digest(initial),
            leaves=tuple(leaf_hash(canonical.encode(leaf)) for leaf in replay["leaves"]),
            inside=tuple((int(step), int(count), str(state)) for step, count, state in replay["inside"]),
            witness=_witness(replay["witness"]),
            contradicted_step=None if contradiction is None else int(contradiction["step"]),
            decisions=Decisions.from_json(replay["decisions"]),
        )

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "segment": list(self.segment),
            "start_state": self.start_state,
            "initial_state": self.initial_state,
            "leaves": [each.hex() for each in self.leaves],
            "inside": [list(each) for each in self.inside],
            "witness": self.witness,
            "contradicted_step": self.contradicted_step,
            "decisions": self.decisions.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Replayed:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != _REPLAY_KEYS:
            raise EvidenceError("a replayed segment has missing or extra keys")
        segment, step, leaves = data["segment"], data["contradicted_step"], data["leaves"]
        numbers = [*segment, *([] if step is None else [step])] if isinstance(segment, list) else []
        if len(segment) != 3 or not all(type(each) is int and each >= 0 for each in numbers):
            raise EvidenceError("a replayed segment's numbers are malformed")
        if not isinstance(leaves, list) or not all(_is_hash(each) for each in leaves):
            raise EvidenceError("a replayed segment's leaves are malformed")
        if not isinstance(data["inside"], list) or not all(map(_is_inside, data["inside"])):
            raise EvidenceError("a replayed segment's states inside of steps are malformed")
        for state in (data["start_state"], data["initial_state"] or data["start_state"]):
            if not _is_hash(state):
                raise EvidenceError("a replayed segment's states are malformed")
        return cls(
            segment=(segment[0], segment[1], segment[2]),
            start_state=data["start_state"],
            initial_state=data["initial_state"],
            leaves=tuple(bytes.fromhex(each) for each in leaves),
            inside=tuple((at, count, state) for at, count, state in data["inside"]),
            witness=_witness(data["witness"]),
            contradicted_step=step,
            decisions=Decisions.from_json(data["decisions"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReplay:
    """A cluster's result for one run on one device.

    Attributes:
        head: SHA-256, in hex, of the head that the lab signed: which run, to the last byte.
        readable: whether the cluster could read what it was to replay.
    """

    head: str
    device: str
    fingerprint: str
    readable: bool
    replays: tuple[Replayed, ...]

    def sign(self, key: SigningKey) -> bytes:
        """The envelope under the cluster's key."""
        predicate = {
            "device": self.device,
            "fingerprint": self.fingerprint,
            "readable": self.readable,
            "replays": [each.to_json() for each in self.replays],
        }
        return seal(REPLAY, statement_about(self.head, REPLAY_PREDICATE, predicate), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> SignedReplay:
        """Verify and parse; EvidenceError on another signature or form."""
        return cls.parse(open_sealed(envelope, REPLAY, key))

    @classmethod
    def parse(cls, payload: object) -> SignedReplay:
        """Parse a statement; EvidenceError on another form."""
        head, data = head_and_predicate(payload, REPLAY_PREDICATE, "a replay's result")
        if set(data) != _KEYS or type(data["readable"]) is not bool or not isinstance(data["replays"], list):
            raise EvidenceError("a replay's result has missing or extra keys")
        if not isinstance(data["device"], str) or not isinstance(data["fingerprint"], str):
            raise EvidenceError("a replay's device is malformed")
        return cls(
            head=head,
            device=data["device"],
            fingerprint=data["fingerprint"],
            readable=data["readable"],
            replays=tuple(map(Replayed.from_json, data["replays"])),
        )


def state_digest(opened: str) -> str:
    """SHA-256, in hex, of a state's opened root (``StateDigest.to_json``), which binds every byte of the state."""
    return hashlib.sha256(opened.encode()).hexdigest()


def sign_replay(name: str, job: Job, result: Mapping[str, Any], key: SigningKey) -> bytes:
    """Sign what a device returned for a job ``replay``.

    Raises:
        DeviceError: the device returned something of another form.
    """
    try:
        readable = "evidence_error" not in result
        return SignedReplay(
            head=job["manifest"],
            device=name,
            fingerprint=str(result["fingerprint"]),
            readable=readable,
            replays=tuple(map(Replayed.of, result["replays"])) if readable else (),
        ).sign(key)
    except (EvidenceError, LookupError, ValueError, TypeError) as error:
        raise DeviceError(f"device {name} gave a malformed answer: {error}") from None


_SIGNED = {"replay": sign_replay, "examine": sign_examination}
"""How a cluster signs the result of a job, by its action."""


_PAYLOADS = {"replay": REPLAY, "examine": EXAMINATION}
_NO_SIGNER = SigningKey.generate(bytes(32))
"""A key whose signatures count for nothing: what it signs is compared."""


def signing(worker: Worker, key: SigningKey) -> Worker:
    """A cluster: the worker's results, each with the envelope ``signed`` under the cluster's key."""

    def run(name: str, job: JsonObject) -> Answer:
        result = worker(name, job)
        sign = _SIGNED.get(str(job.get("action")))
        return result if sign is None else {**result, "signed": sign(name, job, result, key).decode()}

    return run


def check_signed(name: str, job: Job, result: Mapping[str, Any], key: VerifyingKey) -> None:
    """DeviceError unless a cluster has signed what it says that a device returned: a bundle shows what it signed."""
    action = str(job.get("action"))
    try:
        mine = _SIGNED[action](name, job, result, _NO_SIGNER)
        said = str(result["signed"]).encode()
        open_sealed(said, _PAYLOADS[action], key)
        if canonical.decode(said)["payload"] != canonical.decode(mine)["payload"]:
            raise EvidenceError("what it signed is not what it says")
    except (EvidenceError, LookupError, ValueError, TypeError, AttributeError) as error:
        text = f"device {name}: the cluster (key {key.raw.hex()[:16]}…) has not signed what it says"
        raise DeviceError(f"{text}: {error}") from None


def _is_inside(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    step, count, state = entry
    return all(type(each) is int and each > 0 for each in (step, count)) and isinstance(state, str)


def _witness(data: Any) -> tuple[int, str, tuple[tuple[int, int, tuple[float, ...]], ...]] | None:
    """What was found on altered batches; EvidenceError on any other form."""
    if data is None:
        return None
    try:
        step, draw, found = data
        entries = tuple((place, element, tuple(values)) for place, element, values in found)
        numbers = [step, *(number for place, element, _ in entries for number in (place, element))]
        values = [value for _, _, each in entries for value in each]
    except (TypeError, ValueError):
        raise EvidenceError("what was found on altered batches is malformed") from None
    if not all(type(each) is int and each >= 0 for each in numbers) or not _is_hash(draw):
        raise EvidenceError("what was found on altered batches is malformed")
    if not all(type(value) in (int, float, bool) for value in values):
        raise EvidenceError("what was found on altered batches is malformed")
    return step, draw, entries


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
