"""The closed list of lies, and the names by which a command line knows them."""

from __future__ import annotations

import enum

from firmware_sim.errors import CallerError

__all__ = ["ChipLie", "LabLie", "parse_lie"]


class _Lie(enum.Enum):
    """A member's value is its name on the command line; `description` says what the liar does, in one line."""

    description: str

    def __new__(cls, value: str, description: str) -> _Lie:
        member = object.__new__(cls)
        member._value_ = value
        member.description = description
        return member


class ChipLie(_Lie):
    """Lies of a chip (Shavit 2023, section 3)."""

    SKIP_SNAPSHOTS = "skip-snapshots", "takes no snapshot although the schedule demands it"
    PREDICT_SCHEDULE = "predict-schedule", "tells the lab beforehand when a snapshot will fall"
    SWAP_WEIGHTS = "swap-weights", "shows other weights while a snapshot is taken"
    HIDE_REGION = "hide-region", "leaves a memory region out of table and snapshots"
    REPLAY_SNAPSHOT = "replay-snapshot", "records its first snapshot's digest again and again"
    ROLL_BACK_LOG = "roll-back-log", "after an inspection restores log, counter and state from before"
    TRUNCATE_LOG = "truncate-log", "hands over its log without the end"
    EDIT_RECORD = "edit-record", "hands over its log with one record altered"
    SPLICE_LOGS = "splice-logs", "hands over its log with an idle chip's records in place of its own, relinked"
    CLONE_IDENTITY = "clone-identity", "presents the identity of another chip"
    RUN_OLD_FIRMWARE = "run-old-firmware", "runs withdrawn firmware with a lower security version"
    SIGN_WITH_ANOTHER_KEY = "sign-with-another-key", "signs quotes with a key that its certificate does not name"
    OPEN_EPOCH = "open-epoch", "leaves the epoch open in which it skips snapshots, so that no one can audit it"
    OWN_MAKER_CA = "own-maker-ca", "comes from a maker that the lab made up"


class LabLie(_Lie):
    """Lies of a lab with honest chips (Shavit 2023, sections 4 and 5)."""

    CHANGE_SAMPLE = "change-sample", "trains on one other sample than it declares"
    REORDER_DATA = "reorder-data", "trains on the declared samples in another order"
    EXTRA_STEPS = (
        "extra-steps",
        "trains steps that the transcript does not show, while its chips believe that they idle",
    )
    EXTRA_TICKS = "extra-ticks", "lets its chips work on something that the transcript does not show"
    UNTOLD_STEPS = "untold-steps", "trains steps that the transcript does not show, and tells its chips nothing"
    UNTOLD_WORK = "untold-work", "works with the state between two steps, and tells of it in none"
    MORE_WORK = "more-work", "works with the state between two steps, more than was agreed, and tells of it"
    STEP_AS_EVALUATION = "step-as-evaluation", "calls a step that trains an evaluation"
    DROPPING_EVALUATION = "dropping-evaluation", "drops optimizer state in an evaluation"
    MOVING_EVALUATION = (
        "moving-evaluation",
        "keeps optimizer state in another place after an evaluation, with other values",
    )
    OTHER_MEMORY = (
        "other-memory",
        "keeps another model in its chips' memory while they idle, put there past every operator",
    )
    UNSEEN_STEP = "unseen-step", "ends a segment in which its chips took no snapshot with other weights"
    ELSEWHERE_STEPS = "elsewhere-steps", "trains steps that the transcript does not show, on no registered chip"
    STALE_SNAPSHOTS = (
        "stale-snapshots",
        "shows the initial weights whenever its chips idle; later ones are made up",
    )
    EARLY_TICKS = "early-ticks", "lets its chips work for no run before the run"
    PAUSED_TICKS = "paused-ticks", "shuts its chips down in mid-run, lets them work for no run, and goes on"
    OTHER_DATA = "other-data", "declares one sample of noise over and over in place of the preset's data"
    OTHER_LEARNING_RATE = "other-learning-rate", "trains with another learning rate than it declares"
    FORGED_INITIALISATION = "forged-initialisation", "starts from weights that the declared seed does not give"
    CHAINED_RUNS = "chained-runs", "declares one long run as several short ones"
    EDITED_OPTIMIZER = "edited-optimizer", "edits the optimizer state between two steps"
    EDITED_ROUNDING_LOG = "edited-rounding-log", "steers rounding by a forged log, all downstream recomputed"
    HIDDEN_CONSTANT = "hidden-constant", "hides an update in a constant of the program"
    UNSEEN_WRITE = "unseen-write", "writes to the weights where no operator shows it"
    UNDECLARED_RUN = "undeclared-run", "trains a run for which it has no transcript"
    UNDECLARED_CHIPS = "undeclared-chips", "trains on chips that no registry knows"
    FAKE_LAYERS = "fake-layers", "surrounds the sampled shard with made-up layers"
    TOLERATED_DRIFT = "tolerated-drift", "drifts by less than an inspector with a tolerance would see"
    TWO_TRANSCRIPTS = "two-transcripts", "keeps two transcripts for one run"
    TRUNCATED_TRANSCRIPT = "truncated-transcript", "hands over a transcript without the end"
    UNDER_REPORTED_FLOP = "under-reported-flop", "declares fewer FLOP than the run took"
    EDITED_CHIP_LOG = "edited-chip-log", "trains hidden steps and edits the chips' logs to hide them"
    WRONG_OPERATOR = "wrong-operator", "returns one wrong result of one operator"
    SELF_MADE_TRUST = "self-made-trust", "puts its own trust anchors into the run"


def parse_lie(name: str) -> ChipLie | LabLie:
    """Return the lie called `name`, or raise CallerError with the names that exist."""
    lies: list[ChipLie | LabLie] = [*ChipLie, *LabLie]
    for lie in lies:
        if lie.value == name:
            return lie
    names = ", ".join(lie.value for lie in lies)
    raise CallerError(f"unknown lie {name!r}; there are {names}")
