"""The outline of a call determines its form in a program: equal outlines, equal forms, whatever the arguments are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import EvidenceError
from monitor.programs.capture import layout_outline, numbered, outline_of
from monitor.programs.trace import described, layout_of

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.sampled_from(["", "$tensor", "$number", "int", "mean"]),
    st.sampled_from([torch.float32, torch.int64, torch.strided, torch.contiguous_format, torch.channels_last]),
    st.sampled_from([torch.device("cpu"), torch.device("meta")]),
    st.builds(lambda: torch.zeros(2)),
)
ARGUMENTS = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)), max_leaves=6
)


def form(value):
    """The arguments as a program holds them, and their fractional numbers."""
    tensors: list[Any]
    numbers: list[Any]
    tensors, numbers = [], []
    return str(numbered(described(value, tensors), numbers)), len(tensors), numbers


def outlined(value):
    tensors: list[Any]
    numbers: list[Any]
    tensors, numbers = [], []
    return outline_of(value, tensors, numbers), len(tensors), numbers


@given(ARGUMENTS, ARGUMENTS)
def test_outlines_are_equal_where_forms_are(one, other):
    mine, theirs = outlined(one), outlined(other)
    assert (mine == theirs) == (form(one) == form(other))


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (1, 1.0), ("$tensor", torch.zeros(1)), (0, None)])
def test_values_that_python_takes_for_equal_or_alike_have_outlines_of_their_own(one, other):
    assert outlined([one])[0] != outlined([other])[0]


@given(ARGUMENTS)
def test_numbers_are_those_of_the_form_in_their_order(value):
    assert outlined(value)[2] == form(value)[2]


def test_what_no_program_can_hold_is_refused():
    with pytest.raises(EvidenceError, match="argument of type object"):
        outline_of([object()], [], [])


@given(st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.sampled_from([torch.float32, torch.int64]))
def test_results_of_one_outline_have_one_layout(shape, turned, dtype):
    one, other = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    if turned:
        one, other = one.mT.contiguous().mT if len(shape) > 1 else one, other
    if layout_outline([one]) == layout_outline([other]):
        assert layout_of(one) == layout_of(other)
