"""Two labs that recorded the same loop: the referee bisects its program and executes at most one operator."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from firmware_sim.evidence import MerkleTree
from inspector.devices import device
from inspector.dispute.dispute import Disputant, settle
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.lies import LAB_LIES
from monitor.lab.prover import LabProver
from monitor.programs.trace import COMMIT_STATE, tensor_digest
from monitor.recording.recipes import chip_evidence
from tests.conftest import loop_recorder
from tests.guards import off
from tests.lying import at_operator, tell_with

CHILD = Path(__file__).parents[1] / "loop_child.py"
STEPS = 5
NUMERICS = ("exact", "rounded")
KERNELS = ("sse41", "emulated-split-k")


def batches(steps: int = STEPS, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(6, 8, generator=generator), "y": torch.randint(0, 4, (6,), generator=generator)}
        for _ in range(steps)
    ]


def body(model, optimizer, batch):
    """Dropout, a constant, views, clipping; the gradients are absent when the step ends."""
    scaled = model(batch["x"].t().t()) * torch.tensor(0.75)
    loss = functional.cross_entropy(scaled, batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def record(record_loop, name, numerics, *, data=None, change=None, start=0, schedule=None, **options):
    torch.manual_seed(start)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(_, step):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)

    return record_loop(
        model,
        optimizer,
        batches() if data is None else data,
        body if change is None else change,
        name=name,
        lab=f"lab-{name}",
        numerics=numerics,
        checkpoint_every=2,
        before=before,
        **options,
    )


class Labs:
    """Records the loop for labs of different names, all of whose agreements one inspector knows."""

    def __init__(self, record_loop, numerics, honest):
        self._record_loop, self._numerics, self._honest = record_loop, numerics, honest
        self.trust: Trust | None = None

    def honest(self) -> Disputant:
        """Lab a, which keeps to the loop; its run is recorded once, and no test may change it."""
        return self._take(self._honest(self._numerics), agreed=True)

    def record(self, name, *, agreed=True, **options) -> Disputant:
        return self._take(record(self._record_loop, name, self._numerics, **options), agreed=agreed)

    def _take(self, recorded, *, agreed):
        mine = recorded.trust
        if self.trust is None:
            self.trust = mine
        signed = self.trust.countersigned | (mine.countersigned if agreed else frozenset())
        labs, chips = {**self.trust.labs, **mine.labs}, {**self.trust.chips, **mine.chips}
        keys = self.trust.inspectorates | mine.inspectorates
        self.trust = replace(self.trust, labs=labs, chips=chips, inspectorates=keys, countersigned=signed)
        return self.claim(recorded.run)

    def claim(self, run: Path, prover=LabProver) -> Disputant:
        assert self.trust is not None
        return Disputant(run=open_run(run, self.trust), prover=prover(run))

    def settle(self, first: Disputant, second: Disputant):
        """The verdict, which is the same whoever is asked first."""
        verdict, other = settle(first, second, self.trust), settle(second, first, self.trust)
        same = ("step", "operator", "guilty", "case", "operators_executed")
        assert [verdict.evidence[key] for key in same] == [other.evidence[key] for key in same]
        assert verdict.outcome is other.outcome
        return verdict


@pytest.fixture(scope="module")
def honest_lab(tmp_path_factory):
    """Lab a's run under these numerics."""
    return cache(lambda numerics: record(loop_recorder(tmp_path_factory.mktemp(numerics)), "a", numerics))


@pytest.fixture(params=NUMERICS)
def labs(request, record_loop, honest_lab):
    return Labs(record_loop, request.param, honest_lab)


@pytest.fixture
def exact_labs(record_loop, honest_lab):
    return Labs(record_loop, "exact", honest_lab)


def test_honest_labs_agree(labs):
    verdict = labs.settle(labs.honest(), labs.record("b"))
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["operators_executed"] == 0


