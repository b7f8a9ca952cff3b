"""Answers of a party of a dispute as JSON: how a party gives them, and how a referee reads them."""

from __future__ import annotations

import base64
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import (
    decode_base64,
)
from inspector.dispute.prover import Prover
from monitor.numerics.operators.partial_sums import Part
from monitor.protocol.dispute import Opening, TraceHead
from monitor.transcript.data import BatchOpening

__all__ = ["Heard", "Stated"]

_HASH = 32
_NUMBER = re.compile("-?(0|[1-9a-f][0-9a-f]{0,199})")


@dataclass(slots=True)
class Heard(Prover):
    """A party, with a note of all that it answers."""

    prover: Prover
    answers: dict[str, Any] = field(default_factory=dict)

    def step(self, number: int) -> Opening:
        opening = self.prover.step(number)
        self.answers[f"step {number}"] = _opening_json(opening)
        return opening

    def outcome(self, step: int) -> bytes:
        leaf = self.prover.outcome(step)
        self.answers[f"outcome {step}"] = base64.b64encode(leaf).decode()
        return leaf

    def trace(self, step: int) -> TraceHead:
        return self.prover.trace(step)

    def trace_prefix(self, step: int, size: int) -> tuple[bytes, tuple[bytes, ...]]:
        root, proof = self.prover.trace_prefix(step, size)
        self.answers[f"prefix {step} {size}"] = [root.hex(), *(each.hex() for each in proof)]
        return root, proof

    def node(self, step: int, index: int) -> Opening:
        opening = self.prover.node(step, index)
        self.answers[f"node {step} {index}"] = _opening_json(opening)
        return opening

    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        hashes = self.prover.hashes(step, index, side, slot)
        self.answers[f"hashes {step} {index} {side} {slot}"] = base64.b64encode(b"".join(hashes)).decode()
        return hashes

    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        content = self.prover.chunk(step, index, side, slot, number)
        self.answers[f"chunk {step} {index} {side} {slot} {number}"] = base64.b64encode(content).decode()
        return content

    def parts(self, step: int, index: int, slot: int, place: int, count: int) -> tuple[Part, ...]:
        parts = self.prover.parts(step, index, slot, place, count)
        self.answers[f"parts {step} {index} {slot} {place} {count}"] = [
            [[f"{number:x}" for number in kind] for kind in part] for part in parts
        ]
        return parts

    def block(self, step: int, number: int, name: str) -> tuple[bytes, tuple[bytes, ...]]:
        content, proof = self.prover.block(step, number, name)
        stated = {"block": base64.b64encode(content).decode(), "proof": [each.hex() for each in proof]}
        self.answers[f"block {step} {number} {name}"] = stated
        return content, proof

    def blocks(self, step: int, start: int, size: int) -> tuple[bytes, ...]:
        hashes = self.prover.blocks(step, start, size)
        self.answers[f"blocks {step} {start} {size}"] = base64.b64encode(b"".join(hashes)).decode()
        return hashes

    def batch(self, step: int) -> BatchOpening:
        opening = self.prover.batch(step)
        parts = [[base64.b64encode(each).decode() for each in part] for part in opening.parts]
        self.answers[f"batch {step}"] = {"is_file": opening.is_file, "parts": parts}
        return opening

    def constant(self, step: int, number: int) -> bytes:
        content = self.prover.constant(step, number)
        self.answers[f"constant {step} {number}"] = base64.b64encode(content).decode()
        return content

    def rounding_entries(self, step: int, index: int) -> bytes:
        entries = self.prover.rounding_entries(step, index)
        self.answers[f"entries {step} {index}"] = base64.b64encode(entries).decode()
        return entries

    def log(self, step: int) -> bytes:
        log = self.prover.log(step)
        self.answers[f"log {step}"] = base64.b64encode(log).decode()
        return log


class Stated(Prover):
    """A party whose answers come as ``Heard`` notes them, by the question's text."""

    __slots__ = ()

    @abstractmethod
    def _answer(self, question: str) -> Any:
        """What it states; EvidenceError where it states nothing."""

    def step(self, number: int) -> Opening:
        return _opening(self._answer(f"step {number}"))

    def outcome(self, step: int) -> bytes:
        return decode_base64(self._answer(f"outcome {step}"))

    def trace(self, step: int) -> TraceHead:
        return _head(self._answer(f"trace {step}"))

    def trace_prefix(self, step: int, size: int) -> tuple[bytes, tuple[bytes, ...]]:
        root, *proof = map(bytes.fromhex, self._answer(f"prefix {step} {size}"))
        return root, tuple(proof)

    def node(self, step: int, index: int) -> Opening:
        return _opening(self._answer(f"node {step} {index}"))

    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        return _hashes(self._answer(f"hashes {step} {index} {side} {slot}"))

    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        return decode_base64(self._answer(f"chunk {step} {index} {side} {slot} {number}"))

    def parts(self, step: int, index: int, slot: int, place: int, count: int) -> tuple[Part, ...]:
        stated = self._answer(f"parts {step} {index} {slot} {place} {count}")
        return tuple(Part(*(tuple(map(_number, kind)) for kind in part)) for part in stated)

    def block(self, step: int, number: int, name: str) -> tuple[bytes, tuple[bytes, ...]]:
        stated = self._answer(f"block {step} {number} {name}")
        return decode_base64(stated["block"]), tuple(map(bytes.fromhex, stated["proof"]))

    def blocks(self, step: int, start: int, size: int) -> tuple[bytes, ...]:
        return _hashes(self._answer(f"blocks {step} {start} {size}"))

    def batch(self, step: int) -> BatchOpening:
        opened = self._answer(f"batch {step}")
        parts = [(decode_base64(salt), decode_base64(content)) for salt, content in opened["parts"]]
        return BatchOpening(parts, is_file=bool(opened["is_file"]))

    def constant(self, step: int, number: int) -> bytes:
        return decode_base64(self._answer(f"constant {step} {number}"))

    def rounding_entries(self, step: int, index: int) -> bytes:
        return decode_base64(self._answer(f"entries {step} {index}"))

    def log(self, step: int) -> bytes:
        return decode_base64(self._answer(f"log {step}"))


def _hashes(text: str) -> tuple[bytes, ...]:
    data = decode_base64(text)
    return tuple(data[at : at + _HASH] for at in range(0, len(data), _HASH))


def _number(text: object) -> int:
    if not isinstance(text, str) or _NUMBER.fullmatch(text) is None:
        raise EvidenceError(f"a signed answer holds {text!a:.100} where a hexadecimal number must be")
    return int(text, 16)


def _head(data: object) -> TraceHead:
    if not isinstance(data, list) or len(data) != 2 or type(data[0]) is not int or not isinstance(data[1], str):
        raise EvidenceError("a commitment to operators is malformed")
    try:
        return TraceHead(size=data[0], root=bytes.fromhex(data[1]))
    except ValueError:
        raise EvidenceError("a commitment to operators is malformed") from None


def _opening_json(opening: Opening) -> dict[str, Any]:
    return {"leaf": base64.b64encode(opening.leaf).decode(), "proof": [each.hex() for each in opening.proof]}


def _opening(data: Mapping[str, Any]) -> Opening:
    return Opening(leaf=decode_base64(data["leaf"]), proof=tuple(map(bytes.fromhex, data["proof"])))
