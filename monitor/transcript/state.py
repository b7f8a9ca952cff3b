"""Named tensors as a file: full states W, and batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.transcript.header import check_header, header_bytes

__all__ = ["decode_state", "encode_state"]

_canonical: deque[bytes] = deque(maxlen=16)
"""Headers of canonical encodings: they follow from names, types and shapes, and behind them lies what these hold."""


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Serialise a full state as safetensors."""
    return save({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()})


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
