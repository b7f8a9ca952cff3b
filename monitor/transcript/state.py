"""Named tensors as a file: full states W, and batches."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.transcript.header import PREFIX_BYTES, check_header, header_bytes

__all__ = ["decode_state", "encode_state", "state_pieces"]

_canonical: deque[bytes] = deque(maxlen=16)
"""Headers of canonical encodings: they follow from names, types and shapes, and behind them lies what these hold."""


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Serialise a full state as safetensors."""
    return save({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()})


def state_pieces(state: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes of ``encode_state`` as pieces: a header, then the tensors, in place where they can be."""
    layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items())
    header, names = _header(layout)
    raw = (state[name].detach().contiguous().cpu().flatten().view(torch.uint8) for name in names)
    return [memoryview(header), *(each.numpy().data for each in raw)]


@functools.lru_cache(maxsize=8)
def _header(layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[bytes, tuple[str, ...]]:
    """What the format's own writer puts before tensors of this layout, and their names in the order of their bytes."""
    data = save({name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in layout})
    head = data[: header_bytes(data)]
    places = {name: entry["data_offsets"] for name, entry in json.loads(head[PREFIX_BYTES:]).items()}
    return head, tuple(sorted(places, key=places.__getitem__))


def decode_state(data: bytes, what: str) -> dict[str, Tensor]:
    """Parse a checkpoint; EvidenceError unless the bytes are the canonical encoding of what they hold."""
    check_header(data, what)
    try:
        state = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise EvidenceError(f"{what} is not safetensors: {error}") from None
    head = data[: header_bytes(data)]
    if head not in _canonical:
        if save(state) != data:
            raise EvidenceError(f"{what} is not in its canonical encoding")
        _canonical.append(head)
    return state
