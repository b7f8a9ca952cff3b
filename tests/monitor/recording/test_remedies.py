"""Each refusal and each warning says what to write instead; who writes that is accepted.

A row has a loop that is refused or warned of, words of what it is told, and that loop changed by each way named there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from firmware_sim import limits
from firmware_sim.errors import CallerError
from inspector.inspection.verdict import Outcome
from monitor import initialised, padded
from monitor.declaration.schedules import Schedule
from monitor.recording import step_programs
from tests.monitor.recording.whole_loops import Loop, record

NUMBERS = ("dampening", "lr", "maximize", "momentum", "nesterov", "weight_decay")
"""Those of SGD that decide its arithmetic."""


@dataclass(frozen=True)
class Row:
    """One remedy.

    Attributes:
        says: words of the remedy as they stand in the source; what a message puts in is {}.
        told: the loop that is told so.
        ways: the loop changed by what it is told, one for each way.
    """

    says: str
    told: Loop
    ways: tuple[Loop, ...]


def row(says: str, told: Loop, *ways: Loop) -> Row:
    return Row(says, told, ways)


def pairs(steps=3):
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(steps)]


def linear():
    return nn.Linear(6, 3)


def sgd(model, **hyper):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **hyper})


def learn(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def plain(model, optimizer, batch, step):
    learn(optimizer, loss_of(model, batch))


def loop(
    body: Callable[..., object] = plain,
    *,
    model: Callable[[], Any] = linear,
    optimizer: Callable[..., Any] = sgd,
    batches: Callable[[], Any] = pairs,
    prepare: Callable[..., object] = lambda model, optimizer: None,
    between: Callable[..., object] = lambda recorder, model, optimizer, batch: None,
    options: Callable[..., dict[str, Any]] = lambda model: {},
    **keywords: Any,
) -> Loop:
    """A loop of its parts; ``between`` runs before each step but the first."""

    def train(make):
        net = model()
        chosen = optimizer(net)
        prepare(net, chosen)
        recorder = make(net, chosen, **keywords, **options(net))
        for number, batch in enumerate(batches()):
            if number:
                between(recorder, net, chosen, batch)
            with recorder.step(batch) as step:
                body(net, chosen, batch, step)
        return net

    return train


def also(more, **parts):
    """A loop that does ``more(model, batch)`` after each update, within the step."""

    def body(model, optimizer, batch, step):
        plain(model, optimizer, batch, step)
        with torch.no_grad():
            more(model, batch)

    return loop(body, **parts)


def with_loss(change, **parts):
    """A loop whose loss is ``change(model, *batch)``."""
    return loop(lambda model, optimizer, batch, step: learn(optimizer, change(model, *batch)), **parts)


def scaled(change, **parts):
    """A loop whose loss is multiplied by the mean of ``change(x)``."""
    return with_loss(lambda m, x, y: functional.cross_entropy(m(x), y) * change(x).float().mean(), **parts)


def through(change, **parts):
    """A loop whose scores go through ``change``."""
    return with_loss(lambda m, x, y: functional.cross_entropy(change(m(x)), y), **parts)


def log_of(rows):
    """A loop that evaluates with each batch, too, and does with what the model found what ``rows`` does."""

    def between(recorder, model, optimizer, batch):
        with recorder.evaluation(batch), torch.no_grad():
            rows(model(batch[0]))

    return loop(between=between)


def narrowed(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(x), y)


def unscaled(enabled):
    def body(model, optimizer, batch, step):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()

    return loop(body)


def lengths():
    return [(torch.randn(2, 6), torch.randn(3, 6)) for _ in range(3)]


def jagged(model, *parts):
    return model(torch.nested.nested_tensor(list(parts), layout=torch.jagged)).values().square().mean()


def rectangular(model, *parts):
    return model(torch.stack([padded(part, (3,), dim=0) for part in parts])).square().mean()


class Own(torch.optim.SGD):
    """A class that nobody knows."""

    def __init__(self, params, **options):
        super().__init__(params, lr=0.1, momentum=0.9, **options)


class Recurrent(nn.Module):
    def __init__(self, packs):
        super().__init__()
        self.layer, self.packs = nn.RNN(2, 3, batch_first=True), packs

    def forward(self, x):
        rows, ends = x.view(4, 3, 2), torch.tensor([3, 2, 1, 1])
        if self.packs:
            return self.layer(pack_padded_sequence(rows, ends, batch_first=True))[1][0]
        kept = torch.arange(3) < ends[:, None]
        return (self.layer(rows)[0] * kept[..., None]).sum(1)


def embedding(**options):
    return lambda: nn.Sequential(nn.Embedding(7, 3, **options), nn.Flatten())


def ids():
    return [(torch.randint(0, 7, (4, 2)), torch.randint(0, 3, (4,))) for _ in range(3)]


def bags(make):
    """A loop over an embedding bag."""

    def model():
        return nn.ModuleDict({"bag": make()})

    return with_loss(lambda m, x, y: functional.cross_entropy(m["bag"](x), y), model=model, batches=ids)


def weighted(mode):
    """A loop that learns weights of a bag's samples; otherwise than by a sum, they go before the mean."""

    def model():
        net = nn.ModuleDict({"bag": nn.EmbeddingBag(7, 3, mode="sum")})
        net.register_parameter("shares", nn.Parameter(torch.ones(4, 2)))
        return net

    def change(m, x, y):
        table, shares = m["bag"].weight, m.shares
        return functional.cross_entropy(functional.embedding_bag(x, table, mode=mode, per_sample_weights=shares), y)

    return with_loss(change, model=model, batches=ids)


