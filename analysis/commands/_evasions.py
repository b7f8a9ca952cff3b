"""Evasions as the command line names them, and as people do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.planning import Evasion

__all__ = ["EVASIONS", "parse_evasion", "spoken"]

EVASIONS = """
Evasions: declared; stretch=K (1/K of the chips for K times as long); rush=K (K times the chips for 1/K of the time);
hide=X (a share X of the used chips is undeclared); tamper=X (a share X of the used chips' logs does not incriminate);
only=SITE (the run fits that site alone); refuse (drawn chips with evidence are refused, as many as are tolerated).
Default: declared, stretch=4, rush=4, and refuse where --refusals is above 0.
"""

_FORMS = "declared, stretch=K, rush=K, hide=X, tamper=X, only=SITE or refuse"


def parse_evasion(text: str) -> Evasion:
    """Return the evasion that the command line names.

    Raises:
        CallerError: an unknown name, or a value that is missing or out of range.
    """
    from inspector.probability.planning import Evasion

    kind, _, value = text.partition("=")
    if text == "declared":
        return Evasion(name="as declared")
    if text == "refuse":
        return Evasion(name=text, refuses=True)
    if kind == "only" and value:
        return Evasion(name=text, sites=(value,))
    try:
        size = float(value)
    except ValueError:
        raise CallerError(f"evasion {text!r}: must be {_FORMS}") from None
    if kind in ("stretch", "rush") and not 1 <= size < math.inf:
        raise CallerError(f"evasion {text!r}: K must be at least 1")
    if kind in ("hide", "tamper") and not 0 <= size <= 1:
        raise CallerError(f"evasion {text!r}: X must be between 0 and 1")
    match kind:
        case "stretch":
            return Evasion(name=text, stretch=size)
        case "rush":
            return Evasion(name=text, stretch=1.0 / size)
        case "hide":
            return Evasion(name=text, visible=1.0 - size)
        case "tamper":
            return Evasion(name=text, readout=1.0 - size)
    raise CallerError(f"evasion {text!r}: must be {_FORMS}")


def spoken(text: str) -> str:
    """Return an evasion of the command line in words, for a figure."""
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
