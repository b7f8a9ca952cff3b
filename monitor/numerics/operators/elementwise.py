"""Element-by-element operators, split so that no device can contract a product and a sum into one operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.engines.eager.exact.functions import KERNELS, POLYGAMMA_ORDERS
from monitor.numerics.errors import UnsupportedOperator

__all__ = [
    "add",
    "addcdiv",
    "addcmul",
    "angle_of",
    "arange",
    "cast",
    "combine",
    "copy",
    "div",
    "elu",
    "extreme_number",
    "function",
    "gelu",
    "gelu_backward",
    "hypot",
    "integer",
    "lerp",
    "linspace",
    "logspace",
    "ordered",
    "power",
    "power_of_constant",
    "power_of_tensor",
    "quotient",
    "reciprocal",
    "rsub",
    "sigmoid_backward",
    "silu_backward",
    "softplus",
    "sqrt",
    "square_root",
    "sub",
    "tanh_backward",
]

Number = int | float | bool


def _constant(value: Number, like: Tensor) -> Tensor:
    """A 0-d tensor on the operand's device; a Python divisor would become a product with a reciprocal on CUDA."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def combine(a: Tensor | Number, b: Tensor | Number, alpha: Number, sign: int) -> Tensor:
    """a ± alpha·b with the product rounded first."""
    if alpha != 1:
        keeps_type = isinstance(b, Tensor) and (b.dtype.is_floating_point or b.dtype == torch.bool)
        b = b * _constant(alpha, b) if isinstance(b, Tensor) and keeps_type else b * alpha
    return torch.add(a, b) if sign > 0 else torch.sub(a, b)


