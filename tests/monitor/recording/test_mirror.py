"""A copy of chip memory that is compared in whole buffers and still names the tensor that differs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monitor.programs.bits import copy_over, same_bytes
from monitor.recording.state_watch import Mirror
from monitor.sharding import ShardedMemory

TENSORS = {
    ("weight", "a"): torch.arange(6.0).reshape(2, 3),
    ("weight", "b"): torch.arange(4.0),
    ("buffer", "count"): torch.tensor(3),
    ("optimizer", "a/m"): torch.zeros(2, 3),
    ("gradient", "none"): torch.zeros(0),
}


@pytest.fixture
def memory():
    return ShardedMemory({key: tensor.clone() for key, tensor in TENSORS.items()}, 2)


def test_what_differs_is_named_until_the_mirror_follows(memory):
    mirror = Mirror(memory)
    assert mirror.differing() == []
    memory.tensors["weight", "b"][3] = -0.0
    memory.tensors["buffer", "count"].fill_(4)
    assert sorted(mirror.differing()) == ["buffer/count", "weight/b"]
    assert mirror.tensors["weight/b"][3] == 3
    mirror.follow()
    assert mirror.differing() == []
    assert {name: tensor.tolist() for name, tensor in mirror.tensors.items()} == {
        name: tensor.tolist() for name, tensor in memory.export().items()
    }


def test_zeros_of_two_signs_and_nans_are_told_apart_by_their_bits(memory):
    mirror = Mirror(memory)
    memory.tensors["optimizer", "a/m"][0, 0] = -0.0
    assert mirror.differing() == ["optimizer/a/m"]
    memory.tensors["optimizer", "a/m"][0, 0] = float("nan")
    mirror.follow()
    assert mirror.differing() == []


@given(st.integers(0, 3_000_000), st.integers(0, 2**31 - 1), st.sampled_from([torch.int8, torch.float32]))
def test_large_tensors_are_copied_and_compared_piece_by_piece(size, place, dtype):
    source = torch.arange(size).to(dtype)
    target = torch.full_like(source, 1)
    copy_over(target, source)
    assert same_bytes(target, source)
    if size:
        target.view(torch.uint8)[place % target.nbytes] ^= 1
        assert not same_bytes(target, source)
