"""What a rule asks of samples and weights, answered where they may be seen: counts, and scores of the final weights."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from inspector.replay.work import open_job_run
from monitor.environment import accelerator
from monitor.numerics import recording
from monitor.numerics.known_answers import require_engines
from monitor.programs.interpreter import loss_of
from monitor.replay.replaying import ProgramTraining, scalars_of
from monitor.replay.steps import check_size, execution_of
from monitor.transcript import RunFolder
from monitor.transcript.data import decode_arrays

__all__ = ["content_digests", "run_examination"]


def content_digests(array: np.ndarray) -> list[str]:
    """SHA-256, in hex, of each row's type, shape and bytes (little-endian), whatever the array is called."""
    header = f"{array.dtype.newbyteorder('<').str}{list(array.shape[1:])}".encode()
    begun = hashlib.sha256(struct.pack("<Q", len(header)) + header)
    found = []
    for row in np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")):
        hasher = begun.copy()
        hasher.update(row.tobytes())
        found.append(hasher.hexdigest())
    return found


def run_examination(job: Mapping[str, Any]) -> dict[str, Any]:
    """Count samples of given digests in all batches of a run, and score its final weights.

    Args:
        job: ``run``, ``lab_key`` and ``manifest``; ``sets``, by name lists of ``content_digests``; ``tests``, by
            SHA-256 the paths of safetensors files with arrays that are named as the last program's batch, any multiple
            of its number of samples long.

    Returns:
        Under ``examined``, ``data``: by set ``places`` (of samples, in all committed batches), ``matched`` (those where
        any array of the sample is in the set) and ``first`` (step and place of the first, or None); None where the
        batches do not show which rows are one sample. ``scores``: by test the mean loss, by the last program under the
        run's numerics, or None where it has none: the run is unfinished, the test does not fit the program, the loss
        is not finite.

    Raises:
        EvidenceError: a batch is not the one that its step commits to.
        CallerError: a test is another file than it was named.
    """
    run = open_job_run(dict(job))
    sets = {name: frozenset(digests) for name, digests in job["sets"].items()}
    tests = {digest: _test(Path(path), digest) for digest, path in job["tests"].items()}
    if tests:
        require_engines(run.declared.numerics, device=str(accelerator()))
    counted = _count(run, sets) if sets else {}
    return {"examined": {"data": counted, "scores": {digest: _score(run, each) for digest, each in tests.items()}}}


def _count(run: RunFolder, sets: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any] | None]:
    batches = run.batches()
    found: dict[str, dict[str, Any]] = {name: {"places": 0, "matched": 0, "first": None} for name in sets}
    for step in range(1, run.committed + 1):
        leaf, batch = run.leaf(step), batches.batch(step)
        if batches.batch_root(step).hex() != leaf.batch:
            raise EvidenceError(f"step {step} commits to another batch than the declared data order has")
        if not batch and not leaf.trains:
            continue  # what a loop reads or writes between steps takes no sample
        rows = _rows(batch)
        if rows is None:
            return dict.fromkeys(sets)
        for name, digests in sets.items():
            hits = [place for place, row in enumerate(rows) if not row.isdisjoint(digests)]
            told = found[name]
            told["places"] += len(rows)
            told["matched"] += len(hits)
            if hits and told["first"] is None:
                told["first"] = [step, hits[0]]
    return dict(found)


def _rows(batch: Mapping[str, Tensor]) -> list[set[str]] | None:
    """Digests of the rows that make up each sample; None where it does not show which do."""
    if any("+" in name or not tensor.ndim for name, tensor in batch.items()):
        return None  # arrays that share memory are kept as one stretch of it
    if len({len(tensor) for tensor in batch.values()}) != 1:
        return None
    arrays = [tensor.cpu().numpy() for tensor in batch.values() if tensor.dtype != torch.bfloat16]
    if len(arrays) != len(batch):
        return None
    return [set(row) for row in zip(*map(content_digests, arrays), strict=True)]


def _test(path: Path, digest: str) -> dict[str, np.ndarray]:
    try:
        content = limits.read_file(path, limits.SAMPLES_BYTES)
    except OSError as error:
        raise file_error(f"cannot read the test set {path}", error) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise CallerError(f"the test set {path} is another one than the rules name")
    return decode_arrays(content, path.name)


def _score(run: RunFolder, arrays: Mapping[str, np.ndarray]) -> float | None:
    last = run.committed
    if not run.finished or last < 1:
        return None
    execution = execution_of(run.leaf(last))
    program = run.program(execution.program)
    count = _batches(program.batch, arrays)
    if not count or not program.loss:
        return None
    check_size(run)
    scalars = scalars_of(program, execution)
    training, final = ProgramTraining(run.declared), run.checkpoint(last)
    place, total = accelerator(), 0.0
    for number in range(count):
        training.restore(final, last)
        batch = {
            name: torch.from_numpy(arrays[name][number * layout["shape"][0] :][: layout["shape"][0]].copy()).to(place)
            for name, layout in program.batch.items()
        }
        _, _, loss = training.run(program, scalars, batch, partial(recording, run.declared.numerics))
        total += float(loss_of(loss))
    return total / count if math.isfinite(total) else None


def _batches(layouts: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> int:
    """How many batches of a program the arrays make; 0 where they do not fit it."""
    if set(layouts) != set(arrays) or any("+" in name or not layout["shape"] for name, layout in layouts.items()):
        return 0
    counts = set()
    for name, layout in layouts.items():
        array, rows = arrays[name], layout["shape"][0]
        if array.ndim != len(layout["shape"]) or list(array.shape[1:]) != layout["shape"][1:]:
            return 0
        if array.dtype.name != layout["dtype"] or not rows or len(array) % rows:
            return 0
        counts.add(len(array) // rows)
    return counts.pop() if len(counts) == 1 else 0
