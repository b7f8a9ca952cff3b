"""The files of a run by path: looked up in the record of the journal that a path belongs to.

The committed steps of a run, however many: a leaf is decoded when it is asked for.

How long each file of a run may be, as far as its declaration explains it; checked before any of them is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

from firmware_sim import RECORD_BYTES, limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from firmware_sim.limits import Limit
from monitor.declaration.statement import Declaration
from monitor.presets import preset
from monitor.programs.program import MAXIMUM_PROGRAMS
from monitor.transcript.data import FILE_SALT
from monitor.transcript.journal import Journal
from monitor.transcript.layout import (
    CHIP_CHECKPOINT,
    CREATION,
    METADATA,
    ORDER,
    SALT,
    closing_record,
    is_allowed,
    program_of,
    program_path,
    record_of,
)
from monitor.transcript.leaf import Leaf
from monitor.transcript.manifest import Entry

__all__ = ["CHIP_FILE_BYTES", "Leaves", "Listing", "batch_bytes", "check_lengths"]


CHIP_FILE_BYTES = {
    "chain.pem": limits.CHAIN_BYTES,
    CHIP_CHECKPOINT: limits.CHECKPOINT_BYTES,
    "epochs.json": limits.EPOCH_KEYS_BYTES,
    "quote.json": limits.QUOTE_BYTES,
    "log.bin": Limit(RECORD_BYTES * limits.CHIP_LOG_RECORDS.most, "bytes of a chip's log"),
}
_BY_FOLDER = {"logs": limits.ROUNDING_LOG_BYTES, "programs": limits.PROGRAM_BYTES, "constants": limits.CONSTANTS_BYTES}
_BY_PATH = {METADATA: limits.METADATA_BYTES, SALT: limits.SALT_BYTES}
_SLACK = 1 << 20
"""Bytes beyond what a declaration explains: a file that is wrong by little is for the checks that say what is wrong."""
_HEADER, _HEADER_ENTRY, _HEADER_SIZE = 64, 96, 24
"""Bytes of safetensors' JSON header: in all, for each tensor without its name, and for each of its dimensions."""


def check_lengths(declared: Declaration, files: Mapping[str, Entry]) -> None:
    """EvidenceError if a signed length is more than the declaration can explain.

    Batches that came as they went are explained by programs, which are not known here (``batch_bytes``).
    """
    for path, entry in files.items():
        most = _bound(declared, path)
        if most is not None and entry.length > most.most:
            raise EvidenceError(
                f"{path} is signed with a length of {entry.length} bytes, but at most {most.most} {most.what}"
            )
    limits.PROGRAMS_BYTES.check(sum(entry.length for path, entry in files.items() if program_of(path) is not None))


def batch_bytes(layouts: Mapping[str, Mapping[str, Any]]) -> int:
    """Longest file of a batch whose tensors have these dtypes and shapes."""
    tensors = [(name, layout["dtype"], layout["shape"]) for name, layout in layouts.items()]
    return _file_bytes([*tensors, (FILE_SALT, "uint8", (32,))])


def _bound(declared: Declaration, path: str) -> Limit | None:
    if path in _BY_PATH:
        return _BY_PATH[path]
    folder, _, name = path.partition("/")
    if folder == "chips":
        return CHIP_FILE_BYTES[name.rpartition("/")[2]]
    if folder == "checkpoints":
        return Limit(_state_bytes(declared), "bytes hold the declared state")
    if folder == "batches":
        return None
    if folder == "data":
        recipe = declared.recipe
        places = 0 if recipe is None else recipe.steps * recipe.batch_size
        if path == ORDER:
            order = _file_bytes([("order", "int64", (min(places, limits.PLACES.most), 1))])
            return Limit(order, "bytes hold the declared order of samples")
        samples = min(_samples_bytes(declared, places), limits.SAMPLES_BYTES.most)
        return Limit(samples, "bytes hold the declared samples")
    return _BY_FOLDER[folder]


