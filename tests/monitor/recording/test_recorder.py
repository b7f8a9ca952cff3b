"""What the recorder takes, what it refuses by name, and what stays on disk."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from firmware_sim.errors import CallerError
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import LabConfig, Recorder, RunConfig, padded
from monitor.declaration.reference import IMPLEMENTATION
from monitor.lab.host import Host
from monitor.numerics import UnsupportedOperator
from monitor.programs.batches import flatten_batch
from monitor.recording import step_programs
from monitor.transcript import RunFolder
from tests.agreements import agreement, resigned

STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def pairs(steps: int = 3, rows: int = 12):
    torch.manual_seed(1)
    return [(torch.randn(rows, 8), torch.randint(0, 4, (rows,))) for _ in range(steps)]


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def plain(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def with_loss(change):
    """The body of a step whose loss is ``change(model, batch)``."""

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        change(model, batch).backward()
        optimizer.step()

    return body


def sgd(model, **hyper):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **hyper})


def accepted(recorded) -> bool:
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    return True


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_with_a_schedule_is_recorded_and_replays_here(record_loop, name):
    """``checkpoint_every=1``: the recorder itself repeats every step from its program."""
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def body(*arguments):
        plain(*arguments)
        schedule.step()

    steps = 7 if name == "radam" else 4
    assert accepted(record_loop(model, optimizer, pairs(steps), body, checkpoint_every=1))


def loop_of(kind, change):
    model = mlp()
    optimizer = sgd(model) if kind == "SGD" else torch.optim.AdamW(model.parameters())
    after = change(optimizer)

    def body(*arguments):
        plain(*arguments)
        after()

    return model, optimizer, pairs(4), body


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_cycled_momentum_is_accepted(record_loop, kind):
    """It falls below its first value, and comes back to it at most."""
    loop = loop_of(kind, lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20).step)
    assert accepted(record_loop(*loop))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_momentum_that_rises_is_agreed_on_or_refused_and_rejected(record_loop, kind):
    name, more = ("momentum", 0.95) if kind == "SGD" else ("betas", (0.95, 0.999))

    def record(folder, free):
        loop = loop_of(kind, lambda optimizer: lambda: optimizer.param_groups[0].update({name: more}))
        return record_loop(*loop, name=folder, free=free)

    with pytest.raises(CallerError, match=rf"{name} is .* in this step, but was declared as .*free=\('{name}',\)"):
        record("refused", ())
    recorded = record("agreed", (name,))
    assert accepted(recorded)
    verdict = verify(recorded.run, resigned(recorded.run, recorded.trust, free=frozenset()), now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert f"hyper-parameters differ from their declaration: {name} of group 0" in verdict.reasons[0].text


def test_schedule_made_after_the_recorder_with_numbers_of_numpy(record_loop):
    model = mlp()
    optimizer = sgd(model)
    made = []

    def prepare(_):
        made.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step))

    def body(*arguments):
        plain(*arguments)
        made[0].step()

    assert accepted(record_loop(model, optimizer, pairs(5), body, prepare=prepare))


def test_training_goes_on_in_chip_memory_as_it_does_without_a_recorder(record_loop):
    """Exact numerics give the same bits with and without the recorder: it changes nothing but where tensors lie."""
    from monitor import numerics

    mine, theirs = mlp(), mlp()
    ours, others = torch.optim.AdamW(mine.parameters()), torch.optim.AdamW(theirs.parameters())
    record_loop(mine, ours, pairs(), plain)
    for batch in pairs():
        with numerics.recording("exact"):
            plain(theirs, others, batch)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    weight, other = mine.get_parameter("0.weight"), theirs.get_parameter("0.weight")
    assert torch.equal(ours.state[weight]["exp_avg"], others.state[other]["exp_avg"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


class Norms(nn.Module):
    """Batch norm, a tied weight, a plain tensor as attribute and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)
        self.mask = torch.tril(torch.ones(8, 8))

    def forward(self, x):
        return self.head(self.norm(self.two(self.one(x) @ self.mask)))