@pytest.fixture(scope="module")
def other_kernels(tmp_path_factory):
    """Where two processes whose native arithmetic differs have recorded the same loop under all numerics."""
    folder = tmp_path_factory.mktemp("kernels")
    for name in KERNELS:
        runs = [word for numerics in NUMERICS for word in (str(folder / numerics / name), numerics, "adamw")]
        command = [sys.executable, str(CHILD), *runs]
        environment = device(name).process_environment()
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.mark.parametrize("numerics", NUMERICS)
def test_labs_with_other_kernels_agree(numerics, other_kernels):
    """A transformer layer with dropout and a schedule."""
    folder = other_kernels / numerics
    known = Trust.load([folder / f"{name}.trust.json" for name in KERNELS])
    runs = [open_run(folder / name, known) for name in KERNELS]
    assert len({run.metadata.device["fingerprint"] for run in runs}) == 2
    first, second = (Disputant(run=run, prover=LabProver(run.folder)) for run in runs)
    verdict = settle(first, second, known)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


@pytest.mark.sampled("step")
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_wrong_operator_is_named(labs, step):
    right, wrong = labs.honest(), labs.record("b", lie="wrong-operator", lie_step=step)
    verdict = labs.settle(right, wrong)
    assert verdict.outcome is Outcome.REJECT
    evidence = verdict.evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", step, "output")
    assert evidence["operator"] == "aten.addmm.default"
    assert evidence["operators_executed"] == 1


def test_wrong_operator_at_random_places(labs, monkeypatch):
    """Backward pass, dropout, clipping and optimizer: the first operator that differs is named."""
    right = labs.record("a", data=batches(3))
    nodes, _ = right.prover._trace(3)
    real = [
        node.index
        for node in nodes[:-1]
        if any(layout["dtype"] == "float32" and layout["shape"] for layout in node.results)
    ]
    lie = LAB_LIES["wrong-operator"].conduct
    convicted = 0
    named = set()
    for index in random.Random("loop").sample(real, 15):
        tell_with(monkeypatch, "wrong-operator", at_operator(lie, index))
        wrong = labs.record(f"b{index}", data=batches(3), lie="wrong-operator", lie_step=3)
        verdict = settle(right, wrong, labs.trust)
        if verdict.outcome is Outcome.ACCEPT:
            continue
        evidence = verdict.evidence
        assert (evidence["guilty"], evidence["step"], evidence["operators_executed"]) == (f"b{index}", 3, 1)
        named.add(evidence["operator"])
        convicted += 1
    assert convicted >= 10
    assert len(named) >= 5, named


class Doctored(LabProver):
    """Shows one node of step 3 other than it was, and before it what the honest lab shows."""

    index: int
    node_of: staticmethod
    honest: list

    def _trace(self, step):
        own, _ = super()._trace(step)
        own = [*self.honest[: self.index], self.node_of(self.honest[self.index]), *own[self.index + 1 :]]
        return own, MerkleTree(node.encoded() for node in own)


def doctor(labs, monkeypatch, right, find, node_of, **options):
    """A lab whose last product is wrong in step 3 and that shows the first found node otherwise; and that node."""
    nodes, _ = right.prover._trace(3)
    lie = LAB_LIES["wrong-operator"].conduct
    late = max(node.index for node in nodes if node.operator == "aten.addcdiv_.default") - 3
    tell_with(monkeypatch, "wrong-operator", at_operator(lie, late))
    wrong = labs.record("b", lie="wrong-operator", lie_step=3, **options)
    node = next(node for node in nodes if find(node))
    last = wrong.prover._trace(3)[0][-1]
    base = replace(last, inputs=nodes[-1].inputs) if node.operator == COMMIT_STATE else node
    honest = [*nodes[: node.index], base]
    kind = type("Doctor", (Doctored,), {"index": node.index, "node_of": staticmethod(node_of), "honest": honest})
    return labs.claim(wrong.run.folder, kind), node


