"""The referee names the guilty lab, the step and the operator, and executes at most one operator."""

from __future__ import annotations

import random

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from inspector.devices import run_worker
from inspector.dispute import Claim, settle
from inspector.transcripts import open_run
from inspector.verdict import Outcome
from monitor.prover import LabProver, Opening

STEPS = 5
OPTIONS = {"steps": STEPS, "chips": 2, "checkpoint_every": 2, "batch_size": 8}


def claim(recorded, prover=None) -> Claim:
    run = open_run(recorded.run, recorded.trust)
    return Claim(run=run, prover=LabProver(recorded.run) if prover is None else prover)


@pytest.fixture(scope="module", params=["exact", "rounded"])
def right(request, tmp_path_factory, record):
    folder = tmp_path_factory.mktemp(f"dispute-{request.param}")
    return record(folder / "right", lab="lab-a", numerics=request.param, **OPTIONS)


def record_wrong(record, tmp_path, right, lie, step, **changes):
    numerics = open_run(right.run, right.trust).task.numerics
    return record(tmp_path / "wrong", lab="lab-b", lie=lie, lie_step=step, numerics=numerics, **{**OPTIONS, **changes})


@pytest.mark.parametrize("order", ["right first", "wrong first"])
@pytest.mark.parametrize("lie", ["other-learning-rate", "change-sample"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_liar_is_named_with_step_and_operator(right, record, tmp_path, lie, step, order):
    wrong = record_wrong(record, tmp_path, right, lie, step)
    claims = [claim(right), claim(wrong)]
    verdict = settle(*(claims if order == "right first" else reversed(claims)))
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["guilty"] == "wrong"
    assert verdict.evidence["step"] == step
    assert verdict.evidence["operators_executed"] == 0
    expected = "aten.add_.Tensor" if lie == "other-learning-rate" else "aten._to_copy.default"
    assert verdict.evidence["operator"] == expected


def computing_operators(recorded) -> list[tuple[int, str]]:
    prover = LabProver(recorded.run)
    nodes, _ = prover._trace(3)
    return [
        (node.index, node.operator)
        for node in nodes
        if any(layout["dtype"] == "float32" and layout["shape"] for layout in node.results)
    ]


def test_wrong_operator_at_random_places(right, record, tmp_path, monkeypatch):
    """20 places: whichever operator returned one wrong element, it is named, unless the element had no effect."""
    from firmware_sim import LabLie
    from monitor.conduct import LIES

    rng = random.Random("wrong operator")
    places = rng.sample(computing_operators(right), 30)
    convicted = without_effect = 0
    lie = LIES[LabLie.WRONG_OPERATOR]
    for number, (index, _operator) in enumerate(places):
        step = rng.randint(1, STEPS)
        monkeypatch.setitem(LIES, LabLie.WRONG_OPERATOR, lambda at, index=index: lie(at, index))
        wrong = record_wrong(record, tmp_path / str(number), right, "wrong-operator", step)
        verdict = settle(claim(right), claim(wrong))
        if verdict.outcome is Outcome.ACCEPT:
            without_effect += 1
            continue
        evidence = verdict.evidence
        nodes, _ = claim(right).prover._trace(step)
        first = next(
            node.index for node, other in zip(nodes, claim(wrong).prover._trace(step)[0], strict=True) if node != other
        )
        assert verdict.outcome is Outcome.REJECT
        assert (evidence["guilty"], evidence["step"]) == ("wrong", step)
        assert evidence["operator"] == nodes[first].operator
        assert first >= index
        assert evidence["operators_executed"] == 1
        convicted += 1
    assert convicted >= 20, (convicted, without_effect)


@pytest.mark.parametrize(
    ("lie", "operator", "case"),
    [
        ("edited-optimizer", "chipwitness.commit_state", "input"),
        ("under-reported-flop", "batch", "batch or FLOP"),
    ],
)
def test_other_decision_cases(right, record, tmp_path, lie, operator, case):
    wrong = record_wrong(record, tmp_path, right, lie, 3)
    for claims in ([claim(right), claim(wrong)], [claim(wrong), claim(right)]):
        evidence = settle(*claims).evidence
        assert (evidence["guilty"], evidence["step"]) == ("wrong", 3)
        assert (evidence["operator"], evidence["case"]) == (operator, case)
        assert evidence["operators_executed"] == 0


def test_forged_start_is_named(right, record, tmp_path):
    verdict = settle(claim(right), claim(record_wrong(record, tmp_path, right, "forged-initialisation", 1)))
    assert verdict.evidence["guilty"] == "wrong"
    assert verdict.evidence["step"] == 0


def test_two_honest_labs_on_different_kernel_families_agree(right, tmp_path):
    """The second lab is another process with other kernels; its fingerprint differs."""
    import json
    import subprocess
    import sys

    from inspector.devices import device
    from inspector.trust import Trust

    task = open_run(right.run, right.trust).task
    words = ["train", "--preset", task.preset, "--steps", task.steps, "--chips", task.shards, "--seed", task.seed]
    words += ["--batch-size", task.batch_size, "--checkpoint-every", task.checkpoint_every]
    words += ["--numerics", task.numerics, "--lab", "lab-b", "--device", "sse41", "--out", tmp_path / "other", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "analysis.cli", *map(str, words)],
        env=device("sse41").process_environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trust = Trust.load([tmp_path / "other.trust.json"])
    other = open_run(tmp_path / "other", trust)
    assert other.metadata.device["fingerprint"] == run_worker("sse41", {"action": "fingerprint"})["fingerprint"]
    assert other.metadata.device["fingerprint"] != open_run(right.run, right.trust).metadata.device["fingerprint"]
    verdict = settle(claim(right), Claim(run=other, prover=LabProver(tmp_path / "other")))
    assert verdict.outcome is Outcome.ACCEPT
    assert json.loads(done.stdout)["steps"] == STEPS


class Silent(LabProver):
    """Does not answer when asked to run a step again."""

    def trace(self, step):
        raise EvidenceError("no answer in time")


class OtherLeaf(LabProver):
    """Opens another leaf than the one that it committed to."""

    def step(self, number):
        opening = super().step(number)
        return Opening(leaf=opening.leaf.replace(b'"flop":', b'"flop":1', 1), proof=opening.proof)


class OtherTrace(LabProver):
    """Changes its mind about an operator after it committed to the trace."""

    def node(self, step, index):
        opening = super().node(step, index)
        return Opening(leaf=opening.leaf.replace(b"aten", b"aten2", 1), proof=opening.proof)


class HonestTrace(LabProver):
    """Shows the operators of the honest lab, which do not lead to its own committed state."""

    honest: LabProver

    def _trace(self, step):
        return self.honest._trace(step)


@pytest.mark.parametrize("prover", [Silent, OtherLeaf, OtherTrace, HonestTrace])
def test_party_without_a_valid_answer_loses(right, record, tmp_path, prover):
    wrong = record_wrong(record, tmp_path, right, "change-sample", 3)
    liar = prover(wrong.run)
    if isinstance(liar, HonestTrace):
        liar.honest = LabProver(right.run)
    for claims in ([claim(right), claim(wrong, liar)], [claim(wrong, liar), claim(right)]):
        verdict = settle(*claims)
        assert verdict.outcome is Outcome.REJECT
        assert verdict.evidence["guilty"] == "wrong"


def test_runs_of_different_tasks_are_the_callers_mistake(right, record, tmp_path):
    other = record_wrong(record, tmp_path, right, None, 1, seed=6)
    with pytest.raises(CallerError, match="different tasks"):
        settle(claim(right), claim(other))
    with pytest.raises(CallerError, match="with itself"):
        settle(claim(right), claim(right))


def test_native_runs_cannot_be_disputed(record, tmp_path):
    first = record(tmp_path / "a", lab="lab-a", numerics="native", **OPTIONS)
    second = record(tmp_path / "b", lab="lab-b", numerics="native", **OPTIONS)
    with pytest.raises(CallerError, match="native"):
        settle(claim(first), claim(second))
