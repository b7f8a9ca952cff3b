"""How a party takes committed steps again, as the moments at which a lab may have departed from its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from monitor.numerics import Bound

if TYPE_CHECKING:
    from monitor.numerics import Observer
    from monitor.replay.moment import Moment
    from monitor.transcript import Batches, Leaf

__all__ = ["HONEST", "Behaviour"]


class Behaviour:
    """Takes steps as they were recorded; what a lab did otherwise overrides the moment at which it did.

    Attributes:
        bound: by which a party obeys the rounding logs of the steps that it takes again.
        needs_before: whether it looks at the state before a step.
    """

    bound = Bound()
    needs_before = False

    def batch(self, step: int, declared: Mapping[str, Tensor], batches: Batches) -> Mapping[str, Tensor]:
        """Return the batch that is really trained on; ``batches`` has those of other steps, as far as they came."""
        return declared

    def observer(self, step: int) -> Observer | None:
        """Return an observer that may alter operator results."""
        return None

    def before_commit(self, moment: Moment) -> None:
        """Called after a step was taken and before its state is committed."""

    def declare(self, leaf: Leaf) -> Leaf:
        """Return the leaf that the lab commits to."""
        return leaf


HONEST = Behaviour()