@pytest.mark.sampled("kind")
@pytest.mark.parametrize("kind", ["batch", "state", "constant", "node", "absent"])
def test_other_input_than_the_agreed_one_is_found_at_its_source(labs, monkeypatch, kind):
    def slot(node):
        return next((i for i, each in enumerate(node.sources) if each["source"].partition(":")[0] == kind), None)

    def alter(node):
        inputs = list(node.inputs)
        inputs[slot(node)] = tensor_digest(torch.full((2,), 7.0))
        return replace(node, inputs=tuple(inputs))

    right = labs.honest()
    wrong, node = doctor(labs, monkeypatch, right, lambda node: slot(node) is not None, alter)
    evidence = labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 3, "input")
    assert evidence["operator"] == node.operator
    assert evidence["operators_executed"] == 0


def test_another_state_than_that_of_the_agreed_tensors_is_named_by_its_block(exact_labs, monkeypatch):
    right = exact_labs.honest()
    wrong, _ = doctor(exact_labs, monkeypatch, right, lambda each: each.operator == COMMIT_STATE, lambda each: each)
    for module in ("inspector.dispute.messages", "monitor.replay.prover"):  # so that the search has several rounds
        monkeypatch.setattr(f"{module}.SUBTREES", 2)
    evidence = settle(right, wrong, exact_labs.trust).evidence
    assert [evidence[key] for key in ("guilty", "step", "operator", "case")] == ["b", 3, COMMIT_STATE, "output"]
    assert re.fullmatch(r"block 0 of (weight|optimizer)/.+", evidence["tile"])
    assert settle(wrong, right, exact_labs.trust).evidence["guilty"] == "b"  # which opens its own tensors then


def test_referee_draws_what_a_random_operator_draws(labs, monkeypatch):
    right = labs.honest()
    program = right.run.program(right.run.leaf(3).execution.program)
    (index,) = (number for number, call in enumerate(program.calls) if call["draws"])
    other = (tensor_digest(torch.ones(6, 16)),)
    wrong, node = doctor(
        labs, monkeypatch, right, lambda each: each.index == index, lambda each: replace(each, outputs=other)
    )
    evidence = labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 3, "output")
    assert evidence["operator"] == node.operator == "aten.bernoulli_.float"
    assert evidence["operators_executed"] == 1


def unset(model, optimizer, batch):
    """Copies the batch into memory that was not set."""
    body(model, optimizer, {**batch, "x": torch.empty_like(batch["x"]).copy_(batch["x"])})


def strided(model, optimizer, batch):
    """Reads the batch by strides, from where it begins."""
    body(model, optimizer, {**batch, "x": torch.as_strided(batch["x"], (6, 8), (8, 1))})


def absolute(model, optimizer, batch):
    """Reads the batch by absolute places in its memory."""
    body(model, optimizer, {**batch, "x": torch.as_strided(batch["x"], (6, 8), (8, 1), 0)})


def copied(model, optimizer, batch):
    """Reads by absolute places what an operator has just put there."""
    body(model, optimizer, {**batch, "x": torch.as_strided(batch["x"].clone(), (6, 8), (8, 1), 0)})


def test_memory_that_an_operator_leaves_unset_reads_as_zeros(labs, monkeypatch):
    right = labs.record("a", change=unset)
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        wrong, node = doctor(
            labs,
            monkeypatch,
            right,
            lambda each: each.operator == "aten.empty_like.default",
            lambda each: replace(each, outputs=(tensor_digest(torch.ones(6, 8)),)),
            change=unset,
        )
        evidence = labs.settle(right, wrong).evidence
    finally:
        torch.use_deterministic_algorithms(False)
    assert node.outputs == (tensor_digest(torch.zeros(6, 8)),)
    assert (evidence["guilty"], evidence["step"], evidence["operator"]) == ("b", 3, node.operator)


