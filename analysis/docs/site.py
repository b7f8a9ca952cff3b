"""The manual as a folder of HTML that works from disk, built by Zensical and mkdocstrings."""

from __future__ import annotations

import argparse
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from analysis.docs.reference import commands_page, precision_table, scenario_page
from analysis.version import version
from firmware_sim.errors import CallerError, file_error

__all__ = ["API", "write_site"]

API = (
    "inspector.probability",
    "inspector.campaign",
    "inspector.inspection",
    "monitor.recording",
    "monitor.lab.simulated_lab",
    "firmware_sim",
)
"""Packages whose API pages are written unless the caller names others."""

_ENTRY = re.compile(r"^## (.+)$|^- \[(.+?)\]\(([^)#]+\.md)\)", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^):#]+\.md)")
_FIGURES = {"<!-- table: precision -->": precision_table}
"""What a page holds where a table of measurements comes."""
_WORKER, _STYLE = "iframe-worker.js", "words.css"
_SETTINGS: dict[str, object] = {
    "site_name": "Chipwitness",
    "use_directory_urls": False,
    "theme": {
        "name": "material",
        "font": False,
        "features": ["content.code.copy", "navigation.footer", "navigation.top"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
    },
    "extra_css": [_STYLE],
    "extra": {"generator": False, "polyfills": [_WORKER]},
    "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.details", "pymdownx.highlight"],
}
_PYTHON = {
    "docstring_style": "google",
    "filters": "public",
    "heading_level": 2,
    "members_order": "source",
    "separate_signature": True,
    "show_root_toc_entry": False,
    "show_source": False,
}
"""Options of mkdocstrings: the names in ``__all__``, in the order of the source."""


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the manual.

    Attributes:
        reader: the heading of ``index.md`` that lists it, or the package that an API page is of.
        name: its path without the ending.
    """

    reader: str
    title: str
    name: str
    text: str


def write_site(
    folder: Path,
    parser: argparse.ArgumentParser,
    *,
    api: Sequence[str] = API,
    progress: Callable[[str], object] = lambda name: None,
) -> list[Path]:
    """Write the manual; existing pages are replaced.

    Args:
        folder: is made if it is not there.
        parser: the parser of all commands.
        api: packages and modules whose API pages are written, below ``api``; empty: none.
        progress: receives the name of each page before all are built.

    Returns:
        The pages, in the order in which they follow each other.

    Raises:
        CallerError: the folder cannot be written, a module is unknown, or the extra ``docs`` is not installed.
    """
    packages = {name: list(_modules(_spec(name))) for name in api}
    pages = [*_listed(), _Page("Reference", "Commands", "commands", commands_page(parser))]
    pages.append(_Page("Reference", "Scenario files", "scenario", scenario_page()))
    for name, modules in packages.items():
        pages += [_Page(name, each, f"api/{each}", f"# {each}\n\n::: {each}\n") for each in modules]
    more = "- [Commands](commands.md)\n- [Scenario files](scenario.md)\n"
    more += "".join(f"- [`{name}`](api/{name}.md): the Python API\n" for name in packages)
    order = [_Page("", "Start", "index", _linked("index.md") + more), *pages]
    with TemporaryDirectory() as place:
        _build(Path(place), order, api, progress)
        try:
            shutil.copytree(Path(place, "site"), folder, dirs_exist_ok=True)
        except OSError as error:
            raise file_error(f"{folder} cannot be written", error) from None
    return [folder / f"{page.name}.html" for page in order]


def _build(place: Path, pages: Sequence[_Page], api: Sequence[str], progress: Callable[[str], object]) -> None:
    """Have the site built in ``place/site``."""
    readers: dict[str, list[dict[str, str]]] = {page.reader: [] for page in pages if page.reader}
    for page in pages:
        path = place / "docs" / f"{page.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text, "utf-8")
        progress(page.name)
        if page.reader:
            readers[page.reader].append({page.title: f"{page.name}.md"})
    for name in (_WORKER, _STYLE):
        (place / "docs" / name).write_text(_resource("templates", name), "utf-8")
    handler = {"paths": sorted({_root(name) for name in api}), "options": _PYTHON}
    python = [{name: readers.pop(name)} for name in dict.fromkeys(api)]
    nav = [{"Start": "index.md"}, *({reader: each} for reader, each in readers.items())]
    settings = _SETTINGS | {
        "copyright": f"Chipwitness {version()}",
        "nav": nav + ([{"Python": python}] if python else []),
        "plugins": ["search", "offline", {"mkdocstrings": {"handlers": {"python": handler}}}],
    }
    (place / "mkdocs.yml").write_text(json.dumps(settings), "utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(place / "mkdocs.yml")]
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        raise CallerError("the manual needs the extra docs: pip install -e '.[docs]'")
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CallerError(f"the manual cannot be built: {' '.join((done.stdout + done.stderr).split())}")


def _listed() -> Iterator[_Page]:
    """Yield the pages that ``index.md`` links to, in its order."""
    reader = ""
    for heading, title, link in _ENTRY.findall(_text("index.md")):
        reader = heading or reader
        if link:
            yield _Page(reader, title, _name(link), _linked(link))


def _name(link: str) -> str:
    """Return the name of the page that a link leads to; the README of a folder has that folder's."""
    path = PurePosixPath(link)
    return path.parent.name if path.stem == "README" else path.stem


def _linked(name: str) -> str:
    """Return a text whose links lead to pages of the manual, which all lie in one folder."""
    return _LINK.sub(lambda link: f"{_name(link[1])}.md", _text(name))


def _text(name: str) -> str:
    text = _resource(*name.split("/"))
    for mark, table in _FIGURES.items():
        text = text.replace(mark, table()) if mark in text else text
    return text


def _resource(*path: str) -> str:
    return resources.files(__package__).joinpath(*path).read_text(encoding="utf-8")


def _spec(name: str) -> ModuleSpec:
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise CallerError(f"there is no module {name!r} whose API could be written")
    return found


def _root(module: str) -> str:
    """Return the folder that a module is imported from."""
    spec = _spec(module.partition(".")[0])
    return str(Path((spec.submodule_search_locations or [spec.origin or ""])[0]).parent)


def _modules(spec: ModuleSpec) -> Iterator[str]:
    """Yield the public modules of a package, of which packages alone are imported."""
    yield spec.name
    for each in pkgutil.iter_modules(spec.submodule_search_locations or [], f"{spec.name}."):
        if not each.name.rpartition(".")[2].startswith("_"):
            yield from _modules(_spec(each.name))
