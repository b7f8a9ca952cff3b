"""Tiles under ``rounded`` numerics: some elements of a result, under what a log says of them.

Law: such a tile has the bits that the whole result has in its place under the same log; it is refused where an entry
about one of its elements, or the want of one, breaks a rule. An element rounds by its value, its bound and its own
entry, and in a line by those of its line. The bound of a product takes a row and a column, that of a function its
argument, that of a convolution whole images. Sums are exact in any order, and are scaled line by line; those of
scattered rows are not, since how many rows meet in one is a property of all. A call in which anything else is ambiguous
is computed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import EvidenceError
from monitor.numerics.declared import groups_in, recording, referee, written
from monitor.numerics.errors import LogContradiction
from monitor.numerics.operators import boxes, find, partial_sums, patches, tiles
from monitor.numerics.operators.tiles import Run, Tile, Untiled
from monitor.numerics.rounding.codec import Group

__all__ = ["RoundedCall"]

Rounds = Literal["once", "by element", "by line", "inside", "never"]
"""What a call rounds: each result, in order; numbers in the form of its result; these, and one for each line; others;
nothing."""
_TILES: Mapping[Tile, tuple[Tile, Rounds]] = {
    tiles.matrix_product: (tiles.matrix_product, "once"),
    patches.convolution: (patches.images, "once"),
    patches.convolution_slope: (patches.images_slope, "once"),
    tiles.elements: (tiles.elements, "by element"),
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
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "cumsum")
)
"""Operators on lines that scatter nothing."""
_FORM = "what it rounds has not the form of its result"
_Places: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RoundedCall:
    """A call under ``rounded`` numerics, of whose results tiles are wanted.

    Attributes:
        declared: the numerics that the run declares.
        args, kwargs: arguments; of tensors the shapes and types count alone.
        shapes: of its results, written arguments among them.
        keys: makes keys for random operators.
    """

    declared: str
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    keys: Callable[[], Callable[[], int]] | None = None

    @cached_property
    def _kind(self) -> tuple[Tile | None, Rounds]:
        found = find(self.func)
        if found is not None and found.row.name in _LINES:
            return tiles.lines, "by line"
        tile, parts = (None, None) if found is None else (found.row.tile, found.row.parts)
        if found is not None and found.row.is_log_free:
            return tile, "never"
        is_sum = parts in (partial_sums.summed, partial_sums.averaged, partial_sums.loss)
        if is_sum or (parts is partial_sums.norm and partial_sums.is_euclidean(self._argument)):
            return tile, "never"
        if tile is None or tile not in _TILES:
            raise Untiled(f"{self.func} has no tiles under rounded numerics")
        if tile in (patches.convolution, patches.convolution_slope):
            is_transposed = self.args[6 if tile is patches.convolution else 7]
            if is_transposed or max(len(each.shape) for each in self._tensors) > 4:
                raise Untiled(_FORM)  # it is made of results of another form
        of_rounded, rounds = _TILES[tile]
        return of_rounded, "inside" if rounds == "by element" and len(self.shapes) > 1 else rounds

    @property
    def tile(self) -> Tile | None:
        """What computes tiles of it; Untiled where none is built. None: it has parts alone."""
        return self._kind[0]

    @property
    def rounds(self) -> Rounds:
        """What it rounds; Untiled as above."""
        return self._kind[1]

    def _argument(self, name: str) -> Any:
        for place, each in enumerate(self.func._schema.arguments):
            if each.name == name:
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, each.default_value)
        raise KeyError(name)

    @property
    def _tensors(self) -> list[Any]:
        return [each for each in (*self.args, *self.kwargs.values()) if hasattr(each, "shape")]

    @property
    def names_elements(self) -> bool:
        """Whether all that it rounds has the form of a result, so that a log stops it at one of its elements."""
        is_alike = all(tuple(each.shape) == self.shapes[0] for each in self._tensors)
        return self.rounds in ("once", "never") or (self.rounds == "by element" and is_alike)

    @property
    def rounds_alike(self) -> bool:
        """Whether any tile shows if the call rounds anything.

        Each tensor of a list is computed alone; those of one type, with the same numbers, round alike.
        """
        if self._kind[0] is not tiles.list_elements:
            return True
        lists = [each for each in (*self.args, *self.kwargs.values()) if isinstance(each, list | tuple)]
        types = {getattr(each, "dtype", None) for group in lists for each in group}
        return len(types) == 1 and None not in types and 0 not in map(math.prod, self.shapes)

    def fault(self, entries: bytes) -> str:
        """Why a log, as of call 0, is none of this call's, as far as its form shows that; empty where it does not."""
        try:
            groups = groups_in(self.declared, entries, 0)
        except EvidenceError as error:
            return str(error)
        allowed = self._forms()
        for group in groups:
            if not allowed(group):
                if self.rounds == "never":
                    return f"entry for sub-operation {group.part}, which rounds nothing in this step"
                return (
                    f"the log counts {group.size} elements of sub-operation {group.part}, which the call does not have"
                )
        return ""

    def _forms(self) -> Callable[[Group], bool]:
        """Whether a group may be about this call; of some calls any may."""
        sizes = list(map(math.prod, self.shapes))
        if self.rounds == "never":
            return lambda group: False
        if self.rounds == "once":
            mask = self.args[-1] if self.tile is patches.images_slope else [True]
            rounded = sizes[: sum(mask[:2])]
            return lambda group: group.part < len(rounded) and group.size == rounded[group.part]
        if self.rounds == "by line":
            return lambda group: group.size in (sizes[0], sizes[0] // max(self._line[0], 1))
        if self.names_elements:
            return lambda group: group.size == sizes[0]
        return lambda group: True

    @cached_property
    def _line(self) -> tuple[int, int]:
        """Elements of a line, and the distance of two in a row."""
        shape = self.shapes[0]
        axis = self._argument("dim") % max(len(shape), 1)
        return (shape[axis], math.prod(shape[axis + 1 :])) if shape else (1, 1)

    def compute(self, make: Callable[[Run], Tensor], slot: int, span: range, entries: bytes) -> tuple[Tensor, bool]:
        """The elements (len(span),) of a result under a log, and whether no honest replayer can object to that.

        Args:
            make: computes the tile, given what runs its operator, which it does once.
            slot: number of the result.
            span: their places.
            entries: what the log says of the call, as of call 0; without a ``fault``.

        Raises:
            LogContradiction: no honest recorder can have written what the log says of these elements.
            Untiled: something else is ambiguous.
        """
        said = groups_in(self.declared, entries, 0)
        if self.rounds == "once":
            said = [replace(each, part=0) for each in said if each.part == slot]
        own: list[Group] = []
        sizes: list[int] = []
        rounded: list[bool] = []

        def number(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            session = recording(self.declared, keys=None if self.keys is None else self.keys())
            with session:
                out = func(*args, **kwargs)
            own.extend(groups_in(self.declared, session.entries_of(0), 0))
            rounded.append(bool(session.statistics.operators))
            sizes.extend(each.numel() for each in _results(out))
            return out if self.rounds in ("inside", "never") else _numbered(out)

        tile = make(number)
        if self.rounds in ("inside", "never"):
            if said and not any(rounded):
                self._require(self.rounds_alike)
                rule = "entries about an operator that rounds nothing"
                raise LogContradiction(call=0, operator=str(self.func), element=None, rule=rule)
            if any(rounded):  # what that is, another part of the call may say
                self._require(not said and not own)
            return tile, not any(rounded)
        self._require(len(sizes) == 1)
        places = {each.size: each for each in self._places(slot, span, tile.numpy(), sizes[0])}
        log = written(self.declared, list(_merged(said, own, places)))
        is_lawful: list[bool] = []

        def judge(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            keys = None if self.keys is None else self.keys()
            out, lawful = referee(self.declared, func, args, dict(kwargs), entries=log, keys=keys)
            is_lawful.append(lawful)
            return out

        return make(judge), all(is_lawful)

    @staticmethod
    def _require(is_so: bool) -> None:
        if not is_so:
            raise Untiled(_FORM)

    def _places(self, slot: int, span: range, inside: _Places, size: int) -> Iterator[_Form]:
        """Where in the whole call the numbers lie that a call of this size rounds.

        Args:
            inside: where in its result the elements of the tile lie.
        """
        whole = math.prod(self.shapes[slot])
        found = np.full(size, -1, np.int64)
        found[inside] = np.arange(span.start, span.stop)
        if self.rounds == "by line":
            along, step = self._line
            rows, places = inside // max(along, 1), np.arange(span.start, span.stop)
            first = np.empty(size // max(along, 1), np.int64)
            first[rows] = places - places // step % along * step
            yield _Form(whole // along, first // (along * step) * step + first % step)
            found = (first[:, None] + np.arange(along) * step).reshape(-1)
        yield _Form(whole, found)


@dataclass(frozen=True, slots=True)
class _Form:
    """Numbers of one form that a call rounds: how many in all, and where the tile's lie; -1 for others."""

    size: int
    places: _Places


def _results(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [each for each in out or () if each is not None]


def _numbered(out: Any) -> Any:
    """The same results, with the number of each element in its place."""
    if isinstance(out, Tensor):
        return torch.arange(out.numel()).reshape(out.shape)
    return [None if each is None else _numbered(each) for each in out]


def _merged(said: Sequence[Group], own: Sequence[Group], places: Mapping[int, _Form]) -> Iterator[Group]:
    """A log for the tile's call: the entries about its numbers, and this device's about the others."""
    logs: dict[int, tuple[int, dict[int, bool]]] = {}
    forms = {len(form.places): form for form in places.values()}
    for group in own:
        form = forms.get(group.size)
        if form is None:
            raise Untiled(_FORM)
        _, log = logs.setdefault(group.part, (group.size, {}))
        others = form.places[group.positions] < 0
        log.update(zip(group.positions[others].tolist(), group.upward[others].tolist(), strict=True))
    for group in said:
        form = places.get(group.size)
        if form is None:
            raise Untiled(_FORM)
        size, log = logs.setdefault(group.part, (len(form.places), {}))
        if size != len(form.places):
            raise LogContradiction(call=0, operator="", part=group.part, element=None, rule="it has another size")
        at = np.searchsorted(group.positions, form.places).clip(max=len(group.positions) - 1)
        (mine,) = np.nonzero(group.positions[at] == form.places)
        log.update(zip(mine.tolist(), group.upward[at[mine]].tolist(), strict=True))
    for part, (size, log) in sorted(logs.items()):
        if log:
            chosen = sorted(log)
            upward = np.array([log[each] for each in chosen])
            yield Group(call=0, part=part, size=size, positions=np.array(chosen), upward=upward)
