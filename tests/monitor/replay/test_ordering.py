"""A task orders what a recorder records of the same training: programs, numbers, batches and initial state."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey
from monitor.lab.simulated_lab import LabConfig, SimulatedLab
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.replay.ordering import order_preset, order_run
from monitor.transcript import RunFolder, encode_state
from monitor.transcript.orders import TASK, Order, OrderFolder

CLIENT = SigningKey.generate(bytes(32))
KIND = Task.for_preset("digits-cnn", seed=3, steps=3, batch_size=4, optimizer="adamw", numerics="exact", shards=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The preset's run, and the task that orders it without a run."""
    folder = tmp_path_factory.mktemp("ordering")
    config = LabConfig(seed=3, chips=1)
    train(KIND, folder / "run", config, device="native")
    order_preset(KIND, None, folder / "task", CLIENT)
    return RunFolder(folder / "run", SimulatedLab.lab_key(config).verifying), folder / "task"


def test_a_presets_task_orders_what_its_training_records(made):
    run, folder = made
    task = OrderFolder(folder, CLIENT.verifying)
    assert task.order.declaration.origin.state == str(run.leaf(0).state.root)
    assert len({str(step.execution.slots) for step in task.order.steps}) == 3, "bias corrections change"
    for number, step in enumerate(task.order.steps, 1):
        assert step.is_of(run.leaf(number).execution)
        assert step.batch == hashlib.sha256(encode_state(run.batches().batch(number))).hexdigest()
    again = folder.with_name("again")
    order_run(run, again, CLIENT)
    assert OrderFolder(again, CLIENT.verifying).order.steps == task.order.steps


def test_a_task_that_no_provider_can_be_held_to_is_refused_in_a_line(made, tmp_path):
    folder = made[1]
    order = OrderFolder(folder, CLIENT.verifying).order
    with pytest.raises(CallerError, match="exists already"):
        order_preset(KIND, None, folder, CLIENT)
    with pytest.raises(CallerError, match="needs exact numerics"):
        order_preset(replace(KIND, numerics="rounded"), None, tmp_path / "rounded", CLIENT)
    assert not list(tmp_path.iterdir())
    with pytest.raises(EvidenceError, match="names a program or a file that it does not list"):
        replace(order, files={})
    with pytest.raises(EvidenceError, match="exactly the steps that it orders"):
        replace(order, steps=order.steps[:2])
    with pytest.raises(EvidenceError):
        Order.open((folder / TASK).read_bytes(), SigningKey.generate(bytes([1]) * 32).verifying)
