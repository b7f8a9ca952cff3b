"""A world of parties: a folder for each, with its keys and an inbox, and nothing that two of them write.

    inspectorate/  key, secrets/ (until they are opened), verdicts/ (bundles), rules/, memory.json,
                   checkpoints/CHIP/checkpoint.json (up to where an accepted log may be pruned),
                   openings/ROUND/RUN (of each run that is handed over, all but states, samples and rounding logs)
    cluster/       key, openings/ROUND/RUN (what was drawn, see ``opening``), errors/ROUND.txt
    registry/      trust.json: makers, firmware, labs, chips, and the public keys of the two above;
                   deposits/ (of chips that have changed hands, as `registry trust --deposits` writes them)
    labs/NAME/     runs.json: where its runs and chips lie, which no one else reads; handed/ROUND/RUN
    each of them   inbox/SENDER/, sent/; of inspectorate and cluster also received/ (see ``receiving``)

A message is a DSSE envelope over an in-toto statement, about the announcement of its round. Its file is named by the
digest of its bytes, so that no one else can take its name. Anyone may put anything into an inbox: what its sender has
not signed for the round is no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
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
from inspector.dispute.prover import Prover
from inspector.inspection.trust import Trust, signer_of
from inspector.registry.keyfiles import load_private, load_public, write_keys
from inspector.rounds.forms import check_form
from monitor.files import locked, remove, write_whole
from monitor.transcript.layout import MANIFEST

__all__ = [
    "CLUSTER",
    "INSPECTORATE",
    "KINDS",
    "Labs",
    "Message",
    "World",
    "file_name",
    "open_message",
    "receivers",
    "sealed",
    "time_text",
]

INSPECTORATE, CLUSTER = "inspectorate", "cluster"
KINDS = ("announcement", "heads", "draw", "answers", "order", "openings", "results", "receipts")
"""What a round's messages are, in their order, and receipts for them; the verdict is a bundle."""
_TO_ALL = ("announcement", "draw", "order")
"""What the inspectorate sends to all: it is as long as there are labs, and is looked up for each message of theirs."""
_PREDICATE = "https://chipwitness.org/round/{}/v1"
_PAYLOAD = "application/vnd.chipwitness.round.{}.v1+json"
_NAME = re.compile(r"(?P<round>[0-9]{4})-[0-9]-(?P<kind>[a-z]+)\.(?P<digest>[0-9a-f]{64})\.json", re.ASCII)
_SHOWN = 20
"""So many files of each inbox are named that are no messages; the others are counted."""
_NO_NONCE = bytes(32)
"""Chips of a world answer live challenges alone: no nonce is agreed beforehand."""


def receivers(kind: str, labs: Sequence[str]) -> list[str]:
    """Who gets a round's message of a kind, of which these are the labs."""
    if kind in ("announcement", "draw", "order"):
        return [INSPECTORATE, CLUSTER, *labs]
    return [INSPECTORATE, CLUSTER] if kind == "openings" else [INSPECTORATE]


def file_name(number: int, kind: str, digest: str) -> str:
    """Name of the file of a message in a round, with the SHA-256 of its envelope in hex."""
    return f"{number:04d}-{KINDS.index(kind)}-{kind}.{digest}.json"


def time_text(time: datetime) -> str:
    """A time as messages state it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose signature was verified.

    Attributes:
        name: of its file.
        about: SHA-256 of the round's announcement; of an announcement itself, of the secret.
        signed: SHA-256 of what was signed: another signature over it makes no other message.
        envelope: its bytes.
    """

    name: str
    about: bytes
    predicate: Mapping[str, Any]
    signed: bytes
    envelope: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the envelope."""
        return hashlib.sha256(self.envelope).digest()


class Laboratory(Protocol):
    """A lab's private side, as rounds need it."""

    @property
    def key(self) -> SigningKey:
        """With which the lab signs."""

    def ask(self, chip: str, nonce: bytes, verifier: str) -> Mapping[str, bytes]:
        """The files with which a chip answers a verifier's challenge; EvidenceError if it does not."""

    def still(self, run: Path, copy: Path) -> Path:
        """The run, or of one that goes on a copy, which does not change."""

    def prover(self, run: Path) -> Prover:
        """Who answers a referee for a run."""


Labs = Callable[[Sequence[Path]], Laboratory]


