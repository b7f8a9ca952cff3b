"""Mixed precision as loops have it: autocast, gradient scalers, FP32 masters of half-precision weights."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.environment import versions
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording import recording
from monitor.replay import steps
from monitor.transcript import RunFolder
from tests.monitor.recording.whole_loops import STARTED, plain, record


def pairs(steps=3):
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(steps)]


def perceptron():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))


def scaled(dtype, overflow=2, **options):
    """Autocast with a gradient scaler; in a step whose gradients overflow the update is passed over."""

    def loop(make):
        model, scaler = perceptron(), torch.amp.GradScaler("cpu", **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        recorder = make(model, optimizer, state=[scaler])
        for number, (x, y) in list(enumerate(pairs(4)))[recorder.steps :]:
            x = x * 1e30 if number == overflow else x
            with recorder.step((x, y)) as step:
                with torch.autocast("cpu", dtype=dtype):
                    loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                step.commit(loss)
        assert scaler._scale is not None
        model.scale = nn.Buffer(scaler._scale.detach().clone())
        return model

    return loop


def accumulated(make):
    """Scaled gradients of two recorded steps make an update and end with it; those of the second pair overflow."""
    model, scaler = perceptron(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    recorder = make(model, optimizer, state=[scaler])
    for number, (x, y) in list(enumerate(pairs(6)))[recorder.steps :]:
        with recorder.step((x, y)) as step:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(x * 1e30 if number == 2 else x), y) / 2
            scaler.scale(loss).backward()
            if number % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=number != 1)
            step.commit(loss)
    return model


class Head(torch.autograd.Function):
    """A head whose gradients take the place of its logits, in a part of a larger buffer."""

    @staticmethod
    def forward(ctx, x, weight, y):
        logits = torch.empty(len(x) + 2, len(weight))[: len(x)]
        torch.mm(x, weight.t(), out=logits)
        ctx.save_for_backward(x, weight, y)
        ctx.logits = logits
        return functional.cross_entropy(logits, y)

    @staticmethod
    def backward(ctx, grad):
        x, weight, y = ctx.saved_tensors
        logits = ctx.logits
        logits.copy_((functional.softmax(logits, 1) - functional.one_hot(y, len(weight))) * (grad / len(x)))
        return logits @ weight, logits.t() @ x, None


def chunked(make):
    """A scaler, and a loss that is computed chunk by chunk in one buffer."""
    model, scaler = perceptron(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    recorder = make(model, optimizer, state=[scaler])
    for x, y in pairs(4)[recorder.steps :]:
        with recorder.step((x, y)) as step:
            optimizer.zero_grad()
            loss = sum(Head.apply(model[:3](x[part]), model[3].weight, y[part]) for part in (slice(2), slice(2, 4)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            step.commit(loss)
    return model


def narrowed(make):
    """Autocast around a step, off in a block of it, and with a weight's cast that is taken twice."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    recorder = make(model, optimizer)
    for x, y in pairs()[recorder.steps :]:
        with torch.autocast("cpu", dtype=torch.bfloat16), recorder.step((x, y)) as step:
            with torch.autocast("cpu", enabled=False):
                first = model(x)
            loss = functional.cross_entropy(first + model(x) + model(x * 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss)
    return model


def plain_fp32(make):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss)
    return model


