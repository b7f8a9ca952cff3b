"""Table 1, the footnote, and the public figures that ship with the package."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest

from analysis.report import tables
from firmware_sim.errors import CallerError

PAPER = {
    "GPT-3": (243, 2.43e4, 2.43e6),
    "Chinchilla": (132, 1.33e4, 1.33e6),
    "PaLM": (29, 2.98e3, 2.99e5),
    "Chinchilla-280B (projected)": (7, 771, 7.72e4),
    "Chinchilla-1T (projected)": (None, 60, 6.02e3),
    "Chinchilla-10T (projected)": (None, None, 58),
}


def shown(value: int | None) -> float | None:
    """A cell as the paper prints it: whole below 1,000, three digits above."""
    return value if value is None or value < 1000 else float(f"{value:.3g}")


def test_all_eighteen_cells() -> None:
    cells = {
        row.model: tuple(shown(tables.cell(flop=row.flop, chips=chips)) for chips in tables.TABLE_1_FLEETS)
        for row in tables.TABLE_1
    }
    assert cells == PAPER


def test_footnote() -> None:
    assert tables.footnote() == tables.Footnote(samples=231_572, inspectors=232, iaea_inspectors_2021=280)


def test_a_cell_refuses_nonsense_that_is_not_a_dash() -> None:
    with pytest.raises(CallerError, match="chips must be above 0"):
        tables.cell(flop=1e23, chips=0)


def test_public_figures_are_complete() -> None:
    models, chips, stocks = tables.trained_models(), tables.chips(), tables.stocks()
    assert len({each.model for each in models}) == len(models) > 30
    assert len({each.chip for each in chips}) == len(chips) > 15
    assert len({(each.holder, each.as_of) for each in stocks}) == len(stocks) > 15
    for each in models:
        assert re.fullmatch(r"\d{4}-\d{2}", each.published)
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", each.retrieved)
        assert 1e15 < each.training_flop < 1e28
    assert {each.kind for each in models} | {each.kind for each in stocks} <= {"reported", "estimated"}
    rows: list[Any] = [*models, *chips, *stocks]
    for row in rows:
        assert row.source
        assert isinstance(row.confirmed, bool)
    assert [each.published for each in models] == sorted(each.published for each in models)


def test_rows_of_the_paper_agree_with_the_file() -> None:
    public = {each.model: each.training_flop for each in tables.trained_models()}
    for row in tables.TABLE_1[:3]:
        assert public[row.model] == row.flop


def test_h100_is_the_unit() -> None:
    h100 = next(each for each in tables.chips() if each.chip == "H100 SXM")
    assert h100.flop_per_day == tables.H100_FLOP_PER_DAY


def test_readme_ships_beside_the_figures() -> None:
    folder = resources.files("analysis").joinpath("data")
    names = {each.name for each in folder.iterdir()}
    assert {"README.md", "training_compute.csv", "chips.csv", "stocks.csv"} <= names
    text = folder.joinpath("README.md").read_text(encoding="utf-8")
    for name in ("training_compute.csv", "chips.csv", "stocks.csv"):
        assert name in text


def test_owners_add_up_to_the_world_once() -> None:
    owners = tables.owners_today()
    world = next(each for each in tables.stocks() if each.holder == "World (sold)")
    assert sum(chips for _, chips in owners) == world.chips_h100_equivalent
    assert all(chips > 0 for _, chips in owners)
    assert not any("used" in name or "World" in name for name, _ in owners)


def test_a_damaged_file_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def broken(_: str) -> object:
        class File:
            def joinpath(self, *_: str) -> File:
                return self

            def read_text(self, encoding: str) -> str:
                return "holder,chips_h100_equivalent,as_of,kind,source,confirmed\nx,many,2025-12,estimated,s,yes\n"

        return File()

    monkeypatch.setattr("analysis.public_data.resources.files", broken)
    with pytest.raises(CallerError, match=r"stocks\.csv is damaged"):
        tables.stocks()


def test_columns_line_up() -> None:
    assert tables.aligned([["a", "1"], ["long", "1000"]]) == ["a        1", "long  1000"]
    with pytest.raises(ValueError):
        tables.aligned([["a"], ["b", "c"]])


def test_an_empty_cell_is_a_gap() -> None:
    chips = {each.chip: each for each in tables.chips()}
    assert len(chips) == 30
    assert (chips["Trainium3"].memory_gb, chips["Trainium3"].interconnect_gbps, chips["Trainium3"].tdp_w) == (
        None, None, 700.0,
    )  # fmt: skip
    assert chips["RTX 5090"].tdp_w is None
    with pytest.raises(CallerError, match="no source gives the memory bandwidth of Trainium3"):
        _ = chips["Trainium3"].roofline
    assert chips["H100 SXM"].roofline.flop == 989 * 10**12


def test_the_merge_keeps_the_ranges_of_the_sources() -> None:
    models = {each.model: each for each in tables.trained_models()}
    assert len(models) == 56
    assert (models["GPT-4"].training_flop_low, models["GPT-4"].training_flop_high) == (8.2e24, 4.4e25)
    assert (models["GPT-5"].training_flop_low, models["GPT-5"].training_flop_high) == (2e25, 2e26)
    assert not set(tables.WITHOUT_FIGURES) & set(models)


def test_years_between_months() -> None:
    assert tables.years_since("2025-12", "2026-11") == pytest.approx(11 / 12)
    assert tables.years_since("2025-12", "2025-12") == 0
    for month in ("2025-11", "2026-13", "2026", "soon", "2026-1"):
        with pytest.raises(CallerError, match="projected to a month from 2025-12 on"):
            tables.years_since("2025-12", month)
