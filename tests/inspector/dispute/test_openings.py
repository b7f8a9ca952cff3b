"""Elements of a tensor are found in the memory of its source, wherever these lie there."""

from __future__ import annotations

import random

import pytest
import torch

from firmware_sim.errors import EvidenceError
from inspector.dispute.openings import Known, Placed
from monitor.programs.trace import gather, layout_of, reach


def layout(rng, base):
    """A layout of its own for the source: axes in any order, with or without gaps."""
    order = list(range(base.dim()))
    rng.shuffle(order)
    stride, step = [0] * base.dim(), rng.choice([1, 1, 2])
    for axis in order:
        stride[axis] = step
        step *= base.shape[axis]
    return {"dtype": "float32", "shape": list(base.shape), "stride": stride}


def place(rng, size):
    """Some tensor in so much memory: strides may be 0, and rows may overlap."""
    while True:
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(4))]
        stride, offset = [rng.randrange(8) for _ in shape], rng.randrange(size)
        if offset + reach(shape, stride) <= size:
            return {"dtype": "float32", "shape": shape, "stride": stride, "offset": offset}


def test_elements_of_a_placed_tensor_are_those_that_gathering_all_gives():
    rng = random.Random("places")
    for number in range(300):
        base = torch.arange(24.0).reshape(rng.choice([(24,), (4, 6), (2, 3, 4)])) + number
        mine = layout_of(base) if number % 2 else layout(rng, base)
        where = place(rng, reach(mine["shape"], mine["stride"]))
        whole = gather(base, mine, where).reshape(-1)
        source = Placed(Known(base), mine, where)
        places = torch.tensor(rng.choices(range(len(whole)), k=5))
        assert torch.equal(source.fetch(places), whole[places]), (mine, where)
        assert torch.equal(source.whole().reshape(-1), whole)


def test_a_place_outside_of_its_source_is_refused():
    base = torch.zeros(4)
    where = {"dtype": "float32", "shape": [2], "stride": [1], "offset": 3}
    with pytest.raises(EvidenceError, match="does not lie inside its source"):
        Placed(Known(base), layout_of(base), where)
