"""Tiles under ``rounded`` numerics: some elements of a result, under what a log says of them.

Law: such a tile has the bits that the whole result has in its place under the same log; it is refused where an entry
about one of its elements, or the want of one, breaks a rule. An element rounds by its value, its bound and its own
entry alone. The bound of a product takes a row and a column, that of a function its argument, that of a convolution
whole images. Sums are exact in any order, and are scaled line by line; those of scattered rows are not, since how many
rows meet in one is a property of all. A call in which anything else is ambiguous is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.declared import groups_in, recording, referee, written
from monitor.numerics.errors import LogContradiction
from monitor.numerics.operators import boxes, find, partial_sums, patches, tiles
from monitor.numerics.operators.tiles import Run, Tile, Untiled
from monitor.numerics.rounding.codec import Group

__all__ = ["Rounds", "is_well_formed", "rounded_tile", "tile_of_rounded"]

Rounds = Literal["once", "in form", "inside", "never"]
"""What a call rounds: each result, in order; its result, and on the way numbers of its form; others; or nothing."""
_TILES: Mapping[Tile, tuple[Tile, Rounds]] = {
    tiles.matrix_product: (tiles.matrix_product, "once"),
    patches.convolution: (patches.images, "once"),
    patches.convolution_slope: (patches.images_slope, "once"),
    tiles.elements: (tiles.elements, "in form"),
    **{
        each: (each, "inside")
        for each in (
            tiles.list_elements,
            tiles.loss_slope,
            tiles.reduction,
            tiles.layer_norm_slope,
            boxes.by_row,
            boxes.by_channel,
            boxes.by_group,
            boxes.by_group_slope,
        )
    },
}
"""By an operator's tile under ``exact`` numerics."""
_LINES = frozenset(
    f"aten.{name}.default"
    for name in ["_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "cumsum"]
)
"""Operators on lines that scatter nothing."""
_FORM = "what it rounds has not the form of its result"


def tile_of_rounded(func: OpOverload, args: Sequence[Any]) -> tuple[Tile | None, Rounds]:
    """What computes tiles of a call; Untiled where none is built. None: it has parts alone.

    Args:
        args: positional ones, of which tensors do not count.
    """
    found = find(func)
    if found is not None and found.row.name in _LINES:
        return tiles.lines, "in form"
    tile, parts = (None, None) if found is None else (found.row.tile, found.row.parts)
    if parts in (partial_sums.summed, partial_sums.averaged, partial_sums.loss):
        return tile, "never"
    if tile is None and parts is partial_sums.norm:
        return None, "inside"
    if tile is None or tile not in _TILES:
        raise Untiled(f"{func} has no tiles under rounded numerics")
    of_rounded, rounds = _TILES[tile]
    if tile in (patches.convolution, patches.convolution_slope):
        stride, _, _, is_transposed = args[3:7] if tile is patches.convolution else args[4:8]
        if is_transposed or len(stride) > 2:  # it is made of results of another form
            raise Untiled(_FORM)
    return of_rounded, "inside" if rounds == "in form" and len(func._schema.returns) > 1 else rounds


def is_well_formed(declared: str, rounds: Rounds, args: Sequence[Any], sizes: Sequence[int], entries: bytes) -> bool:
    """Whether a log counts the elements of what a call rounds, as far as its form alone shows that.

    Args:
        args: of the call, tensors left out.
        sizes: of its results.
        entries: what the log says of the call, as of call 0.
    """
    if rounds == "never":
        return not groups_in(declared, entries, 0)
    if rounds != "once":
        return True
    rounded = sizes[: sum(args[-1][:2])] if isinstance(args[-1], list) and len(sizes) > 1 else sizes[:1]
    groups = groups_in(declared, entries, 0)
    return all(each.part < len(rounded) and each.size == rounded[each.part] for each in groups)


def rounded_tile(
    declared: str,
    make: Callable[[Run], Tensor],
    span: range,
    size: int,
    entries: bytes,
    *,
    rounds: Rounds,
    slot: int = 0,
    keys: Callable[[], Callable[[], int]] | None = None,
) -> tuple[Tensor, bool]:
    """The elements (len(span),) of a result under a log, and whether no honest replayer can object to what it says.

    Args:
        declared: the numerics that the run declares.
        make: computes the tile, given what runs its operator, which it does once.
        span: their places.
        size: elements of the whole result.
        entries: what the log says of the call, as of call 0.
        rounds: what the call rounds.
        slot: number of the result.
        keys: makes keys for random operators.

    Raises:
        LogContradiction: no honest recorder can have written what the log says of these elements.
        Untiled: something else is ambiguous.
    """
    said = groups_in(declared, entries, 0)
    if rounds == "once":
        said = [replace(each, part=0) for each in said if each.part == slot]
        if any(each.size != size for each in said):
            raise LogContradiction(call=0, operator="", element=None, rule=f"the log counts not {size} elements")
    own: list[Group] = []
    sizes: list[int] = []

    def number(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        session = recording(declared, keys=None if keys is None else keys())
        with session:
            out = func(*args, **kwargs)
        own.extend(groups_in(declared, session.entries_of(0), 0))
        sizes.extend(each.numel() for each in _tensors(out))
        return out if rounds in ("inside", "never") else _numbered(out)

    tile = make(number)
    if rounds in ("inside", "never"):
        if said or own:
            raise Untiled(_FORM)
        return tile, True
    if len(sizes) != 1 or any(each.size != size for each in said) or any(each.size != sizes[0] for each in own):
        raise Untiled(_FORM)
    log = written(declared, _merged(said, own, tile.numpy(), span, sizes[0]))
    is_lawful: list[bool] = []

    def judge(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out, lawful = referee(declared, func, args, dict(kwargs), entries=log, keys=None if keys is None else keys())
        is_lawful.append(lawful)
        return out

    return make(judge), all(is_lawful)


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [each for each in out or () if each is not None]


def _numbered(out: Any) -> Any:
    """The same results, with the number of each element in its place."""
    if isinstance(out, Tensor):
        return torch.arange(out.numel()).reshape(out.shape)
    return [None if each is None else _numbered(each) for each in out]


def _merged(
    said: Sequence[Group], own: Sequence[Group], places: np.ndarray[Any, Any], span: range, size: int
) -> list[Group]:
    """Entries of a call of this size: the log's about the elements of the tile, and this device's about others."""
    logs: dict[int, dict[int, bool]] = {}
    for group in own:
        others = ~np.isin(group.positions, places)
        chosen = zip(group.positions[others].tolist(), group.upward[others].tolist(), strict=True)
        logs.setdefault(group.part, {}).update(chosen)
    for group in said:
        mine = (group.positions >= span.start) & (group.positions < span.stop)
        chosen = zip(places[group.positions[mine] - span.start].tolist(), group.upward[mine].tolist(), strict=True)
        logs.setdefault(group.part, {}).update(chosen)
    return [
        Group(
            call=0,
            part=part,
            size=size,
            positions=np.array(sorted(log)),
            upward=np.array([log[at] for at in sorted(log)]),
        )
        for part, log in sorted(logs.items())
        if log
    ]
