"""Mixed precision over five seeds: what was measured, and a loop of each kind again with fewer."""

from __future__ import annotations

import json

import pytest

from analysis.bench.origin import DATA
from firmware_sim.errors import CallerError
from tests.measurements import precision
from tests.measurements._precision_loops import LOOPS


def test_each_loop_is_accepted_resumed_and_learns_as_native_training_does() -> None:
    rows = json.loads((DATA / "precision.json").read_text())["rows"]
    assert {(row["work"], row["mode"]) for row in rows} == {(w, mode) for w in LOOPS for mode in precision.NUMERICS}
    assert all(row["resumed"] for row in rows)
    assert {row["seeds"] for row in rows} == {5}
    assert precision.verdict(rows) is None
    assert all(set(row.get("versions", ())) == set(LOOPS[row["work"]].packages) for row in rows)


@pytest.mark.parametrize("work", ["autocast BF16", "Accelerate FP16 with a scaler", "TRL's SFTTrainer BF16"])
@pytest.mark.filterwarnings("ignore")
def test_two_seeds_are_as_measured(monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    for package in LOOPS[work].packages:
        pytest.importorskip(package)
    monkeypatch.setattr(precision, "NUMERICS", ("rounded",))
    (row,) = precision.run(seeds=2, steps=10, works=[work], progress=lambda done: None)
    assert (row["outcome"], row["resumed"]) == ("ACCEPT", True), row
    assert abs(row["loss"] - row["native_loss"]) < 0.01
    assert precision.verdict([{**row, "native_deviation": 0.0}]) is not None
    assert precision.verdict([{**row, "outcome": "REJECT"}]) is not None
    assert precision.verdict([{**row, "resumed": False}]) is not None


def test_one_seed_tells_of_no_deviation() -> None:
    with pytest.raises(CallerError, match="at least 2 seeds"):
        precision.run(seeds=1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.measurements.precision.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CallerError, match="install lightning, or name loops without by --work"):
        precision.run(works=["autocast BF16", "Lightning BF16"])
