"""The file of a batch that was not declared: safetensors, with a salt among the tensors.

The journal lists the file's plain SHA-256, which goes to parties that may not see a sample. With the salt it tells them
neither that two runs trained on the same batch, nor that a batch is the one that they have in mind.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor.transcript.state import decode_state, encode_state

__all__ = ["FILE_SALT", "decode_batch", "encode_batch"]

FILE_SALT = "file-salt"
"""Name of the salt among a batch's tensors: uint8 [32]."""


def encode_batch(batch: Mapping[str, Tensor], own: bytes) -> bytes:
    """Serialise a step's batch as a file that is salted by the step's own salt (``step_salt``).

    Raises:
        CallerError: an entry of the batch has the salt's name.
    """
    if FILE_SALT in batch:
        raise CallerError(f"rename the entry {FILE_SALT!r} of the batch: a run keeps its salt under that name")
    return encode_state({**batch, FILE_SALT: _salt(own)})


def decode_batch(data: bytes, what: str, own: bytes) -> dict[str, Tensor]:
    """Parse a batch's file; EvidenceError unless it is canonical, and salted by the step's own salt."""
    batch = decode_state(data, what)
    found = batch.pop(FILE_SALT, None)
    if found is None or found.dtype != torch.uint8 or not torch.equal(found, _salt(own)):
        raise EvidenceError(f"{what} does not have the salt that its run declares")
    return batch


def _salt(own: bytes) -> Tensor:
    """What the file holds: it reveals nothing of the salt under which the step's leaf commits to the file."""
    return torch.frombuffer(bytearray(hmac.digest(own, b"file", "sha256")), dtype=torch.uint8)
