"""What each rank signs of a step: what it read, what it gave to whom, the norms it took, and what lies on it after.

Digests alone, so that a replay by one process can say which rank departed from it. They lie in ``RUN.ranks``, one file
for each step and rank, with the ranks' keys under the lab's signature: a file of these for each step from which on
the run has other ranks.

What a rank gives is signed at once. A rank that gets other bytes than these stops the step: it signs a complaint, which
names the pair, since no one else can tell which of the two is at fault.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError, EvidenceError, foreign
from firmware_sim.evidence import (
    Digest,
    SignatureError,
    SigningKey,
    TensorKey,
    VerifyingKey,
    canonical,
    open_sealed,
    seal,
)
from firmware_sim.evidence.canonical import JsonObject
from firmware_sim.evidence.envelope import pae
from firmware_sim.limits import Limit, read_file
from monitor.programs.batches import flatten_batch
from monitor.programs.trace import tensor_digest

__all__ = [
    "DIGEST_BYTES",
    "SEAL_BYTES",
    "Label",
    "OlderStatement",
    "Statements",
    "batch_digest",
    "described",
    "flat_digest",
    "keys_at",
    "rank_key",
    "ranks_path",
    "read_complaints",
    "read_keys",
    "read_step",
    "sealed",
    "write_keys",
]

DIGEST_BYTES, SIGNATURE_BYTES = 32, 64
SEAL_BYTES = DIGEST_BYTES + SIGNATURE_BYTES
"""Of a seal over one digest; each further one adds ``DIGEST_BYTES``."""
_KEYS = "application/vnd.chipwitness.rank-keys+json"
_STEP = "application/vnd.chipwitness.rank-step+json"
_GIVEN = "application/vnd.chipwitness.rank-given+json"
_COMPLAINT = "application/vnd.chipwitness.rank-complaint+json"
_SEALS = "seals"
_CHANGES = Limit(1 << 16, "changes of a run's ranks")
_BYTES = Limit(256 << 20, "bytes of a rank's statement")
"""That of a rank with 10^6 chunks of 200 bytes."""
_WHOSE = {"run": str, "step": int, "rank": int}
_SAID = _WHOSE | {
    "batches": {str: str},
    "given": [(str, int, [str], [str])],
    "seals": [str],
    "norms": [str],
    "work": (int, int),
    "moved": {str: int},
    "between": (int, int, int),
    "shards": {str: (int, int, str)},
}
_COMPLAINED = _WHOSE | {"sender": int, "kind": str, "turn": int, "names": [str], "signed": [str], "came": str}


def ranks_path(run: Path) -> Path:
    """The folder of ranks' statements next to a run folder."""
    return run.with_name(f"{run.name}.ranks")


def rank_key(secret: str, rank: int) -> SigningKey:
    """Key of one rank of a simulated lab."""
    return SigningKey.generate(hashlib.sha256(f"chipwitness/rank-key/{secret}/{rank}".encode()).digest())


def flat_digest(tensor: Tensor) -> str:
    """Digest of a tensor's type and elements in order, whatever its shape."""
    with torch._C._DisableTorchDispatch():  # nothing observes it, and a step's modes take time
        return tensor_digest(tensor.reshape(-1))


