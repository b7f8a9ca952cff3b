"""A tile computed from its own inputs has the bits of the whole result, for every call of the battery."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.bench.battery_cases import cases
from monitor import numerics
from monitor.numerics.operators import find, operator_table, tiles
from monitor.numerics.session import recording
from monitor.programs.trace import content_of, result_tensors, written_arguments

MOST = 1 << 20
MOST_CALLS = 4
"""Calls of one operator that are looked at."""


@dataclass
class Calls:
    """Observer that keeps every call of an operator with tiles: its arguments as they were, and its results."""

    kept: list[tuple[Any, Any, Any, list[Tensor]]] = field(default_factory=list)
    _before: tuple[Any, Any] = ((), {})
    _seen: Counter[str] = field(default_factory=Counter)

    def before(self, index, func, args, kwargs):
        self._before = (copied(args), copied(kwargs))

    def after(self, index, func, args, kwargs, out):
        found = find(func)
        if found is None or found.row.tile is None:
            return
        form = f"{found.row.name} of {len(args)}"
        self._seen[form] += 1
        if self._seen[form] <= MOST_CALLS:
            written = written_arguments(func, args, kwargs)
            results = [each.detach().clone() for each in (*result_tensors(out, written), *written)]
            self.kept.append((func, *self._before, results))


def copied(value, change=lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format)):
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(copied(each, change) for each in value)
    return {name: copied(each, change) for name, each in value.items()} if isinstance(value, dict) else value


def operand(tensor, most=MOST):
    flat = tensor.reshape(-1)
    return tiles.Operand(tuple(tensor.shape), tensor.dtype, lambda places: flat[places], most)


def run(func, args, kwargs):
    return numerics.execute("exact", func, args, dict(kwargs), entries=None)


def tile_of(func, args, kwargs, results, slot, span, most=MOST):
    as_operands = [copied(each, lambda tensor: operand(tensor, most)) for each in (tuple(args), kwargs)]
    shapes = [tuple(each.shape) for each in results]
    call = tiles.TileCall(func=func, args=as_operands[0], kwargs=as_operands[1], shapes=shapes, run=run)
    return tiles.compute(find(func).row.tile, call, slot, span)


def bits(tensor):
    return bytes(content_of(tensor))


def spans(rng, size):
    """All of few, some in a row, and one."""
    start = rng.randrange(size)
    return [
        *([range(size)] if size <= 4096 else []),
        range(start, min(size, start + rng.randrange(1, 40))),
        range(start, start + 1),
    ]


def tiled(battery) -> set[str]:
    """Operators of these programs, all of whose tiles have the bits of the whole."""
    rng, calls = random.Random("tiles"), Calls()
    for case in battery:
        with recording("exact", observer=calls):
            case()
    found = set()
    for func, args, kwargs, results in calls.kept:
        for slot, whole in enumerate(results):
            for span in spans(rng, whole.numel()) if 0 < whole.numel() <= MOST else []:
                try:
                    tile = tile_of(func, args, kwargs, results, slot, span)
                except tiles.Untiled:
                    continue
                assert tile.dtype is whole.dtype, func
                assert bits(tile) == bits(whole.reshape(-1)[span.start : span.stop]), (func, slot, span)
                found.add(find(func).row.name)
    return found


def test_tiles_of_products_reductions_and_views_have_the_bits_of_the_whole():
    found = tiled(islice(cases(), 1, 5))
    some = "mm addmm bmm sum.dim_IntList max.dim _softmax embedding gather index_select permute"
    assert {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in some.split()} <= found


@pytest.mark.slow
def test_every_tile_has_the_bits_of_the_whole():
    named = {row.name for row in operator_table().values() if row.tile is not None}
    assert named - tiled(cases()) == {"aten.isfinite.default"}, "which PyTorch spells by other operators"


def test_a_tile_takes_no_more_elements_than_it_may():
    """A product of one row and one column takes as many as both have, whatever the size of the factors."""
    a, b = torch.ones(64, 8), torch.ones(8, 64)
    args = (torch.ops.aten.mm.default, (a, b), {}, [a @ b], 0)
    assert tile_of(*args, range(70, 71), most=8).tolist() == [8.0]
    with pytest.raises(tiles.Untiled, match="too many elements"):
        tile_of(*args, range(70, 71), most=7)
    with pytest.raises(tiles.Untiled, match="too many elements"):
        tile_of(*args, range(70, 72), most=15)


def test_a_product_of_half_precision_has_no_tiles():
    """Its outlier channels are properties of all rows and columns."""
    a, b = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((8, 8), (8, 8)))
    with pytest.raises(tiles.Untiled, match="properties of all rows and columns"):
        tile_of(torch.ops.aten.mm.default, (a, b), {}, [a @ b], 0, range(1))
