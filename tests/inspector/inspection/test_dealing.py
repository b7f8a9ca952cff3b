"""Which device replays which of the chosen segments."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.sampling import choose
from inspector.replay.segment import Segment

DEVICES = ("sse41", "mkl-compatible", "native")


def settings(shared: float, devices: int) -> Settings:
    return Settings(samples=1, seed=None, devices=DEVICES[:devices], shared=shared)


@given(
    count=st.integers(1, 40),
    shared=st.floats(0, 1),
    devices=st.integers(1, 3),
    secret=st.binary(min_size=1, max_size=8),
)
def test_each_segment_has_a_device_and_the_share_has_all(count, shared, devices, secret):
    every = [Segment(index, index, index + 1) for index in range(count)]
    steps = set(range(1, count + 1))
    seed = hashlib.sha256(secret).digest()
    chosen = choose(every, steps, settings(shared, devices), seed, evaluations={})
    held = [sum(segment in mine for mine in chosen.dealt.values()) for segment in chosen.segments]
    assert set(held) <= {1, devices}
    if devices > 1:
        assert held.count(devices) >= shared * count > held.count(devices) - 1
    alone = [sum(held[chosen.segments.index(each)] == 1 for each in mine) for mine in chosen.dealt.values()]
    assert devices == 1 or len(chosen.dealt) < devices or max(alone) - min(alone) <= 1
    assert all(list(mine) == sorted(mine) and mine for mine in chosen.dealt.values())


def test_the_draw_decides_which_device_has_which_segment():
    every = [Segment(index, index, index + 1) for index in range(12)]
    seeds = [bytes([seed]) * 32 for seed in range(20)]
    chosen = [choose(every, set(range(13)), settings(0.0, 2), seed, evaluations={}) for seed in seeds]
    dealt = {tuple(each.index for each in one.dealt["sse41"]) for one in chosen}
    assert len(dealt) > 15


@pytest.mark.parametrize("shared", [-0.1, 1.1, float("nan")])
def test_a_share_lies_between_none_and_all(shared):
    with pytest.raises(CallerError, match="must lie in"):
        choose([Segment(0, 0, 1)], set(), settings(shared, 1), bytes(32), evaluations={})


def test_a_device_that_is_named_twice_is_one():
    """Otherwise what falls to its other name is replayed by none."""
    every = [Segment(index, index, index + 1) for index in range(6)]
    twice = Settings(samples=1, seed=None, devices=("sse41", "native", "sse41"), shared=0.0)
    chosen = choose(every, set(range(7)), twice, bytes(32), evaluations={})
    assert sorted(each.index for mine in chosen.dealt.values() for each in mine) == list(range(6))
    once = replace(twice, devices=("sse41", "native"))
    assert chosen.dealt == choose(every, set(range(7)), once, bytes(32), evaluations={}).dealt
