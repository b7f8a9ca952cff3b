"""Constants of a program: tensors that nothing in the step made.

    all elements equal      the program holds one element, whatever their number
    fewer than 16 bytes     the program holds all of them
    anything else           SHA-256 of the bytes; these lie in a file of their own, in the order of the constants

A constant has one form, which follows from its content alone, and the program's digest binds every byte. A reader who
holds the program and not that file knows how large a constant is, and that its elements differ, and cannot execute it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import DTYPE_SIZES

__all__ = ["APART_BYTES", "Constant", "apart", "parse_constants", "with_content"]

APART_BYTES = 16
"""From here on the bytes of a constant whose elements differ lie apart from the program."""
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class Constant:
    """The whole storage, flat, little-endian.

    Attributes:
        elements: how many.
        held: its bytes, or those of one element where all are equal; None where only their digest is known.
        named: that digest, SHA-256 in hex; empty where the bytes are known.
    """

    dtype: str
    elements: int
    held: bytes | None
    named: str = ""

    @classmethod
    def of(cls, dtype: str, content: bytes) -> Constant:
        """One with these bytes."""
        return cls(dtype, len(content) // DTYPE_SIZES[dtype], content)

    @property
    def length(self) -> int:
        """Bytes of the whole."""
        return self.elements * DTYPE_SIZES[self.dtype]

    @cached_property
    def unit(self) -> bytes | None:
        """Bytes that a program holds: of one element where all are equal, or of all; None where a digest does."""
        if self.held is None:
            return None
        one = self.held[: DTYPE_SIZES[self.dtype]]
        if self.held == one * (len(self.held) // max(len(one), 1)):
            return one
        return self.held if self.length < APART_BYTES else None

    @property
    def is_uniform(self) -> bool:
        """Whether all elements are equal: then it is a number, like the scalars of a program."""
        return self.unit is not None and len(self.unit) <= DTYPE_SIZES[self.dtype]

    @cached_property
    def sha256(self) -> str:
        """Digest of all bytes, lower-case hex."""
        return self.named or hashlib.sha256(self.content).hexdigest()

    @property
    def content(self) -> bytes:
        """All bytes; EvidenceError where only their digest is known."""
        if self.held is None:
            raise EvidenceError(f"only the digest of a constant of {self.length} bytes is shown here, not the constant")
        return self.held if len(self.held) == self.length else self.held * self.elements

    def tensor(self) -> Tensor:
        """A fresh copy, 1-D; EvidenceError where only the digest of its bytes is known."""
        kind: torch.dtype = getattr(torch, self.dtype)
        content = self.content
        return torch.frombuffer(bytearray(content), dtype=kind) if content else torch.empty(0, dtype=kind)

    def filled(self, content: bytes) -> Constant:
        """The same with its bytes; EvidenceError unless they are those of which it has the digest."""
        found = Constant.of(self.dtype, content)
        check_named(self, found)
        return found

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        form = {"sha256": self.sha256} if self.unit is None else {"data": base64.b64encode(self.unit).decode()}
        return {"dtype": self.dtype, "elements": self.elements, **form}

    @classmethod
    def from_json(cls, data: object) -> Constant:
        """Parse; EvidenceError on any other form than ``to_json`` gives."""
        if not isinstance(data, dict) or not {"dtype", "elements"} < set(data) or data["dtype"] not in DTYPE_SIZES:
            raise EvidenceError("a program's constant is malformed")
        dtype, elements = data["dtype"], data["elements"]
        if type(elements) is not int or elements < 0:
            raise EvidenceError("a program's constant is malformed")
        size = elements * DTYPE_SIZES[dtype]
        limits.CONSTANTS_BYTES.check(size)
        if set(data) == {"dtype", "elements", "sha256"}:
            digest = data["sha256"]
            if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None or elements < 2 or size < APART_BYTES:
                raise EvidenceError("a program's constant is malformed")
            return cls(dtype, elements, None, digest)
        if set(data) != {"dtype", "elements", "data"}:
            raise EvidenceError("a program's constant is malformed")
        try:
            held = base64.b64decode(data["data"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise EvidenceError("a program's constant is not base64") from None
        found = cls(dtype, elements, held)
        if len(held) not in (size, min(size, DTYPE_SIZES[dtype])):
            raise EvidenceError("a program's constant is malformed")
        check_form(found, data)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or (self.dtype, self.elements) != (other.dtype, other.elements):
            return False
        if self.held is not None and other.held is not None and len(self.held) == len(other.held):
            return self.held == other.held
        return self.unit == other.unit and (self.unit is not None or self.sha256 == other.sha256)

    def __hash__(self) -> int:
        return hash((self.dtype, self.elements))


def check_named(named: Constant, found: Constant) -> None:
    """EvidenceError unless a constant is the one that goes by this digest, and not one that needs none."""
    if (found.elements, found.sha256) != (named.elements, named.sha256):
        raise EvidenceError(f"a constant of {named.length} bytes does not have the digest that its program gives")
    if found.unit is not None:
        raise EvidenceError(
            "a program gives a constant only by its digest, although all elements of the constant are equal"
        )


def check_form(found: Constant, data: object) -> None:
    """EvidenceError unless that is the one form of a constant."""
    if found.to_json() != data:
        raise EvidenceError("a program's constant is malformed")


def parse_constants(data: Sequence[object]) -> tuple[Constant, ...]:
    """Constants of a program; EvidenceError on another form, or more bytes than one may have."""
    found = tuple(map(Constant.from_json, data))
    limits.CONSTANTS_BYTES.check(sum(each.length for each in found))
    return found


def apart(constants: Sequence[Constant]) -> list[Constant]:
    """Those whose bytes lie apart from their program."""
    return [each for each in constants if each.unit is None]


def with_content(constants: Sequence[Constant], content: bytes) -> tuple[Constant, ...]:
    """The same with the bytes of those that lie apart, one after the other; EvidenceError unless they are these."""
    lengths: Mapping[int, int] = {number: each.length for number, each in enumerate(constants) if each.unit is None}
    if len(content) != sum(lengths.values()):
        raise EvidenceError(f"the constants of a program have {len(content)} bytes, not {sum(lengths.values())}")
    found, at = list(constants), 0
    for number, length in lengths.items():
        found[number] = found[number].filled(content[at : at + length])
        at += length
    return tuple(found)
