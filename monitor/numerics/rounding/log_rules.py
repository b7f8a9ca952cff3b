"""What an entry may say: the 2β and 6β rules, and a second opinion where β is not a worst case.

An honest recorder lists every element with |v − m| ≤ 4β for its midpoint m, and its v lies within β of the truth. A
replayer whose own v contradicts that beyond 2β knows that one of the two devices broke β. Under a bound that is not a
worst case it recomputes the element exactly; where the recorder is shown to be within β it follows the log, and only
otherwise the log is at fault. Under a worst case an entry against its own rounding is at fault too where the exact
value lies beyond β of the midpoint on the other side: no device decides so.

A referee decides between a recorder and a replayer that objects. With t for the truth, an honest recorder's entries
have |t − m| ≤ 5β, lie on the side of t or have |t − m| ≤ β, and are missing only where |t − m| > 3β; where all of that
holds, no honest replayer can object. Where there is no exact value, the referee's own v decides: beyond a
replayer's limits the log is at fault; within limits that are 2β tighter no honest replayer could object; between the
two nothing is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from monitor.numerics.engines.eager.rounded.result_bounds import ProductBound, RelativeBound
from monitor.numerics.engines.eager.rounded.rounding_rule import Decisions, decide, place
from monitor.numerics.engines.results import Near, Settled
from monitor.numerics.errors import LogContradiction
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.bounds import Bound
from monitor.numerics.statistics import Decided, Statistics

__all__ = ["Judge", "Work"]

MISSING = "no entry, although the value lies within 2β of a midpoint"
FAR = "entry where the value is exact or further than 6β from a midpoint"
AGAINST = "entry against a value further than 2β from its midpoint"
UNTRUE = "entry against an exact value further than β from its midpoint"

_MOST_RECOMPUTED = 1 << 16
"""Elements of a step that a replayer computes exactly, so that a log cannot stop it for long."""
_MOST_JUDGED = 1 << 18
"""The same of a referee, who has less than a step to judge."""
_BOUND_SLACK = 2.0**-20
"""By how much, in proportion, two devices' computations of β may differ."""
_VALUE_SLACK = 2.0**-53
"""By how much, in proportion, an exact value may differ from the truth when it has been rounded to FP64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How elements of one result can be computed again, one at a time.

    Attributes:
        value: FP64 value of the element at a flat position: correctly rounded where ``terms`` is not 0.
        whole: this device's whole result before it is rounded.
        bound: error bounds of the whole result; computed once.
        kind: class of the operator.
        terms: products in each sum, 0 for a function.
        worst: the worst-case bound in units of β.
    """

    value: Callable[[int], float]
    whole: Callable[[], Tensor]
    bound: Callable[[], ProductBound | RelativeBound]
    kind: str = "function"
    terms: int = 0
    worst: float = 1.0


def _broken(said: bool | None, ratio: float, up: bool, tighter: float) -> str:
    """The rule that an element breaks whose value lies ``ratio``·β from its midpoint; empty if it breaks none.

    Args:
        said: the direction of its entry; None where it has none.
        tighter: by how many β the limits are drawn tighter than a replayer's.
    """
    if said is None:
        return MISSING if ratio <= 2.0 + tighter else ""
    if ratio > 6.0 - tighter:
        return FAR
    return AGAINST if up != said and ratio > 2.0 - tighter else ""


