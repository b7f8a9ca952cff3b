"""Labs of ``declarations`` that keep to the letter of a rule, and break what it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inspector.replay.examination import content_digests
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from monitor.transcript.data import encode_arrays
from tests.measurements._declared_world import CLASSES, Batch, World, batch_of, loss_of, net, plain, public

__all__ = ["HIDING"]

_SMALL, _LARGE = 1e-6, 0.5
_THOUSANDFOLD = 1000
_RATES = """
[[rule]]
name = "rates"
kind = "hyper"
parameter = "lr"
at_most = 1e-5
[[rule]]
name = "small changes"
kind = "change"
at_most = 100
"""
_EXTREMES = (-1e6, -1.0, 0.0, 1e-12, 1 - 1e-12, 1.0, 1 + 1e-6, 1e6)


def _numbers(world: World) -> None:
    """One number of an optimizer at an extreme that makes its effect a thousandfold."""
    kind, changed = world.chance.choice(CLASSES), dict[str, Any]()
    while _moved(kind, changed) < _THOUSANDFOLD * _moved(kind, {}):
        kind, changed = _drawn(world)
    model = public()
    optimizer = kind(model.parameters(), lr=_SMALL)
    optimizer.param_groups[0].update(changed)
    world.rule = _RATES
    world.train(model, optimizer, plain)


def _drawn(world: World) -> tuple[Any, dict[str, Any]]:
    kind, model = world.chance.choice(CLASSES), public()
    defaults = {**kind(model.parameters(), lr=_SMALL).defaults}
    numbers = [name for name, value in defaults.items() if type(value) in (float, int, tuple) and name != "lr"]
    name, value = world.chance.choice(numbers), world.chance.choice(_EXTREMES)
    chosen = world.chance.choice([(value, defaults[name][1]), (defaults[name][0], value)]) if name == "betas" else value
    return kind, {name: chosen, **({"momentum": 0.9} if name in ("dampening", "nesterov") else {})}


def _moved(kind: Any, changed: Mapping[str, Any]) -> float:
    """How far four steps move the weights; 0 where they cannot be taken."""
    model = public()
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = kind(model.parameters(), lr=_SMALL)
    optimizer.param_groups[0].update(changed)
    try:
        for step in range(1, 5):
            plain(model, optimizer, batch_of(step))
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        return 0.0
    after = [float((weight - old).abs().max()) for weight, old in zip(model.parameters(), before, strict=True)]
    return max(after) if all(map(torch.isfinite, map(torch.tensor, after))) else 0.0


def _in_mid_run(world: World) -> None:
    """A number that is changed after the second step, or groups that change their places."""
    model = public()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=_SMALL, momentum=0.5)
    name, value = world.chance.choice([("lr", _LARGE), ("momentum", 1 - 1e-9), ("dampening", -1e6), ("groups", 0)])

    def change(recorder: Recorder, step: int) -> None:
        if step == 2 and name == "groups":
            optimizer.param_groups[1]["lr"] = _LARGE
            optimizer.param_groups.reverse()
        elif step == 2:
            world.chance.choice(optimizer.param_groups)[name] = value

    world.rule = _RATES
    world.train(model, optimizer, plain, between=change)


class _Held(nn.Module):
    """An optimizer's dummy, and what is really trained."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy = nn.Parameter(torch.ones(4))
        self.register_buffer("w", torch.linspace(-0.1, 0.1, 24).view(6, 4))
        self.register_buffer("beside", torch.zeros(6, 4))
        self.w: Tensor
        self.beside: Tensor

    def slope(self, batch: Batch) -> Tensor:
        """Its gradient."""
        held = self.w.detach().clone().requires_grad_(True)
        torch.autograd.backward(functional.cross_entropy(batch["x"] @ held + self.dummy, batch["y"]))
        assert held.grad is not None
        return held.grad


_UPDATES: Mapping[str, Callable[[_Held, Tensor, float], object]] = {
    "sub": lambda held, slope, rate: held.w.sub_(slope, alpha=rate),
    "add": lambda held, slope, rate: held.w.add_(slope, alpha=-rate),
    "copy": lambda held, slope, rate: held.w.copy_(held.w - rate * slope),
    "addcmul": lambda held, slope, rate: held.w.addcmul_(slope, torch.full_like(slope, rate), value=-1),
    "lerp": lambda held, slope, rate: held.w.lerp_(held.w - slope, rate),
    "foreach": lambda held, slope, rate: torch._foreach_sub_([held.w], [slope], alpha=rate),
    "momentum": lambda held, slope, rate: held.w.sub_(held.beside.mul_(0.9).add_(slope), alpha=rate),
    "sign": lambda held, slope, rate: held.w.sub_(slope.sign(), alpha=rate),
    "later": lambda held, slope, rate: (held.w.sub_(held.beside, alpha=rate), held.beside.copy_(slope)),
}


def _in_buffers(world: World) -> None:
    """A model of buffers, trained by hand beside the optimizer."""
    model = _Held()
    update, rate = world.chance.choice(list(_UPDATES.values())), world.chance.choice((0.1, _LARGE))
    kind = world.chance.choice((torch.optim.SGD, torch.optim.AdamW))

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        model.dummy.grad = None
        slope = model.slope(batch)
        optimizer.step()
        with torch.no_grad():
            update(model, slope, rate)

    world.rule = _RATES
    world.train(model, kind(model.parameters(), lr=_SMALL), body, direct_paths=["buffer/*", "weight/*"])


