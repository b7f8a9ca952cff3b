"""Plans against exhaustive search on a few seeded problems; ``tests.measurements.planner`` measures many."""

from __future__ import annotations

from tests.measurements.planner import several, summary


def test_one_site_is_as_cheap_as_exhaustive_search() -> None:
    found = summary(several(8, sites=1, most=50))
    assert found["dearest"] <= 1.0 + 1e-9
    assert 0.95 <= found["least_bound"] <= found["largest_bound"] <= 1.0 + 1e-9


def test_two_sites_are_as_cheap_as_exhaustive_search() -> None:
    for work, bound, least in several(3, sites=2, most=5):
        assert work <= max(least * 1.01, least + 1.0) + 1e-9
        assert 0.8 * least <= bound <= least + 1e-6
