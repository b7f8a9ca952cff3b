"""Law 5, rules on scores and data: the program that scores is not the lab's choice, and a sample lies where it may."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.examination import content_digests
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor import Recorder
from monitor.transcript.data import encode_arrays
from tests.adversary.world import kept_device
from tests.agreements import resigned
from tests.conftest import NOW, STARTED, Recorded
from tests.guards import off
from tests.leaves import execution_of

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
BENCHMARK = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def judge(tmp_path):
    """The outcome, and what the rule found, of a recorded run under one rule."""

    def run(recorded, kind, *lines):
        (tmp_path / "rules.toml").write_text("\n".join(["[[rule]]", 'name = "r"', f'kind = "{kind}"', *lines]))
        case, trust, rules = CaseFile(), recorded.trust, read_rules(tmp_path / "rules.toml")
        verdict = inspect([recorded.run], trust, SETTINGS, now=recorded.now, worker=kept_device, case=case)
        judged = apply_rules(verdict, rules, case, trust, SETTINGS, worker=kept_device)
        found = judged.evidence["rules"]["found"]["r"][0]
        assert judged.outcome is not Outcome.ACCEPT or f"r pass ({found['text']})" in judged.reasons[0].text
        return judged.outcome, judged.evidence["rules"]["found"]["r"][0]

    return run


def entropy(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def shifted(model, batch):
    return entropy(model, batch) + 5


class Net(nn.Linear):
    """A classifier; ``hide`` says what it holds beside its weights."""

    def __init__(self, **buffers):
        torch.manual_seed(0)
        super().__init__(6, 3)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.clone())


def batch_of(rows=4, seed=0):
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=made), "y": torch.randint(0, 3, (rows,), generator=made)}


@pytest.fixture
def record(tmp_path):
    """Record steps and evaluations, given as pairs of a batch and the loss; those without ``update`` only evaluate."""

    def run(steps, *, model=None, rate=0.3, optimizer=torch.optim.SGD):
        model = Net() if model is None else model
        optimizer = optimizer([each for each in model.parameters() if each.requires_grad], lr=rate)
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        out = tmp_path / "run"
        recorder = Recorder(
            model,
            optimizer,
            out=out,
            chips=1,
            seed=5,
            checkpoint_every=8,
            snapshot_rate=Fraction(1),
            started=STARTED,
            hours=1.0,
            lab="lab",
        )
        for batch, loss, trains in steps:
            if not trains:
                with recorder.evaluation(batch) as shown, torch.no_grad():
                    shown.commit(loss(model, batch))
                continue
            with recorder.step(batch) as step:
                optimizer.zero_grad(set_to_none=False)
                found = loss(model, batch)
                found.backward()
                if trains == "by hand":
                    with torch.no_grad():
                        for each in model.parameters():
                            each.sub_(each.grad, alpha=rate)
                else:
                    optimizer.step()
                step.commit(found)
        recorder.finish()
        return Recorded(out, Trust.load([tmp_path / "run.trust.json"], [out]), NOW)

    return run


@pytest.fixture
def tested(tmp_path):
    """The lines of a rule: a test set of these batches, on which a run has to know little."""

    def lines(*batches, **more):
        arrays = {name: np.concatenate([each[name].numpy() for each in batches]) for name in batches[0]}
        (tmp_path / "test.safetensors").write_bytes(encode_arrays(arrays))
        return ['test = "test.safetensors"', "at_least = 3", *(f'{key} = "{value}"' for key, value in more.items())]

    return lines


LEARNED = [(batch_of(), entropy, True)] * 24
"""In the end it knows this batch by heart."""


def trained(recorded):
    """The programs that steps of training run, in the order of their first steps."""
    leaves = open_run(recorded.run, recorded.trust).load_steps()[0]
    return list(dict.fromkeys(execution_of(leaf).program for leaf in leaves[1:] if leaf.trains))


def test_a40_an_evaluation_at_the_end_does_not_choose_the_loss(judge, record, tested):
    recorded = record([*LEARNED, (batch_of(), shifted, False)])
    outcome, found = judge(recorded, "score", *tested(batch_of()))
    assert outcome is Outcome.REJECT
    assert found["value"] < 0.5
    assert set(found["scores"]) == set(trained(recorded))
    assert f"by program {trained(recorded)[0][:16]}…" in found["text"]


def test_a40_guard_off_it_does(judge, record, tested):
    recorded = record([*LEARNED, (batch_of(), shifted, False)])
    with off("programs of a score"):
        outcome, found = judge(recorded, "score", *tested(batch_of()))
    assert outcome is Outcome.ACCEPT
    assert found["value"] > 3


@pytest.mark.parametrize("other", [shifted, lambda model, batch: entropy(model, {"x": batch["z"], "y": batch["y"]})])
def test_a40_nor_does_a_step_of_training_at_the_end(judge, record, tested, other):
    """Two programs that update weights, of which one has another loss, or reads what the test set does not have."""
    last = {**batch_of(), "z": batch_of()["x"]} if other is not shifted else batch_of()
    recorded = record([*LEARNED, (last, other, True)], rate=0.3)
    outcome, found = judge(recorded, "score", *tested(batch_of()))
    assert outcome is Outcome.INCONCLUSIVE
    assert found["result"] == "undecided"
    true, false = trained(recorded)
    outcome, found = judge(recorded, "score", *tested(batch_of(), program=true))  # the way that the finding names
    assert (outcome, list(found["scores"])) == (Outcome.REJECT, [true])
    outcome, found = judge(recorded, "score", *tested(batch_of(), program="0" * 64))
    assert outcome is Outcome.INCONCLUSIVE
    assert "a rule may name one of those that were countersigned (`program`)" in found["text"]
    bare = replace(recorded, trust=resigned(recorded.run, recorded.trust, programs=[true]))
    assert judge(bare, "score", *tested(batch_of(), program=false))[0] is Outcome.INCONCLUSIVE


def test_a40_training_by_hand_beside_a_declared_step_does_not_either(judge, record, tested):
    """The one program that an optimizer updates in has the other loss."""
    recorded = record([*[(batch_of(), entropy, "by hand")] * 24, (batch_of(), shifted, True)])
    outcome, found = judge(recorded, "score", *tested(batch_of()))
    assert outcome is Outcome.INCONCLUSIVE
    assert found["result"] == "undecided"
    losses = sorted(found["scores"].values())
    assert losses[0] < 0.5 < 5 < losses[1]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_honest_runs_are_scored_whose_first_step_or_last_batch_is_another_program(judge, record, tested, optimizer):
    recorded = record([*LEARNED, (batch_of(rows=2, seed=3), entropy, True)], optimizer=optimizer, rate=0.1)
    assert len(trained(recorded)) == (2 if optimizer is torch.optim.SGD else 3)
    outcome, found = judge(recorded, "score", *tested(batch_of(seed=9), batch_of(seed=10))[:1], "at_least = 0.01")
    assert (outcome, found["result"]) == (Outcome.ACCEPT, "pass"), found


def plain(model, batch):
    return entropy(model, batch)


def with_table(model, batch):
    return functional.cross_entropy(model(torch.cat([batch["x"], BENCHMARK])).mean(0, keepdim=True), batch["y"][:1])


def with_buffer(model, batch):
    return functional.cross_entropy(model(batch["x"] + model.bench.mean(0)), batch["y"])


def with_one(model, batch):
    return functional.cross_entropy(model(batch["x"] + BENCHMARK[7]), batch["y"])


def frozen():
    model = Net()
    model.bench = nn.Parameter(BENCHMARK.clone(), requires_grad=False)
    return model


WHERE = {
    "a batch": lambda record: record([({**batch_of(), "x": BENCHMARK[:4]}, plain, True)]),
    "a batch of an evaluation": lambda record: record(
        [(batch_of(), plain, True), ({**batch_of(), "x": BENCHMARK[:4]}, plain, False)]
    ),
    "beside the samples of a batch": lambda record: record(
        [
            (
                {**batch_of(), "bench": BENCHMARK},
                lambda m, b: with_buffer(m, b | {"x": b["x"] + b["bench"].mean(0)}),
                True,
            )
        ],
        model=Net(bench=torch.zeros(6)),
    ),
    "a constant": lambda record: record([(batch_of(), with_table, True)] * 2),
    "a constant that is one sample": lambda record: record([(batch_of(), with_one, True)] * 2),
    "a buffer": lambda record: record([(batch_of(), with_buffer, True)] * 2, model=Net(bench=BENCHMARK)),
    "a frozen weight": lambda record: record([(batch_of(), with_buffer, True)] * 2, model=frozen()),
}
ELSEWHERE = ["a constant", "a constant that is one sample", "a buffer", "a frozen weight"]


@pytest.fixture
def forbidden():
    return [f"digests = {content_digests(BENCHMARK.numpy())}", "at_most = 0"]


@pytest.mark.parametrize("place", WHERE)
def test_a40_a_benchmark_is_found_wherever_it_lies(judge, record, forbidden, place):
    outcome, found = judge(WHERE[place](record), "data", *forbidden)
    assert (outcome, found["result"]) == (Outcome.REJECT, "fail"), found
    if place in ELSEWHERE:
        assert "lie elsewhere, the first in " in found["text"]
    assert "(searched: " in found["text"]


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a40_guard_off_it_is_not(judge, record, forbidden, place):
    with off("samples elsewhere"):
        outcome, found = judge(WHERE[place](record), "data", *forbidden)
    assert (outcome, found["result"]) == (Outcome.ACCEPT, "pass")


def test_a40_an_honest_run_passes_and_what_was_searched_is_said(judge, record, forbidden):
    """Also where a sample of the benchmark is blank, as a buffer is that was made of zeros."""
    recorded = record([(batch_of(), with_buffer, True)] * 2, model=Net(bench=torch.zeros(5, 6)))
    blank = content_digests(np.zeros((1, 6), np.float32))
    outcome, found = judge(recorded, "data", forbidden[0].replace("[", f"[{blank[0]!r}, "), "at_most = 0")
    assert (outcome, found["result"], found["value"]) == (Outcome.ACCEPT, "pass", 0.0), found
    searched = found["searched"]
    assert (searched["places"], searched["batches"], searched["hidden"], searched["unopened"]) == (8, 2, 0, 0)
    told = f"(searched: 8 places of 2 batches, {searched['constants']} constants, {searched['tensors']} tensors of the "
    assert told in found["text"]


def test_a40_a_share_is_open_where_samples_lie_elsewhere(judge, record, forbidden):
    recorded = WHERE["a buffer"](record)
    assert judge(recorded, "data", forbidden[0], "at_most = 0.5")[0] is Outcome.INCONCLUSIVE
    assert judge(recorded, "data", forbidden[0], "at_least = 0.5")[0] is Outcome.REJECT


def test_a40_constants_that_nobody_countersigned_are_not_searched_and_leave_it_open(judge, record, forbidden):
    recorded = record([(batch_of(), plain, True), (batch_of(), with_table, False)])
    bare = replace(recorded, trust=resigned(recorded.run, recorded.trust, programs=trained(recorded)))
    outcome, found = judge(bare, "data", *forbidden)
    assert (outcome, found["result"]) == (Outcome.INCONCLUSIVE, "undecided")
    assert "not in 1 programs, not countersigned" in found["text"]
