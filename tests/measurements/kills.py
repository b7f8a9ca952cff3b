"""``kills``: parties of rounds between machines that are killed at random moments, stopped, or flooded.

Each party is a process, as ``world split`` and ``serve`` have it. A killed one is started again at once. All of them
are honest: whatever happens to their processes, a round ends with ACCEPT and a bundle that verifies. Of a lab that is
stopped for good the deadline passes: it is rejected as silent, and no other one.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError
from firmware_sim.evidence import VerifyingKey
from inspector.bundle.checker import check_bundle
from inspector.bundle.contents import Bundle
from inspector.inspection.trust import Trust
from inspector.rounds.parts import parties_of, split
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor import processes
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train

__all__ = ["MODES", "Machines", "run", "verdict", "write"]

Row = dict[str, Any]

MODES = ("kill", "stop", "flood")
_LABS = ("lab", "other")
_SECONDS = 3000
"""After which a round is stuck: longer than its four deadlines together."""
_PER_ROUND = 8
_ROUND = ("--samples", "2", "--device", "sse41")


@dataclass(slots=True)
class Machines:
    """A world of two labs, each party with its folder and its process.

    Attributes:
        minutes: for each deadline of a round.
    """

    folder: Path
    minutes: float = 10
    ports: dict[str, int] = field(default_factory=dict)
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    trust: Trust = field(init=False)
    key: VerifyingKey = field(init=False)

    def __post_init__(self) -> None:
        """Train, and split the world."""
        begun = datetime.now(UTC) - timedelta(minutes=5)
        together = World.create(self.folder / "together", LabSide)
        for number, lab in enumerate(_LABS):
            config = LabConfig(
                lab=lab, seed=number, chips=1, snapshot_rate=Fraction(1), started=begun, duration=timedelta(days=1)
            )
            task = Task.for_preset("digits-cnn", seed=number, steps=2, checkpoint_every=1, shards=1, batch_size=4)
            run = self.folder / lab / "run"
            train(task, run, config, device="native")
            together.join(Trust.load([run.with_name("run.trust.json")], [run]), {"run": run})
        self.trust, self.key = together.trust(), together.public(INSPECTORATE)
        self.ports = dict(zip(parties_of(together), _free_ports(4), strict=True))
        for party in self.ports:
            split(together, party, self.folder / party / "world", LabSide)

    def start(self, party: str) -> None:
        """Start a party's process; the inspectorate's plays a round, and ends with its verdict."""
        served = party if party in (INSPECTORATE, CLUSTER) else "lab"
        others = [INSPECTORATE, CLUSTER] if served == "lab" else list(self.ports)
        words = ["--folder", str(self.folder / party / "world"), "--port", str(self.ports[party])]
        for each in others:
            words += [] if each == party else ["--peer", f"{each}=http://127.0.0.1:{self.ports[each]}"]
        words += ["--name", party] if served == "lab" else []
        words += [*_ROUND, "--minutes", str(self.minutes)] if party == INSPECTORATE else []
        command = processes.python("analysis.cli", "serve", served, *words)
        with self.log(party).open("ab") as log:
            self.started[party] = processes.start(
                command, str(self.folder / party), {}, stdout=subprocess.DEVNULL, stderr=log
            )

    def log(self, party: str) -> Path:
        """What a party's processes have written on standard error."""
        return self.folder / party / "log"

    def serves(self, party: str) -> int:
        """How often a party's processes have begun to serve."""
        path = self.log(party)
        return path.read_text().count('"event":"serving"') if path.exists() else 0

    def verdicts(self) -> list[Path]:
        """Bundles of rounds that are decided."""
        home = self.folder / INSPECTORATE / "world" / INSPECTORATE / "verdicts"
        return sorted(home.glob("[0-9]*.json")) if home.is_dir() else []

    def signal(self, party: str, number: int) -> None:
        """Send a party's process a signal, and wait for its end where that is what it does."""
        self.started[party].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.started[party].wait()

    def ended(self, known: int) -> dict[str, str] | None:
        """What a round came to once it is decided: each lab's outcome, and whether the bundle verifies."""
        found = self.verdicts()
        if len(found) == known:
            return None
        data = found[-1].read_bytes()
        labs = Bundle.open(data, self.key).predicate["evidence"]["labs"]
        return {**labs, "verifies": str(check_bundle(data, self.trust).evidence["verifies"])}

    def stop(self) -> None:
        """End all processes."""
        for each in self.started.values():
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            each.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


_RIGHT = {**dict.fromkeys(_LABS, "ACCEPT"), "verifies": "True"}


def _killed(machines: Machines, rng: random.Random, most: int) -> tuple[list[str], str]:
    """A round in which parties are killed up to so often; who, when, and what was wrong."""
    known, begun = len(machines.verdicts()), time.monotonic()
    done: list[str] = []
    machines.start(INSPECTORATE)
    while machines.ended(known) is None:
        if time.monotonic() - begun > _SECONDS:
            return done, f"the round is not decided after {_SECONDS} s"
        if len(done) >= most:
            if machines.started[INSPECTORATE].poll() is not None and machines.ended(known) is None:
                return done, "the inspectorate ended without a verdict"
            time.sleep(0.1)
            continue
        victim = rng.choice(list(machines.ports))
        served, ends = machines.serves(victim), time.monotonic() + rng.uniform(0, 5)
        while time.monotonic() < ends and machines.ended(known) is None:
            time.sleep(0.02)
        if machines.ended(known) is not None:
            break
        machines.signal(victim, signal.SIGKILL)
        done.append(f"{victim} after {time.monotonic() - begun:.2f} s")
        if machines.ended(known) is None or victim != INSPECTORATE:
            machines.start(victim)
            _until(partial(_goes_on, machines, victim, served, known))
    machines.signal(INSPECTORATE, signal.SIGKILL)
    found = machines.ended(known)
    return done, "" if found == _RIGHT else f"it came to {found}"


