"""``operator-database``: PyTorch's own databases of operators and modules under controlled numerics.

Each sample's results and gradients are compared with native ones, and where those differ with native FP64's; their bits
with those of another device, where one is named. Random operators must give the same bits for the same keys, in the
shapes and types of native ones. Of results that are not unique what they stand for is compared: what factors multiply
to, and the values that sorted places hold.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from inspector.devices import device
from monitor import processes
from monitor.numerics import recording
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["FORMS", "TYPES", "entries", "judged", "run", "table", "verdict", "write"]

Row = dict[str, Any]
Call = tuple[Callable[[], Any], list[Tensor]]
"""What calls an operator or module on a sample, and the leaves that have gradients."""
Sample = Callable[[torch.dtype | None], Call]
"""Makes the call, with its floating-point numbers in another type if one is named."""

FORMS = ("op_db", "out", "in_place", "module_db")
"""Operators as functions, with ``out=`` and in place, and modules."""
TYPES = ("float32", "bfloat16", "complex64")
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
_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}


_TIES: Mapping[str, Callable[..., Any]] = {
    "sort": lambda x, dim=-1, descending=False, stable=True: torch.sort(x, dim=dim, descending=descending, stable=True),
    "argsort": lambda x, dim=-1, descending=False, stable=True: torch.argsort(
        x, dim=dim, descending=descending, stable=True
    ),
    "topk": lambda x, k, dim=-1, largest=True, sorted=True: [
        each.narrow(dim, 0, k) if x.dim() else each for each in torch.sort(x, dim=dim, descending=largest, stable=True)
    ],
}
"""What FP64 is asked in place of operators that leave open which of equal values comes first: the lower place does."""
_NEAR = 3
"""How many times as far as native results may others lie from FP64's."""
_DRAWS = 4
"""Native runs that show whether a module draws random numbers."""


def _scaled(vectors: Tensor, values: Tensor) -> Tensor:
    return vectors[..., : values.shape[-1]] * values.unsqueeze(-2)


def entries(form: str = "op_db") -> list[Any]:
    """All of a database that have the form; CallerError where the package ``expecttest`` is not installed."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    except ImportError:
        raise CallerError("PyTorch's operator database needs the package expecttest") from None
    if form == "module_db":
        return list(module_db)
    return [each for each in op_db if form == "op_db" or (each.supports_out if form == "out" else each.inplace_variant)]


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for part in parts for leaf in _leaves(part)]


def _results(call: Callable[[], Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    for each in inputs:
        each.grad = None
    outputs = _leaves(call())
    parts = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs]
    roots = [part for part in parts if part.requires_grad and part.dtype.is_floating_point and part.numel()]
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
        rtol, atol = (2**-7, 2e-3) if a.dtype == torch.bfloat16 else (2e-3, 1e-4)
        exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
        if not (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)):
            return False
    return True


def _near(ours: Sequence[Tensor], native: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """Whether each of our results is FP64's, but for a rounding, or about as far from it as the native one."""
    for a, b, exact in zip(ours, native, wide, strict=True):
        rounded = exact.to(a.dtype) if exact.dtype in _WIDE.values() else exact
        if not _close([a], [rounded]):
            if a.shape != b.shape or a.dtype != b.dtype or not (a.dtype.is_floating_point or a.dtype.is_complex):
                return False
            far, usual = ((each.to(exact.dtype) - exact).abs().max() for each in (a, b))
            if not far <= _NEAR * usual:
                return False
    return True


def _shapes(found: Sequence[Tensor]) -> list[Any]:
    return [(tuple(each.shape), each.dtype) for each in found]


