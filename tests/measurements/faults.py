"""``faults``: a chip's life in which one write goes wrong, once for each write and each way to go wrong.

A life is manufacture, work, an inspection and its checkpoint, new firmware, a crash and another inspection. Afterwards
the log must verify, hold every record that was acknowledged, and go on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bench.origin import write
from firmware_sim import (
    BIRTH,
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    DEPLOYMENT,
    LABORATORY,
    Beacon,
    CheckedChip,
    ChipTrust,
    DeviceMemory,
    Firmware,
    FirmwareChip,
    LogCheckpoint,
    MailboxError,
    MakerCA,
    Region,
    SigningKey,
    Work,
    check_chip,
    collect_evidence,
    parse_log,
    seal_beacon,
    seal_log_checkpoint,
)
from firmware_sim.errors import CallerError, ChipwitnessError, DeviceError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.nvram import PosixDisk

__all__ = ["KINDS", "FaultyDisk", "run", "verdict", "write"]

Row = dict[str, Any]

KINDS = ("raise", "short", "lost", "flip", "kill")
"""The disk says no; writes a part, nothing, or one bit wrong, and says yes; the process is killed while it writes."""

_RUN = bytes(range(32))
_RATE = Fraction(1, 2)
_MAKER = MakerCA.create(b"faults")
_VERIFIER = SigningKey.generate(b"faults".ljust(32))
_UPDATE = _MAKER.sign_firmware(Firmware(name="chipwitness-firmware 1.1", security_version=2))


class FaultyDisk(PosixDisk):
    """Does write number `fatal`, counted from 1, in a wrong way; 0: none of them."""

    def __init__(self, fatal: int = 0, kind: str = "", seed: int = 0) -> None:
        super().__init__()
        self.writes = 0
        self._fatal, self._kind = fatal, kind
        self._random = random.Random(f"{seed} {fatal} {kind}")

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        self._write(data, lambda part: super(FaultyDisk, self).write_at(descriptor, part, offset))

    def write_file(self, path: Path, data: bytes) -> None:
        self._write(data, lambda part: super(FaultyDisk, self).write_file(path, part))

    def truncate(self, descriptor: int, size: int) -> None:
        self._write(b"", lambda _: super(FaultyDisk, self).truncate(descriptor, size))

    def move(self, source: Path, target: Path) -> None:
        self._write(b"", lambda _: super(FaultyDisk, self).move(source, target))

    def _write(self, data: bytes, really: Callable[[bytes], None]) -> None:
        """What has no bytes is done or not."""
        self.writes += 1
        if self.writes != self._fatal:
            return really(data)
        if self._kind == "raise":
            raise DeviceError("the disk is told to fail")
        if self._kind == "flip" and data:
            wrong = bytearray(data)
            wrong[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            really(bytes(wrong))
        elif self._kind in ("short", "kill") and (data or self._random.random() < 0.5):
            really(data[: self._random.randrange(len(data) + (self._kind == "kill"))] if data else data)
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return None


@dataclass(slots=True)
class _Life:
    """A chip, its host and its inspector, who signs `agreed` and knows the records before `since` to be released.

    `done` steps are over, and the host was told of `size` records up to `head`.
    """

    folder: Path
    disk: FaultyDisk
    done: int = 0
    size: int = 0
    head: bytes = bytes(32)
    since: LogCheckpoint = BIRTH
    agreed: LogCheckpoint = BIRTH
    writes: list[str] = field(default_factory=list)
    memory: DeviceMemory = field(default_factory=lambda: DeviceMemory([Region.of("w", np.arange(6, dtype=np.float32))]))
    _chip: FirmwareChip | None = None

    def live(self, tell: Callable[[_Life], object] | None = None) -> None:
        """Take the steps that are left; a step that fails leaves the chip without power."""
        try:
            for name, step in _STEPS[self.done :]:
                before = self.disk.writes
                step(self)
                self.writes += [name] * (self.disk.writes - before)
                self._acknowledge()
                self.done += 1
                if tell:
                    tell(self)
        finally:
            if self._chip is not None:
                self._chip.cut_power()
                self._chip = None

    def conclude(self) -> None:
        """What must hold afterwards; EvidenceError says what does not."""
        for _ in range(2):
            chip = self.chip
            held = {self.since.size: self.since.head}
            held |= {record.counter + 1: record.hash() for record in parse_log(chip.log_bytes())}
            if self.size >= self.since.size and held.get(self.size) != self.head:
                raise EvidenceError(f"record {self.size - 1} was acknowledged and is gone")
            self.attach()
            self.work(99)
            self.agree()
            self.prune()
            self.size, self.head = self.since.size, self.since.head
            self.power_off()

    @property
    def chip(self) -> FirmwareChip:
        """The chip, booted if it has no power."""
        if self._chip is None:
            self._chip = FirmwareChip.power_on(self.folder, disk=self.disk)
        return self._chip

    def _acknowledge(self) -> None:
        if self._chip is not None and (data := self._chip.log_bytes()):
            last = parse_log(data)[-1]
            self.size, self.head = last.counter + 1, last.hash()

    def manufacture(self) -> None:
        """Make the chip, unless an earlier attempt made it and did not say so."""
        if not self.folder.exists():
            self._chip = FirmwareChip.manufacture(
                self.folder,
                maker=_MAKER,
                chip_id="chip-1",
                seed=b"seed",
                snapshot_rate=_RATE,
                beacon_key=_VERIFIER.verifying,
                nvram=DEPLOYMENT,
                disk=self.disk,
            )

    def attach(self) -> None:
        self.chip.attach(self.memory, _RUN, 0)

    def work(self, step: int) -> None:
        """Commit a step and let operators follow that take a tick, past a moment and a tick's end.

        Who runs them does not hear of a disk that fails: the next question to the chip tells.
        """
        self.chip.commit(_RUN, step, bytes([step]) * 32)
        for _ in range(3):
            self.memory.meter.charge(Work(1, 0, LABORATORY.moved // 3 + 1))
        try:
            self.chip.log_bytes()
        except MailboxError as error:
            raise DeviceError(f"the chip has lost its power: {error}") from None

    def beacon(self) -> None:
        boot, size = self.chip.position
        self.chip.beacon(seal_beacon(Beacon(chip_id=self.chip.chip_id, boot=boot, size=size, time=1), _VERIFIER))

    def inspect(self) -> CheckedChip:
        evidence = collect_evidence(self.chip, bytes(32), "v")
        return check_chip(
            evidence, chip_id="chip-1", trust=_TRUST, nonce=bytes(32), verifier_id="v", last=None, since=self.since
        )

    def agree(self) -> None:
        """Inspect, and sign where that ended."""
        self.agreed = self.inspect().checkpoint()

    def prune(self) -> None:
        """Show the chip the checkpoint, unless an earlier attempt did."""
        data = self.chip.log_bytes()
        if data and parse_log(data)[0].counter < self.agreed.size:
            self.chip.prune(seal_log_checkpoint("chip-1", self.agreed, _VERIFIER))
        self.since = self.agreed

    def install(self) -> None:
        self._chip = FirmwareChip.power_on(self.folder, firmware=_UPDATE, disk=self.disk)

    def power_off(self) -> None:
        self.chip.power_off()
        self._chip = None

    def crash(self) -> None:
        self.chip.cut_power()
        self._chip = None
        self.chip.idle(3)


_TRUST = ChipTrust(
    ca_digests=[_MAKER.certificate_digest],
    measurements=[CURRENT_FIRMWARE.measurement, _UPDATE.measurement],
    minimum_security_version=1,
    snapshot_rate=_RATE,
    snapshot_algorithm=DEFAULT_ALGORITHM,
)
_STEPS: Sequence[tuple[str, Callable[[_Life], object]]] = [
    ("manufacture", _Life.manufacture),
    ("attach", _Life.attach),
    *[("work", partial(_Life.work, step=step)) for step in range(4)],
    ("beacon", _Life.beacon),
    ("inspect", _Life.agree),
    ("prune", _Life.prune),
    *[("work", partial(_Life.work, step=step)) for step in range(4, 6)],
    ("power off", _Life.power_off),
    ("install", _Life.install),
    ("attach", _Life.attach),
    *[("work", partial(_Life.work, step=step)) for step in range(6, 8)],
    ("crash", _Life.crash),
    ("inspect", _Life.agree),
]


def run(*, faults: int = 1000, seed: int = 0, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Live a life for each fault.

    Rows hold ``work`` (the kind of fault), ``mode`` (the step whose write it is), ``seconds`` (of all), ``ratio``
    (None), ``faults``, ``lost`` (how many lives did not end as they must) and ``problems`` (their texts).

    Args:
        faults: how many. Fewer than there are writes and ways: drawn among them; more: whole rounds, each of which
            fails every write in every way, with other bits and lengths.
        seed: of all that is drawn.
        progress: called with 1 after each life.

    Raises:
        CallerError: less than one fault.
    """
    if faults < 1:
        raise CallerError("at least one write must fail")
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as name:
        whole = _Life(Path(name) / "whole", FaultyDisk())
        whole.live()
        points = [(kind, fatal) for kind in KINDS for fatal in range(1, whole.disk.writes + 1)]
        rounds = -(-faults // len(points))
        if faults < len(points):
            points = random.Random(seed).sample(points, faults)
        seconds, problems = defaultdict[Any, float](float), defaultdict[Any, list[str | None]](list)
        for number in range(rounds):
            for kind, fatal in points:
                key = (kind, whole.writes[fatal - 1])
                start = time.perf_counter()
                problem = _survive(Path(name) / f"{number} {kind} {fatal}", fatal, kind, seed + number)
                seconds[key] += time.perf_counter() - start
                problems[key].append(problem)
                if progress:
                    progress(1)
    return [
        {
            "work": kind,
            "mode": step,
            "seconds": seconds[kind, step],
            "ratio": None,
            "faults": len(found),
            "lost": len(found) - found.count(None),
            "problems": [problem for problem in found if problem],
        }
        for (kind, step), found in sorted(problems.items())
    ]


def _survive(folder: Path, fatal: int, kind: str, seed: int) -> str | None:
    """Live a life with a fault; what is wrong afterwards, or None."""
    life = _Life(folder, FaultyDisk(fatal, kind, seed))
    try:
        if kind == "kill":
            _live_and_die(life)
        elif kind == "raise":
            with suppress(DeviceError):
                life.live()
        else:
            life.live()
        life.disk = FaultyDisk()
        life.live()
        life.conclude()
    except ChipwitnessError as error:
        return f"write {fatal}: {error}"
    return None


def _live_and_die(life: _Life) -> None:
    """Live in a process that is killed; only what that had said by then is known of it."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            life.live(lambda life: os.write(writing, _said(life)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise DeviceError("the process outlived its fault")
    if lines:
        said = canonical.loads(lines[-1])
        life.done, life.size, life.head = said["done"], said["size"], bytes.fromhex(said["head"])
        life.since = LogCheckpoint.from_bytes(bytes.fromhex(said["since"]))
        life.agreed = LogCheckpoint.from_bytes(bytes.fromhex(said["agreed"]))


def _said(life: _Life) -> bytes:
    said = {
        "done": life.done,
        "size": life.size,
        "head": life.head.hex(),
        "since": life.since.to_bytes().hex(),
        "agreed": life.agreed.to_bytes().hex(),
    }
    return json.dumps(said).encode() + b"\n"


def verdict(rows: Sequence[Row]) -> str | None:
    """What was lost, or None."""
    lost = sum(row["lost"] for row in rows)
    return f"{lost} of {sum(row['faults'] for row in rows)} lives did not end as they must" if lost else None
