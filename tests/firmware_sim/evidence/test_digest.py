from __future__ import annotations

import hashlib
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    BLAKE3,
    DEFAULT_ALGORITHM,
    SHA256,
    SHA256_LIST,
    Digest,
    MerkleTree,
    digest_bytes,
    digest_list,
    digest_tensor,
    length_prefixed,
)

MIB = 1 << 20
TENSOR: dict[str, Any] = {"name": "w", "dtype": "float32", "shape": (4, 3), "offset": 0, "data": bytes(range(48))}


def _pack(text):
    return struct.pack(">Q", len(text)) + text.encode()


def _reference(name, dtype, shape, offset, data):
    """The digest's specification spelled out, on one thread and with copies."""
    tree = MerkleTree(data[start : start + MIB] for start in range(0, len(data), MIB))
    header = _pack("chipwitness/tensor/1") + _pack("sha256-tree/1048576") + _pack(name) + _pack(dtype)
    header += b"".join(struct.pack(">Q", n) for n in (len(shape), *shape, offset, len(data), MIB, tree.size))
    return hashlib.sha256(b"\x02" + header + tree.root()).hexdigest()


@pytest.mark.parametrize("length", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, 4 * MIB - 1, 4 * MIB, 9 * MIB + 7])
def test_tensor_digest_is_that_of_the_definition(length):
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    digest = digest_tensor(name="x", dtype="uint8", shape=(length + 5,), offset=3, data=data)
    assert digest.algorithm == DEFAULT_ALGORITHM == "sha256-tree/1048576"
    assert digest.value.hex() == _reference("x", "uint8", (length + 5,), 3, data.tobytes())


def test_known_digests():
    """Goldens: a change here breaks every recorded transcript."""
    assert str(digest_bytes("label", b"data")) == GOLDEN["bytes"]
    assert str(digest_tensor(**TENSOR)) == GOLDEN["tensor"]
    assert str(digest_tensor(**TENSOR, algorithm=BLAKE3)) == GOLDEN["blake3"]
    assert str(digest_list("state", [("b", digest_bytes("x", b"")), ("a", digest_bytes("y", b""))])) == GOLDEN["list"]


GOLDEN = {
    "bytes": "sha256:9ea3c90c5742766f8201a1ee6a1f3a50349f0f56b8f92f43f19162e35263f8d0",
    "tensor": "sha256-tree/1048576:624e8d01ecd4d0a8c7ca35a273c466fa855a8353f3b1b8a93560efe02df7e59d",
    "blake3": "blake3:ea3b1818bacce28b90d8ba2cfdeff52d3e9158fe33e40b9b908c77cb6dcb1ef7",
    "list": "sha256-list:ae6f7abf875626cca261144dfd804f643ab3f4550408cbd20b266360e2e49d78",
}


@pytest.mark.parametrize("algorithm", [DEFAULT_ALGORITHM, BLAKE3])
@pytest.mark.parametrize(
    "change",
    [
        {"name": "v"},
        {"dtype": "int32"},
        {"dtype": "float16", "shape": (8, 3)},
        {"shape": (3, 4)},
        {"shape": (12,)},
        {"shape": (5, 3)},
        {"shape": (5, 3), "offset": 1},
        {"data": bytes(range(47)) + b"\x00"},
        {"data": bytes(range(44))},
    ],
)
def test_everything_about_a_tensor_is_bound(algorithm, change):
    assert digest_tensor(**TENSOR, algorithm=algorithm) != digest_tensor(**{**TENSOR, **change}, algorithm=algorithm)


