"""``bench chip``: a chip's cost: freezes against plain copies, digests against SHA-256, meter, audits, ten years."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.bench._decade import decade
from analysis.bench.origin import Row, write
from firmware_sim import (
    BIRTH,
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    LABORATORY,
    ChipTrust,
    DeviceMemory,
    FirmwareChip,
    LogCheckpoint,
    MakerCA,
    Meter,
    Region,
    Roofline,
    SigningKey,
    Work,
    check_chip,
    collect_evidence,
    seal_log_checkpoint,
)
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import hash_blocks
from firmware_sim.evidence.digest import byte_view
from monitor.presets import initialise, preset
from monitor.presets.task import Task
from monitor.programs.flop import call_work, live_work
from monitor.replay.derivation import derive
from monitor.transcript import to_batch

__all__ = ["FREEZE", "SHARE", "run", "verdict", "write"]


FREEZE, SHARE, STEP, METER, CHIP_BYTES, AUDIT = 1.3, 0.85, 1.1, 5e-6, 2e6, 1.5
"""A freeze in plain copies; a digest's share of threads times SHA-256; a step with a snapshot in plain steps; seconds
that the meter takes for a call; bytes of a chip; the oldest log's audit in that of the youngest."""
_PAIRS = 20
_TENSORS = 8
_RUN = bytes(range(32))
_MAKER = MakerCA.create(b"bench")
_VERIFIER = SigningKey.generate(b"bench".ljust(32))


