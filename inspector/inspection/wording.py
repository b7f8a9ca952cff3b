"""What a verdict says in words: what was found to hold, what that does not cover, and how each lab came out of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from firmware_sim import KEPT_BYTES
from inspector.inspection.document import Evidence, ReplayEvidence
from inspector.inspection.execution import NOT_REVIEWED
from inspector.inspection.lineage import lineage_text
from inspector.inspection.number_wording import numbers_text
from inspector.inspection.run_evidence import RunEvidence
from inspector.inspection.sampling import odds_text
from inspector.inspection.slack import limit_of, share_text, slack_text
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Outcome
from inspector.inspection.witnesses import returned_text
from monitor.declaration.countersignature import Countersigned
from monitor.declaration.statement import MOST_SLACK, Declaration

__all__ = [
    "ONE_PROCESS",
    "REVEALS",
    "acceptance",
    "caveats",
    "ignored_text",
    "logs_text",
    "outcomes_by_lab",
    "scope",
    "signed_text",
]

REVEALS = (
    "a reader of the bundle sees, for each opened step and each snapshot of a drawn chip, bits of the loss and digests "
    "without a salt of the state, the rounding log and the values read. Who knows the state before a step can check "
    "a guess of its whole batch. The bundle also shows the declaration, counts, digests of programs and of a "
    "preset's data set, and single values of the optimizer and of paths that were not agreed. Samples and batches by "
    "themselves have digests with a salt"
)
"""What a bundle's reader learns of a lab's secrets."""
ONE_PROCESS = "one process played inspectorate and cluster"

_UNMETERED = (
    "unmetered work (NumPy, native code, raw pointers, other processes, threads started before the meter, "
    "unregistered chips)"
)
_OLDER = (
    "labs that prepare evidence before they are challenged, or choose it once they know which chips were drawn",
    "chips put back to a copy of an earlier state",
)
_UNCLOCKED = "how long a tick of its chips is, which no trust file says"
_BETWEEN = "chips put back to a copy of the state in which they were asked, before they are asked again"
_KEPT = f"undeclared data in chips' memory, if no larger than what a step writes plus {KEPT_BYTES} bytes"
_SLACK = (
    "work without a known purpose (slack), up to {} of the declared work, and steps that are repeated after a restart"
)
_LOGS = (
    "what rounding logs decide: on {device} they chose {turned_decisions} of {free_decisions} free results unlike it, "
    "and {allowed_decisions} such choices, which can write {writable_bits} bits, would have passed"
)
_UNSEEN = "false steps in segments that were not replayed (see the odds)"
_SILENT = "labs that declare nothing"


def acceptance(evidence: Evidence, terms: Iterable[tuple[str, Sequence[Countersigned]]]) -> str:
    """The sentence of an acceptance; ``terms`` as of ``caveats``."""
    clauses = (
        _states_text,
        _draws_text,
        _progress_text,
        _inside_text,
        _replays_text,
        lambda found: ignored_text(found["runs"]),
        _known_text,
        _logs_of_chips_text,
        _ledger_text,
        _coinciding_text,
        _answers_text,
    )
    text = "".join(clause(evidence) for clause in clauses)
    return f"{text}; {evidence['chips_listed']}{caveats(evidence, terms)}"


def _states_text(evidence: Evidence) -> str:
    """How many snapshots were explained, and how many steps were replayed where."""
    replays, chips = evidence.get("replays", []), evidence.get("chips", [])
    snapshots = sum(len(chip["snapshots"]) for chip in chips)
    whose = _snapshots_text(evidence) if chips else ""
    counts = Counter[str]()
    for replay in replays:
        counts[replay["device"]] += replay.get("steps", 0)
    devices = ", ".join(f"{count} on {device}" for device, count in sorted(counts.items()))
    text = f"{snapshots} snapshots{whose} of {len(chips)} drawn chips match states of the declared training, and "
    replayed = f"{counts.total()} replayed steps ({devices}) match the committed states bit for bit"
    return text + (replayed if replays else "no step was replayed")


def _draws_text(evidence: Evidence) -> str:
    """How many snapshots chance demanded, and how many it demands on average."""
    if not (draws := evidence.get("draws")):
        return ""
    drawn = [(chip["draws"], chip["boots"]) for chip in evidence.get("chips", []) if chip["draws"]]
    epochs, boots = sum(each["epochs"] for each, _ in drawn), sum(count for _, count in drawn)
    return (
        f"; {draws['demanded']} snapshots were due and {draws['expected']:.1f} are expected on average, at "
        f"{draws['rate']} in a tick of {draws['tick']}, over {epochs} epochs and {boots} boots"
    )


def _progress_text(evidence: Evidence) -> str:
    """Which runs go on, and up to where an earlier inspection accepted them."""
    text = ""
    for run in evidence["runs"]:
        if not run["finished"]:
            whole = "" if run["declared_steps"] is None else f" of {run['declared_steps']}"
            text += f"; {run['run']} is unfinished, and this covers its first {run['steps']}{whole} steps"
        if step := evidence.get("accepted_before", {}).get(run["run_id"]):
            text += f"; an earlier inspection accepted {run['run']} up to step {step}"
    return text


def _inside_text(evidence: Evidence) -> str:
    """How many snapshots fell between the operators of a step."""
    if not (within := evidence.get("snapshots_inside_steps", 0)):
        return ""
    compared = evidence["snapshots_compared_inside_steps"]
    unseen = f", {within - compared} of them in segments that were not replayed" if within > compared else ""
    return f"; {within} of the snapshots fell inside steps{unseen}"


def _replays_text(evidence: Evidence) -> str:
    """What rounding logs chose, what programs returned, and which workers dropped out."""
    replays = evidence.get("replays", [])
    dropped = sorted({node for replay in replays for node in replay["dropped"]})
    text = logs_text(replays) + returned_text(replays)
    return text + (f"; workers that took no part: {', '.join(dropped)}" if dropped else "")


def _known_text(evidence: Evidence) -> str:
    """How many drawn chips go on from an earlier inspection."""
    if "known_chips" not in evidence:
        return ""
    known, extended = len(evidence["known_chips"]), len(evidence["extended_chips"])
    same = f", and {known - extended} showed nothing newer than what was seen then" if known > extended else ""
    drawn = len(evidence["drawn_chips"])
    return f"; {extended} of {drawn} drawn chips continue from where an earlier inspection left them{same}"


def _logs_of_chips_text(evidence: Evidence) -> str:
    """Where the drawn chips' logs begin and end, and whose they were."""
    chips, text = evidence.get("chips", []), ""
    if pruned := sum(chip["log_start"] > 0 for chip in chips):
        text += f"; the logs of {pruned} drawn chips begin after checkpoints that an inspectorate signed"
    for each in (*chips, *evidence.get("past_spans", [])):
        if span := each.get("span"):
            until = "on" if span["until"] is None else f"to {span['until']}"
            text += f"; chip {each['chip']} changed hands: its records from {span['from']} {until} are "
            text += f"{span['owner']}'s" if span["owner"] else "no one's"
    if beyond := max((chip["steps_beyond_heads"] for chip in chips), default=0):
        text += f"; since then chips have taken up to {beyond} more steps, which the next inspection covers"
    return text


