"""The explorer's page: the same numbers as Python and the command line, in a browser, from disk, for everybody."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from analysis.bench import _browser
from analysis.bench.explore import TOLERANCE, answers_in_javascript, furthest, verdict
from analysis.cli import main
from analysis.explorer import page as page_module
from analysis.explorer.answers import CONTROLS, answers, defaults, random_points
from inspector.probability.detection import samples_needed

needs_browser = pytest.mark.skipif(_browser.missing() is not None, reason=str(_browser.missing()))
DRAWN = Path(__file__).with_name("drawn.js").read_text(encoding="utf-8")
FOREIGN = "</script><img src=x onerror=window.hit=1><b onclick=window.hit=1>lab</b>"


@pytest.fixture(scope="module")
def browser():
    with _browser.browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A page with a run whose name, chips and verdict are hostile."""
    place = tmp_path_factory.mktemp("explorer")
    run = place / "run<img src=x onerror=window.hit=1>"
    (run / "chips" / "<b>chip<").mkdir(parents=True)
    about = {
        "outcome": FOREIGN,
        "reasons": [{"guard": FOREIGN, "text": FOREIGN}],
        "evidence": {"drawn_chips": [FOREIGN], "replays": [{"device": FOREIGN}], "chances": [{"lie": FOREIGN}]},
    }
    (place / "verdict.json").write_text(json.dumps(about))
    out = place / "e.html"
    words = ["explore", str(run), "--verdict", str(place / "verdict.json"), "--out", str(out)]
    assert main([*words, "--campaign", "regimes", "--trials", "20"]) == 0
    return place


