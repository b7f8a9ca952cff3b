"""Compares what a replay reached with what a run committed to: exactly, digest by digest."""

from __future__ import annotations

from inspector.inspection.findings import Findings
from inspector.inspection.guards import Guard
from inspector.inspection.transcripts import Transcript
from inspector.replay.scheduler import Answer
from inspector.replay.segment import Segment
from monitor.sharding import StateDigest
from monitor.transcript import Leaf

__all__ = ["compare_replay"]


def compare_replay(transcript: Transcript, segment: Segment, replay: Answer, device: str, findings: Findings) -> int:
    """Every recomputed leaf must equal the committed one; the first that does not is the finding.

    Returns the last step up to which replay and run agree.

    Raises:
        EvidenceError, KeyError, ValueError: the replay's own answer is malformed: the device's fault.
    """
    run = transcript.run
    where: dict[str, object] = {**run.where, "device": device, "segment": segment.index}
    leaves = [Leaf.from_json(leaf, run.layout) for leaf in replay["leaves"]]
    start = StateDigest.from_json(replay["start_state"], run.layout)
    if start != transcript.leaves[segment.start].state:
        findings.add(
            Guard.REPLAY,
            f"step {segment.start}: the replay starts from a checkpoint that is not the committed state",
            step=segment.start,
            **where,
        )
        return segment.start - 1
    check_initialised(transcript, segment, replay["initial_state"], device, findings)
    steps = range(segment.start + 1, segment.stop + 1)
    for step, leaf in zip(steps, leaves, strict=False):
        committed = transcript.leaves[step]
        if leaf != committed:
            findings.add(Guard.REPLAY, _difference(transcript, committed, leaf, device), step=step, **where)
            return step - 1
    contradiction = replay["contradiction"]
    if contradiction is not None:
        step = contradiction["step"]
        place = {key: value for key, value in contradiction.items() if key not in ("text", "obeyed")}
        obeyed = contradiction.get("obeyed")
        if obeyed is not None and Leaf.from_json(obeyed, run.layout) == transcript.leaves[step]:
            guard = Guard.ROUNDING
            what = f"a replay on {device} reaches the committed state only if it follows an edited log"
        else:
            guard = Guard.REPLAY
            declared = transcript.data.describe(step)
            what = f"training on the declared {declared} fails when replayed on {device}"
        findings.add(guard, f"step {step}: {what}: {contradiction['text']}", **place, **where)
    elif len(leaves) != len(steps):
        raise ValueError(f"{len(leaves)} steps were replayed, not {len(steps)}")
    return segment.start + len(leaves)


def check_initialised(
    transcript: Transcript, segment: Segment, initial: str | None, device: str, findings: Findings
) -> None:
    """The declared initialisation gives the state that the run starts from.

    Raises:
        ValueError: the device did not execute it.
    """
    run = transcript.run
    if segment.start or run.declared.origin.initialisation is None:
        return
    if initial is None:
        raise ValueError("the initialisation was not executed")
    reached, committed = StateDigest.from_json(initial, run.layout), transcript.leaves[0].state
    if reached != committed:
        text = "step 0: the declared initialisation does not reach the state that the run starts from "
        text += f"({_shards(transcript, reached, committed)}) when executed on {device}"
        findings.add(Guard.INITIALISATION, text, **run.where, device=device, step=0)


def _difference(transcript: Transcript, committed: Leaf, reached: Leaf, device: str) -> str:
    step = committed.step
    declared = transcript.data.describe(step)
    if reached.state != committed.state:
        what = f"does not reach the committed state ({_shards(transcript, reached.state, committed.state)})"
    else:
        names = [
            name
            for name in ("batch", "log", "loss", "flop", "execution")
            if getattr(reached, name) != getattr(committed, name)
        ]
        what = f"differs in {', '.join(names)}"
    return f"step {step}: training on the declared {declared} {what} when replayed on {device}"


def _shards(transcript: Transcript, mine: StateDigest, theirs: StateDigest) -> str:
    """Which chips hold shards that differ."""
    chips = transcript.run.metadata.chips
    pairs = zip(chips, mine.shards, theirs.shards, strict=True)
    differing = [chip for chip, one, other in pairs if one != other]
    which = f"all {len(chips)} chips" if len(differing) == len(chips) else ", ".join(differing)
    return f"the shards of {which} differ"