def run(
    *, chips: int = 1000, megabytes: int = 512, years: int = 10, progress: Callable[[int], object] | None = None
) -> list[Row]:
    """Measure all.

    Rows hold ``work``, ``mode``, ``seconds``, ``ratio`` and more: ``freeze`` (seconds a gigabyte, medians of 20 pairs,
    in plain copies of the same memory), ``digest`` (seconds a gigabyte; ``share`` of threads times one thread's
    SHA-256), ``tiny-gpt`` (a step, with a snapshot in each, in plain steps), ``meter`` (seconds a call), ``chips``
    (``bytes`` each, all in one process), ``audit`` (seconds; ratio to the youngest log) and ``decade``.

    Args:
        chips: chips in one process.
        megabytes: memory that is frozen.
        years: years of a chip in the field.
        progress: called with 1 after each measurement.

    Raises:
        CallerError: nothing to measure.
    """
    if min(chips, megabytes, years) < 1:
        raise CallerError("a measurement needs at least one chip, one megabyte and one year")
    tell = progress or (lambda _: None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as name:
        folder = Path(name)
        parts: list[Callable[[], list[Row]]] = [
            partial(_chips, folder, chips),
            partial(_freeze, folder, megabytes),
            partial(_digest, megabytes),
            partial(_training, folder),
            _metering,
            partial(_audits, folder),
            partial(_field, folder, years),
        ]
        for part in parts:
            rows += part()
            tell(1)
    return rows


_TICK = Work(1, 0, LABORATORY.moved)
"""An operator that takes a chip of the laboratory a tick."""


def _make(folder: Path, chip_id: str, rate: Fraction, roofline: Roofline = LABORATORY) -> FirmwareChip:
    return FirmwareChip.manufacture(
        folder / chip_id,
        maker=_MAKER,
        chip_id=chip_id,
        seed=b"bench",
        snapshot_rate=rate,
        roofline=roofline,
        beacon_key=_VERIFIER.verifying,
    )


def _freeze(folder: Path, megabytes: int) -> list[Row]:
    """An operator that passes a moment, until the next may run and until the record is in the log, against a copy."""
    size = (megabytes << 20) // _TENSORS // 4
    tensors = [np.full(size, number, dtype=np.float32) for number in range(_TENSORS)]
    copies = [tensor.copy() for tensor in tensors]
    chip = _make(folder, "frozen", Fraction(1))
    memory = DeviceMemory([Region.of(f"w{number}", tensor) for number, tensor in enumerate(tensors)])
    chip.attach(memory, _RUN, 0)
    taken: dict[str, list[float]] = {"copy": [], "freeze": [], "record": []}
    for number in range(_PAIRS + 1):  # the first pair's buffers are new
        start = time.perf_counter()
        for mine, tensor in zip(copies, tensors, strict=True):
            np.copyto(mine, tensor)
        copied = time.perf_counter()
        memory.meter.charge(_TICK)
        frozen = time.perf_counter()
        chip.log_bytes()
        recorded = time.perf_counter()
        if number:
            taken["copy"].append(copied - start)
            taken["freeze"].append(frozen - copied)
            taken["record"].append(recorded - copied)
    chip.cut_power()
    return [
        {
            "work": "freeze",
            "mode": mode,
            "seconds": statistics.median(times) * 1024 / megabytes,
            "ratio": statistics.median(mine / copy for mine, copy in zip(times, taken["copy"], strict=True)),
            "pairs": _PAIRS,
            "megabytes": megabytes,
        }
        for mode, times in taken.items()
    ]


def _digest(megabytes: int) -> list[Row]:
    """Blocks of a memory, against SHA-256 of its bytes in one thread and in as many, in wall and in processor time."""
    tensor = np.arange((megabytes << 20) // 4, dtype=np.float32)
    [part] = DeviceMemory([Region.of("w", tensor)]).slices()
    threads = os.cpu_count() or 1
    view = byte_view(part.data)
    parts = [view[number * len(view) // threads : (number + 1) * len(view) // threads] for number in range(threads)]
    walls, works = [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_PAIRS):
            marks = [(time.perf_counter(), time.process_time())]
            hashlib.sha256(view).digest()
            marks.append((time.perf_counter(), time.process_time()))
            list(pool.map(lambda each: hashlib.sha256(each).digest(), parts))
            marks.append((time.perf_counter(), time.process_time()))
            hash_blocks([part])
            marks.append((time.perf_counter(), time.process_time()))
            wall, work = ([two - one for one, two in pairwise(each)] for each in zip(*marks, strict=True))
            walls.append(wall)
            works.append(work)
    modes = ("one thread of SHA-256", f"{threads} threads of SHA-256", f"blocks, {threads} threads")
    return [
        {
            "work": "digest",
            "mode": mode,
            "seconds": statistics.median(wall[number] for wall in walls) * 1024 / megabytes,
            "ratio": statistics.median(wall[number] / wall[0] for wall in walls),
            "share": statistics.median(wall[0] / wall[number] for wall in walls) / (threads if number else 1),
            "processor_share": statistics.median(work[0] / work[number] for work in works),
            "pairs": _PAIRS,
            "megabytes": megabytes,
        }
        for number, mode in enumerate(modes)
    ]


def _training(folder: Path) -> list[Row]:
    """Steps of a model against steps with a snapshot of weights and optimizer in each, up to the last record.

    A meter counts the operators of both. The chip's device is one whose tick is a step, so that a moment falls in each.
    """
    entry, task = preset("tiny-gpt"), "tiny-gpt"
    model = entry.build().train()
    initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=entry.learning_rate, foreach=False)
    batch = to_batch(entry.samples(None), np.arange(entry.batch_size))

    def train(steps: int, meter: Meter, chip: FirmwareChip | None = None) -> float:
        start = time.perf_counter()
        for number in range(steps):
            with _Metered(meter):
                optimizer.zero_grad()
                torch.autograd.backward(entry.loss(model, batch))
                optimizer.step()
            if chip is not None:
                chip.commit(_RUN, number, bytes(32))
        if chip is not None:
            chip.log_bytes()
        return (time.perf_counter() - start) / steps

    plain = Meter()
    train(1, plain)
    before = plain.total
    train(1, plain)
    step = plain.total - before
    chip = _make(folder, task, Fraction(1), Roofline(flop=step.flop, moved=step.moved))
    regions = [Region.of(name, value) for name, value in model.named_parameters()]
    for name, value in model.named_parameters():
        for key, held in optimizer.state[value].items():
            regions.append(Region.of(f"{name}/{key}", held, kind="optimizer"))
    memory = DeviceMemory(regions)
    chip.attach(memory, _RUN, 0)
    train(1, memory.meter, chip)
    pairs = [(train(5, plain), train(5, memory.meter, chip)) for _ in range(_PAIRS)]
    steps, snapshots = 1 + 5 * _PAIRS, chip.utilisation.snapshots
    chip.cut_power()
    if snapshots != steps:
        raise EvidenceError(f"{snapshots} snapshots were taken in {steps} steps of a tick each")
    unwatched_seconds, watched_seconds = (statistics.median(times) for times in zip(*pairs, strict=True))
    rest = {"pairs": _PAIRS, "megabytes": sum(region.entry.byte_count for region in regions) / (1 << 20)}
    ratio = statistics.median(watched / plain for plain, watched in pairs)
    return [
        {"work": task, "mode": "plain step", "seconds": unwatched_seconds, "ratio": 1.0, **rest},
        {"work": task, "mode": "snapshot in each step", "seconds": watched_seconds, "ratio": ratio, **rest},
    ]


class _Metered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operator to a meter, as a device does, when it has run."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.charge(live_work(func, args, kwargs or {}, result))
        return result


def _metering() -> list[Row]:
    """The calls of a step of tiny-gpt, seen for the first time and again as those of a known program."""
    entry = preset("tiny-gpt")
    task = Task.for_preset(
        "tiny-gpt", seed=1, steps=1, batch_size=entry.batch_size, numerics="exact", checkpoint_every=1, shards=1
    )
    calls, meter = derive(task).program.calls, Meter()
    times: dict[str, list[float]] = {"a new call": [], "a known call": []}
    for number in range(_PAIRS + 1):  # the first looks each operator up
        start = time.perf_counter()
        works = [call_work(call) for call in calls]
        counted = time.perf_counter()
        for work in works:
            meter.charge(work)
        end = time.perf_counter()
        if number:
            times["a new call"].append((end - start) / len(calls))
            times["a known call"].append((end - counted) / len(calls))
    return [
        {
            "work": "meter",
            "mode": mode,
            "seconds": statistics.median(each),
            "ratio": None,
            "pairs": _PAIRS,
            "calls": len(calls),
        }
        for mode, each in times.items()
    ]


def _chips(folder: Path, count: int) -> list[Row]:
    """Chips that have worked and hold their power, by what the system says and by what Python says."""
    rows = []
    with _many_files(4 * count):
        for mode, number in (("resident", count), ("allocated by Python", -(-count // 10))):
            gc.collect()
            if mode != "resident":
                tracemalloc.start()
            before, start = _resident() if mode == "resident" else 0, time.perf_counter()
            chips = []
            for each in range(number):
                chip = _make(folder, f"{mode[:3]}-{each}", Fraction(1, 2))
                memory = DeviceMemory([Region.of("w", np.zeros(256, dtype=np.float32))])
                chip.attach(memory, _RUN, 0)
                _work(chip, memory, 0, 4)
                chips.append(chip)
            seconds = time.perf_counter() - start
            used = _resident() - before if mode == "resident" else tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            for chip in chips:
                chip.cut_power()
            row = {"work": "chips", "mode": mode, "seconds": seconds, "ratio": None}
            rows.append({**row, "chips": number, "bytes": used / number})
    return rows


def _audits(folder: Path) -> list[Row]:
    """The same new records behind longer and longer logs, and more new records behind the longest."""
    chip = _make(folder, "audited", Fraction(1, 100))
    memory = DeviceMemory([Region.of("w", np.zeros(256, dtype=np.float32))])
    chip.attach(memory, _RUN, 0)
    since, step, rows = BIRTH, 0, list[Row]()
    for old, new in ((0, 1000), (1000, 1000), (4000, 1000), (16000, 1000), (16000, 2000), (16000, 4000)):
        while since.size < old:
            step = _work(chip, memory, step, old - since.size)
            since, _ = _audit(chip, since)
            chip.prune(seal_log_checkpoint("audited", since, _VERIFIER))
        size = since.size
        step = _work(chip, memory, step, new)
        since, seconds = _audit(chip, since)
        chip.prune(seal_log_checkpoint("audited", since, _VERIFIER))
        count = since.size - size
        first = rows[0]["us_a_record"] if rows else seconds / count * 1e6
        rows.append(
            {
                "work": "audit",
                "mode": f"{new} new records",
                "seconds": seconds,
                "ratio": seconds / count * 1e6 / first,
                "old": size,
                "new": count,
                "us_a_record": seconds / count * 1e6,
            }
        )
    chip.cut_power()
    return rows


def _work(chip: FirmwareChip, memory: DeviceMemory, step: int, records: int) -> int:
    """Commit so many steps with a tick of work behind each."""
    for number in range(step, step + records):
        chip.commit(_RUN, number, bytes(32))
        memory.meter.charge(_TICK)
    return step + records


def _audit(chip: FirmwareChip, since: LogCheckpoint) -> tuple[LogCheckpoint, float]:
    """Median of three audits of the same evidence."""
    evidence = collect_evidence(chip, bytes(32), "v")
    trust = ChipTrust(
        ca_digests=[_MAKER.certificate_digest],
        measurements=[CURRENT_FIRMWARE.measurement],
        minimum_security_version=1,
        snapshot_rate=Fraction(1, 100),
        snapshot_algorithm=DEFAULT_ALGORITHM,
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        checked = check_chip(
            evidence, chip_id="audited", trust=trust, nonce=bytes(32), verifier_id="v", last=None, since=since
        )
        times.append(time.perf_counter() - start)
    return checked.checkpoint(), statistics.median(times)


def _field(folder: Path, years: int) -> list[Row]:
    start = time.perf_counter()
    found = decade(folder / "field", years=years)
    seconds = time.perf_counter() - start
    return [{"work": "decade", "mode": "64 KiB, flooded", "seconds": seconds, "ratio": None, "years": years, **found}]


def _resident() -> int:
    """Bytes of this process in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        raise EvidenceError("this system does not say how much memory a process has") from None
    return pages * resource.getpagesize()


@contextmanager
def _many_files(count: int) -> Any:
    """Room for open files, as far as the system gives it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, count + 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def verdict(rows: Sequence[Row]) -> str | None:
    """What costs more than it should, or None."""
    for row in rows:
        what = f"{row['work']}, {row['mode']}"
        if (row["work"], row["mode"]) == ("freeze", "freeze") and row["ratio"] > FREEZE:
            return f"{what}: {row['ratio']:.2f} plain copies, more than {FREEZE}"
        if row["mode"].startswith("blocks") and row["share"] < SHARE:
            return f"{what}: {row['share']:.2f} of its threads' SHA-256, less than {SHARE}"
        if row["work"] == "tiny-gpt" and row["ratio"] > STEP:
            return f"{what}: {row['ratio']:.2f} plain steps, more than {STEP}"
        if row["work"] == "meter" and row["seconds"] > METER:
            return f"{what}: {row['seconds'] * 1e6:.1f} µs, more than {METER * 1e6:.0f}"
        if row["work"] == "chips" and row["bytes"] > CHIP_BYTES:
            return f"{what}: {row['bytes'] / 1e6:.1f} MB a chip, more than {CHIP_BYTES / 1e6:.0f}"
        if row["work"] == "audit" and row["ratio"] > AUDIT:
            return f"{what} behind {row['old']}: {row['ratio']:.2f} times as long a record, more than {AUDIT}"
        if row["work"] == "decade" and row["used"] > row["capacity"]:
            return f"{what}: {row['used']} bytes do not fit in {row['capacity']}"
    return None
