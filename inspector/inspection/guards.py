"""The checks of an inspection, each with a name, and how an inspection is done."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from firmware_sim.errors import CallerError
from inspector.probability.odds import Violation

__all__ = ["Guard", "Sampling", "Settings"]


class Guard(enum.Enum):
    """One check of the inspector."""

    IDENTITY = "identity"
    """A chip's certificate chain ends at a trusted maker, with allowed firmware, and the registry lists the chip."""
    REGISTRY = "registry"
    """The registry's signed view gives the chip to its lab, under the certificate that the chip presents."""
    CLONE = "clone"
    """No two chips in all evidence present one identity, and no chip has two logs."""
    LOG_CHAIN = "log-chain"
    """A chip's log hangs together and is the one that its fresh quote covers."""
    SCHEDULE = "schedule"
    """A chip's log holds exactly the snapshots that its revealed epoch keys demand."""
    COMMITMENT = "commitment"
    """The chips recorded the run's metadata, memory layout and log heads as the run states them."""
    SNAPSHOT = "snapshot"
    """Each snapshot is explained by exactly one (run, step, shard), the newest when it was taken."""
    TIME = "time"
    """From one beacon to the next a chip works no longer than agreed, and no more than its device can."""
    METER = "meter"
    """Between any two records a chip's meter counts exactly the work of the steps that were committed between them."""
    DATA = "data"
    """The samples open the commitment in the metadata, and each step trains on its declared batch."""
    INITIALISATION = "initialisation"
    """The initial state is what the declared seed gives."""
    REPLAY = "replay"
    """Re-execution on another device reaches the committed states bit for bit."""
    ROUNDING = "rounding"
    """A rounding log chooses only where an honest device had a choice, and chooses wherever one had to."""
    PROGRAM = "program"
    """Each step runs a program that the inspector has agreed to; rules explain each number that changes."""
    RULES = "rules"
    """Declared compute equals what the program needs, and stays within the rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How many segments are drawn uniformly: as many as catch the smallest violation that matters.

    Attributes:
        confidence: the chance to catch it, in (0, 1).
        against: that violation, by the best-informed lab.

    Raises:
        CallerError: the confidence is no such chance.
    """

    confidence: float
    against: Violation

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise CallerError(f"a confidence must be above 0 and below 1, not {self.confidence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an inspection is done.

    Attributes:
        samples: number of chips to draw from the registry.
        seed: the verifier's secret text, so that a simulated draw can be repeated; None draws from the system's
            randomness, as every draw must that anybody profits from.
        committed: the seed is such randomness, and its hash was published before the labs signed (inspector.rounds).
        devices: names of the replay devices.
        segments: at most so many segments of a run are replayed on each device; None sets no such limit.
        shared: in [0, 1]; this share of the chosen segments is replayed on every device, and each other one on a single
            device, which the draw chooses too.
        sampling: the first segment is replayed, as many drawn uniformly as the sampling asks for, and one for each
            drawn chip among those that hold a snapshot of it; the odds are in the verdict. With None the first, and
            all that hold a snapshot of a drawn chip: a lab that knows where there is none is not caught.
        labs: whose chips are drawn, of labs that declare nothing too; None for the labs whose runs are given.

    Raises:
        CallerError: the share is none.
    """

    samples: int
    seed: str | None
    devices: tuple[str, ...]
    committed: bool = False
    segments: int | None = None
    shared: float = 1.0
    sampling: Sampling | None = None
    labs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.shared <= 1:
            raise CallerError(f"the share of segments that every device replays must lie in [0, 1], not {self.shared}")
