"""Law 2: what runs on the memory of the state between two steps is counted by its chips, whatever door it came through.

Row A47 and more: each of ``doors`` is opened between two steps of a recorded loop. Either an operator is refused in one
line, or the chips have counted its product.
"""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from firmware_sim.errors import CallerError
from firmware_sim.service import read_silicon
from monitor import Recorder
from monitor.lab.simulated_lab import lab_path
from tests.attacks.doors import DOORS, PRODUCT, WIDTH, Wrapper, product
from tests.conftest import STARTED
from tests.guards import off

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["alias: torch.from_dlpack", "alias: from_numpy", "alias: frombuffer"])
def test_guard_off_an_alias_is_not_counted(name, closed, tmp_path):
    with off("memory by address"):
        assert counted(tmp_path, DOORS[name]) < closed + PRODUCT


def counted(folder, through=None) -> int:
    """FLOP that the chip of a loop of two steps has counted, where a door was opened between them."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(
        model, optimizer, out=folder / "run", seed=1, chips=1, lab="lab", started=STARTED, hours=1.0, sync=False
    )
    for step in range(2):
        batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if not step and through is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kept = through(model)
            del kept
    recorder.finish()
    [chip] = (lab_path(folder / "run") / "chips").iterdir()
    return read_silicon(chip).work.flop


@pytest.fixture(scope="module")
def closed(tmp_path_factory) -> int:
    return counted(tmp_path_factory.mktemp("closed"))


@pytest.mark.parametrize("name", DOORS)
def test_what_comes_through_a_door_is_counted_or_refused(name, closed, tmp_path):
    refusal, flop = "", 0
    try:
        flop = counted(tmp_path, DOORS[name])
    except CallerError as error:
        refusal = str(error)
    assert refusal or flop >= closed + PRODUCT
    assert "\n" not in refusal


def test_an_operator_of_another_thread_is_refused_within_a_step_too(tmp_path):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", seed=1, chips=1)
    refused = []

    def work():
        try:
            product(model.weight)
        except CallerError as error:
            refused.append(str(error))

    batch = torch.ones(2, WIDTH)
    with recorder.step(batch):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    recorder.finish()
    assert "run it in the thread that trains" in refused[0]


def test_the_reference_lists_every_door():
    table = (ROOT / "monitor" / "README.md").read_text().partition("## Doors into the memory of a run")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.partition(":")[2])}
    assert listed == {name.removeprefix("alias: ").removeprefix("write: ") for name in DOORS}


def test_another_thread_may_read_a_number_and_use_subclasses_of_its_own(tmp_path):
    """As a logger does with a loss."""
    made: list[object] = []

    def work(model):
        made.append(float(model.weight.detach()[0, 0]))
        with torch.no_grad():
            made.append(Wrapper(torch.ones(2, 2)) @ Wrapper(torch.ones(2, 2)))

    def through(model):
        thread = threading.Thread(target=work, args=(model,))
        thread.start()
        thread.join()

    counted(tmp_path, through)
    assert len(made) == 2