@pytest.mark.parametrize(("change", "guilty"), [(strided, "b"), (copied, "b"), (absolute, None)])
def test_referee_reads_memory_by_places_that_its_inputs_show(exact_labs, monkeypatch, change, guilty):
    """Where a batch begins in its memory is known to no referee."""
    right = exact_labs.record("a", change=change)
    wrong, node = doctor(
        exact_labs,
        monkeypatch,
        right,
        lambda each: each.operator == "aten.as_strided.default",
        lambda each: replace(each, outputs=(tensor_digest(torch.ones(6, 8)),)),
        change=change,
    )
    verdict = exact_labs.settle(right, wrong)
    assert verdict.outcome is (Outcome.REJECT if guilty else Outcome.INCONCLUSIVE)
    assert (verdict.evidence["operator"], verdict.evidence["guilty"]) == (node.operator, guilty)


def partly_written(model, optimizer, batch):
    """Reads columns between those that were written last."""
    x = batch["x"].clone()
    x[:, ::2].zero_()
    body(model, optimizer, {**batch, "x": torch.cat([x[:, 1:7], x[:, :2]], 1)})


def test_an_input_around_what_was_written_last_is_found_in_older_memory(exact_labs, monkeypatch):
    right = exact_labs.record("a", change=partly_written)

    def alter(node):
        return replace(node, inputs=(node.inputs[0], tensor_digest(torch.full((6, 2), 7.0))))

    wrong, node = doctor(
        exact_labs, monkeypatch, right, lambda node: node.operator == "aten.cat.default", alter, change=partly_written
    )
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["case"], evidence["operator"]) == ("b", "input", node.operator)


def test_program_that_nobody_agreed_to_loses(exact_labs):
    def other(model, optimizer, batch):
        loss = functional.cross_entropy(model(batch["x"]) * torch.tensor(0.5), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    right, wrong = exact_labs.honest(), exact_labs.record("b", change=other, agreed=False)
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 1, "program")
    again = exact_labs.record("c", change=other)
    verdict = exact_labs.settle(right, again)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "and both programs were agreed" in verdict.reasons[0].text


class LongBatch(LabProver):
    """Opens more than its program reads."""

    def batch(self, step):
        opening = super().batch(step)
        return replace(opening, parts=[(salt, content + bytes(1 << 22)) for salt, content in opening.parts])


def test_nothing_is_taken_of_a_batch_longer_than_its_program_reads(exact_labs):
    first, second = exact_labs.honest(), exact_labs.record("b", lie="wrong-operator", lie_step=3)
    claims = first, exact_labs.claim(second.run.folder, LongBatch)
    evidence = exact_labs.settle(*claims).evidence
    assert (evidence["absent"], evidence["guilty"], evidence["step"]) == ("b", None, 3)
    assert evidence["bytes"] < 1 << 22
    with off("batch lengths"):
        evidence = exact_labs.settle(*claims).evidence
    assert (evidence["guilty"], evidence["case"]) == ("b", "batch")
    assert evidence["bytes"] > 1 << 22


def test_start_that_nobody_agreed_to_loses(exact_labs):
    right, wrong = exact_labs.honest(), exact_labs.record("b", start=1, agreed=False)
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 0, "declaration")


def test_what_was_not_agreed_decides_nothing(exact_labs):
    """Neither the order of data nor the schedule of learning rates is part of the agreement about a loop."""
    right = exact_labs.record("a", schedule=lambda step: 1e-2 / step)
    other_data = [*batches()[:3], *batches(2, seed=9)]
    verdict = exact_labs.settle(right, exact_labs.record("b", data=other_data, schedule=lambda step: 1e-2 / step))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.evidence["step"], verdict.evidence["case"]) == (4, "batch")
    verdict = exact_labs.settle(right, exact_labs.record("c", schedule=lambda step: 1e-2 / min(step, 2)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.evidence["step"], verdict.evidence["case"]) == (3, "numbers")


def test_numbers_that_no_rule_gives_lose(exact_labs):
    """The second lab says that it kept the declared rate, but its optimizer took another."""

    def prepare(recorder):
        original = recorder._run.programs.explain

        def explain(*arguments):
            program, execution = original(*arguments)
            if recorder._run.writer.steps == 3:
                execution = replace(execution, hyper=tuple({} for _ in execution.hyper))
            return program, execution

        recorder._run.programs.explain = explain

    right = exact_labs.record("a", schedule=lambda step: 1e-2)
    rates = [1e-2, 1e-2, 1e-2, 5e-3, 1e-2]
    wrong = exact_labs.record("b", schedule=lambda step: rates[step - 1], prepare=prepare)
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 4, "numbers")


