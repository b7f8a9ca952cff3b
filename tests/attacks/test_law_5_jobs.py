"""Law 5: a job that is split is one job, by links that nobody can choose against another (A54)."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inspector.inspection.verdict import Outcome
from inspector.rules.quantities import flop
from inspector.rules.rule_files import Rule
from monitor.presets import preset
from monitor.transcript.data import RunData
from tests.attacks.jobs import Labs, basis, built, stub, supplied
from tests.guards import off


@pytest.fixture(scope="module")
def labs(tmp_path_factory, devices):
    """Among others of a lab's public model, ``base``, which it trained from a public seed."""
    found = Labs(tmp_path_factory.mktemp("labs"), devices)

    def keep(recorder, model):
        if recorder.steps == 2:
            found.models["base/2"] = {key: each.clone() for key, each in model.state_dict().items()}

    found.record("base", "lab-p", built(), between=keep)
    return found


def flop_rule(most, links=None):
    return f'[[rule]]\nname = "r"\nkind = "flop"\nper = "job"\nat_most = {most}\n' + (
        f"links = {links}" if links else ""
    )


def ulp_beside(state):
    return {key: torch.nextafter(each, each + 1) if key == "bias" else each for key, each in state.items()}


def two(labs, way, make, *, names="ab", **options):
    """Two labs, or one, whose runs start as ``make`` says and have optimizers of two kinds."""
    kinds = (torch.optim.SGD, torch.optim.AdamW)
    return [
        labs.record(f"{way}-{at}", f"{way}-lab-{name}", make(), optimizer=kind, **options)
        for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]


WAYS = {
    "supplied": lambda labs, way: two(labs, way, supplied),
    "one-lab": lambda labs, way: two(labs, way, supplied, names="aa"),
    "siblings": lambda labs, way: ["base", *two(labs, way, built, parent="base")],
    "parent": lambda labs, way: ["base", labs.record(way, way, built(), parent="base")],
    "undeclared": lambda labs, way: ["base", labs.record(way, way, supplied(labs.models["base"]))],
    "checkpoint": lambda labs, way: ["base", labs.record(way, way, supplied(labs.models["base/2"]))],
    "ulp": lambda labs, way: ["base", labs.record(way, way, supplied(ulp_beside(labs.models["base"])))],
    "own-model": lambda labs, way: ["base", labs.record(way, "lab-p", supplied(labs.models["base"]))],
    "data": lambda labs, way: two(labs, way, lambda: built(2)),
}
"""Ways to split what is rejected in one run."""
FAILS = {"one-lab": "one-lab-lab-a", "parent": "parent", "own-model": "lab-p"}
"""Those in which one lab alone exceeds, or continues another's run by its own word."""


@pytest.mark.parametrize("way", WAYS)
def test_a54_a_job_that_is_split_does_not_pass(labs, way):
    names = WAYS[way](labs, way)
    most = flop_rule(labs.flop(*names) - 1, ["data"] if way == "data" else None)
    seen = labs.inspected(*names)
    assert seen[0].outcome is Outcome.ACCEPT, seen[0].reasons
    verdict = labs.judge(seen, most)
    blamed = [lab for lab, outcome in verdict.evidence["labs"].items() if outcome == "REJECT"]
    assert blamed == ([FAILS[way]] if way in FAILS else []), verdict.reasons
    assert verdict.outcome is (Outcome.REJECT if way in FAILS else Outcome.INCONCLUSIVE)
    if names[0] == "base" and way != "own-model":
        assert verdict.evidence["labs"]["lab-p"] == "ACCEPT", verdict.reasons
    with off("labs of one job added up", "past counted"):
        again = labs.judge(labs.inspected(*names), most)
    assert again.outcome is Outcome.ACCEPT, again.reasons


def test_a54_the_same_work_in_one_run_is_rejected(labs):
    labs.record("whole", "whole", built(), steps=8)
    assert labs.judge(labs.inspected("whole"), flop_rule(labs.flop("whole") - 1)).outcome is Outcome.REJECT


def test_a54_what_cannot_be_known_is_said(labs):
    names = two(labs, "known", lambda: built(3))
    verdict = labs.judge(labs.inspected(*names), flop_rule(labs.flop(*names) - 1, ["data"]))
    texts = {each.where["lab"]: each.text for each in verdict.reasons if "lab" in each.where}
    assert set(texts) == {"known-lab-a", "known-lab-b"}
    assert "(known-1 of known-lab-b may belong to it, since the data of 2 runs are unknown)" in texts["known-lab-a"]


def test_a54_two_labs_that_start_from_one_public_seed_have_two_jobs(labs):
    """Anybody can start from it, with whatever optimizer."""
    names = two(labs, "seed", built)
    seen, most = labs.inspected(*names), flop_rule(labs.flop(*names) - 1)
    assert labs.judge(seen, most).outcome is Outcome.ACCEPT
    with off("public seeds"):
        assert labs.judge(seen, most).outcome is Outcome.INCONCLUSIVE


def test_a54_one_sample_that_a_preset_does_not_have_joins_its_runs():
    """Its own samples are public, and join nobody."""
    public = preset("digits-cnn").samples(None)
    own = {name: np.ascontiguousarray(values[:4]) for name, values in public.items()}
    mine = {name: (values + 1).astype(values.dtype) for name, values in own.items()}
    mixed = {name: np.concatenate([own[name], mine[name][1:2]]) for name in own}
    lines = [{"run_id": run, "parent": None, "past_unknown": None} for run in ("r0", "r1")]
    rule = Rule(name="r", kind="flop", at_least=None, at_most=Fraction(70), about={"per": "job", "links": ["data"]})

    def results(*samples, lab="lab-b"):
        items = [stub("r0", "lab-a", 40), stub("r1", lab, 40)]
        for item, held in zip(items, samples, strict=True):
            item.run.declared.recipe, item.run.task = True, SimpleNamespace(preset="digits-cnn")
            item.data = RunData(samples=held, order=np.zeros((1, 1), np.int64), salt=bytes(32))
        return [each.truth.value for each in flop(rule, basis(items, lines, {}))]

    assert results(own, own) == ["pass", "pass"]
    assert results(own, mixed) == ["pass", "pass"]
    assert results(mine, mixed) == ["undecided", "undecided"]
    assert results(mine, mixed, lab="lab-a") == ["fail"]
    with off("labs of one job added up"):
        assert results(mine, mixed) == ["pass", "pass"]
