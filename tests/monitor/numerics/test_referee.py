"""A referee under rounded numerics names no honest recorder, and clears no log that stops an honest replayer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from firmware_sim.errors import EvidenceError
from monitor import numerics
from monitor.numerics import Bound, Formats, LogContradiction, Statistics
from monitor.numerics.engines.eager.rounded.result_bounds import RelativeBound, product_bound
from monitor.numerics.engines.eager.rounded.rounding_rule import decide
from monitor.numerics.engines.results import Near, Settled
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.log_rules import AGAINST, FAR, MISSING, UNTRUE, Judge, Work
from tests.guards import off

TERMS = 64
MIDDLE = 1.0 + 2.0**-24
"""Halfway between two FP32 numbers."""
FORMATS, BOUND = Formats(), Bound()


def entry(upward: bool | None) -> bytes:
    """The log of a call with one result: its entry, or none."""
    if upward is None:
        return codec.encode([], FORMATS, BOUND)
    groups = [codec.Group(call=0, part=0, size=1, positions=np.array([0]), upward=np.array([upward]))]
    return codec.encode(groups, FORMATS, BOUND)


def product(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A row and a column whose product lies so many β above the midpoint."""
    row, column = torch.zeros(1, TERMS), torch.zeros(TERMS, 1)
    row[0, :3] = torch.tensor([1.0, 2.0**-12, 2.0**-25])
    column[:2, 0] = torch.tensor([1.0, 2.0**-12])
    factor = BOUND.of_products(TERMS, FORMATS)
    column[2, 0] = distance * factor * row.norm() * column.norm() / 2.0**-25
    beta = product_bound(row, column, factor, -1).dense(torch.zeros(1, 1, dtype=torch.float64)).item()
    sum_ = (row.double() @ column.double()).item()
    assert (sum_ - MIDDLE) / beta == pytest.approx(distance, abs=0.05)
    return row, column


CASES = [
    (None, 2.5, MISSING),
    (None, 3.3, None),
    (True, 0.5, None),
    (True, 4.7, None),
    (True, 5.3, FAR),
    (True, 9.0, FAR),
    (False, 0.7, None),
    (False, 1.3, AGAINST),
    (False, 3.0, AGAINST),
]


@pytest.mark.parametrize(("upward", "distance", "rule"), CASES)
def test_the_exact_value_decides_about_a_sum(upward, distance, rule):
    arguments: tuple[Any, Any, dict[str, Any]] = torch.ops.aten.mm.default, product(distance), {}
    if rule is None:
        out, is_lawful = numerics.referee("rounded", *arguments, entries=entry(upward))
        assert is_lawful
        assert out.item() == 1.0 + (0.0 if upward is False else 2.0**-23)
    else:
        with pytest.raises(LogContradiction, match=rule):
            numerics.referee("rounded", *arguments, entries=entry(upward))


@pytest.mark.parametrize(("upward", "distance"), [(None, 2.5), (True, 5.3)])
def test_guard_off_a_replayers_limits_let_through_what_stops_others(upward, distance):
    """Another replayer's value may lie β further on either side, and is stopped by the same log."""
    arguments: tuple[Any, Any, dict[str, Any]] = torch.ops.aten.mm.default, product(distance), {}
    numerics.execute("rounded", *arguments, entries=entry(upward))
    with off("entries refereed"):
        assert numerics.referee("rounded", *arguments, entries=entry(upward))[1]


def test_no_replayer_follows_an_entry_against_a_truth_that_it_can_compute():
    with pytest.raises(LogContradiction, match=UNTRUE):
        numerics.execute("rounded", torch.ops.aten.mm.default, product(1.3), {}, entries=entry(False))