def opened_at(browser, folder, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto((folder / "e.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture(scope="module")
def wide(browser, folder):
    return opened_at(browser, folder, 1280)


@pytest.fixture
def page(wide):
    """The page at 1,280 px, as it is when it is opened."""
    return follow(wide, "#view=1")


def follow(page, link):
    """Go where a link leads, which begins from the start values."""
    page.evaluate("() => { location.hash = ''; }")
    page.evaluate(
        "link => new Promise(done => { addEventListener('hashchange', () => setTimeout(done), {once: true});"
        " location.hash = link; })",
        link,
    )
    return page


@pytest.mark.parametrize("engine", ["chromium", "node"])
def test_javascript_answers_as_python_does(engine, request):
    if engine == "node" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    if engine == "chromium" and (why := _browser.missing()) is not None:
        pytest.skip(why)
    chromium = request.getfixturevalue("browser") if engine == "chromium" else None
    points = [defaults(), *random_points(150, np.random.default_rng(7))]
    worst = furthest([answers(each) for each in points], answers_in_javascript(points, chromium))
    assert max(worst.values()) <= TOLERANCE, worst


def test_a_difference_is_noticed():
    right: dict[str, Any] = {**answers(defaults())}
    assert max(furthest([right], [right]).values()) == 0
    assert furthest([right], [right | {"detection": right["detection"] * (1 + 1e-8)}])["detection"] > TOLERANCE
    assert furthest([right], [right | {"median_day": None}])["median_day"] == np.inf
    rows = [{"work": "a", "value": 2.0, "most": 1.0}, {"work": "b", "value": float("nan"), "most": 1.0}]
    assert verdict(rows) == "more than accepted: a, b"
    assert verdict([{"work": "a", "value": 1.0, "most": 1.0}]) is None


def test_answers_are_those_of_equation_1():
    at = defaults()
    run = {name: at[name] for name in ("flop", "chips", "days", "period", "rate", "confidence", "flop_per_day")}
    assert answers(at)["per_period"] == samples_needed(**run)


def test_smuggled_chips_only_help_the_prover():
    caught = [cast(float, answers(defaults() | {"smuggled": stock})["detection"]) for stock in (0.0, 100.0, 300.0, 1e4)]
    assert caught == sorted(caught, reverse=True)
    assert caught[0] >= 0.9
    assert caught[-1] == 0


def test_sliders_start_within_their_ends():
    assert all(each.low <= each.value <= each.high for each in CONTROLS)
    assert len({each.name for each in CONTROLS}) == len(CONTROLS)


@needs_browser
@pytest.mark.parametrize("width", [420, 1280])
def test_the_page_opens_from_disk_without_a_request_a_fault_or_a_scroll_bar(browser, folder, wide, width):
    from axe_playwright_python.sync_playwright import Axe

    page = wide if width == 1280 else opened_at(browser, folder, width)
    assert [url for url in page.asked if not url.startswith("file:")] == []
    assert len(page.asked) == 1
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


@needs_browser
def test_foreign_text_stays_text(page):
    assert page.evaluate("window.hit") is None
    assert FOREIGN in page.inner_text("#verdict")
    assert page.locator("img, #verdict b, #run-plot b").count() == 0
    assert "<b>chip<" in page.text_content("#run-data")
    assert "<b>chip<" in page.text_content("#run-plot")
    assert "run<img" in page.text_content("#run")


@needs_browser
def test_the_commands_on_the_page_print_the_numbers_on_the_page(page, capsys):
    follow(page, "#view=1&flop=3e25&smuggled=700&refusals=0.02&days=300&period=45&figure=days")
    shown = json.loads(page.get_attribute("#answers", "data-exact"))
    assert shown["hidden"] > 0
    assert shown["tolerated"] > 0
    first, second, third = page.inner_text("#commands").splitlines()
    capsys.readouterr()
    assert main([*shlex.split(first)[1:], "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)
    for name in ("per_period", "per_year", "inspectors", "chips_needed"):
        assert samples[name] == pytest.approx(shown[name], rel=TOLERANCE)
    assert main([*shlex.split(third)[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["any"] == pytest.approx(shown["found"], rel=TOLERANCE)
    assert main([*shlex.split(second)[1:], "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][int(shown["tolerated"])]
    for name, other in (("detection",) * 2, ("false_alarm",) * 2, ("posterior",) * 2, ("likelihood_ratio", "ratio")):
        assert row[name] == pytest.approx(shown[other], rel=TOLERANCE)


@needs_browser
def test_a_link_restores_its_view_and_nonsense_in_one_changes_nothing(page):
    page.locator("#number-chips").fill("54321")
    page.locator("#figure").select_option("alarms")
    link = page.get_attribute("#view-link", "href")
    before = page.get_attribute("#answers", "data-exact")
    follow(page, "#view=1")
    assert page.get_attribute("#answers", "data-exact") != before
    follow(page, link)
    assert page.get_attribute("#answers", "data-exact") == before
    assert page.input_value("#figure") == "alarms"
    follow(page, "#view=1&chips=-5&flop=NaN&days=7.5&figure=<b>&rate=")
    assert json.loads(page.get_attribute("#answers", "data-exact")) == pytest.approx(answers(defaults()))
    assert page.errors == []


@needs_browser
def test_every_control_has_a_name_and_the_keyboard_reaches_it(page):
    wanted = page.evaluate(
        "Array.from(document.querySelectorAll('input, select, button, a[href], summary'),"
        " each => each.id || each.textContent)"
    )
    reached = []
    for _ in range(3 * len(wanted)):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert set(wanted) <= set(reached)
    page.locator("#slider-flop").focus()
    before = page.input_value("#number-flop")
    page.keyboard.press("ArrowRight")
    assert float(page.input_value("#number-flop")) > float(before)
    for each in page.get_by_role("slider").all():
        assert each.get_attribute("aria-label")
    for control in CONTROLS:
        assert page.get_by_label(re.compile(re.escape(control.label))).count() == 2


@needs_browser
def test_every_figure_draws_what_it_offers_for_download(page):
    follow(page, "#view=1&smuggled=50&refusals=0.01")
    figures = page.evaluate("Array.from(document.querySelectorAll('#figure option'), each => each.value)")
    assert len(figures) == 6
    for figure in figures:
        page.locator("#figure").select_option(figure)
        page.locator("#plot path.js-line").first.wait_for(state="attached")
        with page.expect_download() as csv:
            page.locator("#plot-actions").get_by_text("Data (CSV)").click()
        lines = csv.value.path().read_text().splitlines()
        assert lines[0].startswith("line,")
        assert all(np.isfinite(float(line.rsplit(",", 1)[1])) for line in lines[1:])
    # Once: a browser stops a page that saves more than ten files in a row.
    with page.expect_download() as picture:
        page.locator("#plot-actions").get_by_text("Figure (SVG)").click()
    assert "<svg" in picture.value.path().read_text()
    assert page.errors == []


@needs_browser
def test_the_first_picture_needs_no_library(browser, folder):
    """What a browser shows before the library is unpacked, and all that one gets which cannot unpack it."""
    page = browser.new_page(viewport={"width": 420, "height": 900})
    page.add_init_script("delete window.DecompressionStream")
    page.goto((folder / "e.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("performance.getEntriesByName('picture').length") == 1
    assert page.evaluate("performance.getEntriesByName('charts').length") == 0
    for figure in page.evaluate("Array.from(document.querySelectorAll('#figure option'), each => each.value)"):
        page.locator("#figure").select_option(figure)
        lines = page.evaluate(
            "Array.from(document.querySelectorAll('#plot path.js-line'), each => each.getBBox().width)"
        )
        assert lines
        assert min(lines) > 100
        outside = page.evaluate(
            "() => { const box = document.querySelector('#plot svg').getBoundingClientRect();"
            " return Array.from(document.querySelectorAll('#plot text'), each => each.getBoundingClientRect())"
            ".filter(each => each.left < box.left || each.right > box.right + 8 || each.bottom > box.bottom).length; }"
        )
        assert outside == 0
        assert [each for each in page.evaluate(DRAWN) if each.startswith(("labels", "clipped"))] == []
    with page.expect_download() as picture:
        page.locator("#plot-actions").get_by_text("Figure (SVG)").click()
    assert "<svg" in picture.value.path().read_text()
    page.close()


@needs_browser
def test_a_program_and_a_dispute_are_drawn_and_foreign_words_stay_text(browser, folder, tmp_path, monkeypatch):
    from analysis.explorer import runs

    nodes = [["state", FOREIGN, None, 0], ["call", FOREIGN, 0, 1], ["call", "aten.mul.Tensor", 1, 2]]
    graph = {"program": FOREIGN, "calls": 3, "views": 1, "left_out": 0, "nodes": nodes, "edges": [[0, 1], [1, 2]]}
    monkeypatch.setattr(runs, "program_graphs", lambda run: {"programs": [graph], "left_out": 0, "problem": None})
    demo = tmp_path / "demo"
    (demo / "runs" / "a" / "chips").mkdir(parents=True)
    search = [
        ["step", 0, 6, True],
        ["step", 6, 6, False],
        [FOREIGN, 3, 6, True],
        ["step", -1],
        ["operator", 2, 9, False],
    ]
    about = {"outcome": FOREIGN, "reasons": [{"text": FOREIGN}], "evidence": {"search": search, "step": 4}}
    (demo / "summary.json").write_text(json.dumps({"dispute": about}))
    assert (
        main(["explore", str(demo), "--out", str(tmp_path / "e.html"), "--campaign", "paper-table-1", "--trials", "9"])
        == 0
    )
    page = opened_at(browser, tmp_path, 1280)
    assert page.evaluate("window.hit") is None
    assert page.errors == []
    assert page.locator("img, #dispute b, #runs b").count() == 0
    assert FOREIGN in page.inner_text("#dispute-text")
    assert page.locator("#dispute-data tr").count() == 1 + 1 + 1 + 4
    assert page.locator("#dispute-plot .points path").count() == 3
    assert page.locator("#program-plot .points path").count() == 3
    assert FOREIGN in page.text_content("#program-data")
    page.close()


def test_a_page_too_large_a_wrong_name_and_no_run_are_refused(tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "e.html")
    few = ["--campaign", "regimes", "--trials", "1"]
    assert main(["explore", "--out", str(tmp_path / "e.pdf")]) == 2
    assert main(["explore", str(tmp_path), "--out", out]) == 2
    assert main(["explore", "--verdict", out, "--out", out]) == 2
    assert main(["explore", "--out", out, "--campaign", "no such"]) == 2
    monkeypatch.setattr(page_module, "LARGEST", 1_000_000)
    assert main(["explore", "--out", out, *few]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert "there are no chips in it" in errors[1]
    assert "at most 1,000,000" in errors[4]
    assert not (tmp_path / "e.html").exists()
