"""Ranks that say what they are about to do: each difference is one line on every rank, within the deadline."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from firmware_sim.errors import CallerError
from monitor.distributed.roll_call import RollCall

LONG = 60.0


def called(*ranks, deadline=LONG):
    """How each rank ends, given what it does; all in threads of this process, in one store."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=LONG))

    def end(number, act):
        try:
            act(RollCall(store, number, len(ranks), deadline))
        except Exception as error:
            return f"{error}"
        return "done"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(end, range(len(ranks)), ranks))


def acts(*names, batch="float32[4]"):
    """Does these one after another."""

    def act(calls):
        for name in names:
            with calls.together(name, lambda: {"batch": batch}):
                pass
        calls.part()

    return act


def test_ranks_that_do_the_same_go_on_together():
    assert called(*[acts(*(f"takes step {number}" for number in range(9)))] * 3) == ["done"] * 3


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            acts("takes step 1", "calls finish()"),
            "rank 1 calls finish(), but rank 0 takes step 2; every rank has to create the",
        ),
        (
            acts("takes step 1", "takes step 2", batch="float32[3]"),
            "rank 1 takes step 1 with batch float32[3], but rank 0 ",
        ),
    ],
)
def test_a_rank_that_does_something_else_is_named_by_all(other, line):
    usual = acts("takes step 1", "takes step 2")
    ends = called(usual, other, usual)
    assert len(set(ends)) == 1
    assert ends[0].startswith(line)


def fails(calls):
    with calls.together("takes step 1"):
        raise ValueError("no memory\nand more")


def leaves(calls):
    with calls.together("takes step 1"):
        pass
    calls.leave()


@pytest.mark.parametrize(("act", "reason"), [(fails, "ValueError: no memory"), (leaves, "it left the job without fin")])
def test_a_rank_that_fails_or_leaves_keeps_no_other_waiting(act, reason):
    def usual(calls):
        for number in (1, 2):
            with calls.together(f"takes step {number}"):
                pass

    first, _, third = called(usual, act, usual)
    assert first.startswith(f"rank 1 failed: {reason}")
    assert third.startswith(f"rank 1 failed: {reason}")
    assert "\n" not in first


def test_a_rank_that_does_not_come_is_named_when_the_deadline_is_over():
    ends = called(acts("takes step 1"), lambda calls: None, deadline=0.2)
    assert ends[0].startswith(
        "rank 1 did not respond within 0.2 seconds, while rank 0 takes step 1; every rank has to create"
    )


def test_an_exchange_that_breaks_off_names_the_rank_that_failed():
    """A rank that gets no bytes any more looks for the reason among what the others have said."""

    has_failed = threading.Event()

    def breaks(calls):
        with calls.together("takes step 1"):
            has_failed.wait(LONG)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    def fails_first(calls):
        try:
            fails(calls)
        finally:
            has_failed.set()

    assert called(breaks, fails_first)[0] == "rank 1 failed: ValueError: no memory; rank 0 takes step 1"


def test_a_job_that_has_ended_takes_no_further_step():
    def again(calls):
        with pytest.raises(ValueError, match="no memory"):
            fails(calls)
        acts("takes step 2")(calls)

    assert called(again, again) == ["this job has ended: ValueError: no memory"] * 2


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_is_a_number_of_seconds(deadline):
    with pytest.raises(CallerError, match="a deadline must be a number of seconds above 0"):
        RollCall(None, 0, 1, deadline)
