"""Honest and dishonest steps over the whole operator table: no honest one has a path, each dishonest one has.

A step is made of one call of an operator, with inputs from the battery, or of a loss as libraries write it. An honest
one puts weights in, makes a loss of what comes out, and lets the loss's gradients move the weights. A dishonest one
carries the batch past every loss: through the operator, or through a gradient that it multiplies and divides away.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from analysis.bench import battery_cases, origin
from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.paths import FEW, Path, direct_paths
from monitor.programs.program import Program
from tests.measurements._path_losses import LOSSES, world

__all__ = ["Made", "Step", "dishonest", "found_in", "honest", "run", "traced", "verdict", "write"]

_LARGEST = 1 << 13


@dataclass(slots=True)
class Step:
    """What the body of a made step works with: the state, the batch, and where the optimizer's updates lie."""

    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    capture: Capture
    updates: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Its calls are an update of the declared optimizer."""
        first = self.capture.taken
        with torch.no_grad():
            yield
        self.updates.append((first, self.capture.taken))

    def descend(self, loss: Tensor) -> dict[str, Tensor]:
        """Move all weights that a loss, or losses by sample, depend on by SGD; their gradients."""
        weights = {name: each for name, each in self.state.items() if each.requires_grad}
        seed = None if loss.dim() == 0 else torch.ones_like(loss)
        slopes = torch.autograd.grad(loss, list(weights.values()), seed, allow_unused=True)
        found = {name: slope for name, slope in zip(weights, slopes, strict=True) if slope is not None}
        with self.update():
            for name, slope in found.items():
                weights[name].add_(slope, alpha=-0.1)
        self.state |= {name.replace("weight/", "gradient/"): slope for name, slope in found.items()}
        return found


Body = Callable[[Step], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A made step, with values that it runs on.

    Attributes:
        is_honest: it is; any other has a path.
        state: under ``kind/name``.
        batch: by name.
    """

    name: str
    is_honest: bool
    body: Body
    state: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]

    def program(self) -> Program:
        """What a recorder makes of it; some exception where PyTorch or the numerics refuse the call."""
        state = {
            name: each.clone().requires_grad_(name.startswith("weight/") and each.is_floating_point())
            for name, each in self.state.items()
        }
        return traced(self.body, state, {name: tensor.clone() for name, tensor in self.batch.items()})


