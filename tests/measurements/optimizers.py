"""``optimizers``: PyTorch's own optimizer database (``optim_db``) recorded, and which are bound to their numbers.

Each entry's inputs (learning rates, decays, betas …, a rate in a tensor among them) train a small network for a few
recorded steps, and the last of them once more on lists, where the entry knows these. The run is verified: all its
hyper-parameters are bound to the arithmetic, or some are not. LBFGS takes three iterations a
step. Optimizers of packages are measured where they are installed.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import write as write_rows
from firmware_sim.errors import CallerError
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from monitor import Recorder
from monitor.declaration.formulas import FORMULAS
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["entries", "judged", "run", "table", "verdict", "write"]

Row = dict[str, Any]
Input = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]

_STEPS = 3
_PACKAGES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "lion_pytorch.lion_pytorch.Lion": ({"lr": 1e-3, "weight_decay": 0.1},),
    "timm.optim.lion.Lion": ({"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "foreach": True}),
    "timm.optim.adan.Adan": ({"weight_decay": 0.1}, {"no_prox": True, "foreach": True}),
    "timm.optim.lamb.Lamb": ({},),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "foreach": False}),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": (
        {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 2},
        {"lr": 1e-2, "foreach": False},
    ),
    "prodigyopt.prodigy.Prodigy": ({}, {"weight_decay": 0.1}),
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix": (
        {"weight_decay": 0.1, "weight_decouple": True},
        {"t_alpha_beta3": 10, "foreach": False},
    ),
    "pytorch_optimizer.optimizer.soap.SOAP": ({},),
    "pytorch_optimizer.optimizer.lamb.Lamb": ({},),
    "pytorch_optimizer.optimizer.adan.Adan": ({},),
}


def entries() -> Iterator[tuple[str, list[Input]]]:
    """Name and inputs of each optimizer: those of ``optim_db``, then those of packages that are installed."""
    from torch.testing._internal.common_optimizers import optim_db

    entry: Any
    for entry in optim_db:
        few = {"max_iter": 3} if entry.optim_cls is torch.optim.LBFGS else {}
        inputs: list[Input] = [
            (entry.optim_cls, {**few, **each.kwargs}) for each in entry.optim_inputs_func(device="cpu")
        ]
        if "foreach" in entry.supported_impls:
            inputs.append((entry.optim_cls, {**inputs[-1][1], "foreach": True}))
        yield entry.optim_cls.__name__, inputs
    for name, hypers in _PACKAGES.items():
        module, _, leaf = name.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), leaf)
        except ImportError:
            continue
        yield name, [(kind, hyper) for hyper in hypers]


def _train(kind: type[torch.optim.Optimizer], hyper: Mapping[str, Any], folder: Path) -> None:
    torch.manual_seed(0)
    plain = kind is not torch.optim.Muon  # which takes matrices alone
    model = nn.Sequential(nn.Linear(6, 5, bias=plain), nn.Tanh(), nn.Linear(5, 3, bias=plain))
    optimizer: Any = kind(model.parameters(), **hyper)
    if "train_mode" in optimizer.param_groups[0]:
        optimizer.train()
    recorder = Recorder(model, optimizer, out=folder, seed=1, chips=1)
    for _ in range(_STEPS):
        inputs, labels = torch.randn(4, 6), torch.randint(0, 3, (4,))

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with recorder.step((inputs, labels)):
            if kind is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    recorder.finish()


def judged(kind: type[torch.optim.Optimizer], hyper: Mapping[str, Any]) -> tuple[str, str]:
    """``bound``, ``recorded`` or ``refused``, and why not more."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        try:
            _train(kind, hyper, run)
        except (CallerError, UnsupportedOperator) as error:
            return "refused", str(error)
        found = verify(run, Trust.load([Path(place) / "run.trust.json"], [run]), now=datetime.now(UTC))
        unbound = found.evidence["execution"]["not_bound"]
        return ("recorded", next(iter(unbound.values()))) if unbound else ("bound", "")


def run(*, inputs: int | None = None, progress: Callable[[int], object] = print) -> list[Row]:
    """Judge all optimizers.

    Args:
        inputs: of each only so many; all by default.
        progress: called with 1 after each optimizer.

    Raises:
        CallerError: no input.
    """
    if inputs is not None and inputs < 1:
        raise CallerError("take at least one input of each optimizer")
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, each in entries():
            found = [judged(kind, hyper) for kind, hyper in each[:inputs]]
            outcome = next(key for key in ("refused", "recorded", "bound") if key in [said for said, _ in found])
            why = next((text for said, text in found if said == outcome), "")
            mode = "package" if "." in name else "optim_db"
            rows.append({"work": name, "mode": mode, "outcome": outcome, "inputs": len(found), "why": why})
            progress(1)
    return rows


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file."""
    write_rows(rows, path)


def verdict(rows: Sequence[Row]) -> str | None:
    """An optimizer that is less than it has to be, or None: all but SparseAdam are recorded, formulas are bound."""
    bad = [row["work"] for row in rows if row["outcome"] == "refused" and row["work"] != "SparseAdam"]
    bad += [row["work"] for row in rows if row["work"] in FORMULAS and row["outcome"] != "bound"]
    return f"these are not recorded, or not bound: {', '.join(bad)}" if bad else None


def table(rows: Sequence[Row]) -> list[str]:
    """Each optimizer with its outcome, and how many have each."""
    lines = [
        f"{row['work']}: {row['outcome']}, {row['inputs']} inputs{': ' * bool(row['why'])}{row['why']}" for row in rows
    ]
    for mode in sorted({row["mode"] for row in rows}):
        mine = [row["outcome"] for row in rows if row["mode"] == mode]
        recorded = len(mine) - mine.count("refused")
        lines.append(f"{mode}: {recorded} of {len(mine)} recorded, {mine.count('bound')} bound")
    return lines
