"""Prepared programs: what a plan leaves out changes no bit, and what it settles once is refused once."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from monitor.numerics import replaying
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.replay.repetition import ProgramTraining, scalars_of
from monitor.transcript import RunFolder
from tests.leaves import execution_of

CPU = torch.device("cpu")


class Sees:
    """Counts calls, and holds no tensor."""

    def __init__(self) -> None:
        self.outputs: list[weakref.ref] = []
        self.alive: list[int] = []
        self.inputs = 0

    def before(self, inputs) -> None:
        self.inputs += 1

    def after(self, outputs) -> None:
        self.alive.append(sum(seen() is not None for seen in self.outputs))
        self.outputs += [weakref.ref(tensor) for tensor in outputs]


@pytest.fixture
def run(record_loop) -> RunFolder:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch.clone().unsqueeze_(1).transpose(0, 1)).squeeze(0)
        functional.mse_loss(torch.cat([out, out.t().reshape(5, 3)], 1), torch.ones(5, 6)).backward()
        optimizer.step()

    recorded = record_loop(model, optimizer, [torch.randn(5, 4) for _ in range(3)], body)
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


def take(run: RunFolder, program: Program, watch=None, prepared=None):
    """Take step 1 from its program on memory of its own; the memory, and how the program was run."""
    training = ProgramTraining(run.declared) if prepared is None else prepared[0]
    ready = Prepared(program, training.memory) if prepared is None else prepared[1]
    training.memory.load(run.checkpoint(0))
    keys = RepeatedKeys(run.declared.seed, 1)
    session = replaying(run.declared.numerics, run.rounding_log(1), keys=keys)
    scalars = scalars_of(program, execution_of(run.leaf(1)))
    ready.run(run.batches().batch(1), scalars, session, keys, watch)
    assert session.statistics.calls == len(program.calls)
    return training, ready


def test_calls_that_only_return_views_are_left_out_unless_somebody_sees_them(run):
    program = run.program(execution_of(run.leaf(1)).program)
    planned, every = (program.plan(CPU, every=flag) for flag in (False, True))
    assert len(every.calls) == len(program.calls) > len(planned.calls)
    left_out = {program.calls[n]["operator"] for n in range(len(program.calls))}
    left_out -= {program.calls[call.number]["operator"] for call in planned.calls}
    assert "aten.t.default" in left_out
    sees = Sees()
    watched, unwatched = take(run, program, sees)[0], take(run, program)[0]
    assert sees.inputs == len(program.calls)
    assert watched.memory.digest() == unwatched.memory.digest() == run.leaf(1).state


def test_a_program_prepared_once_reaches_the_same_state_again(run):
    program = run.program(execution_of(run.leaf(1)).program)
    prepared = take(run, program)
    for _ in range(3):
        take(run, program, prepared=prepared)
        assert prepared[0].memory.digest() == run.leaf(1).state


def test_a_tensor_is_freed_after_the_last_call_that_reads_it(run):
    program = run.program(execution_of(run.leaf(1)).program)
    sees = Sees()
    _, ready = take(run, program, sees)
    assert max(sees.alive) < len(sees.outputs) // 2
    state = {id(tensor) for tensor in ready._memory.export().values()}
    kept = [tensor for seen in sees.outputs if (tensor := seen()) is not None]
    assert all(tensor._base is not None or id(tensor) in state for tensor in kept)


def layouts(whole, operator):
    return [result for call in whole["calls"] if call["operator"] == operator for result in call["results"]]


@pytest.mark.parametrize(
    "operator", ["aten.t.default", "aten.unsqueeze_.default", "aten.cat.default", "aten.addcdiv_.default"]
)
def test_a_layout_that_an_operator_does_not_return_is_refused(run, operator):
    """Of calls that are left out, that overwrite their argument or its layout, and that return memory of their own."""
    program = run.program(execution_of(run.leaf(1)).program)
    whole = json.loads(program.encoded)
    found = layouts(whole, operator)
    assert found
    found[0]["stride"] = [step + 1 for step in found[0]["stride"]]
    with pytest.raises(EvidenceError, match="layout is not the one"):
        take(run, Program.decode(canonical.encode(whole)))


def test_more_results_than_an_operator_returns_are_refused(run):
    whole = json.loads(run.program(execution_of(run.leaf(1)).program).encoded)
    call = next(call for call in whole["calls"] if call["operator"] == "aten.cat.default")
    call["results"].append(dict(call["results"][0]))
    with pytest.raises(EvidenceError, match="layout is not the one"):
        take(run, Program.decode(canonical.encode(whole)))


def test_a_constant_that_a_call_writes_is_made_anew_for_each_step(record_loop):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        target = torch.tensor([1.0, 2.0, 3.0, 4.0])
        target.mul_(2.0)
        functional.mse_loss(model(batch), target.expand(5, 4)).backward()
        optimizer.step()

    recorded = record_loop(model, optimizer, [torch.randn(5, 4) for _ in range(2)], body)
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    program = run.program(execution_of(run.leaf(1)).program)
    prepared = take(run, program)
    take(run, program, prepared=prepared)
    assert prepared[0].memory.digest() == run.leaf(1).state
