"""Operators on complex numbers: in FP64 in a stated order, each part rounded once to FP32.

A product is (ac − bd) + (ad + bc)i, a quotient (ac + bd)/(c² + d²) + (bc − ad)/(c² + d²)i: products of FP32 numbers are
exact in FP64, and none overflows. A real operand has the imaginary part zero. A matrix product is one real product of
twice the length, so that each part is one sum. Sums and moves are those of the parts.

A row of the table takes complex operands by the code that ``COMPLEX`` has for it, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators import elementwise, fourier, indexing, lists, reductions
from monitor.numerics.operators.row import Code

__all__ = ["COMPLEX", "conjugate", "polar", "takes_complex", "zeros"]

Number = int | float | bool
Parts = tuple[Tensor, Tensor]
_MOST_POWER = 1024


def takes_complex(values: Iterable[Any]) -> bool:
    """Whether a call's arguments hold a complex tensor, number or type."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_complex():
                return True
        elif isinstance(value, list | tuple):
            if takes_complex(value):
                return True
        elif isinstance(value, complex) or (isinstance(value, torch.dtype) and value.is_complex):
            return True
    return False


def _require_single(name: str, *operands: Any) -> None:
    """The type that PyTorch gives the result of these operands must be complex64."""
    kind = torch.result_type(*operands) if len(operands) > 1 else operands[0].dtype
    if kind != torch.complex64:
        raise UnsupportedOperator(f"aten.{name}", f"complex operands of type {kind}; use complex64")


def _parts(x: Tensor | Number) -> Parts:
    """Real and imaginary part in FP64 of what FP32 holds of an operand."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=torch.complex64 if isinstance(x, complex) else torch.float32)
    if x.is_complex():
        real, imag = torch.view_as_real(x).to(torch.float64).unbind(-1)
        return real, imag
    return x.to(torch.float32).to(torch.float64), torch.zeros((), dtype=torch.float64, device=x.device)


def _rounded(parts: Parts) -> Tensor:
    return torch.complex(*(part.to(torch.float32) for part in parts))


def _on_device_of(a: Tensor, b: Any) -> Any:
    return b.to(a.device) if isinstance(b, Tensor) and not b.dim() else b


def _product(x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    return a * c - b * d, a * d + b * c


def _times(x: Parts, factor: Number) -> Parts:
    number = torch.tensor(float(factor), dtype=torch.float32).item()
    return x[0] * number, x[1] * number


def _quotient(x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    size = c * c + d * d
    real, imag = (a * c + b * d) / size, (b * c - a * d) / size
    real, imag = torch.where(size == 0, a / c.abs(), real), torch.where(size == 0, b / d.abs(), imag)
    vanishes = size.isinf() & ~(c.isnan() | d.isnan() | (c.isinf() & d.isinf())) & (a * 0 == 0) & (b * 0 == 0)
    return torch.where(vanishes, 0.0, real), torch.where(vanishes, 0.0, imag)


def _pair(name: str, combine: Callable[[Parts, Parts], Parts]) -> Code:
    def apply(_: Backend, a: Any, b: Any) -> Tensor:
        _require_single(name, a, b)
        first = a if isinstance(a, Tensor) else b
        return _rounded(combine(_parts(_on_device_of(first, a)), _parts(_on_device_of(first, b))))

    return apply


def _sum(name: str, sign: float, *, swapped: bool = False) -> Code:
    def apply(_: Backend, a: Any, b: Any, alpha: Number = 1) -> Tensor:
        _require_single(name, a, b)
        first = a if isinstance(a, Tensor) else b
        x, y = (_parts(_on_device_of(first, each)) for each in ((b, a) if swapped else (a, b)))
        y = y if alpha == 1 else _product(y, _parts(alpha)) if isinstance(alpha, complex) else _times(y, alpha)
        return _rounded((x[0] + sign * y[0], x[1] + sign * y[1]))

    return apply


def _with_product(name: str, combine: Callable[[Parts, Parts], Parts]) -> Code:
    def apply(_: Backend, x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
        for each in (a, b):
            _require_single(name, x, each)
        whole = combine(combine(_parts(value), _parts(a)) if name == "addcmul" else _parts(a), _parts(b))
        if name == "addcdiv":
            whole = _product(_parts(value), whole)
        real, imag = _parts(x)
        return _rounded((real + whole[0], imag + whole[1]))

    return apply


def conjugate(_: Backend, x: Tensor) -> Tensor:
    """Of any type: nothing is rounded. Python's numbers are complex128 in derivatives."""
    if not x.is_complex():
        return x
    real, imag = torch.view_as_real(x).unbind(-1)
    return torch.complex(real, -imag)


