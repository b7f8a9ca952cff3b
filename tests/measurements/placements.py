"""``placements``: random files in real rounds: whatever one party puts anywhere makes nobody else's verdict worse.

Three labs, one of which has lied, and a cluster play rounds. In each, one of the labs, or somebody without a key, puts
honest, junk, forged, replayed, truncated, late and equivocal messages and files into inboxes and openings, between any
two steps. What no other party may notice, and what may gain its own lab nothing, is checked after each round.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from firmware_sim.errors import ChipwitnessError
from firmware_sim.evidence import SigningKey
from inspector.inspection.guards import Settings
from inspector.inspection.replays import Worker
from inspector.replay.pool import DevicePool
from inspector.rounds import steps
from inspector.rounds.exchange import openings
from inspector.rounds.receipts import take
from inspector.rounds.world import CLUSTER, INSPECTORATE, KINDS, World, sealed
from monitor.files import remove
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import MANIFEST
from tests.conftest import STARTED, Recorded, record_run

__all__ = ["Case", "honest_world", "measure", "play", "run", "verdict", "write"]

LABS = ("lab-a", "lab-b", "liar")
LIAR = "liar"
OUTSIDER = "outsider"
SETTINGS = Settings(samples=3, seed=None, devices=("sse41",))
_SMALL: Mapping[str, Any] = {
    "steps": 2, "chips": 1, "checkpoint_every": 1, "batch_size": 4, "rate": Fraction(1)
}  # fmt: skip
_MINUTE, _DAY = timedelta(minutes=1), timedelta(days=1)
_NUMBERED = ("heads", "answers", "openings")


def honest_world(folder: Path, worker: Worker) -> tuple[World, dict[str, Recorded]]:
    """A world in which three labs have played one round, each honestly but for the liar's run."""
    recorded = {
        lab: record_run(folder / "runs" / lab, lab=lab, seed=5 + number, lie="wrong-operator" if lab == LIAR else None,
                        lie_step=2, **_SMALL)
        for number, lab in enumerate(LABS)
    }  # fmt: skip
    world = World.create(folder / "world", LabSide)
    for lab, each in recorded.items():
        world.join(each.trust, {lab: each.run})
    case = Case(world, recorded, random.Random(0), OUTSIDER, placements=0)
    found = play(case, worker)
    assert found.outcomes == {"lab-a": "ACCEPT", "lab-b": "ACCEPT", LIAR: "REJECT"}, found.reasons
    return world, recorded


@dataclass
class Case:
    """A round in which one party misbehaves.

    Attributes:
        party: a lab, or the outsider.
        placements: about how many files it puts somewhere.
    """

    world: World
    recorded: Mapping[str, Recorded]
    chance: random.Random
    party: str
    placements: int
    put: Counter[str] = field(default_factory=Counter)

    def key(self, lab: str) -> SigningKey:
        """A lab's key; a fresh one of the outsider's."""
        if lab == OUTSIDER:
            return SigningKey.generate(self.chance.randbytes(32))
        return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(self.recorded[lab].run)))


