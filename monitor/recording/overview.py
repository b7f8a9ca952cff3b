"""What a dry run has found of a loop: how much of it is recorded, what of it is bound, and what a step will cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.programs.program import Program
from monitor.recording.state_watch import HeldState
from monitor.replay.repetition import ProgramTraining, scalars_of
from monitor.transcript import Execution

__all__ = ["Cost", "Overview", "Taken", "cost_of"]

_READINGS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step's program: by PyTorch's own kernels, under the run's numerics, and the state's digest."""

    native: float
    controlled: float
    digest: float

    @property
    def ratio(self) -> float:
        return (self.controlled + self.digest) / self.native


@dataclass(frozen=True, slots=True)
class Overview:
    """What a recorder would make of a loop.

    Attributes:
        recorded: numbers of tensors of the state by kind, and of steps, evaluations, writes between steps and programs.
        bound: hyper-parameters that the update's numbers were compared with.
        unbound: those, and weights, that no number was compared with, each with the reason.
        refused: number of refusals.
        numerics, seed: as the recorder has them.
        cost: of the last step; None where none could be repeated.
    """

    recorded: Mapping[str, int]
    bound: Sequence[str]
    unbound: Mapping[str, str]
    refused: int
    numerics: str
    seed: int
    cost: Cost | None

    def to_json(self) -> dict[str, object]:
        """JSON-able values; times in seconds."""
        cost = self.cost
        return {
            "recorded": dict(self.recorded),
            "bound": list(self.bound),
            "unbound": dict(self.unbound),
            "refused": self.refused,
            "numerics": self.numerics,
            "seed": self.seed,
            "cost": None
            if cost is None
            else {"native": cost.native, "controlled": cost.controlled, "digest": cost.digest, "ratio": cost.ratio},
        }

    def rows(self) -> list[tuple[str, str]]:
        """As a table: a name and what is said of it."""
        counts = Counter(self.recorded)
        tensors = ", ".join(
            f"{counts[kind]} {words}"
            for kind, words in (
                ("weight", "weights"),
                ("buffer", "buffers"),
                ("optimizer", "tensors of the optimizer"),
            )
        )
        taken = f"{counts['step']} steps, {counts['evaluation']} evaluations and {counts['write']} writes between steps"
        reasons: dict[str, list[str]] = {}
        for name, reason in sorted(self.unbound.items()):
            reasons.setdefault(reason, []).append(name)
        unbound = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        cost = self.cost
        return [
            ("recorded", f"{tensors}, in {taken}, by {counts['program']} programs"),
            ("bound", ", ".join(self.bound) or "nothing"),
            ("unbound", unbound or "nothing"),
            ("refused", str(self.refused) if self.refused else "nothing"),
            ("random", f"all random numbers of a step come from the recorder's seed, which is {self.seed}"),
            (
                "cost",
                "not known: no step could be repeated"
                if cost is None
                else f"{cost.ratio:.2g} times native: {_milliseconds(cost.controlled)} under {self.numerics} and "
                f"{_milliseconds(cost.digest)} for the state's digest, {_milliseconds(cost.native)} natively, "
                "without disk and chips' snapshots",
            ),
        ]


@dataclass(frozen=True, slots=True)
class Taken:
    """A training step that a dry run has understood."""

    program: Program
    execution: Execution
    batch: Mapping[str, Tensor]


def cost_of(taken: Taken, declared: Declaration, held: HeldState) -> Cost | None:
    """Take a step from its program again, natively and under the run's numerics: the quickest of three times each.

    None where an operator's own kernel returns other tensors than the program names, as that of an embedding bag does.
    """

    def seconds(control: Callable[..., numerics.Session]) -> tuple[float, ProgramTraining]:
        found = []
        training = ProgramTraining(declared, device=next(iter(held.before.values())).device)
        for _ in range(_READINGS):
            training.memory.load(held.before)
            begun = time.perf_counter()
            training.run(taken.program, scalars_of(taken.program, taken.execution), taken.batch, control)
            found.append(time.perf_counter() - begun)
            training.step = 0
        return min(found), training

    try:
        native, _ = seconds(partial(numerics.recording, "native"))
    except EvidenceError:
        return None
    controlled, training = seconds(partial(numerics.recording, declared.numerics))
    begun = time.perf_counter()
    training.memory.digest()
    return Cost(native, controlled, time.perf_counter() - begun)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
