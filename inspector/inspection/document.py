"""The evidence of a verdict on runs, key by key, as ``--json`` prints it and a bundle carries it.

These are the types of JSON values: a verdict of earlier may lack keys that came later, and one of ``verify`` or of an
inspection that stopped has those that it came to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from inspector.inspection.run_evidence import RunEvidence

__all__ = [
    "AllDraws",
    "Amount",
    "Chance",
    "ChipDraws",
    "ChipEvidence",
    "ChipLedger",
    "Coinciding",
    "Counts",
    "Evidence",
    "LabLedger",
    "Ledger",
    "LineageEvidence",
    "Odds",
    "Repeats",
    "ReplayEvidence",
    "Shards",
    "SpanEvidence",
    "VerifiedRun",
]


class LineageEvidence(TypedDict):
    """Where a run comes from.

    Attributes:
        origin: seed, initialisation, parent or supplied.
        parent: id of the run from which it took over what it declares to, or None.
        chain: runs that it continues, the oldest first, and itself.
        chain_flop: of all of them.
        chain_most_flop: upper limit of chain_flop: it adds the most work that elementwise operators can hide; None if
            unknown.
        past_unknown: why more work may have come before, or None.
    """

    run: str
    run_id: str
    origin: str
    parent: str | None
    chain: Sequence[str]
    chain_flop: int
    chain_most_flop: int | None
    past_unknown: str | None


class Draw(TypedDict):
    """The draw of chips, which anyone can repeat.

    Attributes:
        secret: the verifier's.
        simulated: the secret was fixed by --seed.
        heads: SHA-256 of each manifest that the draw binds.
        every_lab: chips of labs that declare nothing were drawn, too.
    """

    secret: str
    simulated: bool
    heads: Sequence[str]
    every_lab: bool


class Snapshot(TypedDict):
    """A snapshot that a run explains.

    Attributes:
        operators: how many had run inside of the step; 0 for the whole of it.
    """

    run_id: str
    step: int
    operators: int


class ChipDraws(TypedDict):
    """Snapshots that chance demanded of a chip.

    Attributes:
        demanded: by the secret schedule.
        expected: on average.
        chance: of that number or fewer.
        epochs: whose keys were revealed; shutdowns and challenges end one, too.
        cut: snapshots that a loss of power interrupted.
    """

    demanded: int
    expected: float
    chance: float
    epochs: int
    cut: int


class AllDraws(TypedDict):
    """The same of all drawn chips together.

    Attributes:
        demanded: by the secret schedules.
        expected: on average.
        chance: of that number or fewer.
        rate: snapshots in a tick.
        tick: what a tick is, in words.
    """

    demanded: int
    expected: float
    chance: float
    rate: str
    tick: str


class Counts(TypedDict):
    """Work as meters count it.

    Attributes:
        moved: bytes.
        busy_us: a chip's time in microseconds.
    """

    calls: int
    flop: int
    moved: int
    busy_us: int


class Amount(Counts):
    """Work of a kind.

    Attributes:
        moved: bytes.
        busy_us: a chip's time in microseconds.
        share: of what was declared, the largest of three; None of nothing.
    """

    share: float | None


class Ledger(TypedDict):
    """What a chip's meter counted.

    Attributes:
        declared: work of the committed steps.
        kinds: all other work, by what it was for.
        slack: work without a known purpose.
        runs: the same by id, of several runs.
    """

    declared: Counts
    kinds: Mapping[str, Amount]
    slack: Amount
    runs: NotRequired[Mapping[str, Ledger]]


class ChipLedger(Ledger):
    """The same of one chip.

    Attributes:
        declared: work of the committed steps.
        kinds: all other work, by what it was for.
        slack: work without a known purpose.
        runs: the same by id, of several runs.
        limit: the share of slack that is allowed.
        excused: work that restarts may have repeated, which does not count.
    """

    limit: float
    excused: Counts


class LabLedger(Ledger):
    """The same of all drawn chips of a lab.

    Attributes:
        declared: work of the committed steps.
        kinds: all other work, by what it was for.
        slack: work without a known purpose.
        runs: the same by id, of several runs.
        chips: how many were drawn.
        excused: ids of runs whose restarts do not count against a limit.
    """

    chips: int
    excused: Sequence[str]


_First = TypedDict("_First", {"from": int})


class SpanEvidence(_First):
    """The records of a chip that one owner answers for.

    Attributes:
        from: number of the first.
        until: number of the one behind the last, or None.
        ended: why there are no more.
    """

    owner: str
    until: int | None
    ended: str


class ChipEvidence(TypedDict):
    """A drawn chip, or a span of one that its lab has no more.

    Attributes:
        run, run_id: of the run in whose folder its evidence lay; empty where it lay in none.
        shard: that it holds of that run.
        certificate: SHA-256.
        sound: its evidence passed all checks.
        log_counter: number of its last record.
        log_size, log_start: records of the log, and the number of the first.
        nonce: of the challenge; empty where it was not challenged.
        time: the last at which its log is known to end there, in seconds since 1970; 0 if unknown.
        metered: work that its meter counted.
        rates: what it does in a second at most.
        counted: work of the records that were judged.
        held_bytes: results outside the state, at most.
        extends: whether its log goes on from an earlier inspection's; None where none is remembered.
        snapshots_in_repeats: that fell inside repeated steps.
        unexplained_records: numbers of records that no run explains.
        power_gaps: numbers of records of a loss of power.
        steps_beyond_heads: that it took after the runs were handed over.
        span: whose records these are, of a chip that changed hands.
    """

    chip: str
    run: str
    run_id: str
    shard: int | None
    certificate: str
    sound: bool
    log_counter: int
    log_size: int
    log_start: int
    log_head: str
    nonce: str
    time: int
    metered: Mapping[str, int]
    rates: Mapping[str, Any] | None
    counted: Mapping[str, int] | None
    held_bytes: int
    ledger: ChipLedger | None
    draws: ChipDraws | None
    extends: bool | None
    snapshots: Sequence[Snapshot]
    snapshots_in_repeats: int
    unexplained_records: Sequence[int]
    power_gaps: Sequence[int]
    boots: int
    steps_beyond_heads: int
    span: NotRequired[SpanEvidence]


class Chance(TypedDict):
    """A lie.

    Attributes:
        probability: that this inspection catches it, at least.
    """

    lie: str
    probability: float


class ViolationOdds(TypedDict):
    """A violation.

    Attributes:
        segments_touched: None where it cannot but show.
        escapes: the chance that it is not seen.
        needed_draws, needed_steps, needed_share: what the confidence would cost: segments, and their steps.
    """

    violation: str
    text: str
    segments_touched: int | None
    escapes: float
    needed_draws: int
    needed_steps: int
    needed_share: float


class Odds(TypedDict):
    """What the replayed segments of a run show.

    Attributes:
        steps: of training.
        evaluations: by segment, steps that are evaluations.
        coverage: share of the steps of training.
        drawn, drawn_from: of the uniform draw.
        against: the violation that was asked for, or None.
        affordable: as many were drawn as that takes.
        violations: the chance that each escapes, and what it takes to catch it.
        since: the step up to which an earlier inspection has accepted the run; all else is about later segments.
    """

    run: str
    run_id: str
    steps: int
    evaluations: Mapping[str, int]
    segments: int
    replayed_segments: int
    replayed_steps: int
    coverage: float
    drawn: int
    drawn_from: int
    confidence: float
    against: str | None
    affordable: bool
    violations: Sequence[ViolationOdds]
    since: NotRequired[int]


class ReplayEvidence(TypedDict):
    """A device's replay of a run's segments.

    Attributes:
        fingerprint: of the device's arithmetic.
        seconds: that it took.
        segments: that it replayed, of segments_in_run.
        returned: what programs returned, and what of it is not a gradient.
        dropped: workers that took no part.
        snapshots_inside_steps: of drawn chips, compared with what the replay passed through.
        largest_changes: by parameter group, the largest change of an element in a step, over measured_steps.
        steps: that were taken again.
        logged_decisions: of the rounding logs.
        free_decisions: where devices may differ.
        turned_decisions: unlike the device.
        allowed_decisions: as many of these would have passed.
        writable_bits: that such decisions can write.
        not_calibrated: kinds of sums without a measured rate.
        first_turned_step: None where no decision is unlike the device.
        malformed: true where the answer has another form, and so says nothing of the run.
        equal: whether all is as the run and its chips say.
    """

    run: str
    run_id: str
    device: str
    fingerprint: str
    seconds: float | None
    segments: Sequence[int]
    segments_in_run: int
    returned: Sequence[Mapping[str, Any]]
    dropped: Sequence[str]
    snapshots_inside_steps: NotRequired[int]
    largest_changes: NotRequired[Sequence[float | None]]
    measured_steps: NotRequired[int]
    steps: NotRequired[int]
    logged_decisions: NotRequired[int]
    free_decisions: NotRequired[int]
    turned_decisions: NotRequired[int]
    allowed_decisions: NotRequired[int]
    writable_bits: NotRequired[float]
    not_calibrated: NotRequired[Sequence[str]]
    first_turned_step: NotRequired[int | None]
    malformed: NotRequired[bool]
    equal: bool


class Shards(TypedDict):
    """What labs opened of drawn chips' snapshots.

    Attributes:
        not_kept: snapshots that a lab does not keep.
        differences: of each snapshot that no run explains: chip, record, step, tensor, element, held and replayed.
    """

    opened: int
    not_kept: int
    differences: Sequence[Mapping[str, Any]]


class Repeats(TypedDict):
    """Work that was repeated after restarts.

    Attributes:
        snapshots: that fell inside of it.
        escapes: the chance that as much hidden work meets none.
    """

    snapshots: int
    escapes: float


class Coinciding(TypedDict):
    """Runs that pass through the same states.

    Attributes:
        states: how many.
    """

    runs: Sequence[str]
    states: int


class Evidence(TypedDict, total=False):
    """The evidence of a verdict on runs.

    Attributes:
        runs: that were judged.
        time: of the judgment.
        accepted_before: by id, the step up to which an earlier inspection accepted a run.
        lineages: where each run comes from.
        labs: outcome of each lab.
        forks: of each run whose heads contradict each other, run_id and both heads.
        draw: of chips.
        drawn_chips: their names.
        registered_chips: of which they were drawn.
        chips_listed: where the list of chips comes from, in words.
        rates: by chip, what it does in a second at most.
        clones: proofs that two chips show one identity.
        ledger: by lab, what its drawn chips' meters counted.
        draws: snapshots that chance demanded.
        chips: the drawn chips; of verify, all.
        past_spans: records of other owners, or of chips that their labs have no more.
        repeats: work that was repeated after restarts.
        coinciding: runs that share states.
        known_chips, extended_chips: with --memory: drawn chips seen before, and those that show something newer.
        odds: of each run: coverage, and the chance that each violation escapes.
        replays: of each run on each device.
        snapshots_inside_steps, snapshots_compared_inside_steps: between the operators of a step, and those in replayed
            segments.
        chances: for each lie, the least probability that this inspection catches it.
        shards: with --shards.
        rules: with --rules: digest, rules, require (which rules must hold), found (quantities, by rule), results
            (whether each rule holds) and labs.
        checkpoints: with --checkpoints: the accepted size of each chip's log.
        model: with --model: name, sha256, files, ignored, not_compared, buffers and run_id.
        one_process: one process played inspectorate and cluster.
        round: of an inspection by rounds: what was announced.
        opened: of such a round: files and bytes that each lab opened to the cluster.
        refused_files: that the cluster had not asked for.
    """

    runs: Sequence[RunEvidence]
    time: str
    accepted_before: Mapping[str, int]
    lineages: Sequence[LineageEvidence]
    labs: Mapping[str, str]
    forks: Sequence[Mapping[str, str]]
    draw: Draw
    drawn_chips: Sequence[str]
    registered_chips: int
    chips_listed: str
    rates: Mapping[str, Any]
    clones: Sequence[Mapping[str, Any]]
    ledger: Mapping[str, LabLedger]
    draws: AllDraws
    chips: Sequence[ChipEvidence]
    past_spans: Sequence[ChipEvidence]
    repeats: Repeats
    coinciding: Sequence[Coinciding]
    known_chips: Sequence[str]
    extended_chips: Sequence[str]
    odds: Sequence[Odds]
    replays: Sequence[ReplayEvidence]
    snapshots_inside_steps: int
    snapshots_compared_inside_steps: int
    chances: Sequence[Chance]
    shards: Shards
    rules: Mapping[str, Any]
    checkpoints: Mapping[str, Any]
    model: Mapping[str, Any]
    one_process: bool
    round: Mapping[str, Any]
    opened: Sequence[Mapping[str, Any]]
    refused_files: int


class VerifiedRun(Evidence, RunEvidence):
    """The evidence of ``verify``: what is known of the run, and of the chips of its lab."""
