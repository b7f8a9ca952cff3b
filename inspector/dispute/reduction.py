"""The last level of a dispute where one element depends on too much: one part of what it is reduced over.

Both parties sign the numbers of equal parts (``partial_sums``). Some of these numbers combine by their maximum: scales
and flags. The others add up. A party whose parts do not give its own element has contradicted itself. Otherwise the
referee opens and computes the first part in which the parties differ: maxima first, since the sums depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from inspector.dispute.messages import CheckedProver
from inspector.dispute.openings import Source
from inspector.dispute.tiles import OF_A_TILE, UNFIT, TileRuling, named, operands_of
from monitor.numerics.operators.partial_sums import MOST_PARTS, Part, Parted, combined, spans
from monitor.numerics.operators.tiles import Operand, Untiled
from monitor.programs.bits import same_bytes
from monitor.programs.trace import Node
from monitor.replay.parted import parted_of

__all__ = ["OF_A_PART", "Reduced"]

OF_A_PART = 3 << 20
"""Bytes of inputs, as they are opened."""
_MOST_TERMS = 1 << 20


class Reduced:
    """Decides elements of a result by their parts.

    Attributes:
        node: on whose inputs both agree.

    Args:
        declared: numerics.
        logs: by the name of a party, what the rounding log that it took says of the call.
    """

    def __init__(
        self,
        parties: Sequence[CheckedProver],
        step: int,
        node: Node,
        slot: int,
        inputs: list[Source],
        declared: str = "exact",
        logs: Mapping[str, bytes] | None = None,
    ) -> None:
        self._parties, self._step, self.node, self._slot, self._inputs = parties, step, node, slot, inputs
        self._declared, self._logs = declared, logs or {}

    def decide(self, place: int, stated: Mapping[str, Tensor]) -> TileRuling | None:
        """Who states the parts as they are; None where the element is none of parts, or needs none.

        Args:
            stated: the element, (1,), as each party states it.

        Raises:
            EvidenceError: no party opens an input.
            Failure: a party has lost by its answer.
        """
        count = self._parts(place)
        if not count:
            return None
        of_each = self._of_each(place)
        found = self._compared(place, count, of_each, stated)
        if isinstance(found, TileRuling):
            return found
        right = {name: each.is_lawful(found) is not False for name, each in of_each.items()}
        return TileRuling(right, named(self._slot, range(place, place + 1)))  # of the same parts, by two logs

    def lawful(self, place: int) -> TileRuling | bool | None:
        """Whether no honest replayer can object to what the log that both took says of an element; None: one may.

        A ruling where the parties differ about its parts.

        Raises:
            Untiled: it is none of parts, or needs none.
            EvidenceError, Failure: as above.
        """
        count = self._parts(place)
        if not count:
            raise Untiled(f"{self.node.operator} is not divided")
        of_each = self._of_each(place)
        found = self._compared(place, count, of_each, None)
        return found if isinstance(found, TileRuling) else next(iter(of_each.values())).is_lawful(found)

    def _parts(self, place: int) -> int:
        try:
            return self._count(place)
        except (Untiled, *UNFIT):
            return 0

    def _of_each(self, place: int) -> dict[str, Parted]:
        """The element under the log of each party."""
        operands = operands_of(self._inputs, [], _MOST_TERMS)
        return {each.name: self._parted(place, operands, self._logs.get(each.name, b"")) for each in self._parties}

    def _parted(self, place: int, operands: Sequence[Operand], log: bytes = b"") -> Parted:
        return parted_of(self.node, self._slot, place, operands, self._declared, log)

    def _count(self, place: int) -> int:
        """Into how many parts an element is divided, so that none takes much; 0 where all of it does not."""
        taken: list[int] = []
        parted = self._parted(place, operands_of(self._inputs, taken, _MOST_TERMS, is_blank=True))

        def cost(span: range) -> int:
            taken.clear()
            parted.taken(span)
            return sum(taken)

        if parted.terms <= _MOST_TERMS and cost(range(parted.terms)) <= OF_A_TILE:
            return 0
        count, most = 2, min(MOST_PARTS, parted.terms)
        while count < most and (
            parted.terms > count * _MOST_TERMS or any(cost(each) > OF_A_PART for each in spans(parted.terms, count))
        ):
            count *= 2
        return min(count, most)

    def _compared(
        self, place: int, count: int, of_each: Mapping[str, Parted], stated: Mapping[str, Tensor] | None
    ) -> TileRuling | Part:
        """Who states the parts as they are; the combined numbers where both state the same ones."""
        where, element = (self._step, self.node.index, self._slot), named(self._slot, range(place, place + 1))
        self._parties[0].traffic.rounds += 1
        parted, *_ = of_each.values()
        widths = [parted.widths] * count
        said = {each.name: each.parts(*where, place, widths) for each in self._parties}
        wholes = {name: combined(each) for name, each in said.items()}
        if stated is not None:
            adds_up = {name: same_bytes(of_each[name].value(whole), stated[name]) for name, whole in wholes.items()}
            if not all(adds_up.values()):
                return TileRuling(adds_up, f"the sum of {count} parts of {element}")
        first, second = said.values()
        number = _first(first, second, 0)
        number = _first(first, second, 1) if number is None else number
        if number is None:
            return combined(first)
        values = parted.taken(spans(parted.terms, count)[number])
        most = parted.most(values)
        right = {name: each[number].most == most for name, each in said.items()}
        if all(right.values()):
            sums = parted.sums(values, combined(first).most)
            right = {name: each[number].sums == sums for name, each in said.items()}
        return TileRuling(right, f"part {number + 1} of {count} of {element}")


def _first(first: Sequence[Part], second: Sequence[Part], kind: int) -> int | None:
    """The first part in which numbers of a kind differ."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((number for number, (one, other) in pairs if one[kind] != other[kind]), None)
