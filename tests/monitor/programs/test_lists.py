"""Calls on lists are counted tensor by tensor, and a moment inside of one changes no bit."""

from __future__ import annotations

import pytest
import torch

from firmware_sim import NEVER, Meter, Work
from monitor.programs.lists import charge_each, is_awaited_inside

ADD = torch.ops.aten._foreach_add_.List


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_who_looks_inside_of_a_call_finds_as_many_tensors_written(moment):
    targets, meter, seen = [torch.full((2,), float(i)) for i in range(3)], Meter(), []
    meter.charge(Work(5, 0, 0))
    meter.wake(Work(5 + moment, NEVER, NEVER), lambda: seen.append([float(each[0]) for each in targets]))
    assert is_awaited_inside(meter, ADD, (targets, targets))
    before = [each.clone() for each in targets]
    torch._foreach_add_(targets, [torch.ones(2)] * 3)
    charge_each(meter, Work(3, 7, 40), targets, before)
    assert seen == [[float(i + (i < moment)) for i in range(3)]]
    assert [float(each[0]) for each in targets] == [1.0, 2.0, 3.0]
    assert meter.total == Work(8, 7, 40)


def test_nobody_waits_inside_of_other_calls():
    meter = Meter()
    meter.wake(Work(4, NEVER, NEVER), lambda: None)
    tensors = [torch.ones(2)] * 3
    assert not is_awaited_inside(meter, ADD, (tensors, tensors))
    assert not is_awaited_inside(meter, torch.ops.aten.add_.Tensor, (torch.ones(9), torch.ones(9)))


def test_a_call_that_returns_new_tensors_is_counted_as_many_times():
    meter, seen = Meter(), []
    meter.wake(Work(2, NEVER, NEVER), lambda: seen.append(meter.total.calls))
    charge_each(meter, Work(3, 0, 24), [], [])
    assert seen == [2]
    assert meter.total == Work(3, 0, 24)


def test_each_tensor_is_an_equal_part_of_the_work():
    meter, seen = Meter(), []
    meter.wake(Work(NEVER, NEVER, 14), lambda: seen.append(meter.total))
    assert is_awaited_inside(meter, ADD, ([torch.ones(2)] * 3, [torch.ones(2)] * 3))
    charge_each(meter, Work(3, 7, 40), [], [])
    assert seen == [Work(2, 4, 26)]
    assert meter.total == Work(3, 7, 40)
