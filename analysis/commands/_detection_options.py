"""Options that the detection commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add_run", "add_scheme", "command_line", "named", "numbers", "scheme_of"]

_NOT_SHOWN = frozenset({"handler", "json", "out", "command", "kind"})


def add_run(parser: argparse.ArgumentParser, *, flop: float | None = None, chips: float | None = None) -> None:
    """Add ``--flop`` and ``--chips``, required where no default is given."""
    parser.add_argument(
        "--flop", type=float, required=flop is None, default=flop, metavar="H", help="FLOP of the run to be caught"
    )
    parser.add_argument(
        "--chips", type=float, required=chips is None, default=chips, metavar="C", help="chips that the Prover owns"
    )


def add_scheme(parser: argparse.ArgumentParser, *, period: bool = True, rate: bool = True) -> None:
    """Add the parameters of Eq. 1 with the defaults of Table 1."""
    option = parser.add_argument
    option("--days", type=float, default=365.0, metavar="T", help="days that the run lasts (default 365)")
    if period:
        option("--period", type=float, default=30.0, metavar="TM", help="days between inspections (default 30)")
    if rate:
        option("--rate", type=float, default=0.1, metavar="F", help="snapshots per chip and day (default 0.1)")
    option("--confidence", type=float, default=0.9, metavar="P", help="detection probability wanted (default 0.9)")
    option(
        "--flop-per-day",
        type=float,
        default=8.64e19,
        metavar="A",
        help="FLOP per chip and day (default 8.64e19, which is 1e15 a second)",
    )


def scheme_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of Eq. 1 that the parser knows, by the names of ``detection.samples_needed``."""
    names = ("days", "period", "rate", "confidence", "flop_per_day")
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def numbers(text: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    return [float(part) for part in text.split(",")]


def named(what: str) -> Callable[[str], tuple[str, float]]:
    """Return a parser of NAME=NUMBER."""

    def parse(text: str) -> tuple[str, float]:
        name, sign, value = text.rpartition("=")
        try:
            if not sign or not name.strip():
                raise ValueError
            return name.strip(), float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME={what}") from None

    return parse


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command with every parameter that shaped its result, defaults included."""
    words = ["chipwitness", arguments.command, *([arguments.kind] if hasattr(arguments, "kind") else [])]
    for name, value in vars(arguments).items():
        if name not in _NOT_SHOWN and value is not None and value != []:
            words.append(f"--{name.replace('_', '-')} {_shown(value)}")
    return " ".join(words)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(_shown(each) for each in value)
    if isinstance(value, tuple):
        return "=".join(_shown(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
