"""The meter of a chip: how much work each operator is, and the counter that all operators on its memory pass.

A chip is the device on which operators run, so it knows their names and the shapes of what they read and write, and
nothing of why they run. One process simulates all chips that hold a state together: they share one counter, and each
counts its part of every operator in proportion to the bytes of the state that it holds.

What the meter cannot see is what does not run on that memory: the host's own arithmetic, writes by a raw pointer, and
other processes. It claims nothing about them.

What lies in a chip's memory outside its declared regions: results of operators, as long as something holds them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NoReturn, SupportsIndex

from firmware_sim.evidence.digest import DTYPE_SIZES
from firmware_sim.evidence.work import Work
from firmware_sim.operations import COUNTS, per_complex

__all__ = ["KEPT_BYTES", "NEVER", "Holdings", "Meter", "Operand", "work_of"]


KEPT_BYTES = 1 << 20
"""Results of earlier steps that a lab may keep, losses for instance: an escape, of which verdicts tell."""


class Holdings:
    """Results of operators on one memory that are still held.

    A result counts with the bytes of its elements; views share the storage of what they view and count once. Tensors of
    a simulated device are not counted.
    """

    __slots__ = ("__weakref__", "_changes", "_forget", "_held", "_ranges")

    def __init__(self) -> None:
        self._held: dict[weakref.ref[Any], int] = {}
        self._changes = 0
        self._ranges: tuple[int, list[tuple[int, int]]] = (0, [])  # with the number of changes before
        mine = weakref.ref(self)

        def forget(gone: weakref.ref[Any]) -> None:
            self = mine()
            if self is not None:
                self._held.pop(gone, None)
                self._changes += 1

        self._forget = forget

    def note(self, made: Any) -> None:
        """Count what an operator returned: a tensor, or any in a tuple or list; anything else is no memory.

        PyTorch keeps the object of a storage, and so the reference to it, as long as anything holds the memory.
        """
        if isinstance(made, (tuple, list)):
            for each in made:
                self.note(each)
            return
        torch: Any = sys.modules.get("torch")  # without it there is no tensor
        if torch is not None and type(made) is torch.Tensor and made.layout is torch.strided:
            self._held.setdefault(weakref.ref(torch.Tensor.untyped_storage(made), self._forget), made.nbytes)
            self._changes += 1

    def holds(self, tensor: Any) -> bool:
        """Whether a plain tensor lies in the memory of such a result, by its address, as any alias does."""
        torch: Any = sys.modules["torch"]
        if not self._held:
            return False
        if weakref.ref(torch.Tensor.untyped_storage(tensor)) in self._held:
            return True
        changes, (known, ranges) = self._changes, self._ranges
        if known != changes:
            storages = [each() for each in list(self._held)]
            ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each is not None)
            self._ranges = changes, ranges
        at = bisect_right(ranges, (torch.Tensor.data_ptr(tensor), sys.maxsize)) - 1
        return at >= 0 and torch.Tensor.data_ptr(tensor) < ranges[at][1]

    @property
    def byte_count(self) -> int:
        """Bytes that are held now."""
        return sum(list(self._held.values()))


Operand = tuple[str, Sequence[int]]
"""Type and shape of a tensor that an operator reads, writes or returns."""

Waiting = Callable[[Work, Work], None]
_UNREAD = frozenset({"empty_like", "new_empty", "new_empty_strided"})
"""What hands out memory in the form of a tensor reads none of it."""
NEVER = 1 << 80
"""A count that no meter reaches."""


class Meter:
    """Counts the work on the memory that some chips hold together, since it was made.

    It simulates silicon: whatever runs operators on such memory passes each of them here, when it has run and before
    the next one does. It says what it has counted, and nothing of what is to come: neither whether somebody waits, nor
    for what; nor can it be copied, to be asked in its place. One thread may run operators while another one gives a
    chip a command.

    Attributes:
        holdings: results of these operators that are still held.
    """

    __slots__ = (
        "_calls",
        "_flop",
        "_lock",
        "_moved",
        "_next_calls",
        "_next_flop",
        "_next_moved",
        "_waiting",
        "holdings",
    )

    def __init__(self) -> None:
        self.holdings = Holdings()
        self._calls = self._flop = self._moved = 0
        self._waiting: dict[Waiting, Work] = {}
        self._lock = threading.RLock()  # a signal's handler may run operators in the thread that holds it
        self._next_calls = self._next_flop = self._next_moved = NEVER

    def charge(self, work: Work) -> None:
        """Count one operator."""
        self._calls += work.calls
        self._flop += work.flop
        self._moved += work.moved
        if self._calls >= self._next_calls or self._moved >= self._next_moved or self._flop >= self._next_flop:
            after = self.total
            self._wake(after - work, after)

    def wake(self, at: Work, waiting: Waiting) -> None:
        """Call ``waiting`` once, with the operator by which any of the counts in ``at`` is reached; ``NEVER`` is not.

        It is given what was counted before and after that operator. Who waits already waits for ``at`` instead.
        """
        with self._lock:
            self._waiting[waiting] = at
            self._look_for_next()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a meter cannot be copied or pickled")

    def _wake(self, before: Work, after: Work) -> None:
        with self._lock:
            due = [
                each
                for each, at in list(self._waiting.items())
                if self._calls >= at.calls or self._flop >= at.flop or self._moved >= at.moved
            ]
            for each in due:
                self._waiting.pop(each, None)
            self._look_for_next()
        with ExitStack() as calls:  # the next is called even where one before it is interrupted
            for each in reversed(due):
                calls.callback(each, before, after)

    def _look_for_next(self) -> None:
        awaited = list(self._waiting.values())
        self._next_calls = min((at.calls for at in awaited), default=NEVER)
        self._next_flop = min((at.flop for at in awaited), default=NEVER)
        self._next_moved = min((at.moved for at in awaited), default=NEVER)

    @property
    def total(self) -> Work:
        """Everything so far."""
        return Work(self._calls, self._flop, self._moved)


def work_of(
    operator: str,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    *,
    transposed: bool = False,
    dims: Sequence[int] = (),
) -> Work:
    """Return the work of one call; one on lists of tensors counts as a call for each that it returns or writes.

    Args:
        operator: the ATen overload, such as ``aten.mm.default``.
        inputs: all tensors that it takes, in the order of its arguments.
        outputs: what it returns, then what it writes.
        transposed: of a convolution, whether it is a transposed one.
        dims: of a Fourier transform, the dimensions that it is taken along.
    """
    name = operator.split(".")[1]
    count = COUNTS.get(name.rstrip("_"))
    flop = 0
    if count is not None:
        shapes, made = [shape for _, shape in inputs], [shape for _, shape in outputs]
        length = prod(max(shapes[0][dim], made[0][dim]) for dim in dims) if dims else transposed
        flop = count(shapes, made, length) * per_complex(name, (kind for kind, _ in inputs))
    calls = max(len(outputs), 1) if name.startswith("_foreach_") else 1
    moved = outputs if name in _UNREAD else (*inputs, *outputs)
    return Work(calls, flop, sum(prod(shape) * DTYPE_SIZES[kind] for kind, shape in moved))
