"""Where operators read and write memory that their operands' content does not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics.operators import row_named
from monitor.programs.program import operator_of
from monitor.programs.trace import Node, restore_arguments, written_arguments

__all__ = ["BY_MEMORY", "strided_place", "written_place"]

BY_MEMORY = "aten.as_strided"
"""Operators that read their input's memory at places that the input's content does not give."""


def written_place(node: Node, slot: int) -> Mapping[str, Any] | None:
    """Where the argument lies that a call wrote as this result; None of a result that it made."""
    blanks = [torch.empty(0, device="meta") for _ in node.sources]
    args, kwargs = restore_arguments(node.arguments, blanks)
    try:
        written = written_arguments(operator_of(node.operator), args, kwargs)
    except (CallerError, LookupError, ValueError):
        raise EvidenceError(
            f"the program of a source has an operator that is not known: {node.operator!a:.100}"
        ) from None
    number = slot - (len(node.results) - len(written))
    if number < 0:
        return None
    return next(place for place, each in zip(node.sources, blanks, strict=True) if each is written[number])


def strided_place(node: Node, node_at: Callable[[int], Node]) -> dict[str, Any]:
    """Where the result of ``as_strided`` lies, from the first element of its input on; EvidenceError if unknown."""
    place, args = node.sources[0], dict(enumerate(node.arguments["args"]))
    if node.operator not in (f"{BY_MEMORY}.default", f"{BY_MEMORY}_copy.default"):
        raise EvidenceError("it writes there")
    named = node.arguments["kwargs"]
    shape, stride, start = (
        args.get(at, named.get(name)) for at, name in enumerate(("size", "stride", "storage_offset"), 1)
    )
    offset = 0
    if start is not None:  # counted from the start of memory, which is where an operator of ATen's own puts a result
        kind, _, name = str(place["source"]).partition(":")
        index, slot = (int(part) for part in name.split(":")) if kind == "node" else (0, 0)
        source = node_at(index)
        if kind != "node" or row_named(source.operator).kind != "exact" or written_place(source, slot) is not None:
            raise EvidenceError("where that memory begins is not known")
        offset = start - place["offset"]
    return {"dtype": place["dtype"], "shape": shape, "stride": stride, "offset": offset}
