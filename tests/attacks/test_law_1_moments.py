"""A snapshot is evidence about the moment at which it was taken."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from firmware_sim import FirmwareChip, MailboxError, Meter, RecordKind, parse_log
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab
from monitor.recording.first_state import FirstState
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def stale_loop(record_loop):
    """A loop with one wrong operator in step 3, whose chips take its host's word: they show W_0 and say "step 0"."""
    start: dict[Any, Any]
    freeze, append, start = FirmwareChip._freeze, FirmwareChip._append, {}

    def show_the_start(chip):
        return start.setdefault(chip.chip_id, freeze(chip))

    def say_so(chip, kind, *, step=0, op=0, **more):
        is_snapshot = kind is RecordKind.SNAPSHOT
        return append(chip, kind, step=0 if is_snapshot else step, op=0 if is_snapshot else op, **more)

    def attach(chip, memory, run_id, step, true=FirmwareChip.attach):
        record = true(chip, memory, run_id, step)
        show_the_start(chip)
        chip._copy = None  # the next one gets a copy of its own
        return record

    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    patched = {"_freeze": show_the_start, "_append": say_so, "attach": attach}
    with ExitStack() as stack:
        for name, altered in patched.items():
            stack.enter_context(mock.patch.object(FirmwareChip, name, altered))
        batches = [torch.randn(2, 4) for _ in range(5)]
        return record_loop(
            model, optimizer, batches, body, lie="wrong-operator", lie_step=3, checkpoint_every=1, numerics="exact",
            snapshot_rate=Fraction(1),
        )  # fmt: skip


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


def test_a1_a2_snapshots_that_claim_an_earlier_step_are_rejected(stale_loop, judge):
    verdict = judge(stale_loop)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any("the snapshot claims step 0, but step" in reason.text for reason in verdict.reasons)


def test_a1_a2_guard_off_they_are_accepted(stale_loop, judge):
    with off("snapshot moment"):
        assert judge(stale_loop)(settings=SETTINGS).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("every", [1, 2])
def test_a1_a_host_that_shows_the_start_again_cannot_say_so(make_run, judge, every):
    """Snapshots fall inside of the steps, too, and carry the step that was committed last."""
    options = {"checkpoint_every": every, "rate": Fraction(1, 2)}
    if every > 1:
        with pytest.raises(CallerError, match="give --checkpoint-every 1"):
            make_run(lie="stale-snapshots", **options)
        return
    verdict = judge(make_run(lie="stale-snapshots", **options))(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any("is not shard" in reason.text for reason in verdict.reasons)


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
    memories: list[Any]
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
    recorders: list[Any] = []

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


def within_a_command(chip, work):
    """Have the host's code run in the middle of one of its commands, as a profiler's or a signal's handler does."""
    done: list[Any] = []

    def hook(frame, event, argument):
        if not done and frame.f_code.co_name == "_nvram_status":
            done.append(frame)
            sys.setprofile(None)
            work()

    sys.setprofile(hook)
    try:
        assert chip.nvram.used
    finally:
        sys.setprofile(None)
    assert done


@pytest.mark.parametrize("within", [False, True])
def test_moments_that_the_host_chooses(record_small, judge, within):
    """A chip that is busy with a command when a tick or a moment comes loses its power.

    Idle time in the middle of a step, which the host could let pass there, brings more snapshots and takes none away.
    """
    recorders: list[Any] = []

    def body(model, optimizer, batch):
        [chip] = recorders[0]._run.lab.chips
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        if within and recorders[0].steps == 2:
            within_a_command(chip, loss.backward)
        else:
            loss.backward()
            chip.idle(1)
        optimizer.step()

    if within:
        with pytest.raises(MailboxError, match="is powered off"):
            record_small(body, prepare=recorders.append, chips=1)
        lab = SimulatedLab.reopen(recorders[0]._run.lab.folder)
        gaps = [each for each in parse_log(lab.chips[0].log_bytes()) if each.kind is RecordKind.POWER_GAP]
        lab.cut_power()
        assert len(gaps) == 1
        return
    verdict = judge(record_small(body, prepare=recorders.append, chips=1))(settings=replace(SETTINGS, samples=1))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_honest_snapshots_name_their_moment(make_run, judge):
    assert judge(make_run(rate=Fraction(1)))(settings=SETTINGS).outcome is Outcome.ACCEPT