def _samples_bytes(declared: Declaration, count: int) -> int:
    if declared.recipe is None:
        return 0
    arrays = preset(declared.recipe.preset).samples(None)
    return _file_bytes((name, str(array.dtype), (count, *array.shape[1:])) for name, array in arrays.items())


def _state_bytes(declared: Declaration) -> int:
    return _file_bytes((f"{entry.kind}/{entry.name}", entry.dtype, entry.shape) for entry in declared.state)


def _file_bytes(tensors: Iterable[tuple[str, str, Iterable[int]]]) -> int:
    """Longest safetensors file that holds tensors of these names, dtypes and shapes."""
    total = _SLACK + _HEADER
    for name, dtype, sizes in tensors:
        shape = list(sizes)
        total += 6 * len(name) + _HEADER_ENTRY + _HEADER_SIZE * len(shape) + math.prod(shape) * DTYPE_SIZES[dtype]
    return total


_KEPT = 4096
"""Leaves that are kept, those asked for last: a shorter run is decoded once."""


class Leaves(Sequence[Leaf]):
    """Leaves of steps 0 … count - 1; memory does not grow with their number.

    Args:
        read: returns the leaf of a step; EvidenceError where its record is no longer the signed one.
    """

    def __init__(self, read: Callable[[int], Leaf], count: int) -> None:
        self._read = lru_cache(maxsize=_KEPT)(read)
        self._steps = range(count)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Leaf: ...
    @overload
    def __getitem__(self, index: slice) -> Leaves: ...
    def __getitem__(self, index: int | slice) -> Leaf | Leaves:
        if isinstance(index, int):
            return self._read(self._steps[index])
        part = Leaves.__new__(Leaves)
        part._read, part._steps = self._read, self._steps[index]
        return part


_PROGRAM = b'"programs/'


class Listing(Mapping[str, Entry]):
    """Entry of each file that a run holds; none is kept in memory.

    Args:
        steps: number of the last step that the manifest counts.
        absent: tells of a listed file that the run does not hold, and need not.
        check: called with every entry that is looked up; EvidenceError if it is longer than it may be.
    """

    def __init__(
        self, journal: Journal, steps: int, absent: Callable[[str], bool], check: Callable[[str, Entry], None]
    ) -> None:
        self._journal = journal
        self._steps = steps
        self._absent = absent
        self._check = check
        self._programs: dict[str, int] | None = None

    def __getitem__(self, path: str) -> Entry:
        entry = self.listed(path)
        if entry is None or self._absent(path):
            raise KeyError(path)
        self._check(path, entry)
        return entry

    def __iter__(self) -> Iterator[str]:
        for record in self._journal:
            yield from (path for path in record.files if not self._absent(path))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def listed(self, path: str) -> Entry | None:
        """Entry of a file that the journal lists, held or not."""
        index = self.record_of(path)
        return None if index is None else self._journal.record(index).files.get(path)

    def record_of(self, path: str) -> int | None:
        """Number of the one record in which a path may be listed; None if the run has no such record."""
        if not is_allowed(path):
            return None
        index, closing = record_of(path), closing_record(self._steps)
        program = program_of(path)
        if program is not None:
            index = self.programs.get(program_path(program), closing)
        elif path.startswith("chips/"):
            index = closing
        elif index is None:
            index = CREATION
        return index if index < len(self._journal) else None

    @property
    def programs(self) -> Mapping[str, int]:
        """The record in which each program is first listed; EvidenceError if there are too many."""
        if self._programs is None:
            found: dict[str, int] = {}
            last = len(self._journal) - 1
            hints = self._journal.find(_PROGRAM)
            for index in hints if hints[-1:] == [last] else [*hints, last]:
                for path in self._journal.record(index).files:
                    if path.startswith("programs/"):
                        found.setdefault(path, index)
                if len(found) > MAXIMUM_PROGRAMS:
                    raise EvidenceError(f"a run has at most {MAXIMUM_PROGRAMS} programs, not {len(found)}")
            self._programs = found
        return self._programs
