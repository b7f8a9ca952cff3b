"""A loop that is refused or warned of has a way that is accepted: the one that its message gives."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim import limits
from monitor import padded
from monitor.declaration.schedules import Schedule
from monitor.recording import step_programs
from tests.monitor.recording.remedies import (
    NUMBERS,
    Coded,
    Own,
    also,
    follow,
    learn,
    linear,
    loop,
    loss_of,
    pairs,
    plain,
    row,
    scaled,
    sgd,
    with_loss,
)


def two():
    return nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})


def with_both(frozen, later):
    """A loop whose second layer learns from the second step on: given to the optimizer then, or frozen until then."""

    def optimizer(model):
        model["two"].requires_grad_(not frozen)
        return sgd(model if frozen else model["one"])

    def between(recorder, model, optimizer, batch):
        if frozen:
            model["two"].requires_grad_(True)
        else:
            later(model["two"], optimizer)

    def change(m, x, y):
        return functional.cross_entropy(m["one"](x) + m["two"](x), y)

    return with_loss(change, model=two, optimizer=optimizer, between=between)


def as_group(layer, optimizer):
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(layer.parameters())})


def in_group(layer, optimizer):
    if len(optimizer.param_groups[0]["params"]) == 2:
        optimizer.param_groups[0]["params"] += list(layer.parameters())


def in_parts(count=2, *, both=True, frozen=False):
    """A loop whose step is cut into micro-batches, of which one layer of two gets gradients of each."""

    def model():
        net = two()
        net["two"].requires_grad_(not frozen)
        return net

    def body(model, optimizer, batch, step):
        for x, y in step.micro_batches(count):
            scores = model["one"](x)
            functional.cross_entropy(scores + model["two"](x) if both else scores, y).backward()
        optimizer.step()

    return loop(body, model=model)


def evaluated(how, model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))):
    """A loop that looks at each batch before it trains on it."""

    def between(recorder, net, optimizer, batch):
        net.train(how != "eval")
        with (recorder.step if how == "step" else recorder.evaluation)(batch), torch.no_grad():
            net(batch[0])
        net.train()

    return loop(model=model, between=between)


def forgetting(inside):
    """A loop that drops its momentum before each step but the first, which an evaluation precedes."""

    def between(recorder, model, optimizer, batch):
        if not inside:
            optimizer.state.clear()
        with recorder.evaluation(batch), torch.no_grad():
            model(batch[0])

    def body(model, optimizer, batch, step):
        if inside:
            optimizer.state.clear()
        plain(model, optimizer, batch, step)

    return loop(body, between=between)


def looked(how, *, first=False):
    """A loop that logs much behind its first step; or before it, behind an evaluation."""

    def look(model):
        for _ in range(40):
            model.weight.detach().abs()

    def train(make):
        model = nn.Linear(6, 800)
        optimizer = sgd(model)
        keywords = {"beside": 64, "maximum_slack": Fraction(1)} if how == "allowed" else {}
        recorder = make(model, optimizer, **keywords)
        for number, batch in enumerate([(torch.randn(64, 6), torch.randint(0, 3, (64,))) for _ in range(3)]):
            if number == 1 - first:
                with recorder.evaluation(batch), torch.no_grad():
                    model(batch[0])
                    if how == "evaluated":
                        look(model)
                if how != "evaluated":
                    look(model)
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
        return model

    return train


def rolled(inside):
    """A loop that runs its model often behind each step, and takes another number each time."""

    def between(recorder, model, optimizer, batch):
        with recorder.evaluation(batch) if inside else nullcontext(), torch.no_grad():
            for number in range(20):
                model(batch[0]) * (number if inside else float(batch[0][0, 0]))

    return loop(between=between, batches=lambda: pairs(5))


def logging(how):
    """A loop that logs a norm behind each step, as a part of another number each time."""

    def between(recorder, model, optimizer, batch):
        if how == "evaluated":
            with recorder.evaluation(batch), torch.no_grad():
                model(batch[0]), model.weight.norm()
        else:
            model.weight.detach().norm() / float(batch[0][0, 0]), model.weight.detach().norm()

    return loop(between=between, batches=lambda: pairs(8))


def wasted(how):
    """A loop whose steps write over a product before anything came of it."""

    def waste(model, batch):
        made = model.weight @ model.weight.t()
        if how == "read":
            made.sum().item()
        made.zero_()

    return also(waste if how != "left out" else lambda model, batch: None, batches=lambda: pairs(8))


def annealed(how):
    """A loop whose loss has a weight that falls."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer, free_slots=how == "agreed")
        for number, (x, y) in enumerate(pairs(), start=1):
            weight = torch.tensor(1 / number) if how == "batch" else 1 / number
            with recorder.step((x, y, weight)):
                learn(optimizer, functional.cross_entropy(model(x), y) * weight)
        return model

    return train


