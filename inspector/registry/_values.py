"""The words that registry statements are made of, and what makes each of them valid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, digest_bytes

__all__ = [
    "MAX_LOT",
    "Capacity",
    "ChipRecord",
    "ChipRef",
    "ChipState",
    "ClaimKind",
    "Role",
    "check_lot",
    "check_name",
    "check_text",
    "check_time",
]

MAX_LOT = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
_MODEL = re.compile(r"[ -~]{0,64}")
_IDENTITY = re.compile(r"[a-z0-9-]{1,15}:[0-9a-f]{64}")


class ChipState(IntEnum):
    """Where a chip is between fab and destruction; in every state its last holder answers for it."""

    FABRICATED = 1
    OWNED = 2
    LOST = 3
    DESTROYED = 4

    @property
    def present(self) -> bool:
        """Whether the holder claims to have the chip, so that a census may ask for it."""
        return self in (ChipState.FABRICATED, ChipState.OWNED)


class Role(StrEnum):
    """Role of an enrolled party."""

    REGISTRAR = "registrar"
    MAKER = "maker"
    OWNER = "owner"
    INSPECTOR = "inspector"


class Capacity(StrEnum):
    """The part that a signature plays in a statement."""

    REGISTRAR = "registrar"
    MAKER = "maker"
    RELEASE = "release"
    ACCEPTANCE = "acceptance"
    HOLDER = "holder"
    WITNESS = "witness"
    INSPECTOR = "inspector"


class ClaimKind(StrEnum):
    """A holder's claim about its chips; all but a loss need an inspector who saw it."""

    LOST = "lost"
    FOUND = "found"
    DESTROYED = "destroyed"


def check_name(what: str, name: object) -> str:
    """Return ``name`` if it is a chip id or party name: 1-64 of ``A-Za-z0-9._:/-``, the first a letter or digit."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CallerError(f"{what} {name!r:.80} is not 1-64 letters, digits or ._:/- (a letter or digit first)")
    return name


@dataclass(frozen=True, slots=True)
class ChipRecord:
    """A chip's genesis record: its id, its model, and the digest that names its device certificate ("" if none)."""

    chip: str
    model: str = ""
    identity: str = ""

    def __post_init__(self) -> None:
        check_name("chip id", self.chip)
        if not _MODEL.fullmatch(self.model):
            raise CallerError(
                f"chip {self.chip}: model {self.model!r:.80} is not at most 64 printable ASCII characters"
            )
        if self.identity and not _IDENTITY.fullmatch(self.identity):
            raise CallerError(
                f"chip {self.chip}: identity {self.identity!r:.100} is not a digest like sha256:HEX, "
                "64 digits in small letters"
            )

    def leaf(self) -> bytes:
        """The record's bytes in its batch's tree; no field holds a NUL, so no two records share them."""
        return f"chipwitness/registry-chip/1\0{self.chip}\0{self.model}\0{self.identity}".encode()

    def digest(self) -> Digest:
        return digest_bytes("chipwitness/registry-chip/1", self.leaf())


@dataclass(frozen=True, slots=True)
class ChipRef:
    """One chip as the subject of a statement: id, digest of the genesis record, the chip's next sequence number."""

    chip: str
    digest: Digest
    sequence: int

    def __post_init__(self) -> None:
        check_name("chip id", self.chip)
        if type(self.sequence) is not int or not 1 <= self.sequence < 2**31:
            raise CallerError(f"chip {self.chip}: sequence number {self.sequence!r} is not a positive integer")


def check_lot(chips: Sequence[ChipRef]) -> None:
    if not 1 <= len(chips) <= MAX_LOT:
        raise CallerError(f"a statement can cover 1 to {MAX_LOT} chips, not {len(chips)}")
    if len({ref.chip for ref in chips}) != len(chips):
        raise CallerError("a statement names a chip twice")


def check_time(time: object) -> None:
    if type(time) is not int or not 0 <= time < 2**40:
        raise CallerError(f"time {time!r} is not a count of seconds since 1970")


def check_text(what: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > 500 or not text.isprintable():
        raise CallerError(f"{what} must be at most 500 printable characters")