def test_empty_and_scalar_tensors_have_digests():
    digests = {
        digest_tensor(name="e", dtype="float32", shape=shape, offset=0, data=data)
        for shape, data in [((0,), b""), ((0, 4), b""), ((3,), b""), ((), bytes(4)), ((1,), bytes(4))]
    }
    assert len(digests) == 5


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_buffer_kinds_agree(kind):
    assert digest_tensor(**{**TENSOR, "data": kind(TENSOR["data"])}) == digest_tensor(**TENSOR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
        ({"data": bytes(47)}, "47 bytes of float32 from element 0 do not lie in shape"),
        ({"data": bytes(52)}, "52 bytes of float32 from element 0 do not lie in shape"),
        ({"offset": 1}, "48 bytes of float32 from element 1 do not lie in shape"),
        ({"offset": -1}, "negative"),
        ({"shape": (-4, -3)}, "negative"),
        ({"algorithm": "md5"}, "unknown digest algorithm 'md5'"),
        ({"algorithm": SHA256}, "unknown digest algorithm 'sha256'"),
        ({"data": np.zeros((4, 6), np.float32)[:, ::2]}, "C-contiguous"),
    ],
)
def test_impossible_slices_are_the_callers_mistake(change, message):
    with pytest.raises(CallerError, match=message):
        digest_tensor(**{**TENSOR, **change})


def test_big_endian_machine_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CallerError, match="this machine is big-endian"):
        digest_tensor(**TENSOR)


def test_missing_blake3_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(CallerError, match=r"pip install 'chipwitness\[blake3\]'"):
        digest_tensor(**TENSOR, algorithm=BLAKE3)


@given(st.lists(st.text(max_size=3), unique=True, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_list_digest_ignores_order_only(names, random):
    items = [(name, digest_bytes(name, b"")) for name in names]
    digest = digest_list("l", items)
    shuffled = list(items)
    random.shuffle(shuffled)
    assert digest_list("l", shuffled) == digest
    assert digest_list("m", items) != digest
    assert digest_list("l", [*items, ("more than three", items[0][1])]) != digest
    assert digest_list("l", [(name, digest_bytes("other", b"")) for name in names]) != digest


def test_list_digest_refuses_duplicates_and_nothing():
    digest = digest_bytes("x", b"")
    with pytest.raises(CallerError, match="'state' holds the name 'a' twice"):
        digest_list("state", [("a", digest), ("b", digest), ("a", digest)])
    with pytest.raises(CallerError, match="'state' is empty"):
        digest_list("state", [])
    assert digest_list("state", [], allow_empty=True).algorithm == SHA256_LIST


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_length_prefixing_is_injective(left, right):
    assert (length_prefixed(*left) == length_prefixed(*right)) == (left == right)


@given(st.text(max_size=5), st.binary(max_size=5), st.text(max_size=5), st.binary(max_size=5))
def test_label_and_data_are_bound(label, data, other_label, other_data):
    same = (label, data) == (other_label, other_data)
    assert (digest_bytes(label, data) == digest_bytes(other_label, other_data)) == same


@given(st.sampled_from([SHA256, SHA256_LIST, DEFAULT_ALGORITHM, BLAKE3]), st.binary(min_size=32, max_size=32))
def test_digest_text_round_trips(algorithm, value):
    digest = Digest(algorithm, value)
    assert Digest.parse(str(digest)) == digest


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "sha256", "sha256:", "sha256:" + "0" * 63, "sha256:" + "0" * 65, "sha256:" + "A" * 64,
        "md5:" + "0" * 64,
        "SHA256:" + "0" * 64, " sha256:" + "0" * 64, "sha256:" + "0" * 64 + "\n", "sha256-tree/4096:" + "0" * 64,
        "sha256:" + "٠" * 64, None, 7, b"sha256:" + b"0" * 64,
    ],
)  # fmt: skip
def test_malformed_digest_text_is_refused(text):
    with pytest.raises(EvidenceError, match="digest"):
        Digest.parse(text)


@pytest.mark.parametrize(
    "arguments", [("md5", bytes(32)), (SHA256, bytes(31)), (SHA256, bytearray(32)), (SHA256, "0" * 32)]
)
def test_digest_cannot_be_built_invalid(arguments):
    with pytest.raises(CallerError):
        Digest(*arguments)
