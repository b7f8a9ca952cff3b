"""What each rank signs of a step: what it read, what it sent to whom, the norms it took, and what lies on it after.

Digests alone, so that a replay by one process can say which rank departed from it. They lie in ``RUN.ranks``, one file
for each step and rank, beside the ranks' keys under the lab's signature: a file of these for each step from which on
the run has other ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from firmware_sim import Work
from firmware_sim.errors import EvidenceError, foreign
from firmware_sim.evidence import SigningKey, TensorKey, VerifyingKey, open_sealed, seal
from firmware_sim.limits import Limit, read_foreign
from monitor.distributed.reduction import Chunk
from monitor.programs.batches import flatten_batch
from monitor.programs.trace import tensor_digest

__all__ = [
    "Statements",
    "batch_digest",
    "flat_digest",
    "rank_key",
    "ranks_path",
    "read_keys",
    "read_step",
    "write_keys",
]

_KEYS = "application/vnd.chipwitness.rank-keys+json"
_STEP = "application/vnd.chipwitness.rank-step+json"
_CHANGES = Limit(1 << 16, "changes of a run's ranks")
_BYTES = Limit(256 << 20, "bytes of a rank's statement")
"""That of a rank with 10^6 chunks of 200 bytes."""
_PARTS = {"run", "step", "rank", "batches", "chunks", "norms", "work", "moved", "shards"}


def ranks_path(run: Path) -> Path:
    """The folder of ranks' statements beside a run folder."""
    return run.with_name(f"{run.name}.ranks")


def rank_key(secret: str, rank: int) -> SigningKey:
    """Key of one rank of a simulated lab."""
    return SigningKey.generate(hashlib.sha256(f"chipwitness/rank-key/{secret}/{rank}".encode()).digest())


def flat_digest(tensor: Tensor) -> str:
    """Digest of a tensor's type and elements in order, whatever its shape."""
    return tensor_digest(tensor.reshape(-1))


def batch_digest(part: object) -> str:
    """Digest of a micro-batch: its tensors by name, each with its type and shape."""
    named = sorted((name, tensor_digest(tensor)) for name, tensor in flatten_batch(part).items())
    return hashlib.sha256(repr(named).encode()).hexdigest()


class Statements:
    """Gathers and signs what one rank says of each step.

    Args:
        run: run folder beside which they are written.
    """

    def __init__(self, run: Path, run_id: str, rank: int, key: SigningKey) -> None:
        self._folder, self._run_id, self._rank, self._key = ranks_path(run), run_id, rank, key
        self._folder.mkdir(exist_ok=True)
        self._forget()

    def _forget(self) -> None:
        self._batches: dict[str, str] = {}
        self._chunks: list[list[Any]] = []
        self._norms: list[str] = []

    def read(self, part: object, micro: int) -> None:
        """The rank trains on this micro-batch."""
        self._batches[str(micro)] = batch_digest(part)

    def sent(self, chunk: Chunk) -> None:
        """The rank sends these pieces of a micro-batch's gradients to another rank, or keeps them as its own."""
        self._chunks.append([chunk.micro, list(chunk.names), chunk.destination, flat_digest(chunk.data)])

    def norms(self, norms: Sequence[Tensor]) -> None:
        """The rank scales gradients by these norms."""
        self._norms = [flat_digest(norm) for norm in norms]

    def close(
        self, step: int, work: Work, moved: Mapping[str, int], shards: Mapping[TensorKey, tuple[int, Tensor]]
    ) -> None:
        """The step has ended, with what the rank's meter counted; of each tensor, what is held from an element on."""
        payload = {
            "run": self._run_id,
            "step": step,
            "rank": self._rank,
            "batches": self._batches,
            "chunks": self._chunks,
            "norms": self._norms,
            "work": [work.calls, work.flop],
            "moved": dict(moved),
            "shards": {
                f"{kind}/{name}": [first, first + held.numel(), flat_digest(held)]
                for (kind, name), (first, held) in shards.items()
            },
        }
        (self._folder / _name(step, self._rank)).write_bytes(seal(_STEP, payload, self._key))
        self._forget()


def write_keys(run: Path, run_id: str, first: int, keys: Sequence[VerifyingKey], lab: SigningKey) -> None:
    """Say which keys the ranks of a run sign with from a step on."""
    ranks_path(run).mkdir(exist_ok=True)
    payload = {"run": run_id, "first": first, "keys": [key.raw.hex() for key in keys]}
    (ranks_path(run) / f"keys-{first:08d}.json").write_bytes(seal(_KEYS, payload, lab))


def read_keys(run: Path, run_id: str, lab: VerifyingKey) -> dict[int, list[VerifyingKey]]:
    """The ranks' keys, in order, by the step from which on they sign; EvidenceError where the lab did not say so."""
    with foreign(ranks_path(run).name), os.scandir(ranks_path(run)) as entries:
        keys = (each.name for each in entries if fnmatch(each.name, "keys-*.json"))
        names = sorted(islice(keys, _CHANGES.most + 1))
    _CHANGES.check(len(names))
    found = {}
    for name in names:
        payload = open_sealed(_read(ranks_path(run) / name), _KEYS, lab)
        if not isinstance(payload, dict) or set(payload) != {"run", "first", "keys"} or payload["run"] != run_id:
            raise EvidenceError("the ranks' keys are of another run or malformed")
        first = payload["first"]
        if type(first) is not int or name != f"keys-{first:08d}.json" or not isinstance(payload["keys"], list):
            raise EvidenceError("the ranks' keys are of another step or malformed")
        try:
            found[first] = [VerifyingKey(bytes.fromhex(text)) for text in payload["keys"]]
        except (TypeError, ValueError):
            raise EvidenceError("the ranks' keys are malformed") from None
        if not found[first]:
            raise EvidenceError("a run has no ranks")
    if 1 not in found:
        raise EvidenceError("cannot read the ranks' keys of the first step")
    return found


def read_step(run: Path, run_id: str, step: int, rank: int, key: VerifyingKey) -> dict[str, Any]:
    """What a rank signed of a step; EvidenceError where it is missing, not signed, or of another step."""
    payload = open_sealed(_read(ranks_path(run) / _name(step, rank)), _STEP, key)
    if not isinstance(payload, dict) or set(payload) != _PARTS:
        raise EvidenceError("a rank's statement has missing or extra keys")
    if (payload["run"], payload["step"], payload["rank"]) != (run_id, step, rank):
        raise EvidenceError("a rank's statement is of another run, step or rank")
    return payload


def _name(step: int, rank: int) -> str:
    return f"{step:08d}-{rank:04d}.json"


def _read(path: Path) -> bytes:
    with foreign(path.name):
        return read_foreign(path, _BYTES)
