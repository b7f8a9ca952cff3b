"""Honest loops of ``declarations``, of kinds that have been mistaken for lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from monitor import Recorder, initialised
from monitor.declaration.schedules import Schedule
from tests.measurements._declared_world import CLASSES, Batch, World, batch_of, loss_of, plain, public

__all__ = ["HONEST"]


def _optimizer(world: World, parameters: Any, rate: float = 0.01) -> Any:
    kind = world.chance.choice(CLASSES)
    more = {"momentum": 0.9} if kind is torch.optim.SGD and world.chance.random() < 0.5 else {}
    return kind(parameters, lr=rate, **more)


_SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 3),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.3, total_iters=4),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 6, 2.0),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, 3, cycle_momentum=False),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
}


def _scheduled(world: World) -> None:
    model = public()
    optimizer = _optimizer(world, model.parameters())
    scheduler = world.chance.choice(list(_SCHEDULERS.values()))(optimizer)
    declares = world.chance.random() < 0.5
    options: dict[str, Any] = {"schedule": Schedule.of_scheduler(scheduler, steps=6)} if declares else {}
    world.train(model, optimizer, plain, steps=6, between=lambda recorder, step: scheduler.step(), **options)


def _averaged(world: World) -> None:
    """An exponential average, or a target copy, of the weights."""
    model = public()
    hard, decay = world.chance.random() < 0.5, world.chance.choice((0.5, 0.9, 0.99))
    averages = {name.replace(".", "_"): weight.detach().clone() for name, weight in model.named_parameters()}

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        plain(model, optimizer, batch)
        with torch.no_grad():
            for average, weight in zip(averages.values(), model.parameters(), strict=True):
                average.copy_(weight) if hard else average.lerp_(weight, 1 - decay)

    world.train(model, _optimizer(world, model.parameters()), body, state=averages)


def _codebook(world: World) -> None:
    """A quantizer whose entries follow the activations that fell to them."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)
            self.register_buffer("codes", torch.linspace(-1, 1, 20).view(5, 4))
            self.codes: Tensor

        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x)
            with torch.no_grad():
                apart = (made.unsqueeze(1) - self.codes).square().sum(2)
                places = functional.one_hot(apart.argmin(1), 5).to(made.dtype)
                self.codes.lerp_((places.T @ made) / places.sum(0).clamp(min=1).unsqueeze(1), 0.1)
            nearest = places @ self.codes
            passed: Tensor = made + (nearest - made).detach()
            return passed

    model = Quantizer()
    world.train(model, _optimizer(world, model.parameters()), plain, direct_paths=["buffer/codes"])


def _adversaries(world: World) -> None:
    """A generator and a discriminator, with or without a penalty on the slope of the latter."""
    model = nn.ModuleDict(
        {"made": nn.Linear(6, 6), "judged": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))}
    )
    penalty = world.chance.random() < 0.5
    optimizers = [_optimizer(world, model[name].parameters()) for name in ("made", "judged")]

    def body(_: nn.Module, __: object, batch: Batch) -> None:
        for each in optimizers:
            each.zero_grad()
        false = model["made"](batch["x"])
        loss = model["judged"](false.detach()).mean() - model["judged"](batch["x"]).mean()
        if penalty:
            between = batch["x"].clone().requires_grad_(True)
            slope = torch.autograd.grad(model["judged"](between).sum(), between, create_graph=True)[0]
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        torch.autograd.backward(loss)
        optimizers[1].step()
        optimizers[0].zero_grad()
        torch.autograd.backward(-model["judged"](false).mean())
        optimizers[0].step()

    world.train(model, optimizers, body)


def _looked_at(world: World) -> None:
    """Evaluations that differentiate: saliency, or adversarial examples."""
    model = public()
    moves = world.chance.random() < 0.5

    def between(recorder: Recorder, step: int) -> None:
        batch = batch_of(step)
        with recorder.evaluation(batch) as evaluation:
            inputs = batch["x"].detach().clone().requires_grad_(True)
            slope = torch.autograd.grad(functional.cross_entropy(model(inputs), batch["y"]), inputs)[0]
            if not moves:
                slope.abs().mean().item()
            else:
                with torch.no_grad():
                    evaluation.commit(functional.cross_entropy(model(inputs + 0.1 * slope.sign()), batch["y"]))

    world.train(model, _optimizer(world, model.parameters()), plain, between=between)


