"""Numbers of an optimizer's updates are bound for every honest loop, and no change of an update stays unseen."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.declaration.binding import ProgramWrites
from monitor.declaration.reference import ReferenceOptimizer
from monitor.declaration.slots import StepNumbers
from monitor.programs.program import Program
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder


class Net(nn.Module):
    """A scalar, a frozen and a sometimes unused weight among the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.side = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first.bias.requires_grad_(False)

    def forward(self, x, both):
        out = self.last(torch.relu(self.first(x))) * self.scale
        return out + self.side(x) if both else out


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(4, 6, generator=generator), "y": torch.randint(0, 3, (4,), generator=generator)}
        for _ in range(steps)
    ]


def groups(model):
    """Two groups with other rates."""
    return [
        {"params": [model.first.weight, model.first.bias, model.scale]},
        {"params": [*model.last.parameters(), *model.side.parameters()], "lr": 3e-3},
    ]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-maximize": (torch.optim.SGD, {"maximize": True}),
    "sgd-decay": (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "sgd-nesterov": (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-whole-numbers": (torch.optim.SGD, {"lr": 1, "momentum": 0}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "nadam": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1, "rho": 0.8}),
    "asgd": (torch.optim.ASGD, {"t0": 3}),
    "rprop": (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1, "d": 1.5}),
}


def judge(recorded):
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    loop = verdict.evidence["execution"]
    assert loop["not_bound"] == {}
    assert {slot["explained_by"] for slot in loop["slots"]} <= {"update"}
    return loop