NUMBER = (
    "pass it as a tensor of the batch, compute with the tensor itself where it comes from .item(), or have lab and "
    "inspector agree by free_slots=True"
)


def balanced(*, read):
    """A loop whose loss has a second part that is as large as the first."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer)
        for x, y in pairs():
            with recorder.step((x, y)):
                first, second = functional.cross_entropy(model(x), y), model(x).square().mean()
                times = first.item() / second.item() if read else (first / second).detach()
                learn(optimizer, first + second * times)
        return model

    return train


def cycled(*, late=False, **keywords):
    """A loop whose momentum changes, by a schedule that is made before the recorder or ``late``."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer, **keywords) if late else None
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        recorder = recorder or make(model, optimizer, **keywords)
        for batch in pairs():
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
                rate.step()
        return model

    return train


def scheduled(follows, declares=True):
    def train(make):
        model = linear()
        optimizer = sgd(model)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 if follows else 4)
        recorder = make(
            model, optimizer, **({"schedule": Schedule.of("linear", steps=3, last=0.1)} if declares else {})
        )
        for batch in pairs():
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
                rate.step()
        return model

    return train


def two_rates(steps):
    """A loop that updates twice with each batch, at two rates: in one step or in two."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer)
        for batch in pairs():
            for rates in ((0.1,), (0.05,)) if steps == 2 else ((0.1, 0.05),):
                with recorder.step(batch):
                    for rate in rates:
                        optimizer.param_groups[0]["lr"] = rate
                        learn(optimizer, loss_of(model, batch))
        return model

    return train


def other_operators(**keywords):
    """A loop whose optimizer is said to be SGD, and takes half as much again of each gradient."""

    def step(self, closure=None):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.clone(weight.grad)
                else:
                    state["momentum_buffer"].mul_(0.9).add_(weight.grad, alpha=1.5)
                weight.add_(state["momentum_buffer"], alpha=-0.1)

    def optimizer(model):
        made = sgd(model)
        made.step = torch.optim.Optimizer.profile_hook_step(step).__get__(made)
        return made

    return loop(optimizer=optimizer, **keywords)


def restored(how):
    """A loop that goes back to its weights of before, or to twice as much."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        best = copy.deepcopy(model)
        keywords: dict[str, Any] = {"state": {"best": best}} if how in ("state", "average") else {}
        if how == "agreed":
            keywords = {"free": NUMBERS, "direct_paths": ["weight/bias", "weight/weight"]}
        recorder = make(model, optimizer, **keywords)
        for number, batch in enumerate(pairs()):
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
            with torch.no_grad():
                if number == 0 and how != "agreed":
                    best.load_state_dict(model.state_dict())
                if number == 1 and how == "average":
                    for mine, theirs in zip(model.parameters(), best.parameters(), strict=True):
                        mine.mul_(0.5).add_(theirs, alpha=0.5)
                elif number == 1 and how == "clamp":
                    model.weight.clamp_(-0.2, 0.2), model.bias.clamp_(-0.2, 0.2)
                elif number == 1:
                    more = 1 if how == "state" else 2
                    model.load_state_dict({name: more * value for name, value in best.state_dict().items()})
        return model

    return train


def keeping(how):
    """A loop that keeps its outputs."""
    held = []

    def body(model, optimizer, batch, step):
        out = model(batch)
        learn(optimizer, out.square().mean())
        for factor in (1.0, 2.0, 3.0, 4.0):
            held.append(how(out.detach() * factor))

    return loop(body, model=lambda: nn.Linear(4, 500), batches=lambda: [torch.randn(500, 4) for _ in range(4)])


def committed(loss):
    def body(model, optimizer, batch, step):
        found = loss_of(model, batch)
        learn(optimizer, found)
        step.commit(loss=loss(found))

    return loop(body)


