"""A recorder looks at operators between steps, as long as there is one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from firmware_sim.errors import CallerError
from monitor import Recorder
from monitor.numerics.kernels.workers import workers


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
        for _ in range(rolls(step)):
            model(torch.ones(4, 3))
        with recorder.step(torch.ones(2, 3)):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()


def test_more_than_a_step_takes_between_each_two_steps_is_sent_into_an_evaluation(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    with pytest.raises(CallerError, match=r"second time in a row .* run it in 'with recorder.evaluation\(batch\):'"):
        rolling(recorder, model, optimizer, 4, lambda step: 20)
    assert recorder.steps == 2


@pytest.mark.filterwarnings("ignore:chips count")
def test_as_much_once_in_a_while_is_metered_alone(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    rolling(recorder, model, optimizer, 6, lambda step: 20 * (step % 2))
    recorder.finish()