@dataclass
class Found:
    """What came of a case.

    Attributes:
        failed: what no party may end in, by who ended in it.
        seconds: processor time of each step.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def play(case: Case, worker: Worker) -> Found:
    """Play a round, with placements between its steps."""
    world, chance, found = case.world, case.chance, Found()
    now = STARTED + _MINUTE
    moments = 9
    counts = [0] * moments
    for _ in range(case.placements):
        counts[chance.randrange(moments)] += 1

    def act(who: str, name: str, step: Callable[[], object], moment: int | None = None) -> None:
        if moment is not None:
            for _ in range(counts[moment]):
                place(case)
        began = time.process_time()
        try:
            step()
        except Exception as error:  # what a party's command ends in is what is looked for
            if who != case.party or not isinstance(error, ChipwitnessError):
                found.failed.append(
                    f"{who} {name}: {error!r:.300} {''.join(traceback.format_tb(error.__traceback__)[-2:])}"
                )
        found.seconds[name] = max(found.seconds.get(name, 0.0), time.process_time() - began)

    def silent(name: str) -> bool:
        return case.placements > 0 and chance.random() < 0.15 and name == case.party

    def claimed() -> datetime:
        return now + chance.choice((timedelta(0), -_MINUTE / 2, 20 * _DAY)) if case.placements else now

    late: list[tuple[str, Callable[[], object]]] = []

    def labs(name: str, step: Any) -> bool:
        """Let all labs act in any order; tell whether one did not."""
        missing = False
        for lab in chance.sample(LABS, len(LABS)):
            when = claimed() if lab == case.party else now

            def mine(lab: str = lab, when: datetime = when) -> object:
                return step(world, lab, now=when)

            if silent(lab):
                late.append((name, mine))
                missing = True
            else:
                act(lab, name, mine)
        return missing

    def waited(kind: str) -> datetime:
        return steps.past(world, kind, now)

    act(
        INSPECTORATE,
        "announce",
        lambda: steps.announce(world, SETTINGS, minutes=10, refusals=0, now=now),
        0,
    )
    turns: tuple[tuple[str, Any, str, str, Any], ...] = (
        ("heads", steps.hand, INSPECTORATE, "reveal", steps.reveal),
        ("answers", steps.answer, INSPECTORATE, "order", steps.order),
        ("openings", steps.disclose, CLUSTER, "replay", partial(steps.replay, worker=worker)),
    )
    for moment, (kind, step, who, acts, judge) in enumerate(turns):
        for _ in range(counts[2 * moment + 1]):
            place(case)
        labs(kind, step)
        now = waited(kind)
        act(who, acts, partial(judge, world, now=now), 2 * moment + 2)
        for name, step_late in late:
            act(case.party, name, step_late)
        late.clear()
    for _ in range(counts[7]):
        place(case)
    if chance.random() < 0.3:
        act(INSPECTORATE, "take", lambda: take(world, INSPECTORATE, now))
    decided: list[steps.Decided] = []
    act(INSPECTORATE, "decide", lambda: decided.append(steps.decide(world, now=now)), 8)
    act(OUTSIDER if case.party != OUTSIDER else "anybody", "show", world.timeline)
    for each in decided:
        found.outcomes = dict(each.verdict.evidence["labs"])
        found.reasons = [reason.text for reason in each.verdict.reasons]
        found.failed += [] if each.bundle.is_file() else ["no bundle was signed"]
    return found


def place(case: Case) -> None:
    """Put one thing somewhere."""
    kind = case.chance.choice(tuple(_PLACEMENTS))
    if case.party == OUTSIDER and kind in ("equivocal", "posted again", "spoilt"):
        kind = "junk"
    try:
        _PLACEMENTS[kind](case)
    except (OSError, ChipwitnessError, IndexError):
        kind = "could not"
    case.put[kind] += 1


def _folder(case: Case) -> Path:
    """A folder of an inbox, or an inbox itself."""
    party = case.chance.choice((INSPECTORATE, INSPECTORATE, CLUSTER, *LABS))
    inbox = case.world.inbox(party)
    if case.chance.random() < 0.2:
        return inbox
    folder = inbox / case.chance.choice((INSPECTORATE, CLUSTER, *LABS))
    folder.mkdir(exist_ok=True)
    return folder


def _name(case: Case) -> str:
    kind = case.chance.choice(KINDS)
    number = case.chance.choice((case.world.round, case.world.round, 1, 9999))
    return f"{number:04d}-{KINDS.index(kind)}-{kind}.{case.chance.randbytes(32).hex()}.json"


def _junk(case: Case) -> None:
    path = _folder(case) / _name(case)
    content = case.chance.choice((b"", b"[]", b"junk", b"{}", case.chance.randbytes(100), b"[" * 5000))
    path.write_bytes(content)


def _no_file(case: Case) -> None:
    path = _folder(case) / case.chance.choice((_name(case), *LABS, CLUSTER, INSPECTORATE, os.fsdecode(b"\xff.json")))
    if path.exists() or path.is_symlink():
        path = path.with_name(_name(case))
    what = case.chance.randrange(5)
    if what == 0:
        os.mkfifo(path)
    elif what == 1:
        path.mkdir()
    elif what == 2:
        path.symlink_to(case.chance.choice(("/dev/zero", "/nowhere", ".", str(path))))
    elif what == 3:
        with path.open("xb") as file:
            file.truncate(1 << 33)
    else:
        path.touch(exist_ok=False)


def _any_message(case: Case) -> Path:
    """Some message that lies anywhere, of any round."""
    every = sorted(
        path for path in case.world.folder.glob("**/inbox/*/*.json") if path.is_file() and not path.is_symlink()
    )
    return case.chance.choice([path for path in every if 2 < path.stat().st_size < 1 << 20])


def _renamed(case: Case, path: Path) -> str:
    """Its name, or one in which it claims another round or kind."""
    kind = case.chance.choice(KINDS)
    other = f"{case.world.round:04d}-{KINDS.index(kind)}-{kind}.{path.name.partition('.')[2]}"
    return case.chance.choice((path.name, other))


def _replayed(case: Case) -> None:
    path = _any_message(case)
    target = _folder(case) / _renamed(case, path)
    if not target.exists():
        shutil.copyfile(path, target)


def _truncated(case: Case) -> None:
    path = _any_message(case)
    content = bytearray(path.read_bytes())
    if case.chance.random() < 0.5:
        del content[case.chance.randrange(len(content)) :]
    else:
        content[case.chance.randrange(len(content))] ^= 1 << case.chance.randrange(8)
    target = _folder(case) / _renamed(case, path)
    if not target.exists():
        target.write_bytes(content)


def _said(case: Case, kind: str) -> dict[str, Any]:
    """Something of a message's form."""
    chance, digest = case.chance, case.chance.randbytes(32).hex()
    heads = [(case.recorded[lab].run / MANIFEST).read_text() for lab in chance.sample(LABS, chance.randrange(4))]
    chips = sorted(case.world.trust().chips)
    forms: dict[str, dict[str, Any]] = {
        "heads": {"heads": chance.choice(([], heads, ["junk"], [*heads, "\ud7ff"], heads * 2))},
        "answers": {"chips": {chip: {"log.bin": chance.choice(("", "AAAA", "!"))} for chip in chips}},
        "openings": {
            "runs": [{"head": digest, "segments": chance.choice(([], [0], [-1, 1 << 70])), "files": 0, "bytes": -1}]
        },
        "results": {"results": [], "checks": chance.choice(([], ["junk"])), "refused": chance.choice((0, -5))},
        "announcement": {"round": case.world.round, "labs": []},
        "draw": {"time": "", "secret": "0", "heads": [], "silent": [], "receipts": [], "chips": {}},
        "order": {"time": "", "jobs": [], "open": {}},
        "receipts": {"receipts": []},
    }
    return forms[kind]


