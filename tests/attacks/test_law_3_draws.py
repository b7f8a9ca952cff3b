"""What decides a draw is fixed by no one who profits from it."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from analysis.cli import main
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording.recipes import chip_evidence
from monitor.transcript.draft import Draft
from tests.guards import off

CHIPS, DRAWN = 6, 5
SETTINGS = Settings(samples=DRAWN, seed=None, devices=("sse41",))


def draw_by(seed: str, manifest: bytes) -> set[str]:
    """Which chips a verifier with this secret draws, by the rule that verdicts publish."""
    hasher = hashlib.sha256(b"chipwitness/draw/1")
    hasher.update(hashlib.sha256(seed.encode()).digest())
    hasher.update(hashlib.sha256(manifest).digest())
    chips = [f"lab-chip-{i:04d}" for i in range(CHIPS)]
    return set(sorted(chips, key=lambda chip: hashlib.sha256(hasher.digest() + chip.encode()).digest())[:DRAWN])


@pytest.fixture
def ground(make_run):
    """A run whose first chip skips snapshots; the lab asks for new quotes until a draw by "0" misses that chip."""
    recorded = make_run(lie="run-old-firmware", chips=CHIPS)
    lab = SimulatedLab.reopen(lab_path(recorded.run))
    draft = Draft.read(recorded.run, lab.key)
    for _ in itertools.count():
        files = chip_evidence(lab, lambda _, evidence: evidence)
        for name, content in files.items():
            draft.put(recorded.run, name, content)
        draft.sign(recorded.run, lab.key)
        if "lab-chip-0000" not in draw_by("0", (recorded.run / "manifest.json").read_bytes()):
            break
    lab.cut_power()
    return recorded


def test_a4_a_draw_cannot_be_ground_by_new_quotes(ground, devices):
    manifest = (ground.run / "manifest.json").read_bytes()
    fresh = next(bytes([b]) * 32 for b in range(256) if "lab-chip-0000" in draw_by((bytes([b]) * 32).hex(), manifest))
    with mock.patch("os.urandom", lambda size: fresh[:size]):  # randomness that the lab could not know: 5 of 6 do
        verdict = inspect([ground.run], ground.trust, SETTINGS, now=ground.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert "lab-chip-0000" in verdict.evidence["drawn_chips"]


def test_a4_guard_off_the_liar_is_never_drawn(ground, devices):
    with off("fresh draw"):
        verdict = inspect([ground.run], ground.trust, SETTINGS, now=ground.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT
    assert "lab-chip-0000" not in verdict.evidence["drawn_chips"]


def test_a4_the_command_draws_afresh_and_says_where_it_does_not(make_run, tmp_path, capsys, kept_devices):
    recorded = make_run()
    (tmp_path / "trust.json").write_text(json.dumps(recorded.trust.to_json()))
    words = ["inspect", str(recorded.run), "--trust", str(tmp_path / "trust.json"), "--samples", "1", "--json"]
    words += ["--now", "2026-01-01T00:30:00Z", "--device", "sse41"]
    draws = []
    for seed in ([], [], ["--seed", "7"]):
        assert main([*words, *seed]) in (0, 3)
        verdict = json.loads(capsys.readouterr().out)
        draws.append((verdict["evidence"]["draw"]["secret"], verdict["evidence"]["draw"]["simulated"]))
    assert len({secret for secret, _ in draws}) == 3
    assert [simulated for _, simulated in draws] == [False, False, True]
    assert main([*words[:-5], *words[-4:], "--seed", "7"]) in (0, 3)
    assert "simulated draw" in capsys.readouterr().out


def test_c5_the_first_segment_is_always_replayed(make_run, devices):
    recorded = make_run(steps=6, checkpoint_every=1)

    def replayed(seed):
        settings = Settings(samples=3, seed=seed, devices=("sse41",), segments=1)
        verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
        return verdict.evidence["replays"][0]["segments"]

    assert [replayed(str(seed)) for seed in range(3)] == [[0], [0], [0]]
    with off("first segment"):
        assert any(replayed(str(seed)) != [0] for seed in range(3))


def test_a19_a_lab_that_declares_nothing(honest, devices):
    """Chips are drawn of every registered lab; one that is silent has refused, and the others are none the worse."""
    chips = {**honest.trust.chips, "silent-chip-0000": "silent"}
    trust = replace(honest.trust, labs={**honest.trust.labs, "silent": honest.trust.labs["lab"]}, chips=chips)
    settings = Settings(samples=4, seed="x", devices=("sse41",), labs=tuple(trust.labs))
    judge = partial(inspect, [honest.run], trust, now=honest.now, worker=devices.run)
    verdict = judge(settings)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["labs"] == {"lab": "ACCEPT", "silent": "REJECT"}
    assert "chip silent-chip-0000 was drawn, but no evidence of it was handed over" in verdict.reasons[0].text
    with off("labs that declare nothing"):
        verdict = judge(replace(settings, samples=3))
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["labs"] == {"lab": "ACCEPT"}
