"""``bench numerics``: native FP32, plain FP64, rounded recording and replaying, and exact, on the same work.

BF16 products are measured against native BF16's, on one thread, with their errors.

Modes named ``program`` take the step from its program, as an inspection does, instead of running a model's Python.
Each repetition runs every mode once in turn, so that a busy machine slows all of them; figures are medians. Peak memory
is that of a process which takes one step in one mode, PyTorch itself included; on a CUDA device it is what PyTorch has
held there.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.bench.origin import Row, commit, hardware
from analysis.bench.published_scheme import encode_dense
from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from inspector.devices.emulated_accelerator import NAME as ACCELERATOR
from monitor import processes
from monitor.environment import accelerator, device_name
from monitor.numerics import Session, execute, recording, replaying
from monitor.numerics.engines.eager.exact.bf16 import sides
from monitor.presets import PRESETS, Preset, initialise, preset
from monitor.presets.task import Task
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.replay.derivation import derive, initial_memory
from monitor.transcript import to_batch

__all__ = [
    "BF16_KINDS",
    "BF16_SIZES",
    "MATRICES",
    "SMALL_PRESETS",
    "bf16_rows",
    "held",
    "matrix_rows",
    "peak_memory",
    "preset_rows",
    "run",
    "write",
]

SMALL_PRESETS = ("tiny-gpt", "digits-cnn", "llama-small")
MATRICES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (512, 768, 50257))
"""M, K and N of the matrix products."""

BF16_SIZES = (2048, 4096)
BF16_KINDS = ("Gaussian", "one channel x 1000", "softmax rows")


def _rows(work: str, modes: dict[str, Callable[[], Session | None]], repetitions: int) -> list[Row]:
    """Medians of interleaved repetitions after one that warms up; ratios to the mode named native."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    facts: dict[str, Row] = {}
    for repetition in range(repetitions + 1):
        for mode, action in modes.items():
            _wait()
            started = time.perf_counter()
            session = action()
            _wait()
            taken = time.perf_counter() - started
            if repetition:
                seconds[mode].append(taken)
            else:
                facts[mode] = {} if session is None else _facts(session)
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    return [
        {
            "work": work,
            "mode": mode,
            "seconds": value,
            "ratio": value / medians["native"],
            "repetitions": repetitions,
            **facts[mode],
        }
        for mode, value in medians.items()
    ]


def _wait() -> None:
    """Let an accelerator finish what it was given."""
    if accelerator().type == "cuda":
        torch.cuda.synchronize()


def _facts(session: Session) -> Row:
    """A rounding log's size against its entropy and the published code's; nothing where no log is due."""
    if session.numerics != "rounded":
        return {}
    counted = session.statistics
    return {
        "log_bytes": len(session.log),
        "entropy_bytes": round(counted.entropy_bits / 8),
        "published_code_bytes": len(encode_dense(np.zeros(counted.elements, dtype=np.uint8))),
        "elements": counted.elements,
        "entries": counted.entries,
        "forced": counted.forced,
    }


def _controlled(numerics: str, action: Callable[[], object], log: bytes | None = None) -> Session:
    """Run under control, from the first operator to the encoded log."""
    session = recording(numerics) if log is None else replaying(numerics, log)
    with session:
        action()
    return session


def _native(action: Callable[[], object]) -> None:
    action()


