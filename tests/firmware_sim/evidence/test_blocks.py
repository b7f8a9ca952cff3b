from __future__ import annotations

import hashlib
import math
import struct
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from firmware_sim.evidence import (
    BLAKE3,
    DTYPE_SIZES,
    BlockSlice,
    MerkleTree,
    Node,
    block_elements,
    block_places,
    blocks_of,
    hash_blocks,
    length_prefixed,
    merge,
    part_digest,
    root_digest,
    subtrees,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("dtype", "shape", "elements"),
    [
        ("float32", (), MIB // 4),
        ("float32", (7,), 37449 * 7),  # a short row fits many times
        ("float32", (50257, 768), 341 * 768),
        ("bfloat16", (50257, 768), 682 * 768),
        ("float32", (1, 1 << 24), MIB // 4),  # a row that is too long is cut anywhere
        ("float32", (64, 64, 3, 3), 7 * 64 * 64 * 9),
        ("int64", (3, 5, 1 << 17), 1 << 17),
        ("float64", (0, 5), MIB // 8 // 5 * 5),
        ("uint8", (5, 0), MIB),
    ],
)
def test_a_block_is_whole_rows_of_a_mebibyte_at_most(dtype, shape, elements):
    assert block_elements(dtype, shape) == elements


@given(st.sampled_from(sorted(DTYPE_SIZES)), st.lists(st.integers(0, 3000), max_size=4).map(tuple), st.data())
def test_every_element_lies_in_one_block(dtype, shape, data):
    total, step = math.prod(shape), block_elements(dtype, shape)
    assert 0 < step * DTYPE_SIZES[dtype] <= MIB
    offset = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - offset))
    reached = blocks_of(dtype, shape, offset, count)
    if total and count:
        assert reached.start * step <= offset < (reached.start + 1) * step
        assert (reached.stop - 1) * step < offset + count <= reached.stop * step
    else:
        assert len(reached) == (not total)
    assert len(blocks_of(dtype, shape, 0, total)) == max(-(-total // step), 1)


def _leaf(kind, name, dtype, shape, low, elements, data):
    header = length_prefixed("chipwitness/block/1", "sha256-tree/1048576", kind, name, dtype)
    return header + struct.pack(f">Q{len(shape)}QQQ", len(shape), *shape, low, elements) + data


def test_root_is_that_of_rfc_9162_over_typed_blocks():
    """The format written down a second time; the log's tree, known from test vectors, gives the root."""
    data = np.random.default_rng(1).integers(0, 256, 5 * MIB // 2, dtype=np.uint8)
    slices = [
        BlockSlice("weight", "a", "uint8", (len(data),), 1, 0, data),
        BlockSlice("buffer", "none", "int64", (0, 3), 0, 0, b""),
    ]
    leaves = [_leaf("buffer", "none", "int64", (0, 3), 0, 0, b"")]
    for low in range(0, len(data), MIB):
        part = data[low : low + MIB].tobytes()
        leaves.append(_leaf("weight", "a", "uint8", (len(data),), low, len(part), part))
    nodes = hash_blocks(slices)
    root = MerkleTree(leaves).root()
    header = length_prefixed("chipwitness/state/1", "sha256-tree/1048576") + struct.pack(">Q", 4)
    assert root_digest(nodes).value == hashlib.sha256(b"\x02" + header + root).digest()
    assert root_digest(nodes).value.hex() == "80cc7e78c57cc069e73111b3bfa118bf6b5ccb05203fb186abbb5a02c6337d70"


@given(st.integers(0, 70), st.lists(st.integers(0, 70), max_size=8))
def test_root_does_not_depend_on_how_far_it_is_opened(count, cuts):
    leaves = [Node(number, 1, hashlib.sha256(b"%d" % number).digest()) for number in range(count)]
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    opened = [node for low, high in pairwise(edges) for node in merge(leaves[low:high])]
    shape = [tree for low, high in pairwise(edges) for tree in subtrees(low, high)]
    assert [(node.start, node.size) for node in opened] == shape
    assert all(start % size == 0 for start, size in shape)
    assert root_digest(opened) == root_digest(leaves)
    assert merge(opened) == merge(leaves)


@given(st.integers(1, 40), st.data())
def test_a_parts_digest_tells_its_blocks_apart_from_all_others(count, data):
    leaves = [Node(number, 1, hashlib.sha256(b"%d" % number).digest()) for number in range(count)]
    held = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    other = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    first, second = (part_digest(merge(leaves[number] for number in sorted(part))) for part in (held, other))
    assert (first == second) == (held == other)
    changed = data.draw(st.sampled_from(sorted(held)))
    leaves[changed] = Node(changed, 1, bytes(32))
    assert part_digest(merge(leaves[number] for number in sorted(held))) != first


def _of(dtype, shape, *, kind="weight", name="w", place=0, data=None):
    data = bytes(range(24)) if data is None else data
    return part_digest(hash_blocks([BlockSlice(kind, name, dtype, shape, place, 0, data)]))


def test_the_same_bytes_of_another_tensor_are_another_block():
    digest = _of("float32", (6,))
    flipped = bytes([*range(23), 23 ^ 1])
    others = [
        _of("int32", (6,)), _of("float32", (2, 3)), _of("float32", (6,), name="v"), _of("float32", (6,), place=1),
        _of("float32", (6,), kind="gradient"), _of("float32", (6, 1)), _of("float32", (6,), data=flipped),
    ]  # fmt: skip
    assert len({digest, *others}) == len(others) + 1


def test_threads_give_the_same_leaves():
    data = np.random.default_rng(2).integers(0, 256, 6 * MIB + 5, dtype=np.uint8)
    whole = hash_blocks([BlockSlice("weight", "w", "uint8", data.shape, 0, 0, data)])
    for block in range(7):
        part = data[block * MIB : (block + 1) * MIB]
        assert hash_blocks([BlockSlice("weight", "w", "uint8", data.shape, 0, block, part)]) == whole[block : block + 1]


def test_blake3_gives_other_leaves():
    pytest.importorskip("blake3")
    part = BlockSlice("weight", "w", "uint8", (5,), 0, 0, b"12345")
    assert hash_blocks([part], BLAKE3) != hash_blocks([part])


@pytest.mark.parametrize(
    ("first", "data"),
    [
        (0, bytes(MIB - 1)),  # a block that ends early
        (0, b""),
        (1, bytes(MIB)),  # the last block has one byte
        (2, bytes(1)),  # there is no such block
        (0, bytes(MIB + 2)),
    ],
)
def test_anything_but_whole_blocks_is_refused(first, data):
    with pytest.raises(CallerError, match="are not whole blocks"):
        hash_blocks([BlockSlice("weight", "w", "uint8", (MIB + 1,), 0, first, data)])


def test_unknown_algorithm_is_refused():
    with pytest.raises(CallerError, match="unknown digest algorithm"):
        hash_blocks([], "sha256")


def test_places_follow_kind_and_name_and_count_without_touching_a_block():
    tensors = {
        ("weight", "b"): ("float32", (1 << 18,)),
        ("weight", "a"): ("uint8", (5 * MIB + 1,)),
        ("gradient", "z"): ("float32", (0,)),
        ("buffer", "huge"): ("uint8", (1 << 60,)),
    }
    start = time.perf_counter()
    places, count = block_places(tensors)
    assert time.perf_counter() - start < 1
    huge = 1 << 40
    assert list(places.items()) == [
        (("buffer", "huge"), 0),
        (("gradient", "z"), huge),
        (("weight", "a"), huge + 1),
        (("weight", "b"), huge + 7),
    ]
    assert count == huge + 8
