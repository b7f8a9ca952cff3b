"""Laws of the retention of checkpoints."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from monitor.declaration.statement import is_retained

EVERY = st.integers(1, 7)
KEEP = st.integers(1, 9)


def retained(committed: int, every: int, keep: int | None) -> list[int]:
    """Numbers of the checkpoints that have to be there."""
    steps = range(0, max(committed, 1), every)
    return [step // every for step in steps if is_retained(step, committed, every=every, keep=keep)]


@given(st.integers(0, 2000), EVERY, KEEP)
def test_first_and_newest_stay_and_the_count_grows_with_the_logarithm(committed, every, keep):
    newest = max(committed - 1, 0) // every
    kept = retained(committed, every, keep)
    assert kept[0] == 0
    assert set(range(max(newest - keep + 1, 0), newest + 1)) <= set(kept)
    assert len(kept) <= 1 + keep * newest.bit_length()


@given(st.integers(0, 2000), EVERY, KEEP)
def test_older_ones_lie_no_further_apart_than_their_age_allows(committed, every, keep):
    kept = retained(committed, every, keep)
    for earlier, later in itertools.pairwise(kept):
        assert later - earlier <= max(1, 2 * (kept[-1] - earlier) / keep)


@given(st.integers(0, 500), st.integers(0, 300), EVERY, KEEP)
def test_what_is_released_is_never_asked_for_again(committed, more, every, keep):
    newest = max(committed - 1, 0) // every
    later = [number for number in retained(committed + more, every, keep) if number <= newest]
    assert set(later) <= set(retained(committed, every, keep))


@given(st.integers(0, 500), EVERY, KEEP)
def test_no_checkpoint_is_released_before_a_newer_one_is_committed(committed, every, keep):
    """The newest and whatever comes with the steps after it stay, the last of an uneven length among them."""
    newest = max(committed - 1, 0) // every * every
    assert all(is_retained(step, committed, every=every, keep=keep) for step in range(newest, committed + every + 1))


@given(st.integers(0, 500), EVERY)
def test_without_a_policy_all_stay(committed, every):
    assert retained(committed, every, None) == list(range(max(committed - 1, 0) // every + 1))
