"""Bit-equal training steps on devices that compute differently: native, rounded and exact numerics."""

from __future__ import annotations

from .declared import DECLARABLE, entries_in, execute, logged_calls, recording, referee, replaying
from .errors import LogContradiction, UnsupportedOperator
from .rounding.bounds import Bound, Formats
from .session import NUMERICS, Numerics, Observer, Session
from .statistics import OperatorCount, Statistics

__all__ = [
    "DECLARABLE",
    "NUMERICS",
    "Bound",
    "Formats",
    "LogContradiction",
    "Numerics",
    "Observer",
    "OperatorCount",
    "Session",
    "Statistics",
    "UnsupportedOperator",
    "entries_in",
    "execute",
    "logged_calls",
    "recording",
    "referee",
    "replaying",
]
