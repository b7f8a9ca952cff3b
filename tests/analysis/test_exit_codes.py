"""Exit code 1 says something about evidence: what goes wrong on this side is one line, and 3, 2 or 130."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.commands.dispatch import build_parser
from analysis.commands.runs import trust_path
from firmware_sim.evidence import SigningKey
from inspector.registry.keyfiles import write_keys
from tests.denied import longest_file, permissions_bind

PARSER: Any = build_parser()
COMMANDS = sorted(PARSER._subparsers._group_actions[0].choices)
NOW = ("--now", "2026-01-01T00:30:00Z")
TRUST = ("--trust", "{trust}")
SMALL = ("--flop", "3e23", "--chips", "1000")
PRINTING = {
    "alarms": (*SMALL, "--refusals", "0.01", "--prior", "0.1"),
    "campaign": ("--list",),
    "check": ("{loop}",),
    "chip": ("show", "{lab}"),
    "curve": ("stretch", "--out", "{out}.svg"),
    "declare": ("show", "{run}"),
    "dispute": ("{run}", "{other}", *TRUST),
    "docs": ("--out", "{out}", "--no-api"),
    "evidence": ("split", *SMALL[:2]),
    "explore": ("--out", "{out}.html", "--campaign", "paper-table-1", "--trials", "5"),
    "fsck": ("{run}",),
    "inspect": ("{run}", *TRUST, "--samples", "1", "--device", "sse41", *NOW),
    "odds": ("{run}", *TRUST),
    "operators": (),
    "plan": ("--flop", "3e23", "--site", "a=1000"),
    "program": ("review", "{run}", *TRUST),
    "registry": ("keygen", "{out}"),
    "replay": ("{run}", "--segment", "0", *TRUST),
    "rules": ("digests", "{run}/data/order.safetensors"),
    "run": ("stats", "{run}"),
    "samples": SMALL,
    "table": (),
    "task": ("trust", "--client", "{client}.pub", "--provider", "lab-1={client}.pub", "--out", "{out}"),
    "train": ("--preset", "digits-cnn", "--steps", "1", "--chips", "1", "--batch-size", "2", "--out", "{out}"),
    "verify": ("{run}", *TRUST, *NOW),
    "world": ("init", "{out}"),
}
"""Words with which a command prints something within a second."""
LONG = {"bench", "demo", "devices", "drift", "ranks"}
"""They print as the others do, after more work."""
READING = {
    "chip": ("show", "{lab}"),
    "declare": ("show", "{run}"),
    "drift": ("{run}",),
    "explore": ("{run}", "--out", "{out}.html"),
    "odds": ("{run}", *TRUST),
    "program": ("show", "{run}"),
    "replay": ("{run}", "--segment", "0", *TRUST),
    "run": ("stats", "{run}"),
}
WRITING = {name: words for name, words in PRINTING.items() if any("{out}" in word for word in words)}


@pytest.fixture(autouse=True)
def _stay_in_this_process(monkeypatch, kept_devices):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    monkeypatch.delenv("CHIPWITNESS_TRACEBACK", raising=False)


@pytest.fixture
def place(honest, tmp_path):
    """What the words name: an honest run with trust file and lab, a loop, and where to write."""
    run = tmp_path / "run"
    shutil.copytree(honest.run, run)
    for name in ("run.lab", "other.lab"):
        shutil.copytree(honest.run.with_name("run.lab"), tmp_path / name)
    shutil.copytree(honest.run, tmp_path / "other")
    trust_path(run).write_text(json.dumps(honest.trust.to_json()))
    loop = tmp_path / "loop.py"
    loop.write_text(
        "import torch, monitor\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "recorder = monitor.Recorder(model, optimizer, out='never', lab='lab-1')\n"
        "for _ in range(2):\n"
        "    batch = {'x': torch.ones(3, 2)}\n"
        "    with recorder.step(batch) as step:\n"
        "        optimizer.zero_grad()\n"
        "        loss = model(batch['x']).pow(2).mean()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        step.commit(loss=loss)\n"
    )
    return {
        "run": run,
        "other": tmp_path / "other",
        "trust": trust_path(run),
        "lab": tmp_path / "run.lab",
        "loop": loop,
        "client": write_keys(tmp_path / "client", SigningKey.generate(bytes(32))).with_suffix(""),
        "out": tmp_path / "made",
    }


@pytest.fixture
def say(place, capsys):
    """Run a command in this process; its exit code and what it printed."""

    def run(*words: str, **names: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code: int | str | None
        try:
            code = main([str(word).format(**{**place, **names}) for word in words])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert isinstance(code, int)
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("chipwitness")]


def test_every_command_is_in_the_table():
    of_several_machines = {"serve", "delegate"}
    assert set(PRINTING) | LONG | of_several_machines >= set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["pln"], "did you mean plan?"),
        (["plan", "--flopp", "1e25"], "there is no --flopp (did you mean --flop?)"),
        (["samples", *SMALL, "--refusal", "0", "--periodd", "30"], "there is no --periodd (did you mean --period?)"),
        (["evidence", "sit"], "did you mean site?"),
        ([], "give a command: `demo` shows the main job, `--help` lists all"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(words, nearest, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert nearest in said.err


def test_help_lists_each_command_and_loads_none(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in COMMANDS)
    lines = "import sys; from analysis.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code = lines + "print(sorted({'numpy', 'torch', 'cryptography', 'scipy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n")


@pytest.mark.parametrize("command", sorted(PRINTING))
def test_output_that_cannot_be_written(command, say, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("sys.__stdout__", full)
        code, _, err = say(command, *PRINTING[command])
        monkeypatch.undo()
    told = f"chipwitness {command}: cannot write to standard output: No space left on device"
    assert (code, lines(err)) == (3, [told])


def test_no_output_at_all(say, monkeypatch, place):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        assert main(["table"]) == 3
        patch.setattr("sys.stderr", None)
        assert main(["table"]) == 3
        sys.stderr.close()
    assert say("table")[0] == 0


def test_a_process_whose_output_is_closed():
    script = "import sys; from analysis.cli import main; sys.exit(main(sys.argv[1:]))"
    for redirection, told in ((">&-", "is closed"), (">/dev/full", "No space left"), ("| true", "Broken pipe")):
        words = f'set -o pipefail; sleep 0.1 | "{sys.executable}" -c "{script}" table --json {redirection}'
        done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n"), told in done.stderr) == (3, 1, True), done


@pytest.mark.parametrize("command", sorted(READING))
def test_a_folder_that_may_not_be_read(command, say, place):
    named = place["lab"] if "{lab}" in READING[command] else place["run"]
    named.chmod(0)
    try:
        with permissions_bind():
            code, out, err = say(command, *READING[command])
    finally:
        named.chmod(0o755)
    assert (code, "Permission denied" in out + err, named.name in out + err) == (3, True, True), out + err


@pytest.mark.parametrize("path", ["manifest.json", "journal.tsv", "metadata.json", "logs/00000001.rlog", "chips"])
def test_a_file_of_a_run_that_may_not_be_read_is_nobodys_fault(path, say, place):
    (place["run"] / path).chmod(0)
    try:
        with permissions_bind():
            for words in (("verify", "{run}", *TRUST, *NOW), ("inspect", "{run}", *TRUST, "--samples", "1", *NOW)):
                code, out, err = say(*words)
                assert (code, out.splitlines()[0]) == (3, "INCONCLUSIVE"), out + err
                assert f"cannot read run/{path}: Permission denied" in out
            code, out, err = say("fsck", "{run}")
            assert (code, f"cannot read {path}" in err) == (3, True), out + err
    finally:
        (place["run"] / path).chmod(0o755)
    assert say("fsck", "{run}")[0] == 0
    (place["run"] / path).rename(place["out"])
    assert say("verify", "{run}", *TRUST, *NOW)[0] == 3  # gone: this copy is damaged


def test_a_folder_without_a_run_is_the_callers_mistake(say, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    for words in (("verify", "{at}"), ("inspect", "{at}", "--samples", "1"), ("replay", "{at}", "--segment", "0")):
        for at in (tmp_path / "empty", tmp_path / "nowhere"):
            assert say(*words, *TRUST, at=at)[0] == 2
    for name in ("fsck", "dispute", "ranks", "drift"):
        given = (name, "{at}", *(["{run}"] if name == "dispute" else []), *TRUST[: 2 * (name != "drift")])
        assert say(*given, at=tmp_path / "empty")[0] == 2


@pytest.mark.parametrize("command", sorted(WRITING))
def test_an_output_that_cannot_be_made(command, say, place, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    code, out, err = say(command, *WRITING[command], out=place["loop"] / "made")
    assert (code, len(lines(err))) == (2, 1), out + err
    with permissions_bind():
        code, out, err = say(command, *WRITING[command], out=closed / "made")
    assert (code, len(lines(err)), "Permission denied" in err) == (3, 1, True), out + err
    with longest_file(5):
        code, out, err = say(command, *WRITING[command])
    assert (code, len(lines(err)), "File too large" in err) == (3, 1, True), out + err
    left = {path for path in tmp_path.rglob("made*") if path.is_file() or command == "train"}
    assert not left
    assert not list(closed.iterdir())


@pytest.mark.parametrize("size", [300, 2_000, 6_000, 20_000, 40_000])
def test_a_disk_that_is_full_in_mid_training(size, say, place):
    words = ("train", "--preset", "digits-cnn", "--steps", "3", "--chips", "1", "--batch-size", "2", "--json")
    with longest_file(size):
        code, out, err = say(*words, "--out", "{out}")
    assert (code, len(lines(err)), "File too large" in err) == (3, 1, True), out + err
    again = ("--resume", "{out}") if place["out"].exists() else ("--out", "{out}")
    code, out, err = say(*words, *again)
    assert code == 0, err
    digest = json.loads(out)["state_digest"]
    assert say("fsck", "{out}")[0] == 0
    assert json.loads(say(*words, "--out", "{out}.other")[1])["state_digest"] == digest


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_an_interrupt_in_mid_training(share, say, place, monkeypatch):
    """Whatever has happened by then, the run goes on from there, or its name is free."""
    words = ("train", "--preset", "digits-cnn", "--steps", "4", "--chips", "1", "--batch-size", "2", "--json")
    calls = {"write": 0, "stop": 0}
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        calls["write"] += 1
        if 0 < calls["stop"] <= calls["write"] and threading.current_thread() is threading.main_thread():
            calls["stop"] = 0  # Python interrupts the main thread alone
            raise KeyboardInterrupt
        return real(descriptor, data)

    monkeypatch.setattr("os.write", write)
    digest = json.loads(say(*words, "--out", "{out}.other")[1])["state_digest"]
    calls.update(stop=round(share * calls["write"]), write=0)
    code, out, err = say(*words, "--out", "{out}")
    assert (code, out, lines(err)) == (130, "", ["chipwitness train: interrupted"]), err
    again = ("--resume", "{out}") if place["out"].exists() else ("--out", "{out}")
    assert json.loads(say(*words, *again)[1])["state_digest"] == digest
    assert say("fsck", "{out}")[0] == 0


def test_an_interrupt_while_devices_replay_leaves_no_process(place):
    """The main process alone is interrupted, as by `kill -INT`: it ends its devices, and waits for none of them."""
    script = "import signal as s, sys; s.signal(s.SIGINT, s.default_int_handler)\n"  # a shell's job ignores it
    script += "from analysis.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, "inspect", place["run"], *TRUST[:1], place["trust"], "--samples", "1", *NOW]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "chipwitness inspect: interrupted\n")
    assert started
    until = time.monotonic() + 120  # one that was only begun ends as soon as it looks for work
    while any(Path(f"/proc/{child}").exists() for child in started) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [child for child in started if Path(f"/proc/{child}").exists()]


def test_a_bug_is_one_line_that_asks_for_a_report(say, monkeypatch):
    class Panic(BaseException):
        """As libraries written in Rust raise it."""

    for error, text in (
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            "not enough memory",
        ),
        (MemoryError(), "not enough memory"),
        (OSError(12, "Cannot allocate memory", "x"), "not enough memory"),
        (RecursionError("too deep"), "internal error: RecursionError: too deep (please report it"),
        (Panic("called unwrap"), "internal error: Panic: called unwrap (please report it"),
        (ImportError("no module"), "a library that this needs cannot be loaded: no module"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "internal error: UnicodeDecodeError"),
    ):

        def broken(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("inspector.inspection.trust.Trust.load", broken)
        code, _, err = say("verify", "{run}", *TRUST)
        assert (code, len(err.splitlines()), text in err) == (3, 1, True), err


@pytest.mark.parametrize("command", ["verify", "table"])
def test_a_library_that_is_broken(command, tmp_path):
    """One that a command loads first, and one that all of them load."""
    name = {"verify": "safetensors", "table": "cryptography"}[command]
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('libstrange.so is missing')\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from analysis.cli import main; "
    script += "sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, command, *([str(tmp_path), "--trust", "x"] if command == "verify" else [])]
    (tmp_path / "manifest.json").touch()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n"), "libstrange.so is missing" in done.stderr) == (3, 1, True), done


def test_a_key_that_stands_twice(say, place, tmp_path):
    text = place["trust"].read_text()
    place["trust"].write_text(
        text.replace('"minimum_security_version"', '"nonce": "00", "minimum_security_version"', 1)
    )
    code, _, err = say("verify", "{run}", *TRUST, *NOW)
    assert (code, "the key 'nonce' occurs twice" in err) == (2, True), err
    for words in (
        ("inspect", "{run}", *TRUST, "--samples", "1", "--memory", "{twice}"),
        ("explore", "{run}", "--verdict", "{twice}", "--out", "{out}.html"),
        ("curve", "evasion", "--results", "{twice}", "--out", "{out}.svg"),
    ):
        place["trust"].write_text(text)
        (tmp_path / "twice").write_text('{"format": "a", "rows": [], "format": "b"}')
        code, _, err = say(*words, twice=tmp_path / "twice")
        assert (code, "'format' occurs twice" in err) == (2, True), err
