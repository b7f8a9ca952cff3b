"""Named tensors as a file: full states W, and batches."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.transcript.header import PREFIX_BYTES, check_header, header_bytes

__all__ = ["decode_state", "encode_state", "state_pieces"]


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Serialise a full state as safetensors, byte for byte as the format's own writer does."""
    return b"".join(state_pieces(state))


def state_pieces(state: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes of ``encode_state`` as pieces: a header, then the tensors, in place where they can be."""
    header, names = _header(_layout(state))
    raw = (state[name].detach().contiguous().cpu().flatten().view(torch.uint8) for name in names)
    return [memoryview(header), *(each.numpy().data for each in raw)]


@functools.lru_cache(maxsize=16)
def _header(layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[bytes, tuple[str, ...]]:
    """What the format's own writer puts before tensors of this layout, and their names in the order of their bytes.

    It is asked for tensors without elements, so that nothing is allocated: order and spelling are its own.
    """
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype, _ in layout})
    head = json.loads(data[PREFIX_BYTES : header_bytes(data)])
    shapes, start = {name: (dtype.itemsize, shape) for name, dtype, shape in layout}, 0
    for name, entry in head.items():
        size, shape = shapes[name]
        end = start + size * math.prod(shape)
        entry |= {"shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, tuple(head)


def decode_state(data: bytes, what: str) -> dict[str, Tensor]:
    """Parse a checkpoint; EvidenceError unless the bytes are the canonical encoding of what they hold."""
    check_header(data, what)
    try:
        state = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise EvidenceError(f"{what} is not safetensors: {error}") from None
    head, _ = _header(_layout(state))
    if data[: header_bytes(data)] != head or len(data) != len(head) + sum(each.nbytes for each in state.values()):
        raise EvidenceError(f"{what} is not in its canonical encoding")
    return state


def _layout(state: Mapping[str, Tensor]) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items())
