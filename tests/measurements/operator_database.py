"""``operator-database``: PyTorch's own operator database (``op_db``) under controlled numerics, forward and backward.

Each sample's results and gradients are compared with native ones, and where those differ with native FP64's. Random
operators must give the same bits for the same keys, in the shapes and types of native ones. Of a factorisation that is
not unique what it multiplies to is compared.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.bench.origin import write as write_rows
from firmware_sim.errors import CallerError
from monitor.numerics import recording
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["entries", "judged", "run", "table", "verdict", "write"]

Row = dict[str, Any]

_RANDOM = """
normal normal.in_place normal.number_mean uniform randn randn_like rand_like randint randint_like bernoulli multinomial
cauchy exponential geometric log_normal svd_lowrank pca_lowrank nn.functional.dropout nn.functional.dropout2d
nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout.with_train
nn.functional.feature_alpha_dropout.without_train nn.functional.scaled_dot_product_attention
nn.functional.multi_head_attention_forward nn.functional.rrelu nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d native_dropout_backward
"""
RANDOM = frozenset(_RANDOM.split())
UNSET = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
PRODUCTS: Mapping[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "svd": lambda out: [out[1], _scaled(out[0], out[1]) @ out[2][..., : out[1].shape[-1]].mH],
    "linalg.svd": lambda out: [out[1], _scaled(out[0], out[1]) @ out[2][..., : out[1].shape[-1], :]],
    "linalg.eigh": lambda out: [out[0], _scaled(out[1], out[0]) @ out[1].mH],
}
"""What results that are not unique are compared by; their gradients, which depend on signs, are not."""


_OUTCOMES = ("error", "differs", "refused", "passes")
"""Of an entry whose samples end differently the first of these is said."""


def _scaled(vectors: Tensor, values: Tensor) -> Tensor:
    return vectors[..., : values.shape[-1]] * values.unsqueeze(-2)


def entries() -> Iterator[Any]:
    """All of the database; CallerError where the package ``expecttest`` is not installed."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError:
        raise CallerError("PyTorch's operator database needs the package expecttest") from None
    yield from op_db


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for part in parts for leaf in _leaves(part)]


