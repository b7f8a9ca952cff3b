"""How an honest lab behaves, as the moments at which a lie could depart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from monitor import numerics
from monitor.numerics import Bound

if TYPE_CHECKING:
    from pathlib import Path

    from monitor.declared_data import DeclaredData
    from monitor.numerics import Observer
    from monitor.recorder import PresetRecorder
    from monitor.site import Site, SiteConfig
    from monitor.task import Task
    from monitor.training import Training
    from monitor.transcript import Leaf, RunData

__all__ = ["Conduct", "undeclared"]


def undeclared(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of the same shapes that nobody declared."""
    return {name: values.flip(0).roll(1, -1) for name, values in batch.items()}


class Conduct:
    """The honest lab.

    Attributes:
        bound: by which the lab obeys its own rounding logs when it takes a committed step again.
    """

    bound = Bound()

    def check(self, task: Task, config: SiteConfig) -> None:
        """Raise CallerError if this lie cannot be told in that task by that lab."""

    def declare_data(self, data: DeclaredData) -> DeclaredData:
        """Return the samples and their order that the lab declares and trains on."""
        return data

    def before_run(self, task: Task, data: RunData, site: Site) -> None:
        """Called once before the chips hold the run's memory."""

    def initialise(self, training: Training, site: Site) -> None:
        """Called on the initial state before it is committed."""

    def order(self, step: int, steps: int) -> int:
        """Return the step whose declared batch is really trained on, of all ``steps``."""
        return step

    def batch(self, step: int, declared: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch that is really trained on."""
        return declared

    def learning_rate(self, step: int, declared: float) -> float:
        """Return the learning rate that is really used."""
        return declared

    def observer(self, step: int) -> Observer | None:
        """Return an observer that may alter operator results."""
        return None

    def record(self, step: int, training: Training, take: Callable[[], Tensor]) -> tuple[bytes, Tensor]:
        """Take a step by calling ``take`` under recording numerics; return the rounding log and the loss."""
        with numerics.recording(training.task.numerics, observer=self.observer(step)) as session:
            loss = take()
        return session.log, loss

    def before_commit(self, step: int, training: Training) -> None:
        """Called after a step was taken and before its state is committed."""

    def declare(self, leaf: Leaf) -> Leaf:
        """Return the leaf that the lab commits to."""
        return leaf

    def head(self, step: int, shard: int, recorder: PresetRecorder) -> bytes:
        """Return the root of the log of steps that the chip with a shard is told after a step."""
        return recorder.root(step)

    def tick(self, step: int, recorder: PresetRecorder) -> None:
        """Let the tick pass in which the chips hold the state after a step."""
        recorder.tick_chips(step)

    def after_step(self, step: int, recorder: PresetRecorder) -> None:
        """Called after a step was committed and the chips have seen it."""

    def hand_over(self, shard: int, evidence: dict[str, bytes], recorder: PresetRecorder) -> dict[str, bytes]:
        """Return the evidence files of the chip that holds a shard, as the lab hands them over."""
        return evidence

    def publish(self, run: Path, site: Site) -> None:
        """Called with the finished run folder before anybody else sees it."""