def committed_outside(inside):
    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer)
        for batch in pairs():
            with recorder.step(batch) as step:
                loss = loss_of(model, batch)
                learn(optimizer, loss)
                if inside:
                    step.commit(loss=loss)
            if not inside:
                step.commit(loss=loss)
        return model

    return train


class Halving(Own):
    """Halves its momentum after each update."""

    def step(self, closure=None):
        super().step(closure)
        halve(None, self)


@torch.no_grad()
def halve(model, optimizer):
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def gathering(inside):
    """A loop that accumulates gradients, and lets go of them in place."""

    def body(model, optimizer, batch, step):
        if inside:
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()

    def between(recorder, model, optimizer, batch):
        if not inside:
            optimizer.zero_grad(set_to_none=False)

    return loop(body, between=between)


def failing(asks):
    """A loop that finds out by trying whether two tensors go together."""

    def more(model, batch):
        one, other = batch[0].sum(1), batch[0].sum(0)
        if asks and one.shape != other.shape:
            return
        with suppress(RuntimeError):
            one.add_(other)

    def body(model, optimizer, batch, step):
        more(model, batch)
        plain(model, optimizer, batch, step)

    return loop(body)


def seeded(mends):
    """A loop whose backward pass begins with numbers of the batch."""

    def body(model, optimizer, batch, step):
        optimizer.zero_grad()
        if mends:
            (model(batch[0]) * batch[1]).sum().backward()
        else:
            model(batch[0]).backward(batch[1])
        optimizer.step()

    return body


def weights():
    return [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(3)]


@torch.no_grad()
def by_hand(model, optimizer, batch, step):
    with torch.enable_grad():
        loss_of(model, batch).backward()
    for weight in model.parameters():
        weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None


def coded():
    return [(x, y, torch.randn(4, 6)) for x, y in pairs()]


def set_codes(model, batch):
    model.codes = OUTSIDE


def copy_codes(model, batch):
    model.codes.copy_(batch[0])


def large(how):
    """A loop that reads a table that nothing it knows of holds."""
    table = torch.arange(24.0).view(4, 6) / 24

    def model():
        net = linear()
        if how == "buffer":
            net.register_buffer("table", table)
        return net

    def change(m, x, y, *found):
        rows = found[0] if how == "batch" else m.table if how == "buffer" else table
        return functional.cross_entropy(m(x + rows), y)

    def batches():
        return [(x, y, table.clone()) if how == "batch" else (x, y) for x, y in pairs()]

    return with_loss(change, model=model, batches=batches, **({"state": {"table": table}} if how == "state" else {}))


def condition(weight):
    return torch.cond(torch.tensor(True), lambda w: w + 1, lambda w: w - 1, (weight,))


def of_numpy(weight):
    return torch.from_numpy(weight.detach().numpy().copy())


OUTSIDE = torch.ones(4, 6)


HELD = {"held": torch.ones(4, 6)}


def set_held(model, batch):
    model.codes = HELD["held"].clone()


def set_sparse(model, batch):
    model.codes = SPARSE


def set_dense(model, batch):
    model.codes = batch[0] * 1


def set_given(model, batch):
    model.codes = batch[2]


def between_steps(change, **parts):
    """A loop that does ``change(model)`` between steps, to a buffer."""
    parts = {"model": Coded, "direct_paths": ["buffer/codes"], **parts}
    return loop(between=lambda recorder, model, optimizer, batch: change(model.codes), **parts)


EVALUATE = "run it in 'with recorder.evaluation(batch):', or declare a higher 'beside' and a maximum_slack with room"


FROM_THE_START = "give it from the start all that will ever learn, frozen by requires_grad_(False) until then"


WRITTEN = (
    "copy or average what weights or tensors under state=[…] hold, clamp all of a weight, or have lab and inspector "
    "agree: free={} and {}"
)


SPARSE = torch.eye(6)[:4].to_sparse()
COMPLEX = torch.complex(torch.ones(4, 6), torch.linspace(0, 1, 24).view(4, 6)).to(torch.complex128)


ONE = torch.ones(())


