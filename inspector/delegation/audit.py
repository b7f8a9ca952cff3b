"""A client that runs a share of a provider's steps again, drawn once their results are signed (Srivastava et al.)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random, SystemRandom

from inspector.delegation.errand import checked_state
from inspector.dispute.claim import Claim
from inspector.probability.chances import chip_drawn
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import zeros
from monitor.transcript.orders import OrderFolder

__all__ = ["Audit", "audit"]

_DRAW = SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What came of it.

    Attributes:
        steps: that were run again, in order.
        of: steps in all.
        wrong: the first of them that does not lead to what the provider has signed; None where all do.
    """

    steps: tuple[int, ...]
    of: int
    wrong: int | None

    def found(self, false_steps: int) -> float:
        """Chance that a run with so many false steps is found."""
        return chip_drawn(chips=self.of, liars=false_steps, drawn=len(self.steps))

    def text(self, name: str) -> str:
        """In words."""
        if self.wrong is not None:
            return f"step {self.wrong} of {name}, run again here, does not lead to what {name} has signed"
        tenth = max(self.of // 10, 1)
        return (
            f"{len(self.steps)} of {self.of} steps of {name} were run again here, and are right: 1 false step is found "
            f"with probability {self.found(1):.3g}, {tenth} of them with {self.found(tenth):.3g}"
        )


def audit(
    claim: Claim,
    order: OrderFolder,
    share: float,
    progress: Callable[[int], None] = lambda _: None,
    draw: Random = _DRAW,
) -> Audit:
    """Run a share of the steps of a claim again, rounded up; each from the state before it, which the provider opens.

    Raises:
        Failure: the provider does not open what it committed to.
    """
    count = len(order.order.steps)
    drawn = tuple(sorted(draw.sample(range(1, count + 1), math.ceil(share * count))))
    wrong = None if str(claim.leaf(0).state.root) == order.order.declaration.origin.state else 0
    for step in drawn:
        if wrong is None and not _is_right(claim, order, step, progress):
            wrong = step
    return Audit(steps=drawn, of=count, wrong=wrong)


def _is_right(claim: Claim, order: OrderFolder, step: int, progress: Callable[[int], None]) -> bool:
    ordered, stated = order.order.steps, claim.leaf(step)
    training = ProgramTraining(order.order.declaration)
    state = checked_state(claim, step - 1, progress)
    training.restore(state, step - 1)
    past = None if step == 1 else order.program(ordered[step - 2].execution.program)
    training.left = zeros(state) if past is None else past.absent
    execution = ordered[step - 1].execution
    mine, _ = training.take_step(order.program(execution.program), execution, order.batch(step), b"", b"")
    assert mine.execution is not None
    return (
        ordered[step - 1].is_of(stated.execution)
        and (mine.state, mine.loss, mine.flop) == (stated.state, stated.loss, stated.flop)
        and stated.execution is not None
        and mine.execution.reads == stated.execution.reads
    )
