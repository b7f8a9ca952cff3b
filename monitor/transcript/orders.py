"""What a client orders of a provider: a declared training, and the program, numbers and batch of each step by digest.

    TASK/task.json        the order, signed by the client
    TASK/files/<sha256>   programs and their constants, the initial state, and each batch, as their digests name them

No Python is part of it: a provider executes programs, and a referee compares what it states with the order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from firmware_sim import NO_WORK, limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import (
    SigningKey,
    VerifyingKey,
    open_sealed,
    open_statement,
    seal,
    statement,
)
from monitor.declaration.countersignature import Admitted, Countersigned, declaration_digest, is_time
from monitor.declaration.statement import Declaration
from monitor.programs.capture import digest_reads
from monitor.programs.program import Program, read_program
from monitor.transcript.leaf import STEP, Execution
from monitor.transcript.state import decode_state

__all__ = ["ORDER", "TASK", "UNKNOWN_READS", "Order", "OrderFolder", "OrderedStep"]

ORDER = "application/vnd.chipwitness.order.v1+json"
"""DSSE payload type of what a client signs."""
TASK = "task.json"
_PREDICATE = "https://chipwitness.org/order/v1"
_SUBJECT = "declaration"
_KEYS = {"declaration", "programs", "start", "steps", "files", "signed"}
_SHA256 = re.compile("[0-9a-f]{64}")
UNKNOWN_READS = digest_reads([])
"""Stands in an execution for the digest of what a step reads, which no one knows before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedStep:
    """One step as it is ordered.

    Attributes:
        execution: program, numbers and hyper-parameters; what it says of values that the step reads means nothing.
        batch: SHA-256, in hex, of the batch's file without a salt (``encode_state``).
    """

    execution: Execution
    batch: str

    def is_of(self, execution: Execution | None) -> bool:
        """Whether a step that was taken runs this program with these numbers, and nothing outside of it."""
        mine = self.execution
        return (
            execution is not None
            and (execution.program, execution.slots, execution.hyper) == (mine.program, mine.slots, mine.hyper)
            and (execution.kind, execution.outside) == (STEP, NO_WORK)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A training that a client orders.

    Attributes:
        declaration: of ``exact`` numerics, with the digest of the initial state, and as many steps as are ordered.
        programs: by SHA-256, in hex, each program that a step runs, with its cost.
        constants: SHA-256 of the file with a program's constants (``Program.apart``), of programs that have one.
        start: SHA-256 of the initial state's file.
        steps: in their order, from step 1.
        files: length of each file by its SHA-256.
        signed: when, by the client's clock.
    """

    declaration: Declaration
    programs: Mapping[str, Admitted]
    constants: Mapping[str, str]
    start: str
    steps: tuple[OrderedStep, ...]
    files: Mapping[str, int]
    signed: str

    def __post_init__(self) -> None:
        declared = self.declaration
        if declared.numerics != "exact":
            raise EvidenceError(
                "a task needs exact numerics, so that all providers reach the same bits, but it declares "
                f"{declared.numerics}"
            )
        if declared.recipe is not None or declared.origin.state is None or declared.length != len(self.steps):
            raise EvidenceError(
                "a task has to declare its initial state, no recipe, and exactly the steps that it orders"
            )
        named = {self.start, *self.programs, *self.constants.values(), *(step.batch for step in self.steps)}
        if not named <= set(self.files) or not {step.execution.program for step in self.steps} <= set(self.programs):
            raise EvidenceError("a task names a program or a file that it does not list")

    @property
    def flop(self) -> int:
        """FLOP of all steps together, with what elementwise work can hide, as the client states them."""
        return sum(self.programs[step.execution.program].most_flop for step in self.steps)

    @property
    def size(self) -> int:
        """Memory and disk that the task takes: its files twice, its checkpoints, and the largest step."""
        kept = len(self.steps) // self.declaration.checkpoint_every + 3
        largest = max(each.bytes for each in self.programs.values())
        return 2 * sum(self.files.values()) + kept * self.declaration.byte_count + largest

    def agreed(self, digest: str) -> Countersigned:
        """What the client agrees to by ordering the task of a digest."""
        return Countersigned(
            lab="any", run=digest, declaration=self.declaration, programs=self.programs, signed=self.signed
        )

    def sign(self, key: SigningKey) -> bytes:
        """The envelope under the client's key."""
        places = {program: number for number, program in enumerate(sorted(self.programs))}
        predicate = {
            "declaration": self.declaration.to_json(),
            "programs": [
                [program, *astuple(self.programs[program]), self.constants.get(program, "")] for program in places
            ],
            "start": self.start,
            "steps": [_step_json(step, places) for step in self.steps],
            "files": [[name, self.files[name]] for name in sorted(self.files)],
            "signed": self.signed,
        }
        subject = (_SUBJECT, declaration_digest(self.declaration))
        return seal(ORDER, statement(_PREDICATE, [subject], predicate), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> Order:
        """Verify and parse; EvidenceError on another signature or form, or a task that no provider can run."""
        subjects, data = open_statement(open_sealed(envelope, ORDER, key, most=limits.TRUST_BYTES), _PREDICATE)
        if set(data) != _KEYS:
            raise EvidenceError("a task has missing or extra keys")
        try:
            found = cls._parse(data)
        except (CallerError, LookupError, TypeError, ValueError) as error:
            raise EvidenceError(f"a task is malformed: {error!a:.200}") from None
        if dict(subjects) != {_SUBJECT: declaration_digest(found.declaration)}:
            raise EvidenceError("the declaration that a task was signed for is not the one that it holds")
        return found

    @classmethod
    def _parse(cls, data: Mapping[str, Any]) -> Order:
        admitted, constants = {}, {}
        for program, flop, most, size, apart in data["programs"]:
            admitted[_sha256(program)] = Admitted(flop=_count(flop), most_flop=_count(most), bytes=_count(size))
            if apart != "":
                constants[program] = _sha256(apart)
        names = list(admitted)
        files = {_sha256(name): _count(length) for name, length in data["files"]}
        for entries, found in ((data["programs"], admitted), (data["files"], files)):
            if [entry[0] for entry in entries] != sorted(found):
                raise ValueError("it names something twice, or in another order")
        if not is_time(data["signed"]):
            raise ValueError("its time is not like 2026-01-31T12:00:00Z")
        return cls(
            declaration=Declaration.from_json(data["declaration"]),
            programs=admitted,
            constants=constants,
            start=_sha256(data["start"]),
            steps=tuple(_parse_step(each, names) for each in data["steps"]),
            files=files,
            signed=data["signed"],
        )


class OrderFolder:
    """A task and its files, each compared with its length and digest when it is read.

    Attributes:
        digest: SHA-256, in hex, of the signed order: the task's name.
        key: under which it is signed: the client's.

    Args:
        keys: of those who may have signed it.

    Raises:
        CallerError: there is no task, or it is none that one of them signed.
    """

    def __init__(self, folder: Path, *keys: VerifyingKey) -> None:
        self.folder = folder
        try:
            self.envelope = limits.read_file(folder / TASK, limits.TRUST_BYTES)
        except OSError as error:
            raise file_error(f"cannot read the task {folder}", error) from None
        self.digest = hashlib.sha256(self.envelope).hexdigest()
        why = "no key that may order one was given"
        for key in keys:
            try:
                self.order, self.key = Order.open(self.envelope, key), key
                return
            except EvidenceError as error:
                why = str(error)
        raise CallerError(f"{folder.name} is not a task: {why}")

    def place(self, name: str) -> Path:
        """Where the file of a digest lies."""
        return self.folder / "files" / _sha256(name)

    def missing(self) -> list[tuple[str, int]]:
        """Digest and length of each file that is not there."""
        return [(name, length) for name, length in self.order.files.items() if not self.place(name).is_file()]

    def read(self, name: str) -> bytes:
        """Content of a file; EvidenceError unless it is as ordered, DeviceError where it cannot be read."""
        length = self.order.files.get(name)
        if length is None:
            raise EvidenceError(f"the task lists no file {name:.16}…")
        try:
            content = limits.read_file(self.place(name), limits.Limit(length, "bytes"))
        except OSError as error:
            raise file_error(f"cannot read {self.place(name)}", error) from None
        if len(content) != length or hashlib.sha256(content).hexdigest() != name:
            raise EvidenceError(f"file {name[:16]}… of the task is not what was ordered")
        return content

    def program(self, digest: str) -> Program:
        """A program with its constants, which costs what the order says."""
        program, apart = read_program(self.read(digest)), self.order.constants.get(digest)
        program = program if apart is None else program.complete(self.read(apart))
        if Admitted.of(program) != self.order.programs[digest]:
            raise EvidenceError(f"program {digest[:16]}… does not need the FLOP and bytes that the task gives")
        return program

    def changed(self) -> set[str]:
        """Names, ``kind/name``, of the tensors of the state that some step may give another value."""
        programs = [self.program(digest) for digest in self.order.programs]
        absent = {name for each in programs for name, place in each.commit.items() if place is None}
        return absent.union(*(each.written for each in programs))

    def state(self) -> dict[str, Tensor]:
        """The initial state, under ``kind/name``."""
        return decode_state(bytearray(self.read(self.order.start)), "the initial state")

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step, counted from 1."""
        return decode_state(bytearray(self.read(self.order.steps[step - 1].batch)), f"the batch of step {step}")


def _step_json(step: OrderedStep, places: Mapping[str, int]) -> list[Any]:
    data = step.execution.to_json()
    return [places[step.execution.program], data["slots"], data["hyper"], step.batch]


def _parse_step(entry: Any, programs: list[str]) -> OrderedStep:
    number, slots, hyper, batch = entry
    data = {"program": programs[_count(number)], "slots": slots, "hyper": hyper, "reads": UNKNOWN_READS}
    return OrderedStep(execution=Execution.from_json(data), batch=_sha256(batch))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no count")
    return value


def _sha256(text: object) -> str:
    if not isinstance(text, str) or _SHA256.fullmatch(text) is None:
        raise ValueError("no SHA-256")
    return text
