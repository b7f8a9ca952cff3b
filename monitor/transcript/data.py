"""D: the ordered samples of a run, committed before training and disclosed sample by sample.

Each sample has a salted digest, each step a Merkle root over its batch, the run a root over its steps
(Shavit 2023, section 4.1 and counter-measure "commit at the start").

The file of a batch that was not declared: safetensors, with a salt among the tensors.

The journal lists the file's plain SHA-256, which goes to parties that may not see a sample. With the salt it tells them
neither that two runs trained on the same batch, nor that a batch is the one that they have in mind.

The data of a preset's run: which samples, in which order. Lab and inspector compute it alike.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, digest_bytes
from firmware_sim.evidence.merkle import leaf_hash, root_of_hashes
from monitor.environment import accelerator
from monitor.presets import preset
from monitor.presets.task import Task, draw_order
from monitor.programs.batches import salted_digest
from monitor.transcript.layout import ORDER, SAMPLES
from monitor.transcript.state import check_header, decode_state, encode_state

__all__ = [
    "FILE_SALT",
    "BatchOpening",
    "DeclaredData",
    "RunData",
    "agreement_digest",
    "declared_data",
    "decode_arrays",
    "decode_batch",
    "encode_arrays",
    "encode_batch",
    "to_batch",
]


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


def to_batch(samples: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, Tensor]:
    """Gather the samples of those row numbers into tensors with the batch as first axis, where this process trains."""
    place = accelerator()
    return {name: torch.from_numpy(values[rows]).to(place) for name, values in samples.items()}


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialise arrays as safetensors, which sorts them: one byte string for one content."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_arrays(data: bytes, what: str) -> dict[str, np.ndarray]:
    """Parse safetensors; EvidenceError unless the bytes are the canonical encoding of what they hold."""
    check_header(data, what)
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise EvidenceError(f"{what} is not safetensors: {error}") from None
    if save(arrays) != data:
        raise EvidenceError(f"{what} is not in its canonical encoding")
    return arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The samples that a run uses, their order, and the salt key.

    Attributes:
        samples: named arrays with the sample as first axis.
        order: int64 [steps, batch_size], rows of ``samples``.
        salt: 32 bytes; salt of row i is HMAC-SHA256(salt, i).
    """

    samples: Mapping[str, np.ndarray]
    order: np.ndarray
    salt: bytes
    _hashes: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = {len(values) for values in self.samples.values() if values.ndim}
        if len(counts) != 1 or any(values.ndim == 0 for values in self.samples.values()):
            raise EvidenceError("the sample arrays do not all have the same length")
        if self.order.ndim != 2 or self.order.dtype != np.int64 or not self.order.size:
            raise EvidenceError("the sample order is not a non-empty int64 [steps, batch] array")
        if self.order.min() < 0 or self.order.max() >= counts.pop():
            raise EvidenceError("the sample order names a sample that does not exist")
        if len(self.salt) != 32:
            raise EvidenceError("the salt key is not 32 bytes")

    @classmethod
    def select(cls, samples: Mapping[str, np.ndarray], order: np.ndarray, salt: bytes) -> RunData:
        """Keep only the samples that the order uses, renumbered by first use in ascending row order."""
        used, rows = np.unique(order, return_inverse=True)
        kept = {name: samples[name][used] for name in sorted(samples)}
        return cls(samples=kept, order=rows.reshape(order.shape).astype(np.int64), salt=salt)

    @classmethod
    def from_files(cls, samples: bytes, order: bytes, salt: bytes) -> RunData:
        """Parse the two data files of a run folder; EvidenceError on any other form."""
        arrays = decode_arrays(order, ORDER)
        if set(arrays) != {"order"}:
            raise EvidenceError(f"{ORDER} does not hold exactly one array named order")
        return cls(samples=decode_arrays(samples, SAMPLES), order=arrays["order"], salt=salt)

    @property
    def length(self) -> int:
        """Number of steps."""
        return len(self.order)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tensors of the batch of a step, counted from 1."""
        return to_batch(self.samples, self.order[step - 1])

    def describe(self, step: int) -> str:
        """The declared samples of a step, in words."""
        return "samples " + ", ".join(str(row) for row in self.order[step - 1])

    def sample_digest(self, row: int) -> bytes:
        """Salted digest of one sample: 32 bytes."""
        return sample_digest(self._salt_of(row), {name: values[row] for name, values in self.samples.items()})

    def _salt_of(self, row: int) -> bytes:
        return hmac.new(self.salt, struct.pack("<Q", row), hashlib.sha256).digest()

    def opening(self, step: int) -> BatchOpening:
        """The samples of a step, opened to somebody who holds its leaf."""

        def part(row: int) -> tuple[bytes, bytes]:
            return self._salt_of(row), encode_arrays({name: each[row : row + 1] for name, each in self.samples.items()})

        return BatchOpening([part(int(row)) for row in self.order[step - 1]], is_file=False)

    def batch_root(self, step: int) -> bytes:
        """RFC 9162 root over the sample digests of the batch of step 1, 2, …: 32 bytes."""
        return root_of_hashes([self._leaf_hash(int(row)) for row in self.order[step - 1]])

    def _leaf_hash(self, row: int) -> bytes:
        """Leaf hash of a sample's digest, made once: an order names each sample as often as there are epochs."""
        if row not in self._hashes:
            self._hashes[row] = leaf_hash(self.sample_digest(row))
        return self._hashes[row]

    def batch_roots(self) -> list[bytes]:
        """Roots of all steps, in order."""
        return [self.batch_root(step) for step in range(1, len(self.order) + 1)]

    def commitment(self) -> dict[str, str]:
        """The commitment to D in M: the root over all batches and a commitment to the salt key."""
        tree = MerkleTree()
        for root in self.batch_roots():
            tree.append(root)
        return {"root": tree.root().hex(), "salt": str(digest_bytes("salt", self.salt))}


