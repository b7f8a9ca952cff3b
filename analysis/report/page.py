"""The self-contained report of a demo: one HTML file with its figures inside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analysis.report import equality, figures
from analysis.report.style import Origin

__all__ = ["write_report"]

_ORIGIN = Origin(command="chipwitness demo")


def write_report(out: Path, summary: dict[str, Any]) -> None:
    """Draw the figures (SVG) and write ``report.html`` under ``out``."""
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    drawn = {name: _svg(path) for name, path in _draw(folder, summary).items()}
    source = resources.files(__package__).joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    table = equality.load(equality.COMMITTED)
    shown = {"hardware": table["hardware"], "works": equality.summary(table["rows"])}
    html = template.render(summary=summary, figures=drawn, equality=shown)
    (out / "report.html").write_text(html, encoding="utf-8")


def _draw(folder: Path, summary: dict[str, Any]) -> dict[str, Path]:
    detection = summary["detection"]
    paths = {name: folder / f"{name}.svg" for name in ("detection", "stretch", "chips")}
    figures.detection_curve(
        paths["detection"],
        chips=detection["chips"],
        used=detection["chips"],
        catch=detection["catch_per_chip"],
        confidence=0.9,
        mark=detection["drawn"],
        title="Catching the hidden steps",
        origin=_ORIGIN,
    )
    figures.stretch_figure(paths["stretch"], origin=_ORIGIN)
    figures.chips_figure(paths["chips"], flops={"GPT-3": 3.14e23, "PaLM": 2.56e24, "1e26 FLOP": 1e26}, origin=_ORIGIN)
    return paths


def _svg(path: Path) -> Markup:
    """The drawing alone, without the XML prologue, for use inside HTML. Our own figure, so it needs no escaping."""
    text = path.read_text(encoding="utf-8")
    return Markup(text[text.index("<svg") :])