def negative(_: Backend, x: Tensor) -> Tensor:
    _require_single("neg", x)
    return torch.view_as_complex(-torch.view_as_real(x))


def absolute(backend: Backend, x: Tensor) -> Tensor:
    _require_single("abs", x)
    real, imag = torch.view_as_real(x).unbind(-1)
    return elementwise.hypot(backend, real, imag)


def angle(backend: Backend, x: Tensor) -> Tensor:
    _require_single("angle", x)
    real, imag = torch.view_as_real(x).unbind(-1)
    return elementwise.angle_of(backend, imag, real)


def sign(backend: Backend, x: Tensor) -> Tensor:
    """x / |x|, |x| being rounded to FP32, of very large and small x by a power of two; zero of zero."""
    _require_single("sgn", x)
    real, imag = _parts(x)
    largest = torch.maximum(real.abs(), imag.abs())
    scale = torch.where(largest > 2.0**100, 2.0**-64, torch.where(largest < 2.0**-100, 2.0**64, 1.0))
    real, imag = real * scale, imag * scale
    size = elementwise.hypot(backend, real.to(torch.float32), imag.to(torch.float32)).to(torch.float64)
    return _rounded((torch.where(size == 0, 0.0, real / size), torch.where(size == 0, 0.0, imag / size)))


def reciprocal(_: Backend, x: Tensor) -> Tensor:
    _require_single("reciprocal", x)
    return _rounded(_quotient(_parts(1), _parts(x)))


def power(_: Backend, x: Tensor, exponent: Any) -> Tensor:
    """x^n for a whole n: squared, and multiplied by x where n has a binary digit 1, from the second digit on."""
    _require_single("pow", x)
    if isinstance(exponent, complex) or exponent != int(exponent) or abs(exponent) > _MOST_POWER:
        raise UnsupportedOperator("aten.pow.Tensor_Scalar", "a power of complex numbers; take a whole one up to 1024")
    base = _parts(x)
    found = base if exponent else _parts(torch.ones_like(x))
    for digit in bin(abs(int(exponent)))[3:]:
        found = _product(found, found)
        found = _product(found, base) if digit == "1" else found
    return _rounded(_quotient(_parts(1), found) if exponent < 0 else found)


def exponential(backend: Backend, x: Tensor) -> Tensor:
    """Products of functions that are rounded to FP32; a power beyond FP32 is the square of one that is not."""
    _require_single("exp", x)
    real, imag = (part.contiguous() for part in torch.view_as_real(x).unbind(-1))
    halved = torch.where(real > 88, real * 0.5, real)
    size = backend.unary("exp", halved).to(torch.float64)
    size = torch.where(real > 88, size * size, size)
    cosine, sine = (backend.unary(name, imag).to(torch.float64) for name in ("cos", "sin"))
    return _rounded((size * cosine, torch.where(imag == 0, imag.to(torch.float64), size * sine)))


def polar(backend: Backend, size: Tensor, turn: Tensor) -> Tensor:
    """size·cos(turn) + size·sin(turn)i, of cosine and sine as they are rounded to FP32."""
    return torch.complex(size * backend.unary("cos", turn), size * backend.unary("sin", turn))


def zeros(_: Backend, size: Sequence[int], **options: Any) -> Tensor:
    """What autograd takes for a derivative that vanishes, in new memory."""
    return torch.zeros(size, **options)


