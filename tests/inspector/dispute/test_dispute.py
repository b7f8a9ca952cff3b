"""The referee names the guilty lab, the step and the operator, and executes at most one operator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree
from inspector.dispute.dispute import Disputant, play_here, settle
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome
from monitor.lab.prover import LabProver
from monitor.protocol.dispute import Opening, TraceHead
from tests.lying import at_operator, tell_with

STEPS = 5
OPTIONS = {"steps": STEPS, "chips": 2, "checkpoint_every": 2, "batch_size": 8}


def claim(recorded, prover=None) -> Disputant:
    run = open_run(recorded.run, recorded.trust)
    return Disputant(run=run, prover=LabProver(recorded.run) if prover is None else prover)


@pytest.fixture(scope="module", params=["exact", "rounded"])
def right(request, tmp_path_factory, record):
    folder = tmp_path_factory.mktemp(f"dispute-{request.param}")
    return record(folder / "right", lab="lab-a", numerics=request.param, **OPTIONS)


def record_wrong(record, tmp_path, right, lie, step, **changes):
    numerics = open_run(right.run, right.trust).task.numerics
    return record(tmp_path / "wrong", lab="lab-b", lie=lie, lie_step=step, numerics=numerics, **{**OPTIONS, **changes})


@pytest.mark.parametrize("lie", ["other-learning-rate", "change-sample"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_liar_is_named_with_step_and_operator(right, record, tmp_path, lie, step):
    """Whichever of the two comes first."""
    wrong = record_wrong(record, tmp_path, right, lie, step)
    for claims in ((claim(right), claim(wrong)), (claim(wrong), claim(right))):
        verdict = settle(*claims)
        assert verdict.outcome is Outcome.REJECT
        assert verdict.evidence["guilty"] == "wrong"
        assert verdict.evidence["step"] == step
        assert verdict.evidence["operators_executed"] == 0
        expected = "chipwitness.commit_state" if lie == "other-learning-rate" else "aten._to_copy.default"
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
    """14 places: whichever operator returned one wrong element, it is named, unless the element had no effect."""
    from monitor.lab.lies import LAB_LIES

    rng = random.Random("wrong operator")
    places = rng.sample(computing_operators(right), 14)
    convicted = without_effect = 0
    lie = LAB_LIES["wrong-operator"].conduct
    for number, (index, _operator) in enumerate(places):
        step = rng.randint(1, STEPS)
        tell_with(monkeypatch, "wrong-operator", at_operator(lie, index))
        wrong = record_wrong(record, tmp_path / str(number), right, "wrong-operator", step)
        verdict = settle(claim(right), claim(wrong))
        if verdict.outcome is Outcome.ACCEPT:
            without_effect += 1
            continue
        evidence = verdict.evidence
        nodes, _ = LabProver(right.run)._trace(step)
        first = next(
            node.index for node, other in zip(nodes, LabProver(wrong.run)._trace(step)[0], strict=True) if node != other
        )
        assert verdict.outcome is Outcome.REJECT
        assert (evidence["guilty"], evidence["step"]) == ("wrong", step)
        assert evidence["operator"] == nodes[first].operator
        assert first >= index
        assert evidence["operators_executed"] == 1
        # Each question halves what is left, and the search ends beside the first step and operator that differ.
        assert ("step", step, STEPS, False) in [tuple(each) for each in evidence["search"]]
        assert ("step", step - 1, STEPS, True) in [tuple(each) for each in evidence["search"]]
        asked = [place for phase, place, _, agree in evidence["search"] if phase == "operator" and not agree]
        assert not asked or min(asked) >= first + 1
        convicted += 1
    assert convicted >= 11, (convicted, without_effect)


@pytest.mark.parametrize(
    ("lie", "operator", "case"),
    [
        ("edited-optimizer", "chipwitness.commit_state", "input"),
        ("under-reported-flop", "the step", "FLOP"),
    ],
)
def test_other_decision_cases(right, record, tmp_path, lie, operator, case):
    wrong = record_wrong(record, tmp_path, right, lie, 3)
    for claims in ((claim(right), claim(wrong)), (claim(wrong), claim(right))):
        evidence = settle(*claims).evidence
        assert (evidence["guilty"], evidence["step"]) == ("wrong", 3)
        assert (evidence["operator"], evidence["case"]) == (operator, case)
        assert evidence["operators_executed"] == 0


def test_of_two_lies_the_first_is_named(right, record, tmp_path, monkeypatch):
    """A wrong loss before a wrong operator; and losses alone, where the operators give the right one."""
    from monitor.lab.lies import LAB_LIES

    honest = LAB_LIES["wrong-operator"].conduct(4)

    base: Any = type(honest)

    class TwoLies(base):
        def declare(self, leaf):
            return replace(leaf, loss="3f800000") if leaf.step in (2, 3) else leaf

    tell_with(monkeypatch, "wrong-operator", TwoLies)
    wrong = record_wrong(record, tmp_path, right, "wrong-operator", 4)
    for claims in ((claim(right), claim(wrong)), (claim(wrong), claim(right))):
        evidence = settle(*claims).evidence
        assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("wrong", 2, "loss")
    with monkeypatch.context() as patch:
        patch.setattr(TwoLies, "observer", lambda self, step: None)
        patch.setattr(TwoLies, "declare", lambda self, leaf: replace(leaf, loss="3f800000") if leaf.step > 1 else leaf)
        misstated = record_wrong(record, tmp_path / "loss", right, "wrong-operator", 4)
        verdict = settle(claim(right), claim(misstated))
    assert verdict.outcome is Outcome.REJECT
    assert [verdict.evidence[name] for name in ("guilty", "step", "case")] == ["wrong", 2, "loss"]
    assert verdict.evidence["operators_executed"] == 0


def test_forged_start_is_named(right, record, tmp_path):
    verdict = settle(claim(right), claim(record_wrong(record, tmp_path, right, "forged-initialisation", 1)))
    assert verdict.evidence["guilty"] == "wrong"
    assert verdict.evidence["step"] == 0


def test_two_honest_labs_on_different_kernel_families_agree(right, tmp_path, devices):
    """The second lab is another process with other kernels; its fingerprint differs."""
    import json
    import subprocess
    import sys

    from inspector.devices import device
    from inspector.inspection.trust import Trust

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
    assert other.metadata.device["fingerprint"] == devices.run("sse41", {"action": "fingerprint"})["fingerprint"]
    assert other.metadata.device["fingerprint"] != open_run(right.run, right.trust).metadata.device["fingerprint"]
    verdict = settle(claim(right), Disputant(run=other, prover=LabProver(tmp_path / "other")))
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
    for claims in ((claim(right), claim(wrong, liar)), (claim(wrong, liar), claim(right))):
        verdict = settle(*claims)
        assert verdict.outcome is Outcome.REJECT
        assert verdict.evidence["guilty"] == "wrong"


def _nonsense(question, answer):
    """A prover whose own program fails at one kind of question, or answers with something else."""

    def reply(self, *_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Nonsense", (LabProver,), {question: reply})


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("step", None),
        ("step", RuntimeError("no")),
        ("step", Opening(leaf="text", proof=())),  # type: ignore[arg-type]
        ("step", Opening(leaf=b"{}", proof=(1, 2))),  # type: ignore[arg-type]
        ("trace", None),
        ("trace", TraceHead(size="3", root=bytes(32))),  # type: ignore[arg-type]
        ("trace", TraceHead(size=3, root="x" * 32)),  # type: ignore[arg-type]
        ("trace", TraceHead(size=1 << 40, root=bytes(32))),
        ("trace_prefix", None),
        ("trace_prefix", (bytes(32), (1, 2))),
        ("node", None),
        ("node", Opening(leaf=b"[]", proof=None)),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_nonsense_from_a_party_is_its_own_fault(right, record, tmp_path, question, answer):
    """It signs a commitment of a wrong size, and is guilty; what has no bytes it never signs, so it is absent."""
    wrong = record_wrong(record, tmp_path, right, "wrong-operator", 3)
    liar = _nonsense(question, answer)(wrong.run)
    signed = isinstance(answer, TraceHead) and isinstance(answer.root, bytes)
    for claims in ((claim(right), claim(wrong, liar)), (claim(wrong, liar), claim(right))):
        assert settle(*claims).evidence["guilty" if signed else "absent"] == "wrong"


@pytest.mark.parametrize("answer", [None, [1, 2], RuntimeError("no"), "text"], ids=str)
def test_nonsense_chunks_do_not_help_the_liar(right, record, tmp_path, answer):
    """The honest party opens the agreed inputs, so the operator is executed all the same."""
    wrong = record_wrong(record, tmp_path, right, "wrong-operator", 3)
    liar = _nonsense("chunk", answer)(wrong.run)
    for claims in ((claim(right), claim(wrong, liar)), (claim(wrong, liar), claim(right))):
        evidence = settle(*claims).evidence
        assert (evidence["guilty"], evidence["operators_executed"]) == ("wrong", 1)


class FloatForInteger(LabProver):
    """Writes 1.0 for an integer of an early operator: equal in Python, other bytes."""

    def _trace(self, step):
        nodes, _ = super()._trace(step)
        first = replace(nodes[0], results=({**nodes[0].results[0], "stride": [1.0]},))
        nodes = [first, *nodes[1:]]
        return nodes, MerkleTree(node.encoded() for node in nodes)


def test_equal_numbers_of_other_types_do_not_hide_a_lie(right, record, tmp_path):
    wrong = record_wrong(record, tmp_path, right, "other-learning-rate", 3)
    for claims in (
        (claim(right), claim(wrong, FloatForInteger(wrong.run))),
        (claim(wrong, FloatForInteger(wrong.run)), claim(right)),
    ):
        evidence = settle(*claims).evidence
        assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("wrong", 3, "specification")


def test_runs_of_different_tasks_are_not_decided_without_a_declaration(right, record, tmp_path):
    other = record_wrong(record, tmp_path, right, None, 1, seed=6)
    verdict = settle(claim(right), claim(other))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.evidence["case"], verdict.evidence["prevails"]) == ("declaration", None)
    assert "(recipe, seed), and neither was countersigned: give a trust file" in verdict.reasons[0].text
    with pytest.raises(CallerError, match="with itself"):
        settle(claim(right), claim(right))


def test_native_runs_cannot_be_disputed(record, tmp_path):
    first = record(tmp_path / "a", lab="lab-a", numerics="native", **OPTIONS)
    second = record(tmp_path / "b", lab="lab-b", numerics="native", **OPTIONS)
    with pytest.raises(CallerError, match="native"):
        settle(claim(first), claim(second))


@pytest.mark.parametrize("branching", [3, 32])
def test_each_round_of_the_search_may_divide_the_steps_into_more_parts(right, record, tmp_path, branching):
    wrong = record_wrong(record, tmp_path, right, "wrong-operator", 4)
    verdict, _ = play_here(claim(right), claim(wrong), None, branching=branching)
    assert (verdict.evidence["guilty"], verdict.evidence["step"]) == ("wrong", 4)
    asked = [each for each in verdict.evidence["search"] if each[0] == "step"]
    assert len({tuple(each) for each in asked}) == len(asked)
    assert ["step", 3, STEPS, True] in asked
    assert ["step", 4, STEPS, False] in asked
    with pytest.raises(CallerError, match="2 to 32 parts, not 33"):
        play_here(claim(right), claim(wrong), None, branching=33)
