"""The explorer in a browser: whether its JavaScript equals Python, how fast it draws, and that it asks for nothing."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.bench._browser import browser
from analysis.bench.origin import write
from analysis.explorer.answers import answers, random_points
from analysis.explorer.campaign_tables import precomputed
from analysis.explorer.page import explorer_page
from analysis.scenarios import ready_scenarios
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from monitor import processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["TOLERANCE", "answers_in_javascript", "furthest", "run", "table", "verdict", "write"]

TOLERANCE = 1e-9
"""Largest relative difference between an answer in JavaScript and in Python."""

_PARTS_OF = {"excess": "detection"}
"""What is taken from another answer, and so loses digits where both are close: compared relative to that one."""

_SLIDES = 50
_MEASURE = """async (slides) => {
  const plot = document.getElementById("plot");
  const slider = document.getElementById("slider-flop");
  const times = [];
  for (let place = 0; place < slides; place++) {
    const begun = performance.now();
    const drawn = new Promise((done) => plot.once("plotly_afterplot", done));
    slider.value = 300 + 8 * place;
    slider.dispatchEvent(new Event("input"));
    await drawn;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - begun);
  }
  return {times, first: performance.getEntriesByName("picture")[0].startTime,
    charts: performance.getEntriesByName("charts")[0].startTime};
}"""


def answers_in_javascript(
    points: Sequence[Mapping[str, float]], chromium: Browser | None = None
) -> list[dict[str, float | None]]:
    """Return what the page's script answers at each point, by Chromium if one is given, else by node.

    Raises:
        CallerError: none is given and node is not there.
        DeviceError: the script failed.
    """
    script = resources.files("analysis.explorer").joinpath("templates", "closed_forms.js").read_text(encoding="utf-8")
    if chromium is not None:
        page = chromium.new_page()
        page.add_script_tag(content=script)
        answered: list[dict[str, float | None]] = page.evaluate(
            "points => points.map(closedForms.answers)", list(points)
        )
        page.close()
        return answered
    node = shutil.which("node")
    if node is None:
        raise CallerError("node is not installed")
    script += 'console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(closedForms.answers)));'
    done = processes.run([node, "-e", script], given=json.dumps(points))
    if done.returncode:
        raise DeviceError(f"node failed: {done.stderr.strip().splitlines()[-1:]}")
    found_by_node: list[dict[str, float | None]] = canonical.loads(done.stdout)
    return found_by_node


def furthest(wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest relative difference of each answer; infinite where only one of two is missing."""
    worst = dict.fromkeys(wanted[0], 0.0)
    for right, other in zip(wanted, found, strict=True):
        if set(right) != set(other):
            raise DeviceError("JavaScript and Python do not answer the same questions")
        for name, value in right.items():
            worst[name] = max(worst[name], _apart(value, other[name], right[_PARTS_OF.get(name, name)]))
    return worst


def _apart(one: float | None, other: float | None, scale: float | None) -> float:
    if one == other:
        return 0.0
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), abs(scale or 0.0))


def run(*, points: int = 10_000, seed: int = 1) -> list[dict[str, object]]:
    """Compare and measure; return rows with work, value, unit and ``most``, the largest value that is accepted.

    Raises:
        CallerError: there is no Chromium or no playwright.
    """
    settings = random_points(points, np.random.default_rng(seed))
    wanted = [answers(each) for each in settings]
    campaigns = precomputed(list(ready_scenarios()), trials=100, seed=seed)
    text = explorer_page(campaigns=campaigns, runs=None, command="chipwitness bench explore")
    with tempfile.TemporaryDirectory() as folder, browser() as found:
        path = Path(folder) / "explorer.html"
        path.write_text(text, encoding="utf-8")
        worst = furthest(wanted, answers_in_javascript(settings, found))
        page = found.new_page(viewport={"width": 1280, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        measured = page.evaluate(_MEASURE, _SLIDES)
    others = len([each for each in asked if each != path.as_uri()])
    rows = [
        {"work": f"JavaScript against Python: {name}", "value": value, "most": TOLERANCE, "unit": "relative"}
        for name, value in worst.items()
    ]
    rows += [
        {"work": "size of the page", "value": len(text.encode()), "most": 5_000_000, "unit": "bytes"},
        {"work": "requests other than the page", "value": others, "most": 0, "unit": "requests"},
        {"work": "opened to first picture", "value": measured["first"], "most": 2_000, "unit": "ms"},
        {"work": "opened to charts that answer a pointer", "value": measured["charts"], "most": 10_000, "unit": "ms"},
        {
            "work": f"slider to picture, median of {_SLIDES}",
            "value": statistics.median(measured["times"]),
            "most": 100,
            "unit": "ms",
        },
    ]
    return [{"points": points, "seed": seed, **row} for row in rows]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row."""
    return [f"{row['work']:48} {row['value']:>14.6g} {row['unit']:10} at most {row['most']:g}" for row in rows]


def verdict(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is more than is accepted, or None."""
    over = [row["work"] for row in rows if not row["value"] <= row["most"]]
    return f"more than accepted: {', '.join(over)}" if over else None