class Encoder(nn.Sequential):
    def __init__(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        super().__init__(nn.Unflatten(1, (1, 8)), layer, nn.Flatten(), nn.Linear(8, 4))


MODELS = {
    "checkpointing": lambda: Checkpointed(False),
    "checkpointing-reentrant": lambda: Checkpointed(True),
    "norms": Norms,
    "encoder": Encoder,
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 4)).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_is_recorded_and_replays_here(record_loop, name):
    torch.manual_seed(0)
    model = MODELS[name]()
    kind = next(model.parameters()).dtype

    def body(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(model(batch[0].to(kind)).float(), batch[1]).backward()
        optimizer.step()

    assert accepted(record_loop(model, sgd(model), pairs(), body, checkpoint_every=1))


def test_dropout_draws_other_masks_in_each_step_and_leaves_the_users_generator_alone(record_loop):
    masks = []

    def body(model, optimizer, batch):
        masks.append(functional.dropout(torch.ones(64), 0.5))
        plain(model, optimizer, batch)

    model = mlp()
    batches = pairs()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    record_loop(model, sgd(model), batches, body)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(masks[0], masks[1])


BATCHES = {
    "overlapping views of one sequence": lambda t: (t[:, :-1], torch.zeros(12, dtype=torch.long), t[:, 1:]),
    "one tensor twice": lambda t: {"x": t[:, 1:], "z": t[:, 1:], "y": torch.zeros(12, dtype=torch.long)},
    "transposed": lambda t: (t[:, 1:].t().contiguous().t(), torch.ones(12, dtype=torch.long)),
    "rows of a large set": lambda t: (torch.cat([t] * 50)[24:36, 1:], torch.ones(12, dtype=torch.long)),
    "nested, with text": lambda t: {"a": [t[:, 1:].clone(), {"b": torch.ones(12, dtype=torch.long)}], "name": "n"},
    "a name that files keep": lambda t: {"__metadata__": t[:, 1:].clone(), "a/b": torch.ones(12, dtype=torch.long)},
    "arrays of NumPy": lambda t: (t.numpy()[:, 1:], np.ones(12, dtype=np.int64), np.array(["a"] * 12)),
    "a dataclass": lambda t: Pair(t[:, 1:].clone(), torch.ones(12, dtype=torch.long), ["a", "b"]),
    "no elements beside": lambda t: (t[:, 1:].clone(), torch.ones(12, dtype=torch.long), torch.zeros(3, 0, 2)),
}


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    text: list[str]


@pytest.mark.parametrize("name", BATCHES)
def test_batch_of_any_form_replays_here(record_loop, name):
    torch.manual_seed(2)
    batches = [BATCHES[name](torch.randn(12, 9)) for _ in range(2)]

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, np.ndarray):
            return [torch.from_numpy(value)] if value.dtype.kind in "fi" else []
        value = vars(value) if isinstance(value, Pair) else value
        values = value.values() if isinstance(value, dict) else value
        return [] if isinstance(value, str) else [tensor for each in values for tensor in tensors(each)]

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        found = tensors(batch)
        target = next(tensor for tensor in found if tensor.dim() == 1)
        total: Any = sum(functional.cross_entropy(model(tensor), target) for tensor in found if tensor.dim() == 2)
        total.backward()
        optimizer.step()

    model = mlp()
    assert accepted(record_loop(model, sgd(model), batches, body, checkpoint_every=1))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (lambda: {"a": torch.ones(2), "a.b": torch.ones(3), **{"": torch.ones(1), "batch": torch.ones(1)}}, "called"),
        (lambda: torch.ones(2, 2).to_sparse(), "to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), r"monitor\.padded"),
        (lambda: torch.ones(2, device="meta"), "no values"),
        (lambda: np.ones(4)[::-1], "give a copy"),
        (lambda: ["a", "b"], "holds no tensor"),
    ],
)
def test_batch_that_cannot_be_recorded_is_refused_with_what_to_give(batch, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls some of these layouts new
        given = batch()
    with pytest.raises(CallerError, match=text):
        flatten_batch(given)


def test_an_array_that_the_step_reads_in_part_is_the_batchs(record_loop):
    torch.manual_seed(2)
    batches = [(np.random.default_rng(n).standard_normal((12, 8)).astype(np.float32), n) for n in range(3)]

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(torch.from_numpy(batch[0][4:])).square().mean().backward()
        optimizer.step()

    model = mlp()
    recorded = record_loop(model, sgd(model), batches, body, checkpoint_every=1)
    assert accepted(recorded)
    assert len(list((recorded.run / "programs").iterdir())) == 2  # the first step has no gradients to clear


def test_parameters_without_elements_are_bound_like_others(record_loop):
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that such parameters need no values
        model = nn.ModuleDict({"a": nn.Linear(8, 3), "e": nn.Linear(0, 3)})

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model["a"](batch[0]) + model["e"](batch[0][:, :0]), batch[1]).backward()
        optimizer.step()

    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert accepted(record_loop(model, optimizer, batches, body, checkpoint_every=1))


