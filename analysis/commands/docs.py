"""``docs``: the manual, generated from schema, parser and docstrings."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish, progress

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    text = "write the manual: pages for each reader, commands, scenario files, glossary and API pages"
    parser = subparsers.add_parser(
        "docs",
        description=text + ". They are HTML that works from disk. Needs `pip install 'chipwitness[docs]'`.",
        epilog="JSON keys: folder, pages",
    )
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="FOLDER", help="where to write; existing pages are replaced")
    option("--api", action="append", metavar="MODULE", help="API pages of this module or package (repeat)")
    option("--no-api", action="store_true", help="no API pages")
    add_json(parser)
    parser.set_defaults(handler=_docs)


def _docs(arguments: argparse.Namespace) -> int:
    from analysis.commands.dispatch import build_parser
    from analysis.docs.site import API, write_site

    api = () if arguments.no_api else tuple(arguments.api or API)
    with progress(arguments, None, "page") as bar:
        written = write_site(arguments.out, build_parser(), api=api, progress=lambda name: bar.update())
    data = {"folder": str(arguments.out), "pages": [str(path.relative_to(arguments.out)) for path in written]}
    return finish(arguments, data, [f"{arguments.out / 'index.html'}: {len(written)} pages"])
