"""The header of a safetensors file, checked before anything of the file is allocated."""

from __future__ import annotations

import math

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical

__all__ = ["PREFIX_BYTES", "check_entries", "check_header", "header_bytes"]

PREFIX_BYTES = 8
"""Of a file, which say how long its header is."""
_KEYS = {"dtype", "shape", "data_offsets"}


def header_bytes(data: bytes | bytearray) -> int:
    """Bytes of a file up to where its tensors begin, as it says itself."""
    return PREFIX_BYTES + int.from_bytes(data[:PREFIX_BYTES], "little")


def check_header(data: bytes | bytearray, what: str) -> None:
    """EvidenceError unless the header fits into the file, and names at most so many tensors of lawful shapes.

    That each tensor has the bytes that its shape needs is checked by the format's own reader.
    """
    end = header_bytes(data)
    if len(data) < end:
        raise EvidenceError(f"{what} is not safetensors: its header is longer than the file")
    header = canonical.parse(bytes(data[PREFIX_BYTES:end]), most=limits.HEADER_BYTES)
    check_entries(header, what)
    if any(math.prod(entry["shape"]) > 8 * len(data) for entry in header.values()):
        raise EvidenceError(f"{what} is not safetensors: a tensor is larger than the file")


def check_entries(header: object, what: str) -> None:
    """EvidenceError unless a header names at most so many tensors of lawful shapes, and nothing else."""
    if not isinstance(header, dict):
        raise EvidenceError(f"{what} is not safetensors: its header is not a JSON object")
    limits.TENSORS.check(len(header))
    for entry in header.values():
        is_lawful = (
            isinstance(entry, dict)
            and set(entry) == _KEYS
            and type(entry["dtype"]) is str
            and type(entry["shape"]) is type(entry["data_offsets"]) is list
            and all(type(at) is int for at in entry["data_offsets"])
        )
        if not is_lawful:
            raise EvidenceError(f"{what} is not safetensors: its header is malformed")
        limits.check_shape(entry["shape"])
