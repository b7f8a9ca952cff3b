"""What a step overwrites before it reads it is what its result does not depend on, and nothing that it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from firmware_sim.errors import EvidenceError
from monitor.numerics import replaying
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.liveness import dead_calls
from monitor.programs.program import Program
from monitor.replay.repetition import ProgramTraining, scalars_of
from monitor.transcript import RunFolder
from tests.leaves import execution_of
from tests.monitor.programs.tracing import trace

X = torch.arange(9.0).view(3, 3)


class Net(nn.Module):
    """Two layers, a scale that each step makes anew from the batch, and one that it keeps."""

    fresh: torch.Tensor
    partly: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("fresh", torch.ones(4))
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("partly", torch.ones(4))

    def forward(self, batch):
        with torch.no_grad():
            self.fresh.copy_(batch.mean(0))
            self.partly[:2].copy_(batch[0, :2])
        return self.second(torch.tanh(self.first(batch * self.kept * self.fresh)))


def cleared(set_to_none):
    def body(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    return body


count = {"steps": 0}


def accumulated(model, optimizer, batch):
    """Gradients of two steps are added up before they are used and cleared."""
    count["steps"] += 1
    model(batch).square().mean().backward()
    if count["steps"] % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def looked_at(model, optimizer, batch):
    """The norm of the last gradients scales the loss."""
    grads = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    scale = torch.stack(grads).sum().detach() if grads else torch.ones(())
    optimizer.zero_grad()
    (model(batch).square().mean() * scale).backward()
    optimizer.step()


GRADIENTS = {"gradient/first.weight", "gradient/first.bias", "gradient/second.weight", "gradient/second.bias"}
MOMENTA = {f"optimizer/{name.removeprefix('gradient/')}/momentum_buffer" for name in GRADIENTS}
FRESH = {"buffer/fresh"}
BODIES = {
    "dropped gradients": (cleared(True), FRESH | GRADIENTS),
    "zeroed gradients": (cleared(False), FRESH | GRADIENTS),
    "accumulated gradients": (accumulated, FRESH),
    "gradients that are looked at": (looked_at, FRESH),
}


@pytest.fixture
def record(record_loop):
    def make(body) -> RunFolder:
        torch.manual_seed(0)
        count["steps"] = 0
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        batches = [torch.randn(5, 4) for _ in range(4)]
        recorded = record_loop(model, optimizer, batches, body, checkpoint_every=1)
        return RunFolder(recorded.run, recorded.trust.labs["lab"])

    return make


def taken(run: RunFolder, state, step: int):
    """The state after a step that is taken from another one."""
    training, execution = ProgramTraining(run.declared), execution_of(run.leaf(step))
    program, keys = run.program(execution.program), RepeatedKeys(run.declared.seed, step)
    training.memory.load(state)
    session = replaying(run.declared.numerics, run.rounding_log(step), keys=keys)
    Prepared(program, training.memory).run(
        run.batches().batch(step), scalars_of(program, execution), session, keys, None
    )
    return training.memory.digest()


@pytest.mark.parametrize("name", BODIES)
def test_only_what_is_not_read_changes_nothing(record, name):
    body, expected = BODIES[name]
    run = record(body)
    training = ProgramTraining(run.declared)
    training.memory.load(run.checkpoint(4))
    whole = {each: tensor.clone() for each, tensor in training.memory.export().items()}
    program = run.program(run.leaf(4).execution.program)
    assert program.unread == expected
    assert run.program(run.leaf(1).execution.program).unread >= expected & (FRESH | GRADIENTS)
    honest = taken(run, whole, 4)
    for each, tensor in whole.items():
        reached = taken(run, {**whole, each: tensor + 1}, 4)
        assert (reached == honest) == (each in program.unread), each


def test_a_first_step_reads_no_state_that_the_optimizer_has_yet_to_make(record):
    run = record(cleared(True))
    first, later = (run.program(run.leaf(step).execution.program).unread for step in (1, 2))
    assert first == FRESH | GRADIENTS | MOMENTA
    assert later == FRESH | GRADIENTS


@pytest.mark.parametrize("name", BODIES)
def test_a_checkpoint_holds_what_the_next_step_reads(record, name):
    run = record(BODIES[name][0])
    names = {f"{entry.kind}/{entry.name}" for entry in run.declared.state}
    assert set(run.checkpoint(0)) == set(run.checkpoint(4)) == names
    for step in (1, 2, 3):
        following = run.program(run.leaf(step + 1).execution.program)
        assert set(run.checkpoint(step)) == names - following.unread | {"proof"}
        training = ProgramTraining(run.declared)
        assert training.restore(run.checkpoint(step), step) == run.leaf(step).state
        assert set(training.absent) == following.unread
        leaf, _ = training.take_step(
            following,
            run.leaf(step + 1).execution,
            run.batches().batch(step + 1),
            run.batches().batch_root(step + 1),
            run.rounding_log(step + 1),
        )
        assert leaf == run.leaf(step + 1)
        assert not training.absent


def test_a_program_that_reads_what_is_left_out_is_not_run(record):
    run = record(accumulated)
    training = ProgramTraining(run.declared)
    training.restore(training.memory.trimmed(run.checkpoint(0), GRADIENTS), 0)
    execution = run.leaf(2).execution
    with pytest.raises(EvidenceError, match=r"step 1 reads 'gradient/first.bias', which the checkpoint of step 0 leav"):
        training.take_step(run.program(execution.program), execution, {}, b"", b"")


def evaluated() -> Program:
    """A step that reads a square weight and writes none, with a momentum that it leaves as it is."""
    state = {"weight/w": torch.arange(4.0).view(2, 2), "optimizer/w/m": torch.ones(2, 2), "gradient/w": torch.ones(2)}
    return trace(lambda state, batch: state["weight/w"] @ batch["x"], state, {"x": torch.ones(2)})


def test_what_only_reads_writes_nothing():
    program = evaluated()
    assert (program.written, program.absent) == ((), frozenset())
    assert replace(program, commit=dict.fromkeys(program.commit)).absent == {"weight/w", "optimizer/w/m"}


@pytest.mark.parametrize(
    "other",
    [{"stride": [1, 2]}, {"stride": [0, 1]}, {"source": "optimizer/w/m"}],
    ids=["transposed", "repeated", "swapped"],
)
def test_a_tensor_that_is_kept_in_another_place_is_written(other):
    program = evaluated()
    source = {"source": f"state:{other['source']}"} if "source" in other else {}
    kept = program.commit["weight/w"]
    assert kept is not None
    place = {**kept, **other, **source}
    assert replace(program, commit={**program.commit, "weight/w": place}).written == ("weight/w",)


def test_a_tensor_that_is_said_to_be_the_old_one_and_was_written_in_place_is_written():
    state = {"weight/w": torch.ones(2)}
    program = trace(lambda state, batch: state["weight/w"].view(2, 1).add_(1), state, {"x": torch.ones(2)})
    kept = program.commit["weight/w"]
    assert kept is not None
    place = {**kept, "source": "state:weight/w"}
    assert replace(program, commit={"weight/w": place}).written == ("weight/w",)


def unused(w, x):
    (w @ x).exp()


def written_over(w, x):
    kept = x.add(1)
    kept.mul_(3)
    w.add_(kept.copy_(x))


def partly_written_over(w, x):
    kept = x.mul(3)
    kept[0].copy_(x[0])
    w.add_(kept)


def read(w, x):
    w.mul(2).sum().item()


def seen_another_way(w, x):
    w.mul(2).t()


def taken_in(w, x):
    w.mul_((w @ x).sigmoid())


@pytest.mark.parametrize(
    ("body", "dead"),
    [
        (unused, {"aten.mm.default", "aten.exp.default"}),
        (written_over, {"aten.add.Tensor", "aten.mul_.Tensor"}),
        (partly_written_over, set()),
        (read, set()),
        (seen_another_way, {"aten.mul.Tensor"}),
        (taken_in, set()),
    ],
)
def test_a_call_is_dead_where_nothing_depends_on_it_that_is_committed_or_read(body, dead):
    program = trace(lambda state, batch: body(state["weight/w"], batch["x"]), {"weight/w": torch.eye(3)}, {"x": X})
    found = {program.calls[number]["operator"] for number in dead_calls(program) if program.works[number].moved}
    assert found == dead
    assert (program.dead.moved > 0) == bool(dead)
