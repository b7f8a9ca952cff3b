"""Table 1 of Shavit 2023, today's public figures beside it, and the user's own rows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLE_1", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run to be caught.

    Attributes:
        model: its name.
        flop: H, FLOP.
    """

    model: str
    flop: float


TABLE_1 = (
    Row(model="GPT-3", flop=3.14e23),
    Row(model="Chinchilla", flop=5.76e23),
    Row(model="PaLM", flop=2.56e24),
    Row(model="Chinchilla-280B (projected)", flop=9.9e24),
    Row(model="Chinchilla-1T (projected)", flop=1.27e26),
    Row(model="Chinchilla-10T (projected)", flop=1.3e28),
)
