"""Rounds between parties that share no folder, over HTTP: the same verdicts, and no one who stops keeps others out."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from analysis.cli import main
from firmware_sim.evidence import SigningKey
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Settings
from inspector.inspection.verdict import Outcome
from inspector.rounds import door, steps
from inspector.rounds.budget import LEAST, Budget, Spending
from inspector.rounds.parts import parties_of, split
from inspector.rounds.party import Place, play_party
from inspector.rounds.turns import play_round
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from inspector.wire.arrival import Arrival
from inspector.wire.messages import Pass
from monitor import processes
from monitor.lab.rounds import LabSide
from tests.conftest import Recorded

SETTINGS = Settings(samples=2, seed=None, devices=("sse41",))
LABS = ("lab", "other")


@pytest.fixture(scope="module")
def labs(tmp_path_factory, record):
    """Two labs, each with a run of two steps on one chip."""
    folder = tmp_path_factory.mktemp("machines")
    return [
        record(folder / lab / "run", lab=lab, seed=7 + place, steps=2, chips=1, checkpoint_every=1, rate=Fraction(1))
        for place, lab in enumerate(LABS)
    ]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def until_served(port: int) -> None:
    """Wait until a port takes connections."""
    for _ in range(1200):
        with closing(socket.socket()) as found:
            if not found.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise AssertionError(port)


class Machines:
    """A world whose parties each have a folder and a port."""

    def __init__(self, folder: Path, labs) -> None:
        self.folder = folder
        self.together = World.create(folder / "together", LabSide)
        for each in labs:
            self.together.join(each.trust, {} if each.run is None else {"run": each.run})
        parties = parties_of(self.together)
        self.worlds = {party: split(self.together, party, folder / party, LabSide) for party in parties}
        self.ports = dict(zip(parties, free_ports(len(parties)), strict=True))

    def place(self, party: str, budget: Budget = Budget()) -> Place:  # noqa: B008
        others = [
            each for each in self.ports if each != party and (party in (INSPECTORATE, CLUSTER) or each not in LABS)
        ]
        return Place(
            host="127.0.0.1",
            port=self.ports[party],
            peers={each: f"http://127.0.0.1:{self.ports[each]}" for each in others},
            budget=budget,
        )

    def key(self, party: str) -> SigningKey:
        world = self.worlds[party]
        return world.key(party) if party in (INSPECTORATE, CLUSTER) else world.side(party).key

    def announce(self, minutes: float, settings: Settings = SETTINGS) -> None:
        now = datetime.now(UTC)
        steps.announce(self.worlds[INSPECTORATE], settings, minutes=minutes, refusals=0, now=now)

    def play(self, worker, parties=None, budget: Budget = Budget()):  # noqa: B008
        """What the inspectorate decides, where all parties, or these, live in one process."""

        async def played():
            stop = asyncio.Event()
            tasks = [
                asyncio.create_task(
                    play_party(
                        self.worlds[each], each, self.key(each), self.place(each, budget), stop,
                        worker=worker, until_decided=each == INSPECTORATE,
                    )
                )
                for each in parties or self.worlds
            ]  # fmt: skip
            decided = await tasks[0]
            stop.set()
            await asyncio.gather(*tasks)
            return decided

        return asyncio.run(played())


@pytest.fixture
def machines(tmp_path, labs):
    return Machines(tmp_path, labs)


def shown(verdict) -> tuple[object, ...]:
    """What a verdict says, but for times and keys."""
    return (
        verdict.outcome,
        verdict.evidence["labs"],
        sorted((each.guard, each.where.get("run")) for each in verdict.reasons),
    )


def test_a_round_between_machines_decides_as_one_in_folders(machines, devices):
    machines.announce(5)
    (unsent,) = (machines.worlds[INSPECTORATE].inbox("lab") / INSPECTORATE).iterdir()
    unsent.unlink()  # as where the inspectorate was killed while it announced
    decided = machines.play(devices.run)
    assert decided.verdict.outcome is Outcome.ACCEPT, decided.verdict.reasons
    assert check_bundle(decided.bundle.read_bytes(), machines.together.trust()).outcome is Outcome.ACCEPT
    here = play_round(machines.together, SETTINGS, now=datetime.now(UTC), worker=devices.run)
    assert shown(decided.verdict) == shown(here.verdict)
    cluster, inspectorate = (
        machines.worlds[each].folder / each / "openings" / "0001" for each in (CLUSTER, INSPECTORATE)
    )
    assert (cluster / "lab.run" / "checkpoints" / "00000000.safetensors").is_file()
    assert (inspectorate / "lab.run" / "journal.tsv").is_file()
    assert not (inspectorate / "lab.run" / "checkpoints").exists()
    machines.announce(5)
    second = machines.play(devices.run)
    assert second.verdict.outcome is Outcome.ACCEPT, second.verdict.reasons


def test_a_lab_that_opens_more_than_one_lab_may_is_cut_off_alone(labs, devices, tmp_path, record, capfd):
    """There would have been room for all."""
    options = {"steps": 8, "chips": 1, "checkpoint_every": 1, "rate": Fraction(1)}
    big = record(tmp_path / "big" / "run", lab="other", seed=9, **options)
    machines = Machines(tmp_path / "machines", [labs[0], big])
    sizes = [sum(path.stat().st_size for path in each.run.rglob("*") if path.is_file()) for each in (labs[0], big)]
    assert sizes[0] + 20_000 < sizes[1]
    machines.announce(5)
    decided = machines.play(devices.run, budget=Budget(bytes=sizes[0] + 20_000))
    assert decided.verdict.evidence["labs"]["lab"] == "ACCEPT", decided.verdict.reasons
    assert decided.verdict.evidence["labs"]["other"] == "INCONCLUSIVE", decided.verdict.reasons
    bundle = check_bundle(decided.bundle.read_bytes(), machines.together.trust())
    assert bundle.outcome is decided.verdict.outcome is Outcome.INCONCLUSIVE, bundle.reasons
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "over budget" in line]
    assert {each["lab"] for each in logged} == {"other"}
    assert f"takes at most {sizes[0] + 20_000} from one lab" in logged[0]["why"]
    machines.announce(5)
    decided = machines.play(devices.run, budget=Budget(files=1))
    assert decided.verdict.outcome is Outcome.INCONCLUSIVE, decided.verdict.reasons
    assert {each.where["lab"] for each in decided.verdict.reasons if each.guard == "budget"} == {"lab", "other"}
    machines.announce(5)
    decided = machines.play(devices.run)  # whose runs came damaged before, for want of room, is not refused now
    assert decided.verdict.outcome is Outcome.ACCEPT, decided.verdict.reasons
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspector.rounds.budget.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        assert Budget().spending(machines.worlds[INSPECTORATE], INSPECTORATE, "lab").most_bytes == LEAST


class Trickle:
    """Clients that send headers, or a body, at a byte a second, and strangers that post junk as fast as they can."""

    def __init__(self, *ports: int, count: int = 150) -> None:
        self._ports, self._count, self._over = ports, count, threading.Event()
        self._threads = [
            threading.Thread(target=each, args=(port,)) for port in ports for each in (self._slow, self._junk)
        ]
        self.refused = 0

    def _slow(self, port: int) -> None:
        with ExitStack() as stack:
            peers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(self._count)]
            head = b"POST /messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\nchipwitness-pass: "
            for place, each in enumerate(peers):
                each.sendall(head if place % 2 else head + b"lab x\r\n\r\n")
            while not self._over.wait(1):
                for each in peers:
                    try:
                        each.sendall(b"x")
                    except OSError:  # it was closed
                        continue

    def _junk(self, port: int) -> None:
        while not self._over.wait(0.01):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                try:
                    connection.request("POST", "/messages", body=b"{}", headers={"chipwitness-pass": "lab e30="})
                    self.refused += connection.getresponse().status == 403
                except OSError:
                    continue

    def __enter__(self) -> Trickle:
        for port in self._ports:
            until_served(port)
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def test_a_slow_lab_a_stopped_one_and_a_flood_keep_no_one_out(labs, devices, monkeypatch, tmp_path):
    """One lab's files come at a byte a second, another's break off once, a third takes connections and is stopped;
    strangers flood inspectorate and cluster.
    """
    key = SigningKey.generate().verifying
    stopped = {"labs": {"stopped": key}, "chips": {"stopped-chip-0000": "stopped"}, "countersigned": frozenset()}
    machines = Machines(tmp_path, [*labs, Recorded(cast(Any, None), replace(labs[0].trust, **stopped))])
    broken: list[Any]
    pieces, broken = door._Door._pieces, []

    async def worse(self, path, start, left, reader):
        whole = b"".join([each async for each in pieces(self, path, start, left, reader)])
        if self._party == "other":
            for place in range(len(whole)):
                await asyncio.sleep(1)
                yield whole[place : place + 1]
        elif path.name == "journal.tsv" and not broken:
            broken.append(path)
            yield whole[: len(whole) // 2]
            raise ConnectionError("the cable was cut")
        else:
            yield whole

    monkeypatch.setattr(door._Door, "_pieces", worse)
    machines.announce(0.25, replace(SETTINGS, samples=3))
    flood = Trickle(machines.ports[INSPECTORATE], machines.ports[CLUSTER])
    starter = threading.Thread(target=flood.__enter__)
    starter.start()
    with socket.create_server(("127.0.0.1", machines.ports["stopped"])):
        decided = machines.play(devices.run, [each for each in machines.worlds if each != "stopped"])
    starter.join()
    flood.__exit__()
    assert broken
    assert flood.refused > 10
    found = {"lab": "ACCEPT", "other": "REJECT", "stopped": "REJECT"}
    assert decided.verdict.evidence["labs"] == found, decided.verdict.reasons
    assert {each.where["lab"] for each in decided.verdict.reasons if each.guard == "refusal"} == {"other", "stopped"}


class Process:
    """A party's process, as the command line starts it."""

    def __init__(self, out: Path, served: str, party: str, *words: str) -> None:
        command = processes.python("analysis.cli", "serve", served, "--config", str(out / f"{party}.toml"), *words)
        self.log = out / f"{party}.log"
        with self.log.open("ab") as log:
            self.process = processes.start(command, str(out), {}, stdout=subprocess.PIPE, stderr=log)

    def until(self, text: str) -> None:
        """Wait until its log has a text."""
        for _ in range(2400):
            assert self.process.poll() is None, self.log.read_text()
            if text in self.log.read_text():
                return
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate()
        return self.process.returncode


