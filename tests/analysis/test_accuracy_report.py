"""Errors against FP64: the committed report keeps its claims, and small parts of it are measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from analysis.bench.origin import DATA
from monitor.numerics.exact import UNARY_FUNCTIONS
from tests.measurements import _products, accuracy
from tests.measurements.__main__ import main as measure

REPORT = DATA / "accuracy.json"
AGAIN = "run `python -m tests.measurements accuracy --out analysis/data/accuracy.json` again"
HALF = 0.5 * (1 + 2.0**-20)
"""Half an ulp, and what the FP64 truth itself may be off by."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return document


def check_operators(rows: list[dict[str, Any]]) -> None:
    """On ordinary operands an exact operator errs by at most twice native, or 2^-21 of the largest (dot: 2^-20)."""
    for row in rows:
        errors = row["ordinary"]
        name = row["operator"]
        least = 2.0**-20 if name == "aten.dot.default" else 2.0**-21  # one number, less than what it is a sum of
        assert errors["exact"]["max_relative"] <= max(2 * errors["native"]["max_relative"], least), name
        assert errors["exact"]["overflowed"] == 0, name
        assert errors["rounded"]["overflowed"] == 0, name


def check_products(rows: list[dict[str, Any]]) -> None:
    """Twice native FP32's error on ordinary operands, four times on the others, which need the wide path."""
    for row in rows:
        limit = 2.0 if row["operands"] in _products.ORDINARY else 4.0
        assert row["ratio"]["exact"] <= limit, row
        assert row["ratio"]["rounded"] <= 1.0, row
        if row["operands"] == "dead channel":
            assert row["ratio"]["exact without wide path"] > 30.0, row
        if row["operands"] in _products.ORDINARY:
            assert row["exact"] == row["exact without wide path"], row


def test_every_operator_is_in_the_report(report: dict[str, Any]) -> None:
    assert {row["operator"] for row in report["operators"]} == set(accuracy.measured_rows()), AGAIN
    assert [row["operator"] for row in report["operators"] if row["elements"] == 0] == []
    assert all(accuracy.unmeasured(name) == reason for name, reason in report["unmeasured"].items())
    assert report["hardware"]["processor"]


def test_operators_of_the_report_are_about_as_accurate_as_native_ones(report: dict[str, Any]) -> None:
    check_operators(report["operators"])


def test_functions_of_the_report_are_correctly_rounded(report: dict[str, Any]) -> None:
    errors = {row["operator"]: row for row in report["operators"]}
    found = [f"aten.{name}.default" for name in UNARY_FUNCTIONS if f"aten.{name}.default" in errors]
    assert len(found) >= 12
    for name in (*found, "aten.sum.dim_IntList", "aten.sum.default"):
        for operands in ("ordinary", "special"):
            assert errors[name][operands]["exact"]["max_ulp"] <= HALF, (name, operands)
    assert sum(errors[name]["ordinary"]["native"]["max_ulp"] > HALF for name in found) >= 10


def test_products_of_the_report_keep_their_bounds(report: dict[str, Any]) -> None:
    kinds = {(row["operands"], row["k"]) for row in report["products"]}
    assert kinds == {(kind, k) for kind in (*_products.ORDINARY, *_products.HEAVY) for k in _products.LENGTHS}
    check_products(report["products"])


def test_convolutions_of_resnet50_at_batch_64(report: dict[str, Any]) -> None:
    rows = report["convolutions"]
    for kind in ("forward", "grad_input", "grad_weight"):
        assert sum(row["convolution"].startswith(kind) for row in rows) >= 15
    assert all("(64, " in row["convolution"] for row in rows)
    for row in rows:
        assert row["finite"]
        assert row["exact"] <= max(4 * row["native"], 2.0**-21), row


def test_products_measured_here() -> None:
    rows = _products.product_rows((64, 300))
    assert len(rows) == 16
    check_products(rows)


def small_program() -> None:
    x = ((torch.arange(96, dtype=torch.float32) * 0.37) % 5 - 2.5).reshape(6, 16).requires_grad_()
    y = F.layer_norm(x, (16,)).exp().log_softmax(-1) @ x.t()
    torch.autograd.backward(F.gelu(y).sum() + F.silu(x).std())


def test_operators_measured_here() -> None:
    rows = [row for row in accuracy.operator_rows(work=[small_program]) if row["calls"]]
    names = {row["operator"] for row in rows}
    assert {"aten.mm.default", "aten.exp.default", "aten.native_layer_norm_backward.default"} <= names
    check_operators(rows)
    exp = next(row for row in rows if row["operator"] == "aten.exp.default")
    assert 0.3 < exp["ordinary"]["exact"]["max_ulp"] <= HALF
    assert exp["special"] is None


def test_a_wrong_result_is_measured_as_wrong() -> None:
    truth = torch.tensor([1.0, 2.0, 4.0, torch.inf, 1e300], dtype=torch.float64)
    worst = accuracy.Worst()
    assert worst.add(truth.to(torch.float32), truth) == 3
    assert (worst.max_ulp, worst.overflowed) == (0.0, 0)
    assert worst.add(torch.tensor([1.0, 2.0 + 2.0**-22, torch.nan, 0.0, 0.0]), truth) == 2
    assert (worst.max_ulp, worst.max_relative, worst.overflowed) == (1.0, 2.0**-23, 1)


def test_spacing_of_fp32_numbers() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 2.0**-126, 2.0**-127, 0.0, 2.0**127], dtype=torch.float64)
    assert accuracy.spacing(values).tolist() == [2.0**e for e in (-23, -23, -22, -149, -149, -149, 104)]


def test_command_refuses_options_of_other_benches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        measure(["accuracy", "--steps", "3"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "python -m tests.measurements accuracy: unrecognized arguments: --steps 3\n"


def test_report_round_trips(tmp_path: Path) -> None:
    report = {"hardware": {"processor": "x"}, "operators": [{"operator": "a", "value": 0.123456}], "products": []}
    accuracy.write(report, tmp_path / "report.json")
    again = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert again == {**report, "operators": [{"operator": "a", "value": 0.1235}]}
