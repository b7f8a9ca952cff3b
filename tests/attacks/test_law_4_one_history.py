"""Law 4: what was judged stays judged: a lab cannot swap the folder after a REJECT."""

from __future__ import annotations

import json
import shutil

import pytest

from analysis.cli import main
from firmware_sim.evidence import EMPTY_ROOT, canonical
from inspector.bundle.checker import check_bundle
from inspector.bundle.contents import Bundle, heads_in
from inspector.inspection.verdict import Outcome
from inspector.registry.keyfiles import write_keys
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.manifest import Extent, Manifest
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE, made

pytestmark = pytest.mark.usefixtures("kept_devices")


@pytest.fixture
def swapped(make_run, devices):
    """What was made of a lying run, and the clean one of the same run id that then lies in its place."""
    cheat = make_run("run", lie="wrong-operator", lie_step=2, numerics="exact")
    first = made(cheat, devices)
    assert first.verdict.outcome is Outcome.REJECT
    shutil.rmtree(cheat.run)
    shutil.rmtree(lab_path(cheat.run))
    return first, make_run("run", numerics="exact")


def test_a20_a_folder_swapped_after_a_rejection(swapped, devices):
    first, clean = swapped
    with off("one history"):
        assert made(clean, devices, earlier=heads_in(first.data)).verdict.outcome is Outcome.ACCEPT
    again = made(clean, devices, earlier=heads_in(first.data))
    assert again.verdict.evidence["runs"][0]["run_id"] == first.verdict.evidence["runs"][0]["run_id"]
    assert again.verdict.outcome is Outcome.REJECT
    assert "one run has two histories" in again.verdict.reasons[0].text
    shown = check_bundle(again.data, again.trust)
    assert (shown.outcome, shown.evidence["verifies"]) == (Outcome.REJECT, True)
    assert "signed two heads of run" in shown.reasons[0].text
    assert check_bundle(first.data, first.trust).outcome is Outcome.REJECT  # still, with its folder gone


def test_a20_the_same_folder_goes_on_from_itself(make_run, devices):
    honest = make_run("run")
    first = made(honest, devices)
    assert made(honest, devices, earlier=heads_in(first.data)).verdict.outcome is Outcome.ACCEPT


def test_a20_through_the_command_line(swapped, tmp_path, capsys):
    first, clean = swapped
    for name, key in (("inspectorate.key", INSPECTORATE), ("cluster.key", CLUSTER)):
        write_keys(tmp_path / name, key)
    (tmp_path / "trust.json").write_text(json.dumps(clean.trust.to_json()))
    (tmp_path / "first.json").write_bytes(first.data)
    trust = ["--trust", str(tmp_path / "trust.json")]
    words = ["inspect", str(clean.run), *trust, "--samples", "2", "--seed", "x", "--device", "sse41"]
    words += ["--now", "2026-01-01T00:30:00Z", "--earlier", str(tmp_path / "first.json")]
    assert main([*words, "--bundle", str(tmp_path / "second.json")]) == 2
    assert "have to be given together" in capsys.readouterr().err
    keys = ["--key", str(tmp_path / "inspectorate.key"), "--cluster-key", str(tmp_path / "cluster.key")]
    assert main([*words, *keys, "--bundle", str(tmp_path / "second.json")]) == 1
    assert "one run has two histories" in capsys.readouterr().out
    shutil.rmtree(clean.run)
    public = ["--inspectorate", str(tmp_path / "inspectorate.key.pub"), "--cluster", str(tmp_path / "cluster.key.pub")]
    assert main(["verify", str(tmp_path / "second.json"), *trust, *public, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["evidence"]["verifies"] is True
    assert main(["verify", str(tmp_path / "second.json"), *trust]) == 1
    assert "the bundle does not verify" in capsys.readouterr().out


def test_a20_a_first_head_of_another_root_is_shown_without_any_folder(make_run, devices):
    """A head before the first step that is not of an empty log: its lab signed what no run can go on from."""
    run = make_run("run", steps=3)
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run.run)))
    run_id = made(run, devices).verdict.evidence["runs"][0]["run_id"]
    journal = Extent(records=1, files=1, bytes=1, sha256="0" * 64)
    right, wrong = (Manifest(run=run_id, root=root, journal=journal).seal(key) for root in (EMPTY_ROOT, b"1" * 32))
    assert made(run, devices, earlier=[right]).verdict.outcome is Outcome.ACCEPT
    one = made(run, devices, earlier=[wrong])
    assert one.verdict.outcome is Outcome.REJECT
    shown = check_bundle(one.data, one.trust)
    assert (shown.outcome, shown.evidence["verifies"]) == (Outcome.REJECT, True)


def test_a27_an_empty_log_of_another_root_frames_nobody(make_run, devices):
    """The lab's first head, before its first step, is made to contradict the bundle's: every tree extends nothing."""
    honest = make_run("run", steps=3)
    one = made(honest, devices)
    bundle = Bundle.open(one.data, INSPECTORATE.verifying)
    run_id = one.verdict.evidence["runs"][0]["run_id"]
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(honest.run)))
    first = Manifest(run=run_id, journal=Extent(records=1, files=1, bytes=1, sha256="0" * 64)).seal(key)
    steps = canonical.decode(bundle.items[f"runs/{run_id}/steps.json"])
    steps["roots"]["0"] = {"root": "1" * 64, "proof": []}
    items = {**bundle.items, "heads/1.json": first, f"runs/{run_id}/steps.json": canonical.encode(steps)}
    told = {name: value for name, value in bundle.predicate.items() if name != "items"} | {"outcome": "REJECT"}
    shown = Bundle.sign(told, items, INSPECTORATE)
    verdict = check_bundle(shown, one.trust)
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, False)
    assert "root of the empty tree is wrong" in verdict.reasons[0].text
    with off("root of the empty tree"):
        verdict = check_bundle(shown, one.trust)
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, True)
    assert "lab signed two heads" in verdict.reasons[0].text