def sample_digest(salt: bytes, sample: Mapping[str, np.ndarray]) -> bytes:
    """Digest of a sample's typed, length-prefixed arrays under its salt: 32 bytes."""
    parts = [salt]
    for name in sorted(sample):
        value = np.asarray(sample[name])
        header = f"{name}\0{value.dtype.str}\0{value.shape}".encode()
        body = np.ascontiguousarray(value).tobytes()
        parts += [struct.pack("<QQ", len(header), len(body)), header, body]
    return digest_bytes("sample", b"".join(parts)).value


@dataclass(frozen=True, slots=True)
class BatchOpening:
    """A batch with the salts under which it was committed to.

    Attributes:
        parts: salt and content of the step's file, or of each of its samples, an array of one sample by each name.
        is_file: it is a file.
    """

    parts: Sequence[tuple[bytes, bytes]]
    is_file: bool

    def root(self) -> bytes:
        """What a leaf commits to that holds this batch: 32 bytes; EvidenceError if it is none."""
        if self.is_file:
            digests = [salted_digest(salt, content) for salt, content in self.parts]
        else:
            salts = [salt for salt, _ in self.parts]
            digests = [
                sample_digest(salt, {name: values[0] for name, values in sample.items()})
                for salt, sample in zip(salts, self._samples(), strict=True)
            ]
        return root_of_hashes(list(map(leaf_hash, digests)))

    def tensors(self) -> dict[str, Tensor]:
        """What the step trains on; EvidenceError if it is no batch."""
        if self.is_file:
            if len(self.parts) != 1:
                raise EvidenceError("an opened batch is more than one file")
            salt, content = self.parts[0]
            return decode_batch(content, "an opened batch", salt)
        samples = self._samples()
        joined = {name: np.concatenate([each[name] for each in samples]) for name in samples[0]}
        return to_batch(joined, np.arange(len(samples)))

    def _samples(self) -> list[dict[str, np.ndarray]]:
        """Arrays of one sample each, of the same names and forms; EvidenceError if they are none."""
        limits.TENSORS.check(len(self.parts))
        samples = [decode_arrays(content, "a sample") for _, content in self.parts]
        forms = [{name: (values.dtype, values.shape) for name, values in each.items()} for each in samples]
        if not samples or not forms[0] or any(each != forms[0] for each in forms):
            raise EvidenceError("an opened batch holds samples of different shapes or types")
        if any(shape[:1] != (1,) for _, shape in forms[0].values()):
            raise EvidenceError("an opened batch is not divided into samples")
        return samples


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