def _results(call: Callable[[], Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    for each in inputs:
        each.grad = None
    outputs = _leaves(call())
    roots = [out for out in outputs if out.requires_grad and out.dtype.is_floating_point and out.numel()]
    if roots:
        torch.autograd.backward([root.sum() for root in roots])
    grads = [each.grad.detach().clone() for each in inputs if each.grad is not None]
    return [out.detach().clone() for out in outputs], grads


def _close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
        if not (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2e-3, atol=1e-4, equal_nan=True)):
            return False
    return True


def _shapes(found: Sequence[Tensor]) -> list[Any]:
    return [(tuple(each.shape), each.dtype) for each in found]


def _in_fp64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
    return value


def _in_fp32(found: Sequence[Tensor]) -> list[Tensor]:
    return [each.to(torch.float32) if each.dtype == torch.float64 else each for each in found]


def _calls(entry: Any, sample: Any) -> tuple[Callable[[], Any], list[Tensor]]:
    """What calls the operator on a sample, and the sample's leaves."""
    leaves = [leaf for leaf in _leaves([sample.input, sample.args, sample.kwargs]) if leaf.is_leaf]
    return lambda: entry(sample.input, *sample.args, **sample.kwargs), leaves


def _judge(name: str, entry: Any, sample: Any, numerics: str) -> str:
    """``passes``, ``refused``, ``differs``, ``error`` or, where native PyTorch fails, ``untried``, and why."""
    call, inputs = _calls(entry, sample)
    try:
        native, native_grads = _results(call, inputs)
    except Exception as error:
        return f"untried: {type(error).__name__}: {str(error).splitlines()[0]:.200}"
    try:
        runs = []
        for _ in range(2 if name in RANDOM else 1):
            counter = itertools.count()
            with recording(numerics, keys=lambda counter=counter: next(counter)):  # type: ignore[misc]
                runs.append(_results(call, inputs))
    except UnsupportedOperator as error:
        return f"refused: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error!s:.200}"
    ours, grads = runs[0]
    if name in RANDOM or name in UNSET:
        same = all(torch.equal(a, b) for a, b in zip(_leaves(runs[0]), _leaves(runs[-1]), strict=True) if a.numel())
        return "passes" if _shapes(ours) == _shapes(native) and (same or name in UNSET) else "differs"
    if name in PRODUCTS and len(ours) > 1:
        with suppress(RuntimeError):
            return "passes" if _close(PRODUCTS[name](ours), PRODUCTS[name](native)) else "differs"
    if _close(ours, native) and _close(grads, native_grads):
        return "passes"
    with suppress(Exception):
        wide, wide_grads = _results(*_calls(entry, sample.transform(_in_fp64)))
        return "passes" if _close(ours, _in_fp32(wide)) and _close(grads, _in_fp32(wide_grads)) else "differs"
    return "differs"


def judged(entry: Any, numerics: str, samples: int | None) -> Row:
    """An entry's row: how many of its samples pass, are refused, differ or end in an error, and the first that does.

    An entry of which no sample could be tried is ``untried``.

    Args:
        samples: only so many; None for all.
    """
    name = entry.full_name
    needs = entry.supports_autograd and torch.float32 in entry.backward_dtypes
    counts: Counter[str] = Counter()
    first = ""
    for sample in itertools.islice(entry.sample_inputs("cpu", torch.float32, requires_grad=needs), samples):
        said = _judge(name, entry, sample, numerics)
        counts[said.split(":")[0]] += 1
        first = said if said != "passes" and (not first or first.startswith("untried")) else first
    total = {key: counts[key] for key in _OUTCOMES if counts[key]}
    outcome = next((key for key in _OUTCOMES if counts[key]), "untried")
    first = first if outcome != "passes" else ""
    return {"work": name, "mode": numerics, "outcome": outcome, "samples": total, "first": first}


def run(
    *, samples: int | None = None, numerics: Sequence[str] = ("exact",), progress: Callable[[int], object] = print
) -> list[Row]:
    """Judge every entry that takes FP32.

    Args:
        samples: of each entry; all by default.
        progress: called with 1 after each entry.

    Raises:
        CallerError: no sample, or the database's package is missing.
    """
    if samples is not None and samples < 1:
        raise CallerError("take at least one sample of each entry")
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in numerics:
            for entry in entries():
                if torch.float32 in entry.dtypes:
                    rows.append(judged(entry, mode, samples))
                    progress(1)
    return rows


def write(rows: Sequence[Row], path: Path) -> None:
    """Put names by outcome in a file, of refused ones with the operator that is refused."""
    document = []
    for mode in sorted({row["mode"] for row in rows}):
        mine = [row for row in rows if row["mode"] == mode]
        names = {key: sorted(row["work"] for row in mine if row["outcome"] == key) for key in ("passes", "differs")}
        told = {
            key: {row["work"]: row["first"] for row in mine if row["outcome"] == key}
            for key in ("refused", "untried", "error")
        }
        counts = Counter(row["outcome"] for row in mine)
        tried = sum(sum(row["samples"].values()) for row in mine)
        document.append({"work": "op_db", "mode": mode, "samples": tried, "counts": dict(counts), **names, **told})
    write_rows(document, path)


def verdict(rows: Sequence[Row]) -> str | None:
    """An entry that ends in an error, or None."""
    bad = [row["work"] for row in rows if row["outcome"] == "error"]
    return f"these end in an error: {', '.join(bad)}" if bad else None


def table(rows: Sequence[Row]) -> list[str]:
    """Counts by mode, and what does not pass."""
    lines = []
    for mode in sorted({row["mode"] for row in rows}):
        counts = Counter(row["outcome"] for row in rows if row["mode"] == mode)
        lines.append(f"{mode}: " + ", ".join(f"{count} {key}" for key, count in sorted(counts.items())))
    return lines + [f"{row['work']}: {row['first']}" for row in rows if row["outcome"] in ("error", "differs")]
