"""Files of a step to come, written beside the training: the same bytes, and nothing left of what no step came for."""

import hashlib
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monitor.files import Files
from monitor.transcript import Ahead, encode_state, state_pieces

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool)


@given(
    st.dictionaries(
        st.text("abc/.", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_pieces_are_the_bytes_of_the_encoding(layout):
    state = {
        name: torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape).to(dtype)
        for name, (dtype, shape) in layout.items()
    }
    assert b"".join(state_pieces(state)) == encode_state(state)


def test_pieces_of_a_transposed_tensor_are_those_of_its_elements_in_order():
    state = {"weight/a": torch.arange(6.0).reshape(2, 3).T}
    assert b"".join(state_pieces(state)) == encode_state(state)


def test_what_is_staged_is_there_with_its_digest(tmp_path):
    ahead = Ahead(Files(), str(tmp_path / "staging" / "file"), lambda: [memoryview(b"ab"), memoryview(b"c")])
    staged = ahead.staged()
    assert Path(staged.path).read_bytes() == b"abc"
    assert (staged.entry.length, staged.entry.sha256) == (3, hashlib.sha256(b"abc").hexdigest())


def test_what_is_forgotten_leaves_no_file_and_no_thread(tmp_path):
    ahead = Ahead(Files(), str(tmp_path / "file"), lambda: [memoryview(b"abc")])
    ahead.forget()
    assert not list(tmp_path.iterdir())
    assert not [each for each in threading.enumerate() if each.name == "chipwitness-ahead"]


def test_an_error_of_the_thread_is_raised_where_the_file_is_asked_for(tmp_path):
    def fail():
        raise OSError("no room")

    ahead = Ahead(Files(), str(tmp_path / "file"), fail)
    with pytest.raises(OSError, match="no room"):
        ahead.staged()
