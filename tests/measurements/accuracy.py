"""``accuracy``: errors of ``exact``, ``rounded`` and native FP32 operators against the same operators in FP64.

Every call of the battery's programs, whose operator is implemented or decomposed, is repeated on the same operands: in
FP64 for the truth, and in FP32 by each numerics. An error is |computed − truth|, in units of the FP32 spacing at the
truth (ulp; a correctly rounded result is off by at most ½) and relative to the largest |truth| of the tensor. The
battery's special operands (infinite, NaN, huge, tiny) are measured apart from ordinary ones, which are the same calls
with those elements replaced. Elements whose truth is not finite in FP32 do not count, the battery compares those bit by
bit; ``overflowed`` elements have a finite truth, but an intermediate result beyond FP32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from analysis.bench.battery import row_of
from analysis.bench.battery_cases import _edges as odd_shapes
from analysis.bench.battery_cases import cases
from analysis.bench.origin import hardware
from monitor.numerics import execute, recording
from monitor.numerics.operators import operator_table
from monitor.numerics.operators.complex_numbers import takes_complex
from tests.measurements import _products

__all__ = ["MODES", "measured_rows", "operator_rows", "run", "table", "unmeasured", "write"]

Row = dict[str, Any]
Program = Callable[[], None]
Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

MODES = ("exact", "rounded", "native")

CALLS = 12
"""Calls of one operator that are repeated: the first ones of the battery."""

_RANDOM = """
uniform normal normal_functional bernoulli native_dropout native_dropout_backward randint random rand randn rand_like
randn_like randperm exponential geometric cauchy log_normal multinomial
randint_like _standard_gamma _sample_dirichlet
"""
_INTEGERS = """
arange argmax argmin remainder fmod floor_divide __rshift__ div.Scalar_mode div.Tensor_mode pow.Tensor_Tensor
"""
_NUMBERS = """
linspace logspace _efficientzerotensor bartlett_window blackman_window hamming_window hann_window kaiser_window
"""
_WITHOUT_TRUTH = {
    "random": frozenset(_RANDOM.split()),
    "integers, or rounded to one": frozenset(_INTEGERS.split()),
    "not unique": frozenset(("_linalg_eigh", "_linalg_svd")),
    "made of numbers alone": frozenset(_NUMBERS.split()),
    "takes FP32 alone": frozenset(("_amp_update_scale",)),
    "reads a value": frozenset(("_local_scalar_dense",)),
    "returns one of its operands": frozenset(("clamp", "clamp_min", "clamp_max", "hardtanh", "relu")),
    "leaves elements unset": frozenset(("_grouped_mm", "_ctc_loss")),
    "reads what every forward notes in its own way": frozenset(("_embedding_bag_backward", "batch_norm_backward")),
    "only graphics cards have it": frozenset(("_fused_rms_norm", "_fused_rms_norm_backward")),
}
"""Operators, or single overloads, that have no error or whose results are no function of real numbers."""


_COMPLEX = " on complex numbers"
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def unmeasured(operator: str) -> str | None:
    """Why an operator has no error against FP64, or None where it has one."""
    _, name, overload = operator.split(".")
    names = {name, f"{name}.{overload}"}
    return next((reason for reason, listed in _WITHOUT_TRUTH.items() if names & listed), None)


def measured_rows() -> dict[str, str]:
    """Operators of the table that are implemented or decomposed and have a truth: name → kind.

    Those that take complex numbers by other code have a row of their own for them.
    """
    kinds = {name: rule.kind for name, rule in operator_table().items()}
    found = {
        name: kind
        for name, kind in sorted(kinds.items())
        if kind in ("implemented", "decomposed") and unmeasured(name) is None
    }
    complex_ones = (name for name, rule in operator_table().items() if rule.complex not in (None, rule.code))
    return found | {name + _COMPLEX: "complex" for name in sorted(complex_ones) if unmeasured(name) is None}


def _row_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = row_of(str(func))
    is_own = (
        takes_complex((*args, *kwargs.values())) and operator_table()[name].complex is not operator_table()[name].code
    )
    return name + _COMPLEX if is_own else name


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(one, change) for one in value)
    return change(value)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _in_fp64(value: Any) -> Any:
    """The same value in FP64; Python numbers first become the FP32 numbers that operators see."""
    if isinstance(value, Tensor):
        return value.detach().to(_WIDE[value.dtype]) if value.dtype in _WIDE else value.detach().clone()
    if isinstance(value, float) and math.isfinite(value):
        return float(np.float32(value))
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_ordinary(x: Tensor) -> Tensor:
    return (x == 0) | ((x.abs() >= 2.0**-40) & (x.abs() <= 2.0**40))


def _ordinary(value: Any) -> Any:
    """The same tensor with ordinary numbers in place of its special elements."""
    if isinstance(value, Tensor) and value.is_complex():
        return torch.view_as_complex(_ordinary(torch.view_as_real(value)))
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    places = torch.arange(value.numel(), dtype=torch.int64).reshape(value.shape)
    other = (places * 2654435761 % 65537).to(torch.float32) * 2.0**-15 - 1.0
    return torch.where(_is_ordinary(value), value, other)


def _is_single(value: Any) -> bool:
    """Whether a nested value holds FP32 numbers, no other floating-point ones and no tensor without elements."""
    if not all(one.numel() for one in _tensors(value)):
        return False
    types = {one.dtype for one in _tensors(value) if one.dtype.is_floating_point or one.is_complex()}
    return bool(types) and types <= _WIDE.keys()


def _singles(value: Any) -> Iterator[Tensor]:
    return (_parts(x) for x in _tensors(value) if x.dtype in _WIDE)


def _asks_fp32(kwargs: dict[str, Any]) -> bool:
    return "out" not in kwargs and kwargs.get("dtype") in (None, *_WIDE)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class _Calls:
    """Observer that keeps the operands of the first calls of each measured operator."""

    def __init__(self) -> None:
        self.of: dict[str, list[Call]] = {name: [] for name in measured_rows()}

    def before(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep copies: in-place operators have not written yet."""
        kept = self.of.get(_row_of(func, args, kwargs))
        if kept is not None and len(kept) < CALLS and _is_single(args) and _asks_fp32(kwargs):
            kept.append((func, _map(args, _copy), dict(kwargs)))

    def after(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Nothing more to see."""


def spacing(truth: Tensor) -> Tensor:
    """Distance of neighbouring FP32 numbers around FP64 values; that of subnormal numbers around smaller ones."""
    _, exponent = torch.frexp(truth.abs().clamp(min=2.0**-126))
    scale = torch.ones_like(truth)
    return torch.ldexp(scale, exponent - 24)


def _more() -> None:
    """Calls that the battery leaves to another overload."""
    torch.ops.aten.unfold_backward.default(torch.arange(60.0).reshape(4, 3, 5) * 0.37, [4, 7], 1, 5, 1)
    torch.ops.aten._to_copy.default(torch.arange(60.0) * 0.37, dtype=torch.float32)


def programs() -> Iterator[Program]:
    """What the battery runs but for its odd shapes, and the rest."""
    yield from (program for program in cases() if program is not odd_shapes)
    yield _more


@dataclass(slots=True, kw_only=True)
class Worst:
    """Largest errors so far.

    Attributes:
        max_ulp: in spacings of FP32 numbers at the truth.
        max_relative: relative to the largest |truth| of the tensor.
        overflowed: elements that are not finite although their truth is.
    """

    max_ulp: float = 0.0
    max_relative: float = 0.0
    overflowed: int = 0

    def add(self, value: Tensor, truth: Tensor) -> int:
        """Take the errors of one tensor into account; returns how many elements count."""
        counted = truth.isfinite() & (truth.abs() <= torch.finfo(torch.float32).max)
        got = value.detach().to(torch.float64)
        self.overflowed += int((counted & ~got.isfinite()).sum())
        counted &= got.isfinite()
        got, wanted = got[counted], truth[counted]
        if wanted.numel() == 0:
            return 0
        off = (got - wanted).abs()
        self.max_ulp = max(self.max_ulp, float((off / spacing(wanted)).max()))
        self.max_relative = max(self.max_relative, float(off.max() / wanted.abs().max().clamp(min=2.0**-149)))
        return wanted.numel()


_ROOT_HALF = math.sqrt(0.5)


def _gelu_truth(x: Tensor, *, approximate: str = "none") -> Tensor:
    """By erfc and sigmoid: 1 + erf and 1 + tanh cancel for negative x."""
    if approximate == "none":
        return x * 0.5 * torch.erfc(-x * _ROOT_HALF)
    return x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def _gelu_backward_truth(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return grad * (0.5 * torch.erfc(-x * _ROOT_HALF) + x * density)
    root = 2.0 * math.sqrt(2.0 / math.pi)
    s = torch.sigmoid(root * (x + 0.044715 * x**3))
    return grad * (s + x * s * (1.0 - s) * root * (1.0 + 3.0 * 0.044715 * x * x))


def _var_mean_truth(x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """In two passes: a running update leaves a remainder where the mean is zero."""
    mean = x.mean(dims, keepdim=True)
    squares = ((x - mean) ** 2).mean(dims, keepdim=keepdim)
    count = x.numel() / max(mean.numel(), 1)
    freedom = max(count - (1.0 if correction is None else correction), 0.0)
    return squares * (count / freedom if freedom else math.inf), mean.reshape(squares.shape)


def _sum_truth(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Exact, then rounded to FP64: the battery's largest numbers cancel."""
    if x.is_complex():
        return torch.complex(*(_sum_truth(part, dims, keepdim) for part in (x.real, x.imag)))
    listed = sorted(dim % x.dim() for dim in dims) if dims and x.dim() else list(range(x.dim()))
    kept = [dim for dim in range(x.dim()) if dim not in listed]
    rough = x.sum(listed, keepdim=keepdim) if listed else x.clone()
    rows = x.permute(kept + listed).reshape(rough.numel(), -1).tolist()
    for place, row in enumerate(rows):
        if all(map(math.isfinite, row)):
            rough.view(-1)[place] = math.fsum(row)
    return rough


def _mean_truth(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    total = _sum_truth(x, dims, keepdim)
    return total / (x.numel() / total.numel())


_TRUTHS: dict[str, Callable[..., Any]] = {
    "aten.sum.default": _sum_truth,
    "aten.sum.dim_IntList": _sum_truth,
    "aten.mean.default": _mean_truth,
    "aten.mean.dim": _mean_truth,
    "aten.var_mean.correction": _var_mean_truth,
    "aten.gelu.default": _gelu_truth,
    "aten.gelu_backward.default": _gelu_backward_truth,
}
"""Where PyTorch's own FP64 kernel is not accurate enough to be the truth."""


def _result(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], numerics: str) -> list[Tensor]:
    """Tensors that a call returns; operators over lists that write in place return their first argument's."""
    out = func(*args, **kwargs) if numerics == "native" else execute(numerics, str(func), args, kwargs, entries=None)
    return list(_tensors(args[0] if out is None else out))


def _truth(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    wide, options = _map(args, _in_fp64), {name: _map(value, _in_fp64) for name, value in kwargs.items()}
    if str(func) in _TRUTHS:
        return list(_tensors(_TRUTHS[str(func)](*wide, **options)))
    return _result(func, wide, options, "native")


def _compare(calls: list[Call]) -> tuple[dict[str, Any], int]:
    """Largest errors of each numerics over these calls, and how many elements were compared."""
    worst = {mode: Worst() for mode in MODES}
    elements = 0
    for func, args, kwargs in calls:
        truth = _truth(func, args, kwargs)
        for mode in MODES:
            out = _result(func, _map(args, _copy), kwargs, mode)
            for value, wanted in zip(out, truth, strict=True):
                if value.dtype in _WIDE and wanted.dtype == _WIDE[value.dtype]:
                    count = worst[mode].add(_parts(value), _parts(wanted))
                    elements += count if mode == "native" else 0
    return {mode: asdict(found) for mode, found in worst.items()}, elements


def operator_rows(only: Callable[[str], bool] = lambda name: True, work: Iterable[Program] | None = None) -> list[Row]:
    """One row for each measured operator; 0 calls where no program has FP32 operands for it.

    Args:
        only: which operators.
        work: programs to take calls from; all unless given.
    """
    observer = _Calls()
    torch.manual_seed(1)
    for program in programs() if work is None else work:
        with recording("native", observer=observer):
            program()
    rows = []
    for name, kind in measured_rows().items():
        calls = observer.of[name]
        if not only(name):
            continue
        special = [call for call in calls if not all(bool(_is_ordinary(x).all()) for x in _singles(call[1]))]
        ordinary = [(func, _map(args, _ordinary), kwargs) for func, args, kwargs in calls]
        found, elements = _compare(ordinary)
        row = {"operator": name, "kind": kind, "calls": len(calls), "elements": elements, "ordinary": found}
        rows.append({**row, "special": _compare(special)[0] if special else None})
    return rows


def run(*, convolutions: bool = True) -> dict[str, Any]:
    """The whole report.

    Returns:
        ``hardware``; ``operators``: rows with operator, kind, calls, elements, ordinary and special (max_ulp,
        max_relative and overflowed of each numerics); ``unmeasured``: operators without a truth and why;
        ``products``: rows with operands, k, max|ΔC|/max|C| of each numerics and its ratio to native;
        ``convolutions``: of one resnet50-cifar step.
    """
    excused = {name: unmeasured(name) for name, rule in sorted(operator_table().items())}
    return {
        "hardware": {**hardware(), "capability": torch.backends.cpu.get_cpu_capability()},
        "operators": operator_rows(),
        "unmeasured": {name: reason for name, reason in excused.items() if reason is not None},
        "products": _products.product_rows(),
        "convolutions": _products.convolution_rows() if convolutions else [],
    }


def _short(value: Any) -> Any:
    """Floats with four significant digits."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(report: dict[str, Any], path: Path) -> None:
    """Keep a report as JSON, one row a line."""
    parts = []
    for key, value in report.items():
        rows = [json.dumps(_short(row), ensure_ascii=False) for row in value] if isinstance(value, list) else []
        body = "[\n" + ",\n".join(rows) + "\n]" if rows else json.dumps(value, ensure_ascii=False)
        parts.append(f"{json.dumps(key)}: {body}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _figures(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    worst = [found[mode] for mode in MODES]
    return "  ".join(f"{one['max_ulp']:8.3g} {one['max_relative']:8.2g}" for one in worst)


def table(report: dict[str, Any]) -> list[str]:
    """The report as lines of text."""
    heads = "  ".join(f"{mode + ': ulp':>13} {'max':>3}" for mode in MODES)
    lines = [f"{'operator, ordinary operands':56}  {heads}   special operands"]
    for row in report["operators"]:
        lines.append(f"{row['operator']:56}  {_figures(row['ordinary'])}   {_figures(row['special'])}".rstrip())
    lines += ["", f"{'matrix product':28} {'K':>6}  " + "  ".join(f"{name:>20}" for name in _products.ENGINES)]
    for row in report["products"]:
        figures = (f"{row[name]:9.2g} {row['ratio'][name]:9.2f}×" for name in _products.ENGINES)
        lines.append(f"{row['operands']:28} {row['k']:6}  " + "  ".join(figures))
    if report["convolutions"]:
        lines += ["", f"{'convolution of resnet50-cifar':60} {'exact':>10} {'native':>10}"]
    for row in report["convolutions"]:
        lines.append(f"{row['convolution']:60} {row['exact']:10.2g} {row['native']:10.2g}")
    return lines