def _coinciding_text(evidence: Evidence) -> str:
    """Which runs pass through the same states."""
    names, text = {run["run_id"]: run["run"] for run in evidence["runs"]}, ""
    for each in evidence.get("coinciding", []):
        shared = " and ".join(names[run] for run in each["runs"])
        text += (
            f"; {shared} pass through {each['states']} identical states, and a snapshot of one of these is counted for "
        )
        text += "the run whose memory was attached"
    return text


def _answers_text(evidence: Evidence) -> str:
    """How many chips answered a challenge, and how many snapshots were opened."""
    text = ""
    if challenged := sum(bool(chip["nonce"]) for chip in evidence.get("chips", [])):
        text += f"; {challenged} drawn chips answered a challenge that was made after the draw"
    if shards := evidence.get("shards"):
        text += f"; {shards['opened']} of the chips' snapshots were opened, and match what the chips hashed"
    return text


def caveats(evidence: Evidence, terms: Iterable[tuple[str, Sequence[Countersigned]]]) -> str:
    """What an acceptance is worth to any reader: numbers left free, origins, odds, the draw, and who was played.

    Args:
        terms: of each run its name, and what was countersigned.
    """
    draw = evidence.get("draw", {})
    text = numbers_text([run["execution"] for run in evidence["runs"]]) + lineage_text(evidence["lineages"])
    text += f"; {odds_text(evidence['odds'])}" if evidence.get("odds") else ""
    text += f"; judged at {evidence['time']!s:.20}" if "time" in evidence else ""
    text += "; simulated draw: anyone who knows the seed knew it beforehand" if draw.get("simulated") else ""
    return text + signed_text(terms)


