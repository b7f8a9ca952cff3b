"""What a replay cluster signs: digests of the steps that it took again, and counts of what rounding logs decided.

A result has a fixed form without free text, weights or samples. What leaves the cluster by it are digests without a
salt, by which somebody who can compute a step tells that a guess of its batch is right, and a witness's few values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import (
    SigningKey,
    VerifyingKey,
    canonical,
    open_sealed,
    seal,
)
from firmware_sim.evidence.canonical import JsonObject
from inspector.bundle.clusters import head_and_predicate, statement_about
from inspector.bundle.examinations import EXAMINATION, sign_examination
from inspector.replay.result import MALFORMED, Replayed
from inspector.replay.scheduler import Answer, Job, Worker

__all__ = [
    "REPLAY",
    "REPLAY_PREDICATE",
    "SignedReplay",
    "check_signed",
    "sign_replay",
    "signing",
]

REPLAY = "application/vnd.chipwitness.replay.v2+json"
"""DSSE payload type of a cluster's result."""
REPLAY_PREDICATE = "https://chipwitness.org/replay/v2"
_KEYS = {"device", "fingerprint", "readable", "replays"}


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
    except (CallerError, *MALFORMED) as error:
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
        signed = {} if sign is None else {"signed": sign(name, job, result, key).decode()}
        return {**result, **signed}

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
    except MALFORMED as error:
        text = f"device {name}: the cluster (key {key.raw.hex()[:16]}…) has not signed what it says"
        raise DeviceError(f"{text}: {error}") from None
