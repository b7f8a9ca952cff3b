"""One step of a run as a leaf of its append-only log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Digest, canonical
from monitor.sharding import StateDigest

__all__ = ["Leaf", "decode_step", "encode_step"]

_BATCH = re.compile("[0-9a-f]{64}")
_LOSS = re.compile("[0-9a-f]{8}")
_KEYS = {"step", "batch", "state", "log", "loss", "flop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What a run commits to for one step; step 0 is the initial state, without batch, log, loss and FLOP.

    Attributes:
        batch: RFC 9162 root over the salted sample digests, hex.
        state: digests of all shards after the step.
        log: digest of the step's rounding log.
        loss: bits of the FP32 loss, 8 hex digits.
        flop: multiply-adds of matrix products and convolutions, times two.
    """

    step: int
    batch: str
    state: StateDigest
    log: str
    loss: str
    flop: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "step": self.step,
            "batch": self.batch,
            "state": self.state.to_json(),
            "log": self.log,
            "loss": self.loss,
            "flop": self.flop,
        }

    def encoded(self) -> bytes:
        """Canonical bytes: the input of the leaf hash."""
        return canonical.encode(self.to_json())

    @classmethod
    def from_json(cls, data: object, shards: int) -> Leaf:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != _KEYS:
            raise EvidenceError("a step's leaf has missing or extra keys")
        for name in ("batch", "log", "loss"):
            if not isinstance(data[name], str):
                raise EvidenceError(f"a step's {name} is not text")
        for name in ("step", "flop"):
            if type(data[name]) is not int or data[name] < 0:
                raise EvidenceError(f"a step's {name} is not a count")
        if data["step"] == 0:
            if (data["batch"], data["log"], data["loss"], data["flop"]) != ("", "", "", 0):
                raise EvidenceError("the leaf of the initial state claims a batch, a log, a loss or FLOP")
        else:
            Digest.parse(data["log"])
            if _BATCH.fullmatch(data["batch"]) is None or _LOSS.fullmatch(data["loss"]) is None:
                raise EvidenceError(f"the batch root or loss of step {data['step']} is malformed")
        return cls(
            step=data["step"],
            batch=data["batch"],
            state=StateDigest.from_json(data["state"], shards),
            log=data["log"],
            loss=data["loss"],
            flop=data["flop"],
        )


def encode_step(leaf: Leaf, head: bytes) -> bytes:
    """Content of a step file: the leaf and the signed head of the log that ends with it."""
    return canonical.encode({"leaf": leaf.to_json(), "head": head.decode()})


def decode_step(data: bytes, shards: int) -> tuple[Leaf, bytes]:
    """Parse a step file into leaf and signed head."""
    payload = canonical.decode(data)
    if not isinstance(payload, dict) or set(payload) != {"leaf", "head"} or not isinstance(payload["head"], str):
        raise EvidenceError("a step file has missing or extra keys")
    return Leaf.from_json(payload["leaf"], shards), payload["head"].encode()
