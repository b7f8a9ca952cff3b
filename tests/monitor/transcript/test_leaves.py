"""Leaves of a run are decoded when they are asked for, and a bounded number of them is kept."""

from __future__ import annotations

import pytest

from firmware_sim.errors import EvidenceError
from monitor.transcript import listing
from monitor.transcript.listing import Leaves


@pytest.fixture
def counted(monkeypatch):
    """Leaves of 10 steps (numbers stand for them), 3 of which are kept, and the steps that were decoded."""
    monkeypatch.setattr(listing, "_KEPT", 3)
    read: list[int] = []

    def decode(step):
        read.append(step)
        return step

    return Leaves(decode, 10), read


def test_a_part_is_read_from_the_whole(counted):
    whole, read = counted
    part = whole[2:5]
    assert read == []
    assert (len(whole), len(part), part[0], part[-1], list(part)) == (10, 3, 2, 4, [2, 3, 4])
    assert read == [2, 4, 3]
    with pytest.raises(IndexError):
        part[3]
    with pytest.raises(IndexError):
        whole[10]


def test_few_are_kept(counted):
    whole, read = counted
    assert list(whole) == list(whole) == list(range(10))
    assert len(read) == 20
    assert (whole[9], whole[8], whole[7]) == (9, 8, 7)
    assert len(read) == 20


def test_errors_come_through():
    def gone(step):
        raise EvidenceError(f"step {step} was altered")

    with pytest.raises(EvidenceError, match="step 1 was altered"):
        Leaves(gone, 3)[1]
