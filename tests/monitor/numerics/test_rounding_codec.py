"""The sparse log code: one encoding for each list of groups, and every other byte string is an error."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from monitor.numerics.rounding.bounds import Bound, Formats
from monitor.numerics.rounding.codec import Group, decode, encode

FORMATS, BOUND = Formats(), Bound()


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    keys = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=5, unique=True))
    out = []
    for call, part in sorted(keys):
        size = draw(st.integers(1, 5000))
        positions = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=40)))
        upward = draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
        out.append(
            Group(call=call, part=part, size=size, positions=np.array(positions), upward=np.array(upward, dtype=bool))
        )
    return out


@given(group_lists())
@settings(max_examples=80, deadline=None)
def test_decoding_inverts_encoding(groups: list[Group]) -> None:
    log = encode(groups, FORMATS, BOUND)
    back = decode(log, FORMATS, BOUND)
    assert [(g.call, g.part, g.size) for g in back] == [(g.call, g.part, g.size) for g in groups]
    for one, two in zip(back, groups, strict=True):
        np.testing.assert_array_equal(one.positions, two.positions)
        np.testing.assert_array_equal(one.upward, two.upward)
    assert encode(back, FORMATS, BOUND) == log


def test_a_log_about_more_results_than_any_step_has_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROUNDING_LOG_GROUPS", limits.Limit(3, "results"))
    first = Group(call=0, part=0, size=1, positions=np.array([0]), upward=np.array([True]))
    groups = [replace(first, call=number) for number in range(4)]
    assert len(decode(encode(groups[:3], FORMATS, BOUND), FORMATS, BOUND)) == 3
    with pytest.raises(EvidenceError, match="4 results; at most 3 are read"):
        encode(groups, FORMATS, BOUND)
    monkeypatch.undo()
    log = encode(groups, FORMATS, BOUND)
    monkeypatch.setattr(limits, "ROUNDING_LOG_GROUPS", limits.Limit(3, "results"))
    with pytest.raises(EvidenceError, match="4 results; at most 3 are read"):
        decode(log, FORMATS, BOUND)


@given(group_lists(), st.data())
@settings(max_examples=150, deadline=None)
def test_an_altered_log_is_an_error_or_other_groups_never_a_second_spelling(
    groups: list[Group], data: st.DataObject
) -> None:
    log = bytearray(encode(groups, FORMATS, BOUND))
    at = data.draw(st.integers(0, len(log) - 1))
    log[at] ^= data.draw(st.integers(1, 255))
    try:
        back = decode(bytes(log), FORMATS, BOUND)
    except EvidenceError:
        return
    assert encode(back, FORMATS, BOUND) == bytes(log)


@given(group_lists(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_shortened_log_never_decodes_to_the_same_groups(groups: list[Group], data: st.DataObject) -> None:
    log = encode(groups, FORMATS, BOUND)
    cut = log[: data.draw(st.integers(0, len(log) - 1))]
    with contextlib.suppress(EvidenceError):
        assert len(decode(cut, FORMATS, BOUND)) < len(groups)


@pytest.mark.parametrize(
    "junk", [b"", b"CWR2", b"CWR2\0", b"CWR2\1\0", b"CWR2\0\1", b"XXXX\0\0", b"CWR1\0\0", b"CWR2\0\0\0"]
)
def test_headers_of_another_kind_are_errors(junk: bytes) -> None:
    with pytest.raises(EvidenceError):
        decode(junk, FORMATS, BOUND)


def test_bits_per_entry_stay_near_the_entropy() -> None:
    """n = 20 densities, seed 11: the code stays within 1.2 × entropy + 16 bytes at 10,000 entries and more."""
    generator = np.random.default_rng(11)
    for density in np.geomspace(1e-4, 0.3, 20):
        size = int(12_000 / density)
        positions = np.flatnonzero(generator.random(size) < density)
        upward = generator.random(len(positions)) < 0.5
        log = encode([Group(call=9, part=0, size=size, positions=positions, upward=upward)], FORMATS, BOUND)
        p = len(positions) / size
        entropy = -size * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) + len(positions)
        assert 8 * (len(log) - 16) <= 1.2 * entropy