def growing(how):
    """A loop with another length in each step, or another number of passes."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer)
        for number in range(1, 5):
            x, y = torch.randn(number, 6), torch.randint(0, 3, (number,))
            if how == "padded":
                x, y = padded(x, (4,), dim=0), padded(y, (4,), value=-100)
            elif how == "the same":
                x, y = x[:1], y[:1]
            with recorder.step((x, y)):
                learn(optimizer, functional.cross_entropy(model(x), y))
        return model

    return train


def threaded(how):
    """A loop that logs a norm in another thread."""

    def between(recorder, model, optimizer, batch):
        weight = model.weight.detach()
        if how == "here":
            weight.norm()
        elif how == "copied":
            in_thread(torch.norm, torch.from_numpy(weight.numpy().copy()))
        else:
            in_thread(torch.norm, weight)

    return loop(between=between)


def in_thread(work, *given):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work, *given).result()


LOOPS = {
    "another thread": row(
        "run it in the thread that trains, or on a copy made there, such as tensor.detach().numpy().copy()",
        *map(threaded, ("", "here", "copied")),
    ),
    "more than is allowed": row(EVALUATE, *map(looked, ("", "evaluated", "allowed"))),
    "more before training": row(EVALUATE, *(looked(how, first=True) for how in ("", "evaluated", "allowed"))),
    "more for the second time": row(
        "run it in 'with recorder.evaluation(batch):', which is replayed", rolled(False), rolled(True)
    ),
    "slack": row(
        "move logging between steps into 'with recorder.evaluation(batch):', which is replayed",
        logging(""),
        logging("evaluated"),
    ),
    "work in vain": row(
        "remove what a step computes but does not use, or read it inside the step with .item()",
        *map(wasted, ("", "left out", "read")),
    ),
    "operators of operators between steps": row(
        "write it as plain operators, or compute it on NumPy copies",
        loop(between=lambda r, m, o, b: condition(m.weight.detach())),
        loop(between=lambda r, m, o, b: torch.where(torch.tensor(True), (w := of_numpy(m.weight)) + 1, w - 1)),
        loop(between=lambda r, m, o, b: condition(of_numpy(m.weight))),
    ),
    "gradients between steps": row(
        "write the state only inside the with statement of a step", gathering(False), gathering(True)
    ),
    "momentum between steps": row(
        "let the optimizer's own step() write it, or drop it inside of a step (optimizer.state.clear())",
        loop(between=lambda r, m, o, b: halve(m, o)),
        loop(optimizer=lambda m: Halving(m.parameters()), free=NUMBERS),
        forgetting(inside=True),
    ),
    "momentum dropped before an evaluation": row("drop it in a step", forgetting(False), forgetting(True)),
    "values from elsewhere": row(WRITTEN, restored(""), *map(restored, ("state", "average", "clamp", "agreed"))),
    "an evaluation that writes": row(
        "put the model into eval(), and compute no gradients and no update there, or record it as a step",
        evaluated(""),
        evaluated("eval"),
        evaluated("step"),
    ),
    "another parameter group": row(FROM_THE_START, with_both(False, as_group), with_both(True, None)),
    "another parameter": row(FROM_THE_START, with_both(False, in_group), with_both(True, None)),
    "a changing momentum": row(
        "only learning rates may change, a momentum while it stays below its first value (create its schedule "
        "before the recorder), and what lab and inspector agree to: free=({},)",
        cycled(late=True),
        cycled(),
        cycled(late=True, free=("momentum",)),
    ),
    "a changing number": row(NUMBER, *map(annealed, ("", "batch", "agreed"))),
    "a changing number that was read": row(NUMBER, balanced(read=True), balanced(read=False)),
    "another rate": row(
        "let the optimizer follow that, or declare no schedule",
        scheduled(False),
        scheduled(True),
        scheduled(False, declares=False),
    ),
    "two rates": row("record each update as a separate step", two_rates(1), two_rates(2)),
    "other operators": row(
        "lab and inspector may agree to that: free={}", other_operators(), other_operators(free=NUMBERS)
    ),
    "outputs kept": row(
        "keep numbers (.item(), .tolist()) or NumPy copies of earlier results, and delete the tensors",
        keeping(lambda out: out),
        keeping(lambda out: out.mean().item()),
        keeping(lambda out: out[0].tolist()),
        keeping(lambda out: out.numpy().copy()),
    ),
    "micro-batches without a gradient": row(
        "freeze it, or let every micro-batch reach it",
        in_parts(both=False),
        in_parts(both=False, frozen=True),
        in_parts(),
    ),
    "unequal micro-batches": row("choose a number of micro-batches that divides it", in_parts(3), in_parts(4)),
    "micro-batches twice": row(
        "take micro-batches inside the with statement of their step, in one loop at a time",
        loop(lambda m, o, b, s: [p for _ in s.micro_batches(2) for p in s.micro_batches(2)]),
        in_parts(),
    ),
    "loss as a number": row(
        "commit it before .item()", committed(lambda loss: loss.item()), committed(lambda loss: loss)
    ),
    "loss of another type": row(
        "commit loss.float().mean()",
        committed(lambda loss: loss.double().expand(2)),
        committed(lambda loss: loss.double().expand(2).float().mean()),
    ),
    "loss from elsewhere": row(
        "commit the loss that the step's body computes", committed(lambda loss: ONE), committed(lambda loss: loss)
    ),
    "loss behind its step": row(
        "commit a loss inside the with statement of its step", committed_outside(False), committed_outside(True)
    ),
    "a table from nowhere": row(
        "declare it in the batch, register it as a buffer, or list what holds it: state=[…]",
        *map(large, ("", "batch", "buffer", "state")),
    ),
    "a buffer from elsewhere": row(
        "pass it in the batch, or list what holds it: state=[…]",
        also(set_codes, model=Coded),
        also(set_given, model=Coded, batches=coded, direct_paths=["buffer/codes"]),
        also(set_held, model=Coded, state=HELD),
    ),
    "a sparse buffer": row(
        "keep it dense", also(set_sparse, model=Coded), also(set_dense, model=Coded, direct_paths=["buffer/codes"])
    ),
    "its own seed": row(
        "leave the generator alone",
        scaled(lambda x: (torch.manual_seed(3), functional.dropout(x, 0.5))[1]),
        scaled(lambda x: functional.dropout(x, 0.5)),
    ),
    "an operator that fails": row(
        "do not catch errors of operators that write or are refused, but check before the call",
        failing(False),
        failing(True),
    ),
    "written by NumPy": row(
        "write it inside of a step, with PyTorch's operators",
        also(lambda m, b: m.codes.numpy().fill(1), model=Coded),
        also(lambda m, b: m.codes.fill_(1), model=Coded),
    ),
    "a backward pass without a loss": row(
        "begin the backward pass at a loss, as (outputs * weights).sum().backward() does, or with "
        "torch.ones_like(losses), or ",
        loop(seeded(False), batches=weights),
        loop(seeded(True), batches=weights),
        loop(seeded(False), batches=weights, direct_paths=["gradient/*", "optimizer/*", "weight/*"]),
    ),
    "weights by hand": row(
        "write weights in the optimizer's step() alone, or ",
        loop(by_hand),
        loop(),
        loop(by_hand, direct_paths=["weight/*"], free=NUMBERS),
    ),
    "a buffer of the batch": row(
        "have lab and inspector agree by {}",
        also(copy_codes, model=Coded),
        also(copy_codes, model=Coded, direct_paths=["buffer/codes"]),
    ),
    "a buffer of the batch between steps": row(
        "have lab and inspector agree by {}",
        between_steps(lambda codes: codes.copy_(torch.randn(4, 6)), direct_paths=[]),
        between_steps(lambda codes: codes.copy_(torch.randn(4, 6))),
    ),
    "type from outside": row(
        "pass it as a dense tensor of another type",
        between_steps(lambda codes: codes.copy_(COMPLEX)),
        between_steps(lambda codes: codes.copy_(COMPLEX.real)),
    ),
    "too many programs": row(
        "pad batches to a few sizes (monitor.padded), and keep integer arguments and branches the same from step "
        "to step",
        growing(""),
        growing("padded"),
        growing("the same"),
    ),
}


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_refused_or_warned_of_has_a_way_that_is_accepted(tmp_path, devices, monkeypatch, name):
    if name == "too many programs":
        monkeypatch.setattr(step_programs, "MANY_PROGRAMS", 2)
        monkeypatch.setattr(step_programs, "MAXIMUM_PROGRAMS", 3)
    if name == "a table from nowhere":
        monkeypatch.setattr(limits, "CONSTANTS_BYTES", limits.Limit(64, "bytes of a program's constants"))
    follow(LOOPS[name], tmp_path, devices)
