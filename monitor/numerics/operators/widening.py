"""BF16 and FP16 operands: widened to FP32, which is exact, and each result rounded once to the type that ATen returns.

An operator over half-precision operands is thus specified by its FP32 row alone: out = RNE(f(widen(x), …)). Ties go to
even, results above the largest number become infinite, subnormal numbers stay, NaN is 0x7FC0 (BF16) or 0x7E00 (FP16).
Under ``exact``, f of a large BF16 product has a specification of BF16's own (``exact.bf16``).
The type of a result depends on no device: it is what PyTorch's own shape and type functions give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics import exact
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.kernels.bits import HALF, canonical_nan
from monitor.numerics.operators.row import Row

__all__ = ["apply_widened", "takes_half", "types_of"]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _like(value: Any, parts: list[Any]) -> Any:
    """A list for a list, a plain tuple for any kind of tuple."""
    return parts if isinstance(value, list) else tuple(parts)


def takes_half(row: Row, args: Arguments, kwargs: Keywords) -> bool:
    """Whether a call of this row computes with half-precision operands, or into such a type, that are to be widened."""
    if row.formats == "own":
        return False
    return any(
        value in HALF if isinstance(value, torch.dtype) else isinstance(value, Tensor) and value.dtype in HALF
        for value in (*_leaves(args), *_leaves(list(kwargs.values())))
    )


def types_of(value: Any) -> Any:
    """The dtypes of the tensors of a nested value; None for what is no tensor."""
    if isinstance(value, list | tuple):
        return [types_of(one) for one in value]
    return value.dtype if isinstance(value, Tensor) else None


def _key(value: Any) -> Any:
    """What the types of results can depend on."""
    if isinstance(value, Tensor):
        return (value.dtype, value.dim() == 0)
    if isinstance(value, list | tuple):
        return tuple(_key(one) for one in value)
    if value is None or isinstance(value, bool | torch.dtype):
        return value
    return type(value)


def _imitation(value: Any) -> Any:
    """The same argument without data: no kernel of any processor sees it."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, list | tuple):
        return _like(value, [_imitation(one) for one in value])
    return None if isinstance(value, torch.Generator) else value


_types: dict[Any, Any] = {}


def _result_types(row: Row, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Types that ATen's operator returns for these operands."""
    if len(row.typed_by) == 1:
        return args[row.typed_by[0]].dtype
    if row.typed_by:
        first, weight = (args[place] for place in row.typed_by)
        rest = first.dtype if weight is None else weight.dtype
        return [first.dtype, rest, rest]
    if not any(isinstance(value, Tensor) for value in _leaves(args)):
        return kwargs["dtype"]
    key = (str(func), _key(args), tuple((name, _key(value)) for name, value in sorted(kwargs.items())))
    if key not in _types:
        try:
            found = func(*_imitation(args), **{name: _imitation(value) for name, value in kwargs.items()})
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            raise UnsupportedOperator(
                str(func), f"the type of its result for half-precision operands is not known ({error})"
            ) from error
        _types[key] = types_of(found)
    return _types[key]


def _widen(value: Any, requested: torch.dtype | None) -> Any:
    """FP32 in place of half-precision tensors and types; operands are converted to a requested type first."""
    if isinstance(value, Tensor):
        if requested is not None and value.dtype.is_floating_point:
            value = value.to(requested)
        return value.to(torch.float32) if value.dtype in HALF else value
    if isinstance(value, list | tuple):
        return _like(value, [_widen(one, requested) for one in value])
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


def _narrow(value: Any, wanted: Any) -> Any:
    if isinstance(value, Tensor):
        if wanted not in HALF or not value.dtype.is_floating_point:
            return value
        out = value.to(wanted)
        canonical_nan(out)
        return out
    if isinstance(value, list | tuple):
        return _like(value, [_narrow(one, other) for one, other in zip(value, wanted, strict=True)])
    return value


def apply_widened(
    row: Row,
    func: OpOverload,
    run: Callable[..., Any],
    args: Arguments,
    kwargs: Keywords,
    types: Any = None,
    two_digits: bool = False,
) -> Any:
    """Run the FP32 form of an operator over half-precision operands.

    Args:
        row: of the operator table.
        func: the overload, for the types of its results.
        run: the FP32 form.
        args: positional arguments.
        kwargs: keyword arguments; a half-precision ``dtype`` converts the operands first, as ATen does.
        types: of the results, where an in-place operator fixes them.
        two_digits: BF16 factors stay what they are where the operator's row and ``exact.has_two_digits`` have it so.

    Raises:
        UnsupportedOperator: PyTorch does not know the type of the result.
    """
    if types is None:
        types = _result_types(row, func, args, kwargs)
    requested = kwargs.get("dtype")
    requested = requested if requested in HALF else None
    kept: tuple[int, ...] = ()
    if two_digits and row.has_two_digits and exact.has_two_digits(*(args[place] for place in row.factors)):
        kept = row.factors
    wide = tuple(value if place in kept else _widen(value, requested) for place, value in enumerate(args))
    out = run(*wide, **{name: _widen(value, requested) for name, value in kwargs.items()})
    for place in row.writes:
        if args[place] is not None and args[place].dtype in HALF:
            args[place].copy_(_narrow(wide[place], args[place].dtype))
    return _narrow(out, types)
