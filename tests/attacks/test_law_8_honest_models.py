"""Law 8: no honest behaviour that the documentation allows ends in REJECT. Models that are no presets."""

from __future__ import annotations

import re
import threading
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional

from analysis.cli import main
from firmware_sim.errors import CallerError
from inspector.inspection.trust import Trust
from monitor import Recorder
from monitor.numerics import exact
from tests.guards import off
from tests.measurements import honest
from tests.measurements._honest_models import MODELS

pytestmark = pytest.mark.usefixtures("kept_devices")


def inspected(run, capsys, *devices):
    """Exit code and words of an inspection of all three chips, on the default devices where none is named."""
    capsys.readouterr()
    named = [word for device in devices for word in ("--device", device)]
    code = main(["inspect", str(run), "--trust", f"{run}.trust.json", "--samples", "3", *named])
    return code, capsys.readouterr().out


# C1: strides of dimensions of size one


def digits(run, batch_size, steps=2):
    """Record a convolution over one channel; returns the names of its programs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(6 * 7 * 7, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=run, seed=1, chips=3, snapshot_rate=Fraction(1))
    for _ in range(steps):
        x, y = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
        with recorder.step((x, y)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    recorder.finish()
    return programs_of(run)


def programs_of(run):
    """Digests of the programs that were countersigned for a run."""
    (signed,) = Trust.load([run.with_name(f"{run.name}.trust.json")]).agreed()
    return sorted(signed.programs)


def odd_kernel(monkeypatch):
    """Let the lab's kernel lay out gradients of one channel as that of products of bytes does on many processors."""
    right = exact.convolution.grad_weight

    def laid_otherwise(*args):
        out = right(*args)
        channels, height, width = out.shape[1:]
        return out.as_strided(out.shape, (height * width, 1, width, 1)) if channels == 1 else out

    monkeypatch.setattr(exact.convolution, "grad_weight", laid_otherwise)


def test_c1_one_channel_is_accepted_on_other_kernels(tmp_path, monkeypatch, capsys):
    odd_kernel(monkeypatch)
    digits(tmp_path / "run", 50)
    code, words = inspected(tmp_path / "run", capsys)
    assert code == 0, words


def test_c1_guard_off_the_honest_run_is_rejected(tmp_path, monkeypatch, capsys):
    with off("equal layouts"):
        plain = digits(tmp_path / "plain", 50)
        odd_kernel(monkeypatch)
        if digits(tmp_path / "run", 50) == plain:
            pytest.skip("this processor lays such gradients out itself as the odd kernel does")
    code, words = inspected(tmp_path / "run", capsys)
    assert code == 1
    assert "layout is not the one" in words


@pytest.mark.parametrize("batch_size", [1, 50, 100, 128])
def test_c1_programs_recorded_on_other_kernels_have_one_name(tmp_path, monkeypatch, batch_size):
    plain = digits(tmp_path / "plain", batch_size, steps=1)
    odd_kernel(monkeypatch)
    assert digits(tmp_path / "odd", batch_size, steps=1) == plain


def test_c1_guard_off_they_have_two(tmp_path, monkeypatch):
    with off("equal layouts"):
        plain = digits(tmp_path / "plain", 1, steps=1)
        odd_kernel(monkeypatch)
        assert digits(tmp_path / "odd", 1, steps=1) != plain


