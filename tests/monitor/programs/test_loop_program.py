"""Programs as evidence: what is malformed is refused, and a changed one leads to an error or to another state."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from monitor.declaration.statement import Declaration
from monitor.programs.program import Program, parse_hex
from monitor.replay.repetition import ProgramTraining, scalars_of
from monitor.transcript import Execution, Leaf, Metadata, RunFolder
from tests.documents import changed, places
from tests.leaves import execution_of

READS = "sha256:" + "0" * 64


@pytest.fixture
def run(record_loop) -> RunFolder:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        (functional.mse_loss(model(batch), torch.ones(5, 3)) * 1.5).backward()
        optimizer.step()

    recorded = record_loop(model, optimizer, [torch.randn(5, 4) for _ in range(3)], body)
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


def repeat(run: RunFolder, program: Program, execution: Execution) -> Leaf:
    """Take step 1 again, by a program that may be another one."""
    training = ProgramTraining(run.declared)
    training.memory.load(run.checkpoint(0))
    batches = run.batches()
    named = replace(execution, program=program.digest)
    leaf, _ = training.take_step(program, named, batches.batch(1), batches.batch_root(1), run.rounding_log(1))
    return leaf


def test_program_comes_back_from_its_bytes(run):
    for digest in run.programs():
        program = run.program(digest)
        assert Program.decode(program.encoded) == program
        assert program.digest == digest
        assert program.flop == 2 * 5 * 4 * 3 * 2


ODD: list[Any]
ODD = [None, True, -1, 0, 1, 7, 1 << 62, 0.5, "", "x", "state:weight/0.weight", "node:0:0", [], [1], {}, KeyError]


def test_changed_program_is_an_error_or_reaches_its_own_state_and_never_breaks(run):
    """1,200 single changes, seed 3: each ends in EvidenceError, or runs, and then has another name."""
    leaf = run.leaf(1)
    program = run.program(leaf.execution.program)
    assert repeat(run, program, leaf.execution) == leaf
    whole = json.loads(program.encoded)
    drawn = random.Random(3)
    paths = list(places(whole))
    refused = executed = 0
    for _ in range(1200):
        edited = changed(whole, drawn.choice(paths), drawn.choice(ODD))
        if edited == whole:
            continue
        try:
            other = Program.decode(canonical.encode(edited))
            assert other.flop >= 0
            reached = repeat(run, other, leaf.execution)
        except EvidenceError:
            refused += 1
            continue
        executed += 1
        assert execution_of(reached).program != execution_of(leaf).program
    assert refused > 800
    assert executed > 10


@pytest.mark.parametrize("updates", [1, [[0]], [[2, 1]], [[0, 9], [8, 9]], [[0, 1 << 20]], [[True, 1]], [[0, 0]] * 65])
def test_updates_are_stretches_of_calls_in_order(run, updates):
    whole = json.loads(run.program(run.leaf(1).execution.program).encoded)
    with pytest.raises(EvidenceError, match="updates"):
        Program.decode(canonical.encode({**whole, "updates": updates}))


def test_operator_outside_the_table_is_refused(run):
    program = run.program(run.leaf(1).execution.program)
    whole = json.loads(program.encoded)
    for name in ("aten.set_.source_Storage", "aten._fused_adam_.default", "prims.add.default", "os.system", "aten.mm"):
        whole["calls"][0]["operator"] = name
        with pytest.raises(EvidenceError, match="a program calls an operator that is not allowed"):
            Program.decode(canonical.encode(whole))


def test_place_outside_the_memory_of_its_source_is_refused(run):
    execution = run.leaf(1).execution
    whole = json.loads(run.program(execution.program).encoded)
    place = next(place for call in whole["calls"] for place in call["sources"] if place["source"].startswith("state:"))
    for offset in (1 << 30, -(1 << 30)):
        place["offset"] = offset
        with pytest.raises(EvidenceError, match="beyond the memory"):
            repeat(run, Program.decode(canonical.encode(whole)), execution)


def test_step_that_draws_other_keys_than_its_program_says_is_refused(run):
    execution = run.leaf(1).execution
    whole = json.loads(run.program(execution.program).encoded)
    call = next(call for call in whole["calls"] if call["draws"])
    for draws, message in (([], "takes more random keys"), ([0, 1], "takes fewer random keys")):
        call["draws"] = draws
        with pytest.raises(EvidenceError, match=message):
            repeat(run, Program.decode(canonical.encode(whole)), execution)
    call["draws"] = [1]
    other = Program.decode(canonical.encode(whole))
    assert repeat(run, other, execution).state != run.leaf(1).state


def test_slots_must_lie_in_the_program_and_change_something(run):
    execution = run.leaf(3).execution
    program = run.program(execution.program)
    assert len(execution.slots) == 2
    text, numbers = next(iter(execution.slots.items()))
    for slots, message in (
        ({text: (len(program.scalars),)}, "changes scalar"),
        ({program.scalars[numbers[0]]: numbers[:1]}, "but gives it the same value as the program"),
        ({"0x1": numbers}, "is not a number in hexadecimal form"),
    ):
        with pytest.raises(EvidenceError, match=message):
            scalars_of(program, replace(execution, slots=slots))


@pytest.mark.parametrize("text", ["1.0", "0x1p0", "0x1.8", "nan?", "", None, 3, "0X1.8000000000000p+0"])
def test_numbers_have_one_form(text):
    with pytest.raises(EvidenceError):
        parse_hex(text)
    assert parse_hex((1.5).hex()) == 1.5


EXECUTIONS = [
    {"program": "x"},
    {"program": None},
    {"slots": {"0x1p0": []}},
    {"slots": {"0x1p0": [1], "0x2p0": [1]}},
    {"slots": {"0x1p0": [-1]}},
    {"slots": []},
    {"hyper": {}},
    {"hyper": [{"lr": {}}]},
    {"reads": "x"},
    {"more": 1},
]


@pytest.mark.parametrize("change", EXECUTIONS, ids=str)
def test_malformed_execution_is_refused(change):
    good = {"program": "0" * 64, "slots": {"0x1.0000000000000p+0": [1]}, "hyper": [{"lr": 0.1}], "reads": READS}
    assert Execution.from_json(good).to_json() == good
    with pytest.raises(EvidenceError):
        Execution.from_json({**good, **change})


TASKS = [
    {"state": []},
    {"state": [["weight", "w", "float32", [-1]]]},
    {"state": [["weight", 3, "float32", [1]]]},
    {"state": [["weight", "w", [], [1]]]},
    {"state": [["thought", "w", "float32", [1]]]},
    {"state": [["weight", "w", "float32", [1]]] * 2},
    {"numerics": "fast"},
    {"numerics": "rounded-calibrated"},
    {"shares": []},
    {"shares": [1, 0]},
    {"shares": [1, True]},
    {"shares": 3},
    {"shares": [4097]},
    {"seed": -1},
    {"groups": []},
    {"groups": [{"lr": {}}]},
    {"groups": [3]},
    {"optimizer": None},
    {"form": "loop/1"},
    {"parameters": []},
    {"parameters": [["0.weight", "0.weight"]]},
    {"parameters": [["0.running_mean"]]},
    {"parameters": [[3]]},
    {"parameters": [3]},
    {"parameters": None},
    {"steps": 3},
]


@pytest.mark.parametrize("change", TASKS, ids=str)
def test_malformed_declaration_is_refused(run, change):
    good = run.metadata.to_json()
    assert isinstance(Metadata.from_json(good).task, Declaration)
    with pytest.raises(EvidenceError):
        Metadata.from_json({**good, "task": {**good["task"], **change}})


def test_declared_state_that_fits_no_shard_is_refused(run):
    with pytest.raises(EvidenceError, match="cannot be laid out"):
        replace(run.declared, shares=(1,) * 4096).empty_memory(torch.device("cpu"))
