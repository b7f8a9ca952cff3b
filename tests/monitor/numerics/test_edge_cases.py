"""Odd shapes, layouts and values in every class of operators, in both modes: specials, empty, 0-d, stride 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload

from analysis.bench.battery_edges import edge_calls, layouts
from firmware_sim.errors import DeviceError
from monitor.numerics import execute, recording, replaying
from monitor.numerics.operators import operator_table
from monitor.numerics.operators.variants import functional_variant

BACKENDS = ("rounded", "exact")
CANONICAL_NAN = 0x7FC00000
BITS = (
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F812345, 0x00000001),
    *(0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000, 0x3F800001),
)


def overload(name: str) -> OpOverload:
    packet, _, kind = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), kind or "default")
    return found


def floats(patterns: Sequence[int]) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in tensors(part)] if isinstance(value, list | tuple) else []


def raw(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(first: Any, second: Any) -> bool:
    """Equal shapes, types and bits."""
    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b)) for a, b in pairs)


def run(numerics: str, func: OpOverload, args: Any, kwargs: Any, entries: bytes | None = None) -> Any:
    return execute(numerics, str(func), args, kwargs, entries=entries)


def recorded(numerics: str, func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, bytes]:
    """Result, and the log that another device would follow."""
    with recording(numerics) as session:
        out = func(*args, **kwargs)
    return out, session.log


numbers = st.one_of(st.sampled_from(BITS), st.integers(0, (1 << 32) - 1))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    count = rows * columns
    x, y = (floats(draw(st.lists(numbers, min_size=count, max_size=count))).reshape(rows, columns) for _ in range(2))
    return x, y


@pytest.mark.parametrize("numerics", BACKENDS)
@settings(max_examples=5, deadline=None)
@given(pair=matrices())
def test_any_values_give_the_same_bits_in_any_layout(numerics: str, pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    twins = [(layouts(x)[name], layouts(y)[name]) for name in ("columns", "strided")]
    for calls in zip(*(list(edge_calls(a, b)) for a, b in [(x, y), *twins]), strict=True):
        name, args, kwargs = calls[0]
        func = overload(name)
        wanted, log = recorded(numerics, func, args, kwargs)
        if operator_table()[str(func)].kind != "exact":
            for value in tensors(wanted):
                if value.dtype == torch.float32:
                    assert (value[value.isnan()].view(torch.int32) == CANONICAL_NAN).all(), name
        for _, others, _ in calls[1:]:
            assert same(run(numerics, func, others, kwargs, log), wanted), name


@pytest.mark.parametrize("numerics", BACKENDS)
@settings(max_examples=3, deadline=None)
@given(pair=matrices())
def test_expanded_operands_are_the_matrices_that_they_stand_for(numerics: str, pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    views = [(x[:1].expand(3, -1), y[:1].expand(3, -1)), (x[:, :1].expand(-1, 4), y[:, :1].expand(-1, 4))]
    for a, b in views:
        for (name, args, kwargs), (_, copies, _) in zip(
            edge_calls(a, b), edge_calls(a.contiguous(), b.contiguous()), strict=True
        ):
            wanted, log = recorded(numerics, overload(name), copies, kwargs)
            assert same(run(numerics, overload(name), args, kwargs, log), wanted), name


def in_place_of(func: OpOverload) -> OpOverload | None:
    """The in-place form with the same arguments."""
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__ + "_", None)
    found: OpOverload | None = getattr(packet, func._overloadname, None)
    if found is None or len(found._schema.arguments) != len(func._schema.arguments):
        return None
    return found


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_several_elements_share_is_not_written(numerics: str, dtype: torch.dtype) -> None:
    shared = torch.ones(1, 4, dtype=dtype).expand(3, 4)
    for name, args in (("add_.Tensor", (2.0,)), ("mul_.Tensor", (2.0,)), ("exp_", ()), ("copy_", (torch.ones(3, 4),))):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            run(numerics, overload(name), (shared, *args), {})
    assert (shared == 1).all()


def out_forms_of(func: OpOverload) -> Iterator[OpOverload]:
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        if functional_variant(other) is func:
            yield other


@pytest.mark.parametrize("numerics", BACKENDS)
def test_in_place_forms_write_the_bits_of_functional_ones(numerics: str) -> None:
    x, y = (floats(list(BITS[i:] + BITS[:i])).reshape(4, 4) for i in (0, 5))
    seen = 0
    for name, args, kwargs in edge_calls(x, y):
        func = in_place_of(overload(name))
        if func is None or args[0] is not x:
            continue
        wanted, log = recorded(numerics, overload(name), args, kwargs)
        if not isinstance(wanted, Tensor) or wanted.dtype != torch.float32 or wanted.shape != x.shape:
            continue
        for target in (x.clone(), x.t().contiguous().t(), layouts(x)["strided"]):
            out = run(numerics, func, (target, *args[1:]), kwargs, log)
            assert out is target, name
            assert same(target, wanted), name
        seen += 1
    assert seen >= 45
    left, right = [x.clone(), y.clone()], [y, x]
    wanted = run(numerics, overload("_foreach_add.List"), (left, right), {})
    run(numerics, overload("_foreach_add_.List"), (left, right), {})
    assert same(left, wanted)


@pytest.mark.parametrize("numerics", BACKENDS)
def test_out_forms_write_the_bits_of_functional_ones(numerics: str) -> None:
    x, y = (floats(list(BITS[i:] + BITS[:i])).reshape(4, 4) for i in (0, 5))
    seen = set()
    for name, args, kwargs in edge_calls(x, y):
        for func in out_forms_of(overload(name)):
            wanted, log = recorded(numerics, overload(name), args, kwargs)
            results = tensors(wanted)
            outputs = [argument.name for argument in func._schema.arguments if argument.is_out]
            if len(outputs) != len(results) or "_foreach" in name:
                continue
            targets = [
                torch.empty_like(value.t()).t() if value.dim() == 2 else torch.empty_like(value) for value in results
            ]
            with replaying(numerics, log):
                out = func(*args, **kwargs, **dict(zip(outputs, targets, strict=True)))
            assert all(a is b for a, b in zip(tensors(out), targets, strict=True)), name
            assert same(targets, results), name
            seen.add(str(func))
    assert len(seen) >= 60


@pytest.mark.parametrize("numerics", BACKENDS)
def test_out_forms_belong_to_the_operator_of_their_arguments(numerics: str) -> None:
    """By name alone, a sum over a dimension would become one over everything, and a mean tensor a plain shape."""
    x = torch.arange(6.0).reshape(2, 3)
    with recording(numerics):
        total = torch.sum(x, dim=1, out=torch.empty(2))
        values, places = torch.max(x, 1, out=(torch.empty(2), torch.empty(2, dtype=torch.int64)))
        average = torch.mean(x, dim=0, out=torch.empty(3))
    assert total.tolist() == [3.0, 12.0]
    assert (values.tolist(), places.tolist()) == ([2.0, 5.0], [2, 2])
    assert average.tolist() == [1.5, 2.5, 3.5]
    with recording(numerics, keys=lambda: 7):
        drawn = torch.normal(x, 2.0, out=torch.empty(2, 3))
    with recording(numerics, keys=lambda: 7):
        assert torch.equal(drawn, torch.normal(x, 2.0))


SHAPES = ((0, 3), (3, 0), (0, 0))


def outcome(action: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return action()
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error)


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_without_elements_behave_as_in_aten(shape: tuple[int, int], numerics: str) -> None:
    x, y = torch.ones(shape), torch.ones(shape)
    for name, args, kwargs in edge_calls(x, y):
        func = overload(name)
        if name in ("native_batch_norm", "native_layer_norm"):
            args = (args[0], args[1], *args[2:])
        native = outcome(lambda func=func, args=args, kwargs=kwargs: func(*args, **kwargs))  # type: ignore[misc]
        ours = outcome(lambda func=func, args=args, kwargs=kwargs: run(numerics, func, args, kwargs))  # type: ignore[misc]
        if isinstance(native, type):
            assert isinstance(ours, type) or name == "native_batch_norm", name
            continue
        assert not isinstance(ours, type), (name, ours)
        for place, (a, b) in enumerate(zip(tensors(native), tensors(ours), strict=True)):
            assert a.shape == b.shape, name
            assert a.dtype == b.dtype, name
            # A mean over nothing is NaN here; ATen leaves its saved mean at 0.
            if not (name == "native_layer_norm" and place == 1):
                assert torch.allclose(a.double(), b.double(), equal_nan=True), name


@pytest.mark.parametrize("numerics", BACKENDS)
def test_products_over_nothing(numerics: str) -> None:
    """K = 0: zeros, to which a bias is added; no samples: no gradient."""
    a, b, bias = torch.ones(2, 0), torch.ones(0, 3), torch.tensor([1.0, -2.0, 3.0])
    with recording(numerics):
        product, biased = a @ b, torch.addmm(bias, a, b, beta=0.5)
        batch = torch.bmm(a.expand(4, 2, 0), b.expand(4, 0, 3))
        weight = torch.ones(5, 4, 3, 3, requires_grad=True)
        out = F.conv2d(torch.ones(0, 4, 6, 6), weight)
        torch.autograd.backward(out.sum())
    assert product.view(torch.int32).tolist() == [[0, 0, 0]] * 2
    assert biased.tolist() == [[0.5, -1.0, 1.5]] * 2
    assert batch.view(torch.int32).any().item() is False
    assert out.shape == (0, 5, 4, 4)
    assert weight.grad is not None
    assert weight.grad.view(torch.int32).any().item() is False


SCALARS = """
exp log sqrt tanh gelu sigmoid reciprocal neg abs relu softplus hardswish sum mean clone isnan log_sigmoid_forward
"""


@pytest.mark.parametrize("numerics", BACKENDS)
def test_zero_dimensional_tensors_equal_single_elements(numerics: str) -> None:
    for x in floats(list(BITS)):
        one = x.reshape(1)
        for name in SCALARS.split():
            wanted, got = run(numerics, overload(name), (one,), {}), run(numerics, overload(name), (x,), {})
            for a, b in zip(tensors(wanted), tensors(got), strict=True):
                assert same(a.reshape(-1), b.reshape(-1)), name
        for name in ("add.Tensor", "mul.Tensor", "div.Tensor", "maximum", "addcmul"):
            args = (one, one, one) if name == "addcmul" else (one, one)
            flat = tuple(value.reshape(()) for value in args)
            assert same(run(numerics, overload(name), args, {})[0], run(numerics, overload(name), flat, {})), name
        for name in ("_softmax", "_log_softmax"):
            got = run(numerics, overload(name), (x, 0, False), {})
            assert got.shape == ()
        assert run(numerics, overload("max.dim"), (x, 0), {})[1].item() == 0
        assert run(numerics, overload("cumsum"), (x, 0), {}).shape == ()


@pytest.mark.parametrize("numerics", BACKENDS)
def test_zero_rows_and_constant_rows(numerics: str) -> None:
    zero = torch.zeros(3, 4)
    for name, args, kwargs in edge_calls(zero, zero.clone()):
        func = overload(name)
        native = outcome(lambda func=func, args=args, kwargs=kwargs: func(*args, **kwargs))  # type: ignore[misc]
        for a, b in zip(tensors(native), tensors(run(numerics, func, args, kwargs)), strict=True):
            if a.dtype == torch.float32:  # of equal elements, ATen's topk takes any
                assert torch.allclose(a, b, equal_nan=True), name
    row = torch.full((2, 5), 0.1)
    with recording(numerics):
        normal, soft, spread = F.layer_norm(row, (5,)), row.softmax(-1), row.var(-1)
    assert normal.tolist() == [[0.0] * 5] * 2
    assert soft.tolist() == [[torch.tensor(0.2).item()] * 5] * 2
    assert spread.tolist() == [0.0, 0.0]


def kinds(x: Tensor) -> Tensor:
    """0 for NaN, else the sign with infinity, zero or neither."""
    weight = torch.where(x.isinf(), 3, torch.where(x == 0, 1, 2))
    return torch.where(x.isnan(), 0, torch.where(torch.signbit(x), -weight, weight))


AS_NATIVE = """
neg abs relu sqrt reciprocal exp log log1p expm1 tanh erf erfc sigmoid rsqrt sin cos floor ceil trunc round sign
leaky_relu hardtanh add.Tensor sub.Tensor mul.Tensor div.Tensor amax amin sum mean
"""


@pytest.mark.parametrize("numerics", BACKENDS)
def test_nan_infinity_and_signs_of_zero_are_those_of_ieee_arithmetic(numerics: str) -> None:
    values = floats([bits for bits in BITS if bits not in (0x7F7FFFFF, 0xFF7FFFFF)])
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    for name in AS_NATIVE.split():
        func = overload(name)
        if name in ("amax", "amin", "sum", "mean"):
            for row in torch.stack([x, y], 1):
                if not (name in ("amax", "amin") and (row == 0).all()):
                    native = func(row) if name in ("sum", "mean") else func(row, [0])
                    ours = run(numerics, func, (row,) if name in ("sum", "mean") else (row, [0]), {})
                    assert kinds(ours + 0.0).tolist() == kinds(native + 0.0).tolist(), (name, row)
            continue
        args = (
            (x, y)
            if len([a for a in func._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]) > 1
            else (x,)
        )
        # FP32 kernels lose subnormal arguments and the sign of zero here and there; FP64 ones do not see them as such.
        # Rounded numerics settle a function's zero as +0.
        got, wanted = kinds(run(numerics, func, args, {})), kinds(func(*(a.double() for a in args)).float())
        if numerics == "rounded":
            got, wanted = (torch.where(kind == -1, 1, kind) for kind in (got, wanted))
        assert torch.equal(got, wanted), (name, [a[got != wanted][:3] for a in args])


@pytest.mark.parametrize("numerics", BACKENDS)
def test_clamps_keep_a_number_that_equals_its_limit(numerics: str) -> None:
    """Native kernels take the zero of either, by its place in memory and by processor."""
    values = floats(BITS)
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    for name, beyond in (("clamp_min.Tensor", torch.lt), ("clamp_max.Tensor", torch.gt)):
        for part in (slice(None), slice(3, 8), slice(1, None, 2)):
            some, limit = x[part], y[part]
            got = run(numerics, overload(name), (some, limit), {})
            wanted = torch.where(beyond(some, limit) | limit.isnan(), limit, some)
            assert torch.equal(kinds(got), kinds(wanted)), name
            assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0)), name


@pytest.mark.parametrize("numerics", BACKENDS)
def test_ties_take_the_lowest_index(numerics: str) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, torch.nan, torch.nan]])
    for name, columns, wanted in (
        ("max.dim", slice(0, 5), 1),
        ("argmax", slice(0, 5), 1),
        ("min.dim", slice(3, 5), 0),
        ("argmin", slice(3, 5), 0),
        ("max.dim", slice(0, 7), 5),
    ):
        out = run(numerics, overload(name), (x[:, columns], 1), {})
        assert tensors(out)[-1].item() == wanted, name
    order = run(numerics, overload("sort"), (x[:, :5], 1, True), {})[1]
    assert order.tolist() == [[1, 2, 0, 3, 4]]
    assert run(numerics, overload("topk"), (x[:, :5], 2, 1), {})[1].tolist() == [[1, 2]]
    pooled = run(numerics, overload("max_pool2d_with_indices"), (torch.ones(1, 1, 4, 4), [2, 2], [2, 2]), {})[1]
    assert pooled.reshape(-1).tolist() == [0, 2, 8, 10]


@pytest.mark.parametrize("numerics", BACKENDS)
def test_flush_to_zero_is_refused_for_every_operator(numerics: str) -> None:
    """Also where it is switched on within a step, and where only native elementwise operators run."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    x = torch.ones(2, 2)
    try:
        for name, args, kwargs in list(edge_calls(x, x.clone()))[::17]:
            with pytest.raises(DeviceError, match="flush"):
                run(numerics, overload(name), args, kwargs)
        torch.set_flush_denormal(False)
        with pytest.raises(DeviceError, match="flush"), recording(numerics):
            torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)
    assert run(numerics, overload("mul.Tensor"), (x * 2.0**-126, 0.5), {})[0, 0].item() == 2.0**-127


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_product_is_within_the_bound_that_its_docstring_proves(data: st.DataObject) -> None:
    """|C − A·B| ≤ K·2^-21·rowmax·colmax + ½ulp for finite operands whose product does not overflow."""
    from fractions import Fraction

    from monitor.numerics.exact import matmul

    m, k, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    exponent = data.draw(st.integers(0, 60))
    finite = st.one_of(
        st.floats(-(2.0**exponent), 2.0**exponent, width=32, allow_nan=False),
        st.sampled_from([0.0, 1.0, -1.0, 2.0**-149, 2.0**60, 8355711.0, 8355711.5, 1.0 + 2.0**-23, -3.0e-39]),
    )
    a = torch.tensor(data.draw(st.lists(finite, min_size=m * k, max_size=m * k)), dtype=torch.float32).reshape(m, k)
    b = torch.tensor(data.draw(st.lists(finite, min_size=k * n, max_size=k * n)), dtype=torch.float32).reshape(k, n)
    c = matmul(a, b)
    for i in range(m):
        for j in range(n):
            left, right = a[i].tolist(), b[:, j].tolist()
            exact = sum((Fraction(p) * Fraction(q) for p, q in zip(left, right, strict=True)), Fraction(0))
            value = c[i, j].abs()
            ulp = Fraction(torch.nextafter(value, torch.tensor(torch.inf)).item()) - Fraction(value.item())
            largest = Fraction(max(map(abs, left))) * Fraction(max(map(abs, right)))
            assert abs(Fraction(c[i, j].item()) - exact) <= k * largest / (1 << 21) + ulp / 2


def test_edge_calls_cover_every_class_of_operators() -> None:
    x = torch.ones(3, 4)
    names = {str(overload(name)) for name, _, _ in edge_calls(x, x)}
    modules = {
        row.code.__module__.rsplit(".", 1)[1]
        for name, row in operator_table().items()
        if row.code is not None and name in names
    }
    assert modules >= {"elementwise", "reductions", "normalisation", "linear", "indexing", "losses", "lists"}
    assert {operator_table()[name].kind for name in names} == {"exact", "arithmetic", "implemented", "decomposed"}
    assert len(names) >= 110
