"""One training on different numbers of chips: one root, and snapshots of all of them verified against it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from inspector.storage.fsck import fsck
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.sharding import StateDigest
from monitor.transcript import RunFolder
from monitor.transcript.draft import Draft
from tests.conftest import record_run
from tests.guards import blind


@pytest.fixture
def inspect_run(devices):
    def run(recorded, samples, *, off: frozenset[Guard] = frozenset()):
        settings = Settings(samples=samples, seed="x", devices=("sse41",))
        with blind(*off):
            return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)

    return run


def opened(recorded) -> RunFolder:
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return lambda chips: record_run(tmp_path_factory.mktemp("chips") / "run", chips=chips, rate=Fraction(1))


@pytest.fixture(scope="module")
def runs(record):
    return {chips: record(chips) for chips in (1, 3, 8)}


def test_roots_are_one_for_1_3_and_8_chips(runs):
    roots = {chips: [str(leaf.state.root) for leaf in opened(run).load_steps()[0]] for chips, run in runs.items()}
    assert roots[1] == roots[3] == roots[8]
    assert len(set(roots[1])) == len(roots[1]) > 2


@pytest.mark.parametrize("chips", [1, 3, 8])
def test_snapshots_of_all_chips_are_verified_against_the_root(runs, inspect_run, chips):
    verdict = inspect_run(runs[chips], chips)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    steps = opened(runs[chips]).declared.steps
    assert [len(chip["snapshots"]) for chip in verdict.evidence["chips"]] == [steps] * chips


@pytest.mark.parametrize("which", ["exchanged", "altered"])
def test_a_step_that_opens_other_subtrees_is_reached_by_no_replay(record, inspect_run, which):
    """All signed again: the root that the opened subtrees give is not that of what the chips held."""
    run = record(3)
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run.run)))
    leaves, _ = opened(run).load_steps()
    state = leaves[2].state
    hashes = [state.hashes[1], state.hashes[0]] if which == "exchanged" else [bytes(32), state.hashes[1]]
    forged = StateDigest(state.layout, (*hashes, *state.hashes[2:]))
    assert forged.root != state.root
    draft = Draft.read(run.run, key)
    draft.leaves[2] = replace(leaves[2], state=forged).encoded()
    draft.sign(run.run, key)
    verdict = inspect_run(run, 3)
    assert verdict.outcome is Outcome.REJECT
    guards = frozenset({Guard.COMMITMENT, Guard.REPLAY})
    assert {reason.guard for reason in verdict.reasons} == {guard.value for guard in guards}
    assert inspect_run(run, 3, off=guards).outcome is Outcome.ACCEPT


def test_uneven_shares_are_declared_and_held_to(runs, inspect_run, make_run):
    even, uneven = runs[3], make_run(shares=(3, 1, 2), rate=Fraction(1))
    first, second = opened(even), opened(uneven)
    assert second.declared.shares == (3, 1, 2)
    assert first.leaf(6).state.root == second.leaf(6).state.root
    assert first.leaf(6).state.shards != second.leaf(6).state.shards
    held = [sum(part.elements for part in slices) for slices in second.layout.shards]
    assert held[0] > held[2] > held[1]
    assert fsck(uneven.run, {lab: key.raw for lab, key in uneven.trust.labs.items()}).problems == []
    assert inspect_run(uneven, 3).outcome is Outcome.ACCEPT
    others = replace(uneven, trust=replace(uneven.trust, countersigned=even.trust.countersigned))
    verdict = inspect_run(others, 3)
    assert verdict.outcome is Outcome.REJECT
    assert "the declaration of run is not the countersigned one; these parts differ: shares" in verdict.reasons[0].text


@pytest.mark.parametrize("shares", [(3, 1), (1, 0, 1), (1, 1, 5000)])
def test_impossible_shares_are_refused(make_run, shares):
    with pytest.raises(CallerError, match="share"):
        make_run(shares=shares)


def test_a_loop_and_the_command_line_take_shares(record_loop, inspect_run, tmp_path, capsys, monkeypatch):
    from analysis.cli import main

    model = torch.nn.Linear(4, 3)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = record_loop(model, optimizer, [torch.ones(2, 4)] * 3, body, shares=(3, 1, 2), snapshot_rate=Fraction(1))
    assert opened(loop).declared.shares == (3, 1, 2)
    assert inspect_run(loop, 3).outcome is Outcome.ACCEPT
    words = ["train", "--preset", "digits-cnn", "--steps", "1", "--batch-size", "4"]
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    assert main([*words, "--out", str(tmp_path / "cli"), "--shares", "3,1,2"]) == 0
    assert main(["declare", "show", str(tmp_path / "cli")]) == 0
    assert "on 3 chips with shares 3, 1, 2" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "other"), "--shares", "3,x"]) != 0
    assert "'3,x' is not a list of shares such as 3,1,2" in capsys.readouterr().err
