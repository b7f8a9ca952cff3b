"""Brings a party's messages to the machines of the others, and fetches the runs that labs open to it.

What one party does not take or give delays no other: each has its own task, which tries again until the deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError, Unreadable
from firmware_sim.evidence import SigningKey
from firmware_sim.limits import MANIFEST_BYTES
from inspector.inspection.disclosure import thin_paths
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import signer_of
from inspector.rounds.budget import Budget, OverBudget, Spending, clear, forget, note
from inspector.rounds.door import HEADER, VALID
from inspector.rounds.exchange import asked_in, openings
from inspector.rounds.mail import Held, key_of
from inspector.rounds.receipts import noted
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from inspector.wire.arrival import Arrival
from inspector.wire.client import BUSY, UNREACHABLE, Link, Unproven
from inspector.wire.messages import Pass, Silence
from inspector.wire.server import SECONDS
from inspector.wire.telemetry import Telemetry
from monitor.files import remove, write_whole
from monitor.transcript import RunFolder
from monitor.transcript.export import Export
from monitor.transcript.journal import Journal
from monitor.transcript.layout import CREATION, JOURNAL, MANIFEST, METADATA
from monitor.transcript.manifest import Entry, Manifest

__all__ = ["Courier"]

_AGAIN, _LONGEST, _IDLE = 0.2, 5.0, 2.0
"""Seconds before the first and between later tries; and after which new messages are looked for."""
_LATER = (UNREACHABLE, BUSY, 408, 409)
"""What a party answers that may take the same later."""
_AT_ONCE = 8
"""Files of a run that are fetched at a time."""
_TRIES = 3
"""Tries after which a file that comes with another digest is taken as one that its lab does not have."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A run that a lab opens: the SHA-256 of its head, its folder's name, what of it is wanted.

    Attributes:
        manifest: the head, where it is known.
        listed: length and digest of each file, as its lab signed that it hands it over; empty if it signed none.
        all_programs: whether they have to be here before it can be said what else is wanted.
    """

    head: str
    name: str
    paths: Callable[[RunFolder], Collection[str]]
    manifest: bytes = b""
    listed: Mapping[str, Entry] = field(default_factory=dict)
    all_programs: bool = False


class Courier:
    """Carries for one party.

    Args:
        key: with which it signs.
        peers: the addresses of the others, by name.
        budget: of each lab that opens runs to it.
    """

    def __init__(
        self,
        world: World,
        party: str,
        key: SigningKey,
        peers: Mapping[str, str],
        telemetry: Telemetry,
        budget: Budget,
    ) -> None:
        self._budget = budget
        self._world, self._party, self._key, self._peers, self._telemetry = world, party, key, peers, telemetry
        self._wakes = {name: asyncio.Event() for name in peers}

    def wake(self) -> None:
        """There may be something new to bring."""
        for each in self._wakes.values():
            each.set()

    async def deliver(self, to: str) -> None:
        """Bring a party what lies here for it of the newest round, in order, until this task ends."""
        brought: set[str] = set()
        pause = _AGAIN
        async with self._link(to) as link:
            while True:
                self._wakes[to].clear()
                letters = sorted(
                    each for each in await asyncio.to_thread(self._letters, to) if each.name not in brought
                )
                for letter in letters:
                    if await self._brought(link, to, letter):
                        brought.add(letter.name)
                        pause = _AGAIN
                    else:
                        pause = min(2 * pause, _LONGEST)
                        break
                else:
                    pause = _IDLE
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):  # ``wait_for`` loses a cancellation that meets the event
                        await self._wakes[to].wait()
                pause = _AGAIN if pause == _IDLE else pause

    def _link(self, to: str) -> Link:
        return Link(self._peers[to], key_of(self._world, to), seconds=SECONDS)

    def _letters(self, to: str) -> list[Path]:
        return list((self._world.inbox(to) / self._party).glob(f"{self._world.round:04d}-*.json"))

    async def _brought(self, link: Link, to: str, letter: Path) -> bool:
        """Bring a message; False where it has to be tried again."""
        content = await asyncio.to_thread(letter.read_bytes)
        kind = letter.name.split(".")[0].rpartition("-")[2]
        pass_ = self._pass(to, what=kind, sha256=hashlib.sha256(content).hexdigest(), length=len(content))
        try:
            status = await link.ask("/messages", content=content, headers=pass_, feed=lambda _: True)
        except Silence as error:
            self._telemetry.log("odd answer", party=to, why=str(error))
            status = UNREACHABLE
        self._telemetry.count("deliveries", str(status))
        if status not in (200, *_LATER):
            self._telemetry.log("not taken", to=to, kind=kind, status=status)
        return status not in _LATER

    def _pass(self, to: str, **fields: str | int) -> dict[str, str]:
        found = Pass(to=key_of(self._world, to).key_id, until=int(time.time()) + VALID, **fields)  # type: ignore[arg-type]
        return {HEADER: found.header(self._party, self._key)}

    async def fetch(self, held: Held) -> bool:
        """Fetch the runs that a message opens, each whole or as far as its lab has it; False where it is too early.

        A run that goes beyond the lab's budget does not come. That is logged and noted (``budget``), and is no lab's
        blame.
        """
        runs = await asyncio.to_thread(self._opened, held)
        if runs is None:
            return False
        incoming = self._world.home(self._party) / "incoming"
        incoming.mkdir(exist_ok=True)
        await asyncio.to_thread(clear, incoming, self._world.round)
        spending = await asyncio.to_thread(self._budget.spending, self._world, self._party, held.sender)
        async with self._link(held.sender) as link:
            for run in runs:
                draft = incoming / f"{self._world.round:04d}-{run.head}"
                draft.mkdir(parents=True, exist_ok=True)
                with suppress(CallerError, EvidenceError, Unreadable):  # what came is judged where runs are judged
                    try:
                        await self._fetch_run(link, held.sender, run, draft, spending)
                        await asyncio.to_thread(forget, self._world, self._party, run.head)
                    except OverBudget as error:
                        self._telemetry.count("over_budget")
                        self._telemetry.log("over budget", lab=held.sender, run=run.name, why=str(error))
                        await asyncio.to_thread(note, self._world, self._party, run.head, str(error))
                        if self._party == CLUSTER:  # which says nothing about a run that it does not have
                            remove(draft)
                            continue
                for part in draft.rglob("*.part"):
                    part.unlink()
                target = openings(self._world, self._party) / run.name
                remove(target)
                draft.rename(target)
        return True

    def _opened(self, held: Held) -> list[_Opened] | None:
        """The runs that a message opens to this party; None where it is not known yet what was asked for."""
        lab, trust = held.sender, self._world.trust()
        if self._party == INSPECTORATE:
            handed = noted(self._world, INSPECTORATE, "heads", lab)
            found = []
            texts = [] if handed is None else dict.fromkeys(handed.predicate["heads"])
            names = [] if handed is None else handed.predicate.get("names", [])
            for place, text in enumerate(texts):
                with suppress(EvidenceError, UnicodeEncodeError):
                    head = text.encode()
                    signer, manifest = signer_of(head, trust)
                    name = names[place] if place < len(names) and _NAME.fullmatch(names[place]) else manifest.run[:16]
                    digest = hashlib.sha256(head).hexdigest()
                    if signer == lab:
                        found.append(_Opened(head=digest, name=f"{lab}.{name}", paths=thin_paths, manifest=head))
            return found
        try:
            asked = asked_in(self._world, CLUSTER, lab=lab)
        except CallerError:
            return None
        listed: dict[str, Mapping[str, Entry]] = {}
        for each in held.message.predicate["runs"]:
            listed[each["head"]] = {}
            with suppress(EvidenceError, UnicodeEncodeError):
                listed[each["head"]] = Export.open(each["listed"].encode(), {lab: trust.labs[lab]}).files
        return [
            _Opened(head=each.head, name=name, paths=each.paths, listed=listed[each.head], all_programs=True)
            for name, each in asked.items()
            if _NAME.fullmatch(name) and each.head in listed
        ]

    async def _fetch_run(self, link: Link, lab: str, run: _Opened, draft: Path, spending: Spending) -> None:
        """Fetch a run into a folder: what says which files it has, and then those that are wanted."""
        key, trust = self._world.trust().labs[lab], self._world.trust()

        async def get(path: str, entry: Entry) -> None:
            spending.take(draft / path, entry.length)
            said = run.listed.get(path, entry)
            await self._get(link, lab, run.head, path, said if said.length <= entry.length else entry, draft)

        if run.manifest:
            write_whole(draft / MANIFEST, run.manifest)
        else:
            entry = run.listed.get(MANIFEST, Entry(0, ""))
            await get(MANIFEST, Entry(MANIFEST_BYTES.check(entry.length), run.head))
        manifest = Manifest.open((draft / MANIFEST).read_bytes(), key)
        await get(JOURNAL, Entry(manifest.journal.bytes, manifest.journal.sha256))
        created = await asyncio.to_thread(lambda: Journal(draft, manifest).record(CREATION))
        await get(METADATA, created.files[METADATA])
        opened = await asyncio.to_thread(lambda: open_run(draft, trust, opened=()))
        gate = asyncio.Semaphore(_AT_ONCE)

        async def get_all(paths: Collection[str]) -> None:
            async def one(path: str, entry: Entry) -> None:
                async with gate:
                    await get(path, entry)

            entries = {path: opened.files[path] for path in sorted(paths) if path not in (MANIFEST, JOURNAL)}
            for path, entry in entries.items():
                spending.take(draft / path, entry.length)
            async with asyncio.TaskGroup() as group:
                for path, entry in entries.items():
                    group.create_task(one(path, entry))

        if run.all_programs:
            programs = opened.programs()
            await get_all({*programs.values(), *opened.constants(programs).values()})
        await get_all(await asyncio.to_thread(run.paths, opened))

    async def _get(self, link: Link, lab: str, head: str, path: str, entry: Entry, draft: Path) -> None:
        """Fetch a file, from where an earlier try broke off; nothing where the lab does not have it."""
        pause, wrong = _AGAIN, 0
        while entry.length and not (draft / path).is_file() and wrong < _TRIES:
            arrival = Arrival(draft / path, entry.length, entry.sha256)
            what = {"sha256": entry.sha256, "run": head, "path": path}
            pass_ = self._pass(lab, what="file", length=entry.length, start=arrival.received, **what)
            try:
                status = await link.ask("/files", headers=pass_, feed=arrival.feed)
                if arrival.finish():
                    self._telemetry.count("files_received")
                    self._telemetry.count("bytes_received", by=entry.length)
                    return
            except Unproven as error:  # which is no word of the lab
                status = UNREACHABLE
                self._telemetry.log("odd answer", party=lab, why=str(error))
            except EvidenceError as error:  # silence among them
                wrong, status = wrong + 1, UNREACHABLE
                self._telemetry.log("wrong bytes", lab=lab, path=path, why=str(error))
            finally:
                arrival.close()
            if status not in (200, *_LATER):
                self._telemetry.log("not given", lab=lab, path=path, status=status)
                return
            self._telemetry.count("transfers_resumed")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)