def masters(arrangement, dtype=torch.bfloat16, **scale):
    """FP32 masters learn from gradients of working copies, which are cast from them after each update (C9)."""

    def loop(make):
        model = perceptron()
        work = copy.deepcopy(model).to(dtype)
        groups = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
        options: dict[str, Any] = {}
        if arrangement == "in the optimizer":
            held = work
        elif arrangement == "in the model":
            held, groups = nn.ModuleDict({"master": model, "work": work}), list(model.parameters())
        else:
            held, groups, options = model, list(model.parameters()), {"state": {"work": work}}
        parts: list[dict[str, Any]] = [{"params": groups[:1]}, {"params": groups[1:], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(parts, 1e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=bool(scale), **scale)
        options.setdefault("state", {})["scaler"] = scaler
        recorder = make(held, optimizer, **options)
        for x, y in pairs()[recorder.steps :]:
            with recorder.step((x, y)) as step:
                loss = functional.cross_entropy(work(x.to(dtype)).float(), y)
                scaler.scale(loss).backward()
                for master, each in zip(groups, work.parameters(), strict=True):
                    master.grad, each.grad = each.grad.float(), None
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(groups, 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                with torch.no_grad():
                    for master, each in zip(groups, work.parameters(), strict=True):
                        each.copy_(master)
                step.commit(loss)
        return held

    return loop


LOOPS = {
    "autocast": narrowed,
    "scaler": scaled(torch.float16, init_scale=1024.0, growth_interval=1),
    "scaler over two steps": accumulated,
    "scaler, chunks in one buffer": chunked,
    "FP16 masters in the optimizer": masters("in the optimizer", torch.float16, init_scale=1024.0),
    **{f"masters {where}": masters(where) for where in ("in the optimizer", "in the model", "beside the work")},
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_accepted_and_trains_as_without_a_recorder(tmp_path, devices, name):
    native = plain(LOOPS[name])
    numerics = "rounded" if name in ("scaler", "masters in the optimizer") else "exact"
    model, verdict = record(LOOPS[name], tmp_path / "run", devices, numerics=numerics)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, native[key], rtol=2e-2, atol=2e-3)
    assert getattr(model, "scale", 4096) == 4096  # doubled three times, and halved in the step that it passes over


@pytest.mark.parametrize("loop", [narrowed, plain_fp32])
def test_bf16_of_an_earlier_arithmetic_is_left_open_and_all_else_replays(tmp_path, devices, loop):
    """Its products had other bits: nobody is to blame for that, and nothing is accepted."""
    libraries = {name: value for name, value in versions().items() if name != "arithmetic"}
    earlier = mock.patch.object(recording, "versions", return_value=libraries)
    with earlier, mock.patch.object(steps, "ARITHMETIC", "1"):  # not in the inspector's devices
        _, verdict = record(loop, tmp_path / "run", devices)
    if loop is plain_fp32:
        assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    else:
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "recorded with arithmetic '1', and this version computes BF16 products to different bits" in str(
            verdict.reasons
        )


class Dying:
    """A recorder whose process dies in a step."""

    def __init__(self, recorder, last):
        self.recorder, self.last, self.steps = recorder, last, 0

    @contextmanager
    def step(self, batch):
        self.steps += 1
        with self.recorder.step(batch) as step:
            if self.steps > self.last:
                raise ZeroDivisionError
            yield step


@pytest.mark.parametrize("name", ["scaler", "scaler over two steps", "masters beside the work"])
def test_a_loop_that_died_goes_on_to_the_same_bits(tmp_path, devices, name):
    record(LOOPS[name], tmp_path / "whole", devices)
    made: list[Recorder] = []
    options: dict[str, Any] = {"seed": 5, "chips": 2, "lab": "lab", "started": STARTED, "hours": 1.0}

    def first(model, optimizer, **keywords):
        made.append(Recorder(model, optimizer, out=tmp_path / "run", **options, **keywords))
        return Dying(made[0], 2)

    def second(model, optimizer, **keywords):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # what is repeated does not obey it
            made.append(Recorder.resume(model, optimizer, out=tmp_path / "run", **keywords))
        return made[1]

    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError):
        LOOPS[name](first)
    torch.manual_seed(0)
    LOOPS[name](second)
    assert made[1].finish() == end_of(tmp_path / "whole")


def end_of(folder):
    run = RunFolder(folder, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(folder))).verifying)
    return str(run.leaf(run.declared.steps).state.root)


