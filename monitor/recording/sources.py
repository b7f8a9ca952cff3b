"""Where a run's batches come from: samples in a declared order, or whatever comes as the run goes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from firmware_sim.evidence import canonical
from monitor.lab.simulated_lab import LabConfig
from monitor.programs.batches import batch_root, step_salt
from monitor.transcript.batches import Batches, RecordedBatches, salt_commitment
from monitor.transcript.data import RunData, decode_batch, encode_batch
from monitor.transcript.layout import SALT, batch_path

__all__ = ["BatchSource", "DeclaredSource", "StreamSource", "lab_salt"]


def lab_salt(config: LabConfig, *about: object) -> bytes:
    """Key of the salts of a run's data, 32 bytes: no two runs of a simulated world have the same.

    Args:
        about: what the run declares, as JSON-able values.
    """
    own = canonical.encode([config.secret, config.lab, config.number, *about])
    return hashlib.sha256(b"chipwitness/salt/2" + own).digest()


class BatchSource(Protocol):
    """Source of a run's batches, with their commitments.

    Attributes:
        commitment: what M says about D.
        files: what lies in the run folder from the start.
        batches: those of the steps so far, or of all steps where they are declared.
        agreed: digests of data that lab and inspector agreed on, where they are not a preset's own.
    """

    commitment: Mapping[str, str]
    files: Mapping[str, bytes]
    batches: Batches
    agreed: frozenset[str]

    def keep(self, step: int, batch: Mapping[str, Tensor]) -> tuple[bytes, Mapping[str, Tensor]]:
        """The batch as a file where it is kept in one, else no bytes; and the batch on which the step trains."""

    def root(self, step: int, content: bytes) -> bytes:
        """Root that the step's leaf commits to, 32 bytes; ``content`` as ``keep`` returns it."""

    def step_files(self, step: int, content: bytes) -> dict[str, bytes]:
        """Files of the run folder that come with the step."""


class StreamSource:
    """Batches as they come, each committed by its step and kept in a file."""

    agreed: frozenset[str] = frozenset()

    def __init__(self, salt: bytes, folder: Path) -> None:
        """``salt`` has 32 bytes; ``folder`` is the run's."""
        self._salt = salt
        self.commitment: Mapping[str, str] = salt_commitment(salt)
        self.files: Mapping[str, bytes] = {SALT: salt}
        self.batches: Batches = RecordedBatches(lambda path: (folder / path).read_bytes(), salt)

    def keep(self, step: int, batch: Mapping[str, Tensor]) -> tuple[bytes, Mapping[str, Tensor]]:
        """The step's file, and what it holds."""
        own = step_salt(self._salt, step)
        content = encode_batch(batch, own)
        return content, decode_batch(content, "the batch", own)

    def root(self, step: int, content: bytes) -> bytes:
        """Root over the salted digest of the step's file."""
        return batch_root(self._salt, step, content)

    def step_files(self, step: int, content: bytes) -> dict[str, bytes]:
        """The batch."""
        return {batch_path(step): content}


class DeclaredSource:
    """Samples and their order, fixed before the first step."""

    def __init__(
        self, data: RunData, name: str, files: Mapping[str, bytes], agreed: frozenset[str] = frozenset()
    ) -> None:
        """``name`` is the data set's digest, ``files`` the data files of the run folder.

        Data that are not a preset's own were ``agreed`` on by digest.
        """
        self.agreed = agreed
        self._data = data
        self.commitment: Mapping[str, str] = {**data.commitment(), "set": name}
        self.files: Mapping[str, bytes] = {**files, SALT: data.salt}
        self.batches: Batches = data

    def keep(self, step: int, batch: Mapping[str, Tensor]) -> tuple[bytes, Mapping[str, Tensor]]:
        """No file: the samples are there already."""
        return b"", batch

    def root(self, step: int, content: bytes) -> bytes:
        """Root over the sample digests of the declared batch."""
        return self._data.batch_root(step)

    def step_files(self, step: int, content: bytes) -> dict[str, bytes]:
        """Nothing: the samples are there already."""
        return {}
