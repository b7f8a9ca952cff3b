"""Where W_0 comes from: a recipe's seed, the final state of a parent run, or weights that were supplied.

A long training is not to be split into short runs whose past nobody counts (Shavit 2023, section 4): a run says which
run it continues, or that nobody knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from firmware_sim import REGION_KINDS, Digest, bounds
from firmware_sim.errors import EvidenceError

__all__ = ["TAKEN_OVER", "Origin", "Parent"]

TAKEN_OVER = ("weight", "buffer")
"""Kinds of tensors that a run takes over from its parent; gradients and the optimizer's state begin at zero."""
_RUN_ID = re.compile("[0-9a-f]{64}", re.ASCII)


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
        if not isinstance(self.run, str) or _RUN_ID.fullmatch(self.run) is None:
            raise EvidenceError("the declared parent is not named by a run id")
        if type(self.step) is not int or not 1 <= self.step <= bounds.STEPS.most:
            raise EvidenceError("the declared parent's last step is no number of steps")
        Digest.parse(self.state)
        known = all(isinstance(kind, str) for kind in self.kinds) and set(self.kinds) <= set(REGION_KINDS)
        if not known or "weight" not in self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise EvidenceError("what is taken over from the declared parent is no list of kinds with the weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where W_0 comes from.

    Attributes:
        state: root of W_0; None where a recipe's seed gives it.
        parent: the run whose final state it takes over; None where it has none, or none is known.
    """

    state: str | None = None
    parent: Parent | None = None

    def __post_init__(self) -> None:
        if self.state is not None:
            Digest.parse(self.state)
        elif self.parent is not None:
            raise EvidenceError("a run that continues another declares the digest of its initial state")

    @property
    def is_supplied(self) -> bool:
        """Whether nothing says what was computed to get at these weights."""
        return self.state is not None and self.parent is None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        parent = self.parent
        past = None if parent is None else {field.name: getattr(parent, field.name) for field in fields(Parent)}
        return {"state": self.state, "parent": past and {**past, "kinds": list(past["kinds"])}}

    @classmethod
    def from_json(cls, data: object) -> Origin:
        """Parse what ``to_json`` returned; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != {"state", "parent"}:
            raise EvidenceError("the declared origin has missing or extra keys")
        past = data["parent"]
        if past is None:
            return cls(state=data["state"])
        if not isinstance(past, dict) or set(past) != {field.name for field in fields(Parent)}:
            raise EvidenceError("the declared parent has missing or extra keys")
        if not isinstance(past["kinds"], list):
            raise EvidenceError("what is taken over from the declared parent is no list")
        return cls(state=data["state"], parent=Parent(**{**past, "kinds": tuple(past["kinds"])}))
