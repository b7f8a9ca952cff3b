"""Options that the detection commands share."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from analysis.commands._common import number
from analysis.commands._uncertainty import within
from firmware_sim.errors import CallerError

__all__ = [
    "NO_ALARM",
    "NO_FIND",
    "add_run",
    "add_scheme",
    "campaign_note",
    "command_line",
    "named",
    "numbers",
    "scheme_of",
    "worked",
]

NO_ALARM = "No honest lab is accused here, by construction: each drawn chip is shown, and only the run leaves evidence."
"""The note on a detection that has no false alarms; its JSON says ``false_alarm`` 0."""

NO_FIND = "A chip that its owner can show is no find, so by construction no census accuses an honest owner."
"""The same of a census."""

_NOT_SHOWN = frozenset({"handler", "json", "out", "brief", "command", "kind"})


def add_run(
    parser: argparse.ArgumentParser, *, flop: float | None = None, chips: float | None = None, uncertain: bool = False
) -> None:
    """Add ``--flop`` and ``--chips``, required where no default is given."""
    kind, mark = (within("positive"), "~") if uncertain else (number, "")
    parser.add_argument(
        "--flop",
        type=kind,
        required=flop is None,
        default=flop,
        metavar=f"{mark}H",
        help="FLOP of the run to be caught",
    )
    parser.add_argument(
        "--chips",
        type=kind,
        required=chips is None,
        default=chips,
        metavar=f"{mark}C",
        help="chips that the lab owns",
    )


def add_scheme(
    parser: argparse.ArgumentParser,
    *,
    period: bool = True,
    rate: bool = True,
    uncertain: bool = False,
) -> None:
    """Add the parameters of Eq. 1 with the defaults of Table 1."""
    option = parser.add_argument
    kind, share, mark = (within("positive"), within("share"), "~") if uncertain else (number, number, "")
    option("--days", type=kind, default=365.0, metavar=f"{mark}T", help="days that the run lasts (default 365)")
    if period:
        option("--period", type=kind, default=30.0, metavar=f"{mark}TM", help="days between inspections (default 30)")
    if rate:
        option("--rate", type=kind, default=0.1, metavar=f"{mark}F", help="snapshots per chip and day (default 0.1)")
    option(
        "--confidence", type=share, default=0.9, metavar=f"{mark}P", help="detection probability wanted (default 0.9)"
    )
    option(
        "--flop-per-day",
        type=kind,
        default=8.64e19,
        metavar=f"{mark}A",
        help="FLOP per chip and day (default 8.64e19, which is 1e15 a second)",
    )
    option(
        "--utilisation",
        type=share,
        default=1.0,
        metavar=f"{mark}U",
        help="share of its chips' FLOP that the run uses, MFU (default 1, as in Table 1)",
    )


def scheme_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of Eq. 1 that the parser knows, by the names of ``detection.samples_needed``."""
    names = ("days", "period", "rate", "confidence", "flop_per_day", "utilisation")
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def worked(scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with the FLOP that a run gets out of a chip in place of its peak and utilisation."""
    import numpy as np

    left, used = dict(scheme), np.asarray(scheme["utilisation"])
    if not (used.min() > 0 and used.max() <= 1):
        raise CallerError(f"--utilisation must be above 0 and at most 1, not {used.min():g} to {used.max():g}")
    speed = left["flop_per_day"] * left.pop("utilisation")
    return left | {"flop_per_day": speed}


def numbers(text: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    parts = text.split(",")
    if any(part[:1] == "0" and part[1:].isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: commas separate numbers here, so write 2e6 or 2000000")
    return [float(part) for part in parts]


def named(what: str, *, uncertain: bool = False) -> Callable[[str], tuple[str, Any]]:
    """Return a parser of NAME=NUMBER; of NAME=DISTRIBUTION where the number may be uncertain."""

    def parse(text: str) -> tuple[str, Any]:
        name, sign, value = text.rpartition("=")
        try:
            if not sign or not name.strip():
                raise ValueError
            return name.strip(), within("positive")(value) if uncertain else number(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME={what}") from None
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME={what}: {error}") from None

    return parse


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command with every parameter that shaped its result, defaults included."""
    words = ["chipwitness", arguments.command, *([arguments.kind] if hasattr(arguments, "kind") else [])]
    for name, value in vars(arguments).items():
        if name in _NOT_SHOWN or value is None or value is False:
            continue
        repeated = isinstance(value, list) and not all(isinstance(each, float) for each in value)
        for each in value if repeated else [value] if value != [] else []:
            shown = "" if each is True else f" {shlex.quote(_shown(each))}"
            words.append(f"--{name.replace('_', '-')}{shown}")
    return " ".join(words)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(_shown(each) for each in value)
    if isinstance(value, tuple):
        return "=".join(_shown(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def campaign_note(scenario: Mapping[str, Any]) -> str:
    """Return what a campaign's figure holds for, from the scenario of its JSON."""
    from analysis.report.style import setting

    note = setting(
        flop=scenario.get("threshold_flop"),
        chips=scenario.get("registered_chips"),
        period=scenario.get("period_days"),
        rate=scenario.get("snapshot_rate"),
    )
    samples = scenario.get("samples_per_period")
    return note if samples is None else f"{note}; {samples:,} samples a period"
