"""PyTorch's operator and module databases: the first samples of some entries are as the committed results say."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.bench.origin import DATA
from tests.measurements import operator_database
from tests.measurements.operator_database import RANDOM, entries, judged, run, table, verdict, write

pytest.importorskip("expecttest")
BAD = ("refused", "differs", "untried", "error")
LEAST = {
    ("op_db", "float32", "exact"): 638,
    ("op_db", "float32", "rounded"): 638,
    ("op_db", "bfloat16", "exact"): 528,
    ("op_db", "bfloat16", "rounded"): 528,
    ("op_db", "complex64", "exact"): 248,
    ("out", "float32", "exact"): 289,
    ("out", "bfloat16", "exact"): 217,
    ("in_place", "float32", "exact"): 139,
    ("in_place", "bfloat16", "exact"): 139,
    ("module_db", "float32", "exact"): 113,
    ("module_db", "float32", "rounded"): 114,
}
"""Entries of each form, type and mode that pass with each sample that was tried."""
DRAWN = 12
DIFFER = {
    ("out", "float32"): {"linalg.matrix_rank", "linalg.matrix_rank.hermitian"},  # PyTorch writes nothing under a mode
}
NUMBERS = {"linspace", "linspace.tensor_overload", "logspace", "logspace.tensor_overload"}  # compared with BF16 alone
DIFFER["out", "bfloat16"] = NUMBERS | {"mode"}  # another place of equal values
DIFFER["op_db", "bfloat16"] = (
    DIFFER["out", "bfloat16"]
    | {"meshgrid.variadic_tensors", "meshgrid.list_of_tensors"}  # samples in the order of a set
    | {"native_batch_norm", "nn.functional.batch_norm"}  # a gradient of 0 is 0.002
)


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str, str], Mapping[str, Any]]:
    rows = json.loads((DATA / "operator_database.json").read_text())["rows"]
    return {(row["work"], row["type"], row["mode"]): row for row in rows}


def entry_named(name: str, form: str = "op_db") -> Any:
    (found,) = (each for each in entries(form) if (each.name if form == "module_db" else each.full_name) == name)
    return found


def test_all_samples_of_most_entries_pass(committed: dict[tuple[str, str, str], Mapping[str, Any]]) -> None:
    assert committed.keys() == LEAST.keys()
    for key, row in committed.items():
        counts = {name: count for name, count in row["counts"].items() if name != "passes"}
        assert counts == {name: len(row[name]) for name in BAD if row[name]}
        assert row["counts"]["passes"] >= LEAST[key]
        assert not row["error"]
        assert set(row["differs"]) <= DIFFER.get(key[:2], set())
    assert all("GPU" in reason for reason in committed["op_db", "float32", "exact"]["untried"].values())
    assert not RANDOM & committed["op_db", "float32", "exact"]["refused"].keys()
    assert sum(row["samples"] for row in committed.values()) > 60_000
    assert sum(row.get("compared", 0) for row in committed.values()) > 35_000


@pytest.mark.parametrize("key", LEAST, ids="-".join)
@pytest.mark.filterwarnings("ignore")
def test_first_samples_of_some_entries_are_as_committed(
    committed: dict[tuple[str, str, str], Mapping[str, Any]], key: tuple[str, str, str]
) -> None:
    form, kind, mode = key
    dtype = getattr(torch, kind)
    known = [each for each in entries(form) if dtype in each.dtypes]
    for entry in random.Random(0).sample(known, DRAWN):
        row = judged(entry, mode, 1, form=form, kind=dtype)
        assert row["outcome"] in ("passes", "untried") or row["work"] in committed[key][row["outcome"]], row


@pytest.mark.parametrize(
    ("form", "kind", "name"),
    [
        ("module_db", "float32", "nn.FractionalMaxPool3d"),
        ("out", "float32", "conj_physical"),
        ("out", "float32", "split_with_sizes_copy"),
        ("op_db", "complex64", "index_add"),
        ("op_db", "bfloat16", "nn.functional.bilinear"),
        ("op_db", "bfloat16", "argsort"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_sample_of_these_passes(form: str, kind: str, name: str) -> None:
    row = judged(entry_named(name, form), "exact", 60, form=form, kind=getattr(torch, kind))
    assert row["outcome"] == "passes", row


def test_a_wrong_result_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_named("atan")
    assert judged(entry, "exact", 2)["outcome"] == "passes"
    monkeypatch.setattr(operator_database, "_close", lambda ours, theirs: False)
    assert judged(entry, "exact", 2)["outcome"] == "passes"  # as near to FP64 as the native result
    monkeypatch.setattr(operator_database, "_NEAR", 0)
    assert judged(entry, "exact", 2)["outcome"] == "differs"
    assert verdict([{"work": "atan", "outcome": "error"}]) == "these end in an error: atan"


def test_other_bits_on_another_device_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = entry_named("add")
    monkeypatch.setattr(operator_database, "entries", lambda form: [entry])
    elsewhere = run(samples=2, progress=lambda done: None)
    monkeypatch.setattr(operator_database, "_elsewhere", lambda name, arguments: elsewhere)
    (same,) = run(samples=2, against="avx2", progress=lambda done: None)
    assert (same["outcome"], same["compared"]) == ("passes", 2)
    elsewhere[0]["bits"][1] = (elsewhere[0]["bits"][1][0], "0" * 16)
    rows = run(samples=2, against="avx2", progress=lambda done: None)
    assert table(rows) == ["op_db float32 exact: 1 differs", "op_db float32 exact add: differs: other bits on avx2"]
    write(rows, tmp_path / "rows.json")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["counts"], row["compared"]) == ({"differs": 1}, 2)


def test_an_entry_of_which_no_sample_can_be_tried_is_no_pass() -> None:
    row = judged(entry_named("jiterator_unary"), "exact", None)
    assert (row["outcome"], row["samples"]) == ("untried", {})
    assert "GPU" in row["first"]
