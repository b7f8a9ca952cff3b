"""``machines``: how long many labs take to hand over heads and to open runs in one round, and what memory that needs.

Each lab has its own key, folder and port; its run is a copy of one that was recorded, under its own name and
key. Its chips say nothing: transfers are measured, and not the verdict. The labs share a few processes, inspectorate
and cluster another.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from firmware_sim.errors import DeviceError
from firmware_sim.evidence import SigningKey, canonical
from inspector.inspection.guards import Settings
from inspector.inspection.trust import Trust
from inspector.rounds import steps
from inspector.rounds.parts import split
from inspector.rounds.party import Place, play_party
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor import processes
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.transcript.draft import Draft
from monitor.transcript.layout import METADATA
from monitor.transcript.metadata import Metadata

__all__ = ["SIZES", "run", "table", "verdict", "write"]

Row = dict[str, Any]

SIZES = (50, 100, 200)
SECONDS, MEGABYTES = 60, 1000
"""Targets for 200 labs."""
_HOSTS = 2
_STEPS = 2
_FIRST_PORT = 20_000
_PATIENCE = 600
_NEVER = 10_000.0
"""Minutes between deadlines."""


class _Copied:
    """The private side of a lab whose run is a copy; its chips say nothing."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.key = SigningKey.from_private_bytes((runs[0].parent / "key").read_bytes())

    def ask(self, chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
        """Nothing."""
        return {}

    def still(self, run: Path, copy: Path) -> Path:
        """The run, which is finished."""
        return run

    def prover(self, run: Path) -> Any:
        """None answers here."""
        raise NotImplementedError


def run(*, labs: Sequence[int] | None = None) -> list[Row]:
    """One row for each number of labs."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "run"
        task = Task.for_preset("digits-cnn", seed=1, steps=_STEPS, checkpoint_every=1, shards=1, batch_size=4)
        config = LabConfig(lab="lab", seed=1, chips=1, snapshot_rate=Fraction(1), started=datetime.now(UTC))
        train(task, recorded, config, device="native")
        return [_measured(Path(folder) / str(count), recorded, count) for count in labs or SIZES]


def _measured(folder: Path, recorded: Path, count: int) -> Row:
    """Measure in a new process, whose memory is that of inspectorate and cluster."""
    folder.mkdir()
    names = _lay_out(folder, recorded, count)
    with ExitStack() as stack:
        for place in range(_HOSTS):
            command = processes.python(__name__, "labs", str(folder), *names[place::_HOSTS])
            hosted = processes.start(command, str(folder), {}, stdin=subprocess.DEVNULL)
            stack.callback(hosted.wait)
            stack.callback(hosted.terminate)
        done = processes.run(processes.python(__name__, "others", str(folder), *names), timeout=_PATIENCE)
    if done.returncode:
        raise DeviceError(f"the inspectorate's process ended with {done.returncode}: {done.stderr[-500:]!a}")
    return {"work": "transfers", "mode": f"digits-cnn, {_STEPS} steps", "ratio": None, **canonical.loads(done.stdout)}


def _lay_out(folder: Path, recorded: Path, count: int) -> list[str]:
    """Make labs with runs, their world, and each party's folder; returns the labs' names."""
    lab_key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded)))
    trust = Trust.load([recorded.with_name("run.trust.json")], [recorded])
    metadata = Metadata.from_json(canonical.loads((recorded / METADATA).read_text()))
    together = World.create(folder / "together")
    names, keys = [f"lab-{number:03d}" for number in range(count)], {}
    for name in names:
        key, place = SigningKey.generate(), folder / "runs" / name / "run"
        shutil.copytree(recorded, place)
        place.with_name("key").write_bytes(key.private_bytes())
        draft = Draft.read(place, lab_key)
        own = replace(metadata, lab=name)
        draft.put(place, METADATA, canonical.encode(own.to_json()))
        draft.run = own.run_id.hex()
        draft.sign(place, key)
        keys[name] = key.verifying
    chips = {f"{name}-chip-0000": name for name in names}
    together.join(replace(trust, labs=keys, chips=chips, countersigned=frozenset(), rates={}, challenges={}), {})
    for name in names:
        runs = canonical.encode({"run": str(folder / "runs" / name / "run")})
        (together.home(name) / "runs.json").write_bytes(runs)
    for party in (INSPECTORATE, CLUSTER, *names):
        split(together, party, folder / party)
    return names


def _place(party: str, names: Sequence[str]) -> Place:
    every = [INSPECTORATE, CLUSTER, *names]
    others = every if party in (INSPECTORATE, CLUSTER) else every[:2]
    ports = {
        each: _FIRST_PORT + (2 + int(each[4:]) if each.startswith("lab-") else every.index(each)) for each in every
    }
    peers = {each: f"http://127.0.0.1:{ports[each]}" for each in others if each != party}
    return Place(host="127.0.0.1", port=ports[party], peers=peers)


async def _play_labs(folder: Path, names: Sequence[str]) -> None:
    """All labs of one process, until it is ended."""
    stop = asyncio.Event()
    worlds = {name: World(folder / name, _Copied, own=name) for name in names}
    await asyncio.gather(
        *(play_party(world, name, world.side(name).key, _place(name, names), stop) for name, world in worlds.items())
    )


async def _play_others(folder: Path, names: Sequence[str]) -> Row:
    """Inspectorate and cluster, until every run is opened to the cluster; what that took."""
    worlds = {party: World(folder / party, own=party) for party in (INSPECTORATE, CLUSTER)}
    settings, stop = Settings(samples=1, seed=None, devices=("sse41",)), asyncio.Event()
    tasks = [
        asyncio.create_task(play_party(world, party, world.key(party), _place(party, names), stop))
        for party, world in worlds.items()
    ]
    steps.announce(worlds[INSPECTORATE], settings, minutes=_NEVER, refusals=0, now=datetime.now(UTC))
    begun = time.perf_counter()
    worked = time.process_time()
    moments: Row = {}
    spent: Row = {}
    for name, party, kind, count in (
        ("heads", INSPECTORATE, "heads", len(names)),
        ("answers", INSPECTORATE, "answers", len(names)),
        ("order", CLUSTER, "order", 1),
        ("openings", CLUSTER, "openings", len(names)),
    ):
        while len(list(worlds[party].inbox(party).glob(f"*/0001-?-{kind}.*"))) < count:
            await asyncio.sleep(0.1)
            if time.perf_counter() - begun > _PATIENCE or any(each.done() for each in tasks):
                raise DeviceError(f"{kind} did not come")
        now = time.perf_counter()
        moments[name] = round(now - begun, 2)
        spent[name] = time.process_time() - worked
        begun, worked = now, time.process_time()
    stop.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    files = [path for world in worlds.values() for path in world.folder.glob("*/openings/0001/**/*") if path.is_file()]
    return {
        "seconds": round(sum(moments.values()) - moments["order"], 2),
        "processor": round(sum(spent.values()) - spent["order"], 2),
        "load": round(os.getloadavg()[0], 1),
        "labs": len(names),
        **moments,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines."""
    return [
        f"{row['labs']:4} labs: {row['seconds']:6.1f} s (heads {row['heads']:.1f}, answers {row['answers']:.1f}, "
        f"openings {row['openings']:.1f}; order: {row['order']:.1f}), {row['files']} files, {row['megabytes']} MB"
        for row in rows
    ]


def verdict(rows: Sequence[Row]) -> str | None:
    """What misses its target."""
    for row in rows:
        if row["labs"] >= SIZES[-1] and (row["seconds"] > SECONDS or row["megabytes"] > MEGABYTES):
            return f"{row['labs']} labs took {row['seconds']} s and {row['megabytes']} MB"
    return None


if __name__ == "__main__":
    if sys.argv[1] == "labs":
        asyncio.run(_play_labs(Path(sys.argv[2]), sys.argv[3:]))
    else:
        print(canonical.encode(asyncio.run(_play_others(Path(sys.argv[2]), sys.argv[3:]))).decode())