class World:
    """The folders of all parties, or of one party on its own machine.

    There it holds what is that party's, the inspectorate's public key and the registry. The other parties' inboxes and
    openings hold what this one has for them: a carrier (``courier``) brings it to their machines.

    Args:
        labs: gives the private side of the lab whose runs lie there; None in a process that plays no lab.
        own: the party whose folder it is; None where all are in it.
        registry: the trust file, if it lies elsewhere.

    Raises:
        CallerError: there is no such world.
    """

    def __init__(
        self, folder: Path, labs: Labs | None = None, *, own: str | None = None, registry: Path | None = None
    ) -> None:
        self.folder, self._labs, self.own = folder, labs, own
        self.registry = registry or folder / "registry" / "trust.json"
        self._read: tuple[object, Trust] | None = None
        if not (folder / INSPECTORATE / ("key" if own in (None, INSPECTORATE) else "key.pub")).is_file():
            raise CallerError(f"there is no world {folder}; `world init` makes one")
        if own is not None and not self.inbox(own).is_dir():
            raise CallerError(f"{folder} holds no folder of {own}; `world split` makes one")

    @classmethod
    def create(cls, folder: Path, labs: Labs | None = None) -> World:
        """Make inspectorate and cluster, with fresh keys; CallerError if the folder is not empty."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CallerError(f"{folder} is not empty; choose another folder")
        for party in (INSPECTORATE, CLUSTER):
            (folder / party / "inbox" / INSPECTORATE).mkdir(parents=True)
            write_keys(folder / party / "key", SigningKey.generate())
        mine = [f"{INSPECTORATE}/{place}" for place in ("secrets", "verdicts", "rules", "openings")]
        for place in ("registry", "labs", f"{CLUSTER}/openings", *mine):
            (folder / place).mkdir()
        return cls(folder, labs)

    def key(self, party: str) -> SigningKey:
        """The private key of inspectorate or cluster, which only that party may use."""
        return load_private(self.folder / party / "key")

    def public(self, party: str) -> VerifyingKey:
        """Anyone's view of that key; the cluster's is in the registry, once a lab has joined."""
        if party == CLUSTER and self.registry.is_file():
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
        path = self.registry
        for lab in found.labs:
            self._lab(lab)
        with locked(path):
            merged = self._known(found).merge(found) if path.exists() else found
            write_whole(path, json.dumps(merged.to_json(), indent=1).encode() + b"\n")
        signed = {name: _signed(run, found) for name, run in runs.items()}
        for lab in found.labs:
            (self._lab(lab) / "inbox" / INSPECTORATE).mkdir(parents=True, exist_ok=True)
            known = self.runs(lab)
            for name, run in runs.items():
                signer, run_id = signed[name]
                other = _signed(Path(known[name]), found)[1] if name in known else ""
                place = f"{name}-{run_id[:8]}" if other and run_id and other != run_id else name
                known |= {place: str(run.absolute())} if signer in ("", lab) else {}
            write_whole(self._lab(lab) / "runs.json", canonical.encode(known))
        return sorted(found.labs)

    def _known(self, found: Trust) -> Trust:
        """What the registry has said so far; of a newer view of all its labs, what else that does not say anew."""
        known = self.trust()
        if known.registry is None or found.registry is None or not set(known.labs) <= set(found.labs):
            return known
        old, new = known.registry.publication, found.registry.publication
        if known.registry.key != found.registry.key or old.registry != new.registry or old.size >= new.size:
            return known
        if self.round and not (self.folder / INSPECTORATE / "verdicts" / f"{self.round:04d}.json").exists():
            raise CallerError(
                f"round {self.round} is based on the registry's view of size {old.size}: decide that round first"
            )
        return replace(known, chips={}, rates={}, registry=found.registry)

    def trust(self) -> Trust:
        """What the registry says; CallerError if no lab has joined."""
        if not self.registry.is_file():
            raise CallerError(f"no lab has joined {self.folder}")
        found = self.registry.stat()
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._read is None or self._read[0] != version:
            self._read = version, Trust.load([self.registry])
        return self._read[1]

    def deposits(self) -> list[Path]:
        """Where the registry keeps what chips had signed that have changed hands; nothing where it keeps none."""
        path = self.registry.with_name("deposits")
        return [path] if path.is_dir() else []

    def runs(self, lab: str) -> dict[str, str]:
        """Where a lab's runs lie, by name, as only it knows."""
        path = self._lab(lab) / "runs.json"
        if not path.is_file():
            return {}
        return dict(canonical.decode(path.read_bytes(), most=limits.METADATA_BYTES))

    def side(self, lab: str) -> Laboratory:
        """A lab's private side; CallerError for one that has no folder to act from."""
        runs = [Path(run) for run in self.runs(lab).values()]
        if not runs or self._labs is None:
            raise CallerError(f"{lab} has no folder in this world, so this command cannot act for it")
        return self._labs(runs)

    @property
    def round(self) -> int:
        """Number of the newest round, as far as a party on its own machine has an announcement; 0 before it."""
        if self.own in (None, INSPECTORATE):
            return sum(path.name.isdigit() for path in (self.folder / INSPECTORATE / "secrets").iterdir())
        names = map(_NAME.fullmatch, _names(self.inbox(self.own) / INSPECTORATE))
        return max((int(each["round"]) for each in names if each and each["kind"] == KINDS[0]), default=0)

    def _lab(self, lab: str) -> Path:
        limits.check_lab(lab)
        if lab in (INSPECTORATE, CLUSTER):
            raise CallerError(f"in every world {lab} is the name of a party that is not a lab; choose another --lab")
        return self.folder / "labs" / lab

    def home(self, party: str) -> Path:
        """A party's folder."""
        return self.folder / party if party in (INSPECTORATE, CLUSTER) else self._lab(party)

    def inbox(self, party: str) -> Path:
        """Where a party's messages lie."""
        return self.home(party) / "inbox"

    def send(
        self, kind: str, sender: str, to: list[str], predicate: Mapping[str, Any], about: bytes, key: SigningKey
    ) -> bytes:
        """Sign a message of the newest round and bring it to each of the parties; returns the envelope.

        Its sender keeps it, so that after a crash the same one is brought to whom it has not reached yet.

        Raises:
            CallerError: a message of that kind has been sent already.
        """
        envelope = sealed(kind, about, predicate, key)
        sent = self.home(sender) / "sent"
        with locked(sent):
            kept = self.sent(sender, kind, key.verifying)
            if kept is not None and all(self._place(party, kind, sender, kept.envelope).is_file() for party in to):
                raise CallerError(f"{sender} has already sent {kind} of round {self.round}")
            envelope = envelope if kept is None else kept.envelope
            sent.mkdir(exist_ok=True)
            write_whole(sent / self._place(sender, kind, sender, envelope).name, envelope)
            for party in to:
                # a lab that spoils its own inbox gets nothing, and hinders no one
                with suppress(*((OSError,) if party != INSPECTORATE and sender == INSPECTORATE else ())):
                    self.post(party, kind, sender, envelope)
        return envelope

    def send_again(self, sender: str, key: VerifyingKey) -> None:
        """Bring what a party has sent in the newest round to whom it has not reached, as where the party stopped."""
        announced = self.announcement(sender) or self.sent(sender, KINDS[0], key)
        labs = [] if announced is None else announced.predicate["labs"]
        for kind in KINDS[:-1]:
            kept = self.sent(sender, kind, key)
            for party in receivers(kind, labs):
                if kept is not None and not self._place(party, kind, sender, kept.envelope).is_file():
                    self.post(party, kind, sender, kept.envelope)

    def post(self, party: str, kind: str, sender: str, envelope: bytes, *, number: int | None = None) -> None:
        """Bring a message of a round (the newest) to a party.

        What others have put in its place is no message, and makes room.
        """
        path = self._place(party, kind, sender, envelope, number=number)
        if path.parent.is_symlink() or not path.parent.is_dir():
            remove(path.parent)
        path.parent.mkdir(parents=self.own is not None, exist_ok=True)
        if path.is_symlink() or not path.is_file():
            remove(path)
        write_whole(path, envelope)

    def _place(self, party: str, kind: str, sender: str, envelope: bytes, *, number: int | None = None) -> Path:
        digest = hashlib.sha256(envelope).hexdigest()
        return self.inbox(party) / sender / file_name(number or self.round, kind, digest)

    def sent(self, sender: str, kind: str, key: VerifyingKey, *, number: int | None = None) -> Message | None:
        """What a party has sent of a kind in a round (the newest), as it keeps it; None if nothing."""
        return next(
            (each for _, each in _messages(self.home(sender) / "sent", key, number or self.round, {kind})), None
        )

    def posted(
        self,
        party: str,
        sender: str,
        key: VerifyingKey,
        kinds: Collection[str],
        *,
        known: Collection[str] = (),
        announced: Message | None = None,
    ) -> Iterator[tuple[str, Message]]:
        """Kind and content of what lies in a party's inbox that the sender has signed for the newest round.

        Args:
            known: digests, in hex, of messages that are left out, unread.
            announced: the round's announcement, where it has been read.
        """
        announced = announced or self.announcement(party)
        for kind, found in _messages(self.inbox(party) / sender, key, self.round, kinds, known):
            if announced is not None and found.about == announced.digest:
                yield kind, found

    def announcement(self, party: str) -> Message | None:
        """The announcement of the newest round, as a party has it; None if it has none."""
        key = self.public(INSPECTORATE)
        found = _messages(self.inbox(party) / INSPECTORATE, key, self.round, {KINDS[0]})
        return next((each for _, each in found if each.predicate["round"] == self.round), None)

    def read(self, party: str, kind: str, sender: str, key: VerifyingKey) -> Message | None:
        """A message of the newest round in a party's inbox; None if none came, or none that the sender signed."""
        if kind == KINDS[0]:
            return self.announcement(party)
        return next((found for _, found in self.posted(party, sender, key, {kind})), None)

    def timeline(self) -> list[tuple[int, str, str, str, list[str]]]:
        """All signed messages as round, time of their receipts, kind, sender and receivers, in their order.

        What else lies in an inbox comes last, as of kind "ignored" with its name in place of a sender's.
        """
        found: dict[tuple[int, int, str, str, str], set[str]] = {}
        keys = {party: self.public(party) for party in (INSPECTORATE, CLUSTER)}
        keys |= self.trust().labs if self.registry.is_file() else {}
        ignored: list[tuple[int, str, str, str, list[str]]] = []
        noted: dict[str, str] = {}
        entries: list[tuple[int, int, str, str, str, str]] = []
        for party in [INSPECTORATE, CLUSTER, *sorted(set(keys) - {INSPECTORATE, CLUSTER})]:
            strange = sorted(set(_names(self.inbox(party))) - set(keys))
            for sender, key in keys.items():
                folder = self.inbox(party) / sender
                mine = dict.fromkeys(_names(folder))
                for kind, message in _messages(folder, key, None, KINDS):
                    name = message.name
                    mine.pop(name)
                    if kind == KINDS[-1]:
                        noted |= {each["message"]: each["time"] for each in message.predicate["receipts"]}
                    else:
                        digest = message.digest.hex()
                        noted |= {digest: message.predicate["time"]} if "time" in message.predicate else {}
                        entries.append((int(name[:4]), KINDS.index(kind), kind, sender, digest, party))
                strange += [f"{sender}/{name}" for name in mine]
            shown = [(0, "", "ignored", f"{name!a:.200}", [party]) for name in strange[:_SHOWN]]
            more = len(strange) - _SHOWN
            ignored += [*shown, *([(0, "", "ignored", f"and {more} more", [party])] if more > 0 else [])]
        for number, place, kind, sender, digest, party in entries:
            found.setdefault((number, place, noted.get(digest, ""), kind, sender), set()).add(party)
        order = [INSPECTORATE, CLUSTER, *sorted(keys)]
        rows = sorted(found.items(), key=lambda each: each[0])
        return [
            *(
                (number, time, kind, sender, sorted(to, key=order.index))
                for (number, _, time, kind, sender), to in rows
            ),
            *ignored,
        ]


