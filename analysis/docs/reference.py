"""What is generated: scenario files from their schema, the command line from its parser, tables from measurements."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import resources
from textwrap import indent

from analysis.parser import whole_help
from firmware_sim.evidence import canonical
from inspector.campaign.schema import SECTIONS, Key, policy_pages

__all__ = ["commands_page", "leaves", "precision_table", "scenario_page"]

_RESUMED = {True: "ends in the same digests", False: "ends in other digests", None: "not measured"}
_INTRODUCTION = """# Scenario files

A scenario is a TOML file: one fleet, its runs, how they are inspected, and the strategies to compare. `chipwitness
campaign --list` names the ready ones, `campaign --show NAME` prints one to start from, `campaign FILE` runs yours. A
key that is not listed here is refused, with its line.

A number, share or whole number may be uncertain, as a text: `"LOW/MEDIAN/HIGH"` (5, 50 and 95 %),
`"lognormal(LOW,HIGH)"`, `"triangular(LOW,MODE,HIGH)"`, `"uniform(LOW,HIGH)"` or `"table(VALUE:WEIGHT,...)"`. It is read
as its median; `campaign` adds bands.
"""
_COMMANDS = """# Commands

`--help` shows the everyday options, `--help-all` shows all. A TOML file can hold options, each under its name without
dashes: `chipwitness plan --config plan.toml`. The options of the command line come after those of the file.
`--print-config` prints the file that repeats a call, and does nothing else.
"""


def scenario_page() -> str:
    """Return the reference of scenario files as Markdown."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.header}\n\n{section.text[:1].upper()}{section.text[1:]}.\n")
        if section.keys:
            parts.append(_table(("key", "holds", "default", "meaning"), (_cells(key) for key in section.keys)))
    parts.append("## Policies\n\nOf a `[[strategy]]`, applied in order.\n")
    rows = (
        (f"`{page.name}`", ", ".join(_parameter(*each) for each in page.parameters.items()) or "–", page.text)
        for page in policy_pages()
    )
    parts.append(_table(("policy", "parameters", "what it does"), rows))
    return "\n".join(parts)


def commands_page(parser: argparse.ArgumentParser) -> str:
    """Return the help of every command as Markdown."""
    parts = [_COMMANDS]
    for name, each in leaves(parser):
        folded = indent(f"```text\n{whole_help(each).strip()}\n```", "    ")
        first = (each.description or "").partition("\n")[0]
        parts.append(f'## {name}\n\n{first}\n\n??? note "Options of {name}"\n\n{folded}\n')
    return "\n".join(parts)


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command below a parser that runs, with the words that call it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for each in group.choices.values():
            yield from leaves(each)


def precision_table() -> str:
    """Return what was measured of loops in mixed precision as a Markdown table."""
    text = resources.files("analysis").joinpath("data", "precision.json").read_text(encoding="utf-8")
    rows = canonical.loads(text)["rows"]
    cells = (
        (
            " ".join([row["work"], *(f"({name} {number})" for name, number in row.get("versions", {}).items())]),
            row["mode"],
            f"{row['outcome']}; {_RESUMED[row.get('resumed')]}",
            f"{row['loss']:.4f}; {row['native_loss']:.4f} ± {row['native_deviation']:.4f}",
        )
        for row in rows
    )
    return _table(("loop", "numerics", "inspected; killed and resumed", "loss; native's"), cells)


def _parameter(name: str, default: str | None) -> str:
    return f"`{name}`" if default is None else f"`{name}` = {default}"


def _cells(key: Key) -> tuple[str, ...]:
    return f"`{key.name}`", key.kind, "–" if key.default is None else f"`{key.default}`", key.text


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
