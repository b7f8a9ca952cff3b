"""The manual as a folder of HTML that works from disk."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analysis.docs.reference import commands_page, precision_table, scenario_page
from analysis.version import version
from firmware_sim.errors import CallerError, file_error
from monitor.files import write_whole

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

_LINK = re.compile(r"^## (.+)$|^- \[(.+?)\]\(([^)#]+\.md)\)", re.MULTILINE)
_CODE = re.compile(r"<code[^>]*>.*?</code>", re.DOTALL)
_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_WORD = re.compile(r"<[^>]*>|[^\s<>]*-[^\s<>]*")
_FIGURES = {"<!-- table: precision -->": precision_table}
"""What a page holds where a table of measurements comes."""
_GENERATED = {"commands": "Commands", "scenario": "Scenario files"}


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the manual; ``reader`` is the heading of ``index.md`` that lists it."""

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
        progress: receives each page that is written.

    Raises:
        CallerError: the folder cannot be written, a module is unknown, or the extra ``docs`` is not installed.
    """
    texts = {"commands": commands_page(parser), "scenario": scenario_page()}
    pages = [*_listed(), *(_Page("Reference", title, name, texts[name]) for name, title in _GENERATED.items())]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, page in enumerate(order := [_front(bool(api)), *pages]):
            path = folder / f"{page.name}.html"
            around = order[max(place - 1, 0) : place], order[place + 1 : place + 2]
            write_whole(path, _html(page, pages, *around).encode())
            written.append(path)
            progress(path.name)
        if api:
            _write_api(folder / "api", api)
            written.append(folder / "api" / "index.html")
            progress("api")
    except OSError as error:
        raise file_error(f"{folder} cannot be written", error) from None
    return written


def _listed() -> list[_Page]:
    """Return the pages that ``index.md`` links to, in its order."""
    pages, reader = [], ""
    for heading, title, link in _LINK.findall(_text("index.md")):
        reader = heading or reader
        if link:
            pages.append(_Page(reader, title, _name(link), _text(link)))
    return pages


def _front(api: bool) -> _Page:
    links = [f"- [{title}]({name}.md)" for name, title in _GENERATED.items()]
    links += ["- [Python](api/index.html): every public function"] if api else []
    return _Page("", f"Chipwitness {version()}", "index", _text("index.md") + "\n".join(links) + "\n")


def _name(link: str) -> str:
    """Return the name of the page that a link leads to; the README of a folder has that folder's."""
    path = PurePosixPath(link)
    return path.parent.name if path.stem == "README" else path.stem


def _html(page: _Page, pages: Sequence[_Page], before: Sequence[_Page], after: Sequence[_Page]) -> str:
    """Return a page of our own Markdown."""
    try:
        from markdown2 import markdown as rendered
    except ImportError:
        raise CallerError("the manual needs the extra docs: pip install -e '.[docs]'") from None
    body = rendered(page.text, extras=["tables", "fenced-code-blocks", "header-ids", "toc"])
    linked = re.sub(r'href="([^":#]+\.md)', lambda link: f'href="{_name(link[1])}.html', str(body))
    linked = _CODE.sub(lambda code: _WORD.sub(_whole, code[0]), _TABLE.sub(_with_heads, linked))
    template = resources.files(__package__).joinpath("templates", "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template).render(
        page=page,
        body=Markup(linked),
        headings=Markup(body.toc_html) if page.reader and page.text.count("\n## ") > 2 else "",
        readers={reader: [each for each in pages if each.reader == reader] for reader in (p.reader for p in pages)},
        before=before,
        after=after,
        version=version(),
    )


def _whole(found: re.Match[str]) -> str:
    """Return an option's name as one box, which no line ends within; a tag as it is."""
    return found[0] if found[0].startswith("<") else f'<span class="word">{found[0]}</span>'


def _with_heads(table: re.Match[str]) -> str:
    """Return a table whose cells know their column's heading, for screens on which cells lie below each other."""
    heads = [re.sub("<[^>]*>", "", each) for each in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    cells = itertools.cycle(heads)
    return re.sub("<td", lambda _: f'<td data-head="{next(cells)}"', table[0])


def _text(name: str) -> str:
    text = resources.files(__package__).joinpath(*name.split("/")).read_text(encoding="utf-8")
    for mark, table in _FIGURES.items():
        text = text.replace(mark, table()) if mark in text else text
    return text


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
