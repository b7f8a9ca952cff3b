"""The self-contained report of a demo: one HTML file with its figures inside, and a PDF of it where Chromium is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from analysis.explorer.runs import opened_runs
from analysis.glossary import chapters
from analysis.report import comparison, equality, figures
from analysis.report.style import Axes, Origin
from analysis.words import alike, odds_rows, parts, plainly
from monitor import processes
from monitor.files import write_whole

__all__ = ["glossary_page", "write_report"]

_PDF_SECONDS = 120
_LONG = re.compile(r"\b[0-9a-f]{24,}\b")
_SHOWN = 12
_SIZE = (4.4, 3.7)
"""Inches of a figure, whose text is read on a phone."""


def write_report(out: Path, summary: dict[str, Any]) -> None:
    """Draw the figures (SVG) and write ``report.html`` and, where Chromium is, ``report.pdf`` under ``out``."""
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    drawn = {name: _svg(path, name) for name, path in _draw(folder, out / "runs", summary).items()}
    table = equality.load(equality.COMMITTED)
    shown = {"hardware": table["hardware"], "works": equality.summary(table["rows"])}
    tables = {"equality": shown, "schemes": comparison.load()}
    html = _rendered("report.html.j2", summary=summary, figures=drawn, drawn_lab=shown_lab(summary), **tables)
    write_whole(out / "report.html", html.encode())
    _print(out / "report.html", out / "report.pdf")


def glossary_page() -> str:
    """Return the glossary as HTML, to go with a report."""
    return _rendered("glossary.html.j2", chapters=chapters())


def _rendered(template: str, **values: object) -> str:
    source = resources.files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "plainly": plainly,
        "shortened": _shortened,
        "alike": alike,
        "parts": parts,
        "odds": odds_rows,
    }
    return environment.from_string(source).render(**values)


def _draw(folder: Path, runs: Path, summary: dict[str, Any]) -> dict[str, Path]:
    detection, origin = summary["detection"], Origin(command=summary["made"]["command"], seed=summary["made"]["seed"])
    closed = Origin(command=summary["made"]["command"])
    drawings: dict[str, Callable[[Axes], None]] = {
        "timeline": lambda axes: _timeline(axes, runs, shown_lab(summary)),
        "detection": lambda axes: figures.detection_curve(
            axes,
            chips=detection["chips"],
            used=detection["chips"],
            catch=detection["catch_per_chip"],
            confidence=0.9,
            mark=detection["drawn"],
            title="Catching a model that is in memory for two ticks",
        ),
        "stretch": figures.stretch_figure,
        "chips": lambda axes: figures.chips_figure(axes, flops={"GPT-3": 3.14e23, "PaLM": 2.56e24, "1e26 FLOP": 1e26}),
    }
    paths = {name: folder / f"{name}.svg" for name in drawings}
    for name, draw in drawings.items():
        made = origin if name in ("timeline", "detection") else closed
        write_whole(paths[name], figures.drawn(draw, title=name, origin=made, size=_SIZE))
    return paths


def shown_lab(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the lab whose chips' time line is drawn: the first with an unexplained snapshot, else the first."""
    labs: list[dict[str, Any]] = summary["labs"]
    return next((lab for lab in labs if any(each["unexplained_records"] for each in lab["evidence"]["chips"])), labs[0])


def _timeline(axes: Axes, runs: Path, lab: dict[str, Any]) -> None:
    found = opened_runs(runs / lab["lab"])["runs"][0]["chips"]
    wrong = {each["chip"]: each["unexplained_records"] for each in lab["evidence"]["chips"]}
    names = {each["name"]: each["name"].removeprefix(f"{lab['lab']}-") for each in found}
    figures.timeline_figure(
        axes,
        chips={names[each["name"]]: [(event[0], event[1]) for event in each["events"]] for each in found},
        kinds={"COMMIT": "step committed", "SNAPSHOT": "snapshot", "BOOT": "boot", "QUOTE": "quote"},
        wrong={
            names[each["name"]]: [each["events"][int(place)][0] for place in wrong.get(each["name"], ())]
            for each in found
        },
        title=f"What the chips of {lab['lab']} recorded",
    )


def _svg(path: Path, name: str) -> Markup:
    """The drawing alone, as one picture named by its caption. Our own figure, so it needs no escaping."""
    text = path.read_text(encoding="utf-8")
    return Markup(text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-labelledby="{name}-caption" ', 1))


def _shortened(text: str) -> Markup:
    """Text in which a digest is as long as somebody compares by eye; the whole of it is its title."""
    parts, end = [], 0
    for found in _LONG.finditer(text):
        parts.append(escape(text[end : found.start()]))
        parts.append(Markup('<span class="mono" title="{}">{}…</span>').format(found[0], found[0][:_SHOWN]))
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def _print(page: Path, pdf: Path) -> None:
    """Let Chromium print the page, if it is there; a report without its PDF is a report all the same."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return
    # Without its sandbox, since containers run as root; the page is our own.
    words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    draft = pdf.resolve().with_suffix(".new.pdf")
    try:
        command = [*words, f"--print-to-pdf={draft}", page.resolve().as_uri()]
        if processes.run(command, timeout=_PDF_SECONDS).returncode == 0 and draft.is_file():
            draft.replace(pdf)
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:
        draft.unlink(missing_ok=True)
