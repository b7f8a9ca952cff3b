"""Law 8: a rule on jobs or chains blames who continued or exceeds alone, whatever a rival starts from (C28)."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from inspector.rules.quantities import flop
from inspector.rules.reading import Rule
from inspector.rules.truth import Truth
from tests.attacks.jobs import BATCH, Labs, built, supplied
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
    names = []
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


def stub(run, lab, flops, models=None):
    """A run as rules on compute see it."""
    leaf = SimpleNamespace(flop=flops, trains=True)
    return SimpleNamespace(
        run=SimpleNamespace(
            name=run,
            manifest=SimpleNamespace(run=run),
            metadata=SimpleNamespace(lab=lab, chips=()),
            declared=SimpleNamespace(recipe=None, layout=None),
        ),
        leaves=[leaf],
        execution=SimpleNamespace(beside=SimpleNamespace(flop=0), most_flop=flops),
        models=models or {},
        data=None,
    )


def random_graph(draw):
    """Runs of five labs, of which one or two are rivals that do too much, with all that a rival can start from."""
    labs = [f"lab-{number}" for number in range(5)]
    rivals = set(draw.sample(labs, draw.choice((1, 2))))
    items, lines, parents = [], [], {}
    for number in range(draw.randrange(6, 16)):
        lab, run = draw.choice(labs), f"r{number}"
        flops = draw.randrange(30, 120) if lab in rivals else draw.randrange(1, 12)
        way = draw.choice(("seed", "parent", "false", "copied", "lent")) if items else "seed"
        other = draw.choice(items) if items else None
        start, past, parent = "seed", None, None
        if way == "parent":
            parent, start = other.run.manifest.run, other.models[2]
        elif way in ("copied", "lent"):
            start, past = other.models[draw.choice((0, 2))] if way == "copied" else "public", "supplied"
        elif way == "false":
            past = "not found in its start"
        end = start if lab in rivals and draw.random() < 0.3 else f"end {run}"  # a rival may stand still
        items.append(stub(run, lab, flops, {0: start, 2: end}))
        parents[run] = parent
        root = run
        while parents[root] is not None:
            root = parents[root]
        past = past if root == run else next(line["past_unknown"] for line in lines if line["run_id"] == root)
        lines.append({"run_id": run, "parent": parent, "past_unknown": past})
    return items, lines, parents


def answer(items, parents, lab, every=None):
    """FLOP of those of some runs that are a lab's, and of all that they continue by their own word."""
    mine, flops = set(), {item.run.manifest.run: item.leaves[0].flop for item in every or items}
    for item in items:
        run = item.run.manifest.run if item.run.metadata.lab == lab else None
        while run is not None:
            mine.add(run)
            run = parents[run]
    return sum(flops[run] for run in mine)


def by_content(found):
    return sorted((each.labs, each.truth.value, each.value, sorted(each.where["run_ids"])) for each in found)


def blamed_in(found):
    return {lab for each in found if each.truth is Truth.FAIL for lab in each.labs}


@pytest.mark.parametrize("per", ["job", "chain"])
def test_c28_nobody_is_blamed_who_does_not_exceed_alone_or_continue(per):
    """250 graphs of runs among five labs, in whatever order they are handed over."""
    draw, blamed, wronged = random.Random(0), 0, 0
    for _ in range(250):
        items, lines, parents = random_graph(draw)
        about = {"per": per, "links": ["parent", "start"]}
        rule = Rule(name="r", kind="flop", at_least=None, at_most=draw.randrange(30, 60), about=about)
        found = list(flop(rule, items, lines, {}))
        fails = blamed_in(found)
        for lab in {item.run.metadata.lab for item in items}:
            assert lab not in fails or answer(items, parents, lab) > rule.at_most, (lines, lab)
            alone = [answer([item], parents, lab, items) for item in items if item.run.metadata.lab == lab]
            assert lab in fails or max(alone) <= rule.at_most, (lines, lab)
        assert by_content(flop(rule, draw.sample(items, len(items)), lines, {})) == by_content(found)
        with off("who continued"):
            wronged += len(blamed_in(flop(rule, items, lines, {})) - fails)
        blamed += len(fails)
    assert min(blamed, wronged) > 50