def _sign(case: Case, kind: str, sender: str) -> None:
    """Sign a message of that kind with the party's own key, and post it as that sender's."""
    announced = case.world.announcement(INSPECTORATE)
    about = case.chance.randbytes(32) if announced is None or case.chance.random() < 0.2 else announced.digest
    envelope = sealed(kind, about, _said(case, kind), case.key(case.party))
    case.world.post(case.chance.choice((INSPECTORATE, INSPECTORATE, CLUSTER, *LABS)), kind, sender, envelope)


def _forged(case: Case) -> None:
    senders = [each for each in (INSPECTORATE, CLUSTER, *LABS) if each != case.party]
    _sign(case, case.chance.choice(KINDS), case.chance.choice(senders))


def _equivocal(case: Case) -> None:
    if case.chance.random() < 0.1:  # each convicts its party, so that the rest of the case would say little
        _sign(case, case.chance.choice(_NUMBERED), case.party)
    else:
        _forged(case)


def _posted_again(case: Case) -> None:
    path = case.chance.choice(sorted((case.world.home(case.party) / "sent").iterdir()))
    case.world.post(case.chance.choice((INSPECTORATE, CLUSTER, *LABS)), path.name.split("-")[2].partition(".")[0],
                    case.party, path.read_bytes())  # fmt: skip


def _spoilt(case: Case) -> None:
    """A lab puts a file in the place of its own inbox, or of the folder of a sender in it."""
    inbox = case.world.inbox(case.party)
    path = case.chance.choice((inbox, inbox / INSPECTORATE, inbox / INSPECTORATE))
    if case.chance.random() < 0.1:
        remove(path)
        path.write_bytes(b"junk")


def _opened(case: Case) -> None:
    """Something in a folder of openings, which overwrites nothing."""
    party, chance = case.chance.choice((INSPECTORATE, CLUSTER)), case.chance
    place = openings(case.world, party) if case.world.round else case.world.home(party) / "openings"
    own = [f"{lab}.{lab}" for lab in LABS]
    name = chance.choice((*own, "zz", f"{LABS[0]}.x", os.fsdecode(b"lab-a.\xff"), "0001", ".x"))
    path = place / name
    what = chance.randrange(5)
    if what == 0 and not path.exists():
        path.mkdir(exist_ok=True)
        shutil.copy(case.recorded[chance.choice(LABS)].run / MANIFEST, path)
    elif what == 1 and not path.exists():
        shutil.copytree(case.recorded[chance.choice(LABS)].run, path)
    elif what == 2 and not path.exists():
        path.write_bytes(b"junk")
    elif what == 3 and not path.exists():
        os.mkfifo(path)
    elif path.is_dir():
        extra = path / chance.choice(("x", ".DS_Store", "checkpoints", "programs/x", "samples.bin", "log"))
        if not extra.exists():
            extra.parent.mkdir(exist_ok=True)
            chance.choice((lambda: extra.write_bytes(b"junk"), lambda: os.mkfifo(extra), extra.mkdir,
                           lambda: extra.symlink_to("/dev/zero")))()  # fmt: skip