def traced(body: Body, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Program:
    """The program of a body that writes the state in place, or puts other tensors into it."""
    torch.default_generator.manual_seed(step_seed(0, 1))
    keys = RecordedKeys(0, 1)
    capture = Capture(keys, WriteWatch(1))
    capture.declare_inputs({name: tensor.detach() for name, tensor in state.items()}, batch)
    step = Step(dict(state), batch, capture)
    with numerics.recording("exact", observer=capture, keys=keys):
        body(step)
    return capture.program(dict(step.state), batch_layout(batch), step.updates)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator in the battery."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def floats(self) -> list[int]:
        """Which of the arguments are tensors of fractional numbers."""
        return [i for i, value in enumerate(self.args) if isinstance(value, Tensor) and value.is_floating_point()]

    @property
    def elements(self) -> int:
        return sum(value.numel() for value in self.args if isinstance(value, Tensor))

    @property
    def is_in_place(self) -> bool:
        arguments = self.func._schema.arguments
        return self.func._schema.is_mutable and not any(each.is_out for each in arguments)

    def split(self, weight: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Its tensors as a weight and a batch."""
        found = {i: value for i, value in enumerate(self.args) if isinstance(value, Tensor)}
        state = {} if weight is None else {"weight/w": found.pop(weight)}
        return state, {str(i): value for i, value in found.items()}

    def arguments(self, step: Step, weight: int | None) -> list[Any]:
        return [
            value if not isinstance(value, Tensor) else step.state["weight/w"] if i == weight else step.batch[str(i)]
            for i, value in enumerate(self.args)
        ]


class _Smallest:
    """Keeps the smallest call of each operator that has some elements."""

    def __init__(self) -> None:
        self.calls: dict[str, _Call] = {}

    def before(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, known = _Call(func, args, kwargs), self.calls.get(str(func))
        if 2 < given.elements < (known.elements if known else _LARGEST):
            self.calls[str(func)] = _Call(func, tuple(map(_tame, args)), {k: _tame(v) for k, v in kwargs.items()})

    def after(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Nothing to see."""


def _tame(value: Any) -> Any:
    """Without infinities, and a copy."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.nan_to_num(1.0, 1.0, 1.0).clamp(-2, 2) if value.is_floating_point() else value
    return [_tame(each) for each in value] if isinstance(value, list | tuple) else value


@functools.cache
def _calls() -> Mapping[str, _Call]:
    """The smallest call of each operator in the battery, by its overload's name."""
    kept = _Smallest()
    for case in battery_cases.cases():
        with numerics.recording("native", observer=kept):
            case()
    return dict(sorted(kept.calls.items()))


def _outputs(out: object) -> list[Tensor]:
    found = out if isinstance(out, list | tuple) else [out]
    return [each for each in found if isinstance(each, Tensor)]


def _loss(found: list[Tensor]) -> Tensor:
    loss = torch.zeros(())
    for each in found:
        if each.requires_grad:
            loss = loss + (each.float() * 0.5).square().mean()
    return loss


def _next(given: Tensor, made: list[Tensor]) -> Tensor:
    """What an operator takes in its second turn: what it made, or where that has another form, a mean of it."""
    fitting = [each for each in made if each.shape == given.shape and each.dtype == given.dtype]
    return fitting[0] if fitting else given * 0.5 + sum(each.float().mean() for each in made if each.requires_grad)


def _honest_call(call: _Call, weight: int, times: int) -> Body:
    def body(step: Step) -> None:
        args = call.arguments(step, weight)
        if call.is_in_place:
            args[weight] = args[weight] * 1.0
        found: list[Tensor] = []
        for _ in range(times):
            found = _outputs(call.func(*args, **call.kwargs))
            args[weight] = _next(args[weight], found)
        step.descend(_loss(found))

    return body


def _honest_loss(name: str) -> Body:
    def body(step: Step) -> None:
        step.descend(LOSSES[name](step.state, step.batch))
        with torch.no_grad():
            step.state["buffer/codes"].lerp_(step.state["weight/h"], 0.1)

    return body


def honest() -> Iterator[Made]:
    """Losses as libraries write them, and each operator by itself and twice in a row, by each of its arguments.

    Those through which no gradient passes raise what PyTorch does when their program is made.
    """
    for name in LOSSES:
        state, batch = world(1)
        yield Made(name=name, is_honest=True, body=_honest_loss(name), state=state, batch=batch)
    for name, call in _calls().items():
        for place in call.floats:
            state, batch = call.split(place)
            for times, form in ((1, "once"), (2, "twice")):
                text, body = f"{name} {form}, by argument {place}", _honest_call(call, place, times)
                yield Made(name=text, is_honest=True, body=body, state=state, batch=batch)


def dishonest(count: int, seed: int = 0) -> Iterator[Made]:
    """Random lies: one by each operator first, then carriers through gradients, ones and gates into each kind of sink.

    Args:
        count: how many of the latter.
    """
    for name, call in _calls().items():
        made = None if "empty" in name else _carried(name, call)
        if made is not None:
            yield made
    draw = random.Random(seed)
    for _ in range(count):
        carrier, gate = draw.choice(list(_CARRIERS)), draw.choice(list(_GATES))
        sink, loss = draw.choice(list(_SINKS)), draw.choice(list(LOSSES))
        state, batch = world(draw.randrange(1 << 30))
        name, body = f"{carrier}, {gate}, into {sink}, beside {loss}", _lie(carrier, gate, sink, loss)
        yield Made(name=name, is_honest=False, body=body, state=state, batch=batch)


def found_in(made: Made) -> list[Path]:
    """The paths of a made step that nobody may take without an agreement; an exception where it cannot be made."""
    program = made.program()
    state = {name: list(tensor.shape) for name, tensor in made.state.items()}
    return [path for path in direct_paths({program.digest: program}, state) if not path.is_harmless]


def run(
    *, trials: int = 400, seed: int = 0, progress: Callable[[int], object] = lambda count: None
) -> list[dict[str, Any]]:
    """Look at all honest steps, and at all dishonest ones: one for each operator, and ``trials`` random ones.

    Of random lies it is known whether they show with all gradients zero (``shows``), and with gradients as they are.
    """
    from tests.measurements._witnessed import is_open, witnesses

    rows = []
    for work, steps in (("honest", honest()), ("dishonest", dishonest(trials, seed))):
        start, told, wrong, refused = time.process_time(), 0, [], {}
        witnessed, shows, missed, graded = 0, 0, [], 0
        for made in steps:
            progress(1)
            try:
                found, seen = found_in(made), bool(witnesses(made, made.program()))
            except (RuntimeError, CallerError, IndexError, ValueError) as error:
                refused[made.name] = str(error).partition("\n")[0][:100]
                continue
            told += 1
            if bool(found) == made.is_honest:
                wrong.append(made.name)
            witnessed += seen
            if "model" in made.batch and not made.is_honest:
                shown = is_open(made)
                shows, graded = shows + shown, graded + (not shown and is_open(made, silent=False))
                missed += [made.name] if shown and not seen else []
            elif seen and made.is_honest:
                missed.append(made.name)
        rows.append(
            {
                "work": work,
                "mode": "exact",
                "seconds": time.process_time() - start,
                "ratio": None,
                "seed": seed,
                "steps": told,
                "operators": len(_calls()),
                "wrong": wrong,
                "witnessed": witnessed,
                "shows": shows,
                "shows_by_gradients": graded,
                "witness_wrong": missed,
                "not_made": len(refused),
            }
        )
    return rows


def write(rows: list[dict[str, Any]], path: FilePath) -> None:
    """Keep rows with this machine's description."""
    origin.write(rows, path)


def verdict(rows: list[dict[str, Any]]) -> str | None:
    """What is not as it must be."""
    wrong = [name for row in rows for name in row["wrong"]]
    if wrong:
        return f"{len(wrong)} steps are judged wrongly, such as {wrong[0]}"
    for row in rows:
        missed = row["witness_wrong"]
        if len(missed) > (row["shows"] // 20 if row["work"] == "dishonest" else 0):
            return f"the witness of {len(missed)} {row['work']} steps is wrong, such as that of {missed[0]}"
    return None


def _carried(name: str, call: _Call) -> Made | None:
    """A buffer becomes what an operator makes of the batch; None where that does not depend on the batch's values."""
    _, batch = call.split(None)
    try:
        first, second = ([each.clone() for each in _run(call, change)] for change in (0.0, 0.25))
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    chosen = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if not _same(a, b)), None)
    if chosen is None:
        return None

    def body(step: Step) -> None:
        args = call.arguments(step, None)
        with torch.no_grad():
            step.state["buffer/codes"].copy_(_outputs(call.func(*args, **call.kwargs))[chosen])
        step.descend((step.state["weight/w"] * 2.0).square().sum())

    state = {"weight/w": torch.ones(3), "buffer/codes": first[chosen].new_zeros((FEW + 1, *first[chosen].shape))}
    return Made(name=f"{name} into a buffer", is_honest=False, body=body, state=state, batch=batch)


def _run(call: _Call, change: float) -> list[Tensor]:
    args = [v if not isinstance(v, Tensor) else v + change if v.is_floating_point() else v.clone() for v in call.args]
    torch.manual_seed(0)
    return _outputs(call.func(*args, **call.kwargs))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or torch.equal(one, other) or (one.isnan() | other.isnan()).all().item() is True


_CARRIERS: Mapping[str, Callable[[Step, Tensor, Tensor], Tensor]] = {
    "a copy": lambda step, slope, model: model.clone(),
    "a quotient": lambda step, slope, model: slope * model / (slope + 1e-30),
    "a quotient of sums": lambda step, slope, model: (slope + slope * model) / slope - 1.0,
    "a sign": lambda step, slope, model: slope.sign() * slope.sign() * model,
    "where a gradient is": lambda step, slope, model: torch.where(slope != 0, model, 0.0),
    "a gradient's power": lambda step, slope, model: (slope * 0.0).exp() * model,
    "a normalised gradient": lambda step, slope, model: (slope.norm() / slope.norm()) * model,
    "ones like a weight": lambda step, slope, model: torch.ones_like(step.state["weight/h"]) * model,
    "ones like a gradient": lambda step, slope, model: torch.ones_like(slope) * model,
    "ones like a loss": lambda step, slope, model: torch.ones_like(step.state["weight/h"].sum()) * model,
    "ones like a loss, spread": lambda step, slope, model: (
        torch.ones_like(step.state["weight/b"].sum()).expand(5, 5).contiguous().addcmul(model, model)
    ),
    "a linear loss": lambda step, slope, model: torch.autograd.grad(
        (step.state["weight/h"] * model).sum(), step.state["weight/h"]
    )[0],
    "a seed of the batch": lambda step, slope, model: torch.autograd.grad(
        step.state["weight/h"] * 1.0, step.state["weight/h"], model
    )[0],
    "a product of matrices": lambda step, slope, model: torch.diag_embed((slope / slope).diagonal()) @ model,
    "a gradient's place": lambda step, slope, model: model.gather(0, slope.argsort(0).argsort(0)),
    "a momentum": lambda step, slope, model: step.state["optimizer/h/m"] * 0.0 + model,
    "a finite gradient": lambda step, slope, model: torch.where(slope.isfinite().all(), model, model * 0.0),
}
"""How the batch's ``model`` gets into what a lie writes."""

_GATES: Mapping[str, Callable[[Step, Tensor, Tensor], Tensor]] = {
    "always": lambda step, new, old: new,
    "gated by the batch": lambda step, new, old: torch.where(step.batch["x"].sum() > 0, new, old),
    "gated by the state": lambda step, new, old: torch.where(step.state["weight/v"].sum() > 0, new, old),
    "gated by the step's number": lambda step, new, old: torch.where(step.state["buffer/count"] % 3 == 0, new, old),
    "gated by a gradient": lambda step, new, old: torch.where(step.state["gradient/h"].norm() > 0, new, old),
    "in half of its places": lambda step, new, old: torch.cat([new[:2], old[2:]]),
    "a little": lambda step, new, old: old.lerp(new, 0.01),
}

_SINKS = {"a buffer": "buffer/codes", "a weight": "weight/h", "the optimizer's state": "optimizer/h/m"}


def _lie(carrier: str, gate: str, sink: str, loss: str) -> Body:
    def body(step: Step) -> None:
        slopes = step.descend(LOSSES[loss](step.state, step.batch))
        old = step.state[_SINKS[sink]]
        new = _CARRIERS[carrier](step, slopes["weight/h"], step.batch["model"])
        with torch.no_grad():
            step.state["buffer/count"].add_(1)
            old.copy_(_GATES[gate](step, new.detach(), old.detach().clone()))

    return body
