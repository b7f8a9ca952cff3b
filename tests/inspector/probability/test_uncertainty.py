"""Distributions keep their quantiles, bands their shares, and Sobol indices those of Ishigami's function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.distributions import (
    Distribution,
    Domain,
    Fixed,
    LogNormal,
    Range,
    Table,
    Triangular,
    Uniform,
    parse,
)
from inspector.probability.uncertainty import band, draws, levels, samples_where_possible, sobol, sobol_of_few, tornado

TEXTS = ("2e+24", "1e+24/2e+24/5e+24", "lognormal(1,5)", "triangular(1,2,5)", "uniform(1,5)", "table(1:0.2,2:0.8)")


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_distribution_is_read_back(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_quantiles_are_those_of_the_definition() -> None:
    points = np.array([0.05, 0.5, 0.95])
    assert Range(1e24, 2e24, 5e24).ppf(points) == pytest.approx([1e24, 2e24, 5e24])
    assert Range(0.6, 0.9, 0.95, Domain.SHARE).ppf(points) == pytest.approx([0.6, 0.9, 0.95])
    assert LogNormal(1, 9).ppf(points) == pytest.approx([1, 3, 9])
    grid = np.linspace(0.001, 0.999, 99)
    assert Triangular(1, 2, 5).ppf(grid) == pytest.approx(scipy.stats.triang(0.25, 1, 4).ppf(grid))
    sigma = math.log(3) / scipy.stats.norm.ppf(0.95)
    assert LogNormal(1, 9).ppf(grid) == pytest.approx(scipy.stats.lognorm(sigma, scale=3).ppf(grid))
    assert Uniform(1, 5).ppf(grid) == pytest.approx(1 + 4 * grid)
    assert Table((1, 2, 7), (0.2, 0.5, 0.3)).ppf([0, 0.2, 0.21, 0.7, 0.71, 1]).tolist() == [1, 1, 2, 2, 7, 7]
    assert Fixed(3).ppf(grid).tolist() == [3] * 99


@given(
    st.lists(st.floats(1e-3, 1e27), min_size=3, max_size=3, unique=True).map(sorted),
    st.lists(st.floats(0, 1), min_size=2, max_size=20).map(sorted),
)
def test_quantiles_never_fall_and_stay_positive(numbers: list[float], points: list[float]) -> None:
    low, middle, high = numbers
    for made in (Range(low, middle, high), Triangular(low, middle, high), LogNormal(low, high), Uniform(middle, high)):
        found = made.ppf(np.array(points))
        assert (np.diff(found) >= -1e-9 * found[1:]).all()
        assert (found >= 0).all()
        assert np.isfinite(found).all()


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3, unique=True).map(sorted), st.floats(0, 1))
def test_a_probability_stays_one(numbers: list[float], point: float) -> None:
    assert 0 <= float(Range(numbers[0], numbers[1], numbers[2], Domain.SHARE).ppf(point)) <= 1


@pytest.mark.parametrize(
    ("text", "domain", "message"),
    [
        ("many", "positive", "'many' must be NUMBER, LOW/MEDIAN/HIGH"),
        ("1/2", "positive", "a range has three numbers"),
        ("3/2/5", "positive", "3/2/5: the numbers must be in ascending order"),
        ("0/2/5", "positive", "5 % quantile must be above 0"),
        ("lognormal(0,2)", "positive", "5 % quantile must be above 0"),
        ("triangular(1,2)", "positive", "must be NUMBER"),
        ("triangular(-1,2,3)", "positive", "reaches -1, which is not possible"),
        ("uniform(0.5,1.5)", "share", "reaches 1.5, which is not possible"),
        ("0.5/0.9/1", "share", "must be below 1"),
        ("lognormal(0.1,0.2)", "share", "cannot be a probability"),
        ("table(1,2)", "positive", "table(VALUE:WEIGHT,...)"),
        ("table(2:1,1:1)", "positive", "values must increase"),
        ("table(1:0,2:0)", "positive", "not all 0"),
        ("nan/1/2", "positive", "finite numbers"),
        ("uniform(1,inf)", "positive", "finite numbers"),
        ("gamma(1,2)", "positive", "must be NUMBER"),
    ],
)
def test_nonsense_is_refused(text: str, domain: str, message: str) -> None:
    with pytest.raises(CallerError) as raised:
        parse(text, Domain(domain))
    assert message in str(raised.value)


def test_draws_are_stratified_seeded_and_independent() -> None:
    inputs: dict[str, Distribution] = {"a": Uniform(0, 1), "b": Uniform(0, 1), "c": Fixed(2)}
    drawn = draws(inputs, number=1000, seed=5)
    assert sorted(np.floor(drawn["a"] * 1000).tolist()) == list(range(1000))
    assert abs(np.corrcoef(drawn["a"], drawn["b"])[0, 1]) < 0.15  # five standard deviations of an honest draw
    assert set(drawn["c"]) == {2}
    again, other = draws(inputs, number=1000, seed=5), draws(inputs, number=1000, seed=6)
    assert (again["a"] == drawn["a"]).all()
    assert (other["a"] != drawn["a"]).any()
    with pytest.raises(CallerError, match="between 20 and 1,000,000, not 19"):
        draws(inputs, number=19, seed=0)


def test_a_band_leaves_out_what_has_no_answer_and_says_so() -> None:
    values = np.array([[*range(1, 101)], [np.nan] * 90 + [*range(1, 11)], [np.nan] * 100], float)
    found = band(values)
    assert found.low[:2].tolist() == [5, 1]
    assert found.median[:2].tolist() == [50, 5]
    assert found.high[:2].tolist() == [95, 10]
    assert np.isnan(found.median[2])
    assert found.possible.tolist() == [1, 0.1, 0]


def test_samples_where_possible_are_those_of_eq_1() -> None:
    scheme = {"days": 365.0, "period": 30.0, "rate": 0.1, "confidence": 0.9, "flop_per_day": 8.64e19}
    flops, chips = np.array([3.14e23, 2.56e24, 1.27e26]), np.array([[1e3], [1e5]])
    found = samples_where_possible(flop=flops, chips=chips, **scheme)
    assert np.isnan(found).tolist() == [[False, False, True], [False, False, False]]
    assert found[1] == pytest.approx(closed.samples_needed(flop=flops, chips=1e5, **scheme))


def test_a_tornado_takes_one_input_at_a_time() -> None:
    def answer(at):
        if at["b"] > 4:
            raise CallerError("too many")
        return 10 * at["a"] + at["b"]

    swings = tornado(answer, {"b": Range(1, 2, 3), "a": Range(1, 2, 4), "c": Fixed(1)})
    assert [(each.parameter, round(each.low), round(each.high)) for each in swings] == [("a", 12, 42), ("b", 21, 23)]
    (first, *_) = tornado(answer, {"b": Range(1, 2, 9), "a": Range(1, 2, 4)})
    assert first.parameter == "b"
    assert math.isnan(first.high)


def test_sobol_indices_of_the_ishigami_function() -> None:
    """First order 0.3139, 0.4424 and 0, total 0.5576, 0.4424, 0.2437 (a = 7, b = 0.1), each inside its interval."""

    def ishigami(at):
        return np.sin(at["x"]) + 7 * np.sin(at["y"]) ** 2 + 0.1 * at["z"] ** 4 * np.sin(at["x"])

    inputs = {name: Uniform(-math.pi, math.pi) for name in "xyz"}
    found = {each.parameter: each for each in sobol(ishigami, inputs, seed=1)}
    for name, first, total in (("x", 0.3139, 0.5576), ("y", 0.4424, 0.4424), ("z", 0.0, 0.2437)):
        assert found[name].first_low <= first <= found[name].first_high
        assert found[name].total_low <= total <= found[name].total_high
        assert found[name].first_high - found[name].first_low < 0.15
    assert found["x"].first == pytest.approx(0.3139, abs=0.02)


def test_sobol_indices_need_variance_and_answers() -> None:
    with pytest.raises(CallerError, match="no input is uncertain"):
        sobol(lambda at: at["a"], {"a": Fixed(1)})
    with pytest.raises(CallerError, match=r"% of the draws have no answer"):
        sobol(lambda at: np.where(at["a"] > 4.5, np.nan, at["a"]), {"a": Uniform(1, 5)}, number=64)
    (only,) = sobol(lambda at: at["a"] * at["b"], {"a": LogNormal(1, 5), "b": Fixed(2)}, number=1024)
    assert (only.first, only.total) == (1, 1)


def test_sobol_indices_of_few_answers() -> None:
    """Of a product of log-normal numbers each has the share of its own spread; no draw of it need be cheap."""
    inputs: dict[str, Distribution] = {"a": LogNormal(1, 10), "b": LogNormal(1, 100), "c": Fixed(3.0)}
    at = levels(inputs, number=60, seed=2)
    drawn = draws(inputs, number=60, seed=2)
    found, explained = sobol_of_few(drawn["a"] * drawn["b"] / drawn["c"], at)
    assert explained == pytest.approx(1)
    assert [each.parameter for each in found] == ["b", "a"]
    assert [each.first for each in found] == pytest.approx([0.8, 0.2], abs=1e-6)
    assert [each.total for each in found] == pytest.approx([0.8, 0.2], abs=1e-6)
    assert all(each.first_low <= each.first <= each.first_high for each in found)


def test_sobol_indices_of_few_answers_tell_what_acts_together() -> None:
    at = levels({"a": Uniform(0, 1), "b": Uniform(0, 1)}, number=80, seed=3)
    one, other = (ndtri(each) for each in at.values())
    found, explained = sobol_of_few(np.exp(one + 0.5 * one * other), at)
    shares = {each.parameter: (each.first, each.total) for each in found}
    assert explained > 0.99
    assert shares["a"] == pytest.approx((0.8, 1.0), abs=1e-6)
    assert shares["b"] == pytest.approx((0.0, 0.2), abs=1e-6)


@pytest.mark.parametrize(
    ("answers", "number", "message"),
    [
        (lambda z: np.exp(np.sin(7 * z[0]) + z[1]), 40, "a polynomial of second degree explains"),
        (lambda z: np.exp(z[0]), 11, "2 inputs need 12 draws at least"),
        (lambda z: np.where(z[0] > 0, 1.0, np.nan), 40, "some draws have no answer"),
        (lambda z: 1 + 0 * z[0], 40, "does not vary"),
    ],
)
def test_sobol_indices_that_few_answers_do_not_give(answers: Any, number: int, message: str) -> None:
    at = levels({"a": Uniform(0, 1), "b": Uniform(0, 1)}, number=40, seed=3)
    with pytest.raises(CallerError, match=message):
        sobol_of_few(answers([ndtri(each) for each in at.values()])[:number], {k: v[:number] for k, v in at.items()})