def _goes_on(machines: Machines, party: str, served: int, known: int) -> bool:
    """Whether a party serves again that had begun to serve so often, or the round is over."""
    return machines.serves(party) > served or machines.ended(known) is not None


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 120
    while not holds() and time.monotonic() < ends:
        time.sleep(0.05)


def _stopped(machines: Machines) -> str:
    """A lab is stopped while it serves, before it can open its run; what was wrong."""
    known, seen = len(machines.verdicts()), machines.log("other").read_text().count('"step":"hand"')
    machines.start(INSPECTORATE)
    _until(lambda: machines.log("other").read_text().count('"step":"hand"') > seen)
    machines.signal("other", signal.SIGSTOP)
    try:
        _until(lambda: machines.ended(known) is not None)
        found = machines.ended(known)
    finally:
        machines.signal("other", signal.SIGCONT)
    return "" if found == {**_RIGHT, "other": "REJECT"} else f"it came to {found}"


@contextlib.contextmanager
def _flood(ports: Sequence[int]) -> Iterator[None]:
    """Strangers that send junk as fast as they can, and hold connections open at a byte a second."""
    over = threading.Event()

    def junk(port: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                peer.sendall(b"POST /messages HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
                peer.recv(1000)
            over.wait(0.005)

    def slow(port: int) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            peers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
            while not over.wait(1):
                for each in peers:
                    with contextlib.suppress(OSError):
                        each.sendall(b"P")

    threads = [threading.Thread(target=each, args=(port,)) for port in ports for each in (junk, slow)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join()


def _flooded(machines: Machines) -> str:
    """Strangers flood all parties in a round; what was wrong."""
    known = len(machines.verdicts())
    machines.start(INSPECTORATE)
    _until(lambda: '"event":"serving"' in machines.log(INSPECTORATE).read_text())
    with _flood(list(machines.ports.values())):
        _until(lambda: machines.ended(known) is not None)
    found = machines.ended(known)
    return "" if found == _RIGHT else f"it came to {found}"


def run(
    *,
    kills: int = 200,
    seed: int = 0,
    modes: Sequence[str] | None = None,
    seconds: float = 1e6,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Kill parties so often, over as many rounds as that takes; then one round with a stopped lab, one with a flood.

    Rows hold ``work`` (what happens), ``mode`` (rounds), ``seconds`` (of a round, on average), ``ratio`` (None),
    ``seed``, ``kills``, ``rounds``, ``by`` (kills of each party) and ``problems``.

    Args:
        seconds: after which no other round with kills is begun.
        progress: called with 1 after each round.

    Raises:
        CallerError: no such mode, or no kill.
    """
    chosen = list(modes or MODES)
    if kills < 1 or not set(chosen) <= set(MODES):
        raise CallerError(f"give at least one kill, and modes among {', '.join(MODES)}")
    rows = []
    for mode in chosen:
        with tempfile.TemporaryDirectory(prefix="chipwitness-kills-") as folder:
            machines = Machines(Path(folder), minutes=0.5 if mode == "stop" else 10)
            try:
                for party in (CLUSTER, *_LABS):
                    machines.start(party)
                rows.append(_measured(machines, mode, kills, seed, time.monotonic() + seconds, progress))
            finally:
                machines.stop()
    return rows


def _measured(
    machines: Machines, mode: str, kills: int, seed: int, ends: float, progress: Callable[[int], object]
) -> Row:
    rng, begun = random.Random(f"kills {seed}"), time.monotonic()
    done: list[str] = []
    problems: list[str] = []
    rounds = 0
    _until(lambda: all(machines.serves(party) for party in (CLUSTER, *_LABS)))
    while not rounds or (mode == "kill" and len(done) < kills and time.monotonic() < ends and not problems):
        rounds += 1
        if mode == "kill":
            killed, problem = _killed(machines, rng, min(_PER_ROUND, kills - len(done)))
            done += killed
            problem = f"{'; '.join(killed)}: {problem}" if problem else ""
        else:
            problem = _stopped(machines) if mode == "stop" else _flooded(machines)
        problems += [problem] if problem else []
        progress(1)
    by = {party: sum(each.startswith(f"{party} ") for each in done) for party in machines.ports}
    seconds = round((time.monotonic() - begun) / rounds, 1)
    shown = {"kills": len(done), "rounds": rounds, "by": by, "problems": problems}
    return {"work": mode, "mode": "rounds", "seconds": seconds, "ratio": None, "seed": seed, **shown}


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; those of other modes and seeds that are in it stay."""
    write_among(rows, path, by=("work", "seed"))


def verdict(rows: Sequence[Row]) -> str | None:
    """What ended as it may not, or None."""
    odd = [f"{row['work']}: {problem}" for row in rows for problem in row["problems"]]
    return f"{len(odd)} rounds did not end as they must: {odd[0]:.300}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    return [
        f"{row['work']:8} {row['kills']:5} kills in {row['rounds']:4} rounds, {row['seconds']:6.1f} s a round, "
        f"{len(row['problems'])} that ended otherwise"
        for row in rows
    ]
