"""The last level of a dispute: one tile of a result, decided by the inputs that it depends on alone.

The first chunk of a result in which two parties differ is the tile. Where it would take much of the inputs, both open
that chunk, and the tile is the first element in which these differ: of a product, one row and one column. Where that
is too much, a part of it decides (``reduction``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import CallerError
from firmware_sim.evidence import CHUNK_BYTES, DTYPE_SIZES
from inspector.dispute.openings import Committed, Source, hash_of
from monitor.numerics.operators import find
from monitor.numerics.operators.tiles import Operand, Run, Tile, TileCall, Untiled, compute
from monitor.programs.calls import operator_of
from monitor.programs.trace import Node, content_of, restore_arguments

__all__ = [
    "OF_AN_ELEMENT",
    "OF_A_TILE",
    "UNFIT",
    "Computed",
    "TileRuling",
    "decide_tile",
    "first_difference",
    "named",
    "operands_of",
    "tile_of",
    "tiles_of",
]

OF_A_TILE = 4 << 20
"""Bytes of inputs that the tile of a whole chunk may take, in the chunks in which they are opened; an element may take
more where it is none of parts (``reduction``)."""
_OF_A_CHUNK = 1 << 20
"""Elements of an input that such a tile may take."""
OF_AN_ELEMENT = 1 << 23

UNFIT = (
    CallerError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What arguments raise of which an operator, or its tile, makes nothing."""

Computed = Callable[[range, int], Tensor | None]
"""A tile, by its places and the most elements of an input that it may take; None where a log denies it."""
Settle = Callable[[Callable[[Run], Tensor], range], Tensor | None]
"""The same, given what computes it once it is told how to run an operator."""
ByParts = Callable[[int, Mapping[str, Tensor]], "TileRuling | None"]


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


def tile_of(func: OpOverload) -> Tile | None:
    """What computes tiles of an operator under ``exact`` numerics; Untiled where it has none, and is none of parts."""
    found = find(func)
    if found is None or (found.row.tile is None and found.row.parts is None):
        raise Untiled(f"{func} cannot be computed in tiles")
    return found.row.tile


def tiles_of(
    node: Node, slot: int, inputs: Sequence[Source], tile: Tile | None, settle: Settle, *, is_exact: bool = True
) -> Computed:
    """What computes tiles of a result of an operator.

    Args:
        inputs: on which both agree.
        is_exact: the declared numerics are ``exact``, or nothing is rounded.
    """
    func = operator_of(node.operator)
    shapes = [tuple(each["shape"]) for each in node.results]

    def made(span: range, operands: list[Operand], run: Run) -> Tensor:
        args, kwargs = restore_arguments(node.arguments, operands)  # type: ignore[arg-type]
        call = TileCall(func=func, args=args, kwargs=kwargs, shapes=shapes, run=run, is_exact=is_exact)
        try:
            return compute(tile, call, slot, span)
        except UNFIT as error:
            raise Untiled(f"{node.operator}: {error}") from None

    def computed(span: range, most: int) -> Tensor | None:
        limit = OF_A_TILE if most == _OF_A_CHUNK else None
        if limit is not None:  # nothing is asked for in vain
            with suppress(_Enough):
                made(span, operands_of(inputs, [], most, limit, is_blank=True), _runs_nothing)
        values = settle(lambda run: made(span, operands_of(inputs, [], most, limit), run), span)
        if values is not None and str(values.dtype) != f"torch.{node.results[slot]['dtype']}":
            raise Untiled(f"{node.operator} gives {values.dtype}")
        return values

    return computed


class _Enough(Exception):
    """An operator would be called now."""


def _runs_nothing(*_: object) -> None:
    raise _Enough


def operands_of(
    inputs: Sequence[Source], taken: list[int], most: int, limit: int | None = None, *, is_blank: bool = False
) -> list[Operand]:
    """Operands that note the bytes of the chunks in which what they give lies.

    Args:
        taken: these bytes.
        most: elements that an operand gives at once.
        limit: of all bytes; Untiled beyond.
        is_blank: nothing is asked for and zeros are given, but for whole numbers, which say where other elements lie.
    """

    def operand(source: Source) -> Operand:
        kind: torch.dtype = getattr(torch, source.dtype)
        held = math.prod(source.shape) * kind.itemsize

        def fetch(places: Tensor) -> Tensor:
            taken.append(min(source.pieces(places) * CHUNK_BYTES, held))
            if limit is not None and sum(taken) > limit:
                raise Untiled(f"one tile of the output would need more than {limit} bytes of inputs")
            return torch.zeros(len(places), dtype=kind) if is_blank and kind.is_floating_point else source.fetch(places)

        return Operand(source.shape, kind, fetch, most)

    return [operand(each) for each in inputs]


def decide_tile(
    slot: int,
    claims: Mapping[str, Committed],
    computed: Mapping[str, Computed],
    by_parts: ByParts = lambda place, stated: None,
) -> TileRuling:
    """Compute the first tile in which the claimed results differ.

    Args:
        claims: what each party opens of its result.
        computed: what each one's is to be.
        by_parts: decides an element that takes too much for a tile.

    Raises:
        Untiled: no tile of this operator can be computed alone.
        EvidenceError: neither party opens an input, or the tile takes more than a game's evidence holds.
        Failure: a party has lost by its answer.
    """
    span, hashes = first_difference(claims)
    if not span:
        empty = torch.empty(0)
        return TileRuling({name: claim.is_of(empty) for name, claim in claims.items()}, f"result {slot}")
    try:
        values = _for_each(computed, span, _OF_A_CHUNK)
    except Untiled:
        return _one_element(slot, claims, span, computed, by_parts)
    right = {
        name: tile is not None and (claims[name].is_of(tile) if hashes is None else hashes[name] == hash_of(tile))
        for name, tile in values.items()
    }
    return TileRuling(right, named(slot, span))


def _for_each(computed: Mapping[str, Computed], span: range, most: int) -> dict[str, Tensor | None]:
    """The tile of each party, computed once where it is the same."""
    tiles = {each: each(span, most) for each in computed.values()}
    return {name: tiles[each] for name, each in computed.items()}


def _one_element(
    slot: int, claims: Mapping[str, Committed], span: range, computed: Mapping[str, Computed], by_parts: ByParts
) -> TileRuling:
    """The first element of a chunk in which the claims differ."""
    number = span.start // (CHUNK_BYTES // DTYPE_SIZES[next(iter(claims.values())).dtype])
    chunks = {name: claim.piece(number) for name, claim in claims.items()}
    first, second = map(_bits, chunks.values())
    inside = int((first != second).any(1).nonzero()[0, 0])
    stated, place = {name: chunk[inside : inside + 1] for name, chunk in chunks.items()}, span.start + inside
    found = by_parts(place, stated)
    if found is not None:
        return found
    element = range(place, place + 1)
    true = _for_each(computed, element, OF_AN_ELEMENT)
    right = {name: value is not None and torch.equal(_bits(stated[name]), _bits(value)) for name, value in true.items()}
    return TileRuling(right, named(slot, element))


def _bits(values: Tensor) -> Tensor:
    """(n, bytes of an element)."""
    return torch.frombuffer(bytearray(content_of(values)), dtype=torch.uint8).reshape(len(values), -1)
