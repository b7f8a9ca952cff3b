"""The main job, whole: its verdicts, its summary and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.bench import _browser
from analysis.cli import main
from analysis.demo import LABS, as_expected
from analysis.explorer.runs import opened_runs
from analysis.report import page
from analysis.report.page import _shortened
from analysis.words import alike, odds_rows, plainly, said
from tests.analysis.test_false_alarms import alone

DRAWN = (Path(__file__).parent / "explorer" / "drawn.js").read_text(encoding="utf-8")
needs_browser = pytest.mark.skipif(_browser.missing() is not None, reason=str(_browser.missing()))

TEMPLATE = Path(page.__file__).parent / "templates" / "report.html.j2"


@pytest.fixture(scope="module")
def out(tmp_path_factory, devices):
    """The folder of a demo with a seed of the caller's."""
    out = tmp_path_factory.mktemp("main job") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspector.devices.enter", lambda name: None)
        patch.setattr("inspector.replay.pool.DevicePool.__enter__", lambda _: devices)
        assert main(["demo", "--out", str(out), "--seed", "2026", "--processes"]) == 0
    return out


def test_demo_ends_with_the_right_verdicts_and_a_report(out, monkeypatch, capsys):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    summary = json.loads((out / "summary.json").read_text())
    assert as_expected(summary)
    assert not set(alone(summary))
    assert [(row["lab"], row["lie"]) for row in summary["labs"]] == [(lab.name, lab.lie) for lab in LABS]
    assert all({"outcome", "reasons", "evidence"} <= set(row) for row in summary["labs"])
    assert len(summary["equal_on"]) == 2
    prints = {device["fingerprint"] for device in summary["replay_devices"]}
    assert len(prints) == 2
    assert summary["training_device"]["fingerprint"] not in prints
    control = summary["control"]
    assert control["native_drift_max"] > 0
    assert control["turned_decisions"] > 0
    assert control["diverges_from_step_without_log"] >= 1
    assert summary["dispute"]["evidence"]["operators_executed"] == 1
    assert 0.5 < summary["detection"]["predicted_probability"] < 0.95
    assert summary["made"]["seed"] == 2026
    kinds = ["announcement", "heads", "draw", "answers", "order", "openings", "results"]
    assert [row["kind"] for row in summary["rounds"]["timeline"]] == kinds
    assert {entry.name for entry in (out / "parties").iterdir()} == {"inspectorate", "registry"}
    assert summary["labs"][0]["evidence"]["odds"][0]["coverage"] == 1.0
    assert summary["rounds"]["between_processes"] == "ACCEPT"
    here, there = summary["dispute"], summary["dispute"]["between_processes"]
    assert {key: here["evidence"][key] for key in ("step", "operator", "guilty")} == {
        key: there["evidence"][key] for key in ("step", "operator", "guilty")
    }
    assert {each.name for each in (out / "machines").glob("*.log")} == {"inspectorate.log", "cluster.log", "honest.log"}
    report = (out / "report.html").read_text()
    assert report.count("<svg") == len(list((out / "figures").glob("*.svg")))
    assert {part for part in summary if f"summary.{part}" not in TEMPLATE.read_text()} == {"replay_devices", "seconds"}
    assert all(lab.name in report for lab in LABS)
    assert all(text in report for text in (summary["made"]["date"], summary["made"]["version"], "seed 2026"))
    assert "src=" not in report
    assert main(["demo", "--out", str(out)]) == 2
    assert main(["demo", "--out", str(out / "other"), "--seed", "-1"]) == 2
    assert "must be at least 0" in capsys.readouterr().err


