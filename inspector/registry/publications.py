"""What the registry tells inspectors: makers' reference values, revocations, and the view that the registrar publishes.

A view is the root of a tree over everything that the directory says at one size of its log (``listing``); the registrar
signs it and logs it, so that showing anyone another view of the same log leaves a proof of that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, canonical, digest_bytes
from inspector.registry._form import Codec, Form, OfChips, Position
from inspector.registry._values import Capacity, ChipRef, check_name, check_text, check_time

__all__ = ["Publication", "ReferenceValues", "Revocation"]

_RATE = re.compile("[0-9]{1,39}(/[0-9]{1,39})?", re.ASCII)
_MOST_VALUES = 1000


def _rate(text: str) -> Fraction:
    if not _RATE.fullmatch(text):
        raise CallerError("the snapshot rate is not a fraction")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise CallerError("the snapshot rate is not a fraction") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues(Form):
    """A maker says which of its chips' evidence counts: its CAs, allowed firmware, and the snapshot schedule.

    The last such statement of a maker holds; the terms are those of RFC 9334 (reference values of a verifier).
    """

    kind: ClassVar[str] = "reference-values"
    keys: ClassVar[Mapping[str, str]] = {"ca_digests": "makers"}
    codecs: ClassVar[Mapping[str, Codec]] = {"snapshot_rate": (str, _rate)}
    in_subject: ClassVar[Mapping[str, int]] = {"maker": 0}
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
        return {key: value for key, value in self.predicate().items() if key not in ("registry", "time")}

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(self.maker, digest_bytes("chipwitness/registry-values/1", canonical.encode(self.content())))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation(OfChips):
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
        self.check_chips()
        check_time(self.time)
        check_text("reason", self.reason)
        if not self.reason:
            raise CallerError(f"chip {self.chips[0].chip}: a revocation needs a reason")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.REGISTRAR, None),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication(Form):
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