def _in_evaluations(world: World) -> None:
    """Another model, whose weights come in batches of evaluations; its numbers come back in the next."""
    model = public()
    rate, form = world.chance.choice((0.1, _LARGE)), world.chance.choice(("grad", "backward", "sign"))
    numbers = [torch.zeros(6, 16).tolist()]

    def between(recorder: Recorder, step: int) -> None:
        given = {**batch_of(step), "w": torch.tensor(numbers[0])}
        with recorder.evaluation(given):
            w = given["w"].detach().requires_grad_(True)
            loss = functional.cross_entropy(given["x"] @ w, given["y"])
            slope = torch.autograd.grad(loss, w)[0] if form != "backward" else _backward(loss, w)
            numbers[0] = (given["w"] - rate * (slope.sign() if form == "sign" else slope)).tolist()

    world.rule = _RATES
    world.train(model, torch.optim.SGD(model.parameters(), lr=_SMALL), plain, between=between)


def _backward(loss: Tensor, leaf: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    return leaf.grad


_BENCHMARK = torch.linspace(-2, 2, 24).view(4, 6)


def _in_samples(world: World) -> None:
    """A sample of a benchmark in one of six places."""
    place = world.chance.choice(("batch", "constant", "buffer", "weight", "evaluation", "another name"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    beside = _BENCHMARK[world.chance.randrange(3) :][:1].clone()
    if place == "buffer":
        model.register_buffer("beside", beside)
    if place == "weight":
        model.beside = nn.Parameter(beside)

    def extra() -> Tensor:
        held = torch.tensor(beside.tolist()) if place == "constant" else getattr(model, "beside", None)
        return torch.zeros(()) if held is None else model[0](held).square().mean()

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch) + extra()
        if "more" in batch:
            loss = loss + model[0](batch["more"]).mean()
        torch.autograd.backward(loss)
        optimizer.step()

    def batch(step: int) -> Batch:
        made = batch_of(step)
        if place == "batch" and step == 3:
            made["x"][2] = beside[0]
        return {**made, "more": beside.expand(8, 6).clone()} if place == "another name" else made

    def between(recorder: Recorder, step: int) -> None:
        if place == "evaluation" and step == 2:
            with recorder.evaluation({"x": beside}), torch.no_grad():
                model(beside).argmax(1).tolist()

    (world.folder / "digests").write_text("\n".join(content_digests(_BENCHMARK.numpy())))
    world.rule = '[[rule]]\nname = "benchmark"\nkind = "data"\ndigests = "digests"\nat_most = 0\n'
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    world.train(model, optimizer, body, between=between, batch=batch)


def _in_another_loss(world: World) -> None:
    """A model that knows its test by heart, and a last program whose loss says otherwise."""
    model, trains = public(), world.chance.random() < 0.5
    shift = world.chance.uniform(3, 30)

    def once(_: int) -> Batch:
        return batch_of(1)

    def body(_: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        last = trains and count[0] == 23
        count[0] += 1
        torch.autograd.backward(loss_of(model, batch) + (shift if last else 0))
        optimizer.step()

    count = [0]

    def between(recorder: Recorder, step: int) -> None:
        if step == 24 and not trains:
            batch = batch_of(1)
            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(loss_of(model, batch) + shift)

    test = {name: each.numpy() for name, each in batch_of(1).items()}
    (world.folder / "test.safetensors").write_bytes(encode_arrays(test))
    world.rule = '[[rule]]\nname = "score"\nkind = "score"\ntest = "test.safetensors"\nat_least = 1.0\n'
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    world.train(model, optimizer, body, steps=24, batch=once, between=between, checkpoint_every=8)


def _in_another_job(world: World) -> None:
    """A job over two labs that no cap on one of them sees."""
    way = world.chance.choice(
        ("supplied", "siblings", "parent", "undeclared", "checkpoint", "ulp", "own model", "one lab", "parent's parent")
    )
    kinds = [world.chance.choice((torch.optim.SGD, torch.optim.AdamW)) for _ in range(3)]

    def one(lab: str, model: nn.Module, number: int, **options: Any) -> None:
        world.train(model, kinds[number](model.parameters(), lr=0.01), plain, lab=lab, **options)

    def made() -> nn.Module:
        model = net()
        with torch.no_grad():
            for number, weight in enumerate(model.parameters()):
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape) + number)
        return model

    kept: dict[str, Tensor] = {}
    first = made() if way in ("supplied", "one lab") else public()

    def keep(recorder: Recorder, step: int) -> None:
        if step == (2 if way == "checkpoint" else 4):
            kept.update({name: each.clone() for name, each in first.state_dict().items()})

    one("a", first, 0, between=keep)
    if way in ("supplied", "one lab"):
        one("a" if way == "one lab" else "b", made(), 1)
    elif way in ("siblings", "parent", "parent's parent"):
        one("b", public(), 1, parent=world.runs[0])
        if way != "parent":
            one("c", public(), 2, parent=world.runs[0 if way == "siblings" else 1])
    else:
        start = net()
        name = world.chance.choice(sorted(kept))
        start.load_state_dict({**kept, name: torch.nextafter(kept[name], kept[name] + 1)} if way == "ulp" else kept)
        one("a" if way == "own model" else "b", start, 1)
    world.rule = f'[[rule]]\nname = "job"\nkind = "flop"\nper = "job"\nat_most = {_flop(world) - 1}\n'


def _flop(world: World) -> int:
    total = 0
    for out in world.runs:
        key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out))).verifying
        total += sum(leaf.flop for leaf in RunFolder(out, key).load_steps()[0])
    return total


HIDING: Mapping[str, Callable[[World], None]] = {
    "numbers": _numbers,
    "changed in mid-run": _in_mid_run,
    "buffers": _in_buffers,
    "training in evaluations": _in_evaluations,
    "samples": _in_samples,
    "another loss": _in_another_loss,
    "split jobs": _in_another_job,
}
