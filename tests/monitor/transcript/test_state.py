"""States as files: one encoding for each, whatever was read before."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save

from firmware_sim.errors import EvidenceError
from monitor.transcript import state as states
from monitor.transcript.state import decode_state, encode_state

STATE = {
    "weight/b": torch.tensor([[1.0, -0.0], [float("nan"), 2.0]]),
    "weight/a": torch.arange(5),
    "optimizer/a/step": torch.tensor(3.0),
    "flag": torch.tensor([True, False]),
    "none": torch.empty(0, 3),
}


@pytest.fixture(autouse=True)
def nothing_was_read():
    states._header.cache_clear()


def padded(data: bytes) -> bytes:
    """The same tensors under a header with eight spaces more."""
    size = int.from_bytes(data[:8], "little")
    return struct.pack("<Q", size + 8) + data[8 : 8 + size] + b" " * 8 + data[8 + size :]


def spaced(data: bytes) -> bytes:
    """The same tensors under a header that is as long, with its spaces elsewhere."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    text = header.rstrip(b" ")
    moved = text[:1] + b" " * (len(header) - len(text)) + text[1:]
    return data[:8] + moved + data[8 + size :]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", [padded, spaced])
def test_another_encoding_of_a_state_is_refused_also_after_the_canonical_one(change, first):
    state = {**STATE, "x" * next(n for n in range(8) if _spaces({**STATE, "x" * n: torch.ones(1)})): torch.ones(1)}
    data = encode_state(state)
    assert change(data) != data
    if first:
        decode_state(data, "state")
    with pytest.raises(EvidenceError, match="canonical encoding"):
        decode_state(change(data), "state")
    decode_state(data, "state")


def _spaces(state: dict[str, torch.Tensor]) -> int:
    data = encode_state(state)
    size = int.from_bytes(data[:8], "little")
    return size - len(data[8 : 8 + size].rstrip(b" "))


def test_each_state_of_a_layout_is_read_as_it_was_written():
    for scale in (1.0, -3.5, 0.0):
        state = {name: (tensor * scale).to(tensor.dtype) for name, tensor in STATE.items()}
        found = decode_state(encode_state(state), "state")
        assert found.keys() == state.keys()
        assert all(found[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in state.items())
        assert encode_state(found) == encode_state(state)


def test_the_encoding_is_that_of_the_formats_own_writer():
    dtypes = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.int16, torch.uint8)
    state = {f"{dtype}/{size}": torch.ones(size).to(dtype) for dtype in dtypes for size in ((), (3,), (0, 2), (2, 3))}
    state |= {'a"\\\n\x7f\x01é…\U0001f600': torch.ones(2), "": torch.zeros(1), **STATE}
    assert encode_state(state) == save(state)
    assert encode_state({}) == save({})
    for given in (encode_state(state), bytearray(encode_state(state))):
        found = decode_state(given, "state")
        assert found.keys() == state.keys()
        assert all((found[name].dtype, found[name].shape) == (each.dtype, each.shape) for name, each in state.items())
        assert encode_state(found) == encode_state(state)


@pytest.mark.parametrize("entry", [{"dtype": ["F32"]}, {"dtype": "F7"}, {"dtype": "F64"}, {"data_offsets": [0, 4]}])
def test_a_header_that_says_something_else_is_refused(entry):
    data = encode_state({"a": torch.ones(2)})
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["a"] |= entry
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(EvidenceError, match="not safetensors"):
        decode_state(struct.pack("<Q", len(text)) + text + data[8 + size :], "state")


@pytest.mark.parametrize("change", [lambda data: data + bytes(8), lambda data: data[:-1], lambda data: b""])
def test_a_file_of_another_length_is_refused_also_after_the_canonical_one(change):
    data = encode_state(STATE)
    decode_state(data, "state")
    with pytest.raises(EvidenceError, match="not safetensors"):
        decode_state(change(data), "state")


def test_few_headers_are_kept():
    for number in range(40):
        decode_state(encode_state({f"weight/{number}": torch.ones(2)}), "state")
    assert states._header.cache_info().currsize == 16
