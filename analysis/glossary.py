"""The glossary as data: for the manual, and for pages that link to a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup, escape

__all__ = ["Chapter", "chapters", "glossary_text"]

_CODE = re.compile(r"`([^`]+)`")
_STRESS = re.compile(r"(\*\*?)([^*]+)\1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A heading with its words; ``words`` has pairs of word and meaning, as HTML."""

    title: str
    words: tuple[tuple[Markup, Markup], ...]


def glossary_text() -> str:
    """Return the glossary as Markdown."""
    return resources.files(__package__).joinpath("data", "glossary.md").read_text(encoding="utf-8")


def chapters(titles: Sequence[str] = ()) -> tuple[Chapter, ...]:
    """Return the chapters of these titles, by default all."""
    found: list[tuple[str, list[tuple[Markup, Markup]]]] = []
    for line in glossary_text().splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif line.startswith("| ") and found and not line.startswith("| word |"):
            word, meaning = (_marked(cell.strip()) for cell in line.strip("|").split("|", 1))
            found[-1][1].append((word, meaning))
    return tuple(Chapter(title=title, words=tuple(words)) for title, words in found if not titles or title in titles)


def _marked(text: str) -> Markup:
    """Return our own text with its marks for code and stress as HTML."""
    coded = _CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(_STRESS.sub(r"<em>\2</em>", coded))
