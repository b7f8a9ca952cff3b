"""A run is known by what it is and by who signed it: what its folder is called accuses nobody and hides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from inspector.bundle.checker import check_bundle
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from inspector.rounds.turns import play_round, world_of
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor.lab.rounds import LabSide
from monitor.transcript.layout import JOURNAL, MANIFEST
from tests.guards import off
from tests.handing import hand_over
from tests.inspector.bundle.conftest import made

SETTINGS = Settings(samples=4, seed="x", devices=("sse41",))
SMALL = {"steps": 2, "batch_size": 4, "chips": 2, "checkpoint_every": 2}


def body(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.fixture
def labs(record_loop):
    """A cheat and an honest lab, both of whose folders are called ``run``, and the trust file of both."""

    def record(place, lab, lie=None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) for step in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return record_loop(model, optimizer, batches, body, name=place, lab=lab, lie=lie, chips=2)

    cheat, honest = record("a/run", "lab-1", "change-sample"), record("b/run", "lab-2")
    return cheat, honest, cheat.trust.merge(honest.trust)


def judge(folders, trust, devices):
    return inspect([each.run for each in folders], trust, SETTINGS, now=folders[0].now, worker=devices.run)


def test_a37_the_cheat_is_blamed_and_nobody_whose_folder_has_its_name(labs, devices):
    cheat, honest, trust = labs
    for order in ((cheat, honest), (honest, cheat)):
        verdict = judge(order, trust, devices)
        assert verdict.outcome is Outcome.REJECT
        assert verdict.evidence["labs"] == {"lab-1": "REJECT", "lab-2": "ACCEPT"}
        assert {(each.where["run"], each.where["lab"]) for each in verdict.reasons} == {("run of lab-1", "lab-1")}
        assert {each["run"] for each in verdict.evidence["chips"]} == {"run of lab-1", "run of lab-2"}
    with off("blame by lab"):
        assert judge((cheat, honest), trust, devices).evidence["labs"] == {"lab-1": "ACCEPT", "lab-2": "REJECT"}


def test_a37_a_bundle_convicts_the_lab_that_lied(labs, devices):
    cheat, honest, trust = labs
    bundle = made(replace(honest, trust=trust), devices, settings=SETTINGS, runs=[cheat.run, honest.run])
    shown = check_bundle(bundle.data, bundle.trust)
    assert shown.outcome is Outcome.REJECT
    assert {each["lab"] for each in shown.evidence["reasons"]} == {"lab-1"}
    assert all(each.startswith("lab-1, run ") for each in shown.evidence["grounds"]), shown.evidence["grounds"]


def test_a37_a_run_that_cannot_be_opened_is_its_signers_and_nobody_elses(labs, devices):
    cheat, honest, trust = labs
    (cheat.run / JOURNAL).write_bytes(b"")
    hand_over(cheat.run)
    verdict = judge((honest, cheat), trust, devices)
    assert verdict.evidence["labs"] == {"lab-1": "REJECT", "lab-2": "INCONCLUSIVE"}
    assert verdict.reasons[0].where["run"] == "run of lab-1"
    (cheat.run / MANIFEST).write_bytes(b"{}")
    verdict = judge((honest, cheat), trust, devices)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert set(verdict.evidence["labs"].values()) == {"INCONCLUSIVE"}
    assert verdict.reasons[0].where == {"run": "run"}  # beside "run of lab-2"


def test_a37_what_lies_behind_one_run_of_a_lab_is_not_hidden_by_its_other(make_run, devices, tmp_path):
    unseen = make_run("p/run", lab="other", **SMALL)
    first = make_run("a/run", parent=unseen.run, **SMALL)
    second = make_run("b/run", after=first.run, learning_rate=0.01, **SMALL)
    trust = first.trust.merge(second.trust)
    (tmp_path / "rules.toml").write_text('[[rule]]\nname = "r"\nkind = "flop"\nper = "chain"\nat_most = 1e18\n')
    rules = read_rules(tmp_path / "rules.toml")

    def results():
        case = CaseFile()
        settings = replace(SETTINGS, samples=2, labs=("lab",))
        runs = [first.run, second.run]
        verdict = inspect(runs, trust, settings, now=first.now, worker=devices.run, case=case)
        verdict = apply_rules(verdict, rules, case, trust, settings, worker=devices.run)
        return [each["result"] for each in verdict.evidence["rules"]["found"]["r"]]

    assert results() == ["undecided", "pass"]
    with off("past counted"):
        assert results() == ["pass", "pass"]


def test_a37_runs_of_one_name_take_part_in_one_world(make_run, devices, tmp_path):
    first = make_run("a/run", **SMALL)
    second = make_run("b/run", after=first.run, learning_rate=0.01, **SMALL)
    other = make_run("c/run", lab="other", **SMALL)
    joining = [(each.run, each.trust) for each in (first, second, other)]
    world = world_of(tmp_path / "world", joining, LabSide)
    assert {lab: len(world.runs(lab)) for lab in ("lab", "other")} == {"lab": 2, "other": 1}
    verdict = play_round(world, replace(SETTINGS, seed=None), now=first.now, worker=devices.run).verdict
    assert verdict.evidence["labs"] == {"lab": "ACCEPT", "other": "ACCEPT"}, verdict.reasons
    assert len({each["run_id"] for each in verdict.evidence["runs"]}) == 3
    assert world.join(first.trust.merge(other.trust), {"run": other.run}) == ["lab", "other"]
    assert {lab: len(world.runs(lab)) for lab in ("lab", "other")} == {"lab": 2, "other": 1}  # it is the other lab's
