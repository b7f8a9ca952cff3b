"""Numbers of parts give the bits that the whole operator gives, into however many parts it is divided."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from monitor import numerics
from monitor.numerics.operators import find
from monitor.numerics.operators.partial_sums import MOST_PARTS, Part, combined, norm, part_of, product, spans
from monitor.numerics.operators.tiles import Operand, TileCall, Untiled
from monitor.numerics.rounded_parts import parted_product, parted_sum
from monitor.programs.bits import same_bytes
from monitor.programs.trace import Node, content_of, described, layout_of
from monitor.replay.parted import parts_of

KINDS = ("plain", "spread", "tiny", "zeros", "large", "NaN", "infinity", "infinities", "outlier")
aten = torch.ops.aten


def values(generator, kind, *shape):
    x = torch.randn(*shape, generator=generator)
    flat = x.view(-1)
    if kind == "spread":
        x *= torch.exp2(torch.randint(-60, 60, shape, generator=generator).float())
    elif kind in ("tiny", "large"):
        x *= 2.0 ** {"tiny": -140, "large": 120}[kind]
    elif kind == "zeros":
        flat[::2], x[0] = 0, -0.0
    elif kind == "NaN":
        flat[::5] = math.nan
    elif kind.startswith("infinit"):
        flat[3] = -math.inf
        flat[4] = math.inf if kind == "infinities" else 1.0
    elif kind == "outlier":
        x *= 1e-6
        x[:, 1] = 1e6
    return x


def operand(value):
    if isinstance(value, list):
        return list(map(operand, value))
    if not isinstance(value, Tensor):
        return value
    flat = value.reshape(-1)
    return Operand(tuple(value.shape), value.dtype, lambda places: flat[places], 1 << 20)


def reduced(call, slot, place, declared, entries):
    found = find(call.func)
    assert found is not None
    assert found.row.parts is not None
    if declared == "exact":
        return found.row.parts(call, slot, place)
    if found.row.parts is product:
        return parted_product(call, slot, place, declared, entries)
    return parted_sum(found.row.parts(call, slot, place), is_norm=found.row.parts is norm)


def equal_parts(declared, func, *args, **kwargs):
    """Every eleventh element of each result, from 1, 3 and 8 parts."""
    session = numerics.recording(declared)
    with session:
        out = func(*args, **kwargs)
    entries = session.entries_of(0)
    results = [out] if isinstance(out, Tensor) else list(out)
    shapes = [tuple(each.shape) for each in results]
    operands, nothing = tuple(map(operand, map(listed, args))), cast(Any, None)
    call = TileCall(func=func, args=operands, kwargs=kwargs, shapes=shapes, run=nothing)
    for slot, result in enumerate(results):
        for place in range(0, result.numel(), 11):
            parted = reduced(call, slot, place, declared, entries)
            for count in {1, min(3, parted.terms), min(8, parted.terms)}:
                parts = spans(parted.terms, count)
                most = combined([Part(parted.most(parted.taken(span)), ()) for span in parts]).most
                whole = combined([part_of(parted, span, most) for span in parts])
                assert (len(whole.most), len(whole.sums)) == parted.widths
                assert same_bytes(parted.value(whole), result.reshape(-1)[place : place + 1]), (slot, place, count)


def listed(value):
    return list(value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("declared", ["exact", "rounded"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_bits_of_the_whole(kind, declared):
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    equal = functools.partial(equal_parts, declared)

    def some(*shape, of=kind):
        return values(generator, of, *shape)

    for other in ("plain", "outlier", "NaN"):
        equal(aten.mm.default, some(5, 45), some(45, 7, of=other))
    a, b, cube = some(3, 5, 45), some(3, 45, 7), some(3, 2, 50)
    equal(aten.bmm.default, a, b)
    equal(aten.baddbmm.default, some(3, 1, 7, of="plain"), a, b, beta=0.5)
    equal(aten.addmm.default, some(1, 7)[0], a[0], b[0], beta=2, alpha=0.3)
    equal(aten.addmm.default, some(5, 7), a[0], b[0])
    for name in ("sum", "mean"):
        equal(getattr(aten, name).default, cube)
        for dims in ([0], [1], [-1, 0], [0, 1, 2]):
            equal({"sum": aten.sum.dim_IntList, "mean": aten.mean.dim}[name], cube, dims, True)
    equal(aten.norm.Scalar, cube)
    equal(aten.norm.ScalarOpt_dim, cube, None, [1])
    equal(aten.linalg_vector_norm.default, cube, 2, [0, 2])
    equal(aten._foreach_norm.Scalar, [cube, a])
    classes = torch.tensor([3, -100, 0, 49, 7, 7])
    for weight in (None, some(1, 50)[0]):
        for how in (1, 2):
            equal(aten.nll_loss_forward.default, cube.reshape(6, 50), classes, weight, how, -100)


def node_of(func, *args, results, **kwargs):
    tensors: list[Any] = []
    arguments = {"args": described(args, tensors), "kwargs": described(kwargs, tensors)}
    sources = tuple({**layout_of(each), "source": "state:x", "offset": 0} for each in tensors)
    node = Node(
        index=0,
        operator=str(func),
        arguments=arguments,
        sources=sources,
        results=tuple(map(layout_of, results)),
        inputs=("",) * len(sources),
        outputs=("",) * len(results),
    )
    return node, list(map(content_of, tensors))


def test_a_party_divides_by_equal_parts_and_refuses_what_has_none():
    x, row = torch.arange(70.0).reshape(10, 7), torch.empty(7)
    node, contents = node_of(aten.sum.dim_IntList, x, [0], results=[row])
    parts = parts_of(node, 0, 2, 3, contents)
    assert [part.sums[0] >> 172 for part in parts] == [2 + 9 + 16, 23 + 30 + 37, 44 + 51 + 58 + 65]
    refused = [
        (node_of(aten.sum.dim_IntList, x, [0], results=[row]), 11),  # more parts than terms
        (node_of(aten.sum.dim_IntList, x, [0], results=[row]), 0),
        (node_of(aten.sum.dim_IntList, torch.ones(MOST_PARTS + 1, 1), [0], results=[row]), MOST_PARTS + 1),
        (node_of(aten.sum.dim_IntList, x.double(), [0], results=[row.double()]), 2),
        (node_of(aten.sum.dim_IntList, x, [0], dtype=torch.float64, results=[row.double()]), 2),
        (node_of(aten.mm.default, x.bfloat16(), x.t().bfloat16(), results=[torch.empty(10, 10)]), 2),
        (node_of(aten.linalg_vector_norm.default, x, 1, results=[torch.empty(())]), 2),
        (node_of(aten.exp.default, x, results=[x]), 1),
    ]
    for (node, contents), count in refused:
        with pytest.raises(Untiled):
            parts_of(node, 0, 2, count, contents)
