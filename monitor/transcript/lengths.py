"""How long each file of a run may be, as far as its declaration explains it; checked before any of them is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from firmware_sim import RECORD_BYTES, limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from firmware_sim.limits import Limit
from monitor.declaration.statement import Declaration
from monitor.presets import preset
from monitor.transcript.batch_file import FILE_SALT
from monitor.transcript.layout import CHIP_CHECKPOINT, METADATA, ORDER, SALT, program_of
from monitor.transcript.record import Entry

__all__ = ["CHIP_FILE_BYTES", "batch_bytes", "check_lengths"]

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
