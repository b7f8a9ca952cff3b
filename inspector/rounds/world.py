"""A world of parties: a folder for each, with its keys and an inbox, and nothing that two of them write.

    inspectorate/  key, inbox/, secrets/ (until they are opened), verdicts/ (bundles), rules/, memory.json,
                   checkpoints/CHIP/checkpoint.json (up to where an accepted log may be pruned),
                   openings/ROUND/RUN (of each run that is handed over, all but states, samples and rounding logs)
    cluster/       key, inbox/, openings/ROUND/RUN (what was drawn, see ``opening``), errors/ROUND.txt
    registry/      trust.json: makers, firmware, labs, chips, and the public keys of the two above
    labs/NAME/     inbox/, runs.json: where its runs and chips lie, which nobody else reads; handed/ROUND/RUN

A message is a DSSE envelope over an in-toto statement, about the announcement of its round. What brings it notes when
it came, as a post office would, and brings the first of a kind only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, foreign
from firmware_sim.evidence import (
    SHA256,
    Digest,
    SigningKey,
    VerifyingKey,
    canonical,
    open_sealed,
    open_statement,
    seal,
    statement,
)
from inspector.inspection.forks import signer_of
from inspector.inspection.trust import Trust
from inspector.registry.keyfiles import load_private, load_public, write_keys
from inspector.rounds.forms import check_form
from monitor.files import locked, write_whole
from monitor.transcript import parse_time
from monitor.transcript.layout import MANIFEST

__all__ = ["CLUSTER", "INSPECTORATE", "KINDS", "Message", "World", "time_text"]

INSPECTORATE, CLUSTER = "inspectorate", "cluster"
KINDS = ("announcement", "heads", "draw", "answers", "order", "openings", "results")
"""What a round's messages are, in their order; the verdict is a bundle."""
_PREDICATE = "https://chipwitness.org/round/{}/v1"
_PAYLOAD = "application/vnd.chipwitness.round.{}.v1+json"
_NAME = re.compile(
    r"(?P<round>[0-9]{4})-(?P<number>[0-9])-(?P<kind>[a-z]+)-(?P<sender>[a-z0-9-]+)(\.[0-9]{1,2})?\.json", re.ASCII
)
_PLACES = 64
"""Names that a message may have: who finds one taken by what its sender has not signed takes the next."""
_NO_NONCE = bytes(32)
"""Chips of a world answer live challenges alone: no nonce is agreed beforehand."""


def time_text(time: datetime) -> str:
    """A time as messages state it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose signature was verified.

    Attributes:
        about: SHA-256 of the round's announcement; of an announcement itself, of the secret.
        envelope: its bytes.
        received: when it came.
    """

    about: bytes
    predicate: Mapping[str, Any]
    envelope: bytes
    received: datetime

    @property
    def digest(self) -> bytes:
        """SHA-256 of the envelope."""
        return hashlib.sha256(self.envelope).digest()


