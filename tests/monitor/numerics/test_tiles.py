"""A tile computed from its own inputs has the bits of the whole result, for every call of the battery."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.bench.battery_cases import cases
from monitor import numerics
from monitor.numerics.declared import recording
from monitor.numerics.operators import find, operator_table, tiles
from monitor.numerics.operators.row import Row
from monitor.numerics.operators.table import _completed
from monitor.programs.trace import content_of, result_tensors, written_arguments

aten = torch.ops.aten
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
    return numerics.execute("exact", func, args, dict(kwargs), entries=None, keys=lambda: 7)


def row_of(func):
    found = find(func)
    assert found is not None
    return found.row


def tile_of(func, args, kwargs, results, slot, span, most=MOST):
    as_operands = [copied(each, lambda tensor: operand(tensor, most)) for each in (tuple(args), kwargs)]
    shapes = [tuple(each.shape) for each in results]
    call = tiles.TileCall(func=func, args=as_operands[0], kwargs=as_operands[1], shapes=shapes, run=run)
    return tiles.compute(row_of(func).tile, call, slot, span)


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
        with recording("exact", observer=calls, keys=lambda: 7):
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
                found.add(row_of(func).name)
    return found


def test_tiles_of_products_reductions_and_views_have_the_bits_of_the_whole():
    found = tiled(islice(cases(), 1, 5))
    some = "mm addmm bmm sum.dim_IntList max.dim _softmax embedding gather index_select permute"
    assert {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in some.split()} <= found


UNREACHED = """
isfinite empty_permuted empty_strided new_empty normal_functional rand.generator randint randint.generator
randint.low_generator randn.generator randperm.generator linalg_householder_product
"""
"""Operators with tiles that neither the battery nor a hard call reaches: mostly PyTorch spells them by others."""


def test_every_tile_has_the_bits_of_the_whole():
    named = {row.name for row in operator_table().values() if row.tile is not None}
    reached = tiled(cases()) | {row_of(func).name for func, _ in hard_calls()}
    missing = {name.removeprefix("aten.").removesuffix(".default") for name in named - reached}
    assert missing == set(UNREACHED.split())


def test_a_row_without_a_tile_says_why_and_keeps_what_it_says():
    assert [row.name for row in operator_table().values() if row.tile is None and not row.whole] == []
    assert _completed(Row(name="aten.new.default", kind="exact")).whole == "no tile is built"
    assert _completed(Row(name="aten.new.default", kind="exact", tile=tiles.elements)).whole == ""
    assert _completed(Row(name="aten.sum.default", kind="exact", whole="of old")).whole == "of old"


def test_a_tile_takes_no_more_elements_than_it_may():
    """A product of one row and one column takes as many as both have, whatever the size of the factors."""
    a, b = torch.ones(64, 8), torch.ones(8, 64)
    tile = partial(tile_of, torch.ops.aten.mm.default, (a, b), {}, [a @ b], 0)
    assert tile(range(70, 71), most=8).tolist() == [8.0]
    with pytest.raises(tiles.Untiled, match="too many elements"):
        tile(range(70, 71), most=7)
    with pytest.raises(tiles.Untiled, match="too many elements"):
        tile(range(70, 72), most=15)


def test_a_large_product_of_half_precision_has_no_tiles():
    """Its outlier channels are properties of all rows and columns; a small one is that of FP32."""
    large, small = (torch.ones(128, size, dtype=torch.bfloat16) for size in (128, 8))
    with pytest.raises(tiles.Untiled, match="properties of all rows and columns"):
        tile_of(aten.mm.default, (large, large), {}, [large @ large], 0, range(1))
    whole = small @ small.t()
    assert bits(tile_of(aten.mm.default, (small, small.t()), {}, [whole], 0, range(300, 301))) == bits(whole[2, 44])


def numbers(*shape, seed=0, dtype=torch.float32):
    """Of very different sizes, some of them special."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 9, shape, generator=generator).float())
    x.view(-1)[::37] = torch.tensor(float("nan") if seed % 2 else -0.0)
    return x.to(dtype)