def test_batch_that_the_step_writes_is_recorded_as_it_came(record_loop):
    def body(model, optimizer, batch):
        batch[0].mul_(0.5)
        plain(model, optimizer, batch)

    batches = pairs(2)
    came = batches[0][0].clone()
    model = mlp()
    recorded = record_loop(model, sgd(model), batches, body)
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    assert torch.equal(run.batches().batch(1)["0"], came)
    assert accepted(recorded)


def test_gradients_accumulate_across_steps(record_loop):
    """The update comes every second step, so there are programs with and without one."""
    count = 0

    def body(model, optimizer, batch):
        nonlocal count
        count += 1
        loss_of(model, batch).backward()
        if count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    model = mlp()
    recorded = record_loop(model, torch.optim.AdamW(model.parameters()), pairs(6), body, checkpoint_every=1)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["execution"]["updates"] == 3


def test_smaller_last_batch_is_another_program(record_loop):
    model = mlp()
    recorded = record_loop(model, sgd(model), [*pairs(3), *pairs(1, rows=5)], plain)
    assert len(agreement(recorded.trust).programs) == 3
    assert accepted(recorded)


def test_optimizer_state_from_before_is_taken_over(record_loop):
    """Bias corrections go on from the updates that the initial state has seen."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for batch in pairs(5):
        plain(model, optimizer, batch)
    assert accepted(record_loop(model, optimizer, pairs(4), plain))


COUNT = {"value": 0}


def counted() -> int:
    COUNT["value"] += 1
    return COUNT["value"]


def seeded(model, batch):
    torch.manual_seed(3)
    return functional.dropout(loss_of(model, batch).expand(3), 0.5).sum()


def read_back(model, batch):
    loss = loss_of(model, batch)
    return loss / (loss.item() + 1e-3)


def hidden_write(model, batch):
    loss = loss_of(model, batch)
    model[0].weight.detach().numpy()[0, 0] += 0.25
    return loss


REFUSED = {
    "reseeded": (seeded, CallerError, "seeds torch's generator"),
    "new number": (
        lambda m, b: loss_of(m, b) * (counted() + 0.5),
        CallerError,
        r"a number that aten\.mul\.Tensor takes changes from step to step",
    ),
    "number read from a tensor": (read_back, CallerError, r"a number that aten\.div\.Tensor takes changes"),
    "hidden write": (hidden_write, CallerError, r"weight/0\.weight was written in step 1 by something that is no"),
    "double": (
        lambda m, b: functional.cross_entropy(functional.linear(b[0].double(), m[0].weight.double()), b[1]),
        UnsupportedOperator,
        "float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_step_that_cannot_be_recorded_is_refused_by_name_and_not_committed(record_loop, tmp_path, name):
    change, kind, message = REFUSED[name]
    model = mlp()
    with pytest.raises(kind, match=message) as caught:
        record_loop(model, sgd(model), pairs(4), with_loss(change), name="run")
    assert "\n" not in str(caught.value)
    if not (tmp_path / "run").exists():  # the first step was refused
        assert list(tmp_path.iterdir()) == []
        again = mlp()
        assert accepted(record_loop(again, sgd(again), pairs(1), plain, name="run"))
        return
    trust = Trust.load([tmp_path / "run.trust.json"])
    assert RunFolder(tmp_path / "run", trust.labs["lab"]).committed < 4
    assert verify(tmp_path / "run", trust, now=STARTED).outcome is Outcome.INCONCLUSIVE


def read_rows(losses):
    """As a library gathers what it logs: a number has no rows, which it finds out by trying."""
    try:
        return losses[:3]
    except IndexError:
        return losses


@pytest.mark.parametrize("numerics", ["exact", "rounded", "native"])
def test_an_operator_that_fails_is_no_call_and_the_step_goes_on(record_loop, numerics):
    def body(model, optimizer, batch):
        losses = functional.cross_entropy(model(functional.dropout(batch[0], 0.5)), batch[1], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        read_rows(losses).sum().item(), read_rows(losses.mean()).item()
        optimizer.step()

    model = mlp()
    assert accepted(record_loop(model, sgd(model), pairs(4), body, numerics=numerics))


def test_an_operator_that_fails_between_steps_is_no_call_of_a_write(record_loop):
    def clamp(recorder, step):
        with torch.no_grad():
            bias = model.get_parameter("0.bias")
            read_rows(bias.sum() * 2), bias.clamp_(-1, 1)

    model = mlp()
    assert accepted(record_loop(model, sgd(model), pairs(3), plain, before=clamp))


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.zeros(3).add_(torch.ones(4)),
        lambda: torch._foreach_add_([torch.zeros(3), torch.zeros(3)], [torch.ones(3), torch.ones(4)]),
        lambda: torch.special.bessel_j0(torch.ones(3, 3)),
    ],
    ids=["in place", "in part", "refused"],
)
def test_a_step_is_refused_where_an_operator_that_writes_or_is_refused_failed(record_loop, fails):
    def body(model, optimizer, batch):
        with suppress(Exception):
            fails()
        plain(model, optimizer, batch)

    model = mlp()
    with pytest.raises(CallerError, match=r"an operator before aten\.\S+ failed and the loop went on"):
        record_loop(model, sgd(model), pairs(2), body)


def test_many_programs_warn_and_too_many_are_refused(record_loop, monkeypatch):
    monkeypatch.setattr(step_programs, "MANY_PROGRAMS", 2)
    monkeypatch.setattr(step_programs, "MAXIMUM_PROGRAMS", 4)
    model = mlp()
    body = with_loss(lambda m, b: loss_of(m, b) * counted())
    with pytest.warns(UserWarning, match=r"program 3 of the run; .* bytes on disk.*monitor\.padded"):
        assert accepted(record_loop(model, sgd(model), pairs(4), body, checkpoint_every=100))
    with (
        pytest.raises(CallerError, match="already has 4 different programs; pad batches"),
        pytest.warns(UserWarning, match="program 3"),
    ):
        record_loop(model, sgd(model), pairs(5), body, checkpoint_every=100, name="too-many")


def test_padded_batches_of_any_length_run_few_programs(record_loop):
    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-100).backward()
        optimizer.step()

    model = mlp()
    batches = [pairs(1, rows=rows)[0] for rows in (3, 5, 8, 7)]
    batches = [(padded(x, (8, 4), dim=0), padded(y, (8, 4), value=-100)) for x, y in batches]
    recorded = record_loop(model, sgd(model), batches, body)
    assert len({tuple(x.shape) for x, _ in batches}) == 2
    assert len(agreement(recorded.trust).programs) == 2
    with pytest.raises(CallerError, match=r"has 9 places, more than each of the sizes \(8, 4\)"):
        padded(torch.zeros(9), (8, 4))
    with pytest.raises(CallerError, match="has no dimension 1"):
        padded(torch.zeros(9), (8, 4), dim=1)


def test_start_that_fails_leaves_the_folder_free(tmp_path):
    class Odd:
        def state_dict(self):
            return {"open file": object()}

        def load_state_dict(self, state):
            """Nothing."""

    model = mlp()
    with pytest.raises(CallerError, match="is a object, which JSON cannot hold"):
        Recorder(model, sgd(model), out=tmp_path / "run", stateful={"odd": Odd()})
    assert list(tmp_path.iterdir()) == []
    Recorder(model, sgd(model), out=tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.jit, of complex modules
def test_objects_that_cannot_be_recorded_are_refused_before_anything_is_written(tmp_path):
    model = mlp()
    stranger = torch.optim.SGD(mlp().parameters(), 0.1)
    refused = [
        (torch.jit.trace(mlp(), torch.zeros(1, 8)), sgd(model), "script module"),
        (mlp, sgd(model), "not a torch.nn.Module"),
        (model, "adam", "not a torch.optim.Optimizer"),
        (model, [sgd(model), 3], "the optimizer is a list, not a torch.optim.Optimizer"),
        (model, stranger, "that the model does not hold"),
        (model, torch.optim.SparseAdam(model.parameters()), "SparseAdam takes sparse .*write torch.optim.Adam"),
        (mlp().to("meta"), "adam", "not a torch.optim.Optimizer"),
    ]
    for wrong, optimizer, message in refused:
        with pytest.raises(CallerError, match=message):
            Recorder(wrong, optimizer, out=tmp_path / "run")
    away = mlp().to("meta")
    with pytest.raises(CallerError, match="lies on meta"):
        Recorder(away, sgd(away), out=tmp_path / "run")
    with pytest.raises(CallerError, match="numerics must be exact, rounded or native, not 'fast'"):
        Recorder(model, sgd(model), out=tmp_path / "run", numerics="fast")
    for free in ("lr", ("l r",), (1,)):
        with pytest.raises(CallerError, match="free must list names of hyper-parameters"):
            Recorder(model, sgd(model), out=tmp_path / "run", free=free)
    assert list(tmp_path.iterdir()) == []


class OwnLion(torch.optim.Optimizer):
    """With attributes of its own, as packages' optimizers have."""

    def __init__(self, params, lr=1e-2, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay})
        self.first_rate, self.update = lr, self.signed

    @staticmethod
    def signed(weight, average, lr, decay):
        weight.mul_(1 - lr * decay).add_(average.sign(), alpha=-lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                self.update(weight, state["average"].mul_(0.9).add_(weight.grad), group["lr"], group["decay"])


def test_an_optimizer_with_attributes_of_its_own_is_recorded(record_loop):
    model = mlp()
    recorded = record_loop(model, OwnLion(model.parameters()), pairs(), plain, free=("lr", "decay"))
    assert accepted(recorded)


@pytest.mark.parametrize("is_true", [True, False])
def test_of_several_optimizers_each_is_bound_by_itself(record_loop, is_true):
    """What an unknown one does is open, and what the known one does is held against its declaration all the same."""
    model = mlp()
    both = [OwnLion(model[0].parameters()), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
    rates = [torch.optim.lr_scheduler.LinearLR(each, total_iters=9) for each in both]

    def body(model, optimizers, batch):
        loss = loss_of(model, batch)
        for each in both:
            each.zero_grad()
        loss.backward()
        for each, rate in zip(both, rates, strict=True):
            each.step()
            rate.step()
        if not is_true:
            with torch.no_grad():
                model[2].weight.mul_(0.5)

    recorded = record_loop(model, both, pairs(), body)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    [text] = [reason.text for reason in verdict.reasons]
    names = text.partition(", since ")[0].removeprefix("not bound to the arithmetic: ").split(", ")
    assert names == (["decay", "lr"] if is_true else sorted({*both[0].defaults, *both[1].defaults} - IMPLEMENTATION))


def test_what_an_optimizer_grows_beside_its_state_is_carried_where_a_later_step_reads_it(record_loop):
    model = mlp()
    optimizer = sgd(model)

    def body(model, optimizer, batch, reads):
        plain(model, optimizer, batch)
        with torch.no_grad():
            for weight in model.parameters():
                found = optimizer.state[weight].get("old")
                if found is not None and reads:
                    found.add_(1)
                optimizer.state[weight]["old"] = weight * 2

    assert accepted(record_loop(model, optimizer, pairs(), partial(body, reads=False)))
    model = mlp()
    assert accepted(record_loop(model, sgd(model), pairs(), partial(body, reads=True), name="again"))


@pytest.mark.filterwarnings("ignore:chips count")
def test_a_models_tensors_are_saved_while_it_is_recorded_and_after(tmp_path):
    """Tied weights among them, which files hold once."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.again = self.body[0]

        def forward(self, x):
            return self.body(x)

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1)
    for batch in pairs(2):
        with recorder.step(batch):
            plain(model, optimizer, batch)
        save_model(model, str(tmp_path / "model.safetensors"))
    recorder.finish()
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.items())


def test_a_refused_operator_names_the_line_that_led_there(record_loop):
    def body(model, optimizer, batch):
        torch.special.bessel_j0(batch[0])

    model = mlp()
    with pytest.raises(UnsupportedOperator, match=r"test_recorder\.py:\d+: aten\.special_bessel_j0.* before the step"):
        record_loop(model, sgd(model), pairs(), body)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizer_is_recorded_as_its_plain_form(record_loop, kind):
    """The same bits as ``fused=False``, and the declaration says which form was taken."""
    states = []
    for fused in (True, False):
        model = mlp()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, fused=fused)
        recorded = record_loop(model, optimizer, pairs(), plain, checkpoint_every=1, name=f"fused-{fused}")
        assert accepted(recorded)
        declared = RunFolder(recorded.run, recorded.trust.labs["lab"]).declared
        assert declared.groups[0]["fused"] is False
        states.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*states)


def crash(recorder, batch):
    """The process ends within a step."""
    with pytest.raises(ZeroDivisionError), recorder.step(batch):
        raise ZeroDivisionError


def adversarial(model, optimizers, batch):
    first, second = optimizers
    made = model["makes"](batch[0])
    second.zero_grad()
    (model["judges"](made.detach()).mean() - model["judges"](batch[0][:, :4]).mean()).backward()
    second.step()
    first.zero_grad()
    (-model["judges"](made).mean()).backward()
    first.step()


@pytest.mark.parametrize("kinds", [("Adam", "Adam"), ("AdamW", "SGD"), ("NAdam", "Adam")])
def test_several_optimizers_are_recorded_and_each_number_is_bound(record_loop, kinds):
    torch.manual_seed(0)
    model = nn.ModuleDict({"makes": nn.Linear(8, 4), "judges": nn.Linear(4, 1)})
    optimizers = [
        getattr(torch.optim, kind)(part.parameters(), lr=0.01) for kind, part in zip(kinds, model.values(), strict=True)
    ]
    recorded = record_loop(model, optimizers, pairs(4), adversarial, checkpoint_every=1)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["execution"]["updates"] == 8
    assert not verdict.evidence["execution"]["not_bound"]


def test_several_optimizers_resume_and_a_changed_number_of_the_second_is_refused(record_loop, tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.ModuleDict({"makes": nn.Linear(8, 4), "judges": nn.Linear(4, 1)})
        return model, [torch.optim.Adam(part.parameters(), lr=0.01) for part in model.values()]

    whole, optimizers = make()
    record_loop(whole, optimizers, pairs(4), adversarial, name="whole")
    model, optimizers = make()
    recorder = Recorder(model, optimizers, out=tmp_path / "run", seed=5, started=STARTED)
    for batch in pairs(4)[:2]:
        with recorder.step(batch):
            adversarial(model, optimizers, batch)
    crash(recorder, pairs(1)[0])
    model, optimizers = make()
    recorder = Recorder.resume(model, optimizers, out=tmp_path / "run")
    for batch in pairs(4)[2:]:
        with recorder.step(batch):
            adversarial(model, optimizers, batch)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    optimizers[1].param_groups[0]["betas"], odd = (0.5, 0.9), pairs(1)[0]
    with pytest.raises(CallerError, match=r"betas is .* but was declared as"), recorder.step(odd):
        adversarial(model, optimizers, odd)


class Average:
    """An average of weights by hand, and a count, in the attributes of a plain object."""

    def __init__(self, model):
        self.kept = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.total = torch.zeros(())

    def update(self, model):
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                self.kept[name] = 0.9 * self.kept[name] + 0.1 * tensor
            self.total += 1.0


@pytest.mark.parametrize("kind", ["module", "object"])
def test_objects_under_state_are_recorded_like_buffers_and_resume(record_loop, tmp_path, kind):
    def make():
        average: Any
        model = mlp()
        if kind == "object":
            average = Average(model)
            return model, sgd(model), average, lambda: average.update(model)
        ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
        return model, sgd(model), average, lambda: average.update_parameters(model)

    def values(average):
        held = average.kept.values() if kind == "object" else average.parameters()
        return torch.cat([tensor.detach().flatten() for tensor in held])

    model, optimizer, average, update = make()

    def body(model, optimizer, batch):
        plain(model, optimizer, batch)
        update()

    recorded = record_loop(model, optimizer, pairs(4), body, state={"average": average}, checkpoint_every=1)
    assert accepted(recorded)
    names = {entry.name for entry in RunFolder(recorded.run, recorded.trust.labs["lab"]).declared.state}
    assert {"average.kept.0.weight", "average.total"} <= names or "average.module.0.weight" in names
    reached = values(average)
    model, optimizer, average, update = make()
    recorder = Recorder(model, optimizer, out=tmp_path / "run", state={"average": average}, seed=5, started=STARTED)
    for batch in pairs(4)[:2]:
        with recorder.step(batch):
            body(model, optimizer, batch)
    crash(recorder, pairs(1)[0])
    model, optimizer, average, update = make()
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "run", state={"average": average})
    for batch in pairs(4)[2:]:
        with recorder.step(batch):
            body(model, optimizer, batch)
    assert torch.equal(values(average), reached)


def test_state_lists_objects_with_tensors(tmp_path):
    model = mlp()
    wrong: list[tuple[Any, str]] = [(3, "state is a int"), ([object()], "state.0 is a object that holds no tensor")]
    for state, message in wrong:
        with pytest.raises(CallerError, match=message):
            Recorder(model, sgd(model), out=tmp_path / "run", state=state)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_frozen_parameters_of_the_optimizer_may_learn_later(record_loop, kind):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    start = model.get_parameter("0.weight").detach().clone()

    def before(recorder, step):
        if step == 3:
            model[0].requires_grad_(True)

    assert accepted(record_loop(model, optimizer, pairs(5), plain, before=before, checkpoint_every=1))
    assert not torch.equal(model.get_parameter("0.weight"), start)


def test_steps_without_an_optimizer_are_recorded(record_loop):
    model = mlp().eval().requires_grad_(False)

    def body(model, optimizer, batch):
        with torch.no_grad():
            loss_of(model, batch)

    recorded = record_loop(model, None, pairs(), body, checkpoint_every=1)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["execution"]["updates"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which torch.compile imports
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_model_is_recorded_as_its_original_and_says_so(record_loop, inside):
    expected = mlp()
    model: Any = mlp()
    record_loop(expected, sgd(expected), pairs(), plain, name="original")
    if inside:
        model.compile()
    else:
        model = torch.compile(model)
    with pytest.warns(UserWarning, match="the model is compiled; its original is recorded, operator by operator"):
        assert accepted(record_loop(model, sgd(model), pairs(), plain, checkpoint_every=1))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameter_group_that_comes_later_is_refused(record_loop):
    model = mlp()
    optimizer = torch.optim.SGD([model.get_parameter("0.weight")], 0.1)

    def before(recorder, step):
        if step == 2:
            optimizer.add_param_group({"params": [model[2].weight]})

    with pytest.raises(CallerError, match="a new parameter group"):
        record_loop(model, optimizer, pairs(), plain, before=before)


class Last(nn.Module):
    """The last output of a recurrent layer over eight moments."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(2))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_is_recorded_and_replays_here(record_loop, kind):
    torch.manual_seed(0)
    model = Last(kind(1, 4, batch_first=True))
    assert accepted(record_loop(model, sgd(model), pairs(), plain, checkpoint_every=1))


def write(model, optimizer):
    with torch.no_grad():
        model[2].bias.add_(1.0)


def move(model, optimizer):
    model[2].bias.data = torch.zeros(4)


def write_optimizer(model, optimizer):
    optimizer.state[model[0].weight]["momentum_buffer"].mul_(2.0)


def zero_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write, r"aten\.add_\.Tensor writes 'weight/2\.bias' outside the optimizer's updates"),
        (move, r"writes 'weight/2\.bias' outside the optimizer's updates"),
        (write_optimizer, r"optimizer/0\.weight/momentum_buffer was written between steps"),
        (zero_in_place, r"gradient/0\.weight was written between steps"),
    ],
)
def test_write_between_steps_is_named_before_anything_is_committed(record_loop, tmp_path, change, message):
    model = mlp()
    optimizer = sgd(model)

    def before(recorder, step):
        if step == 3:
            change(model, optimizer)

    with pytest.raises(CallerError, match=message):
        record_loop(model, optimizer, pairs(), plain, before=before)
    assert not (tmp_path / "loop" / "steps" / "00000003.json").exists()


