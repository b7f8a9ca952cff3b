"""What ranks sign of what they give each other, without processes: one plays each rank."""

from __future__ import annotations

import pytest
import torch

from firmware_sim.errors import EvidenceError
from monitor.distributed.statements import Label, Statements, rank_key, read_complaints

RUN = "00" * 32
KEYS = [rank_key("secret", rank) for rank in range(3)]
LABEL = Label("chunk", ("weight", "bias"), 1)
PARTS = [torch.arange(3.0) + rank for rank in range(3)]


@pytest.fixture
def ranks(tmp_path):
    made = [Statements(tmp_path / "run", RUN, rank, KEYS[rank], [key.verifying for key in KEYS]) for rank in range(3)]
    for each in made:
        each.begin(5)
    return made


def said(tmp_path):
    return read_complaints(tmp_path / "run", RUN, {1: [key.verifying for key in KEYS]})


def test_what_was_signed_is_taken(ranks, tmp_path):
    seal = ranks[0].give(LABEL, PARTS)
    for rank in (1, 2):
        ranks[rank].require(0, LABEL, seal, PARTS[rank].clone())
    everybody = ranks[1].give(Label("sum", ("weight",)), PARTS[:1])
    ranks[2].require(1, Label("sum", ("weight",)), everybody, PARTS[0])
    assert said(tmp_path) == []


@pytest.mark.parametrize(
    "what", ["other bytes", "for another", "another label", "another step", "another's", "no seal"]
)
def test_what_was_not_signed_stops_whoever_gets_it(ranks, tmp_path, what):
    label, part = LABEL, PARTS[2]
    if what == "other bytes":
        part = part + 1
    elif what == "for another":
        part = PARTS[1]
    elif what == "another label":
        label = Label("chunk", ("weight", "bias"), 2)
    elif what == "another step":
        ranks[0].begin(4)
    seal = ranks[1 if what == "another's" else 0].give(LABEL, PARTS)
    if what == "no seal":
        seal = bytes(len(seal))
    with pytest.raises(
        EvidenceError, match="step 5: rank 2 got chunk of weight … bias from rank 0, with bytes that rank 0"
    ):
        ranks[2].require(0, label, seal, part)
    [(step, rank, text)] = said(tmp_path)
    assert (step, rank) == (5, 2)
    assert "with bytes that rank 0 did not sign: one of the two ranks, or the connection between them, is at" in text


def test_who_signs_other_things_for_others_is_found_out(ranks, tmp_path):
    """Each of the seals is sound, and agrees with the bytes beside it."""
    label = Label("weight", ("weight",))
    first = ranks[0].give(label, PARTS[:1])
    second = ranks[0].give(label, PARTS[1:2])
    for rank, seal in ((1, first), (2, second)):
        ranks[rank].note(0, seal)
    ranks[1].require_same(1, ranks[1].seals())
    with pytest.raises(EvidenceError, match="rank 1 got seals of rank 0, with bytes that differ from what rank 2 got"):
        ranks[1].require_same(2, ranks[2].seals())
    assert len(said(tmp_path)) == 1


def test_a_forged_complaint_is_an_error(ranks, tmp_path):
    with pytest.raises(EvidenceError):
        ranks[2].require(0, LABEL, ranks[0].give(LABEL, PARTS), PARTS[1])
    [path] = (tmp_path / "run.ranks").glob("complaint-*")
    path.rename(path.with_name("complaint-00000005-0001.json"))
    with pytest.raises(EvidenceError, match=r"complaint-00000005-0001\.json"):
        said(tmp_path)
