"""Runs that continue others: what they take over, and the cap on all of them together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import lab_path
from monitor.presets import training
from monitor.recording.parents import start_from
from monitor.recording.recorder import Recorder
from monitor.recording.recording import Recording
from monitor.transcript import RunFolder
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
SMALL = {"steps": 3, "batch_size": 8}


@pytest.fixture
def judge(devices):
    def run(*recorded, cap=None, samples=3):
        trust = recorded[-1].trust
        for other in recorded[:-1]:
            trust = trust.merge(other.trust)
        settings = replace(SETTINGS, samples=samples)
        runs = [each.run for each in recorded]
        return inspect(runs, replace(trust, maximum_flop=cap), settings, now=recorded[0].now, worker=devices.run)

    return run


def flop_of(*recorded) -> int:
    total = 0
    for each in recorded:
        run = open_run(each.run, each.trust)
        total += sum(leaf.flop for leaf in run.load_steps()[0])
    return total


def test_fine_tuning_from_a_declared_parent_is_accepted(make_run, judge):
    parent = make_run("parent", **SMALL)
    child = make_run("child", parent=parent.run, after=parent.run, optimizer="sgd", learning_rate=0.01, **SMALL)
    origin = RunFolder(child.run, child.trust.labs["lab"]).declared.origin
    assert origin.parent is not None
    assert (origin.parent.step, origin.parent.kinds) == (3, ("weight", "buffer"))
    verdict = judge(parent, child)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    total = flop_of(parent, child)
    assert f"parent → child take {total} FLOP" in verdict.reasons[0].text
    assert "past FLOP" not in verdict.reasons[0].text
    line = verdict.evidence["lineages"][1]
    assert line == {
        "run": "child",
        "run_id": verdict.evidence["runs"][1]["run_id"],
        "origin": "parent",
        "parent": verdict.evidence["runs"][0]["run_id"],
        "chain": ["parent", "child"],
        "chain_flop": total,
        "chain_most_flop": line["chain_most_flop"],
        "past_unknown": None,
    }
    states = [RunFolder(each.run, each.trust.labs["lab"]) for each in (parent, child)]
    ended, begun = states[0].checkpoint(3), states[1].checkpoint(0)
    assert all(torch.equal(begun[name], ended[name]) for name in ended if name.startswith(("weight/", "buffer/")))
    assert all(not value.any() for name, value in begun.items() if name.startswith(("gradient/", "optimizer/")))


def test_a_chain_whose_runs_each_stay_below_a_cap_is_added_up(make_run, judge):
    """Two labs take turns, so that neither declares too much."""
    parent = make_run("parent", lab="lab-p", **SMALL)
    child = make_run("child", lab="lab-c", parent=parent.run, **SMALL)
    total, largest = flop_of(parent, child), max(flop_of(parent), flop_of(child))
    assert largest < total - 1
    most = judge(parent, child, samples=6).evidence["lineages"][1]["chain_most_flop"]
    assert judge(parent, child, cap=most, samples=6).outcome is Outcome.ACCEPT
    verdict = judge(parent, child, cap=most - 1, samples=6)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"with what elementwise work can hide it is {most}" in verdict.reasons[0].text
    verdict = judge(parent, child, cap=total - 1, samples=6)
    assert verdict.outcome is Outcome.REJECT
    assert [reason.text for reason in verdict.reasons] == [
        f"the chain parent → child takes {total} FLOP, more than the {total - 1} that the rules allow"
    ]
    with off("chains added up"):
        assert judge(parent, child, cap=total - 1, samples=6).outcome is Outcome.ACCEPT


def test_compute_that_nobody_counted_is_not_below_a_cap(make_run, judge, monkeypatch):
    run = make_run("run", **SMALL)
    assert judge(run, cap=10**30).outcome is Outcome.ACCEPT
    monkeypatch.setattr("inspector.inspection.execution._check_flop", lambda *_: None)
    verdict = judge(run, cap=10**30)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "with what elementwise work can hide it is unknown" in verdict.reasons[0].text


def test_a_parent_that_is_not_inspected_leaves_the_past_unknown(make_run, judge):
    parent = make_run("parent", lab="lab-p", **SMALL)
    child = make_run("child", lab="lab-c", parent=parent.run, **SMALL)
    verdict = judge(child)
    assert verdict.outcome is Outcome.ACCEPT
    assert "past FLOP is unknown: run " in verdict.reasons[0].text
    assert "which child continues, is not among the inspected ones" in verdict.reasons[0].text
    verdict = judge(child, cap=10**30)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "child: past FLOP is unknown, and the rules allow 10" in verdict.reasons[0].text
    with off("past counted"):
        assert judge(child, cap=10**30).outcome is Outcome.ACCEPT


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def body(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


@pytest.fixture
def record(record_loop):
    def run(name, *, seed=0, model=None, steps=3, **options):
        model = mlp(seed) if model is None else model
        generator = torch.Generator().manual_seed(seed)
        batches = [
            {"x": torch.randn(5, 8, generator=generator), "y": torch.randint(0, 4, (5,), generator=generator)}
            for _ in range(steps)
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return record_loop(model, optimizer, batches, body, name=name, **options)

    return run


def test_supplied_weights_are_accepted_without_a_cap_and_not_under_one(record, judge):
    loop = record("loop")
    verdict = judge(loop)
    assert verdict.outcome is Outcome.ACCEPT
    assert "past FLOP is unknown: the weights that loop starts from were supplied" in verdict.reasons[0].text
    assert judge(loop, cap=10**30).outcome is Outcome.INCONCLUSIVE
    with off("past counted"):
        assert judge(loop, cap=10**30).outcome is Outcome.ACCEPT


def test_a_loop_starts_from_a_parent(record, judge, tmp_path):
    record("parent", lab="lab-p")
    model = mlp(1)
    child = record("child", seed=1, model=model, parent=tmp_path / "parent", lab="lab-c")
    parent = replace(child, run=tmp_path / "parent", trust=Trust.load([tmp_path / "parent.trust.json"]))
    verdict = judge(parent, child, samples=6)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    text = verdict.reasons[0].text
    assert "parent → child take " in text
    assert "the weights that parent starts from were supplied" in text  # its own past is as unknown as ever


def forge(make_run, monkeypatch, kind: str):
    """A parent, and a child whose declared first state differs from it by one number of that kind."""
    parent = make_run("parent", lab="lab-p", **SMALL)

    def begin(self, declared, *rest, true=Recording.begin):
        first = next(tensor for (each, _), tensor in self.loop.state.memory.tensors.items() if each == kind)
        with torch.no_grad():
            first.view(-1)[0] += 0.5
        true(self, replace(declared, origin=replace(declared.origin, state=self.loop.root)), *rest)

    monkeypatch.setattr(Recording, "begin", begin)
    return parent, make_run("child", lab="lab-c", parent=parent.run, **SMALL)


def test_other_weights_than_the_parents_are_rejected(make_run, judge, monkeypatch):
    parent, child = forge(make_run, monkeypatch, "weight")
    verdict = judge(parent, child, samples=6)
    assert verdict.outcome is Outcome.REJECT
    assert "is not what parent ended with, although the run declares that it continues it" in verdict.reasons[0].text
    with off("weights of the parent"):
        assert judge(parent, child, samples=6).outcome is Outcome.ACCEPT


def test_a_model_hidden_in_the_optimizers_state_is_not_accepted(make_run, judge, monkeypatch):
    parent, child = forge(make_run, monkeypatch, "optimizer")
    verdict = judge(parent, child, samples=6)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "is neither taken over from the parent nor zero" in verdict.reasons[0].text
    with off("weights of the parent"):
        assert judge(parent, child, samples=6).outcome is Outcome.ACCEPT


def test_another_step_than_the_parents_last_is_rejected(make_run, judge, monkeypatch):
    from monitor.recording import recipes

    parent = make_run("parent", lab="lab-p", **SMALL)
    true = start_from
    monkeypatch.setattr(recipes, "start_from", lambda *each: replace(true(*each), step=2))
    verdict = judge(parent, make_run("child", lab="lab-c", parent=parent.run, **SMALL), samples=6)
    assert verdict.outcome is Outcome.REJECT
    assert (
        verdict.reasons[0].text
        == "the run declares that it continues the final state of parent, but step 2 is not that state"
    )


def test_what_cannot_be_continued_is_named(make_run, record, tmp_path):
    parent = make_run("parent", **SMALL)
    with pytest.raises(CallerError, match="this model and the parent's do not have the same tensors"):
        record("loop", parent=parent.run)
    with pytest.raises(CallerError, match="there is no lab folder"):
        record("loop", parent=tmp_path / "nowhere")
    model = mlp()
    half = Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / "half")
    with half.step({"x": torch.ones(1, 8)}):
        model(torch.ones(1, 8))
    with pytest.raises(CallerError, match="half is not finished, so it has no final state to start from"):
        record("loop", parent=tmp_path / "half")
    assert not (tmp_path / "loop").exists()
    assert not lab_path(tmp_path / "loop").exists()


@pytest.mark.parametrize("last", [0, 2])
def test_a_killed_run_goes_on_from_its_parent(make_run, monkeypatch, tmp_path, last):
    from monitor.recording import recipes

    parent = make_run("parent", **SMALL)
    whole = make_run("whole", parent=parent.run, **SMALL)
    true, taken = training.take_step, []

    def take_step(*each):
        taken.append(each)
        if len(taken) == last + 1:
            raise KeyboardInterrupt
        return true(*each)

    monkeypatch.setattr(recipes, "take_step", take_step)
    with pytest.raises(KeyboardInterrupt):
        make_run("killed", parent=parent.run, **SMALL)
    recipes.resume(tmp_path / "killed")
    trust = Trust.load([tmp_path / "killed.trust.json"])
    runs = [open_run(tmp_path / name, trust) for name in ("killed", "whole")]
    assert runs[0].leaf(3).state == runs[1].leaf(3).state
    assert verify(tmp_path / "killed", trust, now=whole.now).outcome is Outcome.ACCEPT


def test_the_trust_file_carries_the_cap(make_run, tmp_path, capsys):
    from analysis.cli import main

    parent = make_run("parent", **SMALL)
    child = make_run("child", parent=parent.run, **SMALL)
    trust = tmp_path / "capped.json"
    trust.write_text(json.dumps(replace(child.trust, maximum_flop=10**30).to_json()))
    code = main(["verify", str(child.run), "--trust", str(trust), "--now", "2026-01-01T00:30:00Z", "--json"])
    assert code == 3
    answer = json.loads(capsys.readouterr().out)
    assert "past FLOP is unknown" in answer["reasons"][0]["text"]
    assert answer["evidence"]["lineages"][0]["chain"] == ["child"]
