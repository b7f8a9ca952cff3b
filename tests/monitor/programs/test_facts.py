"""Numbers on a program's page, against what can be counted by hand."""

from __future__ import annotations

import torch

from monitor.declaration.binding import calls_of
from monitor.programs import facts_of
from tests.monitor.programs.tracing import trace


def test_a_small_program_by_hand():
    kept = torch.arange(4.0)

    def body(state, batch):
        wide = batch["x"].expand(8, 4).clone() * 2.0  # 128 bytes, twice
        state["buffer/b"].copy_(wide.sum(0) + kept)

    program = trace(body, {"buffer/b": torch.zeros(4)}, {"x": torch.ones(4)})
    facts = facts_of(program, calls_of(program))
    assert facts.calls == sum(facts.operators.values()) == 6
    assert facts.operators == {"expand": 1, "clone": 1, "mul": 1, "sum": 1, "add": 1, "copy": 1}
    assert facts.inputs == {"x": {"dtype": "float32", "shape": [4]}}
    assert facts.constants == [{"dtype": "float32", "bytes": 16, "uniform": False}]
    assert facts.largest is not None
    assert (facts.state_bytes, facts.largest["bytes"], facts.largest["shape"]) == (16, 128, [8, 4])
    assert facts.peak_bytes == 3 * 16 + 2 * 128  # state, batch, constant, and the clone beside what it is doubled to
    assert (facts.scalars, facts.update_scalars, facts.flop) == (1, 0, 0)
    assert facts.elementwise == 32 + 32 + 4  # doubled, summed, added


def test_memory_that_is_written_later_lives_until_then():
    def body(state, batch):
        first = batch["x"] + 1.0
        for _ in range(3):
            batch["x"] * 2.0  # each dies at once
        state["buffer/b"].copy_(first)

    program = trace(body, {"buffer/b": torch.zeros(4)}, {"x": torch.ones(4)})
    assert facts_of(program, calls_of(program)).peak_bytes == 4 * 16
