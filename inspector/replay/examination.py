"""What a rule asks of samples and weights, answered where they may be seen: counts, and scores of the final weights.

A sample is looked for in the places of all batches. Rows of everything else that a run holds are compared with it too:
constants of programs, the first state, and batches that do not show which rows are one sample. A row is any last part
of a tensor's shape, or as long as a sample of a batch of the same type; numbers, and rows of one value, are no samples.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import DTYPE_SIZES
from inspector.replay.scheduler import Answer, Job
from inspector.replay.work import open_job_run
from monitor.environment import accelerator
from monitor.numerics import recording
from monitor.numerics.known_answers import require_engines
from monitor.programs.interpreter import loss_of
from monitor.programs.program import Program
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import check_size
from monitor.transcript import RunFolder
from monitor.transcript.data import decode_arrays

__all__ = ["content_digests", "run_examination"]

_HASHED = frozenset(getattr(torch, name) for name in DTYPE_SIZES if name in np.sctypeDict)
"""Types that digests of samples have: those of NumPy."""


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


def run_examination(job: Job) -> Answer:
    """Look for samples of given digests in all that a run holds, and score its final weights.

    Args:
        job: ``run``, ``lab_key`` and ``manifest``; ``programs`` that may be opened, by digest; ``sets``, by name lists
            of ``content_digests``; ``tests``, by name (``rules.rule_files.test_name``) the ``path`` of a safetensors
            file with arrays that are named as a program's batch, any multiple of its number of samples long, and the
            ``programs`` that score it.

    Returns:
        Under ``examined``, ``data``: by set what ``rules.observations.Counted`` holds. ``scores``: by test the mean
        loss by each of its programs, under the run's numerics and the program's own numbers; or None where there is
        none: the run is unfinished, one of the programs does not read the test, a loss is not finite.

    Raises:
        EvidenceError: a batch is not the one that its step commits to.
        CallerError: a test is another file than it was named.
    """
    run = open_job_run(dict(job))
    sets = {name: frozenset(digests) for name, digests in job["sets"].items()}
    tests = {name: (_test(Path(each["path"]), name[:64]), each["programs"]) for name, each in job["tests"].items()}
    if tests:
        require_engines(run.declared.numerics, device=str(accelerator()))
    counted = _count(run, sets, job["programs"]) if sets else {}
    scores = {name: _scores(run, arrays, programs) for name, (arrays, programs) in tests.items()}
    return {"examined": {"data": counted, "scores": scores}}


def _count(run: RunFolder, sets: Mapping[str, Collection[str]], opened: Sequence[str]) -> dict[str, dict[str, object]]:
    """By set, how often and where its samples occur in batches, and in what else the run holds."""
    programs = {digest: run.program(digest) for digest in sorted(set(opened) & set(run.programs()))}
    search = _Search(sets, programs.values())
    batches = run.batches()
    for step in range(1, run.committed + 1):
        leaf, batch = run.leaf(step), batches.batch(step)
        if batches.batch_root(step).hex() != leaf.batch:
            raise EvidenceError(f"step {step} commits to a batch that is not the one in the declared data order")
        if batch or leaf.trains:  # what a loop reads or writes between steps takes no sample
            search.in_batch(batch, step)
    for digest, program in programs.items():
        search.in_constants(program, digest)
    state = run.checkpoint(0)
    for number, entry in enumerate(run.declared.state):
        if (name := f"{entry.kind}/{entry.name}") in state:
            search.inside(state[name], [entry.shape], ["state", number])
    constants = [getattr(torch, each.dtype) for program in programs.values() for each in program.constants]
    searched = {
        "batches": run.committed,
        "constants": sum(kind in _HASHED for kind in constants),
        "tensors": sum(each.dtype in _HASHED for each in state.values()),
        "unopened": len(run.programs()) - len(programs),
    }
    counts = ("places", "matched", "unclear", "hidden")
    return {
        name: {
            "first": None,
            "at": None,
            **search.first[name],
            **{each: search.found[name][each] for each in counts},
            **searched,
        }
        for name in sets
    }


class _Search:
    """What of some sets of samples was found so far.

    Attributes:
        found: by set the ``places`` of batches, those that ``matched``, batches that are ``unclear``, and what is
            ``hidden`` elsewhere.
        first: by set where the ``first`` match is (step and place), and the first that is hidden (``at``).
    """

    def __init__(self, sets: Mapping[str, Collection[str]], programs: Iterable[Program]) -> None:
        self._sets = sets
        self.found = {name: Counter[str]() for name in sets}
        self.first: dict[str, dict[str, list[Any]]] = {name: {} for name in sets}
        self._layouts = {
            (each["dtype"], tuple(each["shape"][1:])) for program in programs for each in program.batch.values()
        }

    def in_batch(self, batch: Mapping[str, Tensor], step: int) -> None:
        """Count the places of a step's batch; one that does not show its samples is searched as a whole."""
        rows = _rows(batch)
        for tensor in batch.values() if rows is None else ():
            self.inside(tensor, [tensor.shape], ["batch", step])
        for name, digests in self._sets.items():
            hits = [place for place, row in enumerate(rows or ()) if not row.isdisjoint(digests)]
            self.found[name] += Counter(places=len(rows or ()), matched=len(hits), unclear=rows is None)
            if hits:
                self.first[name].setdefault("first", [step, hits[0]])

    def in_constants(self, program: Program, digest: str) -> None:
        """Search the constants of a program, in each shape in which its calls read them."""
        shapes: dict[str, list[Sequence[int]]] = {}
        for place in (place for call in program.calls for place in call["sources"]):
            shapes.setdefault(place["source"], []).append(place["shape"])
        for number, constant in enumerate(program.constants):
            if not constant.is_uniform:
                read = shapes.get(f"constant:{number}", [])
                self.inside(constant.tensor(), [[constant.elements], *read], [digest, number])

    def inside(self, tensor: Tensor, shapes: Iterable[Sequence[int]], at: list[Any]) -> None:
        """Search a tensor of these shapes, named by kind and number, for rows that are samples."""
        rows = [shape[start:] for shape in shapes for start in range(len(shape))]
        digests = hidden_in(tensor, {*map(tuple, rows), *(row for kind, row in self._layouts if kind == _name(tensor))})
        for name, wanted in self._sets.items():
            if hits := len(digests.intersection(wanted)):
                self.found[name]["hidden"] += hits
                self.first[name].setdefault("at", at)