_PLACEMENTS: Mapping[str, Callable[[Case], None]] = {
    "junk": _junk,
    "no plain file": _no_file,
    "replayed": _replayed,
    "truncated or altered": _truncated,
    "forged": _forged,
    "equivocal": _equivocal,
    "posted again": _posted_again,
    "opened": _opened,
    "spoilt": _spoilt,
}


def wrongs(case: Case, found: Found) -> list[str]:
    """What may not have come of a case."""
    wrong = list(found.failed)
    for lab in LABS:
        has = found.outcomes.get(lab, "none")
        if has not in _allowed(lab, case.party):
            wrong.append(f"{case.party} made the verdict on {lab} {has}: {found.reasons}")
    return wrong


def _allowed(lab: str, party: str) -> tuple[str, ...]:
    """The verdicts that a lab may get while a party misbehaves.

    A liar that damages what it opens itself may be left open; it is never accepted. An honest lab that misbehaves may
    get any verdict; the others keep theirs.
    """
    if lab == LIAR:
        return ("REJECT", "INCONCLUSIVE") if party == LIAR else ("REJECT",)
    return ("ACCEPT", "INCONCLUSIVE", "REJECT") if lab == party else ("ACCEPT",)


def measure(
    folder: Path, worker: Worker, *, placements: int, seconds: float, seed: int, each: int = 60
) -> dict[str, Any]:
    """Play cases until so much was put somewhere, or so long has passed; returns what came of them."""
    began = time.monotonic()
    world, recorded = honest_world(folder, worker)
    put: Counter[str] = Counter()
    wrong: list[str] = []
    verdicts: Counter[str] = Counter()
    longest: dict[str, float] = {}
    honest: dict[str, float] = {}
    rounds = 0
    while sum(put.values()) - put["could not"] < placements and time.monotonic() - began < seconds:
        place_ = folder / "case"
        shutil.copytree(world.folder, place_, symlinks=True)
        chance = random.Random(f"{seed}/{rounds}")
        party = (*LABS, OUTSIDER)[rounds % 4]
        count = 0 if rounds < 1 else each
        case = Case(World(place_, LabSide), recorded, chance, party, count)
        found = play(case, worker)
        into = longest if count else honest
        for name, took in found.seconds.items():
            into[name] = max(into.get(name, 0.0), took)
        put.update(case.put)
        verdicts.update(f"{party}: {lab} {outcome}" for lab, outcome in found.outcomes.items())
        wrong += [f"case {rounds}: {text}" for text in wrongs(case, found)]
        shutil.rmtree(place_)
        rounds += 1
    beyond = {name: round(took - honest.get(name, 0.0), 3) for name, took in sorted(longest.items())}
    return {
        "seed": seed,
        "rounds": rounds,
        "placements": sum(put.values()) - put["could not"],
        "put": dict(sorted(put.items())),
        "verdicts": dict(sorted(verdicts.items())),
        "wrong": wrong,
        "processor_seconds_beyond_an_honest_command": beyond,
        "seconds": round(time.monotonic() - began, 1),
    }


def run(
    *,
    placements: int = 10_000,
    most_seconds: float = 600.0,
    seed: int = 0,
    each: int = 60,
    progress: Callable[[int], object] = lambda done: None,
) -> list[dict[str, Any]]:
    """Play cases, in folders that are gone afterwards; one row, as ``measure`` returns it."""
    with tempfile.TemporaryDirectory() as folder, DevicePool() as devices:
        found = measure(Path(folder), devices.run, placements=placements, seconds=most_seconds, seed=seed, each=each)
    progress(1)
    return [{"work": "placements", "mode": "real rounds", "ratio": None, **found}]


def verdict(rows: Sequence[dict[str, Any]]) -> str | None:
    """What may not have come of it, or None."""
    wrong = [text for row in rows for text in row["wrong"]]
    return f"{len(wrong)} are wrong; {wrong[0]}" if wrong else None