def test_the_explorer_opens_a_demo(out, tmp_path, capsys):
    page = tmp_path / "e.html"
    assert main(["explore", str(out), "--campaign", "regimes", "--trials", "5", "--out", str(page), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) >= {lab.name for lab in LABS}
    found = opened_runs(out)
    honest = next(each for each in found["runs"] if each["name"] == "honest")
    assert honest["verdict"]["outcome"] == "ACCEPT"
    assert len(honest["chips"]) == 8
    assert {"COMMIT", "SNAPSHOT"} <= {event[1] for event in honest["chips"][0]["events"]}
    assert found["dispute"]["outcome"] == "REJECT"
    assert main(["explore", str(out), "--verdict", str(out / "summary.json"), "--out", str(page)]) == 2


@needs_browser
def test_the_report_is_read_on_a_phone_in_print_and_by_a_screen_reader(out):
    from axe_playwright_python.sync_playwright import Axe

    assert (out / "report.pdf").read_bytes().startswith(b"%PDF")
    with _browser.browser() as chromium:
        for width in (420, 768, 1280):
            page = chromium.new_page(viewport={"width": width, "height": 900})
            page.goto((out / "report.html").as_uri())
            assert not page.get_by_text("the meter counts").first.is_visible()
            page.emulate_media(media="print")
            assert page.get_by_text("the meter counts").first.is_visible()
            page.emulate_media(media="screen")
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            assert page.evaluate(DRAWN) == []
            found = Axe().run(page).response["violations"]
            assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
        headings = page.get_by_role("heading", level=2).all_inner_texts()
        assert headings[:3] == ["In short", "Verdicts", "What the chips recorded"]
        tree = page.locator("body").aria_snapshot()
        places = [tree.index(text) for text in ("Inspection report", "Measured", "Simulated", "Verdicts", "A dispute")]
        assert places == sorted(places)
        assert page.locator("table").count() == page.locator("table caption").count() > 5
        assert page.locator("th:not([scope])").count() == 0
        assert page.get_by_role("img").count() == len(list((out / "figures").glob("*.svg")))
        assert page.locator("svg text").get_by_text("probability that the run is caught").count() == 1


def test_reasons_are_said_plainly_and_digests_do_not_widen_the_page():
    reasons = [{"guard": guard, "text": ""} for guard in ("meter", "meter", "scope", "<b>")]
    assert plainly(reasons) == [
        "Its chips counted more work than the declared training needs.",
        "The check “<b>” failed.",
    ]
    digest = "0123456789abcdef" * 4
    short = _shortened(f"<b> head {digest}, step 12")
    assert short == f'&lt;b&gt; head <span class="mono" title="{digest}">0123456789ab…</span>, step 12'


def test_alike_reasons_values_and_odds_are_said_once():
    reasons = [{"guard": "snapshot", "text": f"chip c-{place} took {place}"} for place in range(3)]
    found = alike([*reasons, {"guard": "meter", "text": "chip c-1 took 1"}])
    assert [(group[0], len(group) - 1) for group in found] == [("snapshot", 3), ("meter", 1)]
    assert found[0][1] == "chip c-0 took 0"
    values = [False, None, [0, 1, 2], {"a_b": [True]}, 12345, 0.7364028618842732, "x", []]
    assert list(map(said, values)) == ["no", "–", "0, 1, 2", "a b yes", "12,345", "0.736403", "x", "none"]
    each = {"text": "1 edited step", "escapes": 0.0, "needed_steps": 8}
    odds = {"replayed_steps": 8, "steps": 8, "violations": [each, each]}
    labs = [{"lab": name, "evidence": {"odds": [odds]}} for name in ("a", "b")]
    assert odds_rows(labs) == [["1 edited step", "8 of 8", "0", "8", "a, b"]]


def test_a_wrong_verdict_is_noticed():
    rows = [{"lie": None, "outcome": "ACCEPT"}, {"lie": "x", "outcome": "REJECT"}]
    good = {"labs": rows, "equal_on": ["a", "b"], "dispute": {"evidence": {"guilty": "wrong-operator"}}}
    good["rounds"] = {"outcome": "ACCEPT", "shown": "ACCEPT"}
    assert as_expected(good)
    assert not as_expected({**good, "labs": [rows[0], {"lie": "x", "outcome": "ACCEPT"}]})
    assert not as_expected({**good, "labs": [{"lie": None, "outcome": "INCONCLUSIVE"}, rows[1]]})
    assert not as_expected({**good, "equal_on": ["a"]})
    assert not as_expected({**good, "rounds": {"outcome": "ACCEPT", "shown": "REJECT"}})
    assert not as_expected({**good, "dispute": {"evidence": {"guilty": "right-operator"}}})
