"""PyTorch's optimizer database: what was measured of all its inputs, and some of them again."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from analysis.bench.origin import DATA
from tests.measurements.optimizers import judged, verdict


def test_all_but_sparse_gradients_are_recorded_and_nearly_all_are_bound() -> None:
    rows = json.loads((DATA / "optimizers.json").read_text())["rows"]
    counts = Counter(row["outcome"] for row in rows if row["mode"] == "optim_db")
    assert {row["work"] for row in rows if row["outcome"] == "refused"} == {"SparseAdam"}
    assert counts["bound"] >= 13
    assert sum(counts.values()) == 15
    assert verdict(rows) is None


@pytest.mark.parametrize(
    ("kind", "hyper", "outcome"),
    [
        (torch.optim.Adafactor, {"weight_decay": 0.1, "foreach": True}, "bound"),
        (torch.optim.Rprop, {"etas": (0.5, 1.5)}, "bound"),
        (torch.optim.ASGD, {"t0": 1}, "bound"),
        (torch.optim.SGD, {"lr": torch.tensor(0.001)}, "bound"),
        (torch.optim.LBFGS, {"max_iter": 2}, "recorded"),
        (torch.optim.SparseAdam, {}, "refused"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_some_inputs_are_as_measured(kind: type[torch.optim.Optimizer], hyper: Any, outcome: Any) -> None:
    found, why = judged(kind, hyper)
    assert found == outcome
    assert (why == "") == (outcome == "bound")


def test_an_optimizer_that_is_less_than_it_has_to_be_is_named() -> None:
    row = {"work": "SGD", "mode": "optim_db", "outcome": "refused", "inputs": 1, "why": "?"}
    assert verdict([row]) == "these are not recorded, or not bound: SGD"
    assert verdict([{**row, "work": "timm.optim.adan.Adan", "outcome": "recorded"}])
    assert verdict([{**row, "work": "SparseAdam"}]) is None
