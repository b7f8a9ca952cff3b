"""Which rows of a tensor are compared with samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inspector.replay import examination
from inspector.replay.examination import content_digests, hidden_in

SAMPLES = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
WANTED = set(content_digests(SAMPLES))


@pytest.mark.parametrize("shape", [(4, 2, 3), (2, 2, 2, 3), (24,), (8, 3), (25,)])
def test_samples_that_lie_one_after_another_are_found(shape):
    size = int(np.prod(shape))
    tensor = torch.from_numpy(np.resize(SAMPLES.reshape(-1), size)).reshape(shape)
    assert hidden_in(tensor, {(2, 3)}) == WANTED


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_samples_of_another_type_are_not(dtype):
    assert not hidden_in(torch.from_numpy(SAMPLES).to(dtype), {(2, 3)}) & WANTED


def test_numbers_and_rows_of_one_value_are_no_samples():
    assert hidden_in(torch.zeros(4, 2, 3), {(2, 3), (3,), (), (1,), (4, 2, 3)}) == set()
    assert len(hidden_in(torch.eye(3), {(3,), (9,), (10,)})) == 4
    assert hidden_in(torch.zeros(0, 2, 3), {(2, 3)}) == set()


def test_samples_in_tensors_of_any_shape_are_found_where_they_lie_row_by_row():
    made = np.random.default_rng(0)
    for _ in range(300):
        sample = made.standard_normal((2, 3)).astype(np.float32)
        count = int(made.integers(1, 9))
        at = int(made.integers(0, count))
        flat = made.standard_normal(count * 6).astype(np.float32)
        shift = int(made.integers(0, 2)) * (count > at + 1)
        flat[at * 6 + shift :][:6] = sample.reshape(-1)
        shape = [(count, 2, 3), (count * 2, 3), (count * 6,), (1, count, 6)][int(made.integers(0, 4))]
        found = hidden_in(torch.from_numpy(flat.reshape(shape)), {(2, 3)})
        assert (content_digests(sample[None])[0] in found) is (shift == 0)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_numpy_has_not_are_not_searched(name):
    held = torch.arange(6.0).to(getattr(torch, name)).view(2, 3)
    assert examination.hidden_in(held, [(3,)]) == set()
    assert examination._rows({"x": held}) is None
