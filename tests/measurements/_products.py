"""Matrix products and convolutions of ``accuracy``: max|ΔC|/max|C| against FP64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics import execute, recording
from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul
from monitor.presets import initialise, preset
from monitor.transcript import to_batch

__all__ = ["ENGINES", "HEAVY", "LENGTHS", "ORDINARY", "convolution_rows", "operands", "product_rows"]

Row = dict[str, Any]

LENGTHS = (64, 256, 1024, 4096, 8192)
ORDINARY = ("gaussian", "uniform", "relu")
HEAVY = ("softmax", "softmax - one-hot", "lognormal token scale", "massive channel", "dead channel")
ENGINES = ("exact", "exact without wide path", "rounded", "native")
_ROWS, _COLUMNS = 96, 80
_SEEDS = 3


def operands(kind: str, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, k) and (k, columns) FP32 operands of a named kind."""
    generator = torch.Generator().manual_seed(1000 * seed + k)
    a, b = torch.randn(_ROWS, k, generator=generator), torch.randn(k, _COLUMNS, generator=generator)
    match kind:
        case "gaussian":
            pass
        case "uniform":
            a, b = torch.rand(_ROWS, k, generator=generator), torch.rand(k, _COLUMNS, generator=generator) - 0.5
        case "relu":
            a = a.relu()
        case "softmax":
            a = torch.softmax(3 * a, dim=1)
        case "softmax - one-hot":
            hot = torch.nn.functional.one_hot(torch.randint(0, k, (_ROWS,), generator=generator), k)
            a = torch.softmax(a, dim=1) - hot
        case "lognormal token scale":
            a = a * torch.exp(1.5 * torch.randn(1, k, generator=generator))
        case "massive channel" | "dead channel":
            a[:, 3] *= 1000.0
            if kind == "dead channel":
                b[3] = 0.0
        case _:
            raise ValueError(f"no operands {kind!r}")
    return a, b


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value.to(torch.float64) - truth).abs().max() / truth.abs().max())


def _products(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        "exact": execute("exact", "aten.mm.default", (a, b), {}, entries=None),
        "exact without wide path": cpu_matmul(a[None], b[None], wide=False)[0],
        "rounded": execute("rounded", "aten.mm.default", (a, b), {}, entries=None),
        "native": a @ b,
    }


def product_rows(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    """Errors of each engine, the largest of a few draws, and their ratios to native FP32's."""
    rows = []
    for kind in (*ORDINARY, *HEAVY):
        for k in lengths:
            worst = dict.fromkeys(ENGINES, 0.0)
            for seed in range(_SEEDS):
                a, b = operands(kind, k, seed)
                truth = a.to(torch.float64) @ b.to(torch.float64)
                for name, value in _products(a, b).items():
                    worst[name] = max(worst[name], _error(value, truth))
            ratio = {name: value / worst["native"] for name, value in worst.items()}
            rows.append({"operands": kind, "k": k, "draws": _SEEDS, **worst, "ratio": ratio})
    return rows


class _Convolutions:
    """Observer that compares each convolution of new shapes with FP64, and native FP32 beside it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._seen: set[Any] = set()

    def before(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Convolutions write to no operand."""

    def after(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Compare, once for each set of shapes and strides."""
        if "aten.convolution" not in str(func):
            return
        shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else str(x) for x in args)
        if (str(func), shapes) in self._seen:
            return
        self._seen.add((str(func), shapes))
        doubled = [x.detach().to(torch.float64) if isinstance(x, Tensor) else x for x in args]
        truth, native = func(*doubled, **kwargs), func(*args, **kwargs)
        names = ("grad_input", "grad_weight", "grad_bias") if isinstance(truth, tuple) else ("forward",)
        columns = (value if isinstance(value, list | tuple) else (value,) for value in (out, native, truth))
        for name, got, plain, wanted in zip(names, *columns, strict=True):
            if wanted is not None:
                x, weight = (doubled[1], doubled[2]) if len(names) > 1 else (doubled[0], doubled[1])
                label = f"{name} {tuple(x.shape)} * {tuple(weight.shape)}"
                row = {"convolution": label, "exact": _error(got, wanted), "native": _error(plain, wanted)}
                self.rows.append({**row, "finite": bool(got.isfinite().all())})


def convolution_rows(name: str = "resnet50-cifar", batch_size: int = 64) -> list[Row]:
    """Every convolution of new shapes in one ``exact`` forward and backward pass of a preset."""
    entry = preset(name)
    model = entry.build().train()
    initialise(model, 1)
    observer = _Convolutions()
    with recording("exact", observer=observer):
        loss = entry.loss(model, to_batch(entry.samples(None), np.arange(batch_size)))
        torch.autograd.backward(loss)
    return observer.rows
