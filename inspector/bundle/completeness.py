"""What an ACCEPT needs of a bundle, and an incomplete one lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from firmware_sim import RecordKind
from firmware_sim.errors import EvidenceError
from inspector.bundle.grounds import HeldChip, compared_inside, terms_of
from inspector.bundle.redraw import accepted_up_to, covered
from inspector.bundle.replays import SignedReplay
from inspector.bundle.runs import HeldRun
from inspector.inspection.document import Evidence
from inspector.inspection.ownership import past_spans
from inspector.inspection.rounding_logs import examine
from inspector.inspection.sampling import Chosen
from inspector.inspection.trust import Trust
from inspector.replay.decisions import Decisions

__all__ = ["check_complete"]


def check_complete(
    runs: Sequence[HeldRun],
    chips: Sequence[HeldChip],
    replays: Sequence[SignedReplay],
    chosen: Mapping[str, Chosen],
    evidence: Evidence,
    trust: Trust,
) -> None:
    """Everything that an ACCEPT needs is there."""
    past = {span.name for span in past_spans(evidence["labs"], trust) if not span.gone and not span.shows_nothing}
    drawn = {chip.chip for chip in chips if not chip.past}
    if not chips or drawn != set(evidence["drawn_chips"]) or len(past) != sum(chip.past for chip in chips):
        raise EvidenceError(
            "the verdict is ACCEPT, although valid evidence is missing for a drawn chip, or for a chip that its lab "
            "has transferred"
        )
    if not drawn <= {each["chip"] for each in evidence["chips"]}:
        raise EvidenceError("the verdict is ACCEPT, but does not say how each drawn chip was asked")
    fresh = {each["chip"] for each in evidence["chips"] if each["nonce"]}
    for run in runs:
        if not run.head.finished and not fresh.issuperset(set(run.metadata.chips) & set(evidence["drawn_chips"])):
            raise EvidenceError("the verdict is ACCEPT for a run in progress, although no chip was challenged live")
        if run.run_id not in chosen and accepted_up_to(run, evidence) < covered(run, evidence):
            raise EvidenceError("the verdict is ACCEPT for a run that was not replayed")
        if run.run_id not in chosen:
            continue  # an earlier inspection has accepted all of it
        if not terms_of(run, trust):
            raise EvidenceError("the verdict is ACCEPT for a run whose declaration no inspectorate signed")
        mine = [each for each in replays if each.head == run.head_digest]
        _check_replays(run, mine, chosen[run.run_id], evidence)
        shown = (pair for each in mine for pair in compared_inside(each, run, chips))
        if missing := [snapshot.step for snapshot, is_shown in shown if is_shown is None]:
            raise EvidenceError(
                f"the verdict is ACCEPT, but step {missing[0]} was not compared with a snapshot inside it"
            )
    for entry in chips:
        _check_standing(entry, runs)
        _check_opened(entry, runs)


def _check_replays(run: HeldRun, replays: Sequence[SignedReplay], chosen: Chosen, evidence: Evidence) -> None:
    """Each device replayed what the secret gives, and each segment on other arithmetic than the trainer's."""
    if sorted(each.device for each in replays) != sorted(chosen.dealt):
        raise EvidenceError("the verdict is ACCEPT without a replay on each device")
    shown: set[int] = set()
    begins = run.declared.origin.initialisation is not None and not accepted_up_to(run, evidence)
    for each in replays:
        dealt = chosen.dealt[each.device]
        if [replay.segment for replay in each.replays] != [(part.index, part.start, part.stop) for part in dealt]:
            raise EvidenceError("the replayed segments are not those that the secret gives")
        if not all(replay.is_complete for replay in each.replays):
            raise EvidenceError("the verdict is ACCEPT, but a replay is not complete")
        decisions = Decisions.joined(replay.decisions for replay in each.replays)
        if doubts := examine(decisions, run.declared.numerics, each.device).doubts:
            raise EvidenceError(f"the verdict is ACCEPT although {doubts[0]}")
        if begins and any(replay.initial_state is None for replay in each.replays if not replay.segment[1]):
            raise EvidenceError("the verdict is ACCEPT, but the declared initialisation was not executed")
        if each.fingerprint != run.metadata.device["fingerprint"]:
            shown |= {segment.index for segment in dealt}
    if shown != {segment.index for segment in chosen.segments}:
        raise EvidenceError("a segment was replayed only by devices that compute like the training device")


def _check_opened(entry: HeldChip, runs: Iterable[HeldRun]) -> None:
    """The state of each step is opened that a chip has taken a snapshot of."""
    known = {run.run_id: run for run in runs}
    for record in entry.case.records:
        run = known.get(record.run_id.hex())
        if record.kind is not RecordKind.SNAPSHOT or run is None:
            continue
        is_beyond = not run.head.finished and record.step > run.head.steps
        if not is_beyond and record.step not in run.opened.leaves:
            raise EvidenceError(
                f"the state of step {record.step} is not opened, although a chip has taken a snapshot of it"
            )


def _check_standing(entry: HeldChip, runs: Iterable[HeldRun]) -> None:
    """What a chip had heard of a run before its log begins is of the transcript that is judged."""
    for run in runs:
        heard = entry.case.standing.runs.get(bytes.fromhex(run.run_id))
        if heard is None or entry.chip not in run.metadata.chips or entry.lab != run.lab:
            continue
        if not run.has_root(heard.most + 1, heard.head):
            text = f"an earlier inspection accepted step {heard.most} of a run of chip {entry.chip} with a head that "
            raise EvidenceError(text + "the bundle does not show to be the lab's")
