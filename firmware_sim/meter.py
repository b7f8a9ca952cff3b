"""The meter of a chip: how much work each operator is, and the counter that all operators on its memory pass.

A chip is the device on which operators run, so it knows their names and the shapes of what they read and write, and
nothing of why they run. One process stands for all chips that hold a state together: they share one counter, and each
counts its part of every operator in proportion to the bytes of the state that it holds.

What the meter cannot see is what does not run on that memory: the host's own arithmetic, writes by a raw pointer, and
other processes. It claims nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import NoReturn, SupportsIndex

from firmware_sim.evidence.digest import DTYPE_SIZES
from firmware_sim.evidence.work import Work
from firmware_sim.holdings import Holdings

__all__ = ["NEVER", "Meter", "Operand", "work_of"]

Operand = tuple[str, Sequence[int]]
"""Type and shape of a tensor that an operator reads, writes or returns."""

Shapes = Sequence[Sequence[int]]
Waiting = Callable[[Work, Work], None]
NEVER = 1 << 80
"""A count that no meter reaches."""


class Meter:
    """Counts the work on the memory that some chips hold together, since it was made.

    It stands for silicon: whatever runs operators on such memory passes each of them here, when it has run and before
    the next one does. It says what it has counted, and nothing of what is to come: neither whether somebody waits, nor
    for what; nor can it be copied, to be asked in its place.

    Attributes:
        holdings: results of these operators that are still held.
    """

    __slots__ = ("_calls", "_flop", "_moved", "_next_calls", "_next_flop", "_next_moved", "_waiting", "holdings")

    def __init__(self) -> None:
        self.holdings = Holdings()
        self._calls = self._flop = self._moved = 0
        self._waiting: dict[Waiting, Work] = {}
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
        self._waiting[waiting] = at
        self._look_for_next()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a meter is no value: it can be neither copied nor pickled")

    def _wake(self, before: Work, after: Work) -> None:
        due = [
            each
            for each, at in self._waiting.items()
            if self._calls >= at.calls or self._flop >= at.flop or self._moved >= at.moved
        ]
        for each in due:
            del self._waiting[each]
        self._look_for_next()
        with ExitStack() as calls:  # the next is called even where one before it is interrupted
            for each in reversed(due):
                calls.callback(each, before, after)

    def _look_for_next(self) -> None:
        awaited = self._waiting.values()
        self._next_calls = min((at.calls for at in awaited), default=NEVER)
        self._next_flop = min((at.flop for at in awaited), default=NEVER)
        self._next_moved = min((at.moved for at in awaited), default=NEVER)

    @property
    def total(self) -> Work:
        """Everything so far."""
        return Work(self._calls, self._flop, self._moved)


def work_of(operator: str, inputs: Sequence[Operand], outputs: Sequence[Operand], *, transposed: bool = False) -> Work:
    """Return the work of one call; one on lists of tensors counts as a call for each that it returns or writes.

    Args:
        operator: the ATen overload, such as ``aten.mm.default``.
        inputs: all tensors that it takes, in the order of its arguments.
        outputs: what it returns, then what it writes.
        transposed: of a convolution, whether it is a transposed one.
    """
    name = operator.split(".")[1]
    count = _PRODUCTS.get(name.rstrip("_"))
    flop = 0
    if count is not None:
        flop = count([shape for _, shape in inputs], [shape for _, shape in outputs], transposed)
    calls = max(len(outputs), 1) if name.startswith("_foreach_") else 1
    return Work(calls, flop, sum(prod(shape) * DTYPE_SIZES[kind] for kind, shape in (*inputs, *outputs)))


def _matrices(at: int) -> Callable[[Shapes, Shapes, bool], int]:
    """Products whose left factor is the input number `at`: each of its elements meets each column of the other one."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        left, right = inputs[at], inputs[at + 1]
        return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)

    return count


def _grouped(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Products of parts of one matrix with matrices of their own, or of a batch of them."""
    left, right = inputs[0], inputs[1]
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * prod(left[-2:]) * right[-1]


def _convolution(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    held, weight = (inputs if transposed else outputs)[0], inputs[1]
    return 2 * prod(held) * prod(weight[1:])


def _convolution_backward(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Gradients of input and weight are as much as the product itself; that of the bias, of rank 1, is a sum."""
    gradient, held, weight = inputs
    products = sum(len(shape) > 1 for shape in outputs)
    return 2 * prod(held if transposed else gradient) * prod(weight[1:]) * products


def _attention(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Two products for each query and key, one of them with the values."""
    query, key, value = inputs[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_PRODUCTS: Mapping[str, Callable[[Shapes, Shapes, bool], int]] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "mv": _matrices(0),
    "dot": _matrices(0),
    "vdot": _matrices(0),
    "_grouped_mm": _grouped,
    "addmm": _matrices(1),
    "addmv": _matrices(1),
    "baddbmm": _matrices(1),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
}
"""Products among operators, by ATen's name without overload and mark of those in place.

Fused attention occurs beside recorded steps alone, which take its plain operators."""
