"""One step of a run as a leaf of its append-only log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from firmware_sim import NO_WORK, Work, limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Digest, canonical
from monitor.programs.capture import digest_reads
from monitor.sharding import Layout, StateDigest

__all__ = ["EVALUATION", "STEP", "WRITE", "Execution", "Leaf"]

STEP, EVALUATION, WRITE = "step", "evaluation", "write"
"""What an interval between two commits is for: an evaluation writes nothing of the state, and a write trains nothing:
it copies, averages or folds what is there, between two steps."""

_BATCH = re.compile("[0-9a-f]{64}")
_LOSS = re.compile("[0-9a-f]{8}")
_KEYS = {"step", "batch", "state", "log", "loss", "flop", "execution"}
_EXECUTION_KEYS = {"program", "slots", "hyper", "reads"}
_OUTSIDE = "beside"
"""The key of ``outside`` in recorded files."""
_OPTIONAL_KEYS = {"kind", _OUTSIDE, "values"}
_LONGEST_VALUE = 64
_MOST_WORK = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution record of a step.

    Attributes:
        program: SHA-256 of the program, hex.
        slots: each value that differs from the program's own, as hexadecimal text, with the numbers of its scalars.
        hyper: for each parameter group, the hyper-parameters that differ from the declared ones.
        reads: digest of the values that the body read while the step ran.
        kind: ``STEP``, ``EVALUATION`` or ``WRITE``.
        outside: operators on the state that ran since the commit before and are no part of the program.
        values: what ``reads`` is the digest of, where the optimizer's numbers depend on it; empty elsewhere.
    """

    program: str
    slots: Mapping[str, tuple[int, ...]]
    hyper: tuple[Mapping[str, Any], ...]
    reads: str
    kind: str = STEP
    outside: Work = NO_WORK
    values: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values; kind, work outside and values only where they are not the default."""
        return {
            "program": self.program,
            "slots": {text: list(numbers) for text, numbers in self.slots.items()},
            "hyper": [dict(changes) for changes in self.hyper],
            "reads": self.reads,
            **({} if self.kind == STEP else {"kind": self.kind}),
            **({} if self.outside == NO_WORK else {_OUTSIDE: list(astuple(self.outside))}),
            **({"values": list(self.values)} if self.values else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Execution:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) - _OPTIONAL_KEYS != _EXECUTION_KEYS:
            raise EvidenceError("a step's execution has missing or extra keys")
        slots, hyper = data["slots"], data["hyper"]
        if not isinstance(data["program"], str) or _BATCH.fullmatch(data["program"]) is None:
            raise EvidenceError("a step's program is not a SHA-256 digest")
        if not isinstance(data["reads"], str) or not isinstance(slots, dict) or not isinstance(hyper, list):
            raise EvidenceError("a step's slots, hyper-parameters or reads are malformed")
        Digest.parse(data["reads"])
        numbers = [number for each in slots.values() if isinstance(each, list) for number in each]
        if not all(type(number) is int and 0 <= number < limits.SCALARS.most for number in numbers):
            raise EvidenceError("a step's slots are malformed")
        if not all(isinstance(each, list) and each for each in slots.values()) or len(set(numbers)) != len(numbers):
            raise EvidenceError("a step's slots are malformed")
        if not all(isinstance(changes, dict) and all(map(_is_hyper, changes.values())) for changes in hyper):
            raise EvidenceError("a step's hyper-parameters are malformed")
        if "kind" in data and data["kind"] not in (EVALUATION, WRITE):
            raise EvidenceError("a step is of an unknown kind")
        values = data.get("values", [])
        if not isinstance(values, list) or not all(isinstance(x, str) and len(x) <= _LONGEST_VALUE for x in values):
            raise EvidenceError("the values that a step read are malformed")
        if "values" in data and not (values and digest_reads(values) == data["reads"]):
            raise EvidenceError("the values that a step read do not have the digest that it states")
        return cls(
            program=data["program"],
            slots={text: tuple(each) for text, each in slots.items()},
            hyper=tuple(hyper),
            reads=data["reads"],
            kind=data.get("kind", STEP),
            outside=_work(data[_OUTSIDE]) if _OUTSIDE in data else NO_WORK,
            values=tuple(values),
        )


def _work(data: object) -> Work:
    """Parse calls, FLOP and bytes, not all of which are 0."""
    if not isinstance(data, list) or len(data) != 3 or not any(data):
        raise EvidenceError("the work outside a step's program is malformed")
    if not all(type(count) is int and 0 <= count < _MOST_WORK for count in data):
        raise EvidenceError("the work outside a step's program is malformed")
    return Work(*data)


def _is_hyper(value: object) -> bool:
    """Tell whether a value is a finite number, a truth value, text, None or a list of them."""
    parts = value if isinstance(value, list) else [value]
    return all(
        part is None or isinstance(part, bool | int | str) or (isinstance(part, float) and math.isfinite(part))
        for part in parts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The commitment of one step; step 0 is the initial state, without batch, log and loss.

    Attributes:
        batch: RFC 9162 root over the salted sample digests, hex.
        state: root of the state after the step, opened as its chips need.
        log: digest of the step's rounding log.
        loss: bits of the FP32 loss, 8 hex digits; empty where the program commits to none.
        flop: multiply-adds of matrix products and convolutions, times two; of step 0 those of its initialisation.
        execution: the program that the step ran, and its numbers.
    """

    step: int
    batch: str
    state: StateDigest
    log: str
    loss: str
    flop: int
    execution: Execution | None = None

    @property
    def trains(self) -> bool:
        """Whether it is a step of training, and no evaluation or write between steps."""
        return self.kind == STEP

    @property
    def kind(self) -> str:
        """``STEP``, ``EVALUATION`` or ``WRITE``."""
        return STEP if self.execution is None else self.execution.kind

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        data = {
            "step": self.step,
            "batch": self.batch,
            "state": self.state.to_json(),
            "log": self.log,
            "loss": self.loss,
            "flop": self.flop,
        }
        return {**data, "execution": None if self.execution is None else self.execution.to_json()}

    def encoded(self) -> bytes:
        """Canonical bytes: the input of the leaf hash."""
        return canonical.encode(self.to_json())

    @classmethod
    def decode(cls, data: bytes, layout: Layout) -> Leaf:
        """Parse ``encoded``; EvidenceError on any other bytes."""
        return cls.from_json(canonical.decode(data, most=limits.STEP_BYTES), layout)

    @classmethod
    def from_json(cls, data: object, layout: Layout) -> Leaf:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != _KEYS:
            raise EvidenceError("a step's leaf has missing or extra keys")
        execution = None if data["execution"] is None else Execution.from_json(data["execution"])
        for name in ("batch", "log", "loss"):
            if not isinstance(data[name], str):
                raise EvidenceError(f"a step's {name} is not text")
        for name in ("step", "flop"):
            if type(data[name]) is not int or data[name] < 0:
                raise EvidenceError(f"a step's {name} is not a count")
        if data["step"] == 0:
            if (data["batch"], data["log"], data["loss"], execution) != ("", "", "", None):
                raise EvidenceError(
                    "the leaf of the initial state names a batch, a log, a loss or a program, which only a step has"
                )
        else:
            Digest.parse(data["log"])
            if execution is None:
                raise EvidenceError(f"step {data['step']} names no program")
            if _BATCH.fullmatch(data["batch"]) is None or not (data["loss"] == "" or _LOSS.fullmatch(data["loss"])):
                raise EvidenceError(f"the batch root or loss of step {data['step']} is malformed")
        return cls(
            step=data["step"],
            batch=data["batch"],
            state=StateDigest.from_json(data["state"], layout),
            log=data["log"],
            loss=data["loss"],
            flop=data["flop"],
            execution=execution,
        )