def matrix_rows(shape: tuple[int, int, int], repetitions: int = 15) -> list[Row]:
    """One matrix product of Gaussian operands in every mode."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(m + n)
    a, b = (torch.randn(shape, generator=generator).to(accelerator()) for shape in ((m, k), (k, n)))
    with recording("rounded") as session:
        torch.mm(a, b)
    log = session.log
    return _rows(
        f"matmul {m}x{k}x{n}",
        {
            "native": lambda: _native(lambda: torch.mm(a, b)),
            "plain FP64": lambda: _native(lambda: torch.mm(a.double(), b.double())),
            "rounded recording": lambda: _controlled("rounded", lambda: torch.mm(a, b)),
            "rounded replaying": lambda: _controlled("rounded", lambda: torch.mm(a, b), log),
            "exact": lambda: _controlled("exact", lambda: torch.mm(a, b)),
            "int8 products alone": _digit_products(m, k, n),
        },
        repetitions,
    )


def _bf16_operands(kind: str, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    if kind == "one channel x 1000":
        a[:, 3] *= 1000.0
    elif kind == "softmax rows":
        a = torch.softmax(a, 1)
    return a.to(torch.bfloat16), b.to(torch.bfloat16)


def _bf16_facts(a: Tensor, b: Tensor) -> Row:
    """Largest and mean square errors as multiples of native BF16's, and how many elements the wide path takes."""
    truth = a.to(torch.float64) @ b.to(torch.float64)
    found = {"native": torch.mm(a, b), "exact": execute("exact", "aten.mm.default", (a, b), {}, entries=None)}
    off = {name: (value.to(torch.float64) - truth).abs_() for name, value in found.items()}
    rows, columns, places = sides(a, b)
    ordinary = [1.0 - float(side.wide.to(torch.float64).mean()) for side in (rows, columns)]
    return {
        "largest_error_ratio": float(off["exact"].max() / off["native"].max()),
        "rms_error_ratio": float(off["exact"].square().mean().sqrt() / off["native"].square().mean().sqrt()),
        "wide_share": 1.0 - ordinary[0] * ordinary[1],
        "places_apart": len(places),
    }


def bf16_rows(size: int, repetitions: int = 5) -> list[Row]:
    """Products of BF16 matrices on one thread of a processor: time against native BF16 and native FP32, and error."""
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in BF16_KINDS:
            a, b = _bf16_operands(kind, size)
            x, y = a.to(torch.float32), b.to(torch.float32)
            modes: dict[str, Callable[[], Session | None]] = {
                "native": functools.partial(_native, functools.partial(torch.mm, a, b)),
                "native FP32": functools.partial(_native, functools.partial(torch.mm, x, y)),
                "exact": functools.partial(_controlled, "exact", functools.partial(torch.mm, a, b)),
            }
            found = _rows(f"BF16 matmul {size}x{size}x{size}, {kind}", modes, repetitions)
            found[-1] |= _bf16_facts(a, b)
            rows += found
    finally:
        torch.set_num_threads(threads)
    return rows


