"""Law 8: a rule on jobs or chains blames who continued or exceeds alone, whatever a rival starts from (C28)."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from inspector.inspection.guards import Settings
from inspector.rounds.turns import play_round, world_of
from inspector.rules.quantities import flop
from inspector.rules.rule_files import Rule
from inspector.rules.truth import Truth
from monitor.lab.rounds import LabSide
from tests.attacks.jobs import BATCH, Labs, basis, built, stub, supplied
from tests.conftest import NOW
from tests.guards import off


@pytest.fixture(scope="module")
def labs(tmp_path_factory, devices):
    """Among others of an innocent lab's public model, ``base``."""
    found = Labs(tmp_path_factory.mktemp("labs"), devices)
    found.record("base", "innocent", built(), between=evaluate)
    return found


def evaluate(recorder, model):
    if recorder.steps == 3:
        with recorder.evaluation(BATCH), torch.no_grad():
            model(BATCH).sum()


def judged(labs, most, *names, per="job", links=None):
    """Outcome by lab under a rule on compute, and the verdict."""
    text = f'[[rule]]\nname = "r"\nkind = "flop"\nper = "{per}"\nat_most = {most}\n'
    verdict = labs.judge(labs.inspected(*names), text + (f"links = {links}" if links else ""))
    return verdict.evidence["labs"], verdict


@pytest.mark.parametrize("per", ["job", "chain"])
def test_c28_a_rival_that_continues_a_model_for_too_long(labs, per):
    name = labs.record(f"long-{per}", f"rival-{per}", built(), steps=8, parent="base")
    most = labs.flop(name, "base") - 1
    outcomes, verdict = judged(labs, most, "base", name, per=per)
    assert outcomes == {"innocent": "ACCEPT", f"rival-{per}": "REJECT"}, verdict.reasons
    assert "with base of innocent that only gave models" in verdict.reasons[0].text
    assert {each["result"] for each in verdict.evidence["rules"]["found"]["r"] if each["labs"] == ["innocent"]} == {
        "pass"
    }
    with off("who continued"):
        assert judged(labs, most, "base", name, per=per)[0]["innocent"] == "REJECT"


def test_c28_a_rival_that_continues_a_model_and_does_not_say_so(labs):
    name = labs.record("silent", "silent", supplied(labs.models["base"]), steps=8)
    outcomes, verdict = judged(labs, labs.flop(name, "base") - 1, "base", name)
    assert outcomes == {"innocent": "ACCEPT", "silent": "INCONCLUSIVE"}, verdict.reasons
    assert "(base of innocent may belong to it)" in verdict.reasons[0].text
    told = [each["text"] for each in verdict.evidence["rules"]["found"]["r"] if each["labs"] == ["innocent"]]
    assert "(silent of silent may not: what starts from it, or exceeds alone)" in told[0]


def test_c28_a_rival_that_names_a_parent_from_which_it_took_nothing(labs, monkeypatch):
    monkeypatch.setattr("monitor.recording.parents.hold", lambda *_: None)
    name = labs.record("false", "false", built(9), steps=8, parent="base")
    most = labs.flop(name, "base") - 1
    for per in ("job", "chain"):
        outcomes, verdict = judged(labs, most, "base", name, per=per)
        assert outcomes == {"innocent": "ACCEPT", "false": "REJECT"}
        assert "is not what base ended with" in " ".join(each.text for each in verdict.reasons)
        assert {each["value"] for each in verdict.evidence["rules"]["found"]["r"]} == {
            labs.flop(name),
            labs.flop("base"),
        }
    with off("weights of the parent", "who continued"):
        assert judged(labs, most, "base", name)[0] == {"innocent": "REJECT", "false": "REJECT"}


def test_c28_a_rival_that_starts_from_the_same_public_seed(labs):
    name = labs.record("seeded", "seeded", built(), steps=8)
    outcomes, verdict = judged(labs, labs.flop(name) - 1, "base", name)
    assert outcomes == {"innocent": "ACCEPT", "seeded": "REJECT"}, verdict.reasons


def test_c28_a_rival_with_the_same_evaluation(labs):
    name = labs.record("same", "same", built(7), loss=torch.abs, between=evaluate)
    most = labs.flop(name, "base") - 1
    assert judged(labs, most, "base", name, links=["program"])[0] == {"innocent": "ACCEPT", "same": "ACCEPT"}
    with off("programs that train"):
        assert set(judged(labs, most, "base", name, links=["program"])[0].values()) == {"INCONCLUSIVE"}


def test_c28_chains_of_twenty_runs_over_five_labs(labs):
    """Who ends within the cap is innocent, though all took part."""
    names: list[str] = []
    for number in range(20):
        parent = names[-1] if names else None
        names.append(labs.record(f"chain-{number}", f"lab-{number % 5}", built(), steps=1, parent=parent))
    one = labs.flop(names[0])
    seen = labs.inspected(*names)
    for per in ("job", "chain"):
        for last in (16, 18, 20):  # runs that stay within the cap, and what elementwise work could hide
            text = f'[[rule]]\nname = "r"\nkind = "flop"\nper = "{per}"\nat_most = {last * one + one // 2}\n'
            verdict = labs.judge(seen, text)
            blamed = {lab for lab, outcome in verdict.evidence["labs"].items() if outcome == "REJECT"}
            assert blamed == {f"lab-{number % 5}" for number in range(last, 20)}, (per, last)


