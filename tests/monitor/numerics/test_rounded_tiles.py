"""A tile under rounded numerics has the bits of the whole under one log, and shows what is wrong about its elements."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch

from analysis.bench.battery_cases import cases
from monitor import numerics
from monitor.numerics.declared import groups_in, written
from monitor.numerics.errors import LogContradiction
from monitor.numerics.operators import tiles
from monitor.numerics.operators.partial_sums import Part, combined, part_of
from monitor.numerics.operators.partial_sums import spans as parts
from monitor.numerics.rounded_parts import parted_product
from monitor.numerics.rounded_tiles import RoundedCall
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
    shapes = [tuple(each.shape) for each in results]
    rounded = RoundedCall(declared, func, tuple(args), kwargs, shapes, lambda: lambda: 7)

    def make(run):
        mine, more = (copied(each, lambda tensor: operand(tensor, MOST)) for each in (tuple(args), kwargs))
        call = tiles.TileCall(func=func, args=mine, kwargs=more, shapes=shapes, run=run)
        return tiles.compute(rounded.tile, call, slot, span)

    return rounded.compute(make, slot, span, entries)[0]


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
    for groups, padding in ((1, 1), (2, 0)):
        x = cancelling(3, 4, 6, 5)
        x = torch.cat([x[:, :2], -x[:, :2] * (1 + 2.0**-20)], 1)
        weight = cancelling(4, 4 // groups, 3, 3, seed=2).abs()
        weight[:, 4 // groups // 2 :] = weight[:, : 4 // groups - 4 // groups // 2]
        rest = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], groups)
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


def log_of(size, part=0):
    group = Group(call=0, part=part, size=size, positions=np.array([1]), upward=np.array([True]))
    return written("rounded", [group])


def test_what_is_ambiguous_in_another_form_has_no_tiles():
    x = cancelling(4, 6)
    for func, args in ((aten.logsumexp.default, (x, [1])), (aten.xlogy.Tensor, (x, x[0]))):
        results, _ = whole(func, args)
        with pytest.raises(tiles.Untiled, match="not the form"):
            tile_of(func, args, {}, results, 0, range(1), log_of(size=6))


def test_entries_about_an_operator_that_rounds_nothing_contradict_it():
    x = cancelling(4, 6)
    args = (x, [6], None, None, 1e-5)
    results, _ = whole(aten.native_layer_norm.default, args)
    with pytest.raises(LogContradiction, match="rounds nothing"):
        tile_of(aten.native_layer_norm.default, args, {}, results, 0, range(1), log_of(size=6))


@pytest.mark.parametrize(
    ("lists", "is_alike"),
    [
        (([torch.tensor([1, 2]), torch.rand(3)], 3), False),
        (([torch.rand(3), torch.rand(0)], 3), False),
        (([torch.rand(3), torch.rand(3)], [2.0, 3.5]), False),
        (([torch.rand(3), torch.rand(3)], 3), True),
    ],
    ids=["types", "an empty one", "numbers", "alike"],
)
def test_one_tensor_of_a_list_shows_nothing_of_others_that_are_unlike(lists, is_alike):
    func = aten._foreach_pow.Scalar
    shapes = [tuple(each.shape) for each in lists[0]]
    assert RoundedCall("rounded", func, lists, {}, shapes).rounds_alike is is_alike
    if lists[0][0].dtype is torch.int64:
        results, _ = whole(func, lists)
        with pytest.raises(tiles.Untiled, match="not the form"):
            tile_of(func, lists, {}, results, 0, range(1), log_of(size=3, part=1))


def listed():
    """Numbers whose exponentials lie next to a midpoint."""
    found = []
    for start in range(0x3F000000, 0x3FB00000, 1 << 22):
        x = -torch.arange(start, start + (1 << 22), dtype=torch.int32).view(torch.float32)
        session = numerics.recording("rounded")
        with session:
            torch.exp(x)
        groups = groups_in("rounded", session.entries_of(0), 0)
        found += [float(x[place]) for group in groups for place in group.positions]
    return found


def test_an_entry_counts_for_all_of_its_line():
    """One exponential that goes the other way changes the sum of its line."""
    odd, differs = listed(), 0
    assert len(odd) > 2
    for (number, each), name, axis in product(enumerate(odd[:3]), ("_softmax", "_log_softmax"), range(3)):
        func = getattr(aten, name).default
        x = -torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(number))
        x.movedim(axis, -1)[..., 0] = 0.0
        x[1, 2, 3] = each
        results, entries = whole(func, (x, axis, False))
        groups = groups_in("rounded", entries, 0)
        turned = written("rounded", [replace(group, upward=~group.upward) for group in groups])
        logs = {entries: results[0]}
        with contextlib.suppress(LogContradiction):
            logs[turned] = numerics.referee("rounded", func, (x, axis, False), {}, entries=turned)[0]
        for log, out in logs.items():
            differs += int((out != results[0]).sum()) > 1
            for span in [range(60), *(range(place, place + 1) for place in range(3, 60, 7))]:
                tile = tile_of(func, (x, axis, False), {}, results, 0, span, log)
                assert bits(tile) == bits(out.reshape(-1)[span.start : span.stop]), (name, axis, span)
    assert differs


def test_sums_of_scattered_rows_have_no_tiles():
    """How many rows meet in one scales all of them."""
    for func in (aten.scatter_add.default, aten.embedding_dense_backward.default, aten.index_add.default):
        with pytest.raises(tiles.Untiled):
            RoundedCall("rounded", func, (), {}, [(2,)]).tile  # noqa: B018


@pytest.mark.parametrize(("rank", "transposed"), [(2, True), (3, False)])
def test_convolutions_made_of_results_of_another_form_have_no_tiles(rank, transposed):
    """A stride may be one number for all dimensions."""
    x, rest = torch.ones((1,) * (rank + 2)), ([1], [1], [1], transposed, [0], 1)
    for func, args in ((aten.convolution.default, (x,) * 3), (aten.convolution_backward.default, (x, x, x, None))):
        with pytest.raises(tiles.Untiled):
            RoundedCall("rounded", func, (*args, *rest), {}, [(2,)]).tile  # noqa: B018


A, B = torch.ones(7, 9), torch.ones(9, 9)
SLOPE = (A[None, None], A[None, None], A[None, None], None, [1], [1], [1], False, [0], 1, [True] * 3)


@pytest.mark.parametrize(
    ("func", "args", "shapes", "group", "fits"),
    [
        (aten.mm.default, (A, B), [(7, 9)], (63, 0), True),
        (aten.mm.default, (A, B), [(7, 9)], (64, 0), False),
        (aten.mm.default, (A, B), [(7, 9)], (63, 1), False),
        (aten.convolution_backward.default, SLOPE, [(10,), (20,), (4,)], (20, 1), True),
        (aten.convolution_backward.default, SLOPE, [(10,), (20,), (4,)], (10, 1), False),
        (aten.convolution_backward.default, SLOPE, [(10,), (20,), (4,)], (4, 2), False),
        (aten.gelu.default, (A,), [(7, 9)], (63, 3), True),
        (aten.gelu.default, (A,), [(7, 9)], (62, 0), False),
        (aten.xlogy.Tensor, (A, A[0]), [(7, 9)], (9, 0), True),
        (aten._log_softmax.default, (A, 1, False), [(7, 9)], (7, 1), True),
        (aten._log_softmax.default, (A, 1, False), [(7, 9)], (9, 1), False),
        (aten.sum.dim_IntList, (A, [1]), [(7,)], (7, 0), False),
        (aten.embedding.default, (A, B), [(9, 9)], (81, 0), False),
    ],
)
def test_a_log_shows_by_its_form_that_it_is_false(func, args, shapes, group, fits):
    """Nobody has to open a large factor to see that."""
    call = RoundedCall("rounded", func, args, {}, shapes)
    assert bool(call.fault(log_of(*group))) is not fits
    assert call.fault(b"junk")
    assert not call.fault(written("rounded", []))


def parted(func, args, kwargs, results, place, entries, declared="rounded"):
    """A product's element as a reduction, and its combined numbers."""
    mine = copied(tuple(args), operand)
    shapes = [tuple(each.shape) for each in results]
    call = tiles.TileCall(func=func, args=mine, kwargs=kwargs, shapes=shapes, run=cast(Any, None))
    found = parted_product(call, 0, place, declared, entries)
    divided = parts(found.terms, min(5, found.terms))
    most = combined([Part(found.most(found.taken(span)), ()) for span in divided]).most
    whole_of = combined([part_of(found, span, most) for span in divided])
    assert (len(whole_of.most), len(whole_of.sums)) == found.widths
    return found, whole_of


