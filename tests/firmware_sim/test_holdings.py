"""Results of operators count as long as anything holds their memory, whoever that is."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from firmware_sim import Holdings


@pytest.fixture
def holdings():
    return Holdings()


def test_a_result_counts_until_nobody_holds_its_memory(holdings):
    made = [torch.zeros(6), torch.zeros(2, dtype=torch.float64)]
    holdings.note((made[0], [made[1], None, 3]))
    holdings.note(made[0])  # once
    assert holdings.byte_count == 24 + 16
    view = made[0][2:4]
    holdings.note(view)
    made.clear()
    assert holdings.byte_count == 24  # by the view
    del view
    assert holdings.byte_count == 0


def test_what_a_backward_pass_needs_is_held(holdings):
    weight = torch.ones(5, requires_grad=True)
    product = weight * 2
    holdings.note(product)
    loss = (product * product).sum()
    del product
    assert holdings.byte_count == 20
    loss.backward()
    assert holdings.byte_count == 0


def test_a_new_result_in_the_place_of_an_old_one_counts_anew(holdings):
    for size in (1, 2, 3):
        held = torch.zeros(size)
        holdings.note(held)
        assert holdings.byte_count == 4 * size
        del held


def test_cycles_are_held_until_they_are_collected(holdings):
    cycle: list[Any] = [torch.zeros(4)]
    cycle.append(cycle)
    holdings.note(cycle[0])
    gc.collect()
    assert holdings.byte_count == 16
    del cycle
    gc.collect()
    assert holdings.byte_count == 0


def test_other_things_are_no_memory_of_operators(holdings):
    class Subclass(torch.Tensor):
        def numel(self):
            raise AssertionError("host code ran")

    kept = [torch.zeros(3).as_subclass(Subclass), np.zeros(3), "text", 1.5, None]
    holdings.note(kept)
    assert holdings.byte_count == 0


def test_a_result_is_found_by_its_address_while_another_thread_asks(holdings, switching):
    """A list of addresses that one thread makes is not kept where another one has noted a result meanwhile."""
    ended, kept, missed = threading.Event(), [torch.zeros(4) for _ in range(20)], 0
    holdings.note(kept)
    other = torch.zeros(3)

    def ask():
        while not ended.is_set():
            assert not holdings.holds(other)

    asking = threading.Thread(target=ask)
    asking.start()
    for number in range(6_000):
        kept.append(torch.zeros(5 + number % 7))
        del kept[:-200]
        holdings.note(kept[-1])
        missed += not holdings.holds(torch.from_numpy(kept[-1].numpy()))
    ended.set()
    asking.join()
    assert missed == 0
