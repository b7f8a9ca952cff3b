"""The last level of a dispute: one tile of a result, decided by the inputs that it depends on alone.

The first chunk of a result in which two parties differ is the tile. Where it would take much of the inputs, both open
that chunk, and the tile is the first element in which these differ: of a product, one row and one column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import CallerError
from firmware_sim.evidence import CHUNK_BYTES, DTYPE_SIZES
from inspector.dispute.openings import Committed, Source, hash_of
from monitor.numerics.operators import find
from monitor.numerics.operators.tiles import Operand, TileCall, Untiled, compute
from monitor.programs.trace import Node, content_of, restore_arguments

__all__ = ["TileRuling", "decide_tile", "first_difference", "named"]

_OF_A_CHUNK = 1 << 20
"""Elements of an input that the tile of a whole chunk may take."""
_OF_AN_ELEMENT = 1 << 23

Run = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class TileRuling:
    """Which parties state the tile as it is, and where it lies."""

    right: Mapping[str, bool]
    tile: str


def first_difference(claims: Mapping[str, Committed]) -> tuple[range, dict[str, bytes] | None]:
    """The first chunk in which two tensors of one type differ, as places of its elements, with both hashes.

    A tensor of one chunk needs none: None.
    """
    one, *_ = claims.values()
    length, size = CHUNK_BYTES // DTYPE_SIZES[one.dtype], math.prod(one.shape)
    if size <= length:
        return range(size), None
    hashes = {name: claim.hashes() for name, claim in claims.items()}
    first, second = hashes.values()
    number = next(number for number, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    start = number * length
    return range(start, min(start + length, size)), {name: each[number] for name, each in hashes.items()}


def named(slot: int, span: range, what: str = "result") -> str:
    """A tile as a reader sees it."""
    if len(span) == 1:
        return f"element {span.start} of {what} {slot}"
    return f"elements {span.start} to {span.stop - 1} of {what} {slot}"


def decide_tile(
    node: Node, slot: int, claims: Mapping[str, Committed], inputs: Sequence[Source], func: OpOverload, run: Run
) -> TileRuling:
    """Compute the first tile in which the claimed results differ.

    Args:
        claims: what each party opens of its result.
        inputs: on which both agree.
        run: calls an operator under the declared numerics.

    Raises:
        Untiled: no tile of this operator can be computed alone.
        EvidenceError: neither party opens an input, or the tile takes more than a game's evidence holds.
        Failure: a party has lost by its answer.
    """
    found = find(func)
    tile = None if found is None else found.row.tile
    if tile is None:
        raise Untiled(f"{node.operator} has no tiles")

    def computed(span: range, most: int) -> Tensor:
        operands = [_operand(each, most) for each in inputs]
        args, kwargs = restore_arguments(node.arguments, operands)  # type: ignore[arg-type]
        shapes = [tuple(each["shape"]) for each in node.results]
        call = TileCall(func=func, args=args, kwargs=kwargs, shapes=shapes, run=run)
        try:
            return compute(tile, call, slot, span)
        except (CallerError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise Untiled(f"{node.operator}: {error}") from None

    span, hashes = first_difference(claims)
    if not span:
        empty = torch.empty(0)
        return TileRuling({name: claim.is_of(empty) for name, claim in claims.items()}, f"result {slot}")
    try:
        values = computed(span, _OF_A_CHUNK)
    except Untiled:
        return _one_element(slot, claims, span, lambda place: computed(range(place, place + 1), _OF_AN_ELEMENT))
    if hashes is None:
        right = {name: claim.is_of(values) for name, claim in claims.items()}
    else:
        true = hash_of(values)
        right = {name: each == true for name, each in hashes.items()}
    return TileRuling(right, named(slot, span))


def _one_element(
    slot: int, claims: Mapping[str, Committed], span: range, computed: Callable[[int], Tensor]
) -> TileRuling:
    """The first element of a chunk in which the claims differ."""
    number = span.start // (CHUNK_BYTES // DTYPE_SIZES[next(iter(claims.values())).dtype])
    chunks = {name: _bits(claim.piece(number)) for name, claim in claims.items()}
    first, second = chunks.values()
    place = int((first != second).any(1).nonzero()[0, 0])
    true = _bits(computed(span.start + place))[0]
    right = {name: torch.equal(chunk[place], true) for name, chunk in chunks.items()}
    return TileRuling(right, named(slot, range(span.start + place, span.start + place + 1)))


def _operand(source: Source, most: int) -> Operand:
    return Operand(source.shape, getattr(torch, source.dtype), source.fetch, most)


def _bits(values: Tensor) -> Tensor:
    """(n, bytes of an element)."""
    return torch.frombuffer(bytearray(content_of(values)), dtype=torch.uint8).reshape(len(values), -1)
