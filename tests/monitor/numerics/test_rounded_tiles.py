"""A tile under rounded numerics has the bits of the whole under one log, and shows what is wrong about its elements."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from analysis.bench.battery_cases import cases
from monitor import numerics
from monitor.numerics.declared import groups_in, written
from monitor.numerics.errors import LogContradiction
from monitor.numerics.operators import tiles
from monitor.numerics.rounded_tiles import rounded_tile, tile_of_rounded
from monitor.numerics.rounding.codec import Group
from monitor.programs.trace import result_tensors, written_arguments
from tests.monitor.numerics.test_tiles import MOST, Calls, bits, copied, operand, row_of, spans

aten = torch.ops.aten


def whole(func, args, kwargs=None, declared="rounded"):
    """Results of a call, and what its recorder logs."""
    mine, more = copied(tuple(args)), copied(kwargs or {})
    session = numerics.recording(declared, keys=lambda: 7)
    with session:
        out = func(*mine, **more)
    listed = written_arguments(func, mine, more)
    return [*result_tensors(out, listed), *listed], session.entries_of(0)


def tile_of(func, args, kwargs, results, slot, span, entries, declared="rounded"):
    tile, rounds = tile_of_rounded(func)
    shapes = [tuple(each.shape) for each in results]

    def make(run):
        mine, more = (copied(each, lambda tensor: operand(tensor, MOST)) for each in (tuple(args), kwargs))
        call = tiles.TileCall(func=func, args=mine, kwargs=more, shapes=shapes, run=run)
        return tiles.compute(tile, call, slot, span)

    size = results[slot].numel()
    found, _ = rounded_tile(declared, make, span, size, entries, rounds=rounds, slot=slot, keys=lambda: lambda: 7)
    return found


def cancelling(*shape, seed=0):
    """Rows and columns whose products almost cancel, so that many elements are ambiguous."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(torch.randint(-2, 24, shape, generator=generator).float())


def opposed(x):
    """The same, and its opposite with a little added, along the last dimension."""
    return torch.cat([x, -x * (1 + 2.0**-18)], -1)


def products():
    a, b = opposed(cancelling(9, 12)), opposed(cancelling(7, 12, seed=1)).t().contiguous()
    b = torch.cat([b[:12], b[:12] * (1 - 2.0**-20)])
    yield aten.mm.default, (a, b), {}
    yield aten.addmm.default, (cancelling(7), a, b), {"beta": 2, "alpha": 3}
    yield aten.bmm.default, (torch.stack([a, a * 1.5]), torch.stack([b, b * 0.7])), {}


