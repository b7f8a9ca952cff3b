"""Law 5, evaluations: what only computes may not train another model that batches carry in and results carry out."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.review import review
from inspector.inspection.verdict import Outcome
from monitor import initialised
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))


def data(steps=3):
    generator = torch.Generator().manual_seed(7)
    return [
        {"x": torch.randn(12, 8, generator=generator), "y": torch.randint(0, 4, (12,), generator=generator)}
        for _ in range(steps)
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, inputs):
        return self.net(inputs)


def train(model, optimizer, batch):
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


@pytest.fixture
def recorded(record_loop):
    """Record training steps; ``evaluate(recorder, model, batch)`` runs before each from the second on."""

    def run(evaluate, batches=None, **options):
        model, batches = Net(), data() if batches is None else batches
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def before(recorder, step):
            if step > 1:
                evaluate(recorder, model, batches[step - 1])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return record_loop(model, optimizer, batches, train, before=before, chips=1, **options)

    return run


def hidden():
    """Trains another model at 0.5: its batch has the weights, its numbers come back in the next batch."""
    numbers = [torch.zeros(8, 16).tolist()]

    def evaluate(recorder, model, batch):
        given = {**batch, "w": torch.tensor(numbers[0])}
        with recorder.evaluation(given):
            w = given["w"].detach().requires_grad_(True)
            functional.cross_entropy(given["x"] @ w, given["y"]).backward()
            moved = given["w"] - 0.5 * w.grad
            numbers[0] = moved.tolist()

    return evaluate


def saliency(recorder, model, batch):
    with recorder.evaluation(batch):
        inputs = batch["x"].detach().clone().requires_grad_(True)
        loss = functional.cross_entropy(model(inputs), batch["y"])
        torch.autograd.grad(loss, inputs)[0].abs().mean().item()


def adversarial(recorder, model, batch):
    with recorder.evaluation(batch) as evaluation:
        inputs = batch["x"].detach().clone().requires_grad_(True)
        loss = functional.cross_entropy(model(inputs), batch["y"])
        moved = inputs.detach() + 0.1 * torch.autograd.grad(loss, inputs)[0].sign()
        with torch.no_grad():
            evaluation.commit(functional.cross_entropy(model(moved), batch["y"]))


def plain(recorder, model, batch):
    with recorder.evaluation(batch) as evaluation, torch.no_grad():
        evaluation.commit(functional.cross_entropy(model(batch["x"]), batch["y"]))


def tracked(recorder, model, batch):
    """Gradients are not switched off, and nobody takes any."""
    with recorder.evaluation(batch) as evaluation:
        evaluation.commit(functional.cross_entropy(model(batch["x"]), batch["y"]))


def judged(run):
    return review(run.run, run.trust)


def doubts(found):
    return [reason.text for reason in found.reasons if "takes a derivative" in reason.text]


@pytest.mark.parametrize("evaluate", [hidden(), saliency, adversarial], ids=["hidden", "saliency", "adversarial"])
def test_a39_an_evaluation_that_differentiates_is_in_doubt_until_its_program_is_agreed_on(recorded, evaluate):
    run = recorded(evaluate)
    found = judged(run)
    assert found.outcome is Outcome.INCONCLUSIVE
    [text] = doubts(found)
    assert text.startswith("step 2: program ")
    assert "declare countersign --direct-path" in text
    pages = {page["program"]: page["differentiates"] for page in found.evidence["programs"]}
    assert [digest for digest, differentiates in pages.items() if differentiates] == [found.reasons[0].where["program"]]
    with off("evaluations that differentiate"):
        assert judged(run).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("evaluate", [saliency, adversarial])
def test_evaluations_that_differentiate_are_accepted_once_they_are_agreed_on_by_name(recorded, evaluate):
    run = recorded(evaluate, direct_paths=["evaluations"])
    found = judged(run)
    assert found.outcome is Outcome.ACCEPT, found.reasons
    [each] = found.evidence["execution"]["direct_paths"]["differentiating"]
    assert each["agreed"]


@pytest.mark.parametrize("evaluate", [plain, tracked])
def test_evaluations_without_a_backward_pass_need_no_agreement(recorded, evaluate):
    found = judged(recorded(evaluate))
    assert found.outcome is Outcome.ACCEPT, found.reasons
    assert not found.evidence["execution"]["direct_paths"]["differentiating"]


def test_a39_steps_of_a_run_without_an_optimizer_are_no_better(record_loop):
    """The same training, in steps that write nothing."""
    weights = torch.zeros(8, 16)
    batches = [{**batch, "w": weights} for batch in data()]

    def body(model, _, batch):
        w = batch["w"].detach().requires_grad_(True)
        functional.cross_entropy(batch["x"] @ w, batch["y"]).backward()
        (batch["w"] - 0.5 * w.grad).tolist()

    with pytest.warns(UserWarning, match=r"computes a derivative .* direct_paths=\['evaluations'\]"):
        run = record_loop(Net(), None, batches, body, chips=1)
    assert doubts(judged(run))


def inspected(run, devices):
    return inspect([run.run], run.trust, SETTINGS, now=run.now, worker=devices.run)


def returned(found):
    return [(each["step"], each["later"], each["batch"]) for each in found.evidence["replays"][0]["returned"]]


@pytest.mark.parametrize("every", [1, 3])
def test_a39_results_that_come_back_are_named_and_in_doubt(recorded, devices, every):
    """However short the segments are."""
    run = recorded(hidden(), data(5), checkpoint_every=every)
    with off("evaluations that differentiate"):
        found = inspected(run, devices)
        assert found.outcome is Outcome.INCONCLUSIVE
        assert returned(found) == [(2, 4, "w"), (4, 6, "w"), (6, 8, "w")]
        texts = [reason.text for reason in found.reasons if reason.text.startswith("step 2: 128 numbers that program")]
        assert "in the batch of step 4 as 'w', and it takes a derivative" in texts[0]
        with off("results that come back"):
            assert inspected(run, devices).outcome is Outcome.ACCEPT


def test_a39_with_an_agreement_results_that_come_back_are_named(recorded, devices):
    found = inspected(recorded(hidden(), data(4), direct_paths=["evaluations"]), devices)
    assert found.outcome is Outcome.ACCEPT, found.reasons
    assert "results come back in a later batch: of step 2 in that of step 4 ('w')" in found.reasons[0].text
    assert "programs that only compute and differentiate, as agreed: " in found.reasons[0].text


def cached():
    """A reference's answers, which a later step trains on."""
    answers = []

    def evaluate(recorder, model, batch):
        with recorder.evaluation(batch), torch.no_grad():
            answers.append(model(batch["x"].repeat(2, 1)).log_softmax(1).tolist())
        batch["reference"] = torch.tensor(answers[-1])

    return evaluate


