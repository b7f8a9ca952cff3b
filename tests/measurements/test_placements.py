"""The verdicts that labs may get while a party misbehaves; ``attacks/test_law_8_rounds.py`` plays rounds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from inspector.rounds.world import World
from monitor.lab.rounds import LabSide
from tests.measurements.placements import LABS, OUTSIDER, Case, Found, wrongs


@pytest.mark.parametrize(
    ("party", "lab", "outcome", "is_wrong"),
    [
        ("liar", "liar", "INCONCLUSIVE", False),
        ("liar", "liar", "ACCEPT", True),
        (OUTSIDER, "liar", "INCONCLUSIVE", True),
        ("lab-a", "lab-a", "INCONCLUSIVE", False),
        ("lab-a", "lab-b", "INCONCLUSIVE", True),
        ("liar", "lab-b", "none", True),
    ],
)
def test_a_lab_that_damages_its_own_opening_is_left_open_and_nobody_else_is(
    tmp_path: Path, party: str, lab: str, outcome: Any, is_wrong: bool
) -> None:
    case = Case(World.create(tmp_path / "world", LabSide), {}, random.Random(0), party, placements=1)
    outcomes = {each: "REJECT" if each == "liar" else "ACCEPT" for each in LABS} | {lab: outcome}
    assert bool(wrongs(case, Found(outcomes=outcomes))) == is_wrong