def test_c1_batches_that_differ_in_such_strides_only_run_one_program(tmp_path):
    """Padding looks at strides when it chooses a memory format for its result."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 1, 1).to(memory_format=memory_format)
        with recorder.step(x):
            optimizer.zero_grad()
            model(functional.pad(x, (2, 2, 2, 2))).square().mean().backward()
            optimizer.step()
    recorder.finish()
    assert len(programs_of(tmp_path / "run")) == 1


# C2: writes that no operator shows


def scribble(tensor):
    tensor.detach().numpy().reshape(-1)[0] += 1


def in_a_thread(tensor):
    thread = threading.Thread(target=lambda: scribble(tensor))  # an operator would be refused there
    thread.start()
    thread.join()


def beside_a_part(tensor):
    """Beside a recorded write to another part of the same tensor."""
    with torch.no_grad():
        tensor[1:3, 1:].mul_(0.5)
    scribble(tensor)
    with torch.no_grad():
        tensor[1:3, 1:].mul_(0.5)


class Loop:
    """A small model with momentum, that hands out what lies in memory at each moment of a step."""

    def __init__(self, run, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = {"seed": 5, "chips": 3, "checkpoint_every": 8, "snapshot_rate": Fraction(1), **options}
        self.recorder = Recorder(self.model, self.optimizer, out=run, **options)

    def step(self, write=None, what="", when=""):
        weight, batch = self.model.get_parameter("0.weight"), torch.randn(3, 4)

        def moment(name, hidden=None):
            if write is not None and name == when:
                momentum = self.optimizer.state.get(weight, {}).get("momentum_buffer")
                held = {"weight": weight, "momentum": momentum, "gradient": weight.grad}
                write({**held, "batch": batch, "hidden": hidden}[what])

        with self.recorder.step(batch):
            self.optimizer.zero_grad()
            moment("start")
            hidden = self.model[0](batch)
            moment("middle", hidden)
            self.model[2](self.model[1](hidden)).square().mean().backward()
            moment("backward")
            self.optimizer.step()
            moment("end")


CASES = [
    *((scribble, what, when) for what in ("weight", "momentum") for when in ("start", "middle", "backward", "end")),
    *((scribble, "gradient", when) for when in ("backward", "end")),
    *((scribble, "batch", when) for when in ("start", "end")),
    (in_a_thread, "weight", "middle"),
    (beside_a_part, "weight", "end"),
]
NAMES = {"weight": "weight/0.weight", "momentum": "momentum_buffer", "gradient": "gradient/0.weight", "batch": "batch"}


@pytest.mark.parametrize(("write", "what", "when"), CASES)
def test_c2_a_write_beside_operators_is_named_before_the_step_is_committed(tmp_path, write, what, when):
    loop = Loop(tmp_path / "run")
    loop.step()
    loop.step()
    with pytest.raises(CallerError, match="was written in step 3 by something that is no recorded operator") as found:
        loop.step(write, what, when)
    assert NAMES[what] in str(found.value)
    assert loop.recorder.steps == 2


def test_c2_a_lab_that_heard_of_it_goes_on(tmp_path, capsys):
    """It is accepted, but for a snapshot that fell into the refused step: that one shows what the write did."""
    run = tmp_path / "run"
    loop = Loop(run)
    loop.step()
    loop.step()
    with pytest.raises(CallerError, match="step 3"):
        loop.step(scribble, "weight", "end")
    loop.recorder = Recorder.resume(loop.model, loop.optimizer, out=run)
    loop.step()
    loop.step()
    loop.recorder.finish()
    code, words = inspected(run, capsys, "sse41")
    assert code == 3, words
    assert len(set(re.findall(r"lab-1-chip-\d{4}", words))) == 3, words
    assert words.count("[evidence]") == words.count("inside of step 3") >= 1, words
    assert "the power went in that step, and it was committed later" in words


def test_c2_guard_off_it_is_recorded_in_silence_and_rejected(tmp_path, capsys):
    loop = Loop(tmp_path / "run", checkpoint_every=2)
    with off("watched memory"):
        for step in range(1, 5):
            loop.step(scribble if step == 3 else None, "weight", "end")
        loop.recorder.finish()
    code, words = inspected(tmp_path / "run", capsys, "sse41")
    assert code == 1, words


def test_c2_every_step_is_repeated_on_request(tmp_path):
    loop = Loop(tmp_path / "run", check_writes="every", checkpoint_every=2)
    loop.step()
    loop.step()
    with pytest.raises(CallerError, match="in step 3, something other than a recorded operator wrote"):
        loop.step(scribble, "hidden", "middle")


def test_c2_guard_off_a_write_to_what_a_step_computes_with_passes(tmp_path, capsys):
    loop = Loop(tmp_path / "run", check_writes="every", checkpoint_every=2)
    with off("repeated steps"):
        for step in range(1, 5):
            loop.step(scribble if step == 3 else None, "hidden", "middle")
        loop.recorder.finish()
    code, words = inspected(tmp_path / "run", capsys, "sse41")
    assert code == 1, words


@pytest.mark.parametrize("options", [{}, {"check_writes": "sampled"}, {"check_writes": 4}])
def test_c2_sampled_steps_are_repeated(tmp_path, options):
    loop = Loop(tmp_path / "run", checkpoint_every=1000, **options)
    loop.step()

    def go_on():
        for _ in range(64):
            loop.step(scribble, "hidden", "middle")

    with pytest.raises(CallerError, match="something other than a recorded operator wrote"):
        go_on()


@pytest.mark.parametrize("value", ["often", 0, True, 1.5, None, []])
def test_c2_how_many_steps_are_repeated_is_a_name_or_a_number(tmp_path, value):
    with pytest.raises(CallerError, match="check_writes must be"):
        Loop(tmp_path / "run", check_writes=value)
    assert not (tmp_path / "run").exists()


# all of it together

SEED = 27
"""Of twelve worlds with all models and batch sizes, and one channel in a large batch among them."""


def test_honest_runs_of_four_models_are_accepted():
    rows = honest.run(runs=12, seed=SEED)
    assert honest.verdict(rows) is None, honest.table(rows)
    assert {row["work"] for row in rows} == set(MODELS)
    assert {row["mode"] for row in rows} == {"exact", "rounded"}
    assert {row["batch_size"] for row in rows} == {1, 7, 50, 100}
    assert sum(len(row["crashes"]) for row in rows) > 1
    large = [row for row in rows if row["batch_size"] >= 50 and row["mode"] == "exact"]
    assert any(row["work"] == "convolutions" for row in large)


def test_an_honest_run_that_is_not_accepted_is_told():
    row = {"work": "norms", "mode": "exact", "number": 3, "outcome": "REJECT", "reasons": ["step 2: another state"]}
    assert "run 3 (norms, exact): REJECT: step 2" in (honest.verdict([{**row, "outcome": "ACCEPT"}, row]) or "")


def test_every_kind_of_run_comes_once_in_32():
    found = honest.worlds(64, 3)
    kinds = [(world.model, world.numerics, world.batch_size) for world in found]
    assert len(set(kinds[:32])) == len(set(kinds[32:])) == 32
    assert honest.worlds(5, 3) == found[:5] != honest.worlds(5, 4)
    with pytest.raises(CallerError):
        honest.run(runs=0)
