from __future__ import annotations

import pytest

from tests.measurements.machines import run, verdict


def test_two_labs_hand_over_heads_and_open_their_runs() -> None:
    (row,) = run(labs=[2])
    assert row["labs"] == 2
    assert row["files"] >= 2
    assert min(row[stage] for stage in ("heads", "answers", "order", "openings")) > 0
    assert verdict([row]) is None


@pytest.mark.parametrize(("seconds", "megabytes"), [(61, 900), (50, 1001)])
def test_a_target_that_is_missed_is_told(seconds: float, megabytes: float) -> None:
    assert verdict([{"labs": 200, "seconds": seconds, "megabytes": megabytes}])
