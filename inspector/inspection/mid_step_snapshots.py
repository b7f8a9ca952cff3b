"""Snapshots that fell inside of a step: when one may, and whether a replay of that step passes through it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from firmware_sim import LogRecord, RecordKind
from firmware_sim.errors import EvidenceError
from inspector.inspection.guards import Guard
from inspector.inspection.transcripts import Transcript
from inspector.inspection.verdict import Findings
from inspector.replay.result import Replayed
from monitor.replay.steps import execution_of
from monitor.sharding import StateDigest

__all__ = ["InsideStep", "committed_after", "compare_inside", "place_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideStep:
    """A snapshot inside of a step, which only a replay of that step can explain.

    Attributes:
        step, operators: how many of the operators of which step had run.
        is_certain: whether that step was committed in the boot of the snapshot. If the power went before, another
            attempt at it was committed later, which an honest lab may have made with another batch.
    """

    chip: str
    run_id: str
    record: int
    shard: int
    step: int
    operators: int
    digest: bytes
    is_certain: bool

    def is_shown(self, states: Mapping[tuple[int, int], StateDigest]) -> bool | None:
        """Whether a replay that passed through these states (``Replayed.states``) holds it; None where it has none."""
        state = states.get((self.step, self.operators))
        return None if state is None else state.shard(self.shard).value == self.digest

    def text(self, last: str = "") -> str:
        """In words, that a replay does not hold it; ``last`` names the last operator that had run."""
        named = f" (the last is {last})" if last else ""
        return (
            f"chip {self.chip}, record {self.record}: the snapshot inside of step {self.step}, after "
            f"{self.operators} operators{named}, is not what shard {self.shard} then holds"
        )


def committed_after(records: Sequence[LogRecord]) -> Mapping[int, bool]:
    """For each snapshot, by record number: whether the step after it was committed before the chip's next boot."""
    found: dict[int, bool] = {}
    waiting: list[LogRecord] = []
    for record in records:
        if record.kind is RecordKind.SNAPSHOT:
            found[record.counter] = False
            waiting.append(record)
        elif record.kind is RecordKind.BOOT:
            waiting.clear()
        elif record.kind is RecordKind.COMMIT:
            for snapshot in waiting:
                found[snapshot.counter] |= (record.run_id, record.step) == (snapshot.run_id, snapshot.step + 1)
            waiting.clear()
    return found


def place_of(record: LogRecord, transcript: Transcript) -> tuple[int, int]:
    """Step and number of its operators at which a snapshot was taken; 0 where it shows the state after the step.

    Before the first operator of a step others may have run on the state, of which the step tells; these write nothing
    of it.

    Raises:
        EvidenceError: no committed step has as many operators, or the chip was kept from taking it in time.
    """
    check_in_time(record)
    if not record.operators:
        return record.step, 0
    step = record.step + 1
    if step >= len(transcript.leaves):
        if transcript.run.finished:
            return record.step, 0  # behind the last step ran none that writes the state
        raise EvidenceError(f"it was taken inside step {step}, which was not committed")
    operators = record.operators - execution_of(transcript.leaves[step]).outside.calls
    if operators <= 0:
        return record.step, 0
    count = operators_of(transcript, step)
    if operators > count:
        raise EvidenceError(f"it was taken after {operators} operators of step {step}, which has only {count}")
    return step, operators


def check_in_time(record: LogRecord) -> None:
    """EvidenceError if a chip was kept from taking a snapshot in time: this lets the lab choose what it shows."""
    if record.is_late:
        raise EvidenceError("the snapshot is late: another thread of the host ran operators after it was due")


def operators_of(transcript: Transcript, step: int) -> int:
    """How many operators of a committed step a meter counts; EvidenceError where its program is not known."""
    works = transcript.execution.works
    if works is None:
        raise EvidenceError(f"the program of step {step} is not known")
    return works[execution_of(transcript.leaves[step]).program].calls


def compare_inside(
    transcript: Transcript,
    snapshots: Collection[InsideStep],
    replay: Replayed,
    device: str,
    findings: Findings,
) -> int:
    """Compare snapshots inside of replayed steps with the states that the replay passed through.

    Returns how many it passed through. Where it lacks one that was asked for, the device is at fault.

    Args:
        snapshots: inside of steps up to which replay and run agree.

    Raises:
        ValueError, EvidenceError: the replay's own answer is malformed.
    """
    run = transcript.run
    states, compared = replay.states(run.layout), 0
    for snapshot in snapshots:
        is_shown = snapshot.is_shown(states)
        if is_shown is None:
            raise ValueError(f"the state after {snapshot.operators} operators of step {snapshot.step} is missing")
        if is_shown:
            compared += 1
            continue
        last = _operator(transcript, snapshot)
        text = snapshot.text(last)
        where = {"chip": snapshot.chip, "lab": run.metadata.lab, "record": snapshot.record, "step": snapshot.step}
        where["device"] = device
        if snapshot.is_certain:
            findings.add(
                Guard.SNAPSHOT, f"{text} on {device}", operator=last, operator_index=snapshot.operators, **where
            )
        else:
            findings.doubt(f"{text}; the power went in that step, and it was committed later", **where)
    return compared


def _operator(transcript: Transcript, snapshot: InsideStep) -> str:
    program = transcript.run.program(execution_of(transcript.leaves[snapshot.step]).program)
    return str(program.calls[program.counted[snapshot.operators - 1]]["operator"])
