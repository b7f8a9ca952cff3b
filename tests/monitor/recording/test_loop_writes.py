"""A recorder looks at operators between steps, as long as there is one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.numerics.kernels.workers import workers
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder
from tests.conftest import NOW, STARTED

SETTINGS = Settings(samples=2, seed="x", devices=("sse41",))


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("is_model_kept", [False, True])
def test_a_recorder_that_nobody_holds_looks_no_more(tmp_path, is_model_kept):
    def look():
        model = torch.nn.Linear(3, 2)
        recorder = Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / "run")
        with recorder.step(torch.ones(2, 3)):
            model(torch.ones(2, 3)).sum().backward()
        assert modes() == 1
        kept = model if is_model_kept else None
        del recorder, model
        gc.collect()
        assert modes() == 0
        del kept

    with ThreadPoolExecutor(1) as own:  # a thread has modes of its own, and no recorder of another test
        own.submit(look).result()


def test_a_recorder_that_is_let_go_within_a_backward_hinders_none_after_it(tmp_path):
    """Autograd works on a copy of the thread's modes, and puts back those that were there before."""

    def record(name):
        model = torch.nn.Linear(3, 2)
        recorder = Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / name)
        with recorder.step(torch.ones(2, 3)):
            model(torch.ones(2, 3)).sum().backward()
        return recorder

    def look():
        held = [record("first")]

        def let_go(_):
            held.clear()
            gc.collect()

        doubled = torch.ones(2, requires_grad=True) * 2
        doubled.register_hook(let_go)
        doubled.sum().backward()
        assert not held
        second = record("second")
        second.finish()
        assert modes() == 0

    with ThreadPoolExecutor(1) as own:
        own.submit(look).result()


def test_looking_keeps_no_arithmetic_in_one_thread(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = torch.nn.Linear(3, 2)
        recorder = Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / "run")
        assert workers(1 << 40) == 2
        with recorder.step(torch.ones(2, 3)):
            model(torch.ones(2, 3)).sum().backward()
        recorder.finish()
    finally:
        torch.set_num_threads(threads)


def rolling(recorder, model, optimizer, steps, rolls):
    """A step after so many forward passes that no step holds, as a rollout has."""
    for step in range(steps):
        for roll in range(rolls(step)):
            model(torch.ones(4, 3)) * (step + roll + 0.5)  # a number that changes: no program of before
        with recorder.step(torch.ones(2, 3)):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()


def test_more_than_a_step_takes_between_each_two_steps_is_sent_into_an_evaluation(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    with pytest.raises(CallerError, match=r"twice in a row, .* run it in 'with recorder.evaluation\(batch\):'"):
        rolling(recorder, model, optimizer, 4, lambda step: 20)
    assert recorder.steps == 2


@pytest.mark.filterwarnings("ignore:chips count")
def test_as_much_once_in_a_while_is_metered_alone(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    rolling(recorder, model, optimizer, 6, lambda step: 20 * (step % 2))
    recorder.finish()


class Teaching:
    """A teacher and a student in one loop, each with a recorder, or the teacher's answers alone."""

    def __init__(self, folder, *, factor=lambda step: 2.0):
        torch.manual_seed(0)
        self.factor = factor
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)) for _ in range(2)
        ]
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in self.models]
        self.runs = [folder / name for name in ("teacher", "student")]
        self.recorders = [
            Recorder(model, optimizer, out=run, lab=f"lab-{run.name}", checkpoint_every=2, started=STARTED)
            for model, optimizer, run in zip(self.models, self.optimizers, self.runs, strict=True)
        ]

    def train(self, steps):
        for step in range(steps):
            batch = torch.randn(6, 8)
            self.step(0, batch, torch.zeros(6, 3))
            self.step(1, batch, self.models[0](batch).detach() * self.factor(step))
        for recorder in self.recorders:
            recorder.finish()

    def step(self, number, batch, goal):
        with self.recorders[number].step((batch, goal)):
            self.optimizers[number].zero_grad()
            torch.nn.functional.mse_loss(self.models[number](batch), goal).backward()
            self.optimizers[number].step()

    def trust(self, number):
        run = self.runs[number]
        return Trust.load([run.with_name(f"{run.name}.trust.json")], [run])

    def verdict(self, number, devices):
        return inspect(self.runs[number : number + 1], self.trust(number), SETTINGS, now=NOW, worker=devices.run)

    def run(self, number):
        return RunFolder(self.runs[number], self.trust(number).labs[f"lab-{self.runs[number].name}"])

    def kinds(self, number):
        run = self.run(number)
        return [run.leaf(step).kind for step in range(1, run.committed + 1)]


def test_what_only_reads_the_state_between_steps_is_a_program_of_its_own(tmp_path, devices):
    """The teacher's answers are repeated, and are no slack."""
    loop = Teaching(tmp_path)
    loop.train(4)
    assert [recorder.steps for recorder in loop.recorders] == [4, 4]
    for number in range(2):
        verdict = loop.verdict(number, devices)
        assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
        assert verdict.evidence["chips"][0]["ledger"]["slack"]["moved"] == 0
    assert loop.kinds(0) == ["step", "write"] * 4
    assert loop.kinds(1) == ["step"] * 4
    [answers] = {execution_of(loop.run(0).leaf(step)).program for step in (2, 4, 6, 8)}
    program = loop.run(0).program(answers)
    assert not program.written
    assert program.dead.moved == 0


@pytest.mark.filterwarnings("ignore:chips count")
def test_what_reads_the_state_with_another_number_each_time_stays_slack(tmp_path, devices):
    loop = Teaching(tmp_path, factor=lambda step: step + 0.5)
    loop.train(3)
    assert loop.kinds(0).count("write") == 1  # of the first nobody knows yet that its number changes
    verdict = loop.verdict(0, devices)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "operators outside programs" in verdict.reasons[0].text
    assert loop.verdict(1, devices).outcome is Outcome.ACCEPT


def test_results_of_which_nothing_comes_are_read_and_memory_that_nobody_sets_is_zero(tmp_path, devices):
    """An accuracy that is looked at after the step, a buffer that is made in vain, a part of one that is set."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tmp_path / "run"
    recorder = Recorder(model, optimizer, out=run, lab="lab", started=STARTED)
    for step in range(3):
        torch.full((64,), float(step + 1))  # what may lie where the next one is made
        batch = torch.randn(6, 8)
        with recorder.step(batch):
            optimizer.zero_grad()
            out = model(batch)
            out.square().mean().backward()
            optimizer.step()
            accuracy = (out.detach().argmax(1) == 0).float().mean()
            part = torch.empty(64)
            part[:3] = out.detach()[0]
            made = (torch.empty(64) * 2, out.detach().topk(2), out.detach() / 0)
        assert 0 <= float(accuracy) <= 1
        assert not made[0].any()
        assert not part[3:].any()
    recorder.finish()
    trust = Trust.load([tmp_path / "run.trust.json"], [run])
    verdict = inspect([run], trust, SETTINGS, now=NOW, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["chips"][0]["ledger"]["slack"]["moved"] == 0
