"""What a browser draws of the explorer: no box over a box, no label over a label, no cut text, the right numbers."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from analysis.bench import _browser
from analysis.cli import main
from analysis.explorer.answers import answers, defaults, random_points
from analysis.scenarios import ready_scenarios
from inspector.probability.detection import stretch_detection

pytestmark = pytest.mark.skipif(_browser.missing() is not None, reason=str(_browser.missing()))

DRAWN = Path(__file__).with_name("drawn.js").read_text(encoding="utf-8")
WIDTHS = (420, 768, 1280)
TRIALS = 5
LONG = "0123456789abcdef" * 4


def verdict_of_a_run() -> dict[str, object]:
    """A verdict with nearly equal reasons, and values of every kind that JSON knows."""
    reasons = [
        {"guard": "snapshot", "text": f"chip lab-chip-000{place}, record {place}: the snapshot {LONG} is unexplained"}
        for place in range(9)
    ]
    replay = {"device": "sse41", "segments": [0, 1, 2], "segments_in_run": 3, "steps": 12345, "equal": False}
    chances = [{"lie": "another state for two ticks", "probability": 0.7364028618842732}]
    evidence = {"drawn_chips": ["lab-chip-0000"], "replays": [replay], "chances": chances, "chips": []}
    return {"outcome": "REJECT", "reasons": [*reasons, {"guard": "meter", "text": "x"}], "evidence": evidence}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page with every ready scenario and a run."""
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "run" / "chips" / "lab-chip-0000").mkdir(parents=True)
    (folder / "v.json").write_text(json.dumps(verdict_of_a_run()))
    words = ["--verdict", str(folder / "v.json"), "--out", str(folder / "e.html"), "--trials", str(TRIALS)]
    assert main(["explore", str(folder / "run"), *words]) == 0
    return folder / "e.html"


@pytest.fixture(scope="module")
def loaded(made):
    """The page, opened on a phone."""
    with _browser.browser() as chromium:
        page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900})
        page.goto(made.as_uri())
        page.wait_for_selector("html[data-ready]")
        yield page


@pytest.fixture
def page(loaded):
    """The page on a phone, whatever width it had before."""
    return resized(loaded, WIDTHS[0])


def resized(page, width):
    if page.viewport_size["width"] != width:
        page.set_viewport_size({"width": width, "height": 900})
        # Not wait_for_function, which the page's policy forbids.
        page.evaluate("""() => new Promise(done => {
            const plots = Array.from(document.querySelectorAll(".plot")).filter(each => each.clientWidth);
            const fits = each => Math.abs(each.querySelector("svg").clientWidth - each.clientWidth) < 4;
            const look = () => plots.every(fits) ? done() : setTimeout(look, 30);
            look();
        })""")
    return page


