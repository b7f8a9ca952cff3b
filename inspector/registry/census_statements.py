"""What inspectors sign about a census: the draw before anyone is asked, the result after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest
from inspector.registry._form import Codec, Form, several
from inspector.registry._values import Capacity, check_name, check_time

__all__ = ["CensusDraw", "CensusResult", "MissingChip"]

_MAX_CENSUS = 10_000_000
_SEED_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusDraw(Form):
    """An inspector draws ``count`` of the ``population`` chips that ``size`` log events place in a holder's hands.

    The draw is a function of the log and the seed, so anyone can repeat it; ``drawn`` is the digest of the chip ids in
    the order drawn. ``owner`` narrows the population to one holder ("" for all).
    """

    kind: ClassVar[str] = "census-draw"
    in_subject: ClassVar[Mapping[str, int]] = {"drawn": 1}
    registry: str
    census: int
    inspector: str
    owner: str
    seed: bytes
    size: int
    root: bytes
    population: int
    count: int
    drawn: Digest
    time: int

    def __post_init__(self) -> None:
        check_name("inspector", self.inspector)
        check_time(self.time)
        if self.owner != "":
            check_name("owner", self.owner)
        if len(self.seed) != _SEED_BYTES or len(self.root) != 32:
            raise CallerError("a census needs a seed of 32 bytes and a log root of 32 bytes")
        numbers = {"number": self.census, "count": self.count, "log size": self.size, "population": self.population}
        for what, value in numbers.items():
            if type(value) is not int or not 1 <= value < 1 << 62:
                raise CallerError(f"census {what} {value!r:.100} is not an integer in 1 … 2^62 - 1")
        if not self.count <= min(self.population, _MAX_CENSUS):
            raise CallerError(f"a census cannot draw {self.count} chips from a population of {self.population}")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.INSPECTOR, self.inspector),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(f"census/{self.census}", self.drawn)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingChip:
    """A drawn chip that was not shown: who answers for it, and the serial read instead ("" for nothing).

    ``sequence`` is the number of the record by which the chip becomes lost, or 0 if it was claimed lost after the draw.
    """

    chip: str
    holder: str
    observed: str
    sequence: int

    def __post_init__(self) -> None:
        check_name("chip id", self.chip)
        check_name("holder", self.holder)
        if self.observed != "":
            check_name("observed serial", self.observed)
        if type(self.sequence) is not int or not 0 <= self.sequence < 2**31:
            raise CallerError(f"chip {self.chip}: sequence number {self.sequence!r} is negative or not an integer")

    @classmethod
    def of(cls, row: Sequence[Any]) -> MissingChip:
        """Of the values of its fields; ValueError where they are too few or too many."""
        chip, holder, observed, sequence = row
        return cls(chip=chip, holder=holder, observed=observed, sequence=sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusResult(Form):
    """Result of a census: ``present`` chips shown, ``retired`` ones destroyed since the draw, the others missing.

    ``resurfaced`` chips are among those shown, although recorded as lost or destroyed.
    """

    kind: ClassVar[str] = "census-result"
    in_subject: ClassVar[Mapping[str, int]] = {"drawn": 1}
    codecs: ClassVar[Mapping[str, Codec]] = {"missing": several((lambda chip: list(astuple(chip)), MissingChip.of))}
    registry: str
    census: int
    inspector: str
    drawn: Digest
    present: int
    retired: tuple[str, ...]
    resurfaced: tuple[str, ...]
    missing: tuple[MissingChip, ...]
    time: int

    def __post_init__(self) -> None:
        check_name("inspector", self.inspector)
        check_time(self.time)
        named = [*self.retired, *self.resurfaced, *(chip.chip for chip in self.missing)]
        for chip in (*self.retired, *self.resurfaced):
            check_name("chip id", chip)
        if len(set(named)) != len(named):
            raise CallerError(f"census {self.census} names a chip twice")
        if type(self.census) is not int or type(self.present) is not int or not 0 <= self.present <= _MAX_CENSUS:
            raise CallerError("a census result needs a number and a count of the chips that are present")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.INSPECTOR, self.inspector),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(f"census/{self.census}", self.drawn)]
