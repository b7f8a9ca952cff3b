"""What the numerics know about one ATen operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from monitor.numerics.backend import Backend
from monitor.numerics.engines.cpu.fused.form import Fused
from monitor.numerics.operators.partial_sums import Reduction
from monitor.numerics.operators.places import moved, scattered
from monitor.numerics.operators.tiles import Tile

__all__ = ["Code", "Formats", "Kind", "Row"]

Kind = Literal["exact", "arithmetic", "implemented", "decomposed"]
Formats = Literal["FP32", "any", "own"]
Code = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How an operator is made equal on every device, in one of four ways, and every other fact about it.

    - ``exact``: moves or compares values; runs natively.
    - ``arithmetic``: one IEEE operation on each element; runs natively, NaN results are made canonical.
    - ``implemented``: ``code(backend, *args, **kwargs)``, of exact operations and the backend's primitives.
    - ``decomposed``: a composition, PyTorch's own or ``code(*args, **kwargs)``, whose operators come back to the table.

    Attributes:
        name: the functional overload, such as ``aten.add.Tensor``.
        complex: what ``code`` is for complex64 operands; without it a row that computes refuses complex ones.
        formats: what ``code`` takes: ``FP32`` alone; ``any`` floating-point format; or ``own`` code for each format.
            Half-precision operands are widened to FP32 first, but for ``own``.
        settled: results come straight from the backend, which has made NaNs canonical already.
        native_if_empty: runs natively where an operand has no elements: nothing is added then, so no order counts.
        writes: places of arguments that it overwrites although its schema does not say so.
        typed_by: places of a norm's input and weight: all results but the first have the weight's type; or one place,
            whose type all results have. Where it is empty PyTorch says the types.
        factors: places of the operands that it multiplies and sums; empty if it is no product.
        has_two_digits: under ``exact`` its code multiplies large BF16 factors as they are (``exact.bf16``).
        unset: results hold whatever lay in memory.
        counted: part of a step; not so aliases whose number varies with autograd's reference counts.
        in_place: the in-place overload, where that is not named as the functional one with an underscore.
        fused: one kernel that gives the row's bits for plain tensors.
        tile: computes some elements of a result from what these depend on; without it all is computed.
        parts: gives an element from whole numbers of equal parts of what it is reduced over.
        whole: why a referee computes all of it, or of which calls it does; empty if a tile always decides. Where
            a row leaves out complex, tile, parts or whole, ``complex_numbers`` and ``tilings`` may have them.
    """

    name: str
    kind: Kind
    code: Code | None = None
    complex: Code | None = None
    formats: Formats = "FP32"
    settled: bool = False
    native_if_empty: bool = False
    writes: tuple[int, ...] = ()
    typed_by: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()
    has_two_digits: bool = False
    unset: bool = False
    counted: bool = True
    in_place: str = ""
    fused: Fused | None = None
    tile: Tile | None = None
    parts: Reduction | None = None
    whole: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "implemented" and self.code is None) or (self.kind in ("exact", "arithmetic") and self.code):
            raise ValueError(f"{self.name}: a row of kind {self.kind} {'has no' if self.code else 'needs'} code")

    @property
    def is_log_free(self) -> bool:
        """Whether it gives the same bits under ``rounded`` numerics as under ``exact``: it adds nothing up."""
        return self.kind in ("exact", "arithmetic") or self.tile in (moved, scattered)

    def run(self, backend: Backend, *args: Any, **kwargs: Any) -> Any:
        """Apply the code of an ``implemented`` row."""
        assert self.code is not None
        return self.code(backend, *args, **kwargs)

    @property
    def overload_in_place(self) -> str:
        """Name of the overload that overwrites its first argument."""
        namespace, operator, overload = self.name.split(".", 2)
        return self.in_place or f"{namespace}.{operator}_.{overload}"