def told(loop, tmp_path, devices):
    """What a recorder or an inspection says of a loop, unless it is accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            verdict = record(loop, tmp_path / "run", devices)[1]
        except CallerError as error:
            return str(error)
    return None if verdict.outcome is Outcome.ACCEPT else str(verdict.reasons)


def by_hand(make):
    """Masters learn as declared, and the working copies by hand, a hundred times as fast."""
    model = perceptron().bfloat16()
    learning = [each.detach().float().requires_grad_(True) for each in model.parameters()]
    optimizer = torch.optim.SGD(learning, 1e-3)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for master, each in zip(learning, model.parameters(), strict=True):
                master.grad = each.grad.float()
            optimizer.step()
            with torch.no_grad():
                for each in model.parameters():
                    each.sub_(each.grad, alpha=0.1)
                    each.grad = None
    return model


def enlarged(make):
    """Working copies are masters times a factor."""
    model = perceptron().bfloat16()
    learning = [each.detach().float().requires_grad_(True) for each in model.parameters()]
    masters = nn.ParameterList(map(nn.Parameter, learning))
    both = nn.ModuleList([model, masters])
    optimizer = torch.optim.SGD(masters.parameters(), 1e-3)
    recorder = make(both, optimizer)
    for x, y in pairs():
        with recorder.step((x, y)):
            functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for master, each in zip(masters, model.parameters(), strict=True):
                master.grad, each.grad = each.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master in masters:
                    master.mul_(1.5)
    return both


def other_factors(make):
    """A scaler whose factor changes on the way."""
    model, scaler = perceptron(), torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = make(model, optimizer, state=[scaler])
    for number, (x, y) in enumerate(pairs()):
        scaler.set_growth_factor(2.0 + number)
        with recorder.step((x, y)):
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return model


def many_scalers(make):
    """Scales that take the bits of a batch, a number each."""
    model = perceptron()
    scales = [torch.full((), 4.0) for _ in range(20)]
    counts = [torch.zeros((), dtype=torch.int32) for _ in scales]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = make(model, optimizer, state={"scales": scales, "counts": counts})
    for x, y in pairs():
        with recorder.step((x, y)):
            optimizer.zero_grad()
            (functional.cross_entropy(model(x), y) * scales[0]).backward()
            optimizer.step()
            for scale, count, bit in zip(scales, counts, (x > 0).float().flatten(), strict=False):
                torch._amp_update_scale_(scale, count, bit, 2.0, 0.5, 1)
    return model


def kept_bits(make):
    """Eight scalers hand eight bits of a batch on to a buffer, step by step."""
    model = perceptron()
    model.register_buffer("kept", torch.zeros(64))
    scales = [torch.full((), 1.0) for _ in range(8)]
    counts = [torch.zeros((), dtype=torch.int32) for _ in scales]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = make(model, optimizer, state={"scales": scales, "counts": counts})
    for x, y in pairs():
        with recorder.step((x, y)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            for scale, count, bit in zip(scales, counts, (x > 0).float().flatten(), strict=False):
                scale.fill_(1.0)
                torch._amp_update_scale_(scale, count, bit, 2.0, 0.5, 1)
            model.kept.copy_(torch.cat([model.kept[8:], torch.stack(scales)]))
    return model


def rescaled(body):
    """A scaler whose user divides gradients by hand: ``body`` has two steps for each update."""

    def loop(make):
        model = perceptron()
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        scaler._lazy_init_scale_growth_tracker("cpu")
        recorder = make(model, optimizer, state=[scaler])
        grads = lambda: [weight.grad for weight in model.parameters()]  # noqa: E731

        def divide():
            torch._amp_foreach_non_finite_check_and_unscale_(grads(), torch.zeros(()), 1 / scaler._scale)

        def grow():
            torch._amp_update_scale_(scaler._scale, scaler._growth_tracker, torch.zeros(()), 2.0, 0.5, 1)

        for number, (x, y) in enumerate(pairs(4)):
            with recorder.step((x, y)):
                body(number % 2, functional.cross_entropy(model(x), y), scaler._scale, grads, divide, grow)
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    return loop


def never(second, loss, scale, grads, divide, grow):
    (loss * scale).backward()


def at_the_end_alone(second, loss, scale, grads, divide, grow):
    (loss * scale if second else loss).backward()
    if second:
        divide()


def by_the_next_scale(second, loss, scale, grads, divide, grow):
    (loss * scale).backward()
    grow()
    if second:
        divide()


def by_a_scale_of_this_step(second, loss, scale, grads, divide, grow):
    (loss * scale).backward()
    if second:
        grow()
        divide()


def twice(second, loss, scale, grads, divide, grow):
    (loss * scale * scale).backward()
    if second:
        divide()


def partly(second, loss, scale, grads, divide, grow):
    (loss * scale + loss).backward()
    if second:
        divide()


def rows(second, loss, scale, grads, divide, grow):
    loss.backward(retain_graph=True)
    kept = [each.clone() for each in grads()]
    (loss * scale).backward()
    for each, other in zip(grads(), kept, strict=True):
        each[:1].copy_(other[:1])
    if second:
        divide()


def powers(second, loss, scale, grads, divide, grow):
    (loss * scale).backward()
    if second:
        for each in grads():
            each.copy_(each.pow(3))
        divide()


def clipped(second, loss, scale, grads, divide, grow):
    (loss * scale).backward()
    if second:
        factor = (1e9 / torch.stack([each.norm() for each in grads()]).norm()).clamp(max=1.0)
        for each in grads():
            each.mul_(factor)


@pytest.mark.parametrize(
    "body",
    [never, at_the_end_alone, by_the_next_scale, by_a_scale_of_this_step, twice, partly, rows, powers, clipped],
)
def test_an_update_of_what_a_scale_is_still_in_leaves_its_numbers_unbound(tmp_path, devices, body):
    said = told(rescaled(body), tmp_path, devices) or ""
    assert "an update takes gradients that are multiplied by 'buffer/state.0._scale'" in said


def test_gradients_that_their_own_scale_is_divided_out_of_are_bound(tmp_path, devices):
    def body(second, loss, scale, grads, divide, grow):
        (loss * scale).backward()
        if second:
            divide()
            grow()

    assert told(rescaled(body), tmp_path, devices) is None


def test_an_evaluation_that_tells_a_scaler_is_none_of_its_steps(tmp_path, devices):
    """A batch's own model is trained there; the scaler that is told of it is none of the state's (A39)."""

    def loop(make):
        model = perceptron()
        recorder = make(model, torch.optim.SGD(model.parameters(), 0.1))
        carried = torch.randn(6, 3, requires_grad=True)
        for x, y in pairs():
            with recorder.evaluation((x, y, carried.detach())):
                mine: Any = carried.detach().requires_grad_(True)
                functional.cross_entropy(x @ mine + model(x), y).backward()
                model.zero_grad()
                torch._amp_update_scale_(
                    torch.ones(()), torch.zeros((), dtype=torch.int32), mine.grad.norm(), 2.0, 0.5, 1
                )
        return model

    assert "takes a derivative and stores it in no tensor of the state" in (told(loop, tmp_path, devices) or "")


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (kept_bits, "'scaler:found_inf' reaches 'buffer/kept'"),
        (by_hand, "outside the optimizer's updates, from a gradient"),
        (enlarged, "not by a clamp of the whole between numbers or an average of weights"),
        (other_factors, "a number that aten._amp_update_scale.default takes changes from step to step"),
        (many_scalers, "without passing a loss"),
    ],
)
def test_what_mixed_precision_would_hide_is_named(tmp_path, devices, loop, says):
    assert says in (told(loop, tmp_path, devices) or "")


@pytest.mark.parametrize("name", LOOPS)
def test_a_dry_run_finds_nothing(name):
    made = []

    def make(model, optimizer, **keywords):
        made.append(Recorder(model, optimizer, out="nowhere", dry_run=True, **keywords))
        return made[0]

    torch.manual_seed(0)
    LOOPS[name](make)
    made[0].finish()