def test_other_words_for_the_same_numbers_hide_nothing(exact_labs):
    """The liar lists a step's numbers in another order and declares a hyper-parameter that decides nothing."""

    def prepare(recorder):
        original = recorder._run.programs.explain

        def explain(*arguments):
            program, execution = original(*arguments)
            slots = {text: tuple(reversed(numbers)) for text, numbers in execution.slots.items()}
            return program, replace(execution, slots=slots, hyper=tuple({"maximize": 0} for _ in execution.hyper))

        recorder._run.programs.explain = explain

    right = exact_labs.honest()
    wrong = exact_labs.record("b", lie="wrong-operator", lie_step=4, prepare=prepare)
    assert right.run.leaf(3).execution.slots != wrong.run.leaf(3).execution.slots
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 4, "output")


def test_under_reported_flop_loses(exact_labs):
    def prepare(recorder):
        original = recorder._run.host.commit
        recorder._run.host.commit = lambda leaf, files: original(replace(leaf, flop=leaf.flop // 2), files)

    right, wrong = exact_labs.honest(), exact_labs.record("b", prepare=prepare)
    evidence = exact_labs.settle(right, wrong).evidence
    assert (evidence["guilty"], evidence["step"], evidence["case"]) == ("b", 1, "FLOP")


def test_what_the_evidence_does_not_decide_says_what_is_missing(exact_labs):
    right = exact_labs.honest()
    verdict = settle(right, exact_labs.record("b"))
    assert (verdict.outcome, verdict.evidence["case"]) == (Outcome.INCONCLUSIVE, "agreement")
    assert "a does not follow a recipe, so a trust file has to say" in verdict.reasons[0].text
    verdict = exact_labs.settle(right, exact_labs.record("c", data=batches(4)))
    assert (verdict.outcome, verdict.evidence["case"]) == (Outcome.INCONCLUSIVE, "length")
    assert "agree up to step 4" in verdict.reasons[0].text
    assert "no declaration says how many steps were ordered, so compare that with the order" in verdict.reasons[0].text
    verdict = exact_labs.settle(right, exact_labs.record("d", seed=6))
    assert (verdict.outcome, verdict.evidence["case"]) == (Outcome.INCONCLUSIVE, "declaration")
    assert "and both were countersigned" in verdict.reasons[0].text
    with pytest.raises(CallerError, match="unknown lie 'white'"):
        exact_labs.record("e", lie="white")


def test_a_shorter_run_with_a_wrong_operator_is_named(exact_labs):
    """The runs end after other steps, and differ before the shorter one's end."""
    right = exact_labs.honest()
    wrong = exact_labs.record("b", data=batches(4), lie="wrong-operator", lie_step=3)
    evidence = exact_labs.settle(right, wrong).evidence
    assert [evidence[key] for key in ("guilty", "step", "case", "prevails")] == ["b", 3, "output", "a"]


def test_runs_without_steps_agree_about_their_start(tmp_path):
    empty = []
    for name in ("f", "g"):
        folder = tmp_path / name
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        recorder = Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=folder, chips=3, lab=f"lab-{name}")
        recorder._run.writer.finish(chip_evidence(recorder._run.lab, lambda _, evidence: evidence))
        empty.append(Disputant(run=open_run(folder, trust_of(folder)), prover=LabProver(folder)))
    known = Trust.load([tmp_path / "f.trust.json", tmp_path / "g.trust.json"])
    assert settle(empty[0], empty[1], known).outcome is Outcome.ACCEPT


def trust_of(folder: Path) -> Trust:
    return Trust.load([folder.with_name(f"{folder.name}.trust.json")])