def places(*shape, size, seed=0):
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(seed))


def convolutions():
    """Forward and backward, with all that decides which places meet."""
    for seed, (images, filters, kernel, size, stride, padding, dilation, transposed, groups) in enumerate(
        [
            (2, 4, [3, 3], [7, 6], [1, 1], [1, 1], [1, 1], False, 1),
            (2, 6, [3, 2], [9, 7], [2, 3], [2, 0], [1, 2], False, 2),
            (1, 4, [1, 1], [6, 5], [2, 2], [0, 0], [1, 1], False, 1),
            (3, 4, [3], [11], [2], [1], [2], False, 4),
            (2, 4, [2, 3, 1], [4, 5, 3], [1, 2, 1], [1, 1, 0], [1, 1, 1], False, 2),
            (2, 4, [3, 3], [4, 5], [2, 2], [1, 0], [1, 1], True, 2),
            (1, 4, [2], [6], [3], [0], [2], True, 1),
        ]
    ):
        kind = (torch.float32, torch.bfloat16)[seed % 3 == 2]
        x = numbers(images, 4, *size, seed=seed, dtype=kind)
        width = (4, filters // groups) if transposed else (filters, 4 // groups)
        weight = numbers(*width, *kernel, seed=2 * seed, dtype=kind)
        rest = (stride, padding, dilation, transposed, [int(transposed)] * len(kernel), groups)
        forward = (x, weight, numbers(filters, dtype=kind), *rest)
        yield aten.convolution.default, forward
        grad = torch.ones_like(run(aten.convolution.default, forward, {})) * 1.7
        yield aten.convolution_backward.default, (grad, x, weight, [filters], *rest, [True, True, True])


def hard_calls():
    x, words = numbers(6, 8), places(40, size=9, seed=3)
    yield aten.embedding_dense_backward.default, (numbers(40, 8), words, 9, 2, False)
    yield aten.index_add.default, (numbers(9, 8, seed=1), 0, words, numbers(40, 8))
    yield aten.index_put.default, (numbers(9, 8), [words - 9, places(40, size=8)], numbers(40), True)
    yield aten.index_put.default, (numbers(9, 8), [None, places(40, size=8)], numbers(9, 40), False)
    yield aten.put_.default, (numbers(9, 8), words - 9, numbers(40), True)
    yield aten.scatter.src, (numbers(9, 8), 0, places(5, 7, size=9), numbers(6, 8, seed=1))
    yield aten.scatter_add_.default, (numbers(9, 8), 1, places(9, 20, size=8), numbers(9, 20))
    yield aten.cat.default, ([x, x.to(torch.int64), x[:0]],)
    yield aten.constant_pad_nd.default, (x, [2, -1, 0, 3], float("-inf"))
    yield aten.constant_pad_nd.default, (x, [1, 1], 5.0)
    yield aten.index.Tensor, (x, [None, x[0] > 0])
    yield aten.masked_scatter_.default, (x, x > 0, numbers(50, seed=1))
    yield aten.reflection_pad2d.default, (x[None], [1, 2, 3, 1])
    yield aten.native_batch_norm.default, (numbers(3, 4, 5), x[0, :4], None, x[1, :4], x[2, :4].abs(), True, 0.1, 1e-5)
    yield aten.native_group_norm.default, (numbers(3, 4, 5), x[0, :4], x[1, :4], 3, 4, 5, 2, 1e-5)
    yield aten._fused_rms_norm.default, (numbers(8, 8), [8], x[0], 1e-5)
    yield aten._fused_rms_norm_backward.default, (x, x.flip(0), [8], x[:, :1].abs(), x[0], [True, True])
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss"):
        yield getattr(aten, name).default, (x, x.flip(0), 0)
    yield aten.binary_cross_entropy.default, (x.sigmoid(), x.flip(0).sigmoid(), x[0], 0)
    yield aten.binary_cross_entropy_with_logits.default, (x, x.flip(0).sigmoid(), None, x[0], 0)
    yield aten.nansum.default, (x, [0], True)
    yield aten._euclidean_dist.default, (numbers(3, 4, 5), numbers(3, 6, 5, seed=2))
    yield aten._cdist_backward.default, (numbers(3, 4, 6), numbers(3, 4, 5), numbers(3, 6, 5), 2.0, numbers(3, 4, 6))
    yield aten.linalg_lu.default, (torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(2)),)
    yield aten._cdist_forward.default, (numbers(3, 4, 5), numbers(3, 6, 5, seed=1), 2.0, None)
    yield aten.linalg_qr.default, (torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)),)
    yield aten.max_pool2d_with_indices.default, (numbers(2, 3, 6, 7, seed=1), [3, 2], [2, 2], [1, 0])


