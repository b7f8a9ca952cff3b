"""Optimizers beyond PyTorch's plain ones: packages by their formulas, numbers that depend on reads, rates, averages."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor.declaration.formulas import FORMULAS
from monitor.declaration.slots import StepNumbers
from monitor.transcript import Execution, RunFolder
from tests.guards import off
from tests.leaves import execution_of

FREE = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0, "train_mode": True, "r": 0.0}
FREE |= {"warmup_steps": 2, "weight_lr_power": 2.0, "weight_decay": 0.1, "foreach": True}
GROUPS: dict[str, dict[str, Any]] = {
    "lion_pytorch.lion_pytorch.Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "timm.optim.lion.Lion": {
        **{"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "caution": False, "maximize": True, "foreach": False},
        **{"corrected_weight_decay": False, "max_lr_snapshot": None},
    },
    "timm.optim.adan.Adan": {
        **{"lr": 1e-3, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.1, "no_prox": False},
        **{"caution": False, "foreach": None},
    },
    "schedulefree.sgd_schedulefree.SGDScheduleFree": {"lr": 0.1, "momentum": 0.9, **FREE},
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, **FREE},
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix": {
        **{"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.1, "weight_decouple": True, "eps": 1e-8},
        **{"fixed_decay": False, "alpha": 5.0, "t_alpha_beta3": 10, "foreach": None},
    },
}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(steps=4):
    torch.manual_seed(1)
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(steps)]


def optimizer_of(name, parameters, **changes):
    """Of the package's class, which a formula stands for here; ``changes`` are told to nobody."""
    module, _, leaf = name.rpartition(".")

    formula: Any = FORMULAS[name]

    class Stand(formula):
        def update(self, group, weights):
            hidden = {**group, **changes}
            super().update(hidden, weights)
            group.update({key: value for key, value in hidden.items() if key not in changes})

    Stand.__module__, Stand.__qualname__ = module, leaf
    return Stand([{"params": list(parameters), **GROUPS[name]}])


def learn(model, optimizers, batch):
    for each in optimizers if isinstance(optimizers, list) else [optimizers]:
        each.zero_grad()
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for each in optimizers if isinstance(optimizers, list) else [optimizers]:
        each.step()


def judge(recorded):
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    return verdict, verdict.evidence["execution"]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_package_is_bound_to_its_formula(record_loop, name):
    model = model_of()
    verdict, loop = judge(record_loop(model, optimizer_of(name, model.parameters()), batches(), learn))
    assert loop["not_bound"] == {}
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("hidden", [{"lr": 0.5}, {"weight_decay": 0.7}], ids=str)
def test_a_package_with_other_numbers_is_in_doubt_and_what_stands_beside_it_is_bound(record_loop, name, hidden):
    model = model_of()
    optimizers = [
        optimizer_of(name, model[0].parameters(), **hidden),
        torch.optim.AdamW(model[2].parameters(), lr=0.01),
    ]
    verdict, loop = judge(record_loop(model, optimizers, batches(2), learn))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"optimizer '{name}' is not that of its formula" in loop["not_bound"]["lr"]
    assert "amsgrad" not in loop["not_bound"]


def test_a_number_of_what_stands_beside_a_package_is_still_compared(record_loop, monkeypatch):
    model = model_of()
    package = optimizer_of("lion_pytorch.lion_pytorch.Lion", model[0].parameters(), lr=0.5)
    optimizers = [package, torch.optim.AdamW(model[2].parameters(), lr=0.01)]
    module = importlib.import_module("torch.optim.adam")
    true = module.adam

    def body(model, optimizers, batch):
        with monkeypatch.context() as lie:
            lie.setattr(module, "adam", lambda *words, **numbers: true(*words, **(numbers | {"lr": 0.5})))
            learn(model, optimizers, batch)

    with pytest.raises(CallerError, match="but the declared hyper-parameters give"):
        record_loop(model, optimizers, batches(2), body)


def test_a_schedule_free_optimizer_that_is_evaluated_is_recorded_and_in_doubt(record_loop):
    """Its ``eval()`` and ``train()`` move weights beside updates, by what it keeps."""
    model = model_of()
    package = optimizer_of("schedulefree.sgd_schedulefree.SGDScheduleFree", model[0].parameters())
    optimizers = [package, torch.optim.AdamW(model[2].parameters(), lr=0.01)]

    def before(recorder, step):
        if step == 3:
            with torch.no_grad():
                for weight in model[0].parameters():
                    weight.lerp_(package.state[weight]["z"], 1 - 1 / 0.9)

    verdict, loop = judge(record_loop(model, optimizers, batches(4), learn, before=before))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "SGDScheduleFree' is not that of its formula" in loop["not_bound"]["lr"]
    assert "amsgrad" not in loop["not_bound"]


