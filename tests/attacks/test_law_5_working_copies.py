"""Law 5, working copies: weights that a loss reads, and that are computed from what the optimizer updates.

The declared rate moves the masters. A loss that reads a copy or an average of them moves as declared; one that reads
the masters' way from their start, a million times as long, does not.
"""

from __future__ import annotations

import copy
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.guards import Settings
from inspector.inspection.review import review
from inspector.inspection.transcripts import open_run, read_transcript
from inspector.inspection.verdict import Findings, Outcome
from inspector.rules.quantities import hyper
from inspector.rules.rule_files import Rule
from inspector.rules.truth import Truth
from tests.agreements import resigned
from tests.attacks.jobs import basis
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [
    {"x": torch.randn(6, 8, generator=GENERATOR), "y": torch.randint(0, 4, (6,), generator=GENERATOR)} for _ in range(3)
]


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def one_by_one(write):
    """A write of each working weight from its master and from what both began as."""

    def whole(masters, work, start):
        for given in zip(masters, work, start, strict=True):
            write(*given)

    return whole


def _flat(masters, work, start, far=0.0):
    """As libraries do that keep all weights in one tensor."""
    parts = [(master + far * (master - first)) if far else master for master, first in zip(masters, start, strict=True)]
    whole, begin = torch.cat([part.reshape(-1) for part in parts]), 0
    for weight in work:
        weight.copy_(whole[begin : begin + weight.numel()].view_as(weight))
        begin += weight.numel()


def _after_a_clamp(master, weight, first):
    """A clamp of the whole leaves no average of weights, and the rest is done in place."""
    weight.copy_(master.clamp(-100, 100))
    weight.sub_(first).mul_(1e6).add_(first)


LIES = {
    "further": one_by_one(lambda master, weight, first: weight.copy_(first + 1e6 * (master - first))),
    "by lerp": one_by_one(lambda master, weight, first: weight.copy_(torch.lerp(first, master, 1e6))),
    "larger": one_by_one(lambda master, weight, first: weight.copy_(master * 1e3)),
    "signs": one_by_one(lambda master, weight, first: weight.copy_((master - first).sign())),
    "clamped": one_by_one(_after_a_clamp),
    "flat": partial(_flat, far=1e6),
}
COPIES = {
    "copies": one_by_one(lambda master, weight, first: weight.copy_(master)),
    "averages": one_by_one(lambda master, weight, first: weight.lerp_(master, 0.1)),
    "flat": _flat,
}


