"""``task make`` and ``delegate``, with providers in processes of different kernel families, over HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from analysis.cli import main
from analysis.commands.delegation import _prompts
from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.devices import device
from inspector.registry.keyfiles import load_private, write_keys
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.presets import initialise, preset
from monitor.transcript import RunFolder, encode_state
from monitor.transcript.orders import OrderFolder
from tests.inspector.dispute.test_game import record
from tests.inspector.dispute.test_providers import free_port

DEVICES = {"honest": "sse41", "liar": "emulated-split-k"}


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process; exit code and JSON."""
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)

    def run(*words):
        capsys.readouterr()
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def providers(tmp_path, request, capsys):
    """Start a provider in a process of its device for each name; returns ``--provider`` words, with an absent third.

    A witness serves in a process, too, and the trust file names it and the absent provider. A parameter is the liar's
    lie, and the most FLOP that a provider accepts.
    """
    lie, most = getattr(request, "param", ("wrong-operator", 100_000))
    processes, words = [], []
    for number, name in enumerate(("client", *DEVICES, "absent", "notary")):
        write_keys(tmp_path / name, SigningKey.generate(bytes([number]) * 32))
    ports = {name: free_port() for name in (*DEVICES, "absent", "notary")}
    given = [f"--provider={name}={tmp_path / name}.pub" for name in (*DEVICES, "absent")]
    given += [f"--client={tmp_path / 'client'}.pub", f"--witness=notary={tmp_path / 'notary'}.pub"]
    assert main(["task", "trust", *given, "--out", str(tmp_path / "trust.json")]) == 0
    assert "honest, liar, absent, notary" in capsys.readouterr().out
    lines = ['key = "notary"', 'trust = "trust.json"', 'store = "seen"', f"port = {ports['notary']}", "tls = true"]
    lines += [f"provider = {json.dumps([f'{name}=http://127.0.0.1:{ports[name]}' for name in DEVICES])}", "least = 9"]
    (tmp_path / "notary.toml").write_text("\n".join(lines))
    for name, kind in DEVICES.items():
        lines = [f'tasks = "{name}.tasks"', f'key = "{name}"', f'lab = "{name}"', f'store = "{name}.store"']
        lines += ['witness = ["notary.pub"]'] if name == "honest" else []
        lines += ['referees = ["client.pub"]', f"port = {ports[name]}", f'device = "{kind}"', f"most-flop = {most}"]
        lines += [f'lie = "{lie}"', "lie-step = 3"] if name == "liar" else []
        (tmp_path / f"{name}.toml").write_text("\n".join(lines))
        command = [sys.executable, "-m", "analysis.cli", "serve", "provider", "--config", f"{name}.toml"]
        environment = device(kind).process_environment()
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path))
    command = [sys.executable, "-m", "analysis.cli", "serve", "witness", "--config", "notary.toml"]
    processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path))
    for name, process in zip((*DEVICES, "notary"), processes, strict=True):
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", ports[name])):
                break
            time.sleep(0.1)
    for name in (*DEVICES, "absent"):
        words += ["--provider", f"{name}=http://127.0.0.1:{ports[name]}"]
    words.append(f"--witness=notary=https://127.0.0.1:{ports['notary']}")
    yield words
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in processes] == [0, 0, 0], "they stop when they are asked to"


