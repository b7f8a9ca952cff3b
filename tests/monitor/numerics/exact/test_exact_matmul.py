"""The matrix product against its specification in integers, engine by engine."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firmware_sim.errors import CallerError, DeviceError
from monitor.numerics import recording
from monitor.numerics.engines.capability import int8_serves
from monitor.numerics.engines.cpu.exact import matmul as _cpu_engine
from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul
from monitor.numerics.engines.eager.exact.matmul import eager_matmul
from monitor.numerics.exact import matmul
from monitor.numerics.reference.matmul import CHUNK, LARGEST, is_wide, matmul_by_integers, quantise_row

INF, NAN = float("inf"), float("nan")
ENGINES = ("fp64", "int8", "eager fp64", "eager int8")


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def product(a: Tensor, b: Tensor, engine: str) -> Tensor:
    kind, _, of = engine.partition(" ")
    if kind == "eager":
        return eager_matmul(a[None], b[None], engine=of)[0]
    return cpu_matmul(a[None], b[None], engine=engine)[0]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def operand(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, columns, generator=generator)
    if kind == "heavy":
        return torch.sign(x) * torch.exp(7 * x.abs())
    if kind == "subnormal":
        return x * 1e-40
    if kind == "huge":
        return x * 1e37
    if kind == "sparse":
        return torch.where(x.abs() < 1.2, 0.0, x)
    if kind == "integers":
        return torch.round(x * 2)
    if kind == "broken":
        x[0, 0] = INF
        x[-1, -1] = NAN
    return x


KINDS = ("gaussian", "heavy", "subnormal", "huge", "sparse", "integers", "broken")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 5, 4), (7, 40, 9)])
def test_engines_equal_the_specification_in_integers(engine: str, kind: str, m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(k)
    for other in KINDS:
        a, b = operand(kind, m, k, generator), operand(other, k, n, generator)
        assert same(product(a, b, engine), matmul_by_integers(a, b)), other


numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028234663852886e38, -1.0, 1.0, INF, -INF, NAN]),
    st.integers(-4, 4).map(float),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_numbers_give_the_specification(data: st.DataObject) -> None:
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    a = torch.tensor(data.draw(st.lists(numbers, min_size=m * k, max_size=m * k)), dtype=torch.float32).reshape(m, k)
    b = torch.tensor(data.draw(st.lists(numbers, min_size=k * n, max_size=k * n)), dtype=torch.float32).reshape(k, n)
    wanted = matmul_by_integers(a, b)
    for engine in ENGINES:
        assert same(product(a, b, engine), wanted), engine


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("m", "k", "n"), [(19, 70, 23), (32, 64, 96)])
def test_layouts_do_not_matter(engine: str, m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    wanted = product(a, b, engine)
    wide_a, wide_b = torch.zeros(2 * m, 2 * k), torch.zeros(2 * k, 2 * n)
    wide_a[::2, ::2], wide_b[::2, ::2] = a, b
    for left in (a, a.t().contiguous().t(), wide_a[::2, ::2]):
        for right in (b, b.t().contiguous().t(), wide_b[::2, ::2]):
            assert same(product(left, right, engine), wanted)


def worst_digits(kind: str, rows: int, k: int) -> Tensor:
    """Operands whose q are all 0x7F7F7F, all with the lowest digit -128, or of alternating sign."""
    value = {"top": LARGEST, "low": 0x7F7F80 - 256, "mixed": LARGEST}[kind]
    x = torch.full((rows, k), float(value))
    x[:, 0] = float(LARGEST)
    if kind == "mixed":
        x[:, 1::2] *= -1
    return x


@pytest.mark.parametrize("k", [CHUNK, CHUNK + 1, 2 * CHUNK])
@pytest.mark.parametrize("kind", ["top", "low", "mixed"])
def test_longest_sums_of_the_largest_digits(k: int, kind: str) -> None:
    a, b = worst_digits(kind, 3, k), worst_digits("top", 2, k).t()
    q, s = quantise_row(a[0].tolist())
    assert s == 0
    assert max(map(abs, q)) == LARGEST
    wanted = matmul_by_integers(a[:1], b[:, :1]).item()
    for engine in ENGINES:
        assert torch.equal(product(a, b, engine), torch.full((3, 2), wanted)), engine


@pytest.mark.parametrize("engine", ["int8", "fp64"])
def test_eager_engines_take_batches(engine: str) -> None:
    generator = torch.Generator().manual_seed(8)
    a, b = torch.randn(3, 4, 50, generator=generator), torch.randn(3, 50, 6, generator=generator)
    assert same(eager_matmul(a, b, engine=engine), cpu_matmul(a, b))


@pytest.mark.parametrize("k", [CHUNK, CHUNK + 1, 2 * CHUNK])
def test_long_random_sums_are_equal_on_all_engines(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(5, k, generator=generator), torch.randn(k, 4, generator=generator)
    wanted = product(a, b, "eager fp64")
    for engine in ENGINES:
        assert same(product(a, b, engine), wanted), engine


def test_scale_is_the_largest_that_fits() -> None:
    for value in (
        1.0,
        8355711.0,
        8355711.5,
        8355712.0,
        16711422.0,
        16711423.0,
        16711424.0,
        1e-45,
        1.5e-39,
        3.4e38,
        0.1,
    ):
        x = torch.tensor(value, dtype=torch.float32).item()
        (q,), s = quantise_row([x])
        assert abs(q) <= LARGEST < round(Fraction(x) * Fraction(2) ** (s + 1))


def test_a_row_of_one_giant_is_wide_and_gaussian_rows_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    for row in torch.randn(200, 512, generator=generator).tolist():
        assert not is_wide(quantise_row(row)[0], row)
        row[7] = 1e4
        assert is_wide(quantise_row(row)[0], row)


def test_wide_elements_are_correctly_rounded() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = operand("heavy", 4, 300, generator), operand("gaussian", 300, 3, generator)
    for engine in ENGINES:
        c = product(a, b, engine)
        for i in range(4):
            for j in range(3):
                pairs = zip(a[i].tolist(), b[:, j].tolist(), strict=True)
                exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
                error = abs(Fraction(c[i, j].item()) - exact)
                step = Fraction(torch.nextafter(c[i, j].abs(), torch.tensor(INF)).item()) - abs(
                    Fraction(c[i, j].item())
                )
                assert error <= step / 2


def test_cancelling_wide_products_are_plus_zero() -> None:
    a = torch.tensor([[1e20, 1.0, -1e20, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -10.0] + [1e-3] * 20])
    b = torch.ones(33, 1)
    b[13:] = 0.0
    for engine in ENGINES:
        assert bits(product(a, b, engine)).item() == 0, engine


def test_signs_of_zero() -> None:
    zero = torch.tensor([[0.0, -0.0]])
    assert bits(matmul(zero, torch.tensor([[-1.0], [1.0]]))).item() == 0
    tiny = matmul(torch.tensor([[-1e-30]]), torch.tensor([[1e-30]]))
    assert bits(tiny).item() == -(1 << 31)


def test_overflow_and_non_finite_values() -> None:
    assert matmul(torch.tensor([[3e38]]), torch.tensor([[-3e38]])).item() == -INF
    a, b = torch.ones(3, 4), torch.ones(4, 2)
    a[1, 2], b[0, 1] = INF, -INF
    c = bits(matmul(a, b))
    assert (c[1] == 0x7FC00000).all()
    assert (c[:, 1] == 0x7FC00000).all()
    assert torch.equal(c[::2, 0].view(torch.float32), torch.full((2,), 4.0))


@pytest.mark.parametrize("shape", [((0, 3), (3, 2)), ((2, 0), (0, 2)), ((2, 3), (3, 0)), ((0, 2, 3), (0, 3, 4))])
def test_empty_operands(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = torch.ones(shape[0]), torch.ones(shape[1])
    assert torch.equal(matmul(a, b), a @ b)


def test_batches_broadcast_like_torch() -> None:
    generator = torch.Generator().manual_seed(9)
    a = torch.randn(3, 1, 6, 20, generator=generator)
    b = operand("heavy", 4 * 20, 5, generator).reshape(4, 20, 5)
    c = matmul(a, b)
    assert c.shape == (3, 4, 6, 5)
    for i in range(3):
        for j in range(4):
            assert same(c[i, j], matmul_by_integers(a[i, 0], b[j]))
    turned = torch.randn(2, 3, 9, 20, generator=generator).transpose(-1, -2)
    d = matmul(torch.ones(2, 3, 4, 20), turned)
    assert same(d[1, 2], matmul_by_integers(torch.ones(4, 20), turned[1, 2]))


def test_one_right_operand_for_a_batch_and_batches_of_large_products() -> None:
    generator = torch.Generator().manual_seed(10)
    a, b = torch.randn(2, 5, 40, 30, generator=generator), torch.randn(30, 9, generator=generator)
    c = matmul(a, b)
    assert c.shape == (2, 5, 40, 9)
    assert same(c[1, 4], product(a[1, 4], b, "eager fp64"))
    left, right = torch.randn(2, 170, 180, generator=generator), torch.randn(2, 180, 165, generator=generator)
    assert same(matmul(left, right)[1], product(left[1], right[1], "eager fp64"))


def test_half_precision_is_taken_at_its_value() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(4, 8, generator=generator), torch.randn(8, 4, generator=generator)
    for dtype in (torch.bfloat16, torch.float16):
        assert same(matmul(a.to(dtype), b.to(dtype)), matmul(a.to(dtype).float(), b.to(dtype).float()))


def test_misfits_are_the_callers_mistake() -> None:
    for a, b in [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.ones(3), torch.ones(3, 1)),
        (torch.ones(2, 1, 2), torch.ones(3, 2, 2)),
        (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)),
        (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int32)),
    ]:
        with pytest.raises(CallerError):
            matmul(a, b)


def test_large_products_take_the_int8_engine_with_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(260, 300, generator=generator), torch.randn(300, 129, generator=generator)
    assert same(matmul(a, b), product(a, b, "eager fp64"))


@pytest.mark.parametrize("threads", [1, 2])
def test_int8_products_of_a_step_run_with_onednn_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Without it torch multiplies bytes in a plain loop, hundreds of times slower; with it layers would be fused."""
    if not int8_serves(torch.device("cpu")):
        pytest.skip("this processor's int8 product is not served")
    seen: list[bool] = []
    honest = torch._int_mm

    def watched(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        seen.append(torch._C._get_mkldnn_enabled())
        return honest(left, right, **options)

    monkeypatch.setattr(torch, "_int_mm", watched)
    a = torch.randn(1024, 300, generator=torch.Generator().manual_seed(8))
    before, had = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with recording("exact"):
            _ = a @ a.t()
            outside = torch._C._get_mkldnn_enabled()
    finally:
        torch.set_num_threads(had)
    assert seen
    assert all(seen)
    assert not outside
    assert torch._C._get_mkldnn_enabled() == before


def test_a_device_that_returns_wrong_sums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element in a sampled int8 product raises; without the check it would pass into the result."""
    if not int8_serves(torch.device("cpu")):
        pytest.skip("this processor's int8 product is not served")
    generator = torch.Generator().manual_seed(6)
    a, b = torch.randn(61, 67, generator=generator), torch.randn(67, 71, generator=generator)
    honest = torch._int_mm

    def broken(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        result = honest(left, right, **options)
        result[0, 0] += 1
        return result

    monkeypatch.setattr(torch, "_int_mm", broken)
    with pytest.raises(DeviceError, match="wrong sum"):
        product(a, b, "int8")
    monkeypatch.setattr(_cpu_engine, "is_sampled", lambda *_: False)
    assert not same(product(a, b, "int8"), product(a, b, "fp64"))


def test_flush_to_zero_is_refused() -> None:
    a = torch.ones(2, 2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        with pytest.raises(DeviceError, match="flush"):
            matmul(a, a)
    finally:
        torch.set_flush_denormal(False)
    assert matmul(a, a)[0, 0] == 2
