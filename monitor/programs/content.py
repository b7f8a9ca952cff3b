"""What a region of a program's memory holds, piece by piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Content"]

Value = TypeVar("Value")

_MOST_PIECES = 4096


class Content(Generic[Value]):
    """Values of the elements of a region, so many or without a known end; one value at first."""

    def __init__(self, value: Value, size: int | None = None) -> None:
        self._size = size
        self._starts: list[int] = [0]
        self._values: list[Value] = [value]

    def read(self, runs: Sequence[tuple[int, int]] | None) -> Iterator[Value]:
        """The values that stretches of elements hold, None standing for the whole."""
        if runs is None or len(self._values) == 1:
            yield from self._values
            return
        for first, last in runs:
            at = bisect_right(self._starts, first) - 1
            while at < len(self._starts) and self._starts[at] < last:
                yield self._values[at]
                at += 1

    def write(self, runs: Sequence[tuple[int, int]] | None, value: Value) -> None:
        """Give all elements of these stretches a value; None means the whole."""
        if runs is None:
            self._starts, self._values = [0], [value]
            return
        for first, last in runs:
            begin, end = self._cut(first), self._cut(last)
            self._starts[begin:end], self._values[begin:end] = [first], [value]

    def mix(self, change: Callable[[Value], Value]) -> None:
        """Change the value of every piece."""
        self._values = [change(value) for value in self._values]

    @property
    def is_full(self) -> bool:
        """Whether it has as many pieces as it may have."""
        return len(self._values) >= _MOST_PIECES

    def _cut(self, at: int) -> int:
        """Have a piece begin at an element; its number, the one after the last at the end."""
        if at == self._size:
            return len(self._starts)
        found = bisect_right(self._starts, at) - 1
        if self._starts[found] == at:
            return found
        self._starts.insert(found + 1, at)
        self._values.insert(found + 1, self._values[found])
        return found + 1
