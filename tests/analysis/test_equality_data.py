"""The committed table of ``equality``: what it claims, and that this machine still ends where it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inspector.devices import DEVICES
from tests.measurements import equality

DIGESTS = ("weights", "optimizer", "losses")
FAMILIES = {"native", "native-1", "avx2", "sse41", "mkl-compatible"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return equality.load(equality.COMMITTED)


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["rows"]
    return found


def ran(rows: list[dict[str, Any]], work: str, mode: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["work"], row["mode"], row["status"]) == (work, mode, "run")]


def test_the_hardware_is_named(document: dict[str, Any]) -> None:
    for entry in document["hardware"]:
        assert {"processor", "cores", "torch", "numpy", "numba", "python"} <= set(entry)
        assert all(entry.values())


@pytest.mark.parametrize("work", list(equality.WORKS))
@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_controlled_training_ends_in_the_same_bits(rows: list[dict[str, Any]], work: str, mode: str) -> None:
    some = ran(rows, work, mode)
    names = {row["device"] for row in some}
    assert names >= FAMILIES
    assert sum(name.startswith("emulated-") for name in names) >= 2
    assert {row["steps"] for row in some} == {equality.WORKS[work][0]}
    for origin in {row["recorded_on"] for row in some} if mode == "rounded" else {None}:
        alike = [row for row in some if row.get("recorded_on") == origin]
        assert len({(row["weights"], row["optimizer"], row["losses"]) for row in alike}) == 1
        if mode == "rounded":
            recorders = [(row["machine"], row["device"]) for row in alike if row["role"] == "recording"]
            assert recorders == [(origin, "native")]
            (log_bytes,) = {row["log_bytes"] for row in alike}
            assert log_bytes > 0


@pytest.mark.parametrize("work", list(equality.WORKS))
def test_native_training_ends_in_at_least_four_ways(rows: list[dict[str, Any]], work: str) -> None:
    some = ran(rows, work, "native")
    assert {row["device"] for row in some} >= FAMILIES
    assert len({row["weights"] for row in some}) >= 4


def test_every_row_ran_or_says_why_not(rows: list[dict[str, Any]]) -> None:
    assert equality.verdict(rows) is None
    assert {row["device"] for row in rows} <= set(DEVICES)
    for work in equality.WORKS:
        assert "cuda" in {row["device"] for row in rows if row["work"] == work}
    assert all(row["reason"] for row in rows if row["status"] == "not run")


def test_the_summary_counts_what_ended_how(rows: list[dict[str, Any]]) -> None:
    for line in equality.summary(rows):
        assert line["exact"] == line["rounded"] == 1
        assert line["devices"] >= line["native"] >= 4
        assert line["devices"] >= 7


@pytest.mark.usefixtures("kept_devices")
@pytest.mark.parametrize(("work", "device"), [("digits-cnn", "emulated-tensor-core")])
def test_this_machine_ends_where_the_table_says(rows: list[dict[str, Any]], work: str, device: str) -> None:
    """``exact`` needs no log, so any machine may check the table."""
    (here,) = equality.run(presets=[work], devices=[device], numerics=["exact"])
    for row in ran(rows, work, "exact"):
        assert {name: here[name] for name in DIGESTS} == {name: row[name] for name in DIGESTS}


@pytest.mark.usefixtures("kept_devices")
@pytest.mark.parametrize("work", ["digits-cnn", "tiny-gpt"])
def test_logs_of_the_machine_that_recorded_the_committed_table_are_replayed_here(
    document: dict[str, Any], work: str, tmp_path: Path
) -> None:
    """Only its own rows go along, so that the device of this machine runs whatever machine this is."""
    (recording,) = (
        row for row in document["rows"] if row["work"] == work and "log_digest" in row and row["role"] == "recording"
    )
    out = tmp_path / "table.json"
    out.write_text(json.dumps({**document, "rows": [recording]}))
    shutil.copytree(equality.COMMITTED.with_suffix(".logs"), out.with_suffix(".logs"))
    rows = equality.run(presets=[work], devices=["sse41"], numerics=["rounded"], out=out)
    here = next(row for row in rows if row["device"] == "sse41")
    assert (here["role"], here["recorded_on"]) == ("replaying", recording["machine"])
    assert {name: here[name] for name in DIGESTS} == {name: recording[name] for name in DIGESTS}
    assert here["log_digest"] == recording["log_digest"]
