"""The manual as a folder of HTML that works from disk."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analysis.docs.reference import commands_page, scenario_page
from analysis.glossary import glossary_text
from analysis.version import version
from firmware_sim.errors import CallerError, file_error
from monitor.files import write_whole

__all__ = ["API", "write_site"]

API = ("inspector.probability", "inspector.campaign", "inspector.inspection", "monitor.recording", "firmware_sim")
"""Packages whose API pages are written unless the caller names others."""

_PAGES = {
    "tutorial": "From a question to a figure",
    "commands": "Commands",
    "scenario": "Scenario files",
    "glossary": "Glossary",
}


def write_site(
    folder: Path,
    commands: Mapping[str, argparse.ArgumentParser],
    *,
    api: Sequence[str] = API,
    progress: Callable[[str], object] = lambda name: None,
) -> list[Path]:
    """Write the manual; existing pages are replaced.

    Args:
        folder: is made if it is not there.
        commands: parsers of the command line by name.
        api: packages and modules whose API pages are written, below ``api``; empty: none.
        progress: told each page that is written.

    Raises:
        CallerError: the folder cannot be written, a module is unknown, or the extra ``docs`` is not installed.
    """
    pages = {
        "tutorial": _data("tutorial.md"),
        "commands": commands_page(commands),
        "scenario": scenario_page(),
        "glossary": glossary_text(),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"index": _index(bool(api)), **pages}.items():
            path = folder / f"{name}.html"
            write_whole(path, _html(text, _PAGES.get(name, "Manual")).encode())
            written.append(path)
            progress(path.name)
        if api:
            _write_api(folder / "api", api)
            written.append(folder / "api" / "index.html")
            progress("api")
    except OSError as error:
        raise file_error(f"{folder} cannot be written", error) from None
    return written


def _index(api: bool) -> str:
    links = "\n".join(f"- [{title}]({name}.html)" for name, title in _PAGES.items())
    more = "\n- [Python](api/index.html): every public function, with shapes, units, errors and sources" if api else ""
    return (
        f"# Chipwitness {version()}\n\n{links}{more}\n\nThe report of an inspection is written by `chipwitness demo`, "
        "beside it an explorer with sliders; `chipwitness explore` writes one for any run. Cell by cell: the notebook "
        "`analysis/story.ipynb`.\n"
    )


def _html(markdown: str, title: str) -> str:
    """Return a page of our own Markdown."""
    try:
        from markdown2 import markdown as rendered
    except ImportError:
        raise CallerError("the manual needs the extra docs: pip install -e '.[docs]'") from None
    body = rendered(markdown, extras=["tables", "fenced-code-blocks", "header-ids"])
    template = resources.files(__package__).joinpath("templates", "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template).render(
        title=title, body=Markup(str(body)), pages=_PAGES, version=version()
    )


def _data(name: str) -> str:
    return resources.files(__package__).joinpath("data", name).read_text(encoding="utf-8")


def _write_api(folder: Path, api: Sequence[str]) -> None:
    try:
        import pdoc
    except ImportError:
        raise CallerError("API pages need the extra docs: pip install -e '.[docs]'") from None
    for name in api:
        if not _is_module(name):
            raise CallerError(f"there is no module {name!r} to write API pages of")
    pdoc.render.configure(docformat="google", footer_text=f"Chipwitness {version()}")
    pdoc.pdoc(*api, output_directory=folder)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