def ignored_text(runs: Sequence[RunEvidence]) -> str:
    """What an acceptance adds about files that lie in a run's folder and are no part of it."""
    text = ""
    for run in runs:
        if count := run["ignored"]["count"]:
            names = run["ignored"]["names"][:5]
            more = f" and {count - len(names)} more" if count > len(names) else ""
            text += f"; ignored in {run['run']}, unread: {', '.join(names)}{more}"
    return text


def logs_text(replays: Sequence[ReplayEvidence]) -> str:
    """What an acceptance adds about rounding logs."""
    logged = sum(replay.get("logged_decisions", 0) for replay in replays)
    turned = sum(replay.get("turned_decisions", 0) for replay in replays)
    if not logged:
        return ""
    text = (
        f"; the rounding logs decided {logged} results where devices may differ, {turned} of them differently from the "
        "device"
    )
    unknown = sorted({name for replay in replays for name in replay.get("not_calibrated", ())})
    text += f" and so could write up to {turned} bits" if turned else ""
    return text + (f"; not calibrated, so judged by the highest measured rate: {', '.join(unknown)}" if unknown else "")


def _ledger_text(evidence: Evidence) -> str:
    """What an acceptance says of all that the chips' meters count, and of what they hold outside the state."""
    if not (chips := evidence.get("chips", [])):
        return ""
    held = max(chip["held_bytes"] for chip in chips)
    return f"{_counted_text(evidence)}; the chips saw at most {held} bytes of results outside the state"


def _counted_text(evidence: Evidence) -> str:
    """What the meters count in addition to the committed steps."""
    ledgers = [chip["ledger"] for chip in evidence["chips"] if chip["ledger"]]
    if not ledgers:
        return ""
    executions = [run["execution"] for run in evidence.get("runs", [])]
    counts = {
        "are evaluations": sum(each["evaluations"] for each in executions),
        "lie between steps": sum(each["writes"] for each in executions),
    }
    extras = " and ".join(f"{count} {words}" for words, count in counts.items() if count)
    evaluations = f" ({extras})" if extras else ""
    if not any(ledger["slack"]["calls"] for ledger in ledgers):
        return f"; the chips' meters count the committed steps{evaluations} and nothing else"
    text = f"; in addition to the committed steps{evaluations} the chips' meters count slack"
    worst = max(ledgers, key=lambda ledger: math.inf if (share := ledger["slack"]["share"]) is None else share)
    for lab, ledger in evidence["ledger"].items():
        text += f": on {ledger['chips']} drawn chips of {lab} together {slack_text(ledger)}"
        if ledger["excused"]:
            text += f"; what {len(ledger['excused'])} of their boots repeated does not count against a limit"
    text += f"; on one chip up to {share_text(worst['slack']['share'])} of what was declared"
    repeated = sum(chip["snapshots_in_repeats"] for chip in evidence["chips"])
    if repeats := evidence.get("repeats"):
        text += (
            f"; {repeated} snapshots fell inside repeated steps and matched; hidden work of the same size, by "
            "operators on "
        )
        text += f"the chips' memory, escapes them with a chance of {repeats['escapes']:.2g}, and always escapes where "
        text += "known states are restored without any operator"
    return text


