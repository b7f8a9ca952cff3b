"""The batches of a run, whatever it trains: from declared samples, or as they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import digest_bytes
from monitor.programs.batches import batch_root, step_salt
from monitor.transcript.data import BatchOpening, decode_batch
from monitor.transcript.layout import batch_path

__all__ = ["Batches", "RecordedBatches", "salt_commitment"]


class Batches(Protocol):
    """The batch of each step.

    Attributes:
        length: number of steps whose batches are declared; None where they come as the run goes.
    """

    @property
    def length(self) -> int | None: ...

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tensors of the batch of a step, counted from 1."""

    def batch_root(self, step: int) -> bytes:
        """Root that the step's leaf commits to, 32 bytes."""

    def opening(self, step: int) -> BatchOpening:
        """The batch of a step, opened to somebody who holds its leaf."""

    def describe(self, step: int) -> str:
        """The declared samples of a step, in words."""


def salt_commitment(salt: bytes) -> dict[str, str]:
    """The commitment to D in M where batches are committed step by step: to the salt key alone."""
    return {"salt": str(digest_bytes("salt", salt))}


class RecordedBatches:
    """D of a run whose batches come as it goes: one file a step.

    Args:
        read: returns the verified content of a file of the run.
        salt: 32 bytes.
    """

    length = None

    def __init__(self, read: Callable[[str], bytes], salt: bytes) -> None:
        if len(salt) != 32:
            raise EvidenceError("the salt key is not 32 bytes")
        self._read = read
        self._salt = salt

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tensors of the batch of a step, counted from 1."""
        path = batch_path(step)
        return decode_batch(self._read(path), path, step_salt(self._salt, step))

    def batch_root(self, step: int) -> bytes:
        """RFC 9162 root over the salted digest of the step's file: 32 bytes."""
        return batch_root(self._salt, step, self._read(batch_path(step)))

    def opening(self, step: int) -> BatchOpening:
        """The step's file, opened to somebody who holds its leaf."""
        return BatchOpening([(step_salt(self._salt, step), self._read(batch_path(step)))], is_file=True)

    def describe(self, step: int) -> str:
        """The declared samples of a step, in words."""
        return "batch"