def convolutions():
    for groups, padding, transposed in ((1, 1, False), (2, 0, False), (1, 1, True)):
        x = cancelling(3, 4, 6, 5)
        x = torch.cat([x[:, :2], -x[:, :2] * (1 + 2.0**-20)], 1)
        weight = cancelling(4, 4 // groups, 3, 3, seed=2).abs()
        weight[:, 4 // groups // 2 :] = weight[:, : 4 // groups - 4 // groups // 2]
        rest = ([1, 1], [padding] * 2, [1, 1], transposed, [0, 0], groups)
        yield aten.convolution.default, (x, weight, cancelling(4), *rest), {}
        (out,), _ = whole(aten.convolution.default, (x, weight, None, *rest))
        grad = cancelling(*out.shape, seed=4)
        yield aten.convolution_backward.default, (grad, x, weight, [4], *rest, [True, True, True]), {}
        yield aten.convolution_backward.default, (grad, x, weight, [4], *rest, [False, True, False]), {}


@pytest.mark.parametrize("calls", [products, convolutions])
@pytest.mark.parametrize("declared", ["rounded", "rounded-probabilistic"])
def test_ambiguous_elements_go_where_the_log_says(calls, declared):
    rng, entries_seen = random.Random("rounded"), 0
    for func, args, kwargs in calls():
        results, entries = whole(func, args, kwargs, declared)
        entries_seen += sum(len(group.positions) for group in groups_in(declared, entries, 0))
        for slot, result in enumerate(results):
            for span in [range(result.numel()), *spans(rng, result.numel())]:
                tile = tile_of(func, args, kwargs, results, slot, span, entries, declared)
                assert bits(tile) == bits(result.reshape(-1)[span.start : span.stop]), (func, slot, span)
    assert entries_seen > 20


def test_every_tile_of_the_battery_has_the_bits_of_the_whole():
    rng, calls, found = random.Random("battery"), Calls(), Counter[str]()
    for case in cases():
        with numerics.recording("rounded", observer=calls, keys=lambda: 7):
            case()
    for func, args, kwargs, results in calls.kept:
        entries = whole(func, args, kwargs)[1]
        for slot, result in enumerate(results):
            for span in spans(rng, result.numel()) if 0 < result.numel() <= MOST else []:
                try:
                    tile = tile_of(func, args, kwargs, results, slot, span, entries)
                except tiles.Untiled:
                    continue
                assert bits(tile) == bits(result.reshape(-1)[span.start : span.stop]), (func, slot, span)
                found[row_of(func).name] += 1
    some = (
        "mm addmm bmm convolution convolution_backward exp tanh gelu _softmax _log_softmax native_layer_norm "
        "native_layer_norm_backward native_batch_norm native_group_norm nll_loss_backward _foreach_sqrt"
    )
    assert {f"aten.{name}.default" for name in some.split()} <= set(found)


def edited(entries, change):
    return written("rounded", [changed for group in groups_in("rounded", entries, 0) if (changed := change(group))])


def test_a_chosen_direction_is_followed_and_a_false_one_is_shown_in_its_own_tile_alone():
    func, args, kwargs = next(iter(products()))
    results, entries = whole(func, args, kwargs)
    (group,) = groups_in("rounded", entries, 0)
    size = results[0].numel()
    tile = partial(tile_of, func, args, kwargs, results, 0)
    free = next(place for place in range(size) if place not in group.positions)
    at = np.searchsorted(group.positions, free)
    added = replace(group, positions=np.insert(group.positions, at, free), upward=np.insert(group.upward, at, True))
    with pytest.raises(LogContradiction, match="further than 6β"):
        tile(range(free, free + 1), written("rounded", [added]))
    others = [place for place in range(size) if place != free]
    for place in others[:5]:
        assert bits(tile(range(place, place + 1), written("rounded", [added]))) == bits(results[0].reshape(-1)[place])
    listed = int(group.positions[0])
    without = edited(entries, lambda each: replace(each, positions=each.positions[1:], upward=each.upward[1:]))
    turned = edited(entries, lambda each: replace(each, upward=~each.upward))
    whole_of = partial(numerics.referee, "rounded", func, args, kwargs)
    for log in (without, turned):
        try:
            wanted = bits(whole_of(entries=log)[0].reshape(-1)[listed])
        except LogContradiction:
            wanted = None
        try:
            got = bits(tile(range(listed, listed + 1), log))
        except LogContradiction:
            got = None
        assert got == wanted or wanted is None, "an entry elsewhere may stop the whole, not this tile"


def test_a_log_that_counts_other_elements_of_a_product_contradicts_itself():
    """Nobody has to open a large factor to see that."""
    func, args, kwargs = next(iter(products()))
    results, _ = whole(func, args, kwargs)
    with pytest.raises(LogContradiction, match="counts 5 elements"):
        tile_of(func, args, kwargs, results, 0, range(1), log_of(size=5))


def log_of(size, part=0):
    group = Group(call=0, part=part, size=size, positions=np.array([1]), upward=np.array([True]))
    return written("rounded", [group])


def test_what_is_ambiguous_in_another_form_has_no_tiles():
    x = cancelling(4, 6)
    results, _ = whole(aten._softmax.default, (x, 1, False))
    with pytest.raises(tiles.Untiled, match="not the form"):
        tile_of(aten._softmax.default, (x, 1, False), {}, results, 0, range(1), log_of(size=4))
    results, _ = whole(aten.native_layer_norm.default, (x, [6], None, None, 1e-5))
    with pytest.raises(tiles.Untiled, match="not the form"):
        tile_of(aten.native_layer_norm.default, (x, [6], None, None, 1e-5), {}, results, 0, range(1), log_of(size=4))


def test_sums_of_scattered_rows_have_no_tiles():
    """How many rows meet in one scales all of them."""
    for func in (aten.scatter_add.default, aten.embedding_dense_backward.default, aten.index_add.default):
        with pytest.raises(tiles.Untiled):
            tile_of_rounded(func)
