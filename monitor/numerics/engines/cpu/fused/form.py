"""What a row of the operator table says about its fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch._ops import OpOverload

from monitor.numerics.arguments import Direct
from monitor.numerics.backend import CountedBackend

__all__ = ["Fused", "Maker", "exact"]

Maker = Callable[[CountedBackend, Callable[..., Any]], Direct]
"""Makes the kernel's call from a session's backend and the row's own code, for what the kernel leaves undecided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A fused kernel, and which calls may take it.

    Attributes:
        make: given the overload, the session's backend and the row's code.
        spelling: the functional overload, the one in place, or both.
        exact: needs the primitives of ``exact`` numerics; others serve in every controlled numerics.
    """

    make: Callable[[OpOverload, Any, Any], Direct]
    spelling: Literal["functional", "in place", "both"] = "functional"
    exact: bool = False


def exact(make: Maker) -> Fused:
    """The fused kernel of a functional overload under ``exact``."""
    return Fused(make=lambda _, backend, code: make(backend, code), exact=True)
