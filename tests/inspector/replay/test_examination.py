"""Which rows of a tensor are compared with samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
