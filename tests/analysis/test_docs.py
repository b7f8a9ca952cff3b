"""The manual: its reference lists every key that is read, and its pages are written with links that lead somewhere."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analysis.bench import _browser
from analysis.cli import main
from analysis.commands.dispatch import build_parser
from analysis.glossary import chapters
from analysis.scenarios import open_regimes, ready_scenarios
from inspector.campaign import POLICIES, load_scenario, scenario_files
from inspector.campaign._toml import Numbers
from inspector.campaign.schema import SECTIONS, policy_pages

EVERYTHING = """
title = "t"
days = 60
[rule]
threshold_flop = 1e22
[inspection]
period_days = 30
samples = 1
snapshot_rate = 0.1
[detection]
assumed = { undeclared-run = 1.0 }
[[kind]]
name = "k"
flop_per_second = 1e15
[[lab]]
name = "L"
site = [{ name = "s", chips = [{ kind = "k", count = 9 }] }]
[[run]]
name = "r"
lab = "L"
flop = 2e22
days = 60
[[strategy]]
name = "s"
"""


def test_the_reference_lists_every_key_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Numbers] = []

    class Kept(Numbers):
        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named)
            made.append(self)

    monkeypatch.setattr(scenario_files, "Numbers", Kept)
    for name in ready_scenarios():
        open_regimes(name)
    (tmp_path / "s.toml").write_text(EVERYTHING)
    load_scenario(tmp_path / "s.toml")
    asked: dict[str, set[str]] = {}
    for each in made:
        for path, keys in each.asked.items():
            asked.setdefault(path, set()).update(keys)
    listed = {section.path: {key.name for key in section.keys} for section in SECTIONS}
    tables = {section.path for section in SECTIONS if "." not in section.path}
    assert asked.pop("") - tables == listed.pop("")
    assert asked.pop("regime") == listed["inspection"] | listed.pop("regime")
    asked.pop("strategy.policies")
    asked.pop("dependence")
    listed.pop("dependence")
    assert {path: keys for path, keys in asked.items() if not path.endswith("assumed")} == listed


def test_every_policy_has_a_page_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert [page.name for page in policy_pages()] == list(POLICIES)
    assert all(page.text for page in policy_pages())
    assert main(["campaign", "--keys", "policies", "--json"]) == 0
    printed = {each["name"]: each["parameters"] for each in json.loads(capsys.readouterr().out)["policies"]}
    assert printed["stretch"] == {"factor": None}
    assert printed["firmware"]["snapshot_share"] == "0.0"
    assert main(["campaign", "--keys", "lab"]) == 0
    assert "[[lab.site.chips]]" in capsys.readouterr().out
    assert main(["campaign", "--keys", "nonsense"]) == 2
    assert "there is no section 'nonsense'; known: rule, inspection," in capsys.readouterr().err


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The manual with the API pages of one module, and the names of its pages in order."""
    pytest.importorskip("zensical")
    out = tmp_path_factory.mktemp("manual") / "site"
    text = io.StringIO()
    with redirect_stdout(text):
        assert main(["docs", "--out", str(out), "--api", "inspector.probability.evidence", "--json"]) == 0
    return out, json.loads(text.getvalue())["pages"]


def test_the_manual_is_written_and_its_links_lead_somewhere(manual: tuple[Path, list[str]]) -> None:
    out, pages = manual
    written = {path.stem for path in Path("analysis/docs").glob("*.md")}
    assert {f"{name}.html" for name in written | {"commands", "scenario", "glossary", "firmware_sim"}} < set(pages)
    titles = {}
    for name in pages:
        text = (out / name).read_text(encoding="utf-8")
        titles[name] = re.findall("<title>(.*?)</title>", text)
        for link, anchor in re.findall(r'href="([^"#]*)#?([^"]*)"', text):
            if not link.startswith("http"):
                target = (out / name).parent / (link or Path(name).name)
                assert target.is_file() or (target / "index.html").is_file(), (name, link)
                assert not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8"), (name, link, anchor)
    assert len({str(title) for title in titles.values()}) == len(titles)
    for before, after in pairwise(pages[:-1]):
        assert f'href="./{after}" class="md-footer__link md-footer__link--next"' in (out / before).read_text("utf-8")
        assert f'href="./{before}" class="md-footer__link md-footer__link--prev"' in (out / after).read_text("utf-8")
    reference = (out / "scenario.html").read_text(encoding="utf-8")
    assert all(f"<code>{key.name}</code>" in reference for section in SECTIONS for key in section.keys)
    measured = json.loads(Path("analysis/data/precision.json").read_text(encoding="utf-8"))["rows"]
    table = (out / "precision.html").read_text(encoding="utf-8")
    assert all(f"{row['native_loss']:.4f} ± {row['native_deviation']:.4f}" in table for row in measured)
    assert "<!-- table" not in table
    assert "chipwitness evidence weigh" in (out / "commands.html").read_text(encoding="utf-8")
    assert "best_rule" in (out / "api" / "inspector.probability.evidence.html").read_text(encoding="utf-8")


@pytest.mark.skipif(_browser.missing() is not None, reason=str(_browser.missing()))
def test_the_manual_reads_whole_on_a_phone_a_tablet_and_a_desk(manual: tuple[Path, list[str]]) -> None:
    """Without the frame that the theme draws around a page; what is too wide for a phone scrolls."""
    drawn = (Path(__file__).parent / "explorer" / "drawn.js").read_text(encoding="utf-8")
    frame = ".md-header, .md-skip, .md-sidebar, .md-top, .md-overlay, .md-footer, .md-toggle, .md-dialog, nav"
    with _browser.browser() as chromium:
        page = chromium.new_page()
        for width in (420, 768, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            for name in ("commands", "scenario", "glossary", "tutorial", "evasions", "numerics"):
                page.goto((manual[0] / f"{name}.html").as_uri())
                assert name != "commands" or page.evaluate("document.documentElement.scrollHeight") < 25_000
                page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
                page.evaluate(f"document.querySelectorAll('{frame}').forEach(each => each.remove())")
                faults = [each for each in page.evaluate(drawn) if not each.startswith("cut without a sign: ")]
                assert faults == [], (name, width)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.skipif(_browser.missing() is not None, reason=str(_browser.missing()))
def test_search_finds_a_command_from_disk_and_asks_no_network(manual: tuple[Path, list[str]]) -> None:
    asked: list[str] = []
    with _browser.browser() as chromium:
        page = chromium.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((manual[0] / "api" / "inspector.probability.evidence.html").as_uri())
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").fill("verify-log")
        page.locator("h2", has_text="chipwitness chip verify-log").first.click()
        page.wait_for_url("**/commands.html*")
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith("file:")] == []


def test_mistakes_of_the_manual_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["docs", "--out", str(tmp_path / "file"), "--no-api"]) == 2
    assert main(["docs", "--out", str(tmp_path / "site"), "--api", "no_such_module"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 2


def test_the_glossary_has_chapters_and_marks_code() -> None:
    found = {chapter.title: dict[str, str](chapter.words) for chapter in chapters()}
    assert set(found) == {"Who", "The chip", "A run", "Numerics", "Verification", "Fleets and plans"}
    assert "<code>RUN</code>" in found["A run"]["run folder"]
    assert [chapter.title for chapter in chapters(("Who",))] == ["Who"]
    assert build_parser().prog == "chipwitness"
