"""What inspectors sign about a census: the draw before anyone is asked, the result after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest
from inspector.registry._values import Capacity, check_name, check_time

__all__ = ["CensusDraw", "CensusResult", "MissingChip"]

_MAX_CENSUS = 10_000_000
_SEED_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusDraw:
    """An inspector draws ``count`` of the ``population`` chips that ``size`` log events place in a holder's hands.

    The draw is a function of the log and the seed, so anyone can repeat it; ``drawn`` is the digest of the chip ids in
    the order drawn. ``owner`` narrows the population to one holder ("" for all).
    """

    kind: ClassVar[str] = "census-draw"
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
        if self.owner:
            check_name("owner", self.owner)
        if len(self.seed) != _SEED_BYTES or len(self.root) != 32:
            raise CallerError("a census needs a seed of 32 bytes and a log root of 32 bytes")
        for what, value in (("number", self.census), ("count", self.count), ("log size", self.size)):
            if type(value) is not int or value < 1:
                raise CallerError(f"census {what} {value!r} is not a positive integer")
        if type(self.population) is not int or not self.count <= min(self.population, _MAX_CENSUS):
            raise CallerError(f"a census cannot draw {self.count} chips from a population of {self.population}")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.INSPECTOR, self.inspector),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(f"census/{self.census}", self.drawn)]

    def predicate(self) -> dict[str, object]:
        return {
            "census": self.census,
            "count": self.count,
            "inspector": self.inspector,
            "owner": self.owner,
            "population": self.population,
            "registry": self.registry,
            "root": self.root.hex(),
            "seed": self.seed.hex(),
            "size": self.size,
            "time": self.time,
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> CensusDraw:
        return cls(
            registry=predicate["registry"],
            census=predicate["census"],
            inspector=predicate["inspector"],
            owner=predicate["owner"],
            seed=bytes.fromhex(predicate["seed"]),
            size=predicate["size"],
            root=bytes.fromhex(predicate["root"]),
            population=predicate["population"],
            count=predicate["count"],
            drawn=subjects[0][1],
            time=predicate["time"],
        )


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
        if self.observed:
            check_name("observed serial", self.observed)
        if type(self.sequence) is not int or not 0 <= self.sequence < 2**31:
            raise CallerError(f"chip {self.chip}: sequence number {self.sequence!r} is negative or not an integer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusResult:
    """Result of a census: ``present`` chips shown, ``retired`` ones destroyed since the draw, the others missing.

    ``resurfaced`` chips are among those shown, although recorded as lost or destroyed.
    """

    kind: ClassVar[str] = "census-result"
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
        if type(self.census) is not int or type(self.present) is not int or self.present < 0:
            raise CallerError("a census result needs a number and a count of the chips that are present")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.INSPECTOR, self.inspector),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(f"census/{self.census}", self.drawn)]

    def predicate(self) -> dict[str, object]:
        return {
            "census": self.census,
            "inspector": self.inspector,
            "missing": [[chip.chip, chip.holder, chip.observed, chip.sequence] for chip in self.missing],
            "present": self.present,
            "registry": self.registry,
            "resurfaced": list(self.resurfaced),
            "retired": list(self.retired),
            "time": self.time,
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> CensusResult:
        return cls(
            registry=predicate["registry"],
            census=predicate["census"],
            inspector=predicate["inspector"],
            drawn=subjects[0][1],
            present=predicate["present"],
            retired=tuple(predicate["retired"]),
            resurfaced=tuple(predicate["resurfaced"]),
            missing=tuple(
                MissingChip(chip=chip, holder=holder, observed=observed, sequence=sequence)
                for chip, holder, observed, sequence in predicate["missing"]
            ),
            time=predicate["time"],
        )