def special(kind):
    a, b = cancelling(5, 14), cancelling(14, 6, seed=1)
    if kind == "tiny":
        a, b = a * 2.0**-140, b * 2.0**-20
    elif kind == "zeros":
        a[1], b[:, 2] = 0, -0.0
    elif kind == "integers":
        a, b = a.sign() * 3, b.sign() * 5
    elif kind != "plain":
        a[0, 0], b[3, 3] = math.nan if kind == "NaN" else math.inf, -math.inf
        a[2, :4] = math.inf if kind == "infinities" else 1.0
    return a, b


@pytest.mark.parametrize("kind", ["plain", "tiny", "zeros", "integers", "NaN", "infinity", "infinities"])
def test_parts_of_a_product_give_the_element_that_the_log_gives(kind):
    calls = [*products(), (aten.mm.default, special(kind), {})]
    for func, args, kwargs in calls:
        results, entries = whole(func, args, kwargs)
        for place in range(0, results[0].numel(), 3):
            found, numbers = parted(func, args, kwargs, results, place, entries)
            assert bits(found.value(numbers)) == bits(results[0].reshape(-1)[place]), (func, place)
            assert found.is_lawful(numbers)


def test_parts_show_an_entry_that_no_device_can_have_written():
    func, args, kwargs = next(iter(products()))
    results, entries = whole(func, args, kwargs)
    (group,) = groups_in("rounded", entries, 0)
    free = next(place for place in range(63) if place not in group.positions)
    false = written("rounded", [replace(group, positions=np.array([free]), upward=np.array([True]))])
    found, numbers = parted(func, args, kwargs, results, free, false)
    assert not found.is_lawful(numbers)
    nothing = written("rounded", [])
    listed = [int(place) for place in group.positions]
    assert not all(
        parted(func, args, kwargs, results, place, nothing)[0].is_lawful(
            parted(func, args, kwargs, results, place, nothing)[1]
        )
        for place in listed
    )
    for changed in (Part((*numbers.most[:4], 0, 0, 0), (1 << 4000, -5, 1 << 900)), Part((2**31 - 1,) * 7, (0, 0, 0))):
        assert len(found.value(changed)) == 1