def batch_digest(part: object) -> str:
    """Digest of a micro-batch: its tensors by name, each with its type and shape."""
    named = sorted((name, tensor_digest(tensor)) for name, tensor in flatten_batch(part).items())
    return hashlib.sha256(repr(named).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Label:
    """What a collective carries.

    Attributes:
        kind: ``weight``, ``chunk`` (of gradients), ``largest`` and ``squares`` (for norms), ``sum``, ``loss`` or
            ``load``.
        names: of the tensors whose pieces it carries, in order.
        turn: the backward pass of the step, from 0.
    """

    kind: str
    names: tuple[str, ...]
    turn: int = 0


class Statements:
    """Gathers and signs what one rank says of each step.

    Args:
        run: run folder next to which they are written.
        key: this rank's; keys: those by which all ranks' signatures verify.

    Attributes:
        between: what the rank's meter counted between the last step and the present one.
        last: the statement that was signed last.
    """

    def __init__(self, run: Path, run_id: str, rank: int, key: SigningKey, keys: Sequence[VerifyingKey]) -> None:
        self._folder, self._run_id, self._rank, self._key, self._keys = ranks_path(run), run_id, rank, key, keys
        self._folder.mkdir(exist_ok=True)
        self.between, self.last = NO_WORK, b""
        self._forget_given()
        self.begin(1)

    def _forget_given(self) -> None:
        self._given: list[list[Any]] = []
        self._seals = [hashlib.sha256() for _ in self._keys]

    def begin(self, step: int) -> None:
        """What follows belongs to this step."""
        self._step = step
        self._batches: dict[str, str] = {}
        self._norms: list[str] = []

    def read(self, part: object, micro: int) -> None:
        """The rank trains on this micro-batch."""
        self._batches[str(micro)] = batch_digest(part)

    def give(self, label: Label, parts: Sequence[Tensor]) -> bytes:
        """The rank gives these to other ranks, one to each or one to all; returns the seal: digests and signature."""
        digests = [flat_digest(part) for part in parts]
        self._given.append([label.kind, label.turn, list(label.names), digests])
        signature = self._key.sign(_message(self._run_id, self._step, self._rank, label, digests))
        return b"".join(Digest.parse(each).value for each in digests) + signature

    def require(self, sender: int, label: Label, seal: bytes, part: Tensor) -> None:
        """EvidenceError, and a complaint next to the statements, unless a rank signed what came from it."""
        came = Digest.parse(flat_digest(part))
        values = [seal[at : at + DIGEST_BYTES] for at in range(0, len(seal) - SIGNATURE_BYTES, DIGEST_BYTES)]
        signed = [str(Digest(came.algorithm, value)) for value in values]
        try:
            message = _message(self._run_id, self._step, sender, label, signed)
            self._keys[sender].verify(seal[-SIGNATURE_BYTES:], message)
            is_signed = True
        except SignatureError:
            is_signed = False
        if not is_signed or signed[self._rank if len(signed) > 1 else 0] != str(came):
            self._complain(sender, label, signed, str(came))

    def note(self, sender: int, seal: bytes) -> None:
        """A rank's seal has come, or is this rank's own."""
        self._seals[sender].update(seal[:-SIGNATURE_BYTES])

    def seals(self) -> bytes:
        """One digest for each rank: of the digests that it signed in this step, as they came here."""
        return b"".join(each.digest() for each in self._seals)

    def require_same(self, rank: int, seals: bytes) -> None:
        """EvidenceError unless another rank got the seals of every rank that came here."""
        mine = self.seals()
        for sender, at in enumerate(range(0, len(mine), DIGEST_BYTES)):
            if mine[at : at + DIGEST_BYTES] != seals[at : at + DIGEST_BYTES]:
                label = Label(_SEALS, (f"rank {sender}",))
                self._complain(rank, label, [seals[at : at + DIGEST_BYTES].hex()], mine[at : at + DIGEST_BYTES].hex())

    def _complain(self, sender: int, label: Label, signed: Sequence[str], came: str) -> NoReturn:
        """Sign that a rank gave something else than it signed, and stop."""
        payload = {
            "run": self._run_id,
            "step": self._step,
            "rank": self._rank,
            "sender": sender,
            "kind": label.kind,
            "turn": label.turn,
            "names": list(label.names),
            "signed": list(signed),
            "came": came,
        }
        path = self._folder / f"complaint-{_name(self._step, self._rank)}"
        path.write_bytes(seal(_COMPLAINT, payload, self._key))
        what = _complaint(label.kind, label.names, sender)
        raise EvidenceError(f"step {self._step}: rank {self._rank} got {what}; {path.name} says so")

    def norms(self, norms: Sequence[Tensor]) -> None:
        """The rank scales gradients by these norms."""
        self._norms = [flat_digest(norm) for norm in norms]

    def close(self, work: Work, moved: Mapping[str, int], shards: Mapping[TensorKey, tuple[int, Tensor]]) -> None:
        """The step has ended, with what the rank's meter counted; of each tensor, what is held from an element on."""
        payload = {
            "run": self._run_id,
            "step": self._step,
            "rank": self._rank,
            "batches": self._batches,
            "given": self._given,
            "seals": [each.hexdigest() for each in self._seals],
            "norms": self._norms,
            "work": [work.calls, work.flop],
            "moved": dict(moved),
            "between": [self.between.calls, self.between.flop, self.between.moved],
            "shards": {
                f"{kind}/{name}": [first, first + held.numel(), flat_digest(held)]
                for (kind, name), (first, held) in shards.items()
            },
        }
        self.last = seal(_STEP, payload, self._key)
        (self._folder / _name(self._step, self._rank)).write_bytes(self.last)
        self._forget_given()

    def opened(self, statements: Sequence[bytes], state: Mapping[TensorKey, Tensor]) -> list[JsonObject]:
        """What all ranks signed of the step; the state is what they signed that they hold, each piece by its holder.

        Raises:
            EvidenceError: one is not signed, or the state is another.
        """
        found = []
        for sender, data in enumerate(statements):
            said = _opened(data, self._run_id, self._step, sender, self._keys[sender])
            found.append(said)
            for name, (first, last, digest) in said["shards"].items():
                kind, _, tensor = name.partition("/")
                if (kind, tensor) not in state:
                    raise EvidenceError(
                        f"step {self._step}: rank {sender} signed that it holds {name!a:.100}, which is not a tensor "
                        "of the state"
                    )
                whole = state[kind, tensor].reshape(-1)
                is_piece = last - first != len(whole)
                if is_piece and (came := flat_digest(whole[first:last])) != digest:
                    self._complain(sender, Label("shard", (name,)), [digest], came)
        return found


def sealed(given: Sequence[Any]) -> str:
    """The digest of what a rank's statement says that it gave, as those who got it have it in ``seals``."""
    digests = [Digest.parse(digest).value for _, _, _, digests in given for digest in digests]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def described(kind: str, names: Sequence[str]) -> str:
    """What a collective carries, in words."""
    bucket = f" of {names[0]} … {names[-1]}" if len(names) > 1 else f" of {names[0]}" if names else ""
    return f"{kind}{bucket}"


def _complaint(kind: str, names: Sequence[str], sender: int) -> str:
    """What somebody got, in words."""
    if kind == _SEALS:
        return f"{described(kind, names)}, with bytes that differ from what rank {sender} got"
    return f"{described(kind, names)} from rank {sender}, with bytes that rank {sender} did not sign"


def _message(run: str, step: int, rank: int, label: Label, digests: Sequence[str]) -> bytes:
    """What a rank signs of what it gives."""
    return pae(_GIVEN, canonical.encode([run, step, rank, label.kind, label.turn, list(label.names), list(digests)]))


def read_complaints(
    run: Path, run_id: str, signers: Mapping[int, Sequence[VerifyingKey]]
) -> list[tuple[int, int, str]]:
    """Step, rank and text of what ranks say that others gave them otherwise than signed, by step.

    Raises:
        EvidenceError: too many files, or one that no rank of that step signed.
    """
    found = []
    for name in _names(run, "complaint-*.json"):
        data = _read(ranks_path(run) / name)
        try:
            step, rank = (int(part) for part in name.removesuffix(".json").split("-")[1:])
            key = keys_at(signers, step)[rank]
            said = open_sealed(data, _COMPLAINT, key)
            if (said["run"], said["step"], said["rank"]) != (run_id, step, rank):
                raise EvidenceError("the complaint belongs to another run, step or rank")
            text = "it signed a complaint of another form"
            if has_form(said, _COMPLAINED):
                what = _complaint(said["kind"], said["names"], said["sender"])
                text = f"it says that it got {what}: one of the two ranks, or the connection between them, is at fault"
        except (EvidenceError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"{name}: {error}") from None
        found.append((step, rank, text))
    return found


def keys_at(signers: Mapping[int, Sequence[VerifyingKey]], step: int) -> Sequence[VerifyingKey]:
    """The ranks' keys of one step, given by the step from which on they sign."""
    return signers[max(first for first in signers if first <= step)]


def write_keys(run: Path, run_id: str, first: int, keys: Sequence[VerifyingKey], lab: SigningKey) -> None:
    """Say which keys the ranks of a run sign with from a step on."""
    ranks_path(run).mkdir(exist_ok=True)
    payload = {"run": run_id, "first": first, "keys": [key.raw.hex() for key in keys]}
    (ranks_path(run) / f"keys-{first:08d}.json").write_bytes(seal(_KEYS, payload, lab))


def read_keys(run: Path, run_id: str, lab: VerifyingKey) -> dict[int, list[VerifyingKey]]:
    """The ranks' keys, in order, by the step from which on they sign; EvidenceError where the lab did not say so."""
    found = {}
    for name in _names(run, "keys-*.json"):
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


def read_step(run: Path, run_id: str, step: int, rank: int, key: VerifyingKey) -> JsonObject:
    """What a rank signed of a step; EvidenceError where it is missing, not signed, or of another step."""
    return _opened(_read(ranks_path(run) / _name(step, rank)), run_id, step, rank, key)


class OlderStatement(CallerError):
    """A statement of a form that earlier versions wrote: nothing is concluded from it."""


def _opened(data: bytes, run_id: str, step: int, rank: int, key: VerifyingKey) -> JsonObject:
    payload = open_sealed(data, _STEP, key)
    if isinstance(payload, dict) and "chunks" in payload and "given" not in payload:
        raise OlderStatement(
            "ranks' statements are of an older form; run `chipwitness ranks` of the version that wrote them"
        )
    if not has_form(payload, _SAID):
        raise EvidenceError("a rank's statement has missing or extra keys, or a malformed value")
    if (payload["run"], payload["step"], payload["rank"]) != (run_id, step, rank):
        raise EvidenceError("a rank's statement is of another run, step or rank")
    found: JsonObject = payload
    return found


def has_form(value: object, form: Any) -> bool:
    """Whether JSON has a form: a type, ``[form of each]``, ``(form of first, …)``, or a form by key, or for each key.

    An integer is a count.
    """
    if isinstance(form, type):
        return type(value) is form and (type(value) is not int or value >= 0)
    if isinstance(form, dict):
        forms = dict.fromkeys(value, form[str]) if isinstance(value, dict) and str in form else form
        return isinstance(value, dict) and set(value) == set(forms) and all(has_form(value[x], forms[x]) for x in value)
    if not isinstance(value, list) or (isinstance(form, tuple) and len(value) != len(form)):
        return False
    return all(map(has_form, value, form if isinstance(form, tuple) else form * len(value)))


def _names(run: Path, pattern: str) -> list[str]:
    """The files of a kind next to a run; EvidenceError where there are too many."""
    with foreign(ranks_path(run).name), os.scandir(ranks_path(run)) as entries:
        names = sorted(islice((each.name for each in entries if fnmatch(each.name, pattern)), _CHANGES.most + 1))
    _CHANGES.check(len(names))
    return names


def _name(step: int, rank: int) -> str:
    return f"{step:08d}-{rank:04d}.json"


def _read(path: Path) -> bytes:
    with foreign(path.name):
        return read_file(path, _BYTES)
