"""Named tensors as a file: full states W, and batches."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.transcript.header import check_header

__all__ = ["decode_state", "encode_state"]


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
    if save(state) != data:
        raise EvidenceError(f"{what} is not in its canonical encoding")
    return state
