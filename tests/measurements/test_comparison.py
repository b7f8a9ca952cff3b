"""The comparison of schemes: a small one is measured, and the committed one is what the report shows."""

from __future__ import annotations

from analysis.report.comparison import load, shown
from tests.measurements.comparison import PUBLISHED, run, table, verdict


def test_every_scheme_is_measured_on_the_same_work() -> None:
    rows = run(preset="digits-cnn", steps=4)
    assert verdict(rows) is None
    measured = [row for row in rows if row["mode"] == "measured"]
    assert len(measured) == 5
    assert len({row["work"] for row in measured}) == 1
    assert all(row["verifier"] > 0 and row["bytes"] > 0 for row in measured)
    game, replay, _, _, audit = measured
    assert game["bytes"] < replay["bytes"]
    assert audit["misses"].endswith("it was accepted")
    assert len(table(rows)) == len(rows) + 1


def test_the_report_shows_measured_schemes_first_and_where_others_come_from() -> None:
    lines = load()
    first = [line.source for line in lines]
    count = first.count("measured here")
    assert set(first[:count]) == {"measured here"}
    assert [line.scheme for line in lines[count:]] == [each.scheme for each in PUBLISHED]
    assert all(line.prover != "not published" for line in lines[:count])


def test_figures_are_read_by_people() -> None:
    assert [shown(each) for each in (None, 1_630_000, 2.345, "130 ms")] == [
        "not published",
        "1,630,000 bytes",
        "2.3 ×",
        "130 ms",
    ]
