"""Broken scenarios: of every key wrong in kind, sign, order or unit, one line names file, line and key; none passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.cli import main
from analysis.scenarios import public_catalogue, ready_scenarios, scenario_text
from inspector.campaign import ScenarioError, load_regimes
from inspector.campaign.schema import NUMBER, SECTIONS, SHARE, SWITCH, TABLE, TEXT, TEXTS, WHOLE, policy_pages

WHOLE_FILE = """\
title = "all keys"
description = "one of each"
days = 480
money = "USD 2026"

[rule]
threshold_flop = 1e25
exempt_chips = 16
evidence = "whole-run"

[inspection]
period_days = 30
samples = 20
confidence = 0.9
snapshot_rate = 0.1
sampling = "pooled"
replacement = false
redraw = true
log = "period"
honest_refusal_rate = 0.001
refusals_allowed = 2
false_alarms = 0.1
searches = true
search_chips = 50
aggregates = 0.3
loss_rate_per_year = 0.005
loss_alarm = 0.005
inspectors = 3
chips_per_inspector_year = 1000
inspector_cost = 300000
fixed_cost = 10000000
evidence = ["taps", "satellites", "books"]
evidence_false_alarms = 0.05

[detection]
table = "rates.json"
device = "sse4"
settings = "exact"
assumed = { undeclared-run = 1.0, undeclared-chips = 0.9 }

[[evidence]]
name = "taps"
source = "assumed"
group = "physical"
detection = 0.9
evaded = 0.5
per = "run"
false_alarm = 0.01

[[evidence]]
name = "satellites"
found_per_year = 0.5
at_megawatts = 50
exponent = 1.0
least_megawatts = 2
concealed = 0.5

[[evidence]]
name = "books"
error_chips = 80000
explained = 0.4
false_alarm = 0.003

[dependence]
physical = 0.3

[[kind]]
name = "chip"
flop_per_second = 1e15
link_gbps = 900
watts = 1400

[[lab]]
name = "Country"
[[lab.site]]
name = "halls"
[[lab.site.chips]]
kind = "chip"
count = 100000
status = "registered"
[[lab.site.chips]]
stock = "xAI"
as_of = "2025-12"
share = 0.5
[[lab.site]]
name = "cave"
declared = false
age_days = 180
sites = 2
idle_power = 0.1
[[lab.site.chips]]
kind = "chip"
count = 20000
status = "undeclared"

[[run]]
name = "run"
lab = "Country"
flop = 2e25
days = 120
start = 30
utilisation = 0.4

[[run]]
name = "another"
lab = "Country"
model = "Grok-2"
times = 1.1
days = 90

[[strategy]]
name = "as planned"

