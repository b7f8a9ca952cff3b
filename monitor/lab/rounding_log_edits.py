"""Edits of a rounding log by a lab that knows where its own step could have been rounded the other way.

The lab has the same engine as everyone else; what makes it an adversary is that it looks at every value before it was
rounded and that it can obey a log without checking it (``Bound(check=False)``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics import Bound, Formats, Observer, Session, Statistics
from monitor.numerics.engines.eager.rounded.result_bounds import ProductBound, RelativeBound
from monitor.numerics.engines.eager.rounded.rounding_rule import decide
from monitor.numerics.engines.results import Rounding as Reach
from monitor.numerics.engines.results import Settled
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.rounding.codec import Group, decode, encode

__all__ = ["EditKind", "LogEdit", "Rounding", "Survey", "apply_edit", "far_additions"]

_FORMAT = Formats()
_BOUND = Bound()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """All elements that one sub-operation of a step rounded, in flat order.

    Attributes:
        operator: the ATen overload of the call.
        distance: |v − m|/β, the distance to the midpoint in error bounds; infinite where the result is exact (β = 0)
            or not finite, so that no device has a choice.
        upward: True where this device rounded the magnitude up.
    """

    call: int
    part: int
    operator: str
    distance: npt.NDArray[np.float64]
    upward: npt.NDArray[np.bool_]


class Survey(RoundedBackend):
    """The recording engine, which also keeps how far every value was from its midpoint.

    Attributes:
        roundings: one entry for each sub-operation, in order.
    """

    def __init__(self, statistics: Statistics, keys: Callable[[], int] | None = None) -> None:
        super().__init__(_FORMAT, _BOUND, statistics, None, keys)
        self.roundings: list[Rounding] = []

    @classmethod
    def recording(
        cls, observer: Observer | None = None, keys: Callable[[], int] | None = None
    ) -> tuple[Survey, Session]:
        """Return a survey and the session that fills it while one step is recorded."""
        statistics = Statistics()
        survey = cls(statistics, keys)
        return survey, Session("rounded", survey, statistics, observer)

    def tiles_for(self, x: Tensor, shape: ConvolutionShape | None = None) -> None:
        """None: every result is rounded as a whole, so that it can be looked at."""

    def round_whole(self, v: Tensor, error: ProductBound | RelativeBound, rounding: Reach) -> Settled:
        call, part, operator = self._judge.call, self._part, self._judge.operator
        wide = v.to(torch.float64).contiguous()
        finite = wide.isfinite()
        safe = torch.where(finite, wide, torch.zeros_like(wide))
        found = decide(safe, error.dense(safe), _FORMAT.grid_bits)
        choice = finite & (found.beta > 0)
        distance = torch.where(choice, found.distance / found.beta, torch.full_like(safe, torch.inf))
        self.roundings.append(
            Rounding(
                call=call,
                part=part,
                operator=operator,
                distance=distance.reshape(-1).numpy(),
                upward=found.up.reshape(-1).numpy(),
            )
        )
        return super().round_whole(v, error, rounding)


class EditKind(enum.Enum):
    """Kind of edit of one entry."""

    FLIP = "flip"
    """Turns the direction of an entry."""
    DROP = "drop"
    """Removes an entry."""
    ADD = "add"
    """Adds an entry that rounds against the lab's own arithmetic."""
    PAD = "pad"
    """Adds an entry that rounds as the lab's own arithmetic does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEdit:
    """One edit of the log of one step: an element of a sub-operation of an ATen call."""

    kind: EditKind
    call: int
    part: int
    element: int


def apply_edit(log: bytes, edit: LogEdit, roundings: Sequence[Rounding]) -> bytes:
    """Return the log with that one entry turned, removed or added, in the canonical encoding.

    Raises:
        CallerError: the log has no such entry, or for an addition has it already or rounds nothing there.
    """
    groups = {(group.call, group.part): group for group in decode(log, _FORMAT, _BOUND)}
    place = (edit.call, edit.part)
    at = next((each for each in roundings if (each.call, each.part) == place), None)
    if at is None or not 0 <= edit.element < len(at.distance):
        raise CallerError(f"the step rounds no element {edit.element} at call {edit.call}, sub-operation {edit.part}")
    group = groups.get(place)
    known = np.empty(0, dtype=np.int64) if group is None else group.positions
    ways = np.empty(0, dtype=np.bool_) if group is None else group.upward
    row = int(np.searchsorted(known, edit.element))
    held = row < len(known) and known[row] == edit.element
    if held == (edit.kind in (EditKind.ADD, EditKind.PAD)):
        raise CallerError(f"the log has {'an' if held else 'no'} entry for element {edit.element} of call {edit.call}")
    if edit.kind is EditKind.FLIP:
        ways = ways.copy()
        ways[row] = not ways[row]
    elif edit.kind is EditKind.DROP:
        known, ways = np.delete(known, row), np.delete(ways, row)
    else:
        known = np.insert(known, row, edit.element)
        ways = np.insert(ways, row, at.upward[edit.element] != (edit.kind is EditKind.ADD))
    groups.pop(place, None)
    if len(known):
        size = len(at.distance)
        groups[place] = Group(call=edit.call, part=edit.part, size=size, positions=known, upward=ways)
    return encode((groups[key] for key in sorted(groups)), _FORMAT, _BOUND)


def far_additions(roundings: Sequence[Rounding]) -> list[LogEdit]:
    """For each sub-operation the last element that lies outside every window (|v − m| > 6β, β > 0), if it has one."""
    edits = []
    for each in roundings:
        far = np.flatnonzero((each.distance > 6.0) & np.isfinite(each.distance))
        if len(far):
            edits.append(LogEdit(kind=EditKind.ADD, call=each.call, part=each.part, element=int(far[-1])))
    return edits
