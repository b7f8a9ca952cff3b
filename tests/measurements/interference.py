"""``interference``: random host programs on two chips that differ in their draws, or in their secrets, alone.

A chip decides alone when it takes snapshots. So whatever a host calls and sees is the same on two chips of one identity
until one of them takes a snapshot that the other does not: else some call tells what is to come (Goguen and Meseguer
1982, non-interference). And two chips with other secrets look alike but for digests, keys and signatures. A host here
calls whatever a host can (`chip.Chip`, the memory, the meter), and what it has seen decides what it calls next. Time on
the wall is not compared.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bench.origin import write
from firmware_sim import (
    BIRTH,
    LABORATORY,
    NEVER,
    Beacon,
    ChipOrder,
    ChipwitnessError,
    DeviceMemory,
    FirmwareChip,
    MakerCA,
    Meter,
    Region,
    SigningKey,
    SnapshotEvent,
    Work,
    decode_base64,
    derive_epoch_key,
    parse_log,
    seal_beacon,
    seal_log_checkpoint,
)
from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from firmware_sim.hooks import Draw, Hooks

__all__ = ["CALLS", "Host", "compare_draws", "compare_secrets", "run", "table", "verdict", "write"]

Row = dict[str, Any]
MOST_CALLS = 200
_VERIFIER = SigningKey.generate(b"interference".ljust(32))
_RUNS = tuple(hashlib.sha256(name).digest() for name in (b"one", b"two"))
_RATES = (Fraction(1, 2), Fraction(1, 5), Fraction(1, 20), Fraction(1, 200))
_BIG = 1 << 18
"""Elements of a memory whose copy is hashed beside the host's program."""
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass(slots=True)
class _Journal:
    """What a host has seen, in order, and of each snapshot how much that was, with boot, tick, mark and time.

    Attributes:
        is_blind: what was seen does not decide what is called next.
    """

    is_blind: bool
    seen: list[tuple[str, object]] = field(default_factory=list)
    taken: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    state: bytes = bytes(32)

    def note(self, name: str, what: object) -> None:
        told = what if isinstance(what, bytes) else _ADDRESS.sub("0x", repr(what))
        self.seen.append((name, told))
        line = b"" if self.is_blind else told if isinstance(told, bytes) else told.encode()
        self.state = hashlib.sha256(self.state + line).digest()


def _chip(draws: bytes, journal: _Journal) -> type[FirmwareChip]:
    """Honest firmware but for its draws, which come from another key than the epoch's."""

    class Others(Hooks):
        def moments(self, draw: Draw, start: int, end: int) -> Iterator[int]:
            return replace(draw, key=derive_epoch_key(draws, draw.epoch)).between(start, end)

    class Drawn(FirmwareChip, hooks=Others):
        def _snapshot(self, ticks: Sequence[int], mark: int = 0) -> list[SnapshotEvent]:
            journal.taken += ((len(journal.seen), self._boot, tick, mark, self._time) for tick in ticks)
            return super()._snapshot(ticks, mark)

    return Drawn


