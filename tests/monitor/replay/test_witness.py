"""The witness of a path past every loss: none in honest steps, one in each lie that shows with all gradients zero."""

from __future__ import annotations

import pytest
import torch

from monitor.replay.witness import DRAWS, altered
from tests.measurements._path_losses import LOSSES
from tests.measurements._witnessed import is_open, witnesses
from tests.measurements.paths import dishonest, honest

NUMBERS = {"values": torch.arange(1.0, 25).view(4, 6), "labels": torch.arange(9), "mask": torch.arange(7) < 3}


def lies(count):
    """Random lies, but for those that no recorder takes."""
    made = (each for each in dishonest(count, seed=1) if "model" in each.batch)
    return [each for each in made if "a product of matrices" not in each.name]


@pytest.mark.parametrize("name", LOSSES)
def test_honest_losses_have_no_witness(name):
    made = next(each for each in honest() if each.name == name)
    assert witnesses(made, made.program()) == []


def test_lies_that_show_with_all_gradients_zero_have_a_witness_and_no_others():
    shown = 0
    for made in lies(16):
        found = witnesses(made, made.program())
        assert bool(found) is is_open(made), made.name
        shown += bool(found)
        for each in found:
            recorded, *others = each.values
            assert len(others) == DRAWS
            assert recorded not in others
    assert shown >= 4


def test_altered_batches_hold_the_same_numbers_elsewhere_and_smaller():
    one, other = (altered(NUMBERS, b"draw", number) for number in (1, 2))
    assert altered(NUMBERS, b"draw", 1)["labels"].equal(one["labels"])
    assert not one["labels"].equal(other["labels"])
    for found in (one, other):
        assert sorted(found["labels"].tolist()) == list(range(9))
        assert int(found["mask"].sum()) == 3
        scale = float(found["values"].max()) / 24
        assert 0.5 <= scale < 1
        assert found["values"].sort().values.ne(NUMBERS["values"]).any()
        assert found["values"].flatten().sort().values.equal(NUMBERS["values"].flatten() * scale)


def test_zeros_become_numbers():
    assert (altered({"x": torch.zeros(3)}, b"draw", 1)["x"] >= 0.5).all()
