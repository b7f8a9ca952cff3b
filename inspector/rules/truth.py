"""Three values, since what cannot be decided neither holds nor is broken (Kleene 1952, section 64)."""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["Truth"]


class Truth(enum.Enum):
    """Whether a rule holds."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"

    @classmethod
    def all(cls, parts: Iterable[Truth]) -> Truth:
        """PASS if all are, FAIL if any is."""
        found = set(parts)
        return cls.FAIL if cls.FAIL in found else cls.UNDECIDED if cls.UNDECIDED in found else cls.PASS

    @classmethod
    def any(cls, parts: Iterable[Truth]) -> Truth:
        """PASS if any is, FAIL if all are."""
        return cls.all(part.opposite for part in parts).opposite

    @property
    def opposite(self) -> Truth:
        """FAIL for PASS and the other way round."""
        return {Truth.PASS: Truth.FAIL, Truth.FAIL: Truth.PASS}.get(self, self)
