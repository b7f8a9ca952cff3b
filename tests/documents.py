"""JSON documents with something else at one place, for tests of what parsers refuse."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

__all__ = ["changed", "places"]

Place = tuple[Any, ...]
"""Keys and numbers that lead to a value."""


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Places of all values below a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(document: Any, place: Place, value: Any) -> Any:
    """A copy that holds another value there; ``KeyError`` for none at all."""
    copy = deepcopy(document)
    *outer, last = place
    holder = copy
    for key in outer:
        holder = holder[key]
    if value is KeyError:
        del holder[last]
    else:
        holder[last] = value
    return copy
