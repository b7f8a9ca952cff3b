"""From ``inspect --checkpoints`` over ``chip prune`` to the next inspection, on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from analysis.cli import main
from firmware_sim import parse_log

CHIPS = ("lab-chip-0000", "lab-chip-0001")
FILE = "checkpoint.json"


@pytest.fixture
def ask(capsys, kept_devices, monkeypatch):
    """Runs a command in this process and returns exit code and output."""
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out + said.err

    return call


def train(ask, run, *words):
    few = ("--preset", "digits-cnn", "--steps", 4, "--chips", 2, "--checkpoint-every", 2, "--lab", "lab")
    assert ask("train", *few, "--snapshot-rate", "1/2", "--out", run, *words)[0] == 0
    return ("--trust", f"{run}.trust.json", "--samples", 2, "--device", "sse41", "--segments", 1)


def test_a_chip_is_inspected_pruned_and_inspected_again(ask, tmp_path):
    key, other, signed = tmp_path / "key", tmp_path / "other", tmp_path / "signed"
    for path in (key, other):
        assert ask("registry", "keygen", path)[0] == 0
    first, second = tmp_path / "first", tmp_path / "second"
    words = train(ask, first, "--inspectorate", f"{key}.pub", "--seed", 1)
    for wrong, said in (
        (("--checkpoints", signed), "given together"),
        (("--prune-key", key), "given together"),
        (("--checkpoints", signed, "--prune-key", other), "names no inspectorate with the key"),
    ):
        code, shown = ask("inspect", first, *words, *wrong)
        assert (code, said in shown) == (2, True), shown
    code, shown = ask("inspect", first, *words, "--checkpoints", signed, "--prune-key", key, "--json")
    verdict = json.loads(shown)
    assert (code, sorted(verdict["evidence"]["checkpoints"])) == (0, sorted(CHIPS))
    sizes = {chip["chip"]: chip["log_size"] for chip in verdict["evidence"]["chips"]}
    assert verdict["evidence"]["checkpoints"] == sizes

    lab = f"{first}.lab"
    for wrong, said in (
        (("--checkpoints", tmp_path), "holds no checkpoint of a chip"),
        (("--checkpoints", signed, "--chip", "x"), "there is no chip x"),
    ):
        code, shown = ask("chip", "prune", lab, *wrong)
        assert (code, said in shown) == (2, True), shown
    swapped = tmp_path / "swapped"
    for chip, others in zip(CHIPS, reversed(CHIPS), strict=True):
        shutil.copytree(signed / chip, swapped / others)
    code, shown = ask("chip", "prune", lab, "--checkpoints", swapped)
    assert code == 1
    assert shown.count("the log checkpoint belongs to another chip") == 2
    code, shown = ask("chip", "prune", lab, "--checkpoints", signed, "--json")
    assert (code, {page["chip"]: page["log_start"] for page in json.loads(shown)}) == (0, sizes)

    words = train(ask, second, "--after", first, "--seed", 2)
    code, shown = ask("inspect", second, *words)
    assert code == 0, shown
    assert "the logs of 2 drawn chips begin after checkpoints that an inspectorate signed" in shown
    shown_of_each = [("show", second), ("log", second), ("show", lab)]
    for action, place in shown_of_each:
        code, shown = ask("chip", action, place, "--chip", CHIPS[0])
        assert code == 0, shown
        assert f"from record {sizes[CHIPS[0]]} on, behind a checkpoint at boot 1" in shown
    [page] = json.loads(ask("chip", "show", second, "--chip", CHIPS[0], "--json")[1])
    assert (page["log_start"], page["problem"]) == (sizes[CHIPS[0]], None)
    assert page["checkpoint_signer"].startswith("sha256:")
    folder = second / "chips" / CHIPS[0]
    assert ask("chip", "verify-log", folder / "log.bin")[0] == 0
    assert ask("fsck", second)[0] == 0

    (folder / FILE).write_bytes((swapped / CHIPS[0] / FILE).read_bytes())
    assert ask("chip", "verify-log", folder / "log.bin")[0] == 1
    code, shown = ask("chip", "show", folder)
    assert (code, "belongs to another chip" in shown) == (1, True)
    code, shown = ask("verify", second, "--trust", f"{second}.trust.json")
    assert (code, "chips/lab-chip-0000/checkpoint.json was altered" in shown) == (3, True), shown
    (folder / FILE).unlink()
    for words in (("verify-log", folder / "log.bin"), ("show", folder), ("log", folder)):
        assert ask("chip", *words)[0] == 1
    assert parse_log((folder / "log.bin").read_bytes())[0].counter == sizes[CHIPS[0]]


def test_a_verdict_on_pruned_chips_stands_alone(ask, tmp_path):
    """The bundle holds the checkpoint, and a third party needs no more of what came before."""
    for name in ("key", "cluster"):
        assert ask("registry", "keygen", tmp_path / name)[0] == 0
    first, second, key = tmp_path / "first", tmp_path / "second", tmp_path / "key"
    words = train(ask, first, "--inspectorate", f"{key}.pub", "--seed", 1)
    assert ask("inspect", first, *words, "--checkpoints", tmp_path / "signed", "--prune-key", key)[0] == 0
    assert ask("chip", "prune", f"{first}.lab", "--checkpoints", tmp_path / "signed")[0] == 0
    words = train(ask, second, "--after", first, "--seed", 2)
    bundle = tmp_path / "bundle.json"
    code, shown = ask(
        "inspect", second, *words, "--bundle", bundle, "--key", key, "--cluster-key", tmp_path / "cluster"
    )
    assert code == 0, shown
    items = json.loads(bundle.read_bytes())["items"]
    assert {f"chips/{chip}/{FILE}" for chip in CHIPS} <= set(items)
    trust = ("--trust", f"{second}.trust.json", "--cluster", tmp_path / "cluster.pub")
    code, shown = ask("verify", bundle, *trust)
    assert code == 0, shown


def test_chips_with_a_real_inspectorate_take_no_simulated_beacons(ask, tmp_path):
    assert ask("registry", "keygen", tmp_path / "key")[0] == 0
    few = ("train", "--preset", "digits-cnn", "--steps", 2, "--inspectorate", tmp_path / "key.pub")
    code, shown = ask(*few, "--beacon-every", 1, "--out", tmp_path / "run")
    assert (code, "accept time beacons of another inspectorate" in shown) == (2, True)
    code, shown = ask(*few, "--after", tmp_path / "no", "--out", tmp_path / "run")
    assert (code, "leave out --inspectorate" in shown) == (2, True)
