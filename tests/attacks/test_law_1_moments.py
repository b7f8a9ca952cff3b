"""A snapshot is evidence about the moment at which it was taken."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from firmware_sim import FirmwareChip, Meter, RecordKind
from inspector.inspection.guards import Settings
from inspector.inspection.judging import inspect
from inspector.inspection.verdict import Outcome
from monitor.recording.first_state import FirstState
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder
from tests.guards import off

PAUSED = 6
"""Seed of a chip that is due for a snapshot in the tick after step 2 of a loop, and not in the one after that."""
SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def stale_preset(make_run):
    return make_run(lie="stale-snapshots", checkpoint_every=1, rate=Fraction(1, 2))


@pytest.fixture
def stale_loop(record_loop):
    """A loop with one wrong operator in step 3, whose chips see the initial memory at every tick and are told so."""
    memories, shown = {}, {}
    attach, tick = FirmwareChip.attach, FirmwareChip.tick

    def watch(chip, memory, run_id, step):
        memories[chip.chip_id] = memory
        return attach(chip, memory, run_id, step)

    def show_the_start(chip, run_id, step):
        regions = memories[chip.chip_id].regions
        held = [region.tensor.detach().clone() for region in regions]
        start = shown.setdefault(chip.chip_id, held)
        with torch.no_grad():
            for region, value in zip(regions, start, strict=True):
                region.tensor.detach().copy_(value)
            tick(chip, run_id, 0)
            chip.idle(1)  # ends the tick before its snapshot's moment
            for region, value in zip(regions, held, strict=True):
                region.tensor.detach().copy_(value)

    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    with mock.patch.object(FirmwareChip, "attach", watch), mock.patch.object(FirmwareChip, "tick", show_the_start):
        batches = [torch.randn(2, 4) for _ in range(5)]
        return record_loop(
            model, optimizer, batches, body, lie="wrong-operator", lie_step=3, checkpoint_every=1, numerics="exact"
        )


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


@pytest.mark.parametrize("kind", ["preset", "loop"])
def test_a1_a2_snapshots_that_claim_an_earlier_step_are_rejected(kind, request, judge):
    verdict = judge(request.getfixturevalue(f"stale_{kind}"))(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any("the snapshot claims step 0, but step" in reason.text for reason in verdict.reasons)


@pytest.mark.parametrize("kind", ["preset", "loop"])
def test_a1_a2_guard_off_they_are_accepted(kind, request, judge):
    recorded = request.getfixturevalue(f"stale_{kind}")
    with off("snapshot moment"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


@pytest.fixture
def record_small(record_loop):
    """A loop whose chips are due for a snapshot in each step, told another way by `prepare` or `body`."""

    def record(body, *, foreach=None, **options):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
        batches = [torch.randn(2, 4) for _ in range(4)]
        defaults = {"snapshot_rate": Fraction(1), "numerics": "exact"}
        return record_loop(model, optimizer, batches, body, **{**defaults, **options})

    return record


def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()


def test_another_model_that_is_there_between_operators_only(record_small, judge, monkeypatch):
    """At every tick memory holds the declared state; the operators find it, too."""
    charge, memories = Meter.charge, []

    def with_another_model(meter, work):
        held = [tensor.clone() for memory in memories for tensor in memory.tensors.values()]
        with torch.no_grad():
            for memory in memories:
                for tensor in memory.tensors.values():
                    tensor.add_(1)
            charge(meter, work)
            for memory in memories:
                for tensor in memory.tensors.values():
                    tensor.copy_(held.pop(0))

    monkeypatch.setattr(Meter, "charge", with_another_model)
    recorded = record_small(train, prepare=lambda recorder: memories.append(recorder._run.loop.state.memory))
    monkeypatch.undo()
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"snapshot"}
    assert all(reason.where["operator"].startswith("aten.") for reason in verdict.reasons)
    with off("snapshots inside steps"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_an_operator_index_on_the_other_side_of_a_new_gradient(record_small, judge, monkeypatch):
    """Gradients that were dropped are made anew, and lie in memory from the operator on that brings each there."""
    alone = {"chips": 1, "lab": "lab"}
    honest = record_small(train, name="honest", **alone)
    settings = replace(SETTINGS, samples=1)
    assert judge(honest)(settings=settings).outcome is Outcome.ACCEPT
    run = RunFolder(honest.run, honest.trust.labs["lab"])
    program = run.program(execution_of(run.leaf(3)).program)
    writes = [program.first_writes[f"gradient/{name}"] for name in ("2.bias", "2.weight", "0.bias", "0.weight")]
    assert writes == sorted(writes)
    assert writes[-1] <= min(program.counted.index(first) for first, _ in program.updates)
    assert all(program.calls[program.counted[at - 1]]["operator"] == "aten.copy_.default" for at in writes)
    append, shifted = FirmwareChip._append, []

    def shift(chip, kind, *, op=0, **more):
        if kind is RecordKind.SNAPSHOT and 0 < op < 1 << 32 and more["step"] > 1:
            nearest = min(writes, key=lambda at: abs(at - op))
            shifted.append(op)
            op = nearest - 1 if op >= nearest else nearest
        return append(chip, kind, op=op, **more)

    monkeypatch.setattr(FirmwareChip, "_append", shift)
    recorded = record_small(train, **alone)
    monkeypatch.undo()
    assert shifted
    verdict = judge(recorded)(settings=settings)
    assert verdict.outcome is Outcome.REJECT
    assert [reason.guard for reason in verdict.reasons] == ["snapshot"] * len(shifted)
    with off("snapshots inside steps"):
        assert judge(recorded)(settings=settings).outcome is Outcome.ACCEPT


def test_the_first_state_of_an_optimizer_that_is_elsewhere_until_the_step_ends(record_small, judge, monkeypatch):
    """It is made in a step after the chips' first, and lies in memory from the operators on that make it.

    The steps before are longer, so that snapshots fall as far as into the update.
    """
    recorders = []

    def and_update_later(model, optimizer, batch):
        optimizer.zero_grad()
        is_early = recorders[-1].steps + 1 < 3
        for _ in range(5 if is_early else 1):
            model(batch).square().sum().backward()
        if not is_early:
            optimizer.step()

    def record(name):
        return record_small(and_update_later, name=name, prepare=recorders.append, chips=3, foreach=False)

    honest = record("honest")
    verdict = judge(honest)(settings=SETTINGS)
    assert verdict.outcome is Outcome.ACCEPT
    run = RunFolder(honest.run, honest.trust.labs["lab"])
    assert len(run.program(execution_of(run.leaf(3)).program).births) == 12
    monkeypatch.setattr(FirstState, "foresee", lambda *_: None)
    monkeypatch.setattr(FirstState, "require", lambda *_: None)
    recorded = record("elsewhere")
    monkeypatch.undo()
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert {(reason.guard, reason.where["step"]) for reason in verdict.reasons} == {("snapshot", 3)}
    with off("snapshots inside steps"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_moments_that_the_host_chooses(record_small, judge):
    """The lab ends a tick where its memory can be shown, in the middle of a step.

    The tick that it begins there has no snapshot, which would show by itself that work was done in the one before.
    """
    recorders = []

    def with_a_pause(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        if recorders[0].steps == 2:
            recorders[0]._run.lab.chips[0].idle(1)
        optimizer.step()

    recorded = record_small(with_a_pause, prepare=recorders.append, chips=1, snapshot_rate=Fraction(1, 2), seed=PAUSED)
    settings = Settings(samples=1, seed="x", devices=("sse41",))
    verdict = judge(recorded)(settings=settings)
    assert verdict.outcome is Outcome.REJECT
    assert [reason.guard for reason in verdict.reasons] == ["snapshot"]
    assert "its tick was ended after" in verdict.reasons[0].text
    with off("ticks end with steps"):
        assert judge(recorded)(settings=settings).outcome is Outcome.ACCEPT


def test_honest_snapshots_name_their_moment(make_run, judge):
    assert judge(make_run(rate=Fraction(1)))(settings=SETTINGS).outcome is Outcome.ACCEPT