def test_dropping_gradients_between_steps_is_no_write(record_loop):
    model = mlp()
    optimizer = sgd(model)

    def body(model, optimizer, batch):
        loss_of(model, batch).backward()
        optimizer.step()

    assert accepted(record_loop(model, optimizer, pairs(), body, before=lambda *_: optimizer.zero_grad()))


def test_hidden_write_in_the_last_steps_is_found_when_the_run_is_closed(record_loop):
    """Step 5 is neither new nor at a checkpoint; ``finish`` repeats the steps since the last checkpoint."""
    steps = iter(range(1, 6))

    def body(model, optimizer, batch):
        plain(model, optimizer, batch)
        if next(steps) == 5:
            hidden_write(model, batch)

    model = mlp()
    with pytest.raises(CallerError, match="was written in step 5"):
        record_loop(model, sgd(model), pairs(5), body, checkpoint_every=4)


def test_failing_body_ends_the_run_and_what_is_on_disk_stays_whole(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", started=STARTED, lab="lab")
    first, second, third = pairs()
    with recorder.step(first):
        plain(model, optimizer, first)

    def fail():
        with recorder.step(second):
            plain(model, optimizer, second)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for attempt in (lambda: recorder.step(third).__enter__(), recorder.finish):
        with pytest.raises(CallerError, match="a step failed, so this recorder cannot go on"):
            attempt()
    trust = Trust.load([tmp_path / "run.trust.json"])
    verdict = verify(tmp_path / "run", trust, now=STARTED)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "1 steps are committed" in verdict.reasons[0].text


def test_run_that_was_killed_before_its_first_commit_is_unfinished(tmp_path, monkeypatch):
    model = mlp()

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Host, "commit", die)
    monkeypatch.setattr("monitor.recording.recorder.freeing", lambda *_: nullcontext())  # a kill frees no folder
    with pytest.raises(KeyboardInterrupt):
        Recorder(model, sgd(model), out=tmp_path / "run", started=STARTED)
    trust = Trust.load([tmp_path / "run.trust.json"])
    verdict = verify(tmp_path / "run", trust, now=STARTED)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.reasons


