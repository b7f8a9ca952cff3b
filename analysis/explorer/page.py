"""The explorer's page: one file with data, closed forms and charting library inside, and no need of a network."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Mapping
from importlib import metadata, resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analysis.explorer.answers import CONTROLS
from analysis.glossary import chapters
from analysis.version import version
from firmware_sim.errors import CallerError

__all__ = ["LARGEST", "explorer_page"]

LARGEST = 5_000_000
"""Bytes that a page may have."""


def explorer_page(
    *, campaigns: Mapping[str, Any], runs: Mapping[str, Any] | None, command: str, report: str | None = None
) -> str:
    """Return the page as HTML.

    Args:
        campaigns: as ``precomputed`` returns them.
        runs: as ``opened_runs`` returns them, or None.
        command: that makes the page.
        report: name of a report next to the page, to link to.

    Raises:
        CallerError: it would be larger than ``LARGEST``.
    """
    source, library = _library()
    data = {
        "controls": [dataclasses.asdict(control) for control in CONTROLS],
        "campaigns": campaigns,
        "runs": runs,
    }
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_part("explorer.html.j2"))
    page = template.render(
        command=command,
        version=version(),
        library=f"plotly.js from the package plotly {library}, MIT licence",
        library_source=Markup(base64.b64encode(gzip.compress(source, mtime=0)).decode("ascii")),
        style=Markup(_part("explorer.css")),
        closed_forms=Markup(_part("closed_forms.js")),
        sketch=Markup(_part("sketch.js")),
        script=Markup(_part("explorer.js")),
        data=_as_script(data),
        has_runs=runs is not None,
        words=chapters(),
        report=report,
    )
    size = len(page.encode("utf-8"))
    if size > LARGEST:
        raise CallerError(
            f"the page would have {size:,} bytes, but at most {LARGEST:,} are allowed: explore a single run"
        )
    return page


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _library() -> tuple[bytes, str]:
    """The charting library's script, and the version of the package that holds it."""
    script = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    return script.read_bytes(), metadata.version("plotly")


def _as_script(data: object) -> Markup:
    """JSON that stays JSON inside a script element: no text in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