def _digest(found: Sequence[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for each in found:
        plain = each.detach().resolve_conj().resolve_neg()
        plain = plain.to_dense() if plain.layout != torch.strided else plain
        digest.update(repr((plain.dtype, plain.shape)).encode())
        digest.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _cast(value: Any, kind: torch.dtype | None) -> Any:
    """A leaf, of the type if one is named, or that type in place of another."""
    if kind is not None and isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if not isinstance(value, Tensor) or not (value.is_complex() or value.dtype.is_floating_point):
        return value
    if kind is not None:
        cast = value.detach().to(kind if value.is_complex() == kind.is_complex else _WIDE.get(value.dtype, value.dtype))
    elif value.is_leaf:
        return value
    else:
        cast = value.detach()
    return cast.requires_grad_(value.requires_grad)


def _operator(entry: Any, form: str, sample: Any, kind: torch.dtype | None) -> Call:
    mine = sample.transform(partial(_cast, kind=kind))
    if form == "out":
        mine = mine.transform(lambda value: value.detach() if isinstance(value, Tensor) else value)
    leaves = [leaf for leaf in _leaves([mine.input, mine.args, mine.kwargs]) if leaf.is_leaf]
    like = entry(mine.input, *mine.args, **mine.kwargs) if form == "out" else None
    asked = entry if kind is None else _TIES.get(entry.name, entry)

    def call() -> Any:
        if form == "op_db":
            return asked(mine.input, *mine.args, **mine.kwargs)
        if form == "out" and kind is not None:
            return [asked(mine.input, *mine.args, **mine.kwargs)] * 2
        if form == "out":
            places = tree_map(lambda value: torch.empty_like(value) if isinstance(value, Tensor) else value, like)
            return entry(mine.input, *mine.args, **mine.kwargs, out=places), places
        changed = mine.input.clone()
        return entry.inplace_variant(changed, *mine.args, **mine.kwargs), changed

    return call, leaves


def _module(entry: Any, training: bool, sample: Any, kind: torch.dtype | None) -> Call:
    torch.manual_seed(0)
    module: nn.Module = entry.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    module.train(training)
    given = sample.forward_input
    args, kwargs = (tree_map(partial(_cast, kind=kind), each) for each in (given.args, given.kwargs))
    if entry.is_lazy:
        module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    used = next((leaf.dtype for leaf in _leaves([args, kwargs]) if leaf.dtype.is_floating_point), kind)
    module.to(kind or used)
    state = {name: value.clone() for name, value in module.named_buffers()}

    def call() -> Any:
        buffers = {name: value.clone() for name, value in state.items()}
        return torch.func.functional_call(module, buffers, args, kwargs), buffers

    return call, [*module.parameters(), *(leaf for leaf in _leaves([args, kwargs]) if leaf.is_leaf)]


def _samples(entry: Any, form: str, kind: torch.dtype) -> Iterator[Sample]:
    torch.manual_seed(0)
    if form == "module_db":
        for training in (True, False) if entry.train_and_eval_differ else (True,):
            for sample in entry.module_inputs_func(entry, "cpu", kind, True, training):
                if sample.forward_input is not None:
                    yield partial(_module, entry, training, sample)
        return
    differentiable = {"op_db": entry.supports_autograd, "in_place": entry.supports_inplace_autograd}
    needs = differentiable.get(form, False) and kind in entry.backward_dtypes
    for sample in entry.sample_inputs("cpu", kind, requires_grad=needs):
        if form == "in_place" and sample.broadcasts_input:
            continue  # PyTorch refuses it, or lets the operand grow
        yield partial(_operator, entry, form, sample)


def _draws(call: Callable[[], Any], inputs: Sequence[Tensor], first: Sequence[Tensor]) -> bool:
    """Whether native runs of a module with other seeds differ."""
    for seed in range(1, _DRAWS):
        torch.manual_seed(seed)
        if _digest(_results(call, inputs)[0]) != _digest(first):
            return True
    return False


def _judge(name: str, form: str, sample: Sample, numerics: str, bits: list[tuple[str, str]]) -> str:
    """``passes``, ``refused``, ``differs``, ``error`` or, where native PyTorch fails, ``untried``, and why.

    Digests of a sample and of its results are added to ``bits``.
    """
    try:
        call, inputs = sample(None)
        native, native_grads = _results(call, inputs)
        random = _draws(call, inputs, native) if form == "module_db" else name in RANDOM
    except Exception as error:
        return f"untried: {type(error).__name__}: {str(error).splitlines()[0]:.200}"
    try:
        runs = []
        for _ in range(2 if random else 1):
            counter = itertools.count()
            with recording(numerics, keys=lambda counter=counter: next(counter)):  # type: ignore[misc]
                runs.append(_results(call, inputs))
    except UnsupportedOperator as error:
        return f"refused: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error!s:.200}"
    ours, grads = runs[0]
    if name not in UNSET:
        settings = repr(getattr(sample.args[-1], "kwargs", ""))  # type: ignore[attr-defined]  # some come from a set
        bits.append((_digest(inputs).hex()[:16] + settings, _digest([*ours, *grads]).hex()[:16]))
    if random or name in UNSET:
        same = name in UNSET or _digest(_leaves(runs[0])) == _digest(_leaves(runs[-1]))
        return "passes" if _shapes(ours) == _shapes(native) and same else "differs"
    if name in PRODUCTS and len(ours) > 1:
        with suppress(RuntimeError):
            return "passes" if _close(PRODUCTS[name](ours), PRODUCTS[name](native)) else "differs"
    if _close(ours, native) and _close(grads, native_grads):
        return "passes"
    with suppress(Exception):
        kinds = [each.dtype for each in [*inputs, *ours] if each.dtype in _WIDE]
        wide = _results(*sample(_WIDE[kinds[0]]))
        pairs = zip((ours, grads), (native, native_grads), wide, strict=True)
        return "passes" if all(_near(*each) for each in pairs) else "differs"
    return "differs"


def judged(
    entry: Any, numerics: str, samples: int | None, *, form: str = "op_db", kind: torch.dtype = torch.float32
) -> Row:
    """An entry's row: how many of its samples pass, are refused, differ or end in an error, and the first that does.

    An entry of which no sample could be tried is ``untried``.

    Args:
        samples: only so many; None for all.
        form: of FORMS.
        kind: type of the numbers.
    """
    name = entry.name if form == "module_db" else entry.full_name
    counts: Counter[str] = Counter()
    first = ""
    bits: list[tuple[str, str]] = []
    for sample in itertools.islice(_samples(entry, form, kind), samples):
        said = _judge(name, form, sample, numerics, bits)
        counts[said.split(":")[0]] += 1
        first = said if said != "passes" and (not first or first.startswith("untried")) else first
    total = {key: counts[key] for key in _OUTCOMES if counts[key]}
    outcome = next((key for key in _OUTCOMES if counts[key]), "untried")
    first = first if outcome != "passes" else ""
    origin = {"work": name, "mode": numerics, "form": form, "type": str(kind).removeprefix("torch.")}
    return {**origin, "outcome": outcome, "samples": total, "first": first, "bits": bits}


def _elsewhere(name: str, arguments: Sequence[str]) -> list[Row]:
    """What this measurement finds in a process that is another device."""
    command = processes.python("tests.measurements", "operator-database", "--json", *arguments)
    done = processes.run(command, variables=device(name).variables)
    if not done.stdout.strip():
        raise DeviceError(f"the operator database on device {name} broke: {done.stderr.strip()[-300:]}")
    rows: list[Row] = canonical.loads(done.stdout)
    return rows


def _compare(row: Row, other: Row, name: str) -> None:
    """Count samples that are the same on both devices; a row whose results then have other bits ``differs``."""
    pairs = [(a, b) for (given, a), (also, b) in zip(row["bits"], other["bits"], strict=False) if given == also]
    row["compared"] = len(pairs)
    if len(row["bits"]) != len(other["bits"]) or any(a != b for a, b in pairs):
        row.update(outcome="differs", first=f"differs: other bits on {name}")


def run(
    *,
    samples: int | None = None,
    numerics: Sequence[str] = ("exact",),
    forms: Sequence[str] = FORMS[:1],
    types: Sequence[str] = TYPES[:1],
    against: str | None = None,
    progress: Callable[[int], object] = print,
) -> list[Row]:
    """Judge every entry that has these forms and types.

    Args:
        samples: of each entry; all by default.
        against: a device on which the same is done, and whose bits must be the same.
        progress: called with 1 after each entry.

    Raises:
        CallerError: no sample, or the database's package is missing.
        DeviceError: the other device's process broke.
    """
    if samples is not None and samples < 1:
        raise CallerError("take at least one sample of each entry")
    given = {"--numerics": numerics, "--form": forms, "--type": types, "--samples": [samples] if samples else []}
    arguments = [text for flag, values in given.items() for value in values for text in (flag, str(value))]
    rows = []
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        others = pool.submit(_elsewhere, against, arguments) if against else None
        warnings.simplefilter("ignore")
        for mode, form, kind in itertools.product(numerics, forms, (getattr(torch, each) for each in types)):
            for entry in entries(form):
                if kind in entry.dtypes:
                    rows.append(judged(entry, mode, samples, form=form, kind=kind))
                    progress(1)
        if against and others:
            for row, other in zip(rows, others.result(), strict=True):
                _compare(row, other, against)
    return rows


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["form"], row["type"], row["mode"]), []).append(row)
    return groups