def _digit_products(m: int, k: int, n: int) -> Callable[[], None]:
    """The eight int8 products that ``exact`` is made of, as four of the whole size, with nothing around them.

    ``exact`` computes them in tiles that stay in the cache, and can be faster than this where the result is wide.
    """
    generator = torch.Generator().manual_seed(k)
    place = accelerator()
    left, right = (
        torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).to(place)
        for shape in ((m, 3 * k), (3 * k, n))
    )
    if place.type != "cpu":
        right = right.t().contiguous().t()  # as an accelerator's own engine has it

    def multiply() -> None:
        for digits in (1, 2, 3, 2):
            torch._int_mm(left[:, : digits * k], right[: digits * k])

    return multiply


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _step(entry: Preset, batch: dict[str, Tensor], dtype: torch.dtype) -> Callable[[], object]:
    """A training step from the same state each time, with gradients but without keeping the update."""
    with accelerator():
        model = entry.build().train()
    initialise(model, 1)
    model.to(dtype)
    model.register_forward_pre_hook(lambda _, inputs: tuple(_as(value, dtype) for value in inputs))
    start = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]

    def take() -> object:
        optimizer: torch.optim.Optimizer
        if entry.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=entry.learning_rate, foreach=False)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=entry.learning_rate, momentum=0.9, foreach=False)
        loss = entry.loss(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for value, old in zip((*model.parameters(), *model.buffers()), start, strict=True):
                value.copy_(old)
        return loss

    return take


def _program(name: str, numerics: str) -> Callable[[], Session]:
    """A step by the program that an inspector derives from a preset, as an inspection repeats it."""
    task = Task.for_preset(name, seed=1, steps=1, numerics=numerics, shards=1)
    program = derive(task).program
    prepared = Prepared(program, initial_memory(task))
    batch = to_batch(preset(name).samples(None), np.arange(task.batch_size))

    def take() -> Session:
        keys = RepeatedKeys(task.seed, 1)
        session = recording(numerics, keys=keys)
        prepared.run(batch, program.numbers, session, keys)
        return session

    return take


def _modes(name: str) -> dict[str, Callable[[], Session | None]]:
    """What takes one step (forward, backward, optimizer) of a preset in each mode."""
    entry = PRESETS[name]
    batch = to_batch(entry.samples(None), np.arange(entry.batch_size))
    steps: dict[torch.dtype, Callable[[], object]] = {}
    logs: list[bytes] = []
    programs: dict[str, Callable[[], Session]] = {}

    def program(numerics: str) -> Session:
        if numerics not in programs:
            programs[numerics] = _program(name, numerics)
        return programs[numerics]()

    def step(dtype: torch.dtype) -> Callable[[], object]:
        if dtype not in steps:
            steps[dtype] = _step(entry, batch, dtype)
        return steps[dtype]

    def replay() -> Session:
        action = step(torch.float32)
        if not logs:
            with recording("rounded") as session:
                action()
            logs.append(session.log)
        return _controlled("rounded", action, logs[0])

    return {
        "native": lambda: _native(step(torch.float32)),
        "plain FP64": lambda: _native(step(torch.float64)),
        "rounded recording": lambda: _controlled("rounded", step(torch.float32)),
        "rounded replaying": replay,
        "exact": lambda: _controlled("exact", step(torch.float32)),
        "rounded program": lambda: program("rounded"),
        "exact program": lambda: program("exact"),
    }


def held() -> float:
    """Most memory that this process has held so far, in MiB.

    On Linux a process's ``ru_maxrss`` begins at its parent's, so the kernel's own high-water mark is asked there.
    """
    if accelerator().type == "cuda":
        return torch.cuda.max_memory_allocated() / (1 << 20)
    status = Path("/proc/self/status")
    if status.exists():
        (mark,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(mark) / (1 << 10)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def peak_memory(name: str, mode: str) -> float:
    """MiB that a new process needs for one step of a preset."""
    found = processes.run(processes.python(__name__, name, mode), timeout=3600)
    found.check_returncode()
    return float(found.stdout)


def _print_peak(name: str, mode: str) -> None:
    _modes(name)[mode]()
    print(held())


def preset_rows(name: str, repetitions: int = 5) -> list[Row]:
    """One step of a preset in every mode."""
    rows = _rows(f"step {name}", _modes(name), repetitions)
    peaks = {row["mode"]: peak_memory(name, row["mode"]) for row in rows}
    for row in rows:
        row["peak_mib"] = round(peaks[row["mode"]], 1)
        row["peak_ratio"] = peaks[row["mode"]] / peaks["native"]
    return rows


def write(rows: list[Row], path: Path) -> None:
    """Add the rows to a file with those of other machines, in the place of this machine's own.

    Raises:
        CallerError: the file holds something else, or cannot be written.
    """
    document: Any = {"measurements": []}
    try:
        if path.exists():
            document = canonical.loads(path.read_text(encoding="utf-8"))
        here = hardware()
        name = device_name(accelerator())
        others = [e for e in document["measurements"] if (e["hardware"], e.get("device", "native")) != (here, name)]
        mine = {
            "hardware": here,
            "device": name,
            **commit(),
            "load": round(os.getloadavg()[0], 1),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
            "rows": rows,
        }
        text = json.dumps({**document, "measurements": [*others, mine]}, indent=1)
        part = path.with_name(path.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CallerError(f"cannot add measurements to {path}: {error}") from None


def run(presets: Sequence[str] = SMALL_PRESETS) -> list[Row]:
    """All matrix products and a step of each named preset, where this process keeps what it trains.

    Raises:
        CallerError: there is no such preset, or the device is an emulated accelerator.
    """
    if accelerator().type == ACCELERATOR:
        raise CallerError("the speed of an emulated accelerator means nothing; choose another device")
    for name in presets:
        preset(name)
    rows = [row for shape in MATRICES for row in matrix_rows(shape)]
    if accelerator().type == "cpu":
        rows += [row for size in BF16_SIZES for row in bf16_rows(size)]
    return rows + [row for name in presets for row in preset_rows(name)]


if __name__ == "__main__":
    _print_peak(*sys.argv[1:])