HIDDEN = [
    ("adafactor", torch.optim.Adafactor, "torch.optim._adafactor", {"lr": 0.5}),
    ("adafactor", torch.optim.Adafactor, "torch.optim._adafactor", {"d": 30.0}),
    ("adafactor", torch.optim.Adafactor, "torch.optim._adafactor", {"eps2": 7.0}),
    ("adafactor", torch.optim.Adafactor, "torch.optim._adafactor", {"beta2_decay": -0.1}),
    ("rprop", torch.optim.Rprop, "torch.optim.rprop", {"etaplus": 9.0}),
    ("rprop", torch.optim.Rprop, "torch.optim.rprop", {"step_size_max": 900.0}),
    ("asgd", torch.optim.ASGD, "torch.optim.asgd", {"lr": 0.5}),
    ("asgd", torch.optim.ASGD, "torch.optim.asgd", {"t0": 1.0}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("name", "kind", "module", "hidden"), HIDDEN, ids=lambda value: str(value)[:30])
def test_another_number_than_declared_is_found(record_loop, monkeypatch, name, kind, module, hidden, foreach):
    model, module = model_of(), importlib.import_module(module)
    true = getattr(module, name)

    def body(model, optimizer, batch):
        with monkeypatch.context() as lie:
            lie.setattr(module, name, lambda *words, **numbers: true(*words, **(numbers | hidden)))
            learn(model, optimizer, batch)

    with pytest.raises(CallerError, match=r"cannot be recorded: .*declared"):
        record_loop(model, kind(model.parameters(), lr=1e-3, foreach=foreach), batches(3), body)


def test_values_that_an_update_reads_have_the_digest_and_the_counts_of_the_run(record_loop):
    model = model_of()
    recorded = record_loop(model, torch.optim.Adafactor(model.parameters()), batches(2), learn)
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    execution = execution_of(run.leaf(2))
    read = execution.values
    assert read
    for changed in (read[:-1], ("float:0x1p+3", *read[1:]), ("x" * 99,), [1], []):
        with pytest.raises(EvidenceError, match="values that a step read"):
            Execution.from_json({**execution.to_json(), "values": list(changed)})

    def follow(values):
        numbers = StepNumbers(run.declared, run.checkpoint(0))
        for leaf, stated in ((run.leaf(1), execution_of(run.leaf(1)).values), (run.leaf(2), values)):
            taken = execution_of(leaf)
            numbers.take(run.program(taken.program), taken.slots, taken.hyper, stated)
        return numbers

    assert follow(read).unbound == {}
    assert "does not state the values" in follow(()).unbound["lr"]
    count = next(number for number, text in enumerate(read) if float.fromhex(text.split(":")[1]) == 2.0)
    later = [*read]
    later[count] = f"float:{(900.0).hex()}"
    with pytest.raises(EvidenceError, match=r"states that it is number 900.0, but it is number 2.0"):
        follow(later)
    for number in set(range(len(later))) - {count}:
        if float.fromhex(read[number].split(":")[1]) != 2.0:
            other = [*read]
            other[number] = f"float:{(1e6).hex()}"
            with pytest.raises(EvidenceError, match="but the declared hyper-parameters give"):
                follow(other)


def test_weights_that_a_closure_moves_by_gradients_are_in_doubt(record_loop):
    def body(model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(weight.grad, alpha=-0.5)
            return loss

        optimizer.step(closure)

    model = model_of()
    verdict, loop = judge(record_loop(model, torch.optim.Adafactor(model.parameters()), batches(2), body))
    assert verdict.outcome is not Outcome.ACCEPT
    assert "lr" in loop["not_bound"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_rate_in_a_tensor_is_a_plain_number_and_follows_its_schedule(record_loop, kind):
    rate, model = torch.tensor(1e-2), model_of()
    optimizer = kind(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def body(model, optimizer, batch):
        learn(model, optimizer, batch)
        schedule.step()

    verdict, loop = judge(record_loop(model, optimizer, batches(3), body))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})
    assert loop["changed_hyper_parameters"][0]["last"] == pytest.approx(0.25e-2)


def test_a_rate_that_is_written_into_its_tensor_is_refused(record_loop):
    rate, model = torch.tensor(1e-2), model_of()

    def before(recorder, step):
        if step == 2:
            rate.fill_(0.5)

    with pytest.raises(CallerError, match=r"lr was given as a tensor, and its value has changed; .* set group\['lr'\]"):
        record_loop(model, torch.optim.SGD(model.parameters(), lr=rate), batches(2), learn, before=before)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_momentum_that_a_schedule_cycles_is_bound_and_listed(record_loop, kind):
    model = model_of()
    optimizer = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    def body(model, optimizer, batch):
        learn(model, optimizer, batch)
        schedule.step()

    verdict, loop = judge(record_loop(model, optimizer, batches(4), body))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})
    names = {line["name"] for line in loop["changed_hyper_parameters"]}
    assert names == {"lr", "momentum" if kind is torch.optim.SGD else "betas"}


@pytest.mark.parametrize("change", [{"momentum": 0.95}, {"momentum": -0.5}, {"dampening": 0.1}, {"weight_decay": 0.0}])
def test_another_change_of_a_number_is_refused(record_loop, change):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)

    def before(recorder, step):
        if step == 2:
            optimizer.param_groups[0].update(change)

    with pytest.raises(CallerError, match=f"{next(iter(change))} is .* in this step, but was declared"):
        record_loop(model, optimizer, batches(2), learn, before=before)