def write(rows: Sequence[Row], path: Path) -> None:
    """Put counts into a file, among those of other forms, types and modes, and all names that do not pass, with why."""
    document = []
    for (form, kind, mode), mine in _grouped(rows).items():
        counts = Counter(row["outcome"] for row in mine)
        tried = sum(sum(row["samples"].values()) for row in mine)
        others = {
            key: {row["work"]: row["first"] for row in mine if row["outcome"] == key}
            for key in ("refused", "differs", "untried", "error")
        }
        compared = {"compared": sum(row["compared"] for row in mine)} if "compared" in mine[0] else {}
        origin = {"work": form, "type": kind, "mode": mode}
        document.append({**origin, "samples": tried, **compared, "counts": dict(counts), **others})
    write_among(document, path, by=("work", "type", "mode"))


def verdict(rows: Sequence[Row]) -> str | None:
    """An entry that ends in an error, or None."""
    bad = [row["work"] for row in rows if row["outcome"] == "error"]
    return f"these end in an error: {', '.join(bad)}" if bad else None


def table(rows: Sequence[Row]) -> list[str]:
    """Counts by form, type and mode, and what does not pass."""
    lines = []
    for group, mine in _grouped(rows).items():
        counts = Counter(row["outcome"] for row in mine)
        lines.append(" ".join(group) + ": " + ", ".join(f"{count} {key}" for key, count in sorted(counts.items())))
    bad = [row for row in rows if row["outcome"] != "passes"]
    return lines + [f"{row['form']} {row['type']} {row['mode']} {row['work']}: {row['first']}" for row in bad]