@pytest.mark.parametrize("providers", [("unseen-write", 10**9)], indirect=True, ids=["unseen-write"])
def test_the_right_answers_come_from_two_providers_of_whom_one_lies(providers, call, tmp_path, capsys):
    key, prompts, weights = tmp_path / "client", tmp_path / "prompts.txt", tmp_path / "weights.safetensors"
    model = preset("tiny-gpt").build()
    initialise(model, 1)
    weights.write_bytes(encode_state({f"weight/{name}": each for name, each in model.named_parameters()}))
    prompts.write_bytes("A list is\nimport\ndéf\n".encode())
    ordered = ["task", "infer", "--preset", "tiny-gpt", "--weights", weights, "--prompts", prompts, "--key", key]
    code, made = call(*ordered, "--tokens", 2, "--temperature", 0.8, "--out", tmp_path / "task")
    assert (code, made["steps"], made["seen"]["batches"]) == (0, 3, 3)
    declared = OrderFolder(tmp_path / "task", load_private(key).verifying).order.declaration
    assert made["seed"] == declared.seed > 1 << 40, "a new one"
    common = ["--key", key, "--trust", tmp_path / "trust.json", "--seconds", "60"]
    code, found = call("delegate", tmp_path / "task", *providers[:4], *common, "--out", tmp_path / "result")
    assert (code, found["outcome"], found["result"], found["guilty"]) == (0, "ACCEPT", "honest", ["liar"])
    assert (found["losses"][0]["step"], found["losses"][0]["operator"]) == (3, "chipwitness.commit_state")
    assert found["files"] == ["games.json", "outputs.json", "task.json", "verdict.json"]
    answers = json.loads((tmp_path / "result" / "outputs.json").read_text())
    assert [(each["request"], each["prompt"], len(each["tokens"])) for each in answers] == [
        (1, "A list is", 2),
        (2, "import", 2),
        (3, "déf", 2),
    ]
    trust = ["--trust", tmp_path / "trust.json", "--trust", tmp_path / "result" / "task.json"]
    code, again = call("verify", tmp_path / "result" / "games.json", *trust)
    assert (code, again["evidence"]["guilty"]) == (1, ["liar"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--preset", "tiny-gpt"], "give either RUN, or --preset NAME and --weights FILE"),
        (["own", "--weights", "prompts.txt"], "give either RUN, or --preset NAME and --weights FILE"),
        (["own"], "is not a finished run of `train --preset`"),
        (["--preset", "tiny-gpt", "--weights", "prompts.txt"], "holds no weights"),
        (["--preset", "tiny-gpt", "--weights", "none"], "cannot read none"),
        (["own", "--prompts", "none"], "cannot read none"),
    ],
)
def test_an_inference_that_cannot_be_ordered_is_refused_in_a_line(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    record(tmp_path, "own", steps=1)
    write_keys(tmp_path / "client", SigningKey.generate(bytes(32)))
    (tmp_path / "prompts.txt").write_text("import\n")
    common = ["task", "infer", "--prompts", "prompts.txt", "--key", "client", "--out", "task"]
    assert main([*common, *words]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("text", "why"), [("", "no prompt"), ("a\n\nb\n", "line 2 is empty")])
def test_a_file_without_prompts_is_refused(tmp_path, text, why):
    (tmp_path / "prompts.txt").write_text(text)
    with pytest.raises(CallerError, match=why):
        _prompts(tmp_path / "prompts.txt")


def test_the_right_result_comes_from_three_providers_of_whom_one_lies_and_one_is_absent(providers, call, tmp_path):
    own, key = record(tmp_path, "own"), tmp_path / "client"
    code, made = call("task", "make", own, "--key", key, "--out", tmp_path / "task")
    assert (code, made["steps"]) == (0, 5)
    common = ["--key", key, "--trust", tmp_path / "trust.json", "--seconds", "30"]
    words = ["delegate", tmp_path / "task", *providers[:2], *common, "--out", tmp_path / "none"]
    assert main([*map(str, words), "--witness", "nobody=https://x:1"]) == 2
    code, found = call("delegate", tmp_path / "task", *providers, *common, "--out", tmp_path / "result")
    assert (code, found["outcome"], found["result"], found["guilty"]) == (0, "ACCEPT", "honest", ["liar"])
    assert found["not_done"] == ["absent"]
    assert (found["losses"][0]["step"], found["losses"][0]["case"]) == (3, "output")
    games = json.loads((tmp_path / "result" / "games.json").read_bytes())["games"]
    assert {"witness" in each for each in games[0]["exchanges"]} == {True, False}, "the liar does not accept it"
    assert any("liar: asked without the witness notary" in each["text"] for each in found["reasons"])
    trained = RunFolder(own, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(own))).verifying)
    assert (tmp_path / "result" / "state.safetensors").read_bytes() == encode_state(trained.checkpoint(5))
    trust = ["--trust", tmp_path / "trust.json", "--trust", tmp_path / "result" / "task.json"]
    code, again = call("verify", tmp_path / "result" / "games.json", *trust)
    assert (code, again["evidence"]["guilty"], again["evidence"]["verifies"]) == (1, ["liar"], True)
    assert call("verify", tmp_path / "result" / "games.json", *trust[:2])[0] == 3

    more = call("task", "make", "--preset", "digits-cnn", "--steps", "1", "--key", key, "--out", tmp_path / "more")
    assert more[0] == 0
    code, refused = call("delegate", tmp_path / "more", *providers[:2], *common, "--out", tmp_path / "none")
    assert (code, refused["result"], refused["files"]) == (3, None, ["task.json", "verdict.json"])
    assert "this provider accepts at most 100000" in refused["losses"][0]["text"]

    again = tmp_path / "again"
    assert call("task", "make", own, "--key", key, "--out", again)[0] == 0
    name = max(again.glob("files/*"), key=lambda path: path.stat().st_size)
    name.write_bytes(name.read_bytes()[:-1] + b"?")
    code, refused = call("delegate", again, *providers[:2], *common, "--out", tmp_path / "nothing")
    assert code == 3
    assert "it was altered on its way" in refused["losses"][0]["text"]
    held = list((tmp_path / "honest.tasks").glob(f"*/files/{name.name}"))
    assert len(held) == 1, "only the task before has that file"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--provider=zz=http://x:1", "the trust file names no provider 'zz'"),
        ("--provider=a=ftp://x:1", "is not the address of a party"),
        ("--provider=a=http://x:1", "key as a witness's that is also a party's"),
    ],
    ids=range(3),
)
def test_a_mistake_in_a_witnesses_words_is_one_line(tmp_path, capsys, given, why):
    for number, name in enumerate(("client", "a")):
        write_keys(tmp_path / name, SigningKey.generate(bytes([number]) * 32))
    names = {"client": tmp_path / "client.pub", "provider": f"a={tmp_path / 'a.pub'}", "out": tmp_path / "trust.json"}
    witness = [f"--witness=n={tmp_path / 'a.pub'}"] if "party's" in why else []
    code = main(["task", "trust", *(f"--{name}={value}" for name, value in names.items()), *witness])
    if not witness:
        words = [f"--key={tmp_path / 'a'}", f"--trust={tmp_path / 'trust.json'}", f"--store={tmp_path / 's'}"]
        code = main(["serve", "witness", *words, given, "--port", "80"])
    shown = capsys.readouterr().err
    assert (code, shown.count("\n")) == (2, 1)
    assert why in shown
