"""Range checks of caller's numbers; each names the field and says what is allowed."""

from __future__ import annotations

import math

from firmware_sim.errors import CallerError

__all__ = ["at_least", "at_most", "fraction", "named", "positive", "probability", "whole"]


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CallerError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below ``least``."""
    if _number(name, value) < least:
        raise CallerError(f"{name} must be at least {least:g}, got {value!r}")


def at_most(name: str, value: float, most: float) -> None:
    """Refuse a value above ``most``: its unit must be another one."""
    if _number(name, value) > most:
        raise CallerError(f"{name} must be at most {most:g}, got {value!r}: is it in another unit?")


def positive(name: str, value: float) -> None:
    """Refuse a value of 0 or less."""
    if _number(name, value) <= 0:
        raise CallerError(f"{name} must be above 0, got {value!r}")


def probability(name: str, value: float) -> None:
    """Refuse a value outside [0, 1]."""
    if not 0 <= _number(name, value) <= 1:
        raise CallerError(f"{name} must be between 0 and 1, got {value!r}")


def fraction(name: str, value: float) -> None:
    """Refuse a value outside the open interval (0, 1)."""
    if not 0 < _number(name, value) < 1:
        raise CallerError(f"{name} must lie strictly between 0 and 1, got {value!r}")


def whole(name: str, value: int, least: int = 0) -> None:
    """Refuse anything but an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise CallerError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise CallerError(f"{name} must be at least {least}, got {value}")


def named(name: str, value: str) -> None:
    """Refuse an empty name."""
    if not isinstance(value, str) or not value.strip():
        raise CallerError(f"{name} must be a non-empty text, got {value!r}")