def hidden_in(tensor: Tensor, rows: Collection[tuple[int, ...]]) -> set[str]:
    """Digests of all rows of these shapes that a tensor holds one after another, but for those of one value alone."""
    found = set[str]()
    if tensor.dtype not in _HASHED:
        return found
    flat = tensor.detach().cpu().contiguous().numpy().reshape(-1)
    for row in rows:
        size = math.prod(row)
        if 1 < size <= len(flat):
            cut = flat[: len(flat) // size * size].reshape(-1, size)
            found |= {*content_digests(cut[(cut != cut[:, :1]).any(1)].reshape(-1, *row))}
    return found


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _rows(batch: Mapping[str, Tensor]) -> list[set[str]] | None:
    """Digests of the rows that make up each sample; None where it does not show which do."""
    if any("+" in name or not tensor.ndim for name, tensor in batch.items()):
        return None  # arrays that share memory are kept as one stretch of it
    if len({len(tensor) for tensor in batch.values()}) != 1:
        return None
    arrays = [tensor.cpu().numpy() for tensor in batch.values() if tensor.dtype in _HASHED]
    if len(arrays) != len(batch):
        return None
    return [set(row) for row in zip(*map(content_digests, arrays), strict=True)]


def _test(path: Path, digest: str) -> dict[str, np.ndarray]:
    try:
        content = limits.read_file(path, limits.SAMPLES_BYTES)
    except OSError as error:
        raise file_error(f"cannot read the test set {path}", error) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise CallerError(f"the test set {path} is not the one that the rules name")
    return decode_arrays(content, path.name)


def _scores(run: RunFolder, arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, float] | None:
    last, programs = run.committed, [run.program(digest) for digest in names]
    if not run.finished or last < 1 or not programs:
        return None
    if not all(program.loss and _batches(program.batch, arrays) for program in programs):
        return None
    check_size(run)
    training, final = ProgramTraining(run.declared), run.checkpoint(last)
    found = {program.digest: _score(run, training, final, program, arrays) for program in programs}
    return found if all(map(math.isfinite, found.values())) else None


def _score(
    run: RunFolder,
    training: ProgramTraining,
    final: Mapping[str, Tensor],
    program: Program,
    arrays: Mapping[str, np.ndarray],
) -> float:
    place, total, count = accelerator(), 0.0, _batches(program.batch, arrays)
    for number in range(count):
        training.restore(final, run.committed)
        batch = {
            name: torch.from_numpy(arrays[name][number * layout["shape"][0] :][: layout["shape"][0]].copy()).to(place)
            for name, layout in program.batch.items()
        }
        _, _, loss = training.run(program, program.numbers, batch, partial(recording, run.declared.numerics))
        total += float(loss_of(loss))
    return total / count


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