[[strategy]]
name = "swaps"
policies = [{ policy = "weight-swap" }]
evades = ["taps"]
"""
RATES = '{"format": "chipwitness-rates/1", "rows": [{"lie": "swap-weights", "trials": 9, "caught": 4, '
RATES += '"settings": "exact", "device": "sse4"}]}'
REGIME = '[[regime]]\nname = "strict"\nsource = "Baker et al. 2025"\nthreshold_flop = 2e24\n'
REGIME += "assumed = { swap-weights = 0.9 }\n"
FILES = {
    "one regime": WHOLE_FILE,
    "several": WHOLE_FILE.replace("[inspection]\n", REGIME).replace(
        'table = "rates.json"\ndevice = "sse4"\nsettings = "exact"\n', ""
    ),
    "a model's": WHOLE_FILE.replace("threshold_flop = 1e25", 'model = "Llama-2-70B"\ntimes = 1.5'),
}
UNITS = {  # what somebody writes who thinks of another unit
    r"days|period_days|start|age_days": 86_400,
    r"threshold_flop|flop": 1e-21,
    r"flop_per_second": 1e-12,
    r"link_gbps": 1e9,
    r"watts": 1e-3,
    r"at_megawatts|least_megawatts": 1e6,
    r".*": 1e12,
}
KINDS = {
    NUMBER: ['"many"', "true", "[1]", "{ a = 1 }", "nan", "inf", '""'],
    SHARE: ['"many"', "true", "[1]", "nan", "-inf"],
    WHOLE: ['"many"', "true", "[1]", "2.5", "nan"],
    TEXT: ["5", "true", "[]", "{ a = 1 }"],
    TEXTS: ["5", "[5]", '["nobody"]'],
    SWITCH: ['"yes"', "1"],
    TABLE: ["5", "{ no-lie = 0.5 }"],
}


def lines(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Return each key that stands at the beginning of a line: its number, table, name and value."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.fullmatch(r"\[+([a-z.]+)\]+", line):
            table = header.group(1)
        elif pair := re.fullmatch(r"([a-z_]+) = (.*)", line):
            yield number, table, pair.group(1), pair.group(2)


def wrong(kind: str, name: str, value: str) -> Iterator[str]:
    """Return values that are wrong in kind, sign, order and unit."""
    base = next((each for each in (NUMBER, SHARE, WHOLE) if kind.startswith(each)), kind)
    yield from KINDS.get(base, ["5", '"nonsense"', "true"])
    if base in (NUMBER, SHARE, WHOLE):
        yield from (f"-{value}", "-1", '"3/2/1"', '"uniform(3,1)"')
    if base == SHARE:
        yield from ("40", '"20/40/60"')
    elif base in (NUMBER, WHOLE):
        factor = next(each for pattern, each in UNITS.items() if re.fullmatch(pattern, name))
        far = float(value) * factor
        yield from (f"{far:g}", f'"uniform({far / 2:g},{far:g})"')


def broken() -> Iterator[tuple[str, str, int, str, str]]:
    keys = {(section.path, key.name): key.kind for section in SECTIONS for key in section.keys}
    keys |= {("regime", name): kind for (path, name), kind in keys.items() if path == "inspection"}
    seen = set()
    for label, text in FILES.items():
        for number, table, name, value in lines(text):
            if (table, name) not in keys or (table, name, value) in seen:
                continue
            seen.add((table, name, value))
            for bad in wrong(keys[table, name], name, value):
                yield label, f"{table}.{name} = {bad}", number, name, bad
    missing = (
        set(keys) - {each[:2] for each in seen} - {("lab", "site"), ("lab.site", "chips"), ("strategy", "policies")}
    )
    assert not missing, missing


def with_line(text: str, number: int, name: str, value: str) -> str:
    parts = text.splitlines()
    parts[number - 1] = f"{name} = {value}"
    return "\n".join(parts) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rates.json").write_text(RATES)
    return tmp_path


def load(folder: Path, text: str) -> None:
    (folder / "s.toml").write_text(text, encoding="utf-8")
    load_regimes(folder / "s.toml", public_catalogue())


def test_every_key_wrong_in_kind_sign_order_and_unit_is_named_with_its_line(folder: Path) -> None:
    for text in FILES.values():
        load(folder, text)
    passed, misplaced, number = [], [], 0
    for label, what, line, name, value in broken():
        number += 1
        try:
            load(folder, with_line(FILES[label], line, name, value))
        except ScenarioError as error:
            text = str(error)
            if not text.startswith(f"s.toml, line {line}: ") or name not in text or "\n" in text:
                misplaced.append(f"{line} {what}: {text}")
        else:
            passed.append(what)
    assert number > 700
    assert not passed, "\n".join(passed)
    assert not misplaced, "\n".join(misplaced)


PARAMETERS = {
    "stretch": "factor = 3",
    "rush": "factor = 2",
    "waves": "groups = 2",
    "divert": 'status = "undeclared", share = 0.1',
    "consumer": "communication = 0.3, reference_gbps = 900, share = 0.001",
    "firmware": 'lie = "run-old-firmware", snapshot_share = 0.1',
    "weight-swap": 'lie = "swap-weights"',
    "spoof": 'lie = "fake-layers"',
    "chain": 'parts = 4, lie = "chained-runs"',
    "split": 'labs = ["South"]',
    "stay-under": "times = 1.5",
    "collude": 'labs = ["South"]',
    "pause-when-drawn": "periods = 1",
    "quit-when-drawn": "limit = 3",
    "shrink-when-drawn": "factor = 2",
}
RIGHT = {("consumer", "communication", "0"), ("firmware", "snapshot_share", "0")}


def test_every_parameter_of_a_policy_wrong_in_kind_sign_order_and_unit_is_named(tmp_path: Path) -> None:
    pages = {page.name: set(page.parameters) for page in policy_pages() if page.parameters}
    assert pages == {name: {part.split(" = ")[0] for part in given.split(", ")} for name, given in PARAMETERS.items()}
    head = scenario_text("evasions").partition("[[strategy]]")[0].replace("flop = 2e25", "flop = 1.6e25")
    head += '[[strategy]]\nname = "as planned"\n[[strategy]]\nname = "it"\npolicies = [\n'
    path, line = tmp_path / "s.toml", head.count("\n") + 1

    def load(policy: str, given: str) -> None:
        path.write_text(f'{head}    {{ policy = "{policy}", {given} }},\n]\n', encoding="utf-8")
        load_regimes(path, public_catalogue())

    number, wrongly = 0, []
    for policy, given in PARAMETERS.items():
        load(policy, given)
        for part in given.split(", "):
            key, value = part.split(" = ")
            words = value[0] in '["'
            bads = ["5", "[]", '"x"', '""', '["x"]'] if words else ['"x"', "[1]", "nan", "-1", '"3/2/1"', "0", "1e12"]
            for bad in (*bads, "true", "{ a = 1 }"):
                if (policy, key, bad) in RIGHT:
                    continue
                number += 1
                try:
                    load(policy, given.replace(part, f"{key} = {bad}"))
                    wrongly.append(f"{policy}.{key} = {bad} passed")
                except ScenarioError as error:
                    if not re.match(rf"s\.toml, line {line}: [^\n]*$", str(error)):
                        wrongly.append(f"{policy}.{key} = {bad}: {error}")
    assert number > 150
    assert not wrongly, "\n".join(wrongly)


@pytest.mark.parametrize("bad", ['"x"', "true", "[1]", "-0.3", "30", "nan", '"0.5/0.3/0.1"'])
@pytest.mark.parametrize(
    ("ready", "good", "key"),
    [
        ("evidence", '"physical" = 0.3', "physical"),
        ("evidence", "undeclared-chips = 0.9", "undeclared-chips"),
        ("regimes", "swap-weights = 1.0", "swap-weights"),
    ],
)
def test_rates_by_name_are_shares(ready: str, good: str, key: str, bad: str, tmp_path: Path) -> None:
    text = scenario_text(ready)
    at = text[: text.index(good)].count("\n") + 1
    (tmp_path / "s.toml").write_text(text.replace(good, f"{good.split(' = ')[0]} = {bad}", 1), encoding="utf-8")
    with pytest.raises(ScenarioError, match=rf"s\.toml, line {at}: [^\n]*{key}"):
        load_regimes(tmp_path / "s.toml", public_catalogue())


BY_HAND: dict[str, tuple[str, str, str, str]] = {
    # what is wrong: (shipped scenario, its words, the broken ones, part of the message)
    "four runs of 1.25e25 under a cap of 1e25": (
        "regimes", 'policy = "chain", parts = 5', 'policy = "chain", parts = 4',
        "parts: strategy 'split into five runs', run 'above the cap': chain.parts: each of 4 runs spends 1.25e+25 FLOP",
    ),
    "two parts above the cap": ("regimes", "parts = 5", "parts = 2", "each of 2 runs spends 2.5e+25 FLOP, above"),
    "one part too few": ("evasions", "flop = 2e25", "flop = 5e25", "each of 4 runs spends 1.25e+25 FLOP"),
    "ten smuggled chips": ("regimes", "count = 140000", "count = 10", "the undeclared chips of 'Country' do"),
    "a share that the stock cannot do": (
        "evasions", 'status = "lost", share = "stock"', 'status = "lost", share = 1',
        "the lost chips of 'North' do",
    ),
    "measured, by nobody": (
        "regimes", "Shavit 2023, arXiv 2303.11341: Eq. 1's samples, a month, 0.1 snapshots per chip and day",
        "measured", "source: 'measured' does not say where to look",
    ),
    "a source without a place": (
        "evidence",
        "assumed: 97 %, and 48 to 88 % with evasion, are stated of classifiers without a source that can be named",
        "classifiers of power draw", "source: 'classifiers of power draw' does not say where",
    ),
    "a workload's rate, as it was shipped": (
        "evidence", "assumed for a run; arXiv 2606.19262 states 98.2 %, and 43 to 87 % with evasion, per workload",
        "arXiv 2606.19262: 98.2 %, and 43 to 87 % with evasion",
        "detection: is cited from a source: write 'per = \"run\"' if the source states it for whole runs",
    ),
    "a workload's rate, cited": (
        "evidence", "detection = 0.982", 'detection = 0.982\nper = "workload"',
        "a chance per 'workload' is not a chance per run",
    ),
    "a horizon shorter than a run": ("regimes", "days = 480", "days = 100", "days: the runs of strategy"),
    "a horizon shorter than a period": ("evidence", "days = 480", "days = 20", "one period of 30 days"),
    "a horizon in seconds": ("regimes", "days = 480", "days = 41472000", "days: must be between 1 and 36525"),
    "a run in months": ("real-stocks", "days = 120", "days = -4", "days: must be between"),
    "a threshold in units of 1e25": ("evidence", "threshold_flop = 1e25", "threshold_flop = 1", "threshold_flop: must"),
    "percent": ("evidence", "utilisation = 0.4", "utilisation = 40", "utilisation: must be between 0 and 1, got 40"),
    "evasion that helps": ("evidence", "evaded = 0.5", "evaded = 0.95", "must not be above the detection"),
    "a range that falls": ("evidence", '"0.2/0.5/1.5"', '"1.5/0.5/0.2"', "found_per_year: must be a number: 1.5/0"),
    "a search of no site": ("evidence", "searches = true\n", "", "search_chips: has no effect without"),
    "losses that nobody tests": ("evasions", "loss_alarm = 0.005", "", "has no effect without 'loss_alarm'"),
    "nothing is cut short": ("paper-table-1", "times = 1.5", "times = 15", "times: strategy 'stay under 1.5 H'"),
    "a partner that is none": ("evidence", 'labs = ["Partner"]', 'labs = ["Nobody"]', "labs: strategy 'split with"),
    "one lab as text": ("evidence", 'labs = ["Partner"]', "labs = 5", "must be a non-empty list of lab names"),
    "more groups than chips": ("evasions", "groups = 2", "groups = 50", "waves.groups: needs"),
    "stretched over the horizon": ("regimes", "factor = 3 }", "factor = 30 }", "stretch.factor: the runs of strategy"),
    "a part that is no part": ("evidence", "flop = 1.2e25", "flop = 4.6e25", "the part of 'Country' is"),
    "a partner too small": ("evidence", "count = 40000", "count = 4000", "above the threshold of 1e+25"),
    "a firmware that keeps more than all": ("regimes", "snapshot_share = 0.1", "snapshot_share = 10", "between 0 and"),
    "a share of nothing": ("evasions", 'status = "lost", share = "stock"', 'status = "lost", share = 0', "above 0"),
    "a lab with itself": ("evasions", 'labs = ["South"]', 'labs = ["North"]', "'North' is the lab of the run itself"),
    "two of a name": ("evidence", 'name = "Partner"', 'name = "Country"', "another [[lab]] is named 'Country'"),
    "evidence twice": ("regimes", 'name = "tips"', 'name = "books of chips"', "another [[evidence]] is named"),
    "another month": (
        "real-stocks-1e25", '"Oracle", as_of = "2025-12"', '"Oracle", as_of = "2026-11"', "no stock of that month"
    ),
    "a run after the horizon": (
        "regimes", "flop = 5e25\ndays = 120", "flop = 5e25\ndays = 120\nstart = 600", "start: strategy 'as",
    ),
    "a group misspelt": ("evidence", '"physical" = 0.3', '"phisical" = 0.3', "phisical: no [[evidence]] has the"),
    "a lie misspelt": (
        "evasions",
        'policy = "spoof"',
        'policy = "spoof", lie = "fake-layer"',
        "for the lie 'fake-layer'; known: chain",
    ),
    "all drawn chips may be missing": (
        "evasions", 'refusals_allowed = "fewest"', "refusals_allowed = 20", "all 20 drawn chips may be",
    ),
    "an alarm that is rarer in a violation": (
        "evidence", "detection = 0.9\nevaded = 0.5", "detection = 0.01\nevaded = 0.005", "below the rate of",
    ),
    "consumer chips of a lab without any": (
        "evasions", 'count = 3000, status = "exempt"', "count = 3000", "'North' has no exempt chips",
    ),
    "nobody inspects": ("evasions", "samples = 20", "samples = 20\ninspectors = 0", "0 inspectors cannot examine"),
    "never found at the power that its rate is for": (
        "evidence", "least_megawatts = 2", "least_megawatts = 200", "least_megawatts: is above the power",
    ),
    "a threshold above the run": (
        "regimes", "threshold_flop = 1e25", "threshold_flop = 1e26", "flop: no more than the threshold of 1e+26",
    ),
    "more drawn than there are": (
        "evasions", "samples = 20", "samples = 300000", "300000 cannot be drawn from the 200000 chips",
    ),
    "a run that its lab cannot do": ("evasions", "flop = 2e25", "flop = 2e27", "own only 3.418e+24 (80000 chips)"),
    "an age of a declared site": (
        "evidence", "declared = false\nage_days = 180", "age_days = 180", "has no effect at a declared site",
    ),
    "two kinds of evidence": (
        "evidence", "detection = 0.9\n", "detection = 0.9\nfound_per_year = 1\n", "detection: unknown key; known: name",
    ),
    "evidence that nobody has": ("regimes", 'evades = "all"', 'evades = ["satelites"]', "no evidence is named 'satel"),
    "money without a year": ("regimes", "USD 2026", "USD", "money: 'USD' is not a currency with the year"),
    "a cost below zero": ("regimes", "inspector_cost = 300000", "inspector_cost = -300000", "between 0 and 1e+09, got"),
    "rooms too large to be exempt": (
        "draft-agreement", "exempt_chips = 16", "exempt_chips = 8", "exempts 16 H100 equivalents at 'small rooms'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_broken_by_hand(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready, old, new, message = BY_HAND[name]
    text = scenario_text(ready)
    assert text.count(old) >= 1
    path = tmp_path / f"{ready}.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert main(["campaign", str(path), "--trials", "10"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert re.match(rf".*{ready}\.toml, line \d+: [a-z_]+[\[.a-z_\]0-9]*: ", line), line
    assert message in line


def test_errors_of_shipped_scenarios_name_the_key_that_was_changed(tmp_path: Path) -> None:
    """Not the head of a table: a table's line says nothing about which of its numbers is wrong."""
    elsewhere = []
    for name, (ready, old, new, _) in BY_HAND.items():
        text = scenario_text(ready)
        at = text[: text.index(old)].count("\n") + 1
        path = tmp_path / f"{ready}.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(ScenarioError) as raised:
            load_regimes(path, public_catalogue())
        line = int(re.search(r"line (\d+)", str(raised.value)).group(1))  # type: ignore[union-attr]
        if not at <= line <= at + new.count("\n"):
            elsewhere.append(name)
    # Two keys contradict one another here, and the other one is named.
    assert elsewhere == [
        "one part too few", "a share that the stock cannot do", "a workload's rate, as it was shipped",
        "a horizon shorter than a period",
        "losses that nobody tests", "a part that is no part", "a partner too small",
        "consumer chips of a lab without any", "a threshold above the run",
    ]  # fmt: skip


def test_shipped_scenarios_keep_their_promises() -> None:
    for name, file in ready_scenarios().items():
        assert load_regimes(Path(str(file)), public_catalogue()), name