def cast(backend: Backend, x: Tensor, **kwargs: Any) -> Tensor:
    kind = kwargs.get("dtype") or x.dtype
    if kind.is_complex:
        if kind != torch.complex64 or x.dtype in (torch.complex128, torch.complex32):
            raise UnsupportedOperator("aten._to_copy", f"{x.dtype} to {kind}; use complex64")
        return torch.ops.aten._to_copy.default(x, **kwargs)  # type: ignore[no-any-return]
    return elementwise.cast(backend, torch.view_as_real(x).select(-1, 0), **kwargs)


def copy(backend: Backend, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    for each in (x, source):
        if each.is_complex():
            _require_single("copy", each)
    if x.is_complex():
        return torch.ops.aten.copy.default(x, source)  # type: ignore[no-any-return]
    return elementwise.copy(backend, x, torch.view_as_real(source).select(-1, 0))


def _real_form(name: str, code: Code, form: Callable[..., tuple[Any, ...]]) -> Code:
    """A real operator that treats each part by itself; ``form`` gives its arguments for the parts."""

    def apply(backend: Backend, *args: Any, **kwargs: Any) -> Tensor:
        kind = kwargs.pop("dtype", None)
        if kind is not None:
            args = (args[0].to(kind), *args[1:])
        tensors = [
            each for each in args if isinstance(each, Tensor) and (each.is_complex() or each.is_floating_point())
        ]
        for each in tensors:
            _require_single(name, each, torch.zeros((), dtype=torch.complex64))
        pairs = [
            torch.view_as_real(each.to(torch.complex64)) if any(each is one for one in tensors) else each
            for each in args
        ]
        out: Tensor = code(backend, *form(args[0], *pairs), **kwargs)
        out = out if form is _reduced else out.reshape(*args[0].shape, 2)
        return torch.view_as_complex(out.contiguous())

    return apply


def _reduced(like: Tensor, x: Tensor, dims: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    return (x, reductions.all_dims(like, dims), keepdim) if like.dim() else (x[None], [0], False)


def _along(like: Tensor, x: Tensor, dim: int, *rest: Any) -> tuple[Any, ...]:
    return (x, dim % max(like.dim(), 1), *rest) if like.dim() else (x[None], 0, *rest)


def _added(like: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Any, ...]:
    return *_along(like, x, dim, index), source if source.dim() > 1 else source[None]


def _scattered(like: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Any, ...]:
    if not like.dim():
        return x[None], 0, index.reshape(-1, 1).expand(-1, 2), source[None]
    return x, dim % like.dim(), index.unsqueeze(-1).expand(*index.shape, 2), source


def _as_given(like: Tensor, *args: Any) -> tuple[Any, ...]:
    return args


def _norm(code: Code) -> Code:
    def apply(backend: Backend, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = kwargs.pop("dtype", None) or torch.complex64  # PyTorch asks for a complex type, and returns a real one
        out: Tensor = code(backend, absolute(backend, x.to(kind)), *args, **kwargs)
        return out

    return apply


def _matmul(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    """(…, m, k) × (…, k, n) as (m, 2k) × (2k, 2n): rows (a, b) of the left, blocks (c, d; −d, c) of the right."""
    _require_single("mm", a, b)
    left = torch.view_as_real(a).flatten(-2)
    real, imag = torch.view_as_real(b).unbind(-1)
    block = torch.stack([torch.stack([real, imag], -1), torch.stack([-imag, real], -1)], -3)  # (…, k, 2, n, 2)
    right = block.flatten(-4, -3).flatten(-2)
    out = (
        backend.matmul(left, right)
        if left.numel() and right.numel()
        else left.new_zeros((*left.shape[:-1], right.shape[-1]))
    )
    return torch.view_as_complex(out.reshape(*out.shape[:-1], b.shape[-1], 2))


def product(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return _matmul(backend, a, b)


def added_product(backend: Backend, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out: Tensor = _matmul(backend, a, b)
    if alpha != 1:
        out = _pair("addmm", _product)(backend, out, alpha)
    if beta == 0:
        return out
    out = _sum("addmm", 1.0)(backend, out, bias if beta == 1 else _pair("addmm", _product)(backend, bias, beta))
    return out


def mv(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return _matmul(backend, a, b[:, None])[:, 0]


def dot(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return _matmul(backend, a[None], b[:, None])[0, 0]


def conjugate_dot(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return dot(backend, conjugate(backend, a), b)


def _each(name: str, code: Code, real: Code) -> Code:
    """``_foreach_<name>``, whose list may hold real tensors too."""

    def single(backend: Backend, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = (code if takes_complex((*args, *kwargs.values())) else real)(backend, *args, **kwargs)
        return out

    return lists.each(name, single)


def _norms(backend: Backend, tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> Any:
    return lists.norms(backend, [absolute(backend, x) if x.is_complex() else x for x in tensors], order, dtype)


def _codes() -> Iterator[tuple[str, Code]]:
    r, i = reductions, indexing
    add, sub = _sum("add", 1.0), _sum("sub", -1.0)
    mul, div = _pair("mul", _product), _pair("div", _quotient)
    addcmul, addcdiv = _with_product("addcmul", _product), _with_product("addcdiv", _quotient)
    yield from (
        ("add.Tensor add.Scalar", add),
        ("sub.Tensor sub.Scalar", sub),
        ("rsub.Tensor rsub.Scalar", _sum("rsub", -1.0, swapped=True)),
        ("mul.Tensor mul.Scalar", mul),
        ("div.Tensor div.Scalar", div),
        ("addcmul", addcmul),
        ("addcdiv", addcdiv),
        ("neg", negative),
        ("abs", absolute),
        ("angle", angle),
        ("sgn", sign),
        ("reciprocal", reciprocal),
        ("pow.Tensor_Scalar", power),
        ("exp", exponential),
        ("_to_copy", cast),
        ("copy", copy),
        ("conj_physical _conj_physical", conjugate),
        ("sum sum.dim_IntList", _real_form("sum", r.sum_over, _reduced)),
        ("mean mean.dim", _real_form("mean", r.mean, _reduced)),
        ("cumsum", _real_form("cumsum", r.cumsum, _along)),
        ("linalg_vector_norm norm.Scalar", _norm(r.vector_norm)),
        ("norm.ScalarOpt_dim", _norm(r.norm_along)),
        ("mm bmm", product),
        ("addmm baddbmm", added_product),
        ("mv", mv),
        ("dot", dot),
        ("vdot", conjugate_dot),
        ("index.Tensor _unsafe_index.Tensor", i.index),
        ("index_put _unsafe_index_put", _real_form("index_put", i.index_put, _as_given)),
        ("index_add", _real_form("index_add", i.index_add, _added)),
        ("scatter_add", _real_form("scatter_add", i.scatter_add, _scattered)),
        ("_fft_c2c", fourier.complex_to_complex),
        ("_fft_c2r", fourier.complex_to_real),
        ("_foreach_add.List _foreach_add.Scalar _foreach_add.ScalarList", _each("add", add, elementwise.add)),
        ("_foreach_sub.List _foreach_sub.Scalar _foreach_sub.ScalarList", _each("sub", sub, elementwise.sub)),
        ("_foreach_mul.List _foreach_mul.Scalar _foreach_mul.ScalarList", _each("mul", mul, lists.native(torch.mul))),
        ("_foreach_mul.Tensor", _each("mul", mul, lists.native(torch.mul))),
        ("_foreach_div.List _foreach_div.Scalar _foreach_div.ScalarList", _each("div", div, elementwise.div)),
        ("_foreach_neg", _each("neg", negative, lists.native(torch.neg))),
        ("_foreach_abs", _each("abs", absolute, lists.native(torch.abs))),
        ("_foreach_addcmul.Scalar", _each("addcmul", addcmul, elementwise.addcmul)),
        ("_foreach_addcdiv.Scalar", _each("addcdiv", addcdiv, elementwise.addcdiv)),
        ("_foreach_copy", _each("copy", copy, elementwise.copy)),
        ("_foreach_zero", _each("zero", lists.native(torch.zeros_like), lists.native(torch.zeros_like))),
        ("_foreach_norm.Scalar", _norms),
    )


COMPLEX: Mapping[str, Code] = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": code
    for names, code in _codes()
    for name in names.split()
}
"""By the row of the table, the code for complex64 operands."""