def test_cached_references_are_named_and_accepted(recorded, devices):
    batches = data(4)
    batches[0]["reference"] = torch.zeros(24, 4)
    found = inspected(recorded(cached(), batches), devices)
    assert found.outcome is Outcome.ACCEPT, found.reasons
    assert returned(found) == [(2, 3, "reference"), (4, 5, "reference"), (6, 7, "reference")]


def test_one_batch_that_is_evaluated_again_is_no_result(recorded, devices):
    shown = data(1)[0]
    shown["x"] = shown["x"].repeat(2, 1)
    shown["y"] = shown["y"].repeat(2)

    def again(recorder, model, batch):
        with recorder.evaluation(shown) as evaluation, torch.no_grad():
            evaluation.commit(functional.cross_entropy(model(shown["x"].clone()), shown["y"]))

    found = inspected(recorded(again, data(4)), devices)
    assert found.outcome is Outcome.ACCEPT, found.reasons
    assert returned(found) == []


def test_norms_and_slopes_of_inputs_in_a_training_step_need_no_agreement(record_loop):
    model = Net()

    def body(model, optimizer, batch):
        inputs = batch["x"].clone().requires_grad_(True)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), batch["y"]).backward()
        [each.grad.norm().item() for each in model.parameters()]
        max(float(each.grad.abs().max()) for each in model.parameters())
        optimizer.step()

    found = judged(record_loop(model, torch.optim.SGD(model.parameters(), lr=0.01), data(), body, chips=1))
    assert found.outcome is Outcome.ACCEPT, found.reasons


class Derived(nn.Module):
    """Its initialisation takes a derivative, and keeps nothing of it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        torch.autograd.grad(self.net.weight.square().sum(), self.net.weight)

    def forward(self, inputs):
        return self.net(inputs)


def test_an_initialisation_that_differentiates_carries_nothing(record_loop):
    model = initialised(Derived, seed=1)
    run = record_loop(model, torch.optim.SGD(model.parameters(), lr=0.01), data(2), train, chips=1)
    found = judged(run)
    assert found.outcome is Outcome.ACCEPT, found.reasons