def _evaluated(world: World) -> None:
    """Several plain evaluations, some of a reference whose results come back as part of batches."""
    model = public()
    cached = [torch.zeros(8, 4)]

    def between(recorder: Recorder, step: int) -> None:
        batch = batch_of(step + 1)
        with recorder.evaluation(batch), torch.no_grad():
            found = model(batch["x"]).tolist()
        cached[0] = torch.tensor(found)

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        outputs = model(batch["x"])
        torch.autograd.backward(
            functional.cross_entropy(outputs, batch["y"]) + functional.mse_loss(outputs, batch["old"])
        )
        optimizer.step()

    world.train(
        model,
        _optimizer(world, model.parameters()),
        body,
        between=between,
        batch=lambda step: {**batch_of(step), "old": cached[0]},
    )


def _meta(world: World) -> None:
    """One inner step by hand, through which the outer one differentiates."""
    model = nn.Linear(6, 4)

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        own: dict[str, Tensor] = dict(model.named_parameters())
        inner = functional.cross_entropy(torch.func.functional_call(model, own, (batch["x"][:4],)), batch["y"][:4])
        slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(own.items(), slopes, strict=True)}
        outer = functional.cross_entropy(torch.func.functional_call(model, moved, (batch["x"][4:],)), batch["y"][4:])
        torch.autograd.backward(outer)
        optimizer.step()

    world.train(model, _optimizer(world, model.parameters()), body)


def _usual(world: World) -> None:
    """Clipped, accumulated, with batch statistics, or logged between steps."""
    form = world.chance.choice(("clipped", "accumulated", "statistics", "logged"))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) if form == "statistics" else public()

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        parts = batch["x"].chunk(2) if form == "accumulated" else [batch["x"]]
        for part, labels in zip(parts, batch["y"].chunk(len(parts)), strict=True):
            torch.autograd.backward(functional.cross_entropy(model(part), labels) / len(parts))
        if form == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def between(recorder: Recorder, step: int) -> None:
        if form == "logged":
            with torch.no_grad():
                [float(weight.norm()) for weight in model.parameters()]

    world.train(model, _optimizer(world, model.parameters()), body, between=between)


def _interrupted(world: World) -> None:
    """Shut down in order, or ended in a step, and resumed."""
    model, state = public(), world.chance.getstate()
    optimizer = _optimizer(world, model.parameters())
    recorder = world.begin(model, optimizer)
    for step in range(1, 4):
        batch = batch_of(step)
        with recorder.step(batch):
            plain(model, optimizer, batch)
    if world.chance.random() < 0.5:
        recorder.shutdown()
    else:
        batch = batch_of(4)
        with suppress(RuntimeError), recorder.step(batch):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batch))
            raise RuntimeError
    world.chance.setstate(state)
    model = public()
    optimizer = _optimizer(world, model.parameters())
    recorder = Recorder.resume(model, optimizer, out=world.runs[-1])
    for step in range(recorder.steps + 1, 7):
        batch = batch_of(step)
        with recorder.step(batch):
            plain(model, optimizer, batch)
    recorder.finish()


def _adapted(world: World) -> None:
    """Adapters of low rank over a frozen model; or a chain of up to five runs, each going on from the last."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 4).requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.base(x) + self.up(self.down(x))
            return outputs

    parent = None
    for number in range(world.chance.randint(1, 5)):
        model = initialised(Adapted, seed=1)
        chosen = [weight for weight in model.parameters() if weight.requires_grad]
        world.train(model, torch.optim.AdamW(chosen, lr=0.01), plain, steps=2, lab=f"lab-{number}", parent=parent)
        parent = world.runs[-1]


HONEST: Mapping[str, Callable[[World], None]] = {
    "schedules": _scheduled,
    "averages": _averaged,
    "codebooks": _codebook,
    "adversaries": _adversaries,
    "saliency": _looked_at,
    "evaluations": _evaluated,
    "meta-learning": _meta,
    "usual loops": _usual,
    "interrupted": _interrupted,
    "adapters": _adapted,
}
