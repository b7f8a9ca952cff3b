"""What a device found of samples and weights has one form."""

from __future__ import annotations

import pytest

from firmware_sim.errors import EvidenceError
from inspector.rules.observations import Examined

NAME = "ab" * 32
COUNTED = {
    **dict.fromkeys(("places", "matched", "unclear", "hidden", "batches", "constants", "tensors", "unopened"), 2),
    "first": [1, 0],
    "at": ["state", 3],
}
FOUND = {"data": {NAME: COUNTED}, "scores": {NAME: None, f"{NAME}/{NAME}": {NAME: 2.5}}}


def changed(**counts):
    return {**FOUND, "data": {NAME: {**COUNTED, **counts}}}


def test_it_is_read_back():
    assert Examined.from_json(FOUND).to_json() == FOUND
    assert Examined.from_json(changed(hidden=0, at=None)).data[NAME].at is None


@pytest.mark.parametrize(
    "found",
    [
        changed(matched=3),
        changed(matched=0),
        changed(first=None),
        changed(hidden=0),
        changed(at=None),
        changed(at=["weight", 3]),
        changed(at=["state", -1]),
        changed(at=["state"]),
        changed(at=[["state"], 3]),
        changed(tensors=-1),
        changed(tensors=True),
        changed(more=1),
        {**FOUND, "data": {NAME: None}},
        {**FOUND, "data": {"ab": COUNTED}},
        {**FOUND, "scores": {NAME: 2.5}},
        {**FOUND, "scores": {NAME: {}}},
        {**FOUND, "scores": {NAME: {NAME: float("nan")}}},
        {**FOUND, "scores": {NAME: {"ab": 2.5}}},
        {**FOUND, "scores": {f"{NAME}/": None}},
    ],
)
def test_any_other_form_is_refused(found):
    with pytest.raises(EvidenceError, match=r"malformed|extra keys|contradict"):
        Examined.from_json(found)
