"""Finds the optimizer's updates among the operators of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.reference import CLASSES
from monitor.declaration.statement import class_name, hyper_of, plain_number
from monitor.numerics.arguments import Arguments, Keywords
from monitor.programs.capture import Capture
from monitor.recording.follower import Follower

__all__ = ["OptimizerUpdates"]

Hyper = Mapping[str, Any]
_Arguments = tuple[Arguments, Keywords]


class OptimizerUpdates:
    """Where the updates of the open step lie, and the hyper-parameters that they take.

    Attributes:
        places: first and end of each update, counted in the step's operators.
        used: hyper-parameters of each group at the step's updates; without one, those of ``begin``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.places: list[tuple[int, int]] = []
        self._tensors = [
            (group, name, value, plain_number(value))
            for member in getattr(optimizer, "roots", [optimizer])
            if class_name(member) in CLASSES
            for group in member.param_groups
            for name, value in group.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]
        for group, name, _, number in self._tensors:
            group[name] = number
        self.used: list[Hyper] = [hyper_of(group) for group in optimizer.param_groups]
        self._optimizer = optimizer
        self._observed: Capture | Follower | None = None
        self._start = self._depth = 0
        self._foresee: Callable[[Optimizer], None] = _nothing
        self._hooks = [
            optimizer.register_step_pre_hook(self.before_update),
            optimizer.register_step_post_hook(self.after_update),
        ]

    def begin(
        self,
        observed: Capture | Follower,
        declared: Sequence[Hyper],
        foresee: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """A step opens, whose operators ``observed`` sees.

        ``foresee`` receives which optimizer, of several, updates, as the class's own calls begin.
        """
        self._observed, self.places, self.used, self._depth = observed, [], list(declared), 0
        self._updated: set[int] = set()
        self._foresee = foresee or _nothing

    def end(self) -> None:
        """The step is over."""
        self._observed = None

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for group, name, tensor, _ in self._tensors:
            if not isinstance(group[name], Tensor):
                group[name] = tensor.fill_(group[name])
        for hook in self._hooks:
            hook.remove()

    def before_update(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> _Arguments | None:
        """Called before each ``optimizer.step``; a scheduler may change the learning rate right after it.

        A closure is called first, and returns new arguments where there is one.
        """
        if self._observed is None:
            return None  # between steps, where a write of the state is found
        for _, name, tensor, number in self._tensors:
            if plain_number(tensor) != number:
                raise CallerError(
                    f"the optimizer's {name} was given as a tensor, and its value has changed; a recorded run takes "
                    f"plain numbers: set group[{name!r}] of optimizer.param_groups instead"
                )
        own = [any(group is each for each in optimizer.param_groups) for group in self._optimizer.param_groups]
        self.used += [{}] * (len(own) - len(self.used))  # groups that came later are refused as the step ends
        for number, group in enumerate(self._optimizer.param_groups):
            if own[number] or number not in self._updated:  # a schedule may already have moved on another optimizer's
                used = hyper_of(group)
                if number in self._updated and used != self.used[number]:
                    raise CallerError(
                        "hyper-parameters change between two updates of one step; record each update as a separate step"
                    )
                self.used[number] = used
        self._updated |= {number for number, mine in enumerate(own) if mine}
        self._depth += 1
        if self._depth == 1:  # one that this optimizer holds may be stepped by its own step
            self._start, self._observed.updating = self._observed.taken, True
        owner, *given = args
        closure = kwargs.get("closure", given[0] if given else None)
        if closure is None:
            self._foresee(optimizer)
            return None

        observed = self._observed

        def and_foresee() -> Any:
            observed.updating = False
            found = closure()
            observed.updating = True
            self._foresee(optimizer)
            return found

        return ((owner,), {"closure": and_foresee})

    def after_update(self, *_: object) -> None:
        """Called after each ``optimizer.step``."""
        if self._observed is not None:
            self._depth -= 1
            if not self._depth:
                self._observed.updating = False
                self.places.append((self._start, self._observed.taken))


def _nothing(_: Optimizer) -> None:
    pass