def _snapshots_text(evidence: Evidence) -> str:
    """How many snapshots are whose: a verdict on a run rests on that run's alone."""
    found = Counter(shot["run_id"] for chip in evidence["chips"] for shot in chip["snapshots"])
    if len(evidence["runs"]) < 2:
        return ""
    each = ", ".join(f"{found[run['run_id']] or 'none'} of {run['run']}" for run in evidence["runs"])
    return f" ({each})"


def signed_text(terms: Iterable[tuple[str, Sequence[Countersigned]]]) -> str:
    """Who countersigned, if the signer is simulated, and since when amendments count; ``terms`` as of ``caveats``."""
    every = [(name, each) for name, agreed in terms for each in agreed]
    text = "; countersigned by a simulated inspectorate" if any(each.simulated for _, each in every) else ""
    amended = [
        f"{name} since step {each.since} by statement {each.number} of {each.signed}"
        for name, each in every
        if each.number > 1
    ]
    return text + (f"; amended: {', '.join(amended)}" if amended else "")


def scope(
    declared: Sequence[Declaration],
    trust: Trust,
    *,
    live: bool = False,
    beacons: bool = False,
    every: bool = False,
    replays: Sequence[ReplayEvidence] = (),
) -> str:
    """The scope of an acceptance: what it does not cover.

    Args:
        declared: of each run.
        live: chips were challenged after the draw.
        beacons: and signs of life from them agreed, so that none can have been elsewhere in between.
        every: chips were drawn of labs that declare nothing, too.
        replays: what the evidence holds of each replay.
    """
    derived = all(each.recipe is not None for each in declared)
    old = (() if beacons else (_BETWEEN,)) if live else _OLDER
    silent = () if every else (_SILENT,)
    slack = max((limit_of(each, trust) for each in declared), default=MOST_SLACK)
    parts = [
        _UNMETERED,
        _KEPT,
        _SLACK.format(share_text(float(slack))),
        *old,
        *((_UNCLOCKED,) if set(trust.chips) - set(trust.chip_trust.clocks) else ()),
        _UNSEEN,
        *_written(replays),
        *silent,
        *(() if derived else NOT_REVIEWED),
    ]
    return "not covered: " + "; ".join(parts)


def _written(replays: Sequence[ReplayEvidence]) -> list[str]:
    """What rounding logs could have written where most of it would have passed."""
    most = max(replays, key=lambda replay: replay.get("writable_bits", 0.0), default=None)
    return [_LOGS.format(**most)] if most is not None and most.get("free_decisions") else []


def outcomes_by_lab(findings: Findings, trust: Trust, labs: Collection[str], *, ended: bool = True) -> dict[str, str]:
    """The outcome of each lab by itself: what a run says wrongly counts against the lab that signed it.

    What is not known to be of any lab accuses no one, and leaves all of them open.

    Args:
        ended: the inspection came to its end; where it did not, no lab is accepted.
    """

    def blamed(where: Mapping[str, Any]) -> str | None:
        return where.get("lab") or trust.chips.get(where.get("chip", ""))

    guilty = {blamed(reason.where) for reason in findings.found}
    open_points = {blamed(reason.where) for reason in findings.doubts}
    outcomes = {}
    for lab in sorted(labs):
        outcome = Outcome.ACCEPT
        if not ended or None in guilty or open_points & {lab, None}:
            outcome = Outcome.INCONCLUSIVE
        if lab in guilty:
            outcome = Outcome.REJECT
        outcomes[lab] = outcome.value
    return outcomes
