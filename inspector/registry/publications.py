"""What the registry tells inspectors: makers' reference values, revocations, and the view that the registrar publishes.

A view is the root of a tree over everything that the directory says at one size of its log (``listing``); the registrar
signs it and logs it, so that showing anyone another view of the same log leaves a proof of that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, canonical, digest_bytes
from inspector.registry._values import Capacity, ChipRef, check_lot, check_name, check_text, check_time
from inspector.registry.statements import Position, check_positions, parse_positions, positions_wire

__all__ = ["Publication", "ReferenceValues", "Revocation"]

_RATE = re.compile("[0-9]{1,39}(/[0-9]{1,39})?", re.ASCII)
_MOST_VALUES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues:
    """A maker says which of its chips' evidence counts: its CAs, allowed firmware, and the snapshot schedule.

    The last such statement of a maker holds; the terms are those of RFC 9334 (reference values of a verifier).
    """

    kind: ClassVar[str] = "reference-values"
    registry: str
    maker: str
    ca_digests: tuple[Digest, ...]
    measurements: tuple[Digest, ...]
    minimum_security_version: int
    snapshot_rate: Fraction
    snapshot_algorithm: str
    time: int

    def __post_init__(self) -> None:
        check_name("maker", self.maker)
        check_time(self.time)
        check_text("snapshot algorithm", self.snapshot_algorithm)
        for what, digests in (("maker CA", self.ca_digests), ("firmware measurement", self.measurements)):
            if not 1 <= len(digests) <= _MOST_VALUES or list(digests) != sorted(set(digests), key=str):
                raise CallerError(
                    f"{self.maker} must name 1 to {_MOST_VALUES} digests of a {what}, sorted and each once"
                )
        if type(self.minimum_security_version) is not int or not 0 <= self.minimum_security_version < 1 << 32:
            raise CallerError("a firmware's security version must be in [0, 2^32)")
        if not 0 < self.snapshot_rate <= 1:
            raise CallerError(f"the snapshot rate must lie in (0, 1], not {self.snapshot_rate}")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.MAKER, self.maker),)

    def content(self) -> dict[str, object]:
        """The statement's content about chips, without signatory and time."""
        return {
            "makers": [str(digest) for digest in self.ca_digests],
            "measurements": [str(digest) for digest in self.measurements],
            "minimum_security_version": self.minimum_security_version,
            "snapshot_algorithm": self.snapshot_algorithm,
            "snapshot_rate": str(self.snapshot_rate),
        }

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(self.maker, digest_bytes("chipwitness/registry-values/1", canonical.encode(self.content())))]

    def predicate(self) -> dict[str, object]:
        return {**self.content(), "registry": self.registry, "time": self.time}

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> ReferenceValues:
        if not _RATE.fullmatch(predicate["snapshot_rate"]):
            raise CallerError("the snapshot rate is not a fraction")
        try:
            rate = Fraction(predicate["snapshot_rate"])
        except ZeroDivisionError:
            raise CallerError("the snapshot rate is not a fraction") from None
        return cls(
            registry=predicate["registry"],
            maker=subjects[0][0],
            ca_digests=tuple(Digest.parse(text) for text in predicate["makers"]),
            measurements=tuple(Digest.parse(text) for text in predicate["measurements"]),
            minimum_security_version=predicate["minimum_security_version"],
            snapshot_rate=rate,
            snapshot_algorithm=predicate["snapshot_algorithm"],
            time=predicate["time"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """The registrar says that evidence under these chips' certificates counts no more; who holds them stays as it was.

    Final: a chip whose secrets are out cannot be distinguished from its clone.
    """

    kind: ClassVar[str] = "revocation"
    registry: str
    chips: tuple[ChipRef, ...]
    reason: str
    time: int
    positions: tuple[Position, ...] = ()

    def __post_init__(self) -> None:
        check_lot(self.chips)
        check_positions(self.chips, self.positions)
        check_time(self.time)
        check_text("reason", self.reason)
        if not self.reason:
            raise CallerError(f"chip {self.chips[0].chip}: a revocation needs a reason")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.REGISTRAR, None),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(ref.chip, ref.digest) for ref in self.chips]

    def predicate(self) -> dict[str, object]:
        return {
            "reason": self.reason,
            "registry": self.registry,
            "sequences": [ref.sequence for ref in self.chips],
            "time": self.time,
            **positions_wire(self.positions),
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Revocation:
        pairs = zip(subjects, predicate["sequences"], strict=True)
        return cls(
            registry=predicate["registry"],
            chips=tuple(ChipRef(chip, digest, sequence) for (chip, digest), sequence in pairs),
            reason=predicate["reason"],
            time=predicate["time"],
            positions=parse_positions(predicate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The registrar's view of the directory after ``size`` log events under ``root``.

    ``map_root`` is the root of the tree over its ``entries`` entries, sorted by their names (RFC 9162).
    """

    kind: ClassVar[str] = "publication"
    registry: str
    size: int
    root: bytes
    entries: int
    map_root: bytes
    time: int

    def __post_init__(self) -> None:
        check_time(self.time)
        if len(self.root) != 32 or len(self.map_root) != 32:
            raise CallerError("the roots of a published view must have 32 bytes")
        for value in (self.size, self.entries):
            if type(value) is not int or not 1 <= value < 1 << 62:
                raise CallerError("a published view must have at least one event and one entry")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.REGISTRAR, None),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [("view", digest_bytes("chipwitness/registry-view/1", self.entries.to_bytes(8, "big") + self.map_root))]

    def predicate(self) -> dict[str, object]:
        return {
            "entries": self.entries,
            "map_root": self.map_root.hex(),
            "registry": self.registry,
            "root": self.root.hex(),
            "size": self.size,
            "time": self.time,
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Publication:
        return cls(
            registry=predicate["registry"],
            size=predicate["size"],
            root=bytes.fromhex(predicate["root"]),
            entries=predicate["entries"],
            map_root=bytes.fromhex(predicate["map_root"]),
            time=predicate["time"],
        )
