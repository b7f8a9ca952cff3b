"""Many messages hashed in one call: the digests of hashlib, of whatever the memory holds then."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from firmware_sim.evidence import batch_hashing
from firmware_sim.evidence.batch_hashing import Messages, compiled
from firmware_sim.evidence.blocks import BlockSlice, ReadyBlocks, hash_blocks
from firmware_sim.evidence.digest import BLAKE3, DEFAULT_ALGORITHM

MIB = 1 << 20


@pytest.fixture
def fresh():
    """Compile anew in the test, and again behind it."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def expected(messages):
    return [hashlib.sha256(head + bytes(body)).digest() for head, body in messages]


def messages_of_many_lengths():
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    lengths = [0, 1, 54, 55, 56, 63, 64, 65, 119, 2047, 2048, 2049, 1 << 16]
    return data, [(bytes(head), memoryview(data.data)[:length]) for head in (0, 1, 60, 64, 200) for length in lengths]


def test_digests_are_those_of_hashlib_at_every_length():
    _, messages = messages_of_many_lengths()
    assert compiled() is not None
    assert Messages(messages).digests() == expected(messages)
    assert Messages([]).digests() == []


def test_digests_are_of_what_the_memory_holds_now():
    data, messages = messages_of_many_lengths()
    ready = Messages(messages)
    before = ready.digests()
    data += 1
    assert ready.digests() == expected(messages) != before


def test_kernel_holds_no_lock():
    kernel: Any = compiled()
    assert kernel.targetoptions["nogil"] is True


@pytest.mark.usefixtures("fresh")
def test_where_libcrypto_is_hidden_hashlib_does_it(monkeypatch):
    monkeypatch.setattr(batch_hashing, "_FUNCTIONS", {"SHA256_Nothing": 1})
    _, messages = messages_of_many_lengths()
    assert compiled() is None
    assert Messages(messages).digests() == expected(messages)


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_hashes_otherwise_is_not_used(monkeypatch):
    monkeypatch.setattr(batch_hashing, "sha256_of", lambda head, body: bytes(32))
    assert compiled() is None
    monkeypatch.undo()
    compiled.cache_clear()
    assert compiled() is not None


@pytest.mark.parametrize("algorithm", [DEFAULT_ALGORITHM, BLAKE3])
@pytest.mark.parametrize("size", [1000, 2 * MIB + 3, 9 * MIB + 5])  # by hashlib, by one kernel, by one for each thread
def test_ready_blocks_have_the_leaves_of_all_blocks(algorithm, size):
    data = np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8)
    small = np.arange(7, dtype=np.uint8)
    slices = [
        BlockSlice("weight", "w", "uint8", data.shape, 1, 0, data),
        BlockSlice("buffer", "b", "uint8", small.shape, 0, 0, small),
    ]
    ready = ReadyBlocks(slices, algorithm)
    assert ready.leaves() == hash_blocks(slices, algorithm)
    data[-1] += 1
    assert ready.leaves() == hash_blocks(slices, algorithm)