def quotient(a: Tensor, b: Tensor | Number) -> Tensor:
    """a / b by IEEE division."""
    if not isinstance(b, Tensor):
        a = a if a.dtype.is_floating_point else a.to(torch.get_default_dtype())
        return torch.div(a, _constant(b, a))
    if b.dim() == 0 and b.device != a.device:
        b = b.to(a.device)
    return torch.div(a, b)


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded FP32 √x from a FP64 root that may be 1 ulp off, as vendors' vector libraries are.

    x has 24 bits and a midpoint m of the FP32 grid 25, so |x − m²| ≥ 2^-48 for m in [1, 2) and √x stays 2^-50 away
    from m: four FP64 ulp.
    """
    if x.dtype != torch.float32:
        raise UnsupportedOperator("aten.sqrt", f"{x.dtype} input; use float32")
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def sqrt(_: Backend, x: Tensor) -> Tensor:
    return square_root(x)


def add(_: Backend, a: Tensor, b: Tensor | Number, alpha: Number = 1) -> Tensor:
    return combine(a, b, alpha, 1)


def sub(_: Backend, a: Tensor, b: Tensor | Number, alpha: Number = 1) -> Tensor:
    return combine(a, b, alpha, -1)


def rsub(_: Backend, a: Tensor, b: Tensor | Number, alpha: Number = 1) -> Tensor:
    scaled = a if alpha == 1 else a * _constant(alpha, a)
    return torch.sub(b if isinstance(b, Tensor) else _constant(b, a), scaled)


def div(_: Backend, a: Tensor, b: Tensor | Number) -> Tensor:
    return quotient(a, b)


def reciprocal(_: Backend, x: Tensor) -> Tensor:
    return torch.div(_constant(1, x), x)


def lerp(_: Backend, start: Tensor, end: Tensor, weight: Tensor | Number) -> Tensor:
    if isinstance(weight, Tensor):
        ahead = start + weight * (end - start)
        return torch.where(weight.abs() < 0.5, ahead, end - (1 - weight) * (end - start))
    difference = end - start
    if abs(weight) < 0.5:
        return start + difference * _constant(weight, start)
    return end - difference * _constant(1 - weight, start)


def addcmul(_: Backend, x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    product = a * b
    return x + (product if value == 1 else product * _constant(value, product))


def addcdiv(_: Backend, x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    ratio = quotient(a, b)
    return x + (ratio if value == 1 else ratio * _constant(value, ratio))


def power(backend: Backend, x: Tensor, y: Number) -> Tensor:
    if not x.dtype.is_floating_point:
        if isinstance(y, float) or y < 0:
            raise UnsupportedOperator("aten.pow.Tensor_Scalar", "convert the integer base to floating point first")
        return torch.pow(x, y)
    if y == 0:
        return torch.ones_like(x)
    if y in (1, 2):
        return x.clone() if y == 1 else x * x
    if y == -1:
        return reciprocal(backend, x)
    if y == 0.5:
        return square_root(x)
    return backend.power(x, float(y))


def power_of_tensor(backend: Backend, x: Tensor, y: Tensor) -> Tensor:
    kind = torch.result_type(x, y)
    return backend.power(x.to(kind), y.to(kind)) if kind.is_floating_point else torch.pow(x, y)


def power_of_constant(backend: Backend, base: Number, exponent: Tensor) -> Tensor:
    if not exponent.dtype.is_floating_point or not base > 0:
        raise UnsupportedOperator("aten.pow.Scalar", "use a positive base and a floating-point exponent")
    return backend.unary("exp", exponent * _constant(math.log(base), exponent))


def ordered(larger: bool) -> Callable[..., Tensor]:
    """maximum or minimum with −0 below +0 and canonical NaN."""

    def pick(_: Backend, a: Tensor, b: Tensor) -> Tensor:
        out = torch.maximum(a, b) if larger else torch.minimum(a, b)
        if not out.dtype.is_floating_point:
            return out
        zero = torch.where((out == 0) & (torch.signbit(a) != torch.signbit(b)), 0.0 if larger else -0.0, out)
        return zero

    return pick


def extreme_number(larger: bool) -> Callable[..., Tensor]:
    """fmax or fmin: ``ordered``, but that a number goes before a NaN."""

    def pick(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
        out = ordered(larger)(backend, a, b)
        return torch.where(a.isnan(), b, torch.where(b.isnan(), a, out)) if out.dtype.is_floating_point else out

    return pick


def _of_one_shape(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    shape = np.broadcast_shapes(tuple(a.shape), tuple(b.shape))
    return a.expand(shape), b.expand(shape)


def hypot(_: Backend, a: Tensor, b: Tensor) -> Tensor:
    """√(a² + b²), rounded correctly but for the rounding of the sum in FP64.

    The root's candidate and its neighbours are compared with the sum by the squares of their midpoints, which FP64
    holds without error, so that no library's root decides.
    """
    x, y = _of_one_shape(a.to(torch.float64), b.to(torch.float64))
    total = x * x + y * y
    root = torch.sqrt(total).to(torch.float32)
    for direction in (torch.inf, -torch.inf):
        other = torch.nextafter(root, torch.full_like(root, direction))
        middle = (root.to(torch.float64) + other.to(torch.float64)) * 0.5
        beyond = total > middle * middle if direction > 0 else total < middle * middle
        root = torch.where(beyond & (total > 0) & other.isfinite() & root.isfinite(), other, root)
    return torch.where(a.isinf() | b.isinf(), torch.inf, root)


def angle_of(_: Backend, y: Tensor, x: Tensor) -> Tensor:
    """atan2 in FP64 of IEEE operations in a stated order, rounded once."""
    wide_y, wide_x = _of_one_shape(y.to(torch.float64), x.to(torch.float64))
    both = wide_y.isinf() & wide_x.isinf()
    over = torch.where(both, torch.ones_like(wide_y), wide_y.abs())
    under = torch.where(both, torch.ones_like(wide_x), wide_x.abs())
    angle = KERNELS["atan"](torch.where((over == 0) & (under == 0), 0.0, over / under))
    angle = torch.where(torch.signbit(wide_x), math.pi - angle, angle)
    angle = torch.where(wide_x.isnan() | wide_y.isnan(), torch.nan, angle)
    return torch.copysign(angle, wide_y).to(torch.float32)


def linspace(_: Backend, start: Tensor | Number, end: Tensor | Number, steps: int, **options: Any) -> Tensor:
    """start + i·step in the first half, end − (steps − 1 − i)·step in the second, each operation rounded to FP32."""
    kind = options.get("dtype") or torch.get_default_dtype()
    if kind != torch.float32:
        raise UnsupportedOperator("aten.linspace", f"{kind}; make it in float32 and convert it")
    device = options.get("device") or next((each.device for each in (start, end) if isinstance(each, Tensor)), None)
    first, last = (torch.as_tensor(each, dtype=kind, device=device) for each in (start, end))
    places = torch.arange(steps, device=device)
    step = torch.div(last - first, torch.full((), max(steps - 1, 1), dtype=kind, device=device))
    low, high = first + places.to(kind) * step, last - (steps - 1 - places).to(kind) * step
    return torch.where(places < steps // 2, low, high) if steps != 1 else first.reshape(1).clone()


def logspace(
    backend: Backend, start: Tensor | Number, end: Tensor | Number, steps: int, base: float = 10.0, **options: Any
) -> Tensor:
    exponents = linspace(backend, start, end, steps, **options)
    return backend.power(torch.full_like(exponents, base), exponents)


def function(name: str) -> Callable[..., Tensor]:
    def apply(backend: Backend, x: Tensor) -> Tensor:
        return backend.unary(name, x if x.dtype.is_floating_point else x.to(torch.get_default_dtype()))

    return apply


def polygamma(backend: Backend, order: Any, x: Any) -> Tensor:
    """Of order and argument; in place, the argument comes first."""
    order, x = (x, order) if isinstance(order, Tensor) else (order, x)
    if order and order not in POLYGAMMA_ORDERS:
        most = POLYGAMMA_ORDERS[-1]
        text = f"order {order}; use an order up to {most}, or up to {most - 1} where backward() differentiates it"
        raise UnsupportedOperator("aten.polygamma", text)
    return function(f"polygamma_{order}" if order else "digamma")(backend, x)


def silu_backward(backend: Backend, grad: Tensor, x: Tensor) -> Tensor:
    s = backend.unary("sigmoid", x)
    return grad * (s * (x * (1.0 - s) + 1.0))


def sigmoid_backward(_: Backend, grad: Tensor, y: Tensor) -> Tensor:
    return grad * ((1.0 - y) * y)


def tanh_backward(_: Backend, grad: Tensor, y: Tensor) -> Tensor:
    return grad * ((1.0 - y) * (1.0 + y))


_ROOT_HALF = math.sqrt(0.5)
_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def gelu(backend: Backend, x: Tensor, *, approximate: str = "none") -> Tensor:
    return backend.unary("gelu" if approximate == "none" else "gelu_tanh", x)


def _gelu_inner(x: Tensor) -> Tensor:
    return (x + (x * x * x) * 0.044715) * _ROOT_2_OVER_PI


def gelu_backward(backend: Backend, grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        cdf = backend.unary("erfc", x * -_ROOT_HALF) * 0.5
        density = backend.unary("exp", (x * x) * -0.5) * (_ROOT_2_OVER_PI * 0.5)
        return grad * (cdf + x * density)
    t = backend.unary("tanh", _gelu_inner(x))
    slope = ((x * x) * (3.0 * 0.044715) + 1.0) * _ROOT_2_OVER_PI
    return grad * ((t + 1.0) * 0.5 + ((x * 0.5) * (1.0 - t * t)) * slope)


def elu(backend: Backend, x: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    low = backend.unary("expm1", x * input_scale) * alpha
    return torch.where(x > 0, x, low) * scale


def softplus(backend: Backend, x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, quotient(backend.unary("log1p", backend.unary("exp", scaled)), beta))


def cast(_: Backend, x: Tensor, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype")
    if dtype is not None and x.dtype.is_floating_point and not (dtype.is_floating_point or dtype == torch.bool):
        if dtype in _WIDE:
            return _saturated(x, dtype).to(device=kwargs.get("device") or x.device)
        _check_integer_range(x, dtype)
    return torch.ops.aten._to_copy.default(x, **kwargs)  # type: ignore[no-any-return]


_WIDE = (torch.int32, torch.int64)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest integer towards zero; what lies outside the type becomes its nearest number, NaN zero.

    C++ leaves that undefined, and processors differ. T5's buckets of relative positions cast log(0), and choose what
    came of it nowhere.
    """
    bounds = torch.iinfo(dtype)
    wide = x.to(torch.float64)
    above, below = wide >= bounds.max + 1.0, wide <= bounds.min
    inside = torch.where(above | below | wide.isnan(), torch.zeros_like(wide), wide).to(dtype)
    return torch.where(above, bounds.max, torch.where(below, bounds.min, inside))


