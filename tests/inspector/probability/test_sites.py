"""Several sites and several Provers: placement against brute force, and what collusion hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.sites import collusion_log_miss, sites_log_miss, worst_placement

A = closed.FLOP_PER_CHIP_DAY


def test_chances_of_sites_multiply() -> None:
    miss = sites_log_miss(used=[10, 0, 5], chips=[100, 50, 5], samples=[3, 9, 1], catch=[0.5, 1, 0.25])
    assert np.exp(miss) == pytest.approx((1 - 0.05) ** 3 * 0.75, rel=1e-14)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 1e4), st.sampled_from([0.0, 0.3, 0.95, 1.0])), min_size=1, max_size=6
    ),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_no_placement_is_safer_for_the_prover(sites: list[tuple[float, float, float]], part: float, seed: int) -> None:
    chips, samples, catch = (np.array(column) for column in zip(*sites, strict=True))
    total = part * chips.sum()
    placed = worst_placement(total=total, chips=chips, samples=samples, catch=catch)
    assert placed.sum() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert ((placed >= 0) & (placed <= chips)).all()
    best = float(sites_log_miss(used=placed, chips=chips, samples=samples, catch=catch))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        other = np.minimum(rng.dirichlet(np.ones(len(chips))) * total, chips)
        for site in rng.permutation(len(chips)):
            other[site] += min(total - other.sum(), chips[site] - other[site])
        other = np.clip(other, 0, chips)
        rival = float(sites_log_miss(used=other, chips=chips, samples=samples, catch=catch))
        # Where every chip is in use, the last bit of a sum decides whether an escape is 0 or 1e-16.
        assert rival <= best + 1e-6 * (1 + abs(best)) or np.exp(rival) < 1e-14


def test_proportional_sampling_spreads_the_prover_evenly() -> None:
    placed = worst_placement(total=60, chips=[100, 200, 300], samples=[10, 20, 30])
    assert placed == pytest.approx([10, 20, 30], rel=1e-9)
    miss = sites_log_miss(used=placed, chips=[100, 200, 300], samples=[10, 20, 30])
    assert miss == pytest.approx(float(closed.log_miss(hit=0.1, samples=60)), rel=1e-9)


def test_unsampled_site_is_a_hiding_place() -> None:
    placed = worst_placement(total=50, chips=[100, 60], samples=[10, 0])
    assert placed.tolist() == [0, 50]


def test_too_few_chips_over_all_sites() -> None:
    with pytest.raises(closed.ChipsTooFewError, match="needs 200 chips but the sites hold 160"):
        worst_placement(total=200, chips=[100, 60], samples=[10, 0])
    with pytest.raises(CallerError, match="share must be"):
        sites_log_miss(used=[10], chips=[5], samples=[1])


def test_colluders_below_the_threshold_are_seen_only_together() -> None:
    common: dict[str, Any] = {"flops": [6e23, 6e23], "chips": [1e4, 1e4], "samples": [500, 500], "threshold": 8e23}
    apart = collusion_log_miss(joint=False, **common)
    together = collusion_log_miss(joint=True, **common)
    assert apart == 0
    used = 2e23 / (A * 365)
    assert together == pytest.approx(1000 * np.log1p(-used / 1e4), rel=1e-12)


def test_joint_sampling_equals_one_prover_with_all_chips() -> None:
    """Parts in proportion to the chips: the colluders are one Prover with the sum of the chips (App. C)."""
    together = collusion_log_miss(
        flops=[2e24, 4e24], chips=[1e5, 2e5], samples=[100, 200], threshold=3e24, joint=True, catch=0.9
    )
    share = closed.used_share(flop=3e24, chips=3e5, days=365)
    alone = closed.log_miss(hit=closed.hit_probability(share=share, snapshot=0.9), samples=300)
    assert together == pytest.approx(float(alone), rel=1e-12)


def test_colluder_with_too_few_chips() -> None:
    with pytest.raises(closed.ChipsTooFewError, match="owns fewer chips than its part"):
        collusion_log_miss(flops=[1e26, 1e20], chips=[10, 10], samples=[1, 1], threshold=1e23, joint=True)