def test_order_of_calls(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    with pytest.raises(CallerError, match="no step was recorded"):
        recorder.finish()
    first, second, _ = pairs()
    with recorder.step(first):
        with pytest.raises(CallerError, match="a step is open"):
            recorder.step(second).__enter__()
        with pytest.raises(CallerError, match="a step is open"):
            recorder.finish()
        plain(model, optimizer, first)
    recorder.finish()
    with pytest.raises(CallerError, match="the run is finished"):
        recorder.finish()
    with pytest.raises(CallerError, match="exists already"):
        Recorder(model, optimizer, out=tmp_path / "run")


@pytest.mark.parametrize("batch", ["text", [], {"a": 1}, torch.zeros(12, 8000)[:, :8], torch.zeros(2, device="meta")])
def test_batch_without_usable_tensors_is_refused(tmp_path, batch):
    model = mlp()
    recorder = Recorder(model, sgd(model), out=tmp_path / "run")
    with pytest.raises(CallerError, match="batch"):
        recorder.step(batch).__enter__()


def test_killed_process_leaves_an_unfinished_run_that_goes_on(tmp_path):
    program = f"""
        import os, signal, torch
        from datetime import UTC, datetime
        from monitor import Recorder, padded
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = Recorder(model, optimizer, out={str(tmp_path / "run")!r}, started=datetime(2026, 1, 1, tzinfo=UTC))
        for step in range(3):
            with recorder.step(torch.ones(2, 8)):
                optimizer.zero_grad()
                model(torch.zeros(2, 8)).sum().backward()
                if step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == -9
    trust = Trust.load([tmp_path / "run.trust.json"])
    verdict = verify(tmp_path / "run", trust, now=STARTED)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.reasons
    assert "2 steps are committed" in verdict.reasons[0].text
    late = verify(tmp_path / "run", trust, now=datetime(2026, 1, 3, tzinfo=UTC))
    assert late.outcome is Outcome.REJECT
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "run")
    assert recorder.steps == 2
    with recorder.step(torch.ones(2, 8)):
        optimizer.zero_grad()
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
    recorder.finish()
    assert len(recorder._run.programs.known) == 1  # the new process runs the program of the old one
    verdict = verify(tmp_path / "run", Trust.load([tmp_path / "run.trust.json"]), now=STARTED)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_a_recorder_says_where_it_is(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=2)
    assert repr(recorder) == f"<Recorder {tmp_path / 'run'}: step 0, exact, chips 2, ready>"
    for batch in pairs(1):
        with recorder.step(batch):
            plain(model, optimizer, batch)
    recorder.finish()
    assert repr(recorder) == f"<Recorder {tmp_path / 'run'}: step 1, exact, chips 2, finished>"
    model = mlp()
    rehearsal = Recorder(model, sgd(model), out=tmp_path / "other", dry_run=True)
    assert repr(rehearsal) == "<Recorder, dry run: step 0, refusals 0>"
    assert "<caption>Recorder, dry run</caption><tr><th>step</th><td>0</td></tr>" in rehearsal._repr_html_()


@pytest.mark.parametrize("made", [Recorder, Recorder.resume, RunConfig, LabConfig])
def test_each_keyword_is_explained(made):
    explained = re.split("Args:|Attributes:", made.__doc__)[1]
    names = [name for name, each in inspect.signature(made).parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert len(names) > 3
    for name in names:
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)*: ", explained, re.MULTILINE) or f"``{name}``" in explained, name


def test_a_notebook_shows_the_same_and_escapes_it(tmp_path):
    """A lab's name has a grammar, a folder's has none."""
    folder = tmp_path / "<" / "script><b>&"
    folder.parent.mkdir()
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(model, optimizer, out=folder, chips=2, checkpoint_every=2)
    assert "<tr><th>loss</th><td>none committed</td></tr>" in recorder._repr_html_()
    for batch in pairs(3):
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    shown = recorder._repr_html_()
    assert f"{tmp_path}/&lt;/script&gt;&lt;b&gt;&amp;</caption>" in shown
    assert "</script>" not in shown
    rows = {"lab": "lab-1", "step": 3, "loss": f"{loss.item():.6g}", "last checkpoint": 2, "numerics": "exact"}
    for name, value in {**rows, "chips": 2, "state": "ready"}.items():
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in shown