@pytest.mark.sampled("name")
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_of_an_honest_loop_is_bound(record_loop, name, foreach):
    """Groups, a schedule, clipping, unused weights, dropped gradients and a state from before, for six steps."""
    torch.manual_seed(0)
    kind, hyper = OPTIMIZERS[name]
    model = Net()
    optimizer = kind(groups(model), **{"lr": 1e-2, "foreach": foreach, **hyper})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    count = 0

    def body(model, optimizer, batch):
        nonlocal count
        count += 1
        functional.cross_entropy(model(batch["x"], count % 3 != 0), batch["y"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=count % 2 == 0)
        schedule.step()

    for batch in batches(2) if name not in ("adadelta", "asgd", "rprop") else ():  # their past scales an update
        body(model, optimizer, batch)
    optimizer.zero_grad()
    loop = judge(record_loop(model, optimizer, batches(6), body))
    assert loop["updates"] == 6
    assert {(line["group"], line["name"]) for line in loop["changed_hyper_parameters"]} == {(0, "lr"), (1, "lr")}


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_muon_is_bound_on_matrices_of_any_shape_beside_another_optimizer(record_loop, adjust):
    """Its operators and its rate depend on shapes: wide, tall and square matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 4))
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn=adjust), torch.optim.AdamW(others, lr=3e-3)]

    def body(model, optimizers, batch):
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    judge(record_loop(model, optimizers, batches(3), body))


@pytest.mark.parametrize(
    "hidden", [{"lr": 0.5}, {"ns_steps": 4}, {"momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_muon_with_other_numbers_than_declared_is_found(record_loop, monkeypatch, hidden):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 3, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    honest = torch.optim._muon.muon

    def body(model, optimizer, batch):
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        with monkeypatch.context() as lie:
            lie.setattr(torch.optim._muon, "muon", lambda *words, **numbers: honest(*words, **(numbers | hidden)))
            optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(CallerError, match=r"cannot be recorded: .*(declared|other arguments)"):
        record_loop(model, optimizer, batches(3), body)


def make(name="adamw", **changes):
    torch.manual_seed(0)
    kind, hyper = OPTIMIZERS[name]
    model = Net()
    return model, kind(groups(model), **{"lr": 1e-2, **hyper, **changes})


def backward(model, batch):
    functional.cross_entropy(model(batch["x"], True), batch["y"]).backward()


def with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch["x"], True), batch["y"])
        loss.backward()
        return loss

    optimizer.step(closure)


def twice(model, optimizer, batch):
    for part in (slice(0, 2), slice(2, 4)):
        optimizer.zero_grad()
        backward(model, {key: value[part] for key, value in batch.items()})
        optimizer.step()


def twice_with_one_gradient(model, optimizer, batch):
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()
    optimizer.step()


def without_gradients(model, optimizer, batch):
    optimizer.zero_grad()
    optimizer.step()
    backward(model, batch)
    optimizer.step()


def afresh(model, optimizer, batch):
    """The optimizer forgets its state in each step."""
    optimizer.zero_grad()
    optimizer.state.clear()
    backward(model, batch)
    optimizer.step()


@pytest.mark.sampled("body", "foreach")
@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw", "adamw-amsgrad", "nadam", "adafactor"])
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("body", [with_closure, twice, twice_with_one_gradient, without_gradients, afresh])
def test_updates_of_any_order_are_bound(record_loop, body, name, foreach):
    model, optimizer = make(name, foreach=foreach)
    judge(record_loop(model, optimizer, batches(3), body))


def test_group_that_is_never_updated_is_listed_as_idle(record_loop):
    model, optimizer = make()

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"], False).sum().backward()
        for weight in model.last.parameters():
            weight.grad = None
        optimizer.step()

    assert judge(record_loop(model, optimizer, batches(2), body))["idle_groups"] == [1]


def test_rate_that_changes_between_two_updates_of_a_step_is_refused(record_loop):
    model, optimizer = make()

    def body(model, optimizer, batch):
        twice(model, optimizer, batch)
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()

    with pytest.raises(CallerError, match="hyper-parameters change between two updates of one step"):
        record_loop(model, optimizer, batches(2), body)


def test_resumed_run_goes_on_with_its_counts(record_loop, tmp_path):
    model, optimizer = make()

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()

    def stop(recorder, step):
        if step == 6:
            recorder._run.lab.power_off()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_loop(model, optimizer, batches(6), body, before=stop)
    recorded = record_loop(*make(), batches(1), body, name="other")
    model, optimizer = make()
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "loop")
    for batch in batches(3):
        with recorder.step(batch):
            body(model, optimizer, batch)
    recorder.finish()
    run = RunFolder(tmp_path / "loop", recorded.trust.labs["lab"])
    numbers = StepNumbers(run.declared, run.checkpoint(0))
    leaves, _ = run.load_steps()
    for leaf in leaves[1:]:
        taken = execution_of(leaf)
        numbers.take(run.program(taken.program), taken.slots, taken.hyper, taken.values)
    assert (numbers.steps, numbers.updates, numbers.unbound) == (8, 8, {})


@pytest.fixture
def run(record_loop) -> RunFolder:
    model, optimizer = make(foreach=False)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()

    recorded = record_loop(model, optimizer, batches(3), body)
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


def examine(run: RunFolder, programs) -> StepNumbers:
    """Follow a run whose programs are changed by the function ``programs``."""
    numbers = StepNumbers(run.declared, run.checkpoint(0))
    leaves, _ = run.load_steps()
    for leaf in leaves[1:]:
        taken = execution_of(leaf)
        numbers.take(programs(run.program(taken.program), leaf.step), taken.slots, taken.hyper)
    return numbers


NO_RATES: list[Any] = ["fast", None, [], 10**400, -(10**400), 1e308, True]
HYPER = [
    *({"lr": value} for value in NO_RATES),
    *({"betas": value} for value in ([], [0.9], [0.9, "x"], [1, 1], [2.0, 3.0], [10**400, 0.5], 0.9, "ab")),
    *({"eps": None}, {"eps": 10**400}, {"weight_decay": "x"}, {"weight_decay": [1.0]}, {"amsgrad": 3}),
    *({"maximize": "x"}, {"foreach": "x"}, {"fused": True}, {"capturable": True}, {"differentiable": True}),
    *({"params": "x"}, {"params": []}, {"decoupled_weight_decay": False}),
]


@pytest.mark.parametrize("hyper", HYPER, ids=lambda hyper: str(hyper)[:30])
@pytest.mark.parametrize("place", ["declared", "step"])
def test_other_hyper_parameters_are_an_error_or_leave_the_numbers_unbound(run, hyper, place):
    task = run.declared
    if place == "declared":
        task = replace(task, groups=tuple({**group, **hyper} for group in task.groups))
    numbers = StepNumbers(task, run.checkpoint(0))
    leaf = run.leaf(1)
    changes = [hyper if place == "step" else {} for _ in task.groups]
    try:
        numbers.take(run.program(leaf.execution.program), leaf.execution.slots, changes)
    except EvidenceError:
        return
    without_effect = [{"maximize": "x"}, {"amsgrad": 3}]  # as true as the value that they stand for
    assert numbers.unbound or hyper in without_effect


@pytest.mark.parametrize("factor", [1 + 2.0**-40, -1.0, 0.0, 2.0])
def test_each_number_of_an_update_is_compared(run, factor):
    whole = json.loads(run.program(run.leaf(1).execution.program).encoded)
    (first, last) = whole["updates"][0]
    numbers = [n for call in whole["calls"][first:last] for n in scalars(call["arguments"])]
    assert len(numbers) >= 6 * 6
    for number in numbers:
        edited = {**whole, "scalars": list(whole["scalars"])}
        edited["scalars"][number] = (float.fromhex(whole["scalars"][number]) * factor).hex()
        if edited == whole:
            continue
        other = Program.decode(canonical.encode(edited))
        with pytest.raises(
            EvidenceError, match=rf"step 1: aten\..* of an update uses the number .* \(scalar {number}\)"
        ):
            examine(run, lambda program, step, other=other: other if step == 1 else program)


def scalars(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "$scalar" else scalars(item)
    elif isinstance(value, list):
        for item in value:
            yield from scalars(item)


def paths(value, path=()):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


ODD: list[Any]
ODD = [None, True, -1, 0, 1, 2, 7, 0.5, "float64", "state:weight/first.weight", "node:0:0", [], [1], [5, 6], {}]


def test_changed_call_of_an_update_is_never_bound(run):
    """400 single changes of operators, arguments and sources of step 3's update, seed 4."""
    whole = json.loads(run.program(run.leaf(3).execution.program).encoded)
    (first, last) = whole["updates"][0]
    drawn = random.Random(4)
    sources = [place["source"] for call in whole["calls"] for place in call["sources"]]
    places = [
        ("calls", number, *path)
        for number in range(first, last)
        for path in paths(whole["calls"][number])
        if path[0] in {"operator", "arguments", "sources"}
    ]
    refused = unbound = 0
    for _ in range(400):
        edited = json.loads(json.dumps(whole))
        *holders, key = drawn.choice(places)
        holder = edited
        for step in holders:
            holder = holder[step]
        holder[key] = drawn.choice([*ODD, *drawn.sample(sources, 15)])
        if edited == whole:
            continue
        try:
            other = Program.decode(canonical.encode(edited))
            numbers = examine(run, lambda program, step, other=other: other if step == 3 else program)
        except EvidenceError:
            refused += 1
            continue
        assert "lr" in numbers.unbound, (holders, key, holder[key])
        unbound += 1
    assert refused + unbound > 390
    assert unbound > 60


WRITES = {
    "the weight": ("state:weight/first.weight", None),
    "the state": ("state:optimizer/scale/step", None),
    "a view": ("", "aten.view.default"),
    "an unsafe view": ("", "aten._unsafe_view.default"),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_outside_the_updates_is_found_through_views(run, name):
    """A program that no recorder makes: it writes after its update, by the memory's name or by a view's."""
    source, view = WRITES[name]
    whole = json.loads(run.program(run.leaf(3).execution.program).encoded)
    weight = {"dtype": "float32", "shape": [5, 6], "stride": [6, 1]}
    line = {"dtype": "float32", "shape": [30], "stride": [1]}
    count = len(whole["calls"])
    if view is not None:
        taken = {"args": [{"$tensor": 0}, [30]], "kwargs": {}}
        place = {"source": "state:weight/first.weight", **weight, "offset": 0}
        call = {"operator": view, "arguments": taken, "sources": [place], "results": [line], "draws": []}
        whole["calls"].append(call)
        source = f"node:{count}:0"
    layout = {"dtype": "float32", "shape": [], "stride": []} if name == "the state" else line
    place = {"source": source, **layout, "offset": 0}
    taken = {"args": [{"$tensor": 0}], "kwargs": {}}
    call = {
        "operator": "aten.zero_.default",
        "arguments": taken,
        "sources": [place],
        "results": [layout],
        "draws": [],
    }
    whole["calls"].append(call)
    other = Program.decode(canonical.encode(whole))
    numbers = examine(run, lambda program, step: other if step == 3 else program)
    assert numbers.unbound["lr"].startswith("step 3: ")
    assert ("names a view" in numbers.unbound["lr"]) == (view is not None)


def test_program_without_the_other_writes_is_bound(run):
    assert examine(run, lambda program, _: program).unbound == {}


@pytest.mark.sampled("name")
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", ["sgd-decay", "adamw", "radam", "nadam", "asgd"])
def test_updates_that_are_followed_have_the_numbers_of_updates_that_are_captured(record_loop, name, foreach):
    """A reference that forgets each update's form captures every one; the other captures one of each form."""
    torch.manual_seed(1)
    kind, hyper = OPTIMIZERS[name]
    model = Net()
    optimizer = kind(groups(model), **{"lr": 1e-2, "foreach": foreach, **hyper})

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch["x"], True), batch["y"]).backward()
        optimizer.step()

    recorded = record_loop(model, optimizer, batches(3), body)
    opened = RunFolder(recorded.run, recorded.trust.labs["lab"])
    writes = ProgramWrites(opened.program(execution_of(opened.leaf(3)).program))
    one, other = (ReferenceOptimizer(opened.declared, opened.checkpoint(0)) for _ in range(2))
    captured = 0
    for step in range(10):
        rate = 0.0 if step == 7 else 1e-2 * 0.9**step
        given = [{**group, "lr": rate} for group in opened.declared.groups]
        if step == 9:  # another form, where the class knows decay
            given = [{**group, **({"weight_decay": 0.3} if "weight_decay" in group else {})} for group in given]
        other._taken.clear()
        before = one._taken.get((tuple(writes.updates), frozenset(writes.present)))
        left, right = (each.take(writes.updates, given, writes.present) for each in (one, other))
        captured += before is not one._taken[tuple(writes.updates), frozenset(writes.present)]
        assert left.to_json() == right.to_json()
    assert captured < 10