class Device:
    """One value as a device computes it, in β above the midpoint, and the rules on it."""

    def __init__(self, offset: float, *, exact: float | None = None, is_referee: bool = False) -> None:
        """Args: exact: the truth, where it can be computed."""
        self.beta = 2.0**-46
        self.value = MIDDLE + offset * self.beta
        self.exact = None if exact is None else MIDDLE + exact * self.beta
        self.statistics = Statistics()
        self.judge = Judge(Bound(is_referee=is_referee), 24, self.statistics)

    def _near(self):
        wide = torch.tensor([self.value], dtype=torch.float64)
        found = decide(wide, torch.full_like(wide, self.beta), 24)
        near = found.distance <= 6.0 * found.beta
        at = near.nonzero().reshape(-1)
        parts = (found.up[near], wide[near], found.beta[near], found.distance[near])
        upward, values, betas, distances = (each.numpy() for each in parts)
        listed = Near(positions=at.numpy(), upward=upward, values=values, betas=betas, distances=distances)
        return Settled(out=wide.to(torch.float32), near=listed), bool(found.up.item())

    def record(self) -> bool | None:
        """What an honest recorder logs."""
        settled, up = self._near()
        return up if len(settled.near.positions) and settled.near.distances[0] <= 4.0 * self.beta else None

    def replay(self, upward: bool | None) -> str:
        """``lab`` where the log is at fault, ``open`` where a referee cannot tell, and ``lawful``."""
        settled, _ = self._near()
        group = None if upward is None else codec.decode(entry(upward), FORMATS, BOUND)[0]
        work = Work(
            value=lambda _: self.value if self.exact is None else self.exact,
            whole=lambda: torch.tensor([self.value], dtype=torch.float64),
            bound=lambda: RelativeBound(factor=self.beta / self.value),
            terms=0 if self.exact is None else TERMS,
        )
        try:
            if group is not None or len(settled.near.positions):
                self.judge.obey(settled, group, work)
        except LogContradiction:
            return "lab"
        return "open" if self.statistics.open else "lawful"


FUNCTION = [
    (None, 1.5, "lab"),
    (None, 3.0, "open"),
    (None, 4.5, "lawful"),
    (False, 0.5, "open"),
    (False, 2.5, "lab"),
    (True, 3.0, "lawful"),
    (True, 5.0, "open"),
    (True, 7.0, "lab"),
]


@pytest.mark.parametrize(("upward", "offset", "expected"), FUNCTION)
def test_about_a_function_the_referees_own_value_decides_where_it_can(upward, offset, expected):
    assert Device(offset, is_referee=True).replay(upward) == expected


@pytest.mark.parametrize("is_sum", [True, False])
def test_neither_an_honest_recorder_nor_an_honest_replayer_is_named(is_sum):
    rng, seen = np.random.default_rng(0), {"lab": 0, "open": 0, "lawful": 0}
    for _ in range(3000):
        truth = rng.uniform(-8, 8)
        mine, theirs, others = truth + rng.uniform(-1, 1, 3)
        referee = {"exact": truth} if is_sum else {}
        honest = Device(mine).record()
        assert Device(others, **referee, is_referee=True).replay(honest) != "lab"
        for edited in (None, True, False):
            ruled = Device(others, **referee, is_referee=True).replay(edited)
            seen[ruled] += 1
            if Device(theirs).replay(edited) == "lab":
                assert ruled != "lawful"
    assert min(seen["lab"], seen["lawful"]) > 500
    assert seen["open"] < 50 if is_sum else seen["open"] > 500


def test_guard_off_a_replayer_as_referee_clears_logs_that_stop_others():
    rng, cleared = np.random.default_rng(0), 0
    for _ in range(300):
        truth = rng.uniform(-8, 8)
        theirs, others = truth + rng.uniform(-1, 1, 2)
        for edited in (None, True, False):
            cleared += Device(theirs).replay(edited) == "lab" and Device(others).replay(edited) == "lawful"
    assert cleared > 10


def test_the_part_of_a_log_that_is_about_a_call():
    groups = [
        codec.Group(call=call, part=part, size=9, positions=np.array([at]), upward=np.array([True]))
        for call, part, at in ((2, 0, 1), (2, 1, 3), (5, 0, 4))
    ]
    log = codec.encode(groups, FORMATS, BOUND)
    assert numerics.logged_calls("rounded", log) == {2, 5}
    parts = codec.decode(numerics.entries_in("rounded", log, 2), FORMATS, BOUND)
    assert [(each.call, each.part, each.positions.tolist()) for each in parts] == [(0, 0, [1]), (0, 1, [3])]
    assert numerics.entries_in("rounded", log, 3) == entry(None)
    for wrong, declared in ((log + b"\xff", "rounded"), (log, "rounded-probabilistic"), (log, "exact")):
        with pytest.raises(EvidenceError):
            numerics.logged_calls(declared, wrong)
    assert (numerics.logged_calls("exact", b""), numerics.entries_in("exact", b"", 0)) == (frozenset(), b"")
