"""``rules``: what an inspectorate requires of runs, read and looked at before anybody is inspected by it."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish
from firmware_sim.errors import CallerError, EvidenceError, file_error
from inspector.rules.form import FORM

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_rules", "register"]


def add_rules(parser: ArgumentParser) -> None:
    """Add ``--rules``."""
    parser.add_argument(
        "--rules",
        type=Path,
        metavar="FILE",
        help="TOML file of rules (`chipwitness rules show` prints its form): a broken rule rejects, and one that "
        "cannot be decided leaves the verdict open",
    )


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``rules``."""
    group = subparsers.add_parser("rules")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser(
        "show",
        help="read a file of rules and print what it requires",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=FORM,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML")
    add_json(parser)
    parser.epilog = "JSON keys: digest, rules (name, kind and what bounds it), require"
    parser.set_defaults(handler=_show)
    parser = actions.add_parser("digests", help="print the digest of each sample, for a rule of kind data")
    parser.add_argument("file", type=Path, metavar="FILE", help="safetensors; the sample is the first axis")
    parser.add_argument("--array", metavar="NAME", help="array to use (needed if the file holds several)")
    add_json(parser)
    parser.epilog = "JSON: a list of digests"
    parser.set_defaults(handler=_digests)


def _show(arguments: argparse.Namespace) -> int:
    from inspector.rules.rule_files import read_rules

    rules = read_rules(arguments.file)
    data = {"digest": rules.digest, **rules.to_json()}
    lines = [f"{each.name}: {each.kind} {each.range}" for each in rules.rules.values()]
    return finish(arguments, data, [*lines, f"required: {data['require']}", f"digest: {rules.digest}"])


def _digests(arguments: argparse.Namespace) -> int:
    from firmware_sim import limits
    from inspector.replay.examination import content_digests
    from monitor.transcript.data import decode_arrays

    try:
        arrays = decode_arrays(limits.read_file(arguments.file, limits.SAMPLES_BYTES), arguments.file.name)
    except OSError as error:
        raise file_error(f"cannot read {arguments.file}", error) from None
    except EvidenceError as error:
        raise CallerError(str(error)) from None
    names = sorted(arrays) if arguments.array is None else [arguments.array]
    if len(names) != 1 or names[0] not in arrays:
        raise CallerError(f"name one of the arrays {', '.join(sorted(arrays))} with --array")
    if not arrays[names[0]].ndim:
        raise CallerError(f"the array {names[0]} has no first axis")
    found = content_digests(arrays[names[0]])
    return finish(arguments, found, found)