def random_graph(draw):
    """Runs of five labs, of which one or two are rivals that do too much, with all that a rival can start from."""
    labs = [f"lab-{number}" for number in range(5)]
    rivals = set(draw.sample(labs, draw.choice((1, 2))))
    items: list[Any]
    lines: list[Any]
    items, lines, parents = [], [], {}
    for number in range(draw.randrange(6, 16)):
        lab, run = draw.choice(labs), f"r{number}"
        flops = draw.randrange(30, 120) if lab in rivals else draw.randrange(1, 12)
        way = draw.choice(("seed", "parent", "false", "copied", "lent")) if items else "seed"
        other: Any = draw.choice(items) if items else None
        start, past, parent = "seed", None, None
        if way == "parent":
            parent, start = other.run.manifest.run, other.models[2]
        elif way in ("copied", "lent"):
            start, past = other.models[draw.choice((0, 2))] if way == "copied" else "public", "supplied"
        elif way == "false":
            past = "not found in its start"
        ends = [item.models[2] for item in items] or [start]  # a run is recorded again, or a rival stands still
        end = draw.choice((f"end {run}", f"end {run}", draw.choice(ends), start if lab in rivals else f"end {run}"))
        items.append(stub(run, lab, flops, {0: start, 2: end}))
        parents[run] = parent
        root: Any = run
        while parents[root] is not None:
            root = parents[root]
        past = past if root == run else next(line["past_unknown"] for line in lines if line["run_id"] == root)
        lines.append({"run_id": run, "parent": parent, "past_unknown": past})
    return items, lines, parents


def answering(items, parents, lab):
    """Those of some runs that are a lab's, and all that they continue by their own word."""
    found = set()
    for item in items:
        run = item.run.manifest.run if item.run.metadata.lab == lab else None
        while run is not None:
            found.add(run)
            run = parents[run]
    return found


def test_c28_a_rivals_start_does_not_make_two_runs_of_a_lab_one_job():
    """They pass through the same model, as a run does that is recorded again."""
    items = [stub(run, "innocent", 40, {0: run, 2: "same"}) for run in ("r0", "r1")]
    items.append(stub("r2", "rival", 10, {0: "same", 2: "other"}))
    lines = [
        {"run_id": run, "parent": None, "past_unknown": "supplied" if run == "r2" else None}
        for run in ("r0", "r1", "r2")
    ]
    rule = Rule(
        name="r", kind="flop", at_least=None, at_most=Fraction(70), about={"per": "job", "links": ["parent", "start"]}
    )
    found = list(flop(rule, basis(items, lines, {})))
    assert [each.truth.value for each in found if each.labs == ("innocent",)] == ["pass", "pass"]
    with off("links of a rival alone"):
        found = list(flop(rule, basis(items, lines, {})))
        assert [each.truth.value for each in found if each.labs == ("innocent",)] == ["fail"]


def by_content(found):
    return sorted((each.labs, each.truth.value, each.value, sorted(each.where["run_ids"])) for each in found)


def blamed_in(found):
    return {lab for each in found if each.truth is Truth.FAIL for lab in each.labs}


@pytest.mark.parametrize("per", ["job", "chain"])
def test_c28_nobody_is_blamed_who_does_not_exceed_alone_or_continue(per):
    """250 graphs of runs among five labs, in whatever order, where no run but those that it continues changes blame."""
    draw, blamed, wronged = random.Random(0), 0, 0
    for _ in range(250):
        items, lines, parents = random_graph(draw)
        about, most = {"per": per, "links": ["parent", "start"]}, draw.randrange(30, 60)
        rule = Rule(name="r", kind="flop", at_least=None, at_most=Fraction(most), about=about)
        found = list(flop(rule, basis(items, lines, {})))
        fails = blamed_in(found)
        flops = {item.run.manifest.run: item.leaves[0].flop for item in items}
        for lab in {item.run.metadata.lab for item in items}:
            every = answering(items, parents, lab)
            assert lab not in fails or sum(flops[run] for run in every) > most, (lines, lab)
            alone = [sum(flops[run] for run in answering([item], parents, lab)) for item in items]
            assert lab in fails or max(alone) <= most, (lines, lab)
            among = [item for item in items if item.run.manifest.run in every]
            without = [line for line in lines if line["run_id"] in every]
            assert (lab in blamed_in(flop(rule, basis(among, without, {})))) is (lab in fails), (lines, lab)
        assert by_content(flop(rule, basis(draw.sample(items, len(items)), lines, {}))) == by_content(found)
        with off("who continued"):
            wronged += len(blamed_in(flop(rule, basis(items, lines, {}))) - fails)
        blamed += len(fails)
    assert min(blamed, wronged) > 50


def test_c28_in_a_round_the_inspectorate_links_what_the_cluster_has_compared(labs, devices, tmp_path, monkeypatch):
    """It sees no states itself."""
    child = labs.record("child", "child", built(), steps=8, parent="base")
    monkeypatch.setattr("monitor.recording.parents.hold", lambda *_: None)
    false = labs.record("claims", "claims", built(11), steps=8, parent="base")
    (tmp_path / "rules.toml").write_text(
        f'[[rule]]\nname = "r"\nkind = "flop"\nper = "job"\nat_most = {labs.flop(child, "base") - 1}\n'
    )
    world = world_of(
        tmp_path / "world", [(labs.folder / name, labs.trust(name)) for name in ("base", child, false)], LabSide
    )
    settings = Settings(samples=3, seed=None, devices=("sse41",))
    verdict = play_round(world, settings, rules=tmp_path / "rules.toml", now=NOW, worker=devices.run).verdict
    assert verdict.evidence["labs"] == {"innocent": "ACCEPT", "child": "REJECT", "claims": "REJECT"}, verdict.reasons
    told = verdict.evidence["rules"]["found"]["r"]
    assert {each["labs"][0]: each["value"] for each in told} == {
        "innocent": labs.flop("base"), "child": labs.flop(child, "base"), "claims": labs.flop(false)
    }  # fmt: skip
    assert [each["run"] for each in verdict.evidence["lineages"] if each["parent"] is not None] == ["child.child"]