def wrong_with(page) -> list[str]:
    """What is wrong with the page once it has painted."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(DRAWN)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_and_scenario_twice_in_random_order_is_drawn_whole(loaded, width):
    page = resized(loaded, width)
    choices = [
        (of, value)
        for of in ("figure", "scenario")
        for value in page.evaluate(f"Array.from(document.getElementById('{of}').options, each => each.value)")
    ]
    assert len(choices) == 6 + len(ready_scenarios())
    order = choices * 2
    random.Random(38).shuffle(order)
    found: dict[Any, Any] = {}
    for of, value in order:
        page.locator(f"#{of}").select_option(value)
        found |= dict.fromkeys(wrong_with(page), value)
    assert found == {}
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert wrong_with(page) == []
    page.emulate_media(media="print")
    assert [each for each in wrong_with(page) if "labels" not in each and "wider" not in each] == []
    page.emulate_media(media="screen")


def test_alike_reasons_are_one_with_the_others_below_it(page):
    assert page.locator("#verdict > ul > li").count() == 2
    assert "8 more alike" in page.text_content("#verdict")
    cells = page.locator("#verdict table").first.locator("tbody tr").first.locator("th, td").all_text_contents()
    assert cells == ["sse41", "0, 1, 2", "3", "12,345", "no"]


def test_a_value_out_of_range_is_named_where_it_was_written_and_changes_nothing(page):
    before = page.get_attribute("#answers", "data-exact")
    page.locator("#number-flop").fill("5e30")
    line = page.locator("#wrong-flop")
    assert line.text_content() == "5e30 is not used: write a number from 1e22 to 1e28 FLOP. Answers are for 1e25."
    assert page.get_attribute("#answers", "data-exact") == before
    assert wrong_with(page) == []
    page.locator("#number-flop").fill("2e25")
    assert line.is_hidden()
    page.evaluate("location.hash = '#view=1&chips=-5&days=7.5&figure=days&colour=red'")
    page.locator("#unused").wait_for(state="visible")
    assert page.text_content("#unused").endswith("it is left out: chips=-5, days=7.5, colour=red.")
    page.evaluate("location.hash = '#view=1'")
    page.locator("#unused").wait_for(state="hidden")


def test_an_impossible_run_is_caught_with_no_probability(page):
    page.evaluate("location.hash = '#view=1&flop=5.153e27&smuggled=63'")
    page.get_by_text("cannot be done: it needs 163,401 chips for 365 days, and there are 100,063").wait_for()
    assert "%" not in page.text_content("#summary")
    shown = json.loads(page.get_attribute("#answers", "data-exact"))
    assert shown == pytest.approx(answers(defaults() | {"flop": 5.153e27, "smuggled": 63.0}))
    assert shown["detection"] is shown["caught"] is shown["posterior"] is shown["found"] is None
    assert "this one cannot be done" in page.text_content("#plot-caption")
    assert wrong_with(page) == []
    page.evaluate("location.hash = '#view=1'")


def test_a_stretched_run_uses_its_smuggled_chips():
    at = defaults()
    alone, joined = (cast(dict[str, float], answers(each)) for each in (at, at | {"smuggled": 40.0}))
    share = alone["share"]
    assert alone["stretch"] == pytest.approx(float(stretch_detection(stretch=4, share=share, confidence=0.9)))
    assert alone["stretch"] > joined["stretch"] > 0
    assert answers(at | {"smuggled": 80.0})["stretch"] == 0


def test_each_number_shown_is_its_command_s_at_random_settings(page, capsys):
    points = [
        at
        for at in random_points(9, np.random.default_rng(38))
        if cast(float, answers(at)["chips_needed"]) <= at["chips"]
    ]
    assert len(points) >= 4
    for at in points[:3]:
        link = "&".join(f"{name}={value!r}".replace("e+", "e") for name, value in at.items())
        page.evaluate("location.hash = '#view=1'")
        page.evaluate(
            "link => new Promise(done => { addEventListener('hashchange', () => setTimeout(done), {once: true});"
            " location.hash = link; })",
            f"#view=1&{link}",
        )
        assert page.locator("#unused").is_hidden()
        rows = page.evaluate(
            "Array.from(document.querySelectorAll('#answers tbody tr'),"
            " row => Array.from(row.cells, each => each.textContent))"
        )
        shown = {name: value.replace(",", "") for name, value in rows}
        samples, alarms = (shlex.split(line) for line in page.inner_text("#commands").splitlines()[:2])
        capsys.readouterr()
        assert main([*samples[1:], "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        for label, key in (("chips a visit by Eq. 1", "per_period"), ("chips a year", "per_year")):
            assert float(shown[label]) == pytest.approx(printed[key], rel=1e-3)
        assert main([*alarms[1:], "--json"]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][
            int(shown["chips tolerated at a visit that could not be shown"])
        ]
        for label, key in (("caught, worst evasion", "detection"), ("honest lab accused", "false_alarm")):
            assert float(shown[label].removesuffix(" %")) / 100 == pytest.approx(row[key], rel=1e-3, abs=1e-12), label


def test_each_number_of_a_scenario_is_its_command_s(page, capsys):
    for name in ("regimes", "draft-agreement"):
        page.locator("#scenario").select_option(name)
        capsys.readouterr()
        words = shlex.split(page.inner_text("#campaign-command"))
        assert main([*words[1:], "--json"]) == 0
        regimes = json.loads(capsys.readouterr().out)["regimes"]
        rows = page.evaluate(
            "Array.from(document.querySelectorAll('#campaign-table tbody tr'),"
            " row => Array.from(row.cells, each => each.textContent))"
        )
        for place, regime in enumerate(regimes):
            column = {row[0]: row[1 + place] for row in rows}
            for cell in regime["cells"]:
                day = "" if cell["delay"] is None else f", day {cell['delay']:g}"
                assert column[cell["strategy"]].lstrip("~=") == f"{cell['detection']:.3f}{day}", cell
                assert column[cell["strategy"]].startswith("=") == (cell["exact"] and not cell["evidence"])
            assert column["honest labs accused"] == f"{regime['false_alarm']:.4f}"
            assert column["chips inspected a year"] == f"{regime['samples_per_year']:,}"
            assert column["cost a year"] == f"{regime['cost_per_year']:,.0f}"