def fetched(port: int, path: str) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


def test_a_process_is_killed_and_goes_on(labs, tmp_path):
    """A lab is killed in the middle of a round, and started again."""
    together, out = World.create(tmp_path / "together", LabSide), tmp_path / "machines"
    for each in labs:
        together.join(each.trust, {"run": each.run})
    port = next(each for each in free_ports(20) if all(free(each + at + more) for at in range(4) for more in (0, 1000)))
    assert main(["world", "split", str(together.folder), "--out", str(out), "--first-port", str(port)]) == 0
    round_ = ["--samples", "2", "--device", "sse41", "--minutes", "10"]
    started = {party: Process(out, served, party) for party, served in (("cluster", "cluster"), ("other", "lab"))}
    try:
        started["lab"] = Process(out, "lab", "lab")
        started[INSPECTORATE] = Process(out, INSPECTORATE, INSPECTORATE, *round_)
        started["lab"].until('"step":"hand"')
        assert started["lab"].end(signal.SIGKILL) == -signal.SIGKILL
        started["lab"] = Process(out, "lab", "lab")
        started["lab"].until('"step":"answer"')
        counters = fetched(port + 1002, "/metrics").decode()
        assert 'chipwitness_steps_total{party="lab",kind="answer"} 1' in counters
        assert fetched(port + 1002, "/health") == b"well\n"
        printed = started[INSPECTORATE].process.communicate(timeout=300)[0].decode()
        assert started[INSPECTORATE].process.returncode == 0, printed
        assert printed.startswith("ACCEPT\n")
        for party in ("lab", "other", "cluster"):
            assert started[party].end(signal.SIGTERM) == 0
    finally:
        for each in started.values():
            if each.process.poll() is None:
                each.end(signal.SIGKILL)
    home = out / INSPECTORATE / INSPECTORATE
    assert [each.name for each in (home / "verdicts").iterdir()] == ["0001.json"]
    shown = check_bundle((home / "verdicts" / "0001.json").read_bytes(), together.trust())
    assert (shown.outcome, shown.evidence["verifies"]) == (Outcome.ACCEPT, True)
    for log in out.glob("*.log"):
        for line in log.read_text().splitlines():
            assert {"time", "party", "event"} <= set(json.loads(line))