def attended(how):
    """A loop with attention by ``how(q, k, v)``."""

    def change(m, x, y):
        heads = x.view(1, 1, 4, 6)
        return functional.cross_entropy(m(how(heads, heads, heads).view(4, 6)), y)

    return with_loss(change)


def rows_put(accumulate):
    return through(lambda h: torch.zeros(4, 3).index_put((torch.tensor([0, 0, 1, 2]),), h, accumulate=accumulate))


def infinite(x):
    return torch.cat([x.flatten(), torch.tensor([float("inf")])])


ALL_TO_FIRST = torch.zeros(4, 3, dtype=torch.long)
OPERATORS = {
    "autocast": row("do without it, or keep parameters in float32", with_loss(narrowed), loop()),
    "gradient scaler": row("switch the gradient scaler off", unscaled(True), unscaled(False)),
    "fused update": row(
        "build the optimizer with fused=False",
        loop(optimizer=lambda m: Own(m.parameters(), fused=True), free=NUMBERS),
        loop(optimizer=lambda m: Own(m.parameters(), fused=False), free=NUMBERS),
    ),
    "kernels of oneDNN": row(
        "leave the layer's choice of kernels to the recorder",
        scaled(lambda x: x.to_mkldnn().to_dense()),
        scaled(lambda x: x * 1),
    ),
    "linear algebra": row(
        "decompose the model's linear algebra into matrix products",
        scaled(lambda x: torch.linalg.matrix_exp(x.t() @ x)),
        scaled(lambda x: x.t() @ x + (x.t() @ x) @ (x.t() @ x) / 2),
    ),
    "quantised": row(
        "train without quantised operators",
        through(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)),
        loop(),
    ),
    "nested": row(
        "pad the parts to one length (monitor.padded)",
        with_loss(jagged, batches=lengths),
        with_loss(rectangular, batches=lengths),
    ),
    "packed": row(
        "pad the sequences (monitor.padded) and mask what lies behind their ends",
        loop(model=lambda: Recurrent(True)),
        loop(model=lambda: Recurrent(False)),
    ),
    "sparse": row(
        "use dense tensors; an embedding with sparse=False",
        loop(model=embedding(sparse=True), optimizer=lambda m: sgd(m, momentum=0.0), batches=ids),
        loop(model=embedding(sparse=False), optimizer=lambda m: sgd(m, momentum=0.0), batches=ids),
    ),
    "drawn": row(
        "draw before the step and pass what was drawn in the batch, or take the largest: "
        "(logits - (-torch.rand_like(logits).log()).log()).argmax(-1) draws from softmax(logits)",
        log_of(lambda logits: torch.multinomial(logits.softmax(-1), 1)),
        log_of(lambda logits: (logits - (-torch.rand_like(logits).log()).log()).argmax(-1)),
        scaled(lambda x: x[:, :1], batches=lambda: [(torch.rand(4, 6).multinomial(6).float(), y) for _, y in pairs()]),
    ),
    "counted": row(
        "count by torch.nn.functional.one_hot(values, size).sum(0)",
        scaled(lambda x: torch.bincount(x.argmax(1), minlength=6)),
        scaled(lambda x: functional.one_hot(x.argmax(1), 6).sum(0)),
    ),
    "complex": row(
        "compute with real and imaginary parts as two real tensors",
        scaled(lambda x: torch.complex(x, -x).abs()),
        scaled(lambda x: (x.square() + x.square()).sqrt()),
    ),
    "complex from the batch": row(
        "complex operands; use real ones",
        with_loss(
            lambda m, x, z, y: functional.cross_entropy(m(x), y) * (z * z).real.mean(),
            batches=lambda: [(x, torch.complex(x, x / 2), y) for x, y in pairs()],
        ),
        with_loss(
            lambda m, x, z, y: functional.cross_entropy(m(x), y) * (x * x - z * z).mean(),
            batches=lambda: [(x, x / 2, y) for x, y in pairs()],
        ),
    ),
    "operator of operators": row(
        "write its operators as they are: torch.where or Python's if for torch.cond, "
        "scaled_dot_product_attention with a mask for flex_attention",
        through(lambda h: torch.cond(torch.tensor(True), lambda v: v * 2, lambda v: v * 3, (h,))),
        through(lambda h: torch.where(torch.tensor(True), h * 2, h * 3)),
        through(lambda h: h * 2 if True else h * 3),
        attended(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, torch.ones(4, 4).tril().bool())),
    ),
    "a distribution's arguments": row(
        "switch the check of the distribution's arguments off (validate_args=False)",
        *(
            with_loss(lambda m, x, y, on=on: -Normal(m(x), torch.ones(3), validate_args=on).log_prob(x[:, :3]).mean())
            for on in (True, False)
        ),
    ),
    "attention's kernel": row(
        "leave the choice of its kernel to the session, which takes the one made of plain operators",
        attended(lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]),
        attended(functional.scaled_dot_product_attention),
    ),
    "no values": row(
        "compute with tensors that have values, not on the meta device",
        scaled(lambda x: (torch.ones(3, device="meta") + 1, x)[1]),
        scaled(lambda x: (torch.ones(3) + 1, x)[1]),
    ),
    "any other": row(
        "compute it before the step and pass the result in the batch, or write it with other operators",
        scaled(lambda x: x.median(1).values),
        with_loss(
            lambda m, x, y, z: functional.cross_entropy(m(x), y) * z.mean(),
            batches=lambda: [(x, y, x.median(1).values) for x, y in pairs()],
        ),
        scaled(lambda x: x.sort(1).values[:, 2]),
    ),
    "own generator": row(
        "let it use torch's global one, or draw before the step and pass what was drawn in the batch",
        scaled(lambda x: torch.rand(4, generator=torch.Generator().manual_seed(1))),
        scaled(lambda x: torch.rand(4)),
        scaled(
            lambda x: x[:, :1],
            batches=lambda: [(torch.rand(4, 6, generator=torch.Generator().manual_seed(1)), y) for _, y in pairs()],
        ),
    ),
    "double": row(
        "{} operands; use float32, bfloat16 or float16",
        scaled(lambda x: x.double() @ x.double().t()),
        scaled(lambda x: x @ x.t()),
        scaled(lambda x: x.bfloat16() @ x.bfloat16().t()),
    ),
    "result of another type": row(
        "convert it afterwards",
        scaled(lambda x: torch.add(x.bfloat16(), 1, out=torch.empty(4, 6))),
        scaled(lambda x: torch.add(x.bfloat16(), 1, out=torch.empty(4, 6).bfloat16()).float()),
    ),
    "rounded quotient": row(
        "divide integers, or divide and then round",
        scaled(lambda x: torch.div(x, 0.3, rounding_mode="floor")),
        scaled(lambda x: torch.div(x.argmax(1), 2, rounding_mode="floor")),
        scaled(lambda x: (x / 0.3).floor()),
    ),
    "power of an integer": row(
        "convert the integer base to floating point first",
        scaled(lambda x: (x.argmax(1) + 1) ** -1.0),
        scaled(lambda x: (x.argmax(1) + 1).float() ** -1.0),
    ),
    "power of a number": row(
        "use a positive base and a floating-point exponent",
        scaled(lambda x: 2 ** x.argmax(1)),
        scaled(lambda x: 2.0 ** x.argmax(1).float()),
    ),
    "outside of a type": row(
        "clamp it first",
        scaled(lambda x: (x * 1000).to(torch.int8)),
        scaled(lambda x: (x * 1000).clamp(-128, 127).to(torch.int8)),
    ),
    "fractional range": row(
        "use integer limits and scale the result",
        scaled(lambda x: x * torch.arange(0, 3, 0.5)),
        scaled(lambda x: x * (torch.arange(0, 6) * 0.5)),
    ),
    "remainder": row(
        "use it on integers only",
        scaled(lambda x: torch.remainder(x, 2)),
        scaled(lambda x: torch.remainder(x.argmax(1), 2)),
    ),
    "two sources": row(
        "two sources for one element; use scatter_add",
        through(lambda h: torch.zeros(4, 3).scatter(0, ALL_TO_FIRST, h)),
        through(lambda h: torch.zeros(4, 3).scatter_add(0, ALL_TO_FIRST, h)),
    ),
    "two values": row("two values for one element; use accumulate=True", rows_put(False), rows_put(True)),
    "another norm": row(
        "order {}; use 1, 2 or infinity",
        scaled(lambda x: torch.linalg.vector_norm(x, 3, dim=1)),
        *(scaled(lambda x, order=order: torch.linalg.vector_norm(x, order, dim=1)) for order in (1, 2, float("inf"))),
    ),
    "histogram without ends": row(
        "a range that is not finite; give min and max",
        scaled(lambda x: torch.histc(infinite(x), 4)),
        scaled(lambda x: torch.histc(infinite(x), 4, -2, 2)),
    ),
    "one limit": row(
        "give both limits",
        scaled(lambda x: torch.empty(4, dtype=torch.long).random_(2, None)),
        scaled(lambda x: torch.empty(4, dtype=torch.long).random_(2, 9)),
    ),
    "many integers": row(
        "{} values; between 1 and 2^31 are built",
        scaled(lambda x: torch.randint(0, 2**40, (4,))),
        scaled(lambda x: torch.randint(0, 2**31, (4,))),
    ),
    "gradients by frequency": row(
        "use scale_grad_by_freq=False",
        loop(model=embedding(scale_grad_by_freq=True), batches=ids),
        loop(model=embedding(scale_grad_by_freq=False), batches=ids),
    ),
    "bag by frequency": row(
        "use scale_grad_by_freq=False and sparse=False",
        bags(lambda: nn.EmbeddingBag(7, 3, scale_grad_by_freq=True)),
        bags(lambda: nn.EmbeddingBag(7, 3)),
    ),
}


