"""Which chips and segments an inspection looks at, by a seed that is not known before the labs have signed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from firmware_sim.errors import CallerError
from inspector.inspection.document import Odds
from inspector.inspection.guards import Settings
from inspector.probability.odds import Audit, usual_violations
from inspector.replay.segment import Segment
from monitor.transcript import Leaf

__all__ = [
    "Chosen",
    "challenge_seed",
    "choose",
    "draw",
    "drawn_uniformly",
    "evaluations_in",
    "first_and_drawn",
    "odds_of",
    "odds_text",
    "run_seed",
    "witness_draw",
]

_CONFIDENCE = 0.9
"""What a price is stated for where no confidence is asked for."""


def draw(items: Iterable[str], count: int, seed: bytes) -> list[str]:
    """Draw ``count`` different items: those with the smallest SHA-256(seed ‖ item), which anyone can check."""
    return sorted(items, key=lambda item: hashlib.sha256(seed + item.encode()).digest())[:count]


def challenge_seed(secret: str, heads: Iterable[str]) -> bytes:
    """H(verifier's secret ‖ signed heads): the lab commits to everything, quotes included, before it can know this.

    Args:
        heads: SHA-256, in hex, of each run's manifest.
    """
    hasher = hashlib.sha256(b"chipwitness/draw/1")
    hasher.update(hashlib.sha256(secret.encode()).digest())
    for digest in sorted(map(bytes.fromhex, heads)):
        hasher.update(digest)
    return hasher.digest()


def nonce_of(seed: bytes, chip: str) -> bytes:
    """The nonce of a drawn chip's live challenge, which no one knows before the secret is opened."""
    return hashlib.sha256(b"chipwitness/nonce/1" + seed + chip.encode()).digest()


def run_seed(seed: bytes, run_id: str) -> bytes:
    """The seed of the draw of one run's segments."""
    return hashlib.sha256(seed + bytes.fromhex(run_id)).digest()


def witness_draw(seed: bytes, segment: int) -> bytes:
    """What decides, of a run's draw, at which step of a segment batches are altered, and how (``witnesses``)."""
    return hashlib.sha256(seed + b"/witness/" + str(segment).encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The segments of one run that are replayed, in order, and how many of them were drawn uniformly.

    Attributes:
        dealt: by device, those that it replays, in order; each segment on one at least. No device without any.
        audit: of the segments that were not judged before; None where there is none.
        since: the step up to which an earlier inspection has accepted the run.
        evaluations: by number, how many of a segment's steps are evaluations, where any is.
    """

    segments: Sequence[Segment]
    dealt: Mapping[str, Sequence[Segment]]
    audit: Audit | None
    since: int = 0
    evaluations: Mapping[int, int] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        """Steps of training that are replayed."""
        return sum(each.stop - each.start - self.evaluations.get(each.index, 0) for each in self.segments)


def choose(
    every: Sequence[Segment],
    steps: Collection[int],
    settings: Settings,
    seed: bytes,
    *,
    evaluations: Mapping[int, int],
    since: int = 0,
) -> Chosen:
    """Choose the first segment, uniform ones, and some that hold a snapshot, as ``Settings.sampling`` says.

    Args:
        every: all segments of a run.
        steps: those at which drawn chips took snapshots.
        seed: of this run's draw.
        evaluations: by number, how many of a segment's steps are evaluations (``evaluations_in``).
        since: the step up to which an earlier inspection has accepted the run: of no segment that ends before it any
            step is replayed again, and the first that does not is as any other.

    Raises:
        CallerError: no segment may be replayed.
    """
    if settings.segments is not None and settings.segments < 1:
        raise CallerError("at least one segment must be replayed")
    every = [segment for segment in every if segment.stop > since]
    if not every:
        return Chosen(segments=[], dealt={}, audit=None, since=since)
    evaluations = {each.index: evaluations[each.index] for each in every if evaluations.get(each.index)}
    lengths = [each.stop - each.start - evaluations.get(each.index, 0) for each in every]
    certain = frozenset({0}) if not since else frozenset[int]()
    seen = [
        segment for segment in every[1:] if any(step in steps for step in range(segment.start + 1, segment.stop + 1))
    ]
    most = len(every) if settings.segments is None else min(settings.segments, len(every))
    if settings.sampling is None:
        wanted = first_and_drawn([every[0], *seen], most, seed)
        audit = Audit(lengths, frozenset({0}))
        dealt = _dealt(wanted, settings, seed)
        return Chosen(segments=wanted, dealt=dealt, audit=audit, since=since, evaluations=evaluations)
    asked = Audit(lengths, certain).needed(settings.sampling.against, settings.sampling.confidence)
    drawn = min(asked, most - len(certain))
    uniform = drawn_uniformly(every, drawn, seed) if certain else _drawn(every, drawn, seed)
    rest = [segment for segment in seen if segment not in uniform]
    count = min(settings.samples, most - len(certain) - drawn)
    more = draw([str(segment.index) for segment in rest], count, seed + b"/snapshots/")
    picked = sorted([*uniform, *(segment for segment in rest if str(segment.index) in more)])
    audit = Audit(lengths, certain, drawn)
    dealt = _dealt(picked, settings, seed)
    return Chosen(segments=picked, dealt=dealt, audit=audit, since=since, evaluations=evaluations)


def evaluations_in(every: Sequence[Segment], leaves: Sequence[Leaf]) -> dict[int, int]:
    """By number of a segment, how many of its steps are evaluations; segments without any are left out."""
    counts = {each.index: sum(not leaf.trains for leaf in leaves[each.start + 1 : each.stop + 1]) for each in every}
    return {index: count for index, count in counts.items() if count}


def _dealt(chosen: Sequence[Segment], settings: Settings, seed: bytes) -> dict[str, list[Segment]]:
    """By device, the segments that it replays: those of the share that all do, and every so many-th of the others."""
    order = draw([str(segment.index) for segment in chosen], len(chosen), seed + b"/devices/")
    shared = math.ceil(settings.shared * len(chosen))
    names = list(dict.fromkeys(settings.devices))  # one that is named twice has one place
    dealt = {name: {*order[:shared], *order[shared + number :: len(names)]} for number, name in enumerate(names)}
    return {name: [each for each in chosen if str(each.index) in mine] for name, mine in dealt.items() if mine}


def drawn_uniformly(every: Sequence[Segment], count: int, seed: bytes) -> list[Segment]:
    """The first segment, and ``count`` of the others, each of which is as likely, whatever snapshots show."""
    return first_and_drawn(every, 1 + count, seed)


def first_and_drawn(wanted: Sequence[Segment], count: int, seed: bytes) -> list[Segment]:
    """The first of the segments, where a forged start would show, and ``count`` - 1 drawn among the others."""
    return [wanted[0], *_drawn(wanted[1:], count - 1, seed)]


def _drawn(wanted: Sequence[Segment], count: int, seed: bytes) -> list[Segment]:
    """``count`` of them, each as likely, in order."""
    drawn = set(draw([str(segment.index) for segment in wanted], count, seed))
    return [segment for segment in wanted if str(segment.index) in drawn]


def odds_of(chosen: Chosen, settings: Settings) -> dict[str, object]:
    """What a verdict says of one run's replayed segments: coverage, chances of escape, and the price of less.

    Keys: ``steps`` (of training), ``segments``, ``evaluations`` (by segment, of those that are none, how many),
    ``replayed_segments``, ``replayed_steps``, ``coverage`` (the share of the steps of training),
    ``drawn`` of ``drawn_from`` (the uniform draw), ``confidence``, ``against`` (None where none was asked for),
    ``affordable`` (whether as many were drawn as that takes), and ``violations``, rows of ``Audit.table``. Where an
    earlier inspection has accepted the run up to a step, ``since`` is that step, and all else is about later segments.
    """
    audit, sampling = chosen.audit, settings.sampling
    assert audit is not None
    confidence = _CONFIDENCE if sampling is None else sampling.confidence
    usual = usual_violations(audit.steps)
    asked = () if sampling is None or sampling.against in usual else (sampling.against,)
    replayed = chosen.trained
    return {
        "steps": audit.steps,
        "evaluations": {str(index): count for index, count in chosen.evaluations.items()},
        "segments": len(audit.lengths),
        "replayed_segments": len(chosen.segments),
        "replayed_steps": replayed,
        "coverage": replayed / audit.steps if audit.steps else 1.0,
        "drawn": audit.drawn,
        "drawn_from": audit.others,
        "confidence": confidence,
        "against": None if sampling is None else str(sampling.against),
        "affordable": sampling is None or audit.drawn >= audit.needed(sampling.against, confidence),
        "violations": audit.table((*asked, *usual), confidence),
        **({"since": chosen.since} if chosen.since else {}),
    }


def odds_text(odds: Sequence[Odds]) -> str:
    """The odds of an acceptance in words: the worst run's, for each kind of violation; nothing where none was replayed.

    A confidence that was not paid for is named with its price.
    """
    if not odds:
        return ""
    replayed, steps = (sum(each[key] for each in odds) for key in ("replayed_steps", "steps"))
    worst = max(odds, key=lambda each: sum(row["escapes"] for row in each["violations"]))
    chances = ", ".join(
        {row["text"]: f"{row['escapes']:.2g} for {row['text']}" for row in worst["violations"]}.values()
    )
    new = " that are new" if any("since" in each for each in odds) else ""
    text = f"{replayed} of {steps} steps of training{new} replayed; a lab that knows everything except the "
    text += f"secret of the draw escapes with these chances: {chances}"
    short = [row for row in worst["violations"] if row["escapes"] > (1 - worst["confidence"]) * (1 + 1e-9)]
    if short:
        prices = ", ".join({row["text"]: f"{row['needed_steps']} for {row['text']}" for row in short}.values())
        text += f"; steps to replay to catch them with a chance of {worst['confidence']:.4g}: {prices}"
    return text
