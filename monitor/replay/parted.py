"""An operator's element in parts, as the party that computes them and a referee that checks one of them see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monitor.numerics.declared import written
from monitor.numerics.operators import find
from monitor.numerics.operators.partial_sums import MOST_PARTS, Part, Parted, combined, norm, product, spans
from monitor.numerics.operators.tiles import Operand, TileCall, Untiled
from monitor.numerics.rounded_parts import parted_product, parted_sum
from monitor.programs.calls import operator_of
from monitor.programs.trace import Node, restore_arguments

__all__ = ["parted_of", "parts_of"]


def parted_of(
    node: Node, slot: int, place: int, operands: Sequence[Operand], declared: str = "exact", entries: bytes = b""
) -> Parted:
    """What an element of a result is reduced over; Untiled where its operator, or this call of it, has no parts.

    Args:
        declared: numerics.
        entries: what a rounding log says of the call, as of call 0.
    """
    func, shapes = operator_of(node.operator), [tuple(each["shape"]) for each in node.results]
    found = find(func)
    if found is None or found.row.parts is None or node.results[slot]["dtype"] != "float32":
        raise Untiled(f"{node.operator} has no parts")
    args, kwargs = restore_arguments(node.arguments, list(operands))  # type: ignore[arg-type]
    if any(isinstance(each, Operand) for each in kwargs.values()):
        raise Untiled(f"{node.operator} writes into a tensor that its caller passes")
    call = TileCall(func=func, args=args, kwargs=kwargs, shapes=shapes, run=_runs_nothing)
    if declared == "exact":
        return found.row.parts(call, slot, place)
    if found.row.parts is product:
        return parted_product(call, slot, place, declared, entries or written(declared, []))
    return parted_sum(found.row.parts(call, slot, place), is_norm=found.row.parts is norm)


def parts_of(
    node: Node, slot: int, place: int, count: int, contents: Sequence[memoryview], declared: str = "exact"
) -> tuple[Part, ...]:
    """Numbers of so many equal parts, from all bytes of the inputs; Untiled as above, or for no such number."""
    operands = [_held(each, layout) for each, layout in zip(contents, node.sources, strict=True)]
    parted = parted_of(node, slot, place, operands, declared)
    if not 1 <= count <= min(MOST_PARTS, parted.terms):
        raise Untiled(f"{node.operator} is not reduced in {count} parts")
    values = [parted.taken(span) for span in spans(parted.terms, count)]
    mosts = [parted.most(each) for each in values]
    top = combined([Part(most, ()) for most in mosts]).most
    return tuple(Part(most, parted.sums(each, top)) for most, each in zip(mosts, values, strict=True))


def _held(content: memoryview, layout: dict[str, object]) -> Operand:
    kind: torch.dtype = getattr(torch, str(layout["dtype"]))
    flat = torch.frombuffer(bytearray(content), dtype=kind) if len(content) else torch.empty(0, dtype=kind)
    return Operand(tuple(layout["shape"]), kind, lambda places: flat[places], len(flat))  # type: ignore[arg-type]


def _runs_nothing(*_: object) -> None:
    raise Untiled("its parts run no operator")