# a loop's own


class Coded(nn.Linear):
    """With a buffer that its steps may write."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("codes", torch.zeros(4, 6))


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


def looked(times, how, first=True):
    """A loop that runs its model between steps: behind the first alone, or behind each."""

    def train(make):
        model = nn.Linear(6, 800) if first else linear()
        optimizer = sgd(model)
        keywords = {"beside": 64, "maximum_slack": Fraction(1)} if how == "allowed" else {}
        recorder = make(model, optimizer, **keywords)
        for number, batch in enumerate(pairs()):
            if number == 1 or (number and not first):
                with torch.no_grad():
                    if how == "evaluated":
                        with recorder.evaluation(batch):
                            for _ in range(times):
                                model(batch[0])
                    else:
                        for _ in range(times):
                            model(batch[0])
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
        return model

    return train


def before_training(how):
    """A loop that runs its model before the first training step, after an evaluation."""

    def train(make):
        model = nn.Linear(6, 800)
        optimizer = sgd(model)
        keywords = {"beside": 64, "maximum_slack": Fraction(1)} if how == "allowed" else {}
        recorder = make(model, optimizer, **keywords)
        batches = pairs()
        for _ in range(2):
            with torch.no_grad():
                if how == "evaluated":
                    with recorder.evaluation(batches[0]):
                        for _ in range(20):
                            model.weight.abs()
                else:
                    with recorder.evaluation(batches[0]):
                        model(batches[0][0])
                    for _ in range(20):
                        model.weight.abs()
        for batch in batches:
            with recorder.step(batch):
                learn(optimizer, loss_of(model, batch))
        return model

    return train


def logging(how):
    """A loop that logs a norm behind each step."""

    def between(recorder, model, optimizer, batch):
        if how == "evaluated":
            with recorder.evaluation(batch), torch.no_grad():
                model(batch[0]), model.weight.norm()
        else:
            model.weight.detach().norm(), model.weight.detach().norm()

    return loop(between=between, batches=lambda: pairs(8))


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


def cycled(**keywords):
    """A loop whose momentum changes."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        recorder = make(model, optimizer, **keywords)
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
    """A loop that goes back to its weights of before."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        best = copy.deepcopy(model)
        keywords = {"state": {"best": best}} if how in ("state", "average") else {}
        recorder = make(model, optimizer, **keywords, free=NUMBERS if how == "agreed" else ())
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
                    model.load_state_dict(best.state_dict())
        return model

    return train


def kept(how):
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


class Moody(torch.optim.Optimizer):
    """Makes its state in another order from its third step on, trials included."""

    asked = 0

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        Moody.asked = 0

    @torch.no_grad()
    def step(self, closure=None):
        Moody.asked += 1
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                if Moody.asked > 2:
                    weight * 2
                state["mean"] = weight.grad * 2
            weight.sub_(state["mean"], alpha=0.1)


class Fastidious(Own):
    """Takes no gradient of zeros, or does."""

    def __init__(self, params, bears):
        super().__init__(params)
        self.bears = bears

    def step(self, closure=None):
        if not self.bears and not any(weight.grad.any() for weight in self.param_groups[0]["params"]):
            raise ValueError("nothing to learn")
        return super().step(closure)


class Halving(Own):
    """Halves its momentum after each update."""

    def step(self, closure=None):
        super().step(closure)
        halve(None, self)


@torch.no_grad()
def halve(model, optimizer):
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def warmed(model, optimizer):
    learn(optimizer, model(torch.ones(2, 6)).square().mean())


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


def start(change):
    """A loop whose model is initialised by a program, ``change`` of its buffer included."""

    def build():
        model = Coded()
        model.codes = change()
        return model

    return loop(model=lambda: initialised(build, seed=1))


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


class Metric(nn.Module):
    """Counts in a plain attribute, or in a buffer."""

    def __init__(self, registers):
        super().__init__()
        if registers:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = torch.zeros(())

    def forward(self, loss):
        self.seen.add_(loss.detach())


def measured(registers, listed=True):
    metric = Metric(registers)

    def body(model, optimizer, batch, step):
        loss = loss_of(model, batch)
        learn(optimizer, loss)
        metric(loss)

    return loop(body, **({"state": {"metric": metric}} if listed else {}))


def split(whole):
    """A loop with a complex factor, as one parameter or as two real ones."""

    def model():
        net = nn.ModuleDict({"out": linear()})
        if whole:
            net.register_parameter("factor", nn.Parameter(torch.ones(3, dtype=torch.cfloat)))
        else:
            net.register_parameter("real", nn.Parameter(torch.ones(3)))
            net.register_parameter("imaginary", nn.Parameter(torch.ones(3)))
        return net

    def change(m, x, y):
        scores = m["out"](x)
        if whole:
            return functional.cross_entropy((scores * m.factor).abs(), y)
        squares = (scores * m.real).square() + (scores * m.imaginary).square()
        return functional.cross_entropy(squares.sqrt(), y)

    return with_loss(change, model=model)


def held_by(how):
    """A loop with a temperature beside its model, which the optimizer updates too."""

    def train(make):
        net, heat = linear(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*net.parameters(), heat], lr=0.1)
        whole = nn.ModuleList([net, nn.ParameterList([heat])]) if how == "one module" else net
        recorder = make(whole, optimizer)
        for x, y in pairs():
            with recorder.step((x, y)):
                learn(optimizer, functional.cross_entropy(net(x) * heat, y))
        return whole

    return train


def condition(weight):
    return torch.cond(torch.tensor(True), lambda w: w + 1, lambda w: w - 1, (weight,))


def of_numpy(weight):
    return torch.from_numpy(weight.detach().numpy().copy())


OUTSIDE = torch.ones(4, 6)
HELD = {"codes": torch.ones(4, 6)}


def set_held(model, batch):
    model.codes = HELD["codes"].clone()


def set_given(model, batch):
    model.codes = batch[2]


def between_steps(change, **parts):
    """A loop that does ``change(model)`` between steps, to a buffer."""
    parts = {"model": Coded, "direct_paths": ["buffer/codes"], **parts}
    return loop(between=lambda recorder, model, optimizer, batch: change(model.codes), **parts)


def of_type(x):
    """A loop whose batch has an entry that nothing reads, of any type."""
    return loop(batches=lambda: [(*batch, x()) for batch in pairs()])


def shared(copies):
    """A batch with a tensor and its bits."""

    def batches():
        return [(x, y, (x.clone() if copies else x).view(torch.int32)) for x, y in pairs()]

    return loop(batches=batches)


EVALUATE = "run it in 'with recorder.evaluation(batch):', or declare a higher beside, and a maximum_slack that has room"
FROM_THE_START = "give it all that will ever learn from the start, and freeze that by requires_grad_(False) until then"
WRITTEN = (
    "copy or average what weights or tensors under state=[…] hold, clamp all of a weight, or have lab and inspector "
    "agree: free={}"
)
COMPLEX = torch.complex(torch.ones(4, 6), torch.linspace(0, 1, 24).view(4, 6)).to(torch.complex128)
SPARSE = torch.eye(3).to_sparse()
ONE = torch.ones(())


def called(model):
    model(torch.ones(2, 6))
    return model


def filled(model):
    model.reset_parameters()
    return model


def around(on):
    """A loop whose steps lie within autocast."""

    def train(make):
        model = linear()
        optimizer = sgd(model)
        recorder = make(model, optimizer)
        with torch.autocast("cpu", enabled=on):
            for batch in pairs():
                with recorder.step(batch):
                    learn(optimizer, loss_of(model, batch))
        return model

    return train


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


LOOPS = {
    "more than is allowed": row(EVALUATE, looked(50, ""), looked(50, "evaluated"), looked(50, "allowed")),
    "more before training": row(
        EVALUATE, before_training(""), before_training("evaluated"), before_training("allowed")
    ),
    "more for the second time": row(
        "run it in 'with recorder.evaluation(batch):', which is replayed",
        looked(20, "", first=False),
        looked(20, "evaluated", first=False),
    ),
    "slack": row(
        "what logs between steps belongs into 'with recorder.evaluation(batch):', which is replayed",
        logging(""),
        logging("evaluated"),
    ),
    "operators of operators between steps": row(
        "write its operators as they are, or compute it of NumPy copies",
        loop(between=lambda r, m, o, b: condition(m.weight.detach())),
        loop(between=lambda r, m, o, b: torch.where(torch.tensor(True), (w := of_numpy(m.weight)) + 1, w - 1)),
        loop(between=lambda r, m, o, b: condition(of_numpy(m.weight))),
    ),
    "gradients between steps": row(
        "write the state inside of the with statement of a step alone", gathering(False), gathering(True)
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
        "only learning rates may change, and what lab and inspector agree to: free=({},)",
        cycled(),
        cycled(free=("momentum",)),
    ),
    "a changing number": row(
        "pass it as a tensor of the batch, or have lab and inspector agree by free_slots=True",
        *map(annealed, ("", "batch", "agreed")),
    ),
    "another rate": row(
        "let the optimizer follow that, or declare no schedule",
        scheduled(False),
        scheduled(True),
        scheduled(False, declares=False),
    ),
    "two rates": row("record a step for each", two_rates(1), two_rates(2)),
    "other operators": row(
        "lab and inspector may agree to that: free={}", other_operators(), other_operators(free=NUMBERS)
    ),
    "first state": row(
        "have the optimizer take its first update before recording begins",
        loop(optimizer=lambda m: Moody(m.parameters()), free=("lr",)),
        loop(optimizer=lambda m: Moody(m.parameters()), free=("lr",), prepare=warmed),
    ),
    "a trial step": row(
        "a copy of it takes a step where all gradients are dense zeros, which step() has to bear",
        loop(optimizer=lambda m: Fastidious(m.parameters(), False), free=NUMBERS),
        loop(optimizer=lambda m: Fastidious(m.parameters(), True), free=NUMBERS),
    ),
    "a rate in a tensor": row(
        "the optimizer's {} is a tensor; give it as a plain number",
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1))),
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)),
    ),
    "a setting of another type": row(
        "the optimizer's {} is {}; give it as a plain number",
        loop(optimizer=lambda m: torch.optim.SGD([{"params": m.parameters(), "note": np.zeros(2)}], lr=0.1)),
        loop(optimizer=lambda m: torch.optim.SGD([{"params": m.parameters(), "note": 0.0}], lr=0.1)),
    ),
    "an infinite setting": row(
        "give it as a finite number",
        loop(optimizer=lambda m: torch.optim.SGD([{"params": m.parameters(), "most": float("inf")}], lr=0.1)),
        loop(optimizer=lambda m: torch.optim.SGD([{"params": m.parameters(), "most": 1e30}], lr=0.1)),
    ),
    "a parameter of no module": row(
        "give the recorder one module that holds all, such as nn.ModuleList([model, nn.ParameterList(others)])",
        held_by(""),
        held_by("one module"),
    ),
    "complex parameter": row("keep real and imaginary parts as two of them", split(True), split(False)),
    "outputs kept": row(
        "keep numbers (.item(), .tolist()) or NumPy copies of what earlier steps made, and let go of the tensors",
        kept(lambda out: out),
        kept(lambda out: out.mean().item()),
        kept(lambda out: out[0].tolist()),
        kept(lambda out: out.numpy().copy()),
    ),
    "micro-batches without a gradient": row(
        "freeze it, or let every micro-batch reach it",
        in_parts(both=False),
        in_parts(both=False, frozen=True),
        in_parts(),
    ),
    "unequal micro-batches": row("take a number of them that divides it", in_parts(3), in_parts(4)),
    "micro-batches twice": row(
        "micro-batches are taken inside the with statement of their step, in one loop at a time",
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
        "commit the one that its body computes", committed(lambda loss: ONE), committed(lambda loss: loss)
    ),
    "loss behind its step": row(
        "a loss is committed inside the with statement of its step", committed_outside(False), committed_outside(True)
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
    "its own seed": row(
        "leave it alone",
        scaled(lambda x: (torch.manual_seed(3), functional.dropout(x, 0.5))[1]),
        scaled(lambda x: functional.dropout(x, 0.5)),
    ),
    "an operator that fails": row(
        "ask before you call an operator that writes or is refused, and catch no error of it",
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
        loop(seeded(False), batches=weights, direct_paths=["gradient/weight", "gradient/bias"]),
    ),
    "weights by hand": row(
        "write weights in the optimizer's step() alone, or ",
        loop(by_hand),
        loop(),
        loop(by_hand, direct_paths=["weight/*"], free=NUMBERS),
    ),
    "a buffer of the batch": row(
        "have lab and inspector agree by direct_paths={}",
        also(copy_codes, model=Coded),
        also(copy_codes, model=Coded, direct_paths=["buffer/codes"]),
    ),
    "a buffer of the batch between steps": row(
        "have lab and inspector agree by direct_paths={}",
        between_steps(lambda codes: codes.copy_(torch.randn(4, 6)), direct_paths=[]),
        between_steps(lambda codes: codes.copy_(torch.randn(4, 6))),
    ),
    "direct paths that name nothing": row(
        "list tensors of the state such as {}, or patterns such as 'buffer/*.running_mean'",
        loop(model=Coded, direct_paths=["codes"]),
        loop(model=Coded, direct_paths=["buffer/codes"]),
        loop(model=Coded, direct_paths=["buffer/*"]),
    ),
    "a table in an initialisation": row(
        "compute it with PyTorch's operators",
        start(lambda: torch.tensor([[0.0, 1, 2, 3, 4, 5]] * 4)),
        start(lambda: torch.arange(6).float().expand(4, 6).clone()),
    ),
    "state that is none": row(
        "give a list of objects, or a dict of them by name",
        loop(state=torch.zeros(2)),
        loop(state=[torch.zeros(2)]),
        loop(state={"each": torch.zeros(2)}),
    ),
    "state without tensors": row(
        "take it off the list state=[…], or register what a module keeps in plain attributes as its buffers",
        measured(False),
        measured(False, listed=False),
        measured(True),
    ),
    "no shapes": row(
        "call the model on a batch before the recorder is made",
        loop(model=lambda: nn.LazyLinear(3)),
        loop(model=lambda: called(nn.LazyLinear(3))),
    ),
    "model without values": row(
        "a recorded model has tensors with values",
        loop(model=lambda: nn.Linear(6, 3, device="meta")),
        loop(model=lambda: filled(nn.Linear(6, 3, device="meta").to_empty(device="cpu"))),
    ),
    "script module": row(
        "record the model without torch.jit", loop(model=lambda: torch.jit.trace(linear(), torch.ones(1, 6))), loop()
    ),
    "autocast around a step": row("switch it off, a recorded step computes in FP32", around(True), around(False)),
    "share as a number": row(
        "maximum_slack is a Fraction in 0 … 1, such as Fraction(1, 20), not {}",
        loop(maximum_slack=0.05),
        loop(maximum_slack=Fraction(1, 20)),
    ),
    "nested batch": row(
        "pad its parts to one length (monitor.padded)",
        of_type(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        of_type(lambda: torch.stack([padded(torch.ones(size), (3,)) for size in (2, 3)])),
    ),
    "sparse batch": row(
        "give its to_dense(), or its indices and values",
        of_type(lambda: SPARSE),
        of_type(lambda: SPARSE.to_dense()),
        of_type(lambda: (SPARSE.indices(), SPARSE.values())),
    ),
    "batch without values": row(
        "give one that has", of_type(lambda: torch.ones(2, device="meta")), of_type(lambda: torch.ones(2))
    ),
    "type of a batch": row(
        "batch tensor {} is {}, which is not recorded; give it in another type",
        of_type(lambda: torch.ones(2, dtype=torch.complex128)),
        of_type(lambda: torch.ones(2, dtype=torch.complex64)),
    ),
    "type from outside": row(
        "give it dense and in another type",
        between_steps(lambda codes: codes.copy_(COMPLEX)),
        between_steps(lambda codes: codes.copy_(COMPLEX.real)),
    ),
    "two names alike": row(
        "give one of them another name",
        loop(batches=lambda: [{0: x, 1: y, "a": {"b": x}, "a.b": y} for x, y in pairs()]),
        loop(batches=lambda: [{0: x, 1: y, "a": {"b": x}, "c": y} for x, y in pairs()]),
    ),
    "a batch of text": row(
        "give a tensor, tuple or dict",
        loop(lambda m, o, b, s: plain(m, o, pairs(1)[0], s), batches=lambda: ["text"] * 2),
        loop(),
    ),
    "two types in one memory": row("copy one of them", shared(False), shared(True)),
    "a column of a table": row(
        "make it contiguous",
        of_type(lambda: torch.ones(40, 800)[:, 0]),
        of_type(lambda: torch.ones(40, 800)[:, 0].contiguous()),
    ),
    "an array backwards": row(
        "give a copy of it", of_type(lambda: np.ones(4)[::-1]), of_type(lambda: np.ones(4)[::-1].copy())
    ),
    "too many programs": row(
        "pad the shapes of batches to a few sizes (monitor.padded), and keep whole numbers among arguments and branches "
        "the same from step to step",
        growing(""),
        growing("padded"),
        growing("the same"),
    ),
}


def told(loop, folder, devices):
    """What is said of a loop: its refusal, or the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            record(loop, folder, devices)
        except CallerError as error:
            return [str(error)]
    return [str(each.message) for each in found]


def in_message(says):
    """The words of a remedy between what its message puts in."""
    return [part for part in says.split("{}") if part]


def follow(each, folder, devices):
    """The loop is told so; each way that it is told ends accepted, without a word."""
    said = told(each.told, folder / "told", devices)
    assert [text for text in said if all(part in text for part in in_message(each.says))], said
    assert not any("\n" in text for text in said if each.says in text)
    for number, way in enumerate(each.ways):
        _, verdict = record(way, folder / f"way-{number}", devices)
        assert verdict.outcome is Outcome.ACCEPT, (number, verdict.reasons)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_is_refused_has_a_way_that_is_accepted(tmp_path, devices, name):
    follow(OPERATORS[name], tmp_path, devices)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Complex modules", "ignore:Casting complex")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_refused_or_warned_of_has_a_way_that_is_accepted(tmp_path, devices, monkeypatch, name):
    monkeypatch.setattr(step_programs, "MANY_PROGRAMS", 2)
    monkeypatch.setattr(step_programs, "MAXIMUM_PROGRAMS", 3)
    if name == "a table from nowhere":
        monkeypatch.setattr(limits, "CONSTANTS_BYTES", limits.Limit(64, "bytes of a program's constants"))
    follow(LOOPS[name], tmp_path, devices)
