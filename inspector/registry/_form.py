"""A statement as a dataclass whose fields are its in-toto predicate and subjects, written and read in one way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, VerifyingKey
from inspector.registry._values import ChipRef, ClaimKind, Role, check_lot

__all__ = ["Codec", "Form", "OfChips", "Position", "several"]

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""What writes a field as JSON, and what reads it; that raises ValueError, TypeError, CallerError or EvidenceError.

A value of another type is refused both ways: Python takes ``0``, ``False`` and ``0.0`` for equal, and ``[]`` for false.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a chip's log, behind record ``size`` - 1 whose hash is ``head``, and the digest of what shows it."""

    size: int
    head: bytes
    deposit: Digest

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size < 1 << 63 or len(self.head) != 32:
            raise CallerError("a position follows at least one record, and gives its hash of 32 bytes")

    def to_wire(self) -> list[Any]:
        """What ``parse`` reads."""
        return [self.size, self.head.hex(), str(self.deposit)]

    @classmethod
    def parse(cls, value: Sequence[Any]) -> Position:
        """Read what ``to_wire`` returns; ValueError, TypeError, CallerError or EvidenceError on any other form."""
        size, head, deposit = value
        return cls(size=size, head=bytes.fromhex(head), deposit=Digest.parse(deposit))


def _only(kind: type) -> Codec:
    """The codec of what JSON holds as it is: of exactly this type."""

    def same(value: Any) -> Any:
        if type(value) is not kind:
            raise CallerError(f"{value!r:.100} is not of type {kind.__name__}")
        return value

    return same, same


def several(codec: Codec) -> Codec:
    """The codec of a tuple of values, each of which has this one."""
    write, read = codec
    return lambda values: [write(each) for each in values], lambda values: tuple(map(read, values))


_TEXT, _NUMBER = _only(str), _only(int)
_DIGEST: Codec = (str, Digest.parse)
_CODECS: dict[Any, Codec] = {
    str: _TEXT,
    int: _NUMBER,
    bytes: (bytes.hex, bytes.fromhex),
    Role: (lambda role: role.value, Role),
    ClaimKind: (lambda claim: claim.value, ClaimKind),
    VerifyingKey: (lambda key: key.raw.hex(), lambda text: VerifyingKey(bytes.fromhex(text))),
    tuple[str, ...]: several(_TEXT),
    tuple[Digest, ...]: several(_DIGEST),
    tuple[Position, ...]: several((Position.to_wire, Position.parse)),
    tuple[ChipRef, ...]: several((lambda chip: chip.sequence, _NUMBER[1])),
}


class Form:
    """What is common to all statements.

    Attributes:
        keys: JSON keys of fields that are called otherwise there.
        codecs: of fields whose type does not say how they are written.
        in_subject: fields that the first subject holds: 0 for its name, 1 for its digest.
    """

    __slots__ = ()
    keys: ClassVar[Mapping[str, str]] = {}
    codecs: ClassVar[Mapping[str, Codec]] = {}
    in_subject: ClassVar[Mapping[str, int]] = {}

    def predicate(self) -> dict[str, object]:
        """Its fields as JSON; statements from before chips had positions have no such key."""
        written = ((key, write(getattr(self, name))) for name, key, (write, _) in _wires(type(self)))
        return {key: value for key, value in written if value or key != "positions"}

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Self:
        """What subjects and predicate say; KeyError, or what a codec raises, where they are none of this kind."""
        wires = [each for each in _wires(cls) if each[1] != "positions" or "positions" in predicate]
        found = {name: read(predicate[key]) for name, key, (_, read) in wires}
        return cls(**cls._shown(subjects, found))

    @classmethod
    def _shown(cls, subjects: Sequence[tuple[str, Digest]], found: dict[str, Any]) -> dict[str, Any]:
        """The fields, with those that the subjects hold."""
        return found | {name: subjects[0][part] for name, part in cls.in_subject.items()}


class OfChips(Form):
    """A statement whose subjects are chips, with the number that each chip's record has then."""

    __slots__ = ()
    keys: ClassVar[Mapping[str, str]] = {"chips": "sequences"}
    chips: tuple[ChipRef, ...]
    positions: tuple[Position, ...]

    def check_chips(self) -> None:
        """CallerError unless it names chips, each once, and a position for each of them or none."""
        check_lot(self.chips)
        if len(self.positions) not in (0, len(self.chips)):
            raise CallerError(f"a statement gives the positions of all its {len(self.chips)} chips, or of none")

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(chip.chip, chip.digest) for chip in self.chips]

    @classmethod
    def _shown(cls, subjects: Sequence[tuple[str, Digest]], found: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(subjects, found["chips"], strict=True)
        return found | {"chips": tuple(ChipRef(chip, digest, sequence) for (chip, digest), sequence in pairs)}


Wire = tuple[str, str, Codec]
"""Name, JSON key and codec of a field."""


def _wires_of(cls: Any) -> tuple[Wire, ...]:
    """Of each field of the predicate."""
    hints = get_type_hints(cls)
    names = [each.name for each in fields(cls) if each.name not in cls.in_subject]
    return tuple((name, cls.keys.get(name, name), cls.codecs.get(name) or _CODECS[hints[name]]) for name in names)


_wires: Callable[[Any], tuple[Wire, ...]] = functools.cache(_wires_of)