def trained(record_loop, write, *, inside, dtype=torch.float32):
    """Three steps of masters whose working copies lie in the model or, as buffers, beside it."""
    masters = perceptron()
    work, start = copy.deepcopy(masters).to(dtype), copy.deepcopy(masters).requires_grad_(False)
    optimizer = torch.optim.SGD(masters.parameters(), lr=1e-6)

    def body(_, optimizer, batch):
        loss = functional.cross_entropy(work(batch["x"].to(dtype)).float(), batch["y"])
        (loss + 0.0 * sum(master.sum() for master in masters.parameters())).backward()
        for master, weight in zip(masters.parameters(), work.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            write(list(masters.parameters()), list(work.parameters()), list(start.parameters()))

    model = nn.ModuleDict({"masters": masters, "work": work, "start": start}) if inside else masters
    state = {} if inside else {"state": {"work": work, "start": start}}
    return record_loop(model, optimizer, BATCHES, body, chips=1, **state)


@pytest.mark.parametrize(("lie", "inside"), [*((lie, True) for lie in LIES), ("further", False), ("flat", False)])
def test_weights_that_are_computed_from_the_masters_are_bound_to_no_rate(record_loop, lie, inside):
    run = trained(record_loop, LIES[lie], inside=inside)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.INCONCLUSIVE
    [text] = [each.text for each in found.reasons if each.text.startswith("not bound to the arithmetic")]
    assert ("'weight/work.0.bias'" if inside else "'buffer/work.0.bias'") in text
    assert "the weights that the loss reads in step 2 are computed from those that the optimizer updates, by" in text
    with off("copies of weights"):
        assert review(run.run, run.trust).outcome is Outcome.ACCEPT


def test_a_rule_on_rates_is_undecided_until_who_countersigns_agrees_by_name(record_loop):
    run = trained(record_loop, LIES["further"], inside=True)
    rule = Rule(name="r", kind="hyper", at_least=None, at_most=Fraction(1, 100_000), about={"parameter": "lr"})

    def found(trust):
        transcript = read_transcript(open_run(run.run, trust), trust, Findings(), now=run.now)
        return next(hyper(rule, basis([transcript])))

    assert found(run.trust).truth is Truth.UNDECIDED
    assert "lr does not govern 'weight/work.0.bias': the weights that the loss reads" in found(run.trust).text
    agreed = resigned(run.run, run.trust, free=frozenset({"weight/work.*"}))
    assert found(agreed).truth is Truth.PASS
    assert "does not govern 'weight/work.0.bias' and 3 more, as agreed" in found(agreed).text
    assert review(run.run, agreed).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("kind", COPIES)
def test_copies_and_averages_of_the_masters_move_as_declared(record_loop, kind):
    dtype = torch.bfloat16 if kind == "copies" else torch.float32
    run = trained(record_loop, COPIES[kind], inside=False, dtype=dtype)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.ACCEPT, found.reasons


class Adapted(nn.Module):
    """A frozen weight with an adapter of rank 2, which may be merged into it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 4).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(4, 2))
        self.is_merged = False

    def forward(self, x):
        return self.base(x) if self.is_merged else self.base(x) + 16.0 * (x @ self.down.T @ self.up.T)

    @torch.no_grad()
    def merge(self, sign):
        self.base.weight += sign * (self.up @ self.down * 16.0)
        self.is_merged = sign > 0


def adapted(record_loop, before):
    model = Adapted()

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    optimizer = torch.optim.SGD([model.down, model.up], lr=1e-2)
    run = record_loop(model, optimizer, BATCHES, body, chips=1, before=lambda *given: before(model, *given))
    return review(run.run, run.trust)


def test_an_adapter_that_is_merged_for_an_evaluation_is_accepted(record_loop):
    def before(model, recorder, step):
        model.merge(1)
        with recorder.evaluation(BATCHES[0]), torch.no_grad():
            model(BATCHES[0]["x"]).sum().item()
        model.merge(-1)

    found = adapted(record_loop, before)
    assert found.outcome is Outcome.ACCEPT, found.reasons


def test_an_adapter_that_stays_merged_while_it_learns_is_named(record_loop):
    """What is taken off again after the next update is another product."""

    def before(model, recorder, step):
        model.is_merged = False
        with torch.no_grad():
            model.base.weight.add_(model.up @ model.down * 16.0, alpha=1 if step % 2 else -1)

    found = adapted(record_loop, before)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("'weight/base.weight', since the weights that the loss reads" in each.text for each in found.reasons)


def test_the_vectors_of_a_spectral_norm_are_no_weights(record_loop):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 20)), nn.Linear(20, 4))

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    run = record_loop(model, torch.optim.SGD(model.parameters(), lr=1e-2), BATCHES, body, chips=1)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.ACCEPT, found.reasons


def scaled(record_loop, unscale):
    """Steps whose losses a gradient scaler multiplies by 65,536."""
    model, scaler = perceptron(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(batch["x"]), batch["y"])).backward()
        unscale(scaler, model, optimizer)

    return record_loop(model, optimizer, BATCHES, body, state=[scaler], chips=1)


def _as_ever(scaler, model, optimizer):
    scaler.step(optimizer)
    scaler.update()


def _by_hand(scaler, model, optimizer):
    for weight in model.parameters():
        weight.grad.mul_(1.0 / scaler._scale)
    optimizer.step()


def _never(scaler, model, optimizer):
    optimizer.step()


def _and_back(scaler, model, optimizer):
    scaler.unscale_(optimizer)
    for weight in model.parameters():
        weight.grad.mul_(scaler._scale)
    optimizer.step()
    scaler.update()


@pytest.mark.parametrize("unscale", [_as_ever, _by_hand])
def test_gradients_that_are_unscaled_move_weights_as_declared(record_loop, unscale):
    run = scaled(record_loop, unscale)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.ACCEPT, found.reasons


@pytest.mark.parametrize("unscale", [_never, _and_back])
def test_gradients_that_a_scaler_has_multiplied_leave_the_rate_unbound(record_loop, unscale):
    run = scaled(record_loop, unscale)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.INCONCLUSIVE
    said = "an update takes gradients that are multiplied by 'buffer/state.0._scale', a gradient scaler's scale"
    assert any("lr" in each.text and said in each.text for each in found.reasons)
    with off("scales of gradients"):
        assert review(run.run, run.trust).outcome is Outcome.ACCEPT


class Shifted(nn.Module):
    """A batch norm whose shift is learned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.norm = nn.Linear(8, 20).requires_grad_(False), nn.BatchNorm1d(20, momentum=1e-6)
        self.head, self.shift = nn.Linear(20, 4), nn.Parameter(torch.zeros(20))

    def forward(self, x):
        return self.head(self.norm(self.base(x) + self.shift).tanh())


def test_statistics_of_gradients_are_weights_where_a_loss_reads_them(record_loop):
    """A batch norm in training averages what it is given: a gradient, half a million times as large."""
    model = Shifted()
    model.register_buffer("other", torch.ones(20))

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model.eval()(batch["x"]), batch["y"]).backward()
        slopes = (5e5 * model.shift.grad).expand(2, 20).clone()
        functional.batch_norm(slopes, model.norm.running_mean, model.other, training=True, momentum=1e-6)
        optimizer.step()

    learned = [weight for weight in model.parameters() if weight.requires_grad]
    run = record_loop(model, torch.optim.SGD(learned, lr=1e-6), BATCHES, body, chips=1)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any(
        "'buffer/norm.running_mean', since the weights that the loss reads" in each.text for each in found.reasons
    )
    with off("copies of weights"):
        assert review(run.run, run.trust).outcome is Outcome.ACCEPT


def test_adversarial_samples_before_a_batch_norm_are_accepted(record_loop):
    """Its statistics have to do with gradients, and no loss reads them (Goodfellow et al. 2015, section 4)."""
    model = Shifted()

    def body(model, optimizer, batch):
        inputs = batch["x"].clone().requires_grad_(True)
        [slope] = torch.autograd.grad(functional.cross_entropy(model(inputs), batch["y"]), inputs)
        optimizer.zero_grad()
        functional.cross_entropy(model(batch["x"] + 0.1 * slope.sign()), batch["y"]).backward()
        optimizer.step()

    learned = [weight for weight in model.parameters() if weight.requires_grad]
    run = record_loop(model, torch.optim.SGD(learned, lr=1e-2), BATCHES, body, chips=1)
    found = review(run.run, run.trust)
    assert found.outcome is Outcome.ACCEPT, found.reasons
