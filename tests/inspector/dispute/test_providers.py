"""Parties as processes with different kernels, over HTTP: honest, lying, stopped, killed, flooding."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from firmware_sim.evidence import SigningKey
from inspector.devices import device
from inspector.registry.keyfiles import write_keys
from tests.inspector.dispute.test_game import record

DEVICES = {"honest": "sse41", "liar": "emulated-split-k", "doomed": "sse41"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Providers:
    """A folder of labs that finished one task, each served by a process, and a referee's key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        write_keys(folder / "referee", SigningKey.generate(bytes(32)))
        for name in DEVICES:
            lie: dict[str, Any] = {} if name == "honest" else {"lie": "wrong-operator", "lie_step": 3}
            record(folder, name, **lie)

    def start(self, name: str) -> None:
        if name in self.processes:
            self.processes[name].kill()
            self.processes[name].wait()
        self.ports[name] = free_port()
        config = self.folder / f"{name}.toml"
        config.write_text(
            f'run = "{name}"\nstore = "{name}.store"\nreferees = ["referee.pub"]\n'
            f'port = {self.ports[name]}\ndevice = "{DEVICES[name]}"\ntls = {str(name == "liar").lower()}\n'
        )
        command = [sys.executable, "-m", "analysis.cli", "serve", "provider", "--config", str(config)]
        environment = device(DEVICES[name]).process_environment()
        self.processes[name] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=self.folder)

    def words(self, *names: str, seconds: int = 120) -> list[str]:
        """Arguments of a dispute between two of them."""
        found = ["dispute", "--key", str(self.folder / "referee"), "--seconds", str(seconds), "--json"]
        for name in names:
            found += ["--provider", f"{name}=http{'s' * (name == 'liar')}://127.0.0.1:{self.ports[name]}"]
        return [*found, *self.trust()]

    def trust(self) -> list[str]:
        return [word for name in DEVICES for word in ("--trust", str(self.folder / f"{name}.trust.json"))]

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def providers(tmp_path_factory):
    made = Providers(tmp_path_factory.mktemp("providers"))
    for name in ("honest", "liar"):
        made.start(name)
    yield made
    made.stop()


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process; exit code and JSON."""
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)

    def run(*words):
        code = main(list(map(str, words)))
        said = capsys.readouterr()
        assert said.out, said.err
        return code, json.loads(said.out)

    return run


def test_a_liar_is_named_and_its_answers_show_it_when_both_are_gone(providers, call, tmp_path):
    code, found = call(*providers.words("liar", "honest"), "--out", tmp_path / "game.json")
    assert code == 1
    assert [found[key] for key in ("guilty", "absent", "step", "case")] == ["liar", None, 3, "output"]
    assert found["operator"].startswith("aten.")
    assert found["operators_executed"] == 1
    code, again = call("verify", tmp_path / "game.json", *providers.trust(), "--json")
    assert code == 1
    assert again["evidence"] == {**found["evidence"], "verifies": True}


def test_a_stopped_party_is_absent(providers, call):
    process = providers.processes["liar"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        code, found = call(*providers.words("honest", "liar", seconds=10))
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert (code, found["absent"], found["guilty"]) == (1, "liar", None)
    assert "liar is absent, says referee sha256:" in found["reasons"][0]["text"]


def test_a_witness_says_that_a_stopped_party_was_late(providers, call, tmp_path):
    write_keys(tmp_path / "notary", SigningKey.generate(b"n" * 32))
    words = ["--client", providers.folder / "referee.pub", "--witness", f"notary={tmp_path / 'notary.pub'}"]
    trust, port = tmp_path / "witnessed.json", free_port()
    assert call("task", "trust", *words, "--out", trust, "--json")[0] == 0
    places = [word for word in providers.words("honest", "liar") if "=http" in word]
    served = [sys.executable, "-m", "analysis.cli", "serve", "witness", "--key", tmp_path / "notary", "--trust", trust]
    served += [*providers.trust(), "--store", tmp_path / "seen", "--port", port, "--least", 1]
    served += [word for place in places for word in ("--provider", place)]
    witness = subprocess.Popen(list(map(str, served)), stdout=subprocess.DEVNULL)
    process = providers.processes["liar"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        asked = [*providers.words("honest", "liar", seconds=8), "--trust", trust, "--out", tmp_path / "game.json"]
        code, found = call(*asked, "--witness", f"notary=http://127.0.0.1:{port}")
    finally:
        os.kill(process.pid, signal.SIGCONT)
        witness.kill()
        witness.wait()
    assert (code, found["absent"], found["guilty"]) == (1, "liar", None)
    code, again = call("verify", tmp_path / "game.json", *providers.trust(), "--trust", trust, "--json")
    assert (code, again["evidence"]["absent"]) == (1, "liar")
    assert "liar is absent, witnessed by notary: no signed answer came within 8 s" in again["reasons"][0]["text"]


def test_a_party_that_is_killed_in_the_middle_is_absent(providers, call):
    providers.start("doomed")
    answers = providers.folder / "doomed.store" / "answers"

    def kill():
        while not answers.is_dir() or len(list(answers.iterdir())) < 3:
            if providers.processes["doomed"].poll() is not None:
                return
            ended.wait(0.01)
        providers.processes["doomed"].kill()

    ended = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    code, found = call(*providers.words("doomed", "honest", seconds=30))
    killer.join()
    assert (code, found["absent"], found["guilty"]) == (1, "doomed", None)


def test_a_party_that_floods_is_absent_and_another_partys_answers_are_not_its_own(providers, call):
    flood = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                peer, _ = flood.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    while True:
                        peer.sendall(bytes(1 << 16))
            except OSError:
                if flood.fileno() < 0:
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    providers.ports["doomed"] = flood.getsockname()[1]
    code, found = call(*providers.words("doomed", "honest"))
    flood.shutdown(socket.SHUT_RDWR)
    flood.close()
    thread.join()
    assert (code, found["absent"], found["guilty"]) == (1, "doomed", None)
    assert "bytes hold no signed answer" in found["reasons"][0]["text"]
    providers.ports["doomed"] = providers.ports["honest"]
    code, found = call(*providers.words("doomed", "honest"))
    assert (code, found["absent"], found["guilty"]) == (1, "doomed", None)
    assert "HTTP status 403" in found["reasons"][0]["text"]


def test_of_three_parties_the_liar_is_named_and_the_evidence_of_all_games_shows_it(providers, call, tmp_path):
    """The third one has the liar's claim, so that the honest one plays two games."""
    providers.start("doomed")
    words = providers.words("liar", "honest", "doomed")
    code, found = call(*words, "--branching", "4", "--out", tmp_path / "games.json")
    assert code == 1
    assert (found["prevails"], sorted(found["guilty"]), found["absent"]) == (["honest"], ["doomed", "liar"], [])
    assert [(loss["step"], loss["case"]) for loss in found["losses"]] == [(3, "output")] * 2
    assert len(found["games"]) == 2
    code, again = call("verify", tmp_path / "games.json", *providers.trust(), "--json")
    assert code == 1
    assert again["evidence"] == {**found["evidence"], "verifies": True}


