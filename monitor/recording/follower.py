"""Follows a step whose program is known: its operators in order, and the numbers that only this step takes.

This serves bodies that cannot do anything else than their program, such as a preset's: of a step only operators,
numbers, draws and reads are looked at, not the wiring.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import NO_WORK, Meter
from firmware_sim.errors import CallerError
from monitor.numerics import Observer
from monitor.numerics.arguments import Arguments, Keywords
from monitor.programs.calls import charge, charge_part, writes_list
from monitor.programs.capture import read_value
from monitor.programs.flop import makes
from monitor.programs.keys import RecordedKeys
from monitor.programs.program import ITEM, Program

__all__ = ["Follower"]


class Follower:
    """Observes a step that runs a program which was captured before.

    Attributes:
        reads: values that the step read with ``.item()`` and the like.
        taken: number of operators so far.
        updating: an optimizer's update is under way.
        carried: empty; such a step finds nothing of steps before but the state.
    """

    def __init__(self, program: Program, keys: RecordedKeys, meter: Meter, inner: Observer | None = None) -> None:
        """``meter`` is that of the memory; ``inner`` an observer that runs first, such as one that alters results."""
        self.reads: list[str] = []
        self.carried: dict[str, Tensor] = {}
        self.updating = False
        self.taken = 0
        self.program = program
        self._keys = keys
        self._meter = meter
        self._inner = inner
        self._changed: list[tuple[str, int]] = []
        self._work = NO_WORK

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """The call must be the program's next."""
        if self._inner is not None:
            self._inner.before(index, func, args, kwargs)
        operators = self.program.operators
        if index >= len(operators) or operators[index] is not func:
            raise CallerError(f"call {index} of the step is {func}, but the step's program has a different call there")
        for number, (kind, *path) in self.program.scalar_places[index]:
            value: Any = args if kind == "args" else kwargs
            for key in path:
                value = value[key]
            text = float(value).hex()
            if text != self.program.scalars[number]:
                self._changed.append((text, number))
        self._work = self.program.works[index]

    def wrote_part(self, number: int, count: int) -> None:
        """One of the tensors of a list that a call writes is written."""
        charge_part(self._meter, self._work, number, count)

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Note what the call read and drew."""
        if self._inner is not None:
            self._inner.after(index, func, args, kwargs, out)
        if self._keys.take() != list(self.program.calls[index]["draws"]):
            raise CallerError(f"call {index} of the step ({func}) does not draw the random keys that its program lists")
        if self.program.calls[index]["operator"] == ITEM:
            self.reads.append(read_value(out))
        if not writes_list(func):
            charge(self._meter, self._work)
        if makes(func):
            self._meter.holdings.note(out)
        self.taken = index + 1

    def slots(self) -> dict[str, tuple[int, ...]]:
        """Each value that differs from the program's own, with the numbers of its scalars, once the step has ended."""
        if self.taken != len(self.program.calls):
            raise CallerError(f"the step ends after {self.taken} of its program's {len(self.program.calls)} calls")
        slots: dict[str, list[int]] = {}
        for text, number in self._changed:
            slots.setdefault(text, []).append(number)
        return {text: tuple(numbers) for text, numbers in slots.items()}
