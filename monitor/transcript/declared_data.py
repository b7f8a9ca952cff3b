"""The data of a preset's run: which samples, in which order. Lab and inspector compute it alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from firmware_sim.evidence import digest_bytes
from monitor.presets import preset
from monitor.presets.task import Task, draw_order
from monitor.transcript.data import RunData, encode_arrays
from monitor.transcript.layout import ORDER, SAMPLES

__all__ = ["DeclaredData", "agreement_digest", "declared_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredData:
    """The declared samples and order of a task, before a salt is drawn.

    Attributes:
        name: digest of the whole data set, which is how M names it.
        files: content of the two data files of the run folder, by path.
    """

    name: str
    files: Mapping[str, bytes]

    @property
    def agreement(self) -> str:
        """The digest that lab and inspector agree on where the data are not the preset's own."""
        return agreement_digest({path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()})

    def with_salt(self, salt: bytes) -> RunData:
        """The data as the run uses them; ``salt`` has 32 bytes."""
        return RunData.from_files(self.files[SAMPLES], self.files[ORDER], salt)


def agreement_digest(sha256: Mapping[str, str]) -> str:
    """Digest over the SHA-256, in hex, of the samples' and the order's file, by path."""
    return str(digest_bytes("declared-data", "".join(sha256[path] for path in (SAMPLES, ORDER)).encode()))


def declared_data(task: Task, source: Path | None) -> DeclaredData:
    """The samples that a task uses, in the order that its seed decides, from the preset or the user's own file.

    Raises:
        CallerError: the file cannot be read, the preset takes none, or the data hold fewer samples than one batch.
    """
    samples = preset(task.preset).samples(source)
    order = draw_order(task, len(next(iter(samples.values()))))
    chosen = RunData.select(samples, order, bytes(32))
    files = {SAMPLES: encode_arrays(chosen.samples), ORDER: encode_arrays({"order": chosen.order})}
    return DeclaredData(name=str(digest_bytes("data-set", encode_arrays(samples))), files=files)
