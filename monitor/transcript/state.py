"""Named tensors as a file: full states W, and batches.

The header of a safetensors file, checked before anything of the file is allocated.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical

__all__ = [
    "DTYPES",
    "PREFIX_BYTES",
    "check_entries",
    "check_header",
    "decode_state",
    "encode_state",
    "header_bytes",
    "state_pieces",
]


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


Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, type and shape of each tensor."""


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Serialise a full state as safetensors, byte for byte as the format's own writer does."""
    return b"".join(state_pieces(state))


def state_pieces(state: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes of ``encode_state`` as pieces: a header, then the tensors, in place where they can be."""
    header, names = _header(_layout(state))
    raw = (state[name].detach().contiguous().cpu().flatten().view(torch.uint8) for name in names)
    return [memoryview(header), *(each.numpy().data for each in raw)]


@functools.lru_cache(maxsize=16)
def _header(layout: Layout) -> tuple[bytes, tuple[str, ...]]:
    """What the format's own writer puts before tensors of this layout, and their names in the order of their bytes.

    It is asked for tensors without elements, so that nothing is allocated: order and spelling are its own.
    """
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype, _ in layout})
    head = canonical.loads(data[PREFIX_BYTES : header_bytes(data)])
    shapes, start = {name: (dtype.itemsize, shape) for name, dtype, shape in layout}, 0
    for name, entry in head.items():
        size, shape = shapes[name]
        end = start + size * math.prod(shape)
        entry |= {"shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, tuple(head)


def decode_state(data: bytes | bytearray, what: str) -> dict[str, Tensor]:
    """Parse a checkpoint; EvidenceError unless the bytes are the canonical encoding of what they hold.

    The tensors lie in a ``bytearray`` that is given, and are copies of what is constant.
    """
    check_header(data, what)
    end = header_bytes(data)
    header = canonical.loads(data[PREFIX_BYTES:end])
    layout = tuple((name, DTYPES.get(str(entry["dtype"])), tuple(entry["shape"])) for name, entry in header.items())
    known = tuple((name, dtype, shape) for name, dtype, shape in layout if dtype is not None)
    head, names = _header(known)
    if len(known) != len(layout) or data[:end] != head or len(data) != end + _bytes(known):
        _refuse(data, what)
    places = {name: (dtype, shape) for name, dtype, shape in known}
    held, state = data if isinstance(data, bytearray) else bytearray(data), {}
    for name in names:
        dtype, shape = places[name]
        count = math.prod(shape)
        if count:
            state[name] = torch.frombuffer(held, dtype=dtype, count=count, offset=end).view(shape)
        else:
            state[name] = torch.empty(shape, dtype=dtype)
        end += count * dtype.itemsize
    return state


def _refuse(data: bytes | bytearray, what: str) -> NoReturn:
    """EvidenceError that says what the format's own reader does of bytes that are not canonical."""
    try:
        load(bytes(data))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise EvidenceError(f"{what} is not safetensors: {error}") from None
    raise EvidenceError(f"{what} is not in its canonical encoding")


def _bytes(layout: Layout) -> int:
    return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in layout)


def _layout(state: Mapping[str, Tensor]) -> Layout:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items())


def _names_of(dtypes: Iterable[torch.dtype]) -> dict[str, torch.dtype]:
    """How the format names each of these types."""
    found = {}
    for dtype in dtypes:
        data = save({"": torch.empty(0, dtype=dtype)})
        found[str(canonical.loads(data[PREFIX_BYTES : header_bytes(data)])[""]["dtype"])] = dtype
    return found


_FLOATS = "float64 float32 float16 bfloat16 complex64 float8_e4m3fn float8_e5m2"
_WHOLE = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES = _names_of(getattr(torch, name) for name in f"{_FLOATS} {_WHOLE}".split())
"""Types of a state's tensors, by their names in a file."""
