"""Where W_0 comes from: a recipe's seed, a program and a seed, a parent run's final state, or weights supplied.

A long training is not to be split into short runs whose past is not counted (Shavit 2023, section 4): a run says which
run it continues, or that this is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from firmware_sim import REGION_KINDS, Digest, limits
from firmware_sim.errors import EvidenceError

__all__ = ["TAKEN_OVER", "Initialisation", "Origin", "Parent"]

TAKEN_OVER = ("weight", "buffer")
"""Kinds of tensors that a run takes over from its parent; gradients and the optimizer's state begin at zero."""
_DIGEST = re.compile("[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The finished run that a run continues.

    Attributes:
        run: its id, hex.
        step: its last step.
        state: root of the state after that step.
        kinds: of the tensors that are taken over; all others begin at zero.
    """

    run: str
    step: int
    state: str
    kinds: tuple[str, ...] = TAKEN_OVER

    def __post_init__(self) -> None:
        if not _is_digest(self.run):
            raise EvidenceError("the declared parent is not named by a run id")
        if type(self.step) is not int or not 1 <= self.step <= limits.STEPS.most:
            raise EvidenceError("the declared parent's last step is not a number of steps")
        Digest.parse(self.state)
        known = all(isinstance(kind, str) for kind in self.kinds) and set(self.kinds) <= set(REGION_KINDS)
        if not known or "weight" not in self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise EvidenceError(
                "'kinds', what the run takes over from its declared parent, must be a list that includes the weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialisation:
    """The program that makes W_0 out of nothing: no batch, and a state of zeros.

    Attributes:
        program: its SHA-256, hex.
        seed: of its random keys, which are those of a step 0.
    """

    program: str
    seed: int

    def __post_init__(self) -> None:
        if not _is_digest(self.program):
            raise EvidenceError("the declared initialisation is not named by a program's digest")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise EvidenceError("the seed of the declared initialisation does not lie in 0 … 2^63-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where W_0 comes from.

    Attributes:
        state: root of W_0; None where a recipe's seed gives it.
        parent: the run whose final state it takes over; None where it has none, or none is known.
        initialisation: the program that computes it; None where there is none, or a recipe replaces it.
    """

    state: str | None = None
    parent: Parent | None = None
    initialisation: Initialisation | None = None

    def __post_init__(self) -> None:
        if self.state is not None:
            Digest.parse(self.state)
        elif self.parent is not None or self.initialisation is not None:
            raise EvidenceError(
                "a run that continues another, or that declares its initialisation, must declare the digest of its "
                "initial state"
            )
        if self.parent is not None and self.initialisation is not None:
            raise EvidenceError("a run either continues another or declares its initialisation, not both")

    @property
    def is_supplied(self) -> bool:
        """Whether nothing says what was computed to get at these weights."""
        return self.state is not None and self.parent is None and self.initialisation is None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        past, begun = _plain(self.parent), _plain(self.initialisation)
        return {"state": self.state, "parent": past and {**past, "kinds": list(past["kinds"])}, "initialisation": begun}

    @classmethod
    def from_json(cls, data: object) -> Origin:
        """Parse what ``to_json`` returned; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != {field.name for field in fields(cls)}:
            raise EvidenceError("the declared origin has missing or extra keys")
        past, begun = data["parent"], data["initialisation"]
        for kind, values in ((Parent, past), (Initialisation, begun)):
            names = {field.name for field in fields(kind)}
            if values is not None and (not isinstance(values, dict) or set(values) != names):
                raise EvidenceError(f"the declared {kind.__name__.lower()} has missing or extra keys")
        if past is not None and not isinstance(past["kinds"], list):
            raise EvidenceError("'kinds', what the run takes over from its declared parent, must be a list")
        return cls(
            state=data["state"],
            parent=None if past is None else Parent(**{**past, "kinds": tuple(past["kinds"])}),
            initialisation=None if begun is None else Initialisation(**begun),
        )


def _plain(value: Parent | Initialisation | None) -> dict[str, Any] | None:
    return None if value is None else {field.name: getattr(value, field.name) for field in fields(value)}


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None
