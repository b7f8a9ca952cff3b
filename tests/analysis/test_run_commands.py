"""The command line: exit codes, one clear line for mistakes, JSON keys."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim.errors import DeviceError
from inspector.devices import DEVICES


@pytest.fixture(autouse=True)
def _stay_in_this_process(monkeypatch, kept_devices):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)


@pytest.fixture
def saved(honest, tmp_path):
    """A copy of the honest run with its trust file beside it."""
    run = tmp_path / "run"
    shutil.copytree(honest.run, run)
    trust_path(run).write_text(json.dumps(honest.trust.to_json()))
    return run


def call(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    code: int | str | None
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert isinstance(code, int)
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


NOW = ("--now", "2026-01-01T00:30:00Z")


def test_train_verify_and_inspect(capsys, tmp_path):
    run = tmp_path / "run"
    code, out, _ = call(capsys, "train", "--preset", "digits-cnn", "--steps", 4, "--chips", 2, "--out", run, "--json")
    assert code == 0
    data = json.loads(out)
    assert {"state_digest", "steps", "rounding_log_bytes"} <= set(data)
    assert data["steps"] == 4
    code, out, _ = call(capsys, "verify", run, "--trust", trust_path(run), "--json")
    assert code == 0
    assert json.loads(out)["outcome"] == "ACCEPT"
    words = ("inspect", run, "--trust", trust_path(run), "--samples", 2, "--seed", "x", "--device", "sse41", "--json")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert set(json.loads(out)) == {"outcome", "reasons", "evidence"}
    memory = tmp_path / "memory.json"
    for _ in range(2):
        assert call(capsys, *words, "--memory", memory)[0] == 0
        assert len(json.loads(memory.read_text())["chips"]) == 2
    memory.write_text("{}")
    code, _, err = call(capsys, *words, "--memory", memory)
    assert code == 2
    assert err == f"chipwitness inspect: cannot read the inspector's memory {memory}: it has an unknown format\n"


def test_output_that_nobody_reads_to_its_end_is_no_traceback():
    words = [sys.executable, "-m", "analysis.cli", "samples", "--flop", "3e23", "--chips", "1000", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"chipwitness samples: cannot write to standard output: Broken pipe\n"
    assert process.returncode == 3


def test_same_seed_gives_the_same_run(capsys, tmp_path):
    digests = set()
    for name in ("a", "b"):
        words = ("train", "--preset", "digits-cnn", "--steps", 2, "--seed", 9, "--out", tmp_path / name, "--json")
        digests.add(json.loads(call(capsys, *words)[1])["state_digest"])
    words = ("train", "--preset", "digits-cnn", "--steps", 2, "--seed", 8, "--out", tmp_path / "c", "--json")
    other = json.loads(call(capsys, *words)[1])["state_digest"]
    assert len(digests) == 1
    assert other not in digests


def test_training_reads_the_users_own_text(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    words = ("train", "--preset", "tiny-gpt", "--steps", 1, "--batch-size", 2, "--data", text)
    code, _, err = call(capsys, *words, "--out", tmp_path / "run")
    assert code == 0, err


def test_lies_are_listed(capsys):
    code, out, _ = call(capsys, "train", "--lie", "list", "--json")
    assert code == 0
    assert {"change-sample", "extra-steps", "edited-chip-log", "forged-initialisation", "truncate-log"} <= set(
        json.loads(out)
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "--preset", "huge-gpt", "--out", "RUN"), "unknown preset 'huge-gpt'"),
        (("train", "--out", "RUN"), "give --preset"),
        (("train", "--preset", "tiny-gpt"), "give either --out RUN"),
        (("train", "--preset", "tiny-gpt", "--data", "/nowhere/text", "--out", "RUN"), "cannot read the text"),
        (("train", "--preset", "tiny-gpt", "--data", "/", "--out", "RUN"), "cannot read the text"),
        (("train", "--preset", "digits-cnn", "--data", "/etc/hostname", "--out", "RUN"), "takes no data file"),
        (("train", "--preset", "digits-cnn", "--chips", "0", "--out", "RUN"), "chips"),
        (("train", "--preset", "digits-cnn", "--chips", "x", "--out", "RUN"), "invalid count value"),
        (("train", "--preset", "digits-cnn", "--steps", "0", "--out", "RUN"), "steps must be at least 1"),
        (("train", "--preset", "digits-cnn", "--batch-size", "9999", "--out", "RUN"), "fewer than one batch"),
        (("train", "--preset", "digits-cnn", "--learning-rate", "nan", "--out", "RUN"), "learning_rate"),
        (("train", "--preset", "digits-cnn", "--learning-rate", "-1", "--out", "RUN"), "learning_rate"),
        (("train", "--preset", "digits-cnn", "--snapshot-rate", "2", "--out", "RUN"), "snapshot rate"),
        (("train", "--preset", "digits-cnn", "--snapshot-rate", "1/0", "--out", "RUN"), "not a rate"),
        (("train", "--preset", "digits-cnn", "--seed", "-1", "--out", "RUN"), "seed"),
        (("train", "--preset", "digits-cnn", "--lie", "white", "--out", "RUN"), "unknown lie"),
        (
            ("train", "--preset", "digits-cnn", "--lie", "change-sample", "--lie-step", "17", "--out", "RUN"),
            "--lie-step must lie in 1 … 16",
        ),
        (("train", "--preset", "digits-cnn", "--lab", "../x", "--out", "RUN"), "a lab's name"),
        (("train", "--preset", "digits-cnn", "--hours", "0", "--out", "RUN"), "--hours"),
        (("train", "--resume", "RUN"), "no run folder"),
        (("verify", "RUN", "--trust", "TRUST"), "no run folder"),
        (("inspect", "RUN", "--trust", "TRUST", "--samples", "1"), "no run folder"),
        (("replay", "RUN", "--segment", "0"), "no run folder"),
        (("dispute", "RUN", "RUN", "--trust", "TRUST"), "no run folder"),
        (("verify",), "required"),
        (("nonsense",), "there is no 'nonsense'"),
        ((), "give a command"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, tmp_path, words, text):
    places = {"RUN": tmp_path / "run", "TRUST": tmp_path / "trust.json"}
    code, out, err = call(capsys, *(places.get(word, word) for word in words))
    assert code == 2
    assert out == ""
    assert text in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("inspect", "RUN", "--trust", "TRUST", "--samples", "4", *NOW), "cannot draw 4 of 3"),
        (("inspect", "RUN", "--trust", "TRUST", "--samples", "0", *NOW), "cannot draw 0 of 3"),
        (("inspect", "RUN", "--trust", "TRUST", "--samples", "1", "--device", "abacus", *NOW), "unknown device"),
        (("inspect", "RUN", "--trust", "TRUST", "--samples", "1", "--segments", "0", *NOW), "at least one segment"),
        (("inspect", "RUN", "--trust", "NOWHERE", "--samples", "1"), "cannot read the trust file"),
        (("verify", "RUN", "--trust", "README"), "not JSON"),
        (("verify", "RUN", "--trust", "TRUST", "--now", "yesterday"), "not a time"),
        (("replay", "RUN", "--segment", "7"), "no segment 7"),
        (("replay", "RUN", "--segment", "0", "--device", "abacus"), "unknown device"),
        (("train", "--preset", "digits-cnn", "--out", "RUN"), "exists already"),
        (("dispute", "RUN", "RUN", "--trust", "TRUST"), "lab folder"),
    ],
)
def test_mistakes_beside_a_good_run(capsys, saved, words, text):
    text_file = saved.parent / "readme.txt"
    text_file.write_text("not JSON")
    places = {"RUN": saved, "TRUST": trust_path(saved), "NOWHERE": saved.parent / "none", "README": text_file}
    code, out, err = call(capsys, *(places.get(word, word) for word in words))
    assert (code, out) == (2, ""), err
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["{}", "[]", '{"format": "chipwitness/trust/1"}', "null"])
def test_malformed_trust_file_is_the_callers_mistake(capsys, saved, content):
    trust_path(saved).write_text(content)
    code, _, err = call(capsys, "verify", saved, "--trust", trust_path(saved))
    assert code == 2
    assert err.count("\n") == 1


def test_each_malformed_field_of_a_trust_file_is_the_callers_mistake(capsys, saved, honest):
    for key in honest.trust.to_json():
        for value in (None, 7, "x", [], {}, [7], {"a": 7}):
            data = {**honest.trust.to_json(), key: value}
            lawful = (("minimum_security_version", 7), ("verifier", "x"), ("snapshot_algorithm", "x"))
            if (key, value) in (*lawful, ("inspectorates", []), ("countersigned", []), ("clocks", {})):
                continue
            trust_path(saved).write_text(json.dumps(data))
            code, _, err = call(capsys, "verify", saved, "--trust", trust_path(saved))
            assert code == 2, (key, value, err)


def test_a_trust_file_inside_the_run_is_taken_for_none(capsys, saved):
    inside = saved / "trust.json"
    shutil.copy(trust_path(saved), inside)
    code, out, err = call(capsys, "verify", saved, "--trust", trust_path(saved), *NOW)
    assert (code, "ignored in" in out and "trust.json" in out) == (0, True), out + err


def test_a_run_that_is_not_as_it_was_signed_is_a_damaged_copy(capsys, saved):
    (saved / "metadata.json").write_bytes(b"{}")
    for words in (("verify", saved), ("inspect", saved, "--samples", 1), ("replay", saved, "--segment", 0)):
        code, out, err = call(capsys, *words, "--trust", trust_path(saved))
        assert (code, "damaged" in out + err) == (3, True), out + err


def test_verdict_is_printed_for_people(capsys, saved):
    code, out, _ = call(capsys, "verify", saved, "--trust", trust_path(saved), *NOW)
    assert code == 0
    assert out.startswith("ACCEPT\n")


def test_devices_lists_different_fingerprints(capsys, monkeypatch, devices):
    """Every device has its line; some are asked who they are, and the others break."""
    asked = ("native", "sse41", "emulated-tensor-core")

    def run(name, job):
        if name not in asked:
            raise DeviceError("it broke")
        return devices.run(name, job)

    monkeypatch.setattr("inspector.replay.pool.run_worker", run)
    code, out, _ = call(capsys, "devices", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert list(rows) == list(DEVICES)
    assert all({"name", "kind", "fingerprint"} <= set(row) for row in rows.values())
    assert len({rows[name]["fingerprint"] for name in asked} - {None}) == 3
    assert all(rows[name]["status"] == "ready" for name in asked)
    assert (rows["avx2"]["fingerprint"], rows["avx2"]["status"]) == (None, "it broke")


def test_dispute_from_the_command_line(capsys, tmp_path):
    options = ("train", "--preset", "digits-cnn", "--steps", 4, "--chips", 2, "--numerics", "exact")
    call(capsys, *options, "--lab", "lab-a", "--out", tmp_path / "a")
    call(capsys, *options, "--lab", "lab-b", "--out", tmp_path / "b", "--lie", "change-sample", "--lie-step", 2)
    words = ("dispute", tmp_path / "a", tmp_path / "b", "--json")
    code, out, err = call(capsys, *words, "--trust", tmp_path / "a.trust.json", "--trust", tmp_path / "b.trust.json")
    assert code == 1, err
    data = json.loads(out)
    assert (data["step"], data["guilty"], data["operators_executed"]) == (2, "b", 0)
    assert {"operator", "rounds", "bytes", "outcome"} <= set(data)


def test_dispute_about_loops_from_the_command_line(capsys, tmp_path, record_loop):
    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    for name, options in (("a", {}), ("b", {"lie": "wrong-operator", "lie_step": 2})):
        model = torch.nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [torch.full((2, 3), 1.0 + step) for step in range(3)]
        record_loop(model, optimizer, batches, body, name=name, lab=f"lab-{name}", **options)
    words = ("dispute", tmp_path / "a", tmp_path / "b", "--json")
    code, out, err = call(capsys, *words, "--trust", tmp_path / "a.trust.json", "--trust", tmp_path / "b.trust.json")
    assert code == 1, err
    data = json.loads(out)
    assert (data["step"], data["guilty"], data["operators_executed"]) == (2, "b", 1)
    assert data["operator"] == "aten.addmm.default"