@pytest.mark.parametrize("calls", [convolutions, hard_calls])
def test_tiles_of_hard_calls_have_the_bits_of_the_whole(calls):
    """Duplicates, special values, fills that look like places, and shapes that look like others."""
    rng = random.Random("hard")
    for func, args in calls():
        written = copied(args)
        out = run(func, written, {})
        listed = written_arguments(func, written, {})
        results, tiled = [*result_tensors(out, listed), *listed], 0
        for slot, whole in enumerate(results):
            for span in [each for _ in range(4) for each in spans(rng, whole.numel())] if whole.numel() else ():
                with contextlib.suppress(tiles.Untiled):
                    tile = tile_of(func, args, {}, results, slot, span)
                    assert bits(tile) == bits(whole.reshape(-1)[span.start : span.stop]), (func, slot, span)
                    tiled += 1
        assert tiled, func


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.embedding.default, (torch.ones(5, 3), torch.tensor([4, -1, 2]))),
        (aten.embedding.default, (torch.ones(5, 3), torch.tensor([4, 5, 2]))),
        (aten.gather.default, (torch.ones(5, 3), 1, torch.tensor([[0, 1, 2], [0, -1, 2], [0, 1, 2]]))),
        (aten.gather.default, (torch.ones(5, 3), 1, torch.tensor([[0, 1, 2], [0, 3, 2], [0, 1, 2]]))),
        (aten.index_select.default, (torch.ones(3, 3), 1, torch.tensor([0, -1, 2]))),
        (aten.index_add.default, (torch.ones(3, 3), 1, torch.tensor([0, -1, 2]), torch.ones(3, 3))),
        (aten.embedding_dense_backward.default, (torch.ones(3, 3), torch.tensor([0, -1, 2]), 5, -1, False)),
        (aten.put.default, (torch.ones(3, 3), torch.tensor([0, -10, 2]), torch.ones(3))),
    ],
)
def test_an_index_outside_has_no_tile(func, args):
    """Whatever the operator makes of it decides, and a neighbour's element does not."""
    with pytest.raises(tiles.Untiled, match="outside"):
        tile_of(func, args, {}, [torch.ones(3, 3)], 0, range(3, 9))


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten._softmax.default, (0, False)),
        (aten.sum.dim_IntList, ([0],)),
        (aten.native_layer_norm.default, ([1 << 20], None, None, 1e-5)),
        (aten.cumsum.default, (0,)),
        (aten.flip.default, ([0],)),
        (aten.native_batch_norm.default, (None, None, None, None, True, 0.1, 1e-5)),
    ],
)
def test_too_large_a_tile_is_refused_before_anything_is_made(func, rest):
    """Of 2^40 elements none is fetched."""
    shape = (1 << 20, 1 << 20)
    x = tiles.Operand(shape, torch.float32, lambda places: pytest.fail("fetched"), MOST - 1)
    shapes = [shape[1:] if func is aten.sum.dim_IntList else shape]
    call = tiles.TileCall(func=func, args=(x, *rest), kwargs={}, shapes=shapes, run=run)
    with pytest.raises(tiles.Untiled):
        tiles.compute(row_of(func).tile, call, 0, range(1 << 18))