class Judge:
    """Applies the rules to the results of one step."""

    def __init__(self, bound: Bound, grid_bits: int, statistics: Statistics) -> None:
        self._bound = bound
        self._grid_bits = grid_bits
        self._statistics = statistics
        self.call, self.part, self.size = -1, 0, 0
        self.operator = ""

    def contradiction(self, element: int, rule: str) -> None:
        """Count a broken rule or raise it, as the bound says."""
        if not self._bound.check:
            return
        if self._statistics.contradictions >= self._bound.contradictions:
            where = {"part": self.part, "element": element, "size": self.size}
            raise LogContradiction(call=self.call, operator=self.operator, rule=rule, **where)
        self._statistics.contradictions += 1

    def obey(self, settled: Settled, group: codec.Group | None, work: Work) -> Tensor:
        """Follow the entries of one result after checking that each had a choice.

        ``settled`` lists the elements within 6β; its contiguous result is written to and returned.
        """
        near, out = settled.near, settled.out
        mandatory = near.distances <= 2.0 * near.betas
        if self._bound.is_referee and self._bound.check:
            return self._referee(settled, group, work)
        if group is None:
            return self._without_entries(out, near.positions[mandatory], work)
        at = np.searchsorted(near.positions, group.positions)
        reached = np.zeros(len(group.positions), dtype=np.bool_)
        inside = at < len(near.positions)
        reached[inside] = near.positions[at[inside]] == group.positions[inside]
        listed = np.zeros(len(near.positions), dtype=np.bool_)
        listed[at[reached]] = True
        out = self._without_entries(out, near.positions[mandatory & ~listed], work)
        decided = Decided(
            call=self.call,
            operator=self.operator,
            kind=work.kind,
            terms=work.terms,
            logged=len(group.positions),
            free=int((mandatory & listed).sum()),
        )
        self._statistics.decided.append(decided)
        flat = out.reshape(-1)
        self._follow_near(flat, near, at[reached], group.upward[reached], mandatory, work, decided)
        self._follow_far(flat, group.positions[~reached], group.upward[~reached], work, decided)
        return out

    def _referee(self, settled: Settled, group: codec.Group | None, work: Work) -> Tensor:
        """Judge for both sides, and follow what entries there are."""
        near, flat = settled.near, settled.out.reshape(-1)
        positions = np.empty(0, np.int64) if group is None else group.positions
        upward = np.empty(0, np.bool_) if group is None else group.upward
        said: dict[int, bool] = dict(zip(positions.tolist(), upward.tolist(), strict=True))
        ratios = near.distances / near.betas
        for element, ratio, up in zip(near.positions.tolist(), ratios.tolist(), near.upward.tolist(), strict=True):
            self._rule(element, said.pop(element, None), ratio, up, work)
        for element, up in said.items():
            self._rule(element, up, math.inf, up, work)
        if len(positions):
            at = torch.from_numpy(positions).to(flat.device)
            chosen = torch.from_numpy(upward).to(flat.device)
            values = work.whole().reshape(-1)[at].to(torch.float64)
            flat[at] = place(values, decide(values, work.bound().at(at, values), self._grid_bits), chosen)
        return settled.out

    def _rule(self, element: int, said: bool | None, ratio: float, up: bool, work: Work) -> None:
        """What an element's entry may be, None where it has none, given where this device's own value lies."""
        if not _broken(said, ratio * (1.0 + _BOUND_SLACK), up, 2.0):
            return  # a value within 2β of this one breaks no replayer's rule either
        truth = self._truth(element, work)
        if truth is None:
            rules = {_broken(said, ratio, up, 0.0)}
        else:
            self._statistics.recomputed += 1
            beta, up = truth.beta.item(), bool(truth.up.item())
            exact = truth.distance.item() / beta
            slack = exact * _BOUND_SLACK + abs(work.value(element)) * _VALUE_SLACK / beta
            rules = {_broken(said, exact + by, up, 1.0) for by in (-slack, slack)}
            if not any(rules):
                return
        if "" in rules:
            self._statistics.open += 1
        else:
            self.contradiction(element, rules.pop())

    def _without_entries(self, out: Tensor, positions: npt.NDArray[np.int64], work: Work) -> Tensor:
        """Elements within 2β that the log does not mention: truth beyond 3β of the midpoint clears the recorder."""
        flat = out.reshape(-1)
        for element in positions.tolist():
            truth = self._truth(element, work)
            if truth is None or not truth.distance.item() > 3.0 * truth.beta.item():
                self.contradiction(element, MISSING)
            else:
                self._statistics.recomputed += 1
                flat[element] = place(torch.tensor([work.value(element)], dtype=torch.float64), truth, truth.up)[0]
        return out

    def _follow_near(
        self,
        flat: Tensor,
        near: Near,
        rows: npt.NDArray[np.int64],
        upward: npt.NDArray[np.bool_],
        mandatory: npt.NDArray[np.bool_],
        work: Work,
        decided: Decided,
    ) -> None:
        """Entries within 6β.

        Against this device's own rounding they need 2β, or a truth on their side; under a worst case both.
        """
        other = upward != near.upward[rows]
        rows, upward = rows[other], upward[other]
        if not len(rows):
            return
        left = _MOST_RECOMPUTED - self._statistics.forced if self._bound.kind == "worst-case" else 0
        for count, (row, up) in enumerate(zip(rows.tolist(), upward.tolist(), strict=True)):
            element, is_near = int(near.positions[row]), bool(mandatory[row])
            reach = (work.worst + 1.0) * near.betas[row] if work.terms else 0.0
            truth = self._truth(element, work, is_near and count < left) if near.distances[row] <= reach else None
            if truth is not None and self._on_side(truth, up, work.value(element)):
                self._statistics.recomputed += int(not is_near)
            elif truth is not None or not is_near:
                self.contradiction(element, UNTRUE if is_near else AGAINST)
        values, betas = torch.from_numpy(near.values[rows]), torch.from_numpy(near.betas[rows])
        chosen = torch.from_numpy(near.positions[rows])
        decisions = decide(values, betas, self._grid_bits)
        decided.turned += len(rows)
        decided.coarse += self._coarse(decisions)
        flat[chosen] = place(values, decisions, torch.from_numpy(upward))

    def _follow_far(
        self,
        flat: Tensor,
        positions: npt.NDArray[np.int64],
        upward: npt.NDArray[np.bool_],
        work: Work,
        decided: Decided,
    ) -> None:
        """Entries beyond 6β of every midpoint: only a truth within 5β and on their side makes them honest."""
        for element, up in zip(positions.tolist(), upward.tolist(), strict=True):
            truth = self._truth(element, work)
            near = truth is not None and truth.distance.item() <= 5.0 * truth.beta.item()
            if near and truth is not None and self._on_side(truth, up, work.value(element)):
                self._statistics.recomputed += 1
            else:
                self.contradiction(element, FAR)
        if len(positions):
            at = torch.from_numpy(positions)
            values = work.whole().reshape(-1)[at.to(flat.device)].to(torch.float64)
            finite = values.isfinite()
            values = torch.where(finite, values, torch.zeros_like(values))
            decisions = decide(values, work.bound().at(at.to(flat.device), values), self._grid_bits)
            chosen = torch.from_numpy(upward).to(flat.device)
            decided.turned += int(((decisions.up != chosen) & finite).sum())
            at = at.to(flat.device)
            flat[at] = torch.where(finite, place(values, decisions, chosen), flat[at])

    def _coarse(self, decisions: Decisions) -> int:
        """How many of them have a grid that β made, and that leaves the value half of its bits or fewer."""
        few = decisions.floor < 2.0 ** (self._grid_bits // 2)
        return int((few & (decisions.spacing < 64.0 * decisions.beta)).sum())

    def _truth(self, element: int, work: Work, is_near: bool = False) -> Decisions | None:
        """Where the exact value lies relative to its midpoint; None where there is no exact value.

        None too where β is a worst case, unless this device's own value ``is_near`` the midpoint: beyond 2β it decides.
        """
        is_enough = self._bound.kind == "worst-case" and not self._bound.is_referee and not is_near
        if is_enough or not self._bound.check or not work.terms:
            return None
        most = _MOST_JUDGED if self._bound.is_referee else _MOST_RECOMPUTED
        if self._statistics.recomputed + self._statistics.contradictions >= most:
            return None
        value = torch.tensor([work.value(element)], dtype=torch.float64)
        beta = work.bound().at(torch.tensor([element]), value).cpu()
        if not bool(value.isfinite()) or not bool(beta > 0):
            return None
        return decide(value, beta, self._grid_bits)

    @staticmethod
    def _on_side(truth: Decisions, up: bool, value: float) -> bool:
        """The true value lies on the entry's side of the midpoint, or within β of it."""
        slack = abs(value) * _VALUE_SLACK
        return bool(truth.up.item() == up) or truth.distance.item() <= truth.beta.item() * (1.0 + _BOUND_SLACK) + slack
