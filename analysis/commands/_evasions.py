"""Evasions as the command line names them, and as people do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.planning import Evasion

__all__ = ["EVASIONS", "parse_evasion", "spoken"]

EVASIONS = """

For --evasion: declared (no evasion), stretch=K (1/K of the chips for K times as long), rush=K (K times the chips for
1/K of the time), hide=X (a share X of the used chips is not declared), tamper=X (on a share X of the used chips the
log is changed so that it shows nothing), only=SITE (the whole run is at that site), refuse (the lab withholds drawn
chips that would prove its guilt, but no more than a visit tolerates as missing). A comma joins evasions that are used
at once, such as hide=0.2,refuse.
"""

_FORMS = "declared, stretch=K, rush=K, hide=X, tamper=X, only=SITE or refuse"


def parse_evasion(text: str) -> Evasion:
    """Return the evasion that the command line names; several at once are joined by commas, ``only=SITE`` last.

    Raises:
        CallerError: an unknown name, or a value that is missing or out of range.
    """
    from inspector.probability.planning import Evasion

    stretch = visible = readout = 1.0
    refuses, left = False, text
    sites: tuple[str, ...] = ()
    while left:
        part, _, left = (left, "", "") if left.startswith("only=") else left.partition(",")
        kind, _, value = part.partition("=")
        match kind:
            case "declared" if part == kind:
                pass
            case "refuse" if part == kind:
                refuses = True
            case "only" if value:
                sites = (value,)
            case "stretch":
                stretch *= _factor(text, value)
            case "rush":
                stretch /= _factor(text, value)
            case "hide":
                visible *= 1.0 - _part(text, value)
            case "tamper":
                readout *= 1.0 - _part(text, value)
            case _:
                raise _malformed(text)
    if not text or text.endswith(","):
        raise _malformed(text)
    name = "as declared" if text == "declared" else text
    return Evasion(name=name, stretch=stretch, visible=visible, readout=readout, refuses=refuses, sites=sites)


def _factor(text: str, value: str) -> float:
    size = _number(text, value)
    if not 1 <= size < math.inf:
        raise CallerError(f"evasion {text!r}: K must be at least 1")
    return size


def _part(text: str, value: str) -> float:
    size = _number(text, value)
    if not 0 <= size <= 1:
        raise CallerError(f"evasion {text!r}: X must be between 0 and 1")
    return size


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _malformed(text) from None


def _malformed(text: str) -> CallerError:
    return CallerError(f"evasion {text!r}: must be {_FORMS}")


def spoken(text: str) -> str:
    """Return an evasion of the command line in words, for a figure."""
    if "," in text and not text.startswith("only="):
        return " and ".join(spoken(part) for part in text.split(","))
    kind, _, value = text.partition("=")
    match kind:
        case "stretch":
            return f"{value} times as long, on 1/{value} of the chips"
        case "rush":
            return f"{value} times the chips, for 1/{value} of the time"
        case "hide":
            return f"{float(value):.0%} of its chips undeclared"
        case "tamper":
            return f"{float(value):.0%} of its logs tampered with"
        case "only":
            return f"at {value} alone"
        case "refuse":
            return "refuses to show chips with evidence"
    return text
