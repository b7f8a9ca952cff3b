"""What ``bench inspection`` promises of two workers: the whole inspection, not its replays alone."""

from __future__ import annotations

import pytest

from analysis.bench.inspection import verdict


def rows(**ratios: float) -> list[dict[str, object]]:
    return [
        {"work": "workers", "mode": f"{what}, {number} of one thread", "ratio": ratio, "outcome": "ACCEPT"}
        for what, two in ratios.items()
        for number, ratio in ((1, 1.0), (2, two))
    ]


def test_two_workers_may_take_as_long_as_is_promised():
    assert verdict(rows(inspection=0.65, replays=0.56)) is None


@pytest.mark.parametrize(("ratios", "what"), [((0.66, 0.56), "inspection"), ((0.6, 0.66), "replays")])
def test_the_inspection_counts_as_well_as_its_replays(ratios, what):
    found = rows(inspection=ratios[0], replays=ratios[1])
    assert verdict(found) == f"two workers take 0.66 times as long as one ({what}), more than 0.65"
