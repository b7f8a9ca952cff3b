"""The BF16 product against its specification in integers, on every engine, and its error beside the stated bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from monitor.numerics import exact, execute
from monitor.numerics.engines.cpu.exact import bf16 as cpu
from monitor.numerics.engines.eager.exact import bf16 as eager
from monitor.numerics.reference import bf16 as rules
from monitor.numerics.reference.bf16 import bf16_matmul_by_integers


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def case(kind: str, m: int, k: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """BF16 (m, k) and (k, n)."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    match kind:
        case "softmax":
            a = torch.softmax(4 * a, 1)
        case "one channel":
            a[:, 7] *= 1000.0
            b[k - 2] *= 200.0
        case "one large":
            a[1, 5], b[9, 2] = 3e6, -1e9
        case "many binades":
            a, b = (x * torch.exp2(torch.randint(-40, 40, x.shape, generator=generator)) for x in (a, b))
        case "subnormal":
            a, b = a * 2.0**-130, b * 2.0**127
        case "tiny":
            a, b = a * 2.0**-70, b * 2.0**-78
        case "huge":
            a, b = a * 2.0**62, b * 2.0**64
        case "zeros":
            a[0], b[:, 1], a[2, ::2], b[::3] = 0.0, 0.0, -0.0, 0.0
        case "not finite":
            a[1, 3], a[2, 4], b[5, 0] = math.inf, math.nan, -math.inf
            a[:, 7] *= 1000.0
        case "peaked rows":
            a[torch.arange(m), torch.arange(m) * 7] = 4096.0
        case "all 255":
            a, b = torch.full_like(a, 255.0), torch.full_like(b, -255.0)
            a[1:], b[:, 1:] = torch.sign(a[1:]) * 254, b[:, 1:] * 2.0**-20
    return a.to(torch.bfloat16), b.to(torch.bfloat16)


KINDS = [
    *("gaussian", "softmax", "one channel", "one large", "many binades"),
    *("peaked rows", "subnormal", "tiny", "huge", "zeros", "not finite", "all 255"),
]


