"""Operators on lists write and are counted tensor by tensor, whether somebody looks inside of one or not."""

from __future__ import annotations

import pytest
import torch

from firmware_sim import NEVER, Meter, Work
from monitor import numerics
from monitor.programs.calls import charge, charge_part

LISTS = {
    "add": lambda tensors, ones: torch._foreach_add_(tensors, ones),
    "scalars": lambda tensors, ones: torch._foreach_mul_(tensors, [1.0, 2.0, 3.0]),
    "a tensor of scalars": lambda tensors, ones: torch._foreach_addcdiv_(
        tensors, ones, ones, torch.tensor([1.0, 2.0, 3.0])
    ),
    "copy": lambda tensors, ones: torch._foreach_copy_(tensors, ones),
}


class Looker:
    """Notes the first elements of all tensors whenever one of a list is written."""

    def __init__(self, tensors):
        self.tensors, self.seen = tensors, []

    def before(self, *_):
        pass

    after = before

    def wrote_part(self, number, count):
        assert (number, count) == (len(self.seen), len(self.tensors))
        self.seen.append([float(each[0]) for each in self.tensors])


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("rules", ["native", "rounded", "exact"])
def test_a_list_is_written_one_tensor_after_another(name, rules):
    begun = [torch.full((2,), float(i + 1)) for i in range(3)]
    ones, whole = [torch.ones(2)] * 3, [each.clone() for each in begun]
    LISTS[name](whole, ones)
    targets = [each.clone() for each in begun]
    looker = Looker(targets)
    with torch.no_grad(), numerics.recording(rules, observer=looker):
        LISTS[name](targets, ones)
    expected = [[float((whole if i <= at else begun)[i][0]) for i in range(3)] for at in range(3)]
    assert looker.seen == expected
    assert all(torch.equal(a, b) for a, b in zip(targets, whole, strict=True))


def test_an_empty_list_is_a_call(monkeypatch):
    looker = Looker([None])
    monkeypatch.setattr(looker, "wrote_part", lambda number, count: looker.seen.append((number, count)))
    with torch.no_grad(), numerics.recording("exact", observer=looker):
        torch.ops.aten._foreach_zero_.default([])
    assert looker.seen == [(0, 1)]


def test_a_call_that_returns_new_tensors_is_counted_as_many_times():
    meter, seen = Meter(), []
    meter.wake(Work(2, NEVER, NEVER), lambda *_: seen.append(meter.total.calls))
    charge(meter, Work(3, 0, 24))
    assert seen == [2]
    assert meter.total == Work(3, 0, 24)


def test_each_tensor_is_an_equal_part_of_the_work():
    meter, seen = Meter(), []
    meter.wake(Work(NEVER, NEVER, 14), lambda *_: seen.append(meter.total))
    for number in range(3):
        charge_part(meter, Work(3, 7, 40), number, 3)
    assert seen == [Work(2, 4, 26)]
    assert meter.total == Work(3, 7, 40)
