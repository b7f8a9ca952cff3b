"""What an ATen call takes, as PyTorch hands it on. It may be any operator, so only the operator's schema says more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Arguments", "Direct", "Keywords"]

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Direct = Callable[[Arguments, Keywords], Any]
"""Takes a call's arguments; its result, or NotImplemented."""
