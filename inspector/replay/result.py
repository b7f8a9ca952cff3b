"""What a replay of a segment reaches, as digests: what a cluster signs, and what is held against a lab's leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical, leaf_hash
from inspector.replay.decisions import Decisions
from monitor.sharding import Layout, StateDigest
from monitor.transcript import Leaf

__all__ = ["MALFORMED", "Replayed", "state_digest"]

MALFORMED = (EvidenceError, LookupError, ValueError, TypeError, AttributeError, OverflowError)
"""What may be raised where an answer of another form is read."""

_REPLAY_KEYS = {
    *("segment", "start_state", "initial_state", "leaves", "inside", "witness", "contradicted_step", "decisions"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One segment taken again.

    Attributes:
        segment: number, first state's step, last step.
        start_state: ``state_digest`` of the state that the replay began with.
        initial_state: of what the declared initialisation gives; None where none was executed.
        leaves: RFC 9162 hash of the leaf of each step that was taken.
        inside: step, operators that had run, and opened root of each state inside of a step that was asked for.
        witness: step, draw, and for each tensor that the step's batch changes past every loss its place in the declared
            state, an element and its values (``inspection.witnesses``), all that leaves a cluster of a state; None
            where nothing was looked for.
        contradicted_step: the step that could not be taken as recorded; None if all could.
        decisions: what rounding logs decided.
    """

    segment: tuple[int, int, int]
    start_state: str
    initial_state: str | None
    leaves: tuple[bytes, ...]
    inside: tuple[tuple[int, int, str], ...]
    witness: tuple[int, str, tuple[tuple[int, int, tuple[float, ...]], ...]] | None
    contradicted_step: int | None
    decisions: Decisions

    @classmethod
    def of(cls, replay: Mapping[str, Any]) -> Replayed:
        """From what a device returned for a segment; one of ``MALFORMED`` if it has another form."""
        index, start, stop = replay["segment"]
        initial, contradiction = replay["initial_state"], replay["contradiction"]
        try:
            leaves = tuple(leaf_hash(canonical.encode(leaf)) for leaf in replay["leaves"])
        except CallerError as error:
            raise EvidenceError(f"a replayed leaf is malformed: {error}") from None
        return cls(
            segment=(int(index), int(start), int(stop)),
            start_state=state_digest(replay["start_state"]),
            initial_state=None if initial is None else state_digest(initial),
            leaves=leaves,
            inside=tuple((int(step), int(count), str(state)) for step, count, state in replay["inside"]),
            witness=_witness(replay["witness"]),
            contradicted_step=None if contradiction is None else int(contradiction["step"]),
            decisions=Decisions.from_json(replay["decisions"]),
        )

    def begins_with(self, state: StateDigest) -> bool:
        """Whether the replay began with this state."""
        return self.start_state == state_digest(state.to_json())

    def departure(self, leaf: Callable[[int], Leaf]) -> tuple[int, bytes | None] | None:
        """The first step that it reaches otherwise than the lab signed it, and the hash of the leaf that it reaches.

        None in place of the hash means a step that could not be taken as it was recorded: the one after the last leaf.

        Args:
            leaf: gives the leaf of a step that the lab signed, or raises EvidenceError.
        """
        _, start, stop = self.segment
        for step, reached in zip(range(start + 1, stop + 1), self.leaves, strict=False):
            if reached != leaf_hash(leaf(step).encoded()):
                return step, reached
        after = start + len(self.leaves) + 1
        return (after, None) if self.contradicted_step == after <= stop else None

    @property
    def is_complete(self) -> bool:
        """Whether it took the steps of its segment, no more and no fewer, and none stopped it."""
        _, start, stop = self.segment
        return self.contradicted_step is None and len(self.leaves) == stop - start

    def states(self, layout: Layout) -> dict[tuple[int, int], StateDigest]:
        """The states inside of steps, by step and number of operators; EvidenceError where one is malformed."""
        return {(step, count): StateDigest.from_json(state, layout) for step, count, state in self.inside}

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "segment": list(self.segment),
            "start_state": self.start_state,
            "initial_state": self.initial_state,
            "leaves": [each.hex() for each in self.leaves],
            "inside": [list(each) for each in self.inside],
            "witness": self.witness,
            "contradicted_step": self.contradicted_step,
            "decisions": self.decisions.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Replayed:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != _REPLAY_KEYS:
            raise EvidenceError("a replayed segment has missing or extra keys")
        segment, step, leaves = data["segment"], data["contradicted_step"], data["leaves"]
        numbers = [*segment, *([] if step is None else [step])] if isinstance(segment, list) else []
        if len(numbers) != 3 + (step is not None) or not all(type(each) is int and each >= 0 for each in numbers):
            raise EvidenceError("a replayed segment's numbers are malformed")
        if not isinstance(leaves, list) or not all(_is_hash(each) for each in leaves):
            raise EvidenceError("a replayed segment's leaves are malformed")
        if not isinstance(data["inside"], list) or not all(map(_is_inside, data["inside"])):
            raise EvidenceError("a replayed segment's states inside of steps are malformed")
        initial = data["initial_state"]
        for state in (data["start_state"], *(() if initial is None else (initial,))):
            if not _is_hash(state):
                raise EvidenceError("a replayed segment's states are malformed")
        return cls(
            segment=(segment[0], segment[1], segment[2]),
            start_state=data["start_state"],
            initial_state=data["initial_state"],
            leaves=tuple(bytes.fromhex(each) for each in leaves),
            inside=tuple((at, count, state) for at, count, state in data["inside"]),
            witness=_witness(data["witness"]),
            contradicted_step=step,
            decisions=Decisions.from_json(data["decisions"]),
        )


def state_digest(opened: str) -> str:
    """SHA-256, in hex, of a state's opened root (``StateDigest.to_json``), which binds every byte of the state."""
    return hashlib.sha256(opened.encode()).hexdigest()


def _is_inside(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    step, count, state = entry
    return all(type(each) is int and each > 0 for each in (step, count)) and isinstance(state, str)


def _witness(data: Any) -> tuple[int, str, tuple[tuple[int, int, tuple[float, ...]], ...]] | None:
    """What was found on altered batches; EvidenceError on any other form."""
    if data is None:
        return None
    try:
        step, draw, found = data
        entries = tuple((place, element, tuple(values)) for place, element, values in found)
        numbers = [step, *(number for place, element, _ in entries for number in (place, element))]
        values = [value for _, _, each in entries for value in each]
    except (TypeError, ValueError):
        raise EvidenceError("what was found on altered batches is malformed") from None
    if not all(type(each) is int and each >= 0 for each in numbers) or not _is_hash(draw):
        raise EvidenceError("what was found on altered batches is malformed")
    if not all(type(value) in (int, float, bool) for value in values):
        raise EvidenceError("what was found on altered batches is malformed")
    return step, draw, entries


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