def _check_integer_range(x: Tensor, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    wide = x.to(torch.float64)
    if x.numel() and not bool(((wide > limits.min - 1.0) & (wide < limits.max + 1.0)).all()):
        raise UnsupportedOperator("aten._to_copy", f"a value outside {dtype} has no defined result; clamp it first")


def copy(_: Backend, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if source.dtype.is_floating_point and not (x.dtype.is_floating_point or x.dtype == torch.bool):
        if x.dtype in _WIDE:
            return torch.ops.aten.copy.default(x, _saturated(source, x.dtype))  # type: ignore[no-any-return]
        _check_integer_range(source, x.dtype)
    return torch.ops.aten.copy.default(x, source)  # type: ignore[no-any-return]


def integer(name: str) -> Callable[..., Tensor]:
    """An operator that is exact on integers and not shown to be on anything else."""
    packet, _, overload = name.partition(".")

    def apply(_: Backend, *args: Any, **kwargs: Any) -> Tensor:
        if any(x.dtype.is_floating_point if isinstance(x, Tensor) else isinstance(x, float) for x in args):
            raise UnsupportedOperator(f"aten.{name}", "use it on integers only")
        out: Tensor = getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)
        return out

    return apply


def arange(_: Backend, *args: Any, **kwargs: Any) -> Tensor:
    """start + i·step, each operation in FP64, rounded once; integers are exact."""
    made = torch.arange(*args, **kwargs)
    if all(isinstance(value, int) for value in args) or not made.is_floating_point():
        return made
    if made.dtype != torch.float32:
        raise UnsupportedOperator("aten.arange", f"{made.dtype}; make it in float32 and convert it")
    start, step = (0, 1) if len(args) == 1 else (args[0], (*args, 1)[2])
    return (torch.arange(len(made), device=made.device).to(torch.float64) * step + start).to(torch.float32)