CONFIG = 'run = "a"\nstore = "s"\nreferees = ["r.pub"]\nport = 80\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run", "is not TOML that can be read"),
        (CONFIG + "hosts = 1\n", "there is no option 'hosts' (did you mean host?)"),
        (CONFIG.replace('run = "a"\n', ""), "required: RUN"),
        (CONFIG.replace("80", "70000"), "is not a port from 1 to 65535"),
        (CONFIG.replace('["r.pub"]', "[]"), "referees must be a string"),
        (CONFIG, "no run folder"),
    ],
    ids=range(6),
)
def test_a_mistake_in_a_providers_file_is_one_line(tmp_path, capsys, monkeypatch, text, why):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    path = tmp_path / "provider.toml"
    path.write_text(text)
    code: int | str | None
    try:
        code = main(["serve", "provider", "--config", str(path)])
    except SystemExit as end:
        code = end.code
    assert code == 2
    line = capsys.readouterr().err
    assert why in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "give two or more RUN folders, or --provider LAB=URL two or more times"),
        (("--provider", "a=http://b"), "give two or more RUN folders"),
        (("--provider", "a=http://b", "--provider", "c=http://d"), "needs the referee's --key FILE"),
        (("--provider", "a", "--provider", "c", "--key", "K"), "write --provider NAME=URL, with a different name"),
        (
            ("--provider", "a=http://b", "--provider", "c=http://d", "--key", "K", "--seconds", "0"),
            "--seconds must be 1 to 86400",
        ),
        (("RUN", "RUN2", "--witness", "n=http://b"), "--witness is for labs elsewhere"),
        (("--provider", "zz=http://b", "--provider", "c=http://d", "--key", "K"), "names no lab 'zz'"),
        (("--provider", "honest=b", "--provider", "liar=http://d", "--key", "K"), "write https://HOST:PORT"),
    ],
    ids=range(8),
)
def test_a_mistake_in_a_disputes_words_is_one_line(providers, capsys, monkeypatch, words, why):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    assert main(["dispute", *words, *providers.trust()]) == 2
    assert why in capsys.readouterr().err