class Host:
    """A host with one chip, and a program that decides each call by all that it has seen.

    Args:
        draws: decides the chip's snapshots, and nothing else.
        secrets: seed of all secrets of the chip.
        look: what this host sees besides, for a test of the comparison.
    """

    def __init__(
        self,
        folder: Path,
        *,
        draws: bytes,
        secrets: bytes,
        seed: int,
        is_blind: bool = False,
        look: Callable[[Host], object] | None = None,
    ) -> None:
        self.journal = _Journal(is_blind)
        self.folder, self._look, self._seed = folder / "chip", look, seed
        chance = random.Random(f"chipwitness/interference/{seed}")
        self._calls = chance.randint(1, MOST_CALLS)
        self._kind = _chip(draws, self.journal)
        order = ChipOrder(
            maker=MakerCA.create(secrets),
            chip_id="chip",
            seed=secrets,
            snapshot_rate=chance.choice(_RATES),
            beacon_key=_VERIFIER.verifying,
        )
        self.chip: FirmwareChip = self._kind.from_order(self.folder, order)
        self.meters = [Meter(), Meter()]
        sizes = (_BIG if chance.random() < 0.01 else 24, 6)
        self._arrays = [np.zeros(size, np.float32) for size in sizes]
        self.memories = [
            DeviceMemory([Region.of("w", self._arrays[0])], meter=self.meters[0]),
            DeviceMemory([Region.of("w", self._arrays[1])], meter=self.meters[1], share=(24, 72)),
        ]
        self.chance = chance
        self._step = self._time = 0

    def play(self) -> None:
        """The whole program."""
        names = list(CALLS)
        weights = [CALLS[name][0] for name in names]
        with self._still():
            self._note("made", None)
            for _ in range(self._calls):
                self.chance = random.Random(self.journal.state + self._seed.to_bytes(8, "big"))
                [name] = self.chance.choices(names, weights)
                try:
                    found = CALLS[name][1](self)
                except (ChipwitnessError, OSError, TypeError, ValueError) as error:
                    found = type(error).__name__, str(error).replace(str(self.folder), "FOLDER")
                self._note(name, found)
            self.chip._lose_power()

    @contextmanager
    def _still(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.chip._finalizer()

    def _note(self, name: str, found: object) -> None:
        """A call has returned: also all that stands in public attributes and files then."""
        self.journal.note(name, found)
        for each in ("position", "utilisation", "nvram", "time", "boot", "chip_id", "algorithm", "firmware"):
            try:
                self.journal.note(each, getattr(self.chip, each))
            except ChipwitnessError as error:
                self.journal.note(each, str(error))
        self.journal.note("repr", (self.chip, self.memories, self.meters))
        self.journal.note("meters", [(meter.total, meter.holdings.byte_count) for meter in self.meters])
        for path in sorted(self.folder.iterdir()):
            self.journal.note(path.name, path.read_bytes())
        if self._look is not None:
            self.journal.note("look", self._look(self))

    # What a host calls

    def attach(self) -> object:
        at = self.chance.randrange(2)
        return self.chip.attach(self.memories[at], self.chance.choice(_RUNS), self._step)

    def commit(self) -> object:
        self._step += 1
        return self.chip.commit(self.chance.choice(_RUNS), self._step, self.chance.randbytes(32))

    def compute(self) -> object:
        """Operators, the host looking after each; they may write the memory."""
        at, most = self.chance.randrange(2), self.chance.choice((1, 10, 200))
        for _ in range(self.chance.randint(1, 8)):
            if self.chance.random() < 0.5:
                self._arrays[at][self.chance.randrange(6)] += 1
            moved = self.chance.randrange(1, LABORATORY.moved * most // 100 + 2)
            self.meters[at].charge(Work(1, self.chance.randrange(LABORATORY.flop // 50), moved))
            self.journal.note("operator", (self.meters[at].total, self.chip.time))
        return None

    def wait(self) -> object:
        """Be called by the meter, too."""
        meter = self.meters[self.chance.randrange(2)]
        at = Work(meter.total.calls + self.chance.randint(1, 9), NEVER, NEVER)
        meter.wake(at, lambda before, after: self.journal.note("woken", (before, after, self.chip.time)))
        return None

    def idle(self) -> object:
        return self.chip.idle(self.chance.choice((0, 1, 2, 7)))

    def beacon(self) -> object:
        boot, size = self.chip.position
        self._time += self.chance.randint(0, 3)
        return self.chip.beacon(seal_beacon(Beacon(chip_id="chip", boot=boot, size=size, time=self._time), _VERIFIER))

    def prune(self) -> object:
        since = self.chip._silicon.state.checkpoint if self.chip._finalizer.alive else BIRTH
        records = parse_log(self.chip.log_bytes())
        kept = self.chance.randrange(len(records))
        return self.chip.prune(seal_log_checkpoint("chip", since.extend(records[: len(records) - kept]), _VERIFIER))

    def turn_off(self) -> object:
        return self.chip.power_off() if self.chance.random() < 0.5 else self.chip.cut_power()

    def turn_on(self) -> object:
        self.chip = self._kind.power_on(self.folder)
        return None

    def copied(self) -> object:
        """Ask a copy of the chip or its meter, which a host has none of."""
        makes: tuple[Callable[[object], object], ...] = (copy.copy, copy.deepcopy, _pickled)
        make = self.chance.choice(makes)
        return make(self.chance.choice((self.chip, self.meters[0], self.memories[0].meter)))

    def fork(self) -> object:
        """Let another process try what comes next."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            told: list[str] = []
            try:
                for _ in range(20):
                    self.meters[0].charge(Work(1, 0, LABORATORY.moved))
                    told.append(repr((self.meters[0].total, self.chip.time)))
                for name in ("idle", "challenge", "log_bytes", "turn_off"):
                    try:
                        CALLS[name][1](self)
                    except BaseException as error:
                        told.append(repr(error))
                os.write(writer, json.dumps(told).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
        return said.replace(str(os.getpid()).encode(), b"PID")

    def foreign(self) -> object:
        """Arguments that are none."""
        wrong: Any = self.chance.choice((None, -1, 1 << 70, "x", b"", 1.5, np.int64(3), True))
        name = self.chance.choice(("idle", "commit", "attach", "beacon", "prune", "quote"))
        given = {"commit": (wrong, 1, bytes(32)), "attach": (wrong, _RUNS[0], 0), "quote": (wrong, "v")}
        return getattr(self.chip, name)(*given.get(name, (wrong,)))


CALLS: dict[str, tuple[float, Callable[[Host], object]]] = {
    "compute": (12, Host.compute),
    "commit": (4, Host.commit),
    "attach": (2, Host.attach),
    "idle": (2, Host.idle),
    "wait": (1, Host.wait),
    "shards": (1, lambda host: host.chip.shards()),
    "beacon": (1, Host.beacon),
    "prune": (0.5, Host.prune),
    "close_epoch": (1, lambda host: host.chip.close_epoch()),
    "reveal": (1, lambda host: host.chip.reveal()),
    "quote": (1, lambda host: host.chip.quote(host.chance.randbytes(16), "v")),
    "challenge": (1, lambda host: host.chip.challenge(host.chance.randbytes(16), "v")),
    "log_bytes": (1, lambda host: host.chip.log_bytes()),
    "certificate_chain": (0.2, lambda host: host.chip.certificate_chain()),
    "turn_off": (0.6, Host.turn_off),
    "turn_on": (1, Host.turn_on),
    "copied": (0.5, Host.copied),
    "fork": (0.05, Host.fork),
    "foreign": (0.5, Host.foreign),
}
"""What a host calls, and how often."""


def _pickled(each: object) -> object:
    return each.__reduce_ex__(4)


def _played(seed: int, draws: bytes, secrets: bytes, **options: Any) -> _Journal:
    with tempfile.TemporaryDirectory(prefix="chipwitness-interference-") as folder:
        host = Host(Path(folder), draws=draws, secrets=secrets, seed=seed, **options)
        host.play()
        return host.journal


def compare_draws(seed: int, **options: Any) -> tuple[int, str]:
    """One program on two chips that differ in their draws alone.

    Returns how much both hosts had seen when the first snapshot came that one of the chips alone took, and what
    differed before that; empty where nothing did.
    """
    one, other = (_played(seed, draws, b"secrets".ljust(32), **options) for draws in (b"a" * 32, b"b" * 32))
    alike = next(
        (at for at, (a, b) in enumerate(zip(one.taken, other.taken, strict=False)) if a != b),
        min(len(one.taken), len(other.taken)),
    )
    until = min((taken[alike][0] for taken in (one.taken, other.taken) if len(taken) > alike), default=len(one.seen))
    return until, _difference(one.seen[:until], other.seen[:until])


def compare_secrets(seed: int) -> tuple[int, str]:
    """One program on two chips that differ in their secrets alone; as ``compare_draws``, after renaming."""
    one, other = (
        _renamed(_played(seed, b"a" * 32, secrets, is_blind=True)) for secrets in (b"one".ljust(32), b"other".ljust(32))
    )
    return len(one), _difference(one, other)


def _renamed(journal: _Journal) -> list[tuple[str, object]]:
    """What a host saw, with each digest, key and identity under the number of its first appearance."""
    names: dict[bytes, int] = {}

    def name(found: re.Match[bytes]) -> bytes:
        return b"<%d>" % names.setdefault(found.group(), len(names))

    lines: list[tuple[str, object]] = []
    for label, what in journal.seen:
        if isinstance(what, bytes) and label in ("fuses.json", "nvram.bin", "firmware.json", "certificate_chain"):
            text = b"of this chip"
        elif isinstance(what, bytes) and label.startswith("log"):
            text = repr([(*_plain(record),) for record in parse_log(what)] if what else []).encode()
        elif isinstance(what, bytes) and what.startswith(b'{"payload"'):
            text = decode_base64(canonical.loads(what)["payload"])
        else:
            text = what if isinstance(what, bytes) else str(what).encode()
        text = re.sub(rb"(?:[0-9a-f]{32,}|b'(?:[^'\\]|\\.){16,}'|b\"(?:[^\"\\]|\\.){16,}\")", name, text)
        lines.append((label, text))
    return lines


def _plain(record: Any) -> Iterator[object]:
    for each in ("counter", "kind", "boot", "tick", "busy", "step", "op", "work"):
        yield each, getattr(record, each)
    for each in ("run_id", "digest", "previous"):
        yield each, getattr(record, each).hex()


def _difference(one: Sequence[tuple[str, object]], other: Sequence[tuple[str, object]]) -> str:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"line {at}: {a!r:.300} beside {b!r:.300}"
    return "" if len(one) == len(other) else f"{len(one)} lines beside {len(other)}"


def run(*, programs: int = 10_000, seed: int = 0, progress: Callable[[int], object] = lambda done: None) -> list[Row]:
    """Play so many host programs on chips with other draws, and a tenth as many on chips with other secrets.

    Rows have ``work`` (``draws`` or ``secrets``), ``mode`` (``bare chips``), ``seconds``, ``ratio`` (None), ``seed``,
    ``programs``, ``lines`` (that were compared) and ``problems``.

    Raises:
        CallerError: fewer than one program, or a negative seed.
    """
    if programs < 1 or seed < 0:
        raise CallerError("give at least one program, and a seed of at least 0")
    rows = []
    for work, count, compare in (
        ("draws", programs, compare_draws),
        ("secrets", -(-programs // 10), compare_secrets),
    ):
        begun, told = time.perf_counter(), Counter[str]()
        problems = []
        for number in range(seed * 1_000_000, seed * 1_000_000 + count):
            lines, problem = compare(number)
            told["lines"] += lines
            problems += [f"program {number}: {problem}"] if problem else []
            progress(1)
        rows.append(
            {
                "work": work,
                "mode": "bare chips",
                "seconds": time.perf_counter() - begun,
                "ratio": None,
                "seed": seed,
                "programs": count,
                "lines": told["lines"],
                "problems": problems,
            }
        )
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """What a host could tell, or None."""
    problems = [f"{row['work']}: {text}" for row in rows for text in row["problems"]]
    return f"{len(problems)} programs saw what they must not; {problems[0]}" if problems else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'':8} {'programs':>8} {'lines':>9}  differences"]
    for row in rows:
        lines.append(f"{row['work']:8} {row['programs']:8} {row['lines']:9}  {len(row['problems'])}")
        lines += [f"    {text}" for text in row["problems"][:5]]
    return lines
