"""Scenario files and measured rates: every mistake names its line and key; nothing is filled in silently."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.campaign import (
    Catalogue,
    IntervalEnd,
    Kind,
    MeasuredRate,
    MissingRate,
    RateBook,
    ScenarioError,
    load_rates,
    load_scenario,
    predict,
    save_rates,
)
from inspector.campaign._toml import _Scan

GOOD = """\
title = "test"
days = 120
description = \"\"\"
[not.a.table]
key = "not a key"
\"\"\"

[rule]
threshold_flop = 1e23
evidence = "whole-run"

[inspection]
period_days = 30
samples = 4
snapshot_rate = 0.1

[detection]
assumed = { undeclared-run = 1.0, "swap-weights" = 0.5 }

[[kind]]
name = "unit"
flop_per_second = 1.1574074074074073e15

[[lab]]
name = "A"
[[lab.site]]
name = "north"  # [[lab]]
chips = [
    { kind = "unit", count = 80 },
    { kind = "unit", count = 20, status = "exempt" },
]
[[lab.site]]
name = "south"
[[lab.site.chips]]
kind = "unit"
count = 20

[[run]]
name = "run"
lab = "A"
flop = 2.4e23
days = 120

[[strategy]]
name = "plain"

[[strategy]]
name = "swap"
policies = [
    { policy = "stretch", factor = 1 },
    { policy = "weight-swap" },
]
"""
CATALOGUE = Catalogue(
    kinds={"H": Kind(name="H", flop_per_day=1e20)},
    models={"Big": 1.2e23},
    stocks={("Owner", "2025-12"): ("H", 1000)},
)


def write(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return path


def line_of(text: str, word: str) -> int:
    (found,) = [number for number, line in enumerate(text.splitlines(), 1) if word in line]
    return found


def test_a_good_file(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD))
    assert scenario.fleet.registered() == 100
    assert [s.name for s in scenario.strategies] == ["plain", "swap"]
    plan = scenario.plan(scenario.strategies[0])
    assert plan.involved == 20
    assert plan.periods == 4
    assert scenario.plan(scenario.strategies[1]).lies == ("swap-weights",)
    assert scenario.inspectors(1000) == 13  # whole ones of 365 / 30


MISTAKES: dict[str, tuple[str, str, str, str]] = {
    # name: (old text, new text, word on the line to be named, part of the message)
    "unknown top key": ("days = 120\ndesc", "days = 120\ntrails = 5\ndesc", "trails", "trails: unknown key; known:"),
    "undeclared site, no search": (
        'name = "south"', 'name = "south"\ndeclared = false', "declared = ", "needs 'searches = true' in [inspection]"
    ),
    "unknown rule key": ("evidence =", "proof =", "proof =", "rule.proof: unknown key"),
    "unknown inspection key": ("samples = 4", "samples = 4\nsmpl = 5", "smpl = 5", "inspection.smpl: unknown key"),
    "unknown chip key": ("count = 80 }", "count = 80, hue = 1 }", "hue", "lab[1].site[1].chips[1].hue: unknown"),
    "unknown run key": ("flop = 2.4e23", "flop = 2.4e23\nspeed = 1", "speed", "run[1].speed: unknown key"),
    "unknown strategy key": ('name = "plain"', 'name = "plain"\npolicy = 1', "policy = 1", "strategy[1].policy"),
    "unknown policy": ('"weight-swap"', '"swap"', '"swap" }', "strategy[2].policies[2]: unknown policy 'swap'"),
    "unknown parameter": ("factor = 1", "factor = 1, speed = 2", "speed", "policy 'stretch' has no parameter 'speed'"),
    "policy out of range": ("factor = 1", "factor = 0.5", "factor", "stretch.factor must be at least 1"),
    "text for number": ("days = 120\ndesc", 'days = "120"\ndesc', 'days = "120"', "days: must be a number"),
    "bool for number": ("period_days = 30", "period_days = true", "period_days", "must be a number, got True"),
    "fraction of a chip": ("count = 80", "count = 80.5", "80.5", "count: must be a whole number"),
    "NaN": ("snapshot_rate = 0.1", "snapshot_rate = nan", "nan", "inspection.snapshot_rate: must be a finite number"),
    "NaN samples": ("samples = 4", "samples = nan", "nan", "must be a whole number"),
    "negative rate": ("snapshot_rate = 0.1", "snapshot_rate = -1", "-1", "snapshot_rate: must be between 0 and"),
    "negative samples": ("samples = 4", "samples = -4", "-4", "samples: must be between 0 and"),
    "period 0": ("period_days = 30", "period_days = 0", "period_days", "period_days: must be between 0.01 and"),
    "no threshold": ("threshold_flop = 1e23", "threshold_flop = 0", "threshold_flop", "must be between 1e+15 and"),
    "speed 0": ("flop_per_second = 1.1574074074074073e15", "flop_per_second = 0", "flop_per_second", "must be between"),
    "unknown kind": ('kind = "unit"\ncount', 'kind = "H1"\ncount', '"H1"', "unknown chip kind 'H1'; known: unit"),
    "unknown status": ('"exempt"', '"hidden"', '"hidden"', "status: unknown value 'hidden'; known: registered"),
    "unknown evidence": ('"whole-run"', '"all"', '"all"', "evidence: unknown value 'all'"),
    "missing samples": ("samples = 4\n", "", "[inspection]", "give 'samples' or 'confidence'"),
    "missing flop": ("flop = 2.4e23\n", "", "[[run]]", "key 'flop' is missing"),
    "missing section": ("[rule]\nthreshold_flop = 1e23\nevidence = \"whole-run\"\n", "", 'title = "test"', "'rule'"),
    "unknown lab": ('lab = "A"', 'lab = "B"', 'lab = "B"', "run.lab: unknown lab 'B'; known: A"),
    "too few chips": ("flop = 2.4e23", "flop = 2.4e24", "flop = 2.4e24", "run.flop: needs 2e+22 FLOP a day"),
    "too late": ("days = 120\ndesc", "days = 90\ndesc", "days = 90", "after the horizon of 90 days"),
    "samples above stock": ("samples = 4", "samples = 101", "samples = 101", "101 cannot be drawn from the 100 chips"),
    "horizon below a period": ("period_days = 30", "period_days = 121", "period_days", "than one period of 121 days"),
    "unrated lie": ('"swap-weights" = 0.5', '"fake-layers" = 0.5', '^name = "swap"', "for the lie 'swap-weights'"),
    "unknown lie": ('"swap-weights" = 0.5', '"swap" = 0.5', '"swap" =', "no strategy uses the lie 'swap'"),
    "rate above 1": ("undeclared-run = 1.0", "undeclared-run = 1.5", "undeclared-run", "between 0 and 1"),
    "twin strategies": ('name = "swap"', 'name = "plain" # twin', "# twin", "another [[strategy]] is named 'plain'"),
    "unknown model": ("flop = 2.4e23", 'model = "GPT-9"', "GPT-9", "unknown model 'GPT-9'; known: none"),
    "model and flop": ("flop = 2.4e23", 'flop = 2.4e23\nmodel = "Big"', "Big", "either 'flop' or 'model'"),
    "unknown stock": (
        'kind = "unit"\ncount = 20\n\n[[run', 'stock = "Nobody"\nas_of = "2025-12"\n\n[[run',
        "Nobody", "no public stock of 'Nobody' at '2025-12'; no stock of that month; known: none",
    ),
    "confidence 1": ("samples = 4", "confidence = 1.0", "confidence", "strictly between 0 and 1"),
    "out of reach": (
        "samples = 4\nsnapshot_rate = 0.1", "confidence = 0.9\nsnapshot_rate = 0", "confidence", "no number of samples",
    ),
    "negative inspectors": ("samples = 4", "samples = 4\ninspectors = -1", "inspectors", "must be between 0 and"),
    "sites of a declared one": (
        'name = "south"', 'name = "south"\nsites = 3', "sites = 3", "has no effect at a declared site",
    ),
    "exempt in no known kind": (
        'evidence = "whole-run"', 'evidence = "whole-run"\nexempt_chips = 1', "exempt_chips", "'H100 SXM', which the",
    ),
    "lonely device": ("assumed =", 'device = "x"\nassumed =', "device", "needs 'table'"),
    "no table file": ("assumed =", 'table = "none.json"\nassumed =', "table =", "cannot read the rate table"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_its_line_and_key(name: str, tmp_path: Path) -> None:
    old, new, word, message = MISTAKES[name]
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(ScenarioError) as raised:
        load_scenario(write(tmp_path, text))
    shown = str(raised.value)
    assert "\n" not in shown
    assert message in shown
    # A caret marks mistakes of a whole table: its header stands on the line before its name.
    line = line_of(text, word.removeprefix("^")) - word.startswith("^")
    assert f"scenario.toml, line {line}: " in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [("days = x", "line 1"), ("title = 'a'\ntitle = 'b'", "Cannot overwrite"), ("\x00", "is not TOML")],
)
def test_broken_toml(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="is not TOML") as raised:
        load_scenario(write(tmp_path, text))
    assert message in str(raised.value)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="is not TOML"):
        load_scenario(tmp_path / "x.toml")


def test_public_figures(tmp_path: Path) -> None:
    text = GOOD.replace('kind = "unit"\ncount = 20', 'stock = "Owner"\nas_of = "2025-12"\nshare = 0.5')
    scenario = load_scenario(write(tmp_path, text.replace("flop = 2.4e23", 'model = "Big"\ntimes = 2')), CATALOGUE)
    assert scenario.fleet.registered() == 580
    assert scenario.runs[0].flop == 2.4e23


def test_confidence_sets_the_samples(tmp_path: Path) -> None:
    """The number found reaches the wanted probability, and one less does not."""
    scenario = load_scenario(write(tmp_path, GOOD.replace("samples = 4", "confidence = 0.95")))
    samples = scenario.inspection.samples
    found = {}
    for number in (samples - 1, samples):
        other = load_scenario(write(tmp_path, GOOD.replace("samples = 4", f"samples = {number}")))
        found[number] = predict(other.plan(other.strategies[0])).detection
    assert found[samples - 1] < 0.95 <= found[samples]  # type: ignore[operator]
    assert scenario.samples_needed(scenario.strategies[0]) == samples
    assert scenario.samples_needed(scenario.strategies[1]) > samples  # type: ignore[operator]


def test_inspectors_cap_the_samples(tmp_path: Path) -> None:
    text = GOOD.replace("samples = 4", "samples = 60\ninspectors = 0.5")
    scenario = load_scenario(write(tmp_path, text))
    assert scenario.inspection.samples_done() == int(0.5 * 1000 * 30 / 365)


def _paths(value: Any, base: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for key, part in value.items() for p in ((*base, key), *_paths(part, (*base, key)))]
    if isinstance(value, list):
        return [p for index, part in enumerate(value) for p in ((*base, index), *_paths(part, (*base, index)))]
    return []


def test_every_key_of_the_parser_has_a_line() -> None:
    lines = _Scan(GOOD).run()
    text = GOOD.splitlines()
    for path in _paths(tomllib.loads(GOOD)):
        assert path in lines
        if isinstance(path[-1], str):
            assert path[-1] in text[lines[path] - 1]


SCALARS = st.sampled_from(
    ["1", "-2.5e3", "true", "2025-01-01", '"a # = [ ] { } \\" b"', "'c\\'", '"""x\n[y]\nz = 1"""']
)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(lambda parts: "[" + ", ".join(parts) + "]"), max_leaves=4,
)), max_size=6, unique_by=lambda pair: pair[0]))  # fmt: skip
def test_the_scan_finds_each_key_where_it_was_written(pairs: list[tuple[str, str]]) -> None:
    text, expected = "# head\n", {}
    for key, value in pairs:
        expected[key,] = text.count("\n") + 1
        text += f"{key}.inner = {value}  # tail = 1\n"
    tomllib.loads(text)
    lines = _Scan(text).run()
    for path, line in expected.items():
        assert lines[path] == line
        assert lines[(*path, "inner")] == line


ROW = {"lie": "swap-weights", "trials": 200, "caught": 190, "settings": "exact, 8 segments", "device": "sse4"}


def table(folder: Path, document: object) -> Path:
    path = folder / "rates.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def rows(*entries: object) -> dict[str, object]:
    return {"format": "chipwitness-rates/1", "rows": list(entries)}


def test_a_measured_table(tmp_path: Path) -> None:
    rates = load_rates(table(tmp_path, rows(ROW)))
    book = RateBook(measured=rates)
    assert book.rate("swap-weights") == 0.95
    low, high = (book.rate("swap-weights", bound, 0.9) for bound in (IntervalEnd.LOW, IntervalEnd.HIGH))
    assert low < 0.95 < high
    assert book.is_measured("swap-weights")
    with pytest.raises(MissingRate, match="'run-old-firmware'; known: swap-weights"):
        book.rate("run-old-firmware")


def test_a_saved_table_is_read_back(tmp_path: Path) -> None:
    rates = [
        MeasuredRate(lie=lie, trials=9, caught=4, settings="s", device="d")
        for lie in ("skip-snapshots", "reorder-data")
    ]
    save_rates(tmp_path / "rates.json", rates)
    assert list(load_rates(tmp_path / "rates.json").values()) == rates
    with pytest.raises(CallerError, match="at least one row"):
        save_rates(tmp_path / "rates.json", [])
    with pytest.raises(CallerError, match="cannot write"):
        save_rates(tmp_path / "none" / "rates.json", rates)


def test_none_caught_of_ten_is_not_a_rate_of_zero() -> None:
    rate = MeasuredRate(lie="skip-snapshots", trials=10, caught=0, settings="s", device="d")
    low, high = rate.interval(0.95)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 10))
    everyone = MeasuredRate(lie="skip-snapshots", trials=10, caught=10, settings="s", device="d")
    low, high = everyone.interval(0.95)
    assert low == pytest.approx(0.025 ** (1 / 10))
    assert high == 1.0


def test_a_device_chooses_among_rows(tmp_path: Path) -> None:
    path = table(tmp_path, rows(ROW, {**ROW, "device": "avx2", "caught": 100}))
    with pytest.raises(CallerError, match="measured more than once"):
        load_rates(path)
    assert load_rates(path, device="avx2")["swap-weights"].caught == 100
    with pytest.raises(CallerError, match="no row for device 'cuda'"):
        load_rates(path, device="cuda")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be"),
        ({"rows": [ROW]}, "must be"),
        ({"format": "chipwitness-rates/2", "rows": [ROW]}, "must be"),
        ({**rows(ROW), "note": 1}, "nothing else"),
        (rows(), "has no rows"),
        (rows(1), "row 1: not an object"),
        (rows(ROW, {k: v for k, v in ROW.items() if k != "device"}), "row 2: key 'device' is missing"),
        (rows({**ROW, "note": "x"}), "row 1: key 'note' is unknown"),
        (rows({**ROW, "caught": 201}), "201 of the lies were caught, but there were only 200 trials"),
        (rows({**ROW, "trials": 0, "caught": 0}), "trials of lie 'swap-weights' must be at least 1"),
        (rows({**ROW, "trials": 2.0}), "must be a whole number"),
        (rows({**ROW, "caught": -1}), "must be at least 0"),
        (rows({**ROW, "lie": ""}), "lie must be a non-empty text"),
        (rows({**ROW, "device": None}), "device of lie"),
        (rows({**ROW, "lie": 5}), "lie must be a non-empty text"),
    ],
)
def test_a_wrong_table_is_refused(document: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=message):
        load_rates(table(tmp_path, document))


def test_a_broken_table_is_refused(tmp_path: Path) -> None:
    for content, message in (
        ('{"format": "chipwitness-rates/1", "rows": [], "rows": []}', "the key 'rows' occurs twice"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ):
        path = tmp_path / "rates.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(CallerError, match=message):
            load_rates(path)


def test_a_rate_is_measured_or_assumed_not_both(tmp_path: Path) -> None:
    table(tmp_path, rows(ROW))
    text = GOOD.replace("[detection]", '[detection]\ntable = "rates.json"')
    with pytest.raises(ScenarioError, match="both a measured and an assumed rate"):
        load_scenario(write(tmp_path, text))
    scenario = load_scenario(write(tmp_path, text.replace(', "swap-weights" = 0.5', "")))
    assert scenario.rates.rate("swap-weights") == 0.95


def test_what_the_catalogue_lacks_is_listed(tmp_path: Path) -> None:
    for holder, month, message in (
        ("Nobody", "2025-12", "no public stock of 'Nobody' at '2025-12'; known: Owner"),
        ("Owner", "2025-11", "no stock of that month; known: 2025-12"),
    ):
        text = GOOD.replace('kind = "unit"\ncount = 20\n', f'stock = "{holder}"\nas_of = "{month}"\n')
        with pytest.raises(ScenarioError, match=message):
            load_scenario(write(tmp_path, text), CATALOGUE)
    with pytest.raises(ScenarioError, match="unknown model 'GPT-9'; known: Big"):
        load_scenario(write(tmp_path, GOOD.replace("flop = 2.4e23", 'model = "GPT-9"')), CATALOGUE)


def test_a_site_may_be_undeclared_where_sites_are_searched(tmp_path: Path) -> None:
    text = GOOD.replace("samples = 4", "samples = 4\nsearches = true")
    text = text.replace('name = "south"', 'name = "south"\ndeclared = false').replace(
        'kind = "unit"\ncount = 20\n', 'kind = "unit"\ncount = 20\nstatus = "undeclared"\n'
    )
    assert [site.declared for site in load_scenario(write(tmp_path, text)).fleet.labs[0].sites] == [True, False]