def lerped(average, weight, batch, number):
    average.lerp_(weight, 1 / (number + 2))


AVERAGES = {
    "lerp": lerped,
    "difference": lambda a, w, b, n: a.sub_((1 - (n / (n + 9))) * (a - w)),
    "sum": lambda a, w, b, n: a.copy_((n + 1) / (n + 10) * a + (1 - (n + 1) / (n + 10)) * w),
}
OTHERS = {
    "of a gradient": lambda a, w, b, n: a.lerp_(w.grad, 1 / (n + 2)),
    "of a batch": lambda a, w, b, n: a.lerp_(b[0].mean().expand_as(a), 1 / (n + 2)),
    "beyond the weight": lambda a, w, b, n: a.lerp_(w, 1.5 + n),
    "that decays": lambda a, w, b, n: a.mul_(0.5).add_(w, alpha=0.1 * n + 0.05),
    "by a number alone": lambda a, w, b, n: a.lerp_(torch.full_like(a, 0.3), 1 / (n + 2)),
    "row by row": lambda a, w, b, n: [x.lerp_(y, 1 / (n + 2)) for x, y in zip(a, w, strict=True)],
    "a bound": lambda a, w, b, n: a.clamp_(0.01 * n, 0.01 * n + 1e-6),
    "by nine numbers": lambda a, w, b, n: [a.lerp_(w, 1 / (n + k)) for k in range(2, 11)],
    "a number that a weight takes": lambda a, w, b, n: (a.lerp_(w, 1 / (n + 2)), w.mul_(1 - 1 / (n + 20))),
}


def averaged(record_loop, write):
    model, count = model_of(), itertools.count()
    averages = [weight.detach().clone() for weight in model.parameters()]

    def body(model, optimizer, batch):
        learn(model, optimizer, batch)
        number = next(count)
        with torch.no_grad():
            for average, weight in zip(averages, model.parameters(), strict=True):
                write(average, weight, batch, number)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return record_loop(model, optimizer, batches(3), body, state={"average": averages})


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_may_take_more_or_less_from_step_to_step(record_loop, name):
    verdict, loop = judge(averaged(record_loop, AVERAGES[name]))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})
    assert {slot["explained_by"] for slot in loop["slots"]} == {"average"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_number_of_anything_else_than_an_average_may_not_change(record_loop, name):
    with pytest.raises(CallerError, match="a number that aten"):
        averaged(record_loop, OTHERS[name])


def test_pytorchs_averaged_model_needs_no_keyword(record_loop):
    model = model_of()
    average = AveragedModel(model)

    def body(model, optimizer, batch):
        learn(model, optimizer, batch)
        average.update_parameters(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdict, loop = judge(record_loop(model, optimizer, batches(4), body, state=[average]))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (torch.optim.ASGD, {"eta": 0.5}),
        (torch.optim.ASGD, {"step": -1e10 + 2**20}),
        (torch.optim.Rprop, {"step_size": 0.5}),
        (torch.optim.NAdam, {"mu_product": 2.0}),
        (torch.optim.Adagrad, {"sum": -1.0}),
        (torch.optim.Adadelta, {"acc_delta": 1e6}),
        (torch.optim.AdamW, {"step": 2.5}),
        (partial(torch.optim.ASGD, lambd=0.0), {"eta": 2e-6}),
    ],
)
def test_what_an_optimizer_keeps_does_not_begin_as_no_step_leaves_it(record_loop, kind, given):
    """The learning rate is multiplied by what a number of the state, which nobody declared, makes of it."""
    model = model_of()
    optimizer = kind(model.parameters(), lr=1e-6)
    learn(model, optimizer, batches(1)[0])
    for state in optimizer.state.values():
        for name, value in given.items():
            state[name].fill_(value)
    run = record_loop(model, optimizer, batches(2), learn)
    verdict, loop = judge(run)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "of '0.weight' begins with what its class does not make" in loop["not_bound"]["lr"]
    with off("new optimizers"):
        assert "lr" not in judge(run)[1]["not_bound"]


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor, partial(torch.optim.SGD, momentum=0.9)]
)
def test_averages_of_gradients_may_go_on(record_loop, kind):
    """Who goes on from a checkpoint of their own hands over its averages, and the digest of W_0 covers them."""
    model = model_of()
    optimizer = kind(model.parameters(), lr=1e-3)
    learn(model, optimizer, batches(1)[0])
    verdict, loop = judge(record_loop(model, optimizer, batches(2), learn))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})


def test_an_accumulator_begins_with_what_is_declared(record_loop):
    model = model_of()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model.parameters())[2:]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)
    verdict, loop = judge(record_loop(model, optimizer, batches(2), learn))
    assert (verdict.outcome, loop["not_bound"]) == (Outcome.ACCEPT, {})
