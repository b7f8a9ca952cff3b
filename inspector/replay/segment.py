"""Re-executes a segment W_i → W_{i+k} from its checkpoint, data and rounding logs (Shavit 2023, section 4.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError, Unreadable
from inspector.replay.changes import Changes
from inspector.replay.decisions import Decisions
from monitor.declaration.statement import Declaration
from monitor.numerics import Bound, LogContradiction
from monitor.numerics.statistics import Statistics
from monitor.replay.initialisation import initialised_memory
from monitor.replay.returned_results import Returned
from monitor.replay.steps import ProgramSteps
from monitor.sharding import StateDigest
from monitor.transcript import Leaf, RunFolder

__all__ = [
    "Look",
    "Segment",
    "SegmentReplay",
    "replay_segment",
    "segment_of",
    "segments",
    "segments_of",
]

_AHEAD = 4
"""Steps after a segment in whose batches its results are looked for."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Steps ``start`` + 1 … ``stop``, between two checkpoints that are retained."""

    index: int
    start: int
    stop: int

    def __contains__(self, step: int) -> bool:
        return self.start < step <= self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Where to look for what a batch changes past every loss.

    Attributes:
        step: the step whose batch is altered.
        draw: seed of the altered batches.
        agreed: tensors, ``kind/name``, of which nothing is said.
    """

    step: int
    draw: bytes
    agreed: frozenset[str]

    @classmethod
    def for_segment(cls, job: Mapping[str, Any], index: int) -> Look | None:
        """What a job asks for in a segment."""
        look = job.get("looks", {}).get(str(index))
        return None if look is None else cls(step=look[0], draw=bytes.fromhex(look[1]), agreed=frozenset(look[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReplay:
    """Result of a replay, not yet compared with the commitments.

    Attributes:
        leaves: recomputed leaves of the steps of the segment, as far as the replay came.
        initial_state: of the first segment, what the declared initialisation gives on this device; None without one.
        inside: step, number of operators and digest of the states inside of steps that were asked for, as far as the
            replay came.
        witness: step, draw, and of each tensor that the batch changes past every loss its place in the declared state,
            an element, and what the recorded and each altered batch leave there; None where it was not asked.
        returned: results of steps that only compute, which a later batch holds again, of this segment or of 4 steps
            after it (``monitor.replay.returned_results``).
        contradiction: why it stopped early: an impossible rounding log, or unreadable evidence; with its step, and for
            a log with the leaf that the step has if the log is obeyed all the same.
        changes: of each parameter group the largest change of a weight in a step, in rates (``Changes``).
        decisions: what the rounding logs decided, and where this device alone would have decided otherwise.
    """

    segment: Segment
    start_state: StateDigest
    initial_state: StateDigest | None
    leaves: tuple[Leaf, ...]
    inside: tuple[tuple[int, int, StateDigest], ...]
    witness: tuple[Any, ...] | None
    returned: tuple[Returned, ...]
    contradiction: dict[str, object] | None
    changes: Changes
    decisions: Decisions

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "segment": [self.segment.index, self.segment.start, self.segment.stop],
            "start_state": self.start_state.to_json(),
            "initial_state": None if self.initial_state is None else self.initial_state.to_json(),
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "inside": [[step, operators, state.to_json()] for step, operators, state in self.inside],
            "witness": self.witness,
            "returned": self.returned,
            "contradiction": self.contradiction,
            "changes": self.changes.to_json(),
            "decisions": self.decisions.to_json(),
        }


def segments(run: RunFolder) -> list[Segment]:
    """All segments that a run has begun, in order: from each checkpoint that has to be there to the next."""
    return segments_of(run.declared, run.committed)


def segments_of(declared: Declaration, committed: int) -> list[Segment]:
    """All segments that a run of this declaration has begun when so many steps are committed; the last ends there."""
    every = range(0, max(committed, 1), declared.checkpoint_every)
    starts = [step for step in every if declared.retains(step, committed)]
    stops = [*starts[1:], min(starts[-1] + declared.checkpoint_every, declared.steps, committed)]
    return [
        Segment(index, start, stop)
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
        if start < stop
    ]


def segment_of(run: RunFolder, index: int) -> Segment:
    """One segment; CallerError if there is no such one."""
    known = segments(run)
    if not 0 <= index < len(known):
        text = f"segments 0 … {len(known) - 1}" if known else "no step yet"
        raise CallerError(f"there is no segment {index}; this run has {text}")
    return known[index]


def replay_segment(
    run: RunFolder,
    index: int,
    *,
    check_rounding: bool = True,
    inside: Collection[tuple[int, int]] = (),
    look: Look | None = None,
) -> SegmentReplay:
    """Replay one segment on this process's device.

    Args:
        check_rounding: False obeys rounding logs without asking whether any device had a choice.
        inside: moments inside of the segment's steps at which to look at the state: step, and how many of its operators
            have run.
        look: where to look for what a batch changes past every loss.

    Raises:
        CallerError: there is no such segment or moment, or the run's numerics are not controlled.
        EvidenceError: the checkpoint or the data cannot be read.
    """
    segment = segment_of(run, index)
    if run.declared.numerics == "native":
        raise CallerError("a run with native numerics cannot be replayed bit for bit")
    steps = ProgramSteps(run, segment.start, bound=Bound(check=check_rounding))
    start = None if segment.start else run.initialisation
    initial_state = None if start is None else initialised_memory(run.declared, start).digest()
    leaves: list[Leaf] = []
    found: list[tuple[int, int, StateDigest]] = []
    witness: tuple[Any, ...] | None = None
    contradiction: dict[str, object] | None = None
    statistics: dict[int, Statistics] = {}
    returns = steps.returns(segment.stop + _AHEAD)
    changes = Changes(steps.training)
    for step in range(segment.start + 1, segment.stop + 1):
        try:
            if look is not None and look.step == step:
                witness = _witness(steps, look)
            for operators in sorted({operators for at, operators in inside if at == step}):
                steps.stop_after(operators, lambda state, at=(step, operators): found.append((*at, state)))  # type: ignore[misc]
            changes.begin()
            leaf, session = steps.take(watch=returns.at(step) if steps.only_computes(step) else None)
            changes.end(leaf)
        except Unreadable:
            raise
        except EvidenceError as error:
            contradiction = _explain(step, error)
            if isinstance(error, LogContradiction) and check_rounding:
                blind = replay_segment(run, index, check_rounding=False).leaves
                reached = step - segment.start - 1 < len(blind)
                contradiction["obeyed"] = blind[step - segment.start - 1].to_json() if reached else None
            break
        except (IndexError, ValueError) as error:  # values that the program cannot read, such as a label without class
            contradiction = {"step": step, "text": f"the step cannot be executed: {error}"}
            break
        statistics[step] = session.statistics
        leaves.append(leaf)
    return SegmentReplay(
        segment=segment,
        start_state=steps.start,
        initial_state=initial_state,
        leaves=tuple(leaves),
        inside=tuple(found),
        witness=witness,
        returned=tuple(returns.found),
        contradiction=contradiction,
        changes=changes,
        decisions=Decisions.of(statistics),
    )


def _witness(steps: ProgramSteps, look: Look) -> tuple[Any, ...]:
    """What the step's batch changes past every loss, as ``SegmentReplay.witness`` holds it."""
    places = {f"{each.kind}/{each.name}": place for place, each in enumerate(steps.training.task.state)}
    found = steps.differences(look.draw, look.agreed)
    entries = sorted((places[each.tensor], each.element, each.values) for each in found)
    return look.step, look.draw.hex(), tuple(entries)


def _explain(step: int, error: EvidenceError) -> dict[str, object]:
    where: dict[str, object] = {"step": step, "text": str(error)}
    if isinstance(error, LogContradiction):
        where |= {"operator": error.operator, "operator_index": error.call, "element": error.element}
    return where