def _names(folder: Path) -> list[str]:
    """Names in a folder of an inbox, in order; none where something else is in its place."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(os.listdir(folder))


def _messages(
    folder: Path, key: VerifyingKey, number: int | None, kinds: Collection[str], known: Collection[str] = ()
) -> Iterator[tuple[str, Message]]:
    """Kind and content of what lies in a folder, under names of a round (any), and is signed by a key."""
    for name in _names(folder):
        match = _NAME.fullmatch(name)
        if match is None or match["kind"] not in kinds or match["digest"] in known:
            continue
        if number is None or int(match["round"]) == number:
            kind = match["kind"]
            content = _content(folder / name)
            if content is not None and hashlib.sha256(content).hexdigest() == match["digest"]:
                message = (_opened_once if kind in _TO_ALL else open_message)(name, content, kind, key)
                if message is not None:
                    yield kind, message


def _content(path: Path) -> bytes | None:
    """Bytes of a file; None of what is no plain file, is too long, has a hole (as no JSON has) or cannot be read."""
    most = limits.BUNDLE_BYTES.most
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most or not size or os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
                return None
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            return file.read(size)
    except OSError:
        return None


def open_message(name: str, envelope: bytes, kind: str, key: VerifyingKey) -> Message | None:
    """A message; None of what the key's owner did not sign in this form."""
    try:
        payload = open_sealed(envelope, _PAYLOAD.format(kind), key, most=limits.BUNDLE_BYTES)
        [(_, about)], predicate = open_statement(payload, _PREDICATE.format(kind))
        check_form(kind, predicate)
    except (EvidenceError, LookupError, TypeError, ValueError):
        return None
    signed = hashlib.sha256(canonical.encode(payload)).digest()
    return Message(name=name, about=about.value, predicate=predicate, signed=signed, envelope=envelope)


_opened_once = lru_cache(4)(open_message)


def sealed(kind: str, about: bytes, predicate: Mapping[str, Any], key: SigningKey) -> bytes:
    """The envelope of a message."""
    subject = [("secret" if kind == KINDS[0] else "announcement", Digest(SHA256, about))]
    return seal(_PAYLOAD.format(kind), statement(_PREDICATE.format(kind), subject, predicate), key)


def _signed(run: Path, trust: Trust) -> tuple[str, str]:
    """The lab that has signed a run, and the run's id; two empty texts where none of these labs has."""
    try:
        lab, head = signer_of(limits.read_file(run / MANIFEST, limits.MANIFEST_BYTES), trust)
    except (OSError, EvidenceError):
        return "", ""
    return lab, head.run