SIZES = {"peaked rows": ((60, 3000, 2),)}
"""Shapes at which rows are wide: their large elements lie at more places than may be set apart."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_gives_the_bits_of_the_integers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (m, k, n) in enumerate(SIZES.get(kind, ((5, 200, 3), (3, 70, 6)))):
        a, b = case(kind, m, k, n, seed)
        expected = bits(bf16_matmul_by_integers(a, b))
        across = b.t().contiguous().t(), a.t().contiguous().t()
        for left, right in ((a, b), (a, across[0]), (across[1], b), (across[1], across[0])):
            assert torch.equal(bits(cpu.cpu_bf16_matmul(left[None], right[None])[0]), expected)
        assert torch.equal(bits(eager.eager_bf16_matmul(a[None], b[None])[0]), expected)
        with monkeypatch.context() as patch:
            patch.setattr(eager, "int8_serves", lambda _: False)
            patch.setattr(cpu, "int8_serves", lambda _: False)
            assert torch.equal(bits(cpu.cpu_bf16_matmul(a[None], b[None])[0]), expected)


def test_kinds_reach_every_branch_of_the_specification() -> None:
    """Wide rows, dropped and kept low digits, places set apart: else the test above shows less than it says."""
    seen: set[object] = set()
    for kind in ("gaussian", "softmax", "one channel", "peaked rows"):
        m, k, n = SIZES.get(kind, ((5, 200, 3),))[0]
        a, b = case(kind, m, k, n, 0)
        chosen = rules.apart(a.tolist(), b.t().tolist())
        seen |= {"apart"} if chosen else set()
        kept = [0.0 if place in chosen else 1.0 for place in range(k)]
        vectors = [(side * torch.tensor(kept)).tolist() for side in (a.float(), b.t().float())]
        rows, columns = ([rules.density(v, rules.quantise(v)[0]) for v in side] for side in vectors)
        seen |= {"wide" if min(r, c) < rules.SPARSE else r * c < rules.THIN for r in rows for c in columns}
    assert seen == {"apart", "wide", True, False}


def test_each_digit_of_each_number_is_the_integers() -> None:
    """All BF16 numbers of magnitude up to 1 beside a 1, along and across; and all q by their digits."""
    x = torch.arange(0x3F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    pairs = torch.stack([torch.cat([x, -x]), torch.ones(2 * len(x), dtype=torch.bfloat16)], 1)
    above = torch.tensor([rules.digits(rules.quantise([v, 1.0])[0][0]) for v in x.tolist()])
    expected = torch.cat([above, -above])
    for matrix in (pairs, pairs.t().contiguous().t()):
        found = cpu.Halves(matrix, 0, matrix).all_digits()
        assert torch.equal(found[:, [0, 2]].to(torch.int64), expected)
    for q in range(-rules.LARGEST, rules.LARGEST + 1):
        h, low = rules.digits(q)
        assert 255 * h + low == q
        assert max(abs(h), abs(low)) <= 127
        assert rules.digits(-q) == (-h, -low)


def test_each_scale_is_the_integers() -> None:
    """The largest element of a vector decides: all BF16 numbers."""
    x = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    side = cpu.Halves(x, 0, x)
    found = side.all_digits().to(torch.int64)
    sample = range(0, len(x), 7)
    for i in (*range(300), *sample, len(x) - 1):
        (q,), s = rules.quantise([float(x[i])])
        assert 255 * int(found[i, 0]) + int(found[i, 1]) == q
        assert side.outcome[i] == 2.0**-s


@pytest.mark.parametrize("kind", ["gaussian", "softmax", "one channel"])
def test_the_order_of_k_and_pieces_of_it_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = case(kind, 70, 300, 65, 3)
    whole = bits(cpu.cpu_bf16_matmul(a[None], b[None]))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(bits(cpu.cpu_bf16_matmul(a[:, order][None], b[order][None])), whole)
    assert torch.equal(bits(-cpu.cpu_bf16_matmul(-a[None], b[None]) + 0.0), whole)
    monkeypatch.setattr(cpu, "CHUNK", 64)
    monkeypatch.setattr(eager, "CHUNK", 64)
    assert torch.equal(bits(cpu.cpu_bf16_matmul(a[None], b[None])), whole)
    assert torch.equal(bits(eager.eager_bf16_matmul(a[None], b[None])), whole)


@pytest.mark.parametrize("kind", ["gaussian", "softmax", "one channel", "many binades"])
def test_errors_lie_within_the_stated_bound(kind: str) -> None:
    a, b = case(kind, 40, 500, 30, 4)
    found = exact.bf16_matmul(a[None], b[None])[0].to(torch.float64)
    truth = a.to(torch.float64) @ b.to(torch.float64)
    places = eager.sides(a, b)[2]
    bound = torch.zeros(())
    for chosen in (False, True):
        mask = torch.zeros(500, dtype=torch.float64).index_fill(0, places, 1.0)
        mask = mask if chosen else 1.0 - mask
        rows, columns = ((side.to(torch.float64).abs() * mask).amax(1) for side in (a, b.t()))
        bound = bound + rows[:, None] * columns * float(mask.sum()) * 2.0 ** (-19 if chosen else -12)
    assert bool(((found - truth).abs() <= bound + found.abs() * 2.0**-23).all())


def test_large_products_of_bf16_alone_take_it() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(128, 128, generator=generator).to(torch.bfloat16) for _ in range(2))
    bias = torch.randn(128, generator=generator).to(torch.bfloat16)
    assert exact.has_two_digits(a, b)
    product = exact.bf16_matmul(a[None], b[None])[0]

    def call(name: str, *args: Any, numerics: str = "exact", **kwargs: Any) -> Any:
        return execute(numerics, f"aten.{name}.default", args, kwargs, entries=None)

    assert torch.equal(call("mm", a, b), product.to(torch.bfloat16))
    assert torch.equal(call("bmm", a[None], b[None])[0], product.to(torch.bfloat16))
    added = (product * 0.5 + bias.float()).to(torch.bfloat16)
    assert torch.equal(call("addmm", bias, a, b, alpha=0.5), added)
    assert torch.equal(call("baddbmm", bias, a[None], b[None], alpha=0.5)[0], added)
    wide = call("mm", a.float(), b.float())
    assert not torch.equal(product, wide)
    assert torch.equal(call("mm", a.half(), b.half()), call("mm", a.half().float(), b.half().float()).half())
    assert torch.equal(exact.matmul(a, b.float()), wide)
    small = exact.matmul(a[:127], b)
    assert not exact.has_two_digits(a[:127], b)
    assert torch.equal(small, wide[:127])
    rounded = call("mm", a.float(), b.float(), numerics="rounded").to(torch.bfloat16)
    assert torch.equal(call("mm", a, b, numerics="rounded"), rounded)


def test_threads_change_no_bit() -> None:
    a, b = case("softmax", 4200, 64, 300, 6)
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = bits(exact.bf16_matmul(a[None], b[None]))
        torch.set_num_threads(2)
        assert torch.equal(bits(exact.bf16_matmul(a[None], b[None])), one)
    finally:
        torch.set_num_threads(own)