class Knock:
    """Requests to a door, one after another."""

    def __init__(self, machines: Machines, party: str) -> None:
        self._port, self._key = machines.ports[party], machines.key(party).verifying.key_id

    def pass_of(self, name: str, key: SigningKey, content: bytes, **fields) -> dict[str, str]:
        given = {"to": self._key, "what": "heads", "until": int(time.time()) + 60, "length": len(content)}
        given |= {"sha256": hashlib.sha256(content).hexdigest()}
        return {"chipwitness-pass": Pass(**{**given, **fields}).header(name, key)}

    def __call__(self, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            connection.request("POST", path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture
def served(machines):
    """Serves a party's door from a thread; a function that makes requests to it."""
    with ExitStack() as stack:

        def serve(party: str) -> Knock:
            loop, stop = asyncio.new_event_loop(), asyncio.Event()
            quiet = Place(host="127.0.0.1", port=machines.ports[party], peers={})
            playing = play_party(machines.worlds[party], party, machines.key(party), quiet, stop)
            thread = threading.Thread(target=loop.run_until_complete, args=(playing,))
            thread.start()
            stack.callback(loop.close)
            stack.callback(thread.join)
            stack.callback(loop.call_soon_threadsafe, stop.set)
            until_served(machines.ports[party])
            return Knock(machines, party)

        yield serve


def test_the_door_takes_what_a_party_signed_and_nothing_else(machines, served, monkeypatch):
    monkeypatch.setitem(door.application.__kwdefaults__, "seconds", 3)
    machines.announce(5)
    lab, key = machines.worlds["lab"], machines.key("lab")
    announcement = next((machines.worlds[INSPECTORATE].inbox("lab") / INSPECTORATE).iterdir())
    lab.post("lab", "announcement", INSPECTORATE, announcement.read_bytes(), number=1)
    steps.hand(lab, "lab", now=datetime.now(UTC))
    heads = next((lab.inbox(INSPECTORATE) / "lab").iterdir()).read_bytes()
    knock = served(INSPECTORATE)

    def post(
        body: bytes, *, name: str = "lab", key: SigningKey = key, more: dict[str, str] | None = None, **fields
    ) -> int:
        return knock("/messages", {**knock.pass_of(name, key, body, **fields), **(more or {})}, body)[0]

    stranger = SigningKey.generate()
    assert post(heads, more={"content-encoding": "gzip"}) == 415
    assert knock("/messages", {}, heads)[0] == 403
    assert knock("/messages", {"chipwitness-pass": "lab " + "A" * 20_000}, heads)[0] == 403
    assert post(heads, key=stranger) == 403
    assert post(heads, name="nobody") == 403
    assert post(heads, name="../other") == 403
    assert post(heads, to=stranger.verifying.key_id) == 403
    assert post(heads, until=0) == 403
    assert post(heads, name="other", key=machines.key("other")) == 422  # whose message it is not
    assert post(heads, what="results") == 422
    assert post(heads, what="../../heads") == 422
    assert post(b"{}") == 422
    assert post(heads, nonce="../x") == 403
    shown = knock.pass_of("lab", key, b"{}")
    assert [knock("/messages", shown, b"{}")[0] for _ in range(2)] == [422, 403]  # a pass counts once
    assert post(heads, length=1 << 40) == 413
    assert post(heads + b" ", length=len(heads)) == 422
    inbox = machines.worlds[INSPECTORATE].inbox(INSPECTORATE) / "lab"
    assert not inbox.exists() or not list(inbox.iterdir())
    assert [post(heads), post(heads)] == [200, 200]
    assert [path.read_bytes() for path in inbox.iterdir()] == [heads]
    about = lab.announcement("lab").digest

    def other(number: int) -> bytes:
        from inspector.rounds.world import sealed

        return sealed("heads", about, {"heads": [], "names": [str(number)]}, key)

    assert [post(other(number)) for number in range(3)] == [200, 422, 422]  # a second one is evidence, a third nothing
    monkeypatch.setattr(Budget, "spending", lambda *_: Spending(lab="lab", most_bytes=10, most_files=1))
    assert post(heads) == 413  # beyond its budget
    monkeypatch.undo()
    with socket.create_connection(("127.0.0.1", machines.ports[INSPECTORATE])) as slow:
        shown = knock.pass_of("lab", key, heads)["chipwitness-pass"]
        slow.sendall(f"POST /messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(heads)}\r\n".encode())
        slow.sendall(f"chipwitness-pass: {shown}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert b" 100 " in slow.recv(1000)  # the door has begun to read
        assert post(heads) == 503  # one message of a sender at a time
        assert post(other(0), name="other", key=machines.key("other")) == 422  # and others as before
        assert b" 408 " in slow.recv(1000)


def test_a_lab_gives_its_files_to_those_to_whom_it_opened_them(machines, served):
    world = machines.worlds["lab"]
    opened = world.folder / CLUSTER / "openings" / "0000" / "lab.run"
    (opened / "programs").mkdir(parents=True)
    (opened / "manifest.json").write_bytes(b"head")
    (opened / "metadata.json").write_bytes(b"content")
    (world.folder / "secret").write_bytes(b"content")
    head, knock = hashlib.sha256(b"head").hexdigest(), served("lab")

    def get(name: str = CLUSTER, path: str = "metadata.json", **fields) -> tuple[int, bytes]:
        given = {"what": "file", "run": head, "path": path, **fields}
        return knock("/files", knock.pass_of(name, machines.key(name), b"content", **given))

    assert get() == (200, b"content")
    assert get(start=3) == (200, b"tent")
    for answer in (
        get(INSPECTORATE),  # to whom nothing was opened
        get("other"),
        get(path="../../../../secret"),
        get(path="runs.json"),
        get(run="ab" * 32),
        get(length=8),
        get(what="heads"),
    ):
        assert answer[0] == 404
    assert get(start=9)[0] == 403


def test_a_file_comes_whole_or_not_at_all(tmp_path):
    content, path = bytes(range(256)) * 100, tmp_path / "a" / "file"
    digest = hashlib.sha256(content).hexdigest()
    first = Arrival(path, len(content), digest)
    first.feed(content[:1000])
    assert not first.finish()
    second = Arrival(path, len(content), digest)
    assert second.received == 1000
    second.feed(content[1000:])
    assert second.finish()
    assert path.read_bytes() == content
    for wrong, text in ((content + b"x", "more bytes"), (content[:-1] + b"x", "does not have the signed digest")):
        bad = Arrival(tmp_path / "bad", len(content), digest)
        with pytest.raises(Exception, match=text):
            bad.feed(wrong) or bad.finish()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("port", 70_000, "--port: '70000' is not a port from 1 to 65535"),
        ("prot", 1, "there is no option 'prot' (did you mean port?)"),
        ("peer", ["cluster"], "--peer: 'cluster' is not a party: write NAME=https://HOST:PORT"),
        ("peer", ["cluster=ftp://x"], "'inspectorate' has no address; write inspectorate=https://HOST:PORT"),
        (
            "peer",
            ["cluster=ftp://x", "inspectorate=http://x:1"],
            "is not the address of a party: write https://HOST:PORT",
        ),
        ("name", "nobody", "holds no folder of nobody"),
        ("folder", "nowhere", "there is no world nowhere"),
    ],
    ids=range(7),
)
def test_a_mistake_in_the_options_is_one_clear_line(machines, capsys, key, value, text):
    path = machines.folder / "lab.toml"
    options = {"name": "lab", "folder": str(machines.folder / "lab"), "port": 1, "peer": ["cluster=http://127.0.0.1:1"]}
    path.write_text("".join(f"{name} = {json.dumps(each)}\n" for name, each in {**options, key: value}.items()))
    code: object
    try:
        code = main(["serve", "lab", "--config", str(path)])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    assert code == 2
    assert text in shown
    assert shown.count("\n") == 1
    assert "lab.toml" in shown or key not in ("port", "prot")
