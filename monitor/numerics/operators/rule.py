"""How an ATen operator is made equal on every device: one of four kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from monitor.numerics.backend import Backend

__all__ = ["Implementation", "Kind", "Rule"]

Kind = Literal["exact", "arithmetic", "implemented", "decomposed", "refused"]
Implementation = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the operator table.

    - ``exact``: moves or compares values; runs natively.
    - ``arithmetic``: one IEEE operation on each element; runs natively, NaN results are made canonical.
    - ``implemented``: ``implementation(backend, *args, **kwargs)``, of exact operations and the backend's primitives.
    - ``decomposed``: a decomposition, mostly PyTorch's own, whose operators come back through this table.
    - ``refused``: named with a reason, so that the message can say what to do.

    ``any_format``: an implementation that takes other floating-point formats than FP32. ``settled``: its results
    come straight from the backend, which has made NaNs canonical already.
    """

    kind: Kind
    implementation: Implementation | None = None
    remedy: str = ""
    any_format: bool = False
    settled: bool = False

    def __post_init__(self) -> None:
        if (self.kind == "implemented") != (self.implementation is not None):
            raise ValueError(f"a rule of kind {self.kind} {'needs' if self.kind == 'implemented' else 'has no'} code")

    def run(self, backend: Backend, *args: Any, **kwargs: Any) -> Any:
        """Apply an ``implemented`` rule."""
        assert self.implementation is not None
        return self.implementation(backend, *args, **kwargs)
