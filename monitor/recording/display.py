"""What a recorder shows of itself: a line, and in a notebook a table."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Shown"]

_LINE = {"step": "step ", "refusals": "refusals ", "numerics": "", "chips": "chips ", "state": ""}
"""The facts that the line has, with the label before each."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How far a recorder came.

    Attributes:
        title: names it.
        facts: values by name.
    """

    title: str
    facts: Mapping[str, object]

    def line(self) -> str:
        """As ``repr`` shows it."""
        parts = [f"{before}{self.facts[name]}" for name, before in _LINE.items() if name in self.facts]
        return f"<{self.title}: {', '.join(parts)}>"

    def table(self) -> str:
        """As a notebook shows it: HTML in which all names and values are escaped."""
        rows = [
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in self.facts.items()
        ]
        return f"<table><caption>{html.escape(self.title)}</caption>{''.join(rows)}</table>"