class World:
    """The folders of all parties; CallerError if there is no such world."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INSPECTORATE / "key").is_file():
            raise CallerError(f"there is no world {folder}; `world init` makes one")

    @classmethod
    def create(cls, folder: Path) -> World:
        """Make inspectorate and cluster, with fresh keys; CallerError if the folder is not empty."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CallerError(f"{folder} is not empty; choose another folder")
        for party in (INSPECTORATE, CLUSTER):
            (folder / party / "inbox").mkdir(parents=True)
            write_keys(folder / party / "key", SigningKey.generate())
        mine = [f"{INSPECTORATE}/{place}" for place in ("secrets", "verdicts", "rules", "openings")]
        for place in ("registry", "labs", f"{CLUSTER}/openings", *mine):
            (folder / place).mkdir()
        return cls(folder)

    def key(self, party: str) -> SigningKey:
        """The private key of inspectorate or cluster, which only that party may use."""
        return load_private(self.folder / party / "key")

    def public(self, party: str) -> VerifyingKey:
        """Anyone's view of that key; the cluster's stands in the registry, once a lab has joined."""
        if party == CLUSTER and (self.folder / "registry" / "trust.json").is_file():
            (key,) = self.trust().clusters
            return key
        return load_public(self.folder / party / "key.pub")

    def join(self, reference: Trust, runs: Mapping[str, Path]) -> list[str]:
        """Register the labs of a trust file, with their chips; ``runs`` says where each run's folder lies.

        Each run is of the lab that has signed it. Another run of its lab by the same name gets a longer one.

        Returns:
            The labs.

        Raises:
            CallerError: the registry says otherwise of a lab or a chip.
        """
        found = replace(
            reference,
            nonce=_NO_NONCE,
            challenges={},
            inspectorates=reference.inspectorates | {self.public(INSPECTORATE)},
            clusters=frozenset({self.public(CLUSTER)}),
        )
        path = self.folder / "registry" / "trust.json"
        for lab in found.labs:
            self._lab(lab)
        with locked(path):
            merged = self.trust().merge(found) if path.exists() else found
            write_whole(path, json.dumps(merged.to_json(), indent=1).encode() + b"\n")
        signed = {name: _signed(run, found) for name, run in runs.items()}
        for lab in found.labs:
            (self._lab(lab) / "inbox").mkdir(parents=True, exist_ok=True)
            known = self.runs(lab)
            for name, run in runs.items():
                signer, run_id = signed[name]
                other = _signed(Path(known[name]), found)[1] if name in known else ""
                place = f"{name}-{run_id[:8]}" if other and run_id and other != run_id else name
                known |= {place: str(run.absolute())} if signer in ("", lab) else {}
            write_whole(self._lab(lab) / "runs.json", canonical.encode(known))
        return sorted(found.labs)

    def trust(self) -> Trust:
        """What the registry says; CallerError if no lab has joined."""
        path = self.folder / "registry" / "trust.json"
        if not path.is_file():
            raise CallerError(f"no lab has joined {self.folder}")
        return Trust.load([path])

    def runs(self, lab: str) -> dict[str, str]:
        """Where a lab's runs lie, by name, as only it knows."""
        path = self._lab(lab) / "runs.json"
        if not path.is_file():
            return {}
        return dict(canonical.decode(path.read_bytes(), most=limits.METADATA_BYTES))

    @property
    def round(self) -> int:
        """Number of the newest round; 0 before the first."""
        return sum(path.name.isdigit() for path in (self.folder / INSPECTORATE / "secrets").iterdir())

    def _lab(self, lab: str) -> Path:
        limits.check_lab(lab)
        if lab in (INSPECTORATE, CLUSTER):
            raise CallerError(f"no lab is named {lab}: that is another party of each world; take another --lab")
        return self.folder / "labs" / lab

    def home(self, party: str) -> Path:
        """A party's folder."""
        return self.folder / party if party in (INSPECTORATE, CLUSTER) else self._lab(party)

    def inbox(self, party: str) -> Path:
        """Where a party's messages lie."""
        return self.home(party) / "inbox"

    def send(
        self,
        kind: str,
        sender: str,
        to: list[str],
        predicate: Mapping[str, Any],
        about: bytes,
        key: SigningKey,
        now: datetime,
    ) -> bytes:
        """Sign a message of the newest round and bring it to each of the parties; returns the envelope.

        Raises:
            CallerError: a message of that kind has been sent already, or others have taken all names of it.
        """
        subject = [("secret" if kind == KINDS[0] else "announcement", Digest(SHA256, about))]
        payload = statement(_PREDICATE.format(kind), subject, predicate)
        envelope = seal(_PAYLOAD.format(kind), payload, key)
        content = canonical.encode({"envelope": canonical.decode(envelope), "received": time_text(now)})
        # what one party got, and another could not, is taken back: it can be sent again
        with locked(self.home(sender) / "sent"), ExitStack() as undo:
            if any(self.read(party, kind, sender, key.verifying) is not None for party in to):
                raise CallerError(f"{sender} has sent {kind} of round {self.round} already")
            for party in to:
                undo.callback(self._put(party, kind, sender, content).unlink, missing_ok=True)
            undo.pop_all()
        return envelope

    def _put(self, party: str, kind: str, sender: str, content: bytes) -> Path:
        """Write a message under the first of its names that is free."""
        for path in self._places(party, kind, sender, self.round):
            with suppress(FileExistsError):
                write_whole(path, content, new=True)
                return path
        raise CallerError(f"others have taken all {_PLACES} names of {kind} of {sender} in {self.inbox(party)}")

    def _places(self, party: str, kind: str, sender: str, number: int) -> list[Path]:
        stem = f"{number:04d}-{KINDS.index(kind)}-{kind}-{sender}"
        names = [f"{stem}.json", *(f"{stem}.{place}.json" for place in range(2, _PLACES + 1))]
        return [self.inbox(party) / name for name in names]

    def read(
        self, party: str, kind: str, sender: str, key: VerifyingKey, *, number: int | None = None
    ) -> Message | None:
        """A message of a round (the newest) in a party's inbox; None if none came, or none that the sender signed.

        It counts by its signature: what others put there under the sender's name is none.
        """
        places = self._places(party, kind, sender, self.round if number is None else number)
        found = (self._open(path, kind, key) for path in places if os.path.lexists(path))
        return next((message for message in found if message is not None), None)

    @staticmethod
    def _open(path: Path, kind: str, key: VerifyingKey) -> Message | None:
        try:
            with foreign(path):
                found = limits.read_file(path, limits.BUNDLE_BYTES)
            content = canonical.decode(found, most=limits.BUNDLE_BYTES)
            envelope = canonical.encode(content["envelope"])
            payload = open_sealed(envelope, _PAYLOAD.format(kind), key, most=limits.BUNDLE_BYTES)
            [(_, about)], predicate = open_statement(payload, _PREDICATE.format(kind))
            check_form(kind, predicate)
            return Message(
                about=about.value, predicate=predicate, envelope=envelope, received=parse_time(content["received"])
            )
        except (EvidenceError, LookupError, TypeError, ValueError):
            return None  # what its sender did not sign in this form never came

    def timeline(self) -> list[tuple[int, str, str, str, list[str]]]:
        """All signed messages as round, time, kind, sender and receivers, in their order; other files are none."""
        found: dict[tuple[int, int, str, str, str], set[str]] = {}
        keys = {party: self.public(party) for party in (INSPECTORATE, CLUSTER)}
        keys |= self.trust().labs if (self.folder / "registry" / "trust.json").is_file() else {}
        parties = [INSPECTORATE, CLUSTER, *sorted(path.name for path in (self.folder / "labs").iterdir())]
        for party in parties:
            for path in self.inbox(party).iterdir():
                match = _NAME.fullmatch(path.name)
                kind, sender = (match["kind"], match["sender"]) if match is not None else ("", "")
                if match is not None and kind in KINDS and sender in keys:
                    message = self._open(path, kind, keys[sender])
                    if message is None:
                        continue
                    number, time = KINDS.index(kind), time_text(message.received)
                    entry = (int(match["round"]), number, time, kind, sender)
                    found.setdefault(entry, set()).add(party)
        order = [INSPECTORATE, CLUSTER, *sorted(keys)]
        told = sorted(found.items(), key=lambda each: each[0])
        return [
            (number, time, kind, sender, sorted(to, key=order.index)) for (number, _, time, kind, sender), to in told
        ]


def _signed(run: Path, trust: Trust) -> tuple[str, str]:
    """The lab that has signed a run, and the run's id; two empty texts where none of these labs has."""
    try:
        lab, head = signer_of(limits.read_file(run / MANIFEST, limits.MANIFEST_BYTES), trust)
    except (OSError, EvidenceError):
        return "", ""
    return lab, head.run
