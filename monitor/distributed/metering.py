"""The meter of one rank's device: what it counts in a step, and what it should by the one-process program.

A rank computes its micro-batches, as many as each other rank, then the update of its shards. So its work is that of its
passes and that of the operators after the gradients' sums. Copies are not counted, as layouts make them, nor are views,
single numbers and unset memory. The exchange, exact sums and the gradients' norms are an interval of their own, which
shows bytes alone: the chunks that a rank signs, and for each kind of collective how many bytes it handed over, which a
formula gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firmware_sim import NO_WORK, Meter, Work, work_of
from firmware_sim.errors import CallerError, EvidenceError
from monitor.distributed.statements import DIGEST_BYTES, SEAL_BYTES
from monitor.numerics import Session
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.kernels.workers import dispatch_modes
from monitor.numerics.operators.lookup import is_composite, take_apart
from monitor.programs.addresses import Addresses, are_fake, dispatches, is_dense
from monitor.programs.calls import ITEM, charge, is_view, operator_of
from monitor.programs.flop import is_uncounted, live_work
from monitor.programs.program import Program
from monitor.programs.trace import name_of, tensors_in, written_arguments

__all__ = ["STACK", "Apart", "RankMeter", "beyond", "expected_moves", "expected_work", "norms_of", "sums_at"]

STACK, _SUM, _NORM = "aten.stack.default", "aten.sum.dim_IntList", "aten.linalg_vector_norm.default"
_WITH_OUTPUT_FIRST = ("alltoall_base", "allgather_base", "allgather")
_MOVES = frozenset(
    {"aten.copy_.default", "aten.empty.memory_format", "aten.empty_strided.default", "aten.scalar_tensor.default"}
)


class RankMeter:
    """Counts the operators that run in a rank's step; it simulates silicon, as ``Meter`` does.

    Attributes:
        session: in which the step runs.
        moved: bytes that went into collectives, by kind: of the tensors that this rank gives, or reduces in place.
    """

    session: Session

    def __init__(self) -> None:
        self._meter = Meter()
        self.moved: dict[str, int] = {}

    def moves(self, func: OpOverload, args: Arguments) -> None:
        """A collective is about to run."""
        kind = func._schema.name.partition("::")[2].strip("_")
        given = args[1 if kind in _WITH_OUTPUT_FIRST else 0]
        size = sum(each.numel() * each.element_size() for each in tree_leaves(given) if isinstance(each, Tensor))
        self.moved[kind] = self.moved.get(kind, 0) + size

    @property
    def total(self) -> Work:
        """Calls and FLOP so far; bytes are zero."""
        return self._meter.total

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """A call is about to run."""

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """It has run."""
        if not _is_counted(func):
            return
        inputs, outputs = (
            [
                (str(each.dtype).removeprefix("torch."), each.shape)
                for each in tree_leaves(tree)
                if isinstance(each, Tensor)
            ]
            for tree in ((args, kwargs), out)
        )
        names = [argument.name for argument in func._schema.arguments]
        at = names.index("transposed") if "transposed" in names else len(args)
        transposed = args[at] if at < len(args) else kwargs.get("transposed", False)
        dims = args[names.index("dim")] if "_fft_" in str(func) else ()
        work = work_of(str(func), inputs, outputs, transposed=transposed is True, dims=dims)
        self._meter.charge(Work(work.calls, work.flop, 0))


class Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a rank's thread runs between steps on its part of the state, or on results of such.

    What is handed to collectives counts with its bytes, and what comes of them is a result.

    It looks from when it is made until ``leave``, as long as its owner is there. Of one that has ended it stays among
    the thread's modes and passes all on, until the next is made: a finalizer may run while somebody walks over these.

    Args:
        owner: whose loop it looks at.
        held: what lies on the rank, as its own device holds it.
    """

    supports_higher_order_operators = True
    sees_arithmetic = False  # ``monitor.numerics.kernels.workers``

    def __init__(self, owner: object, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._state, self._meter = Addresses(filter(is_dense, held)), Meter()
        _leave_ended()
        self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def has_ended(self) -> bool:
        """Whether it counts no more."""
        return self._owner() is None

    def leave(self) -> Work:
        """See operators no more; all that it counted. It passes them on where another mode was entered since."""
        self._owner = _no_owner
        _leave_ended()
        return self._meter.total

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.has_ended:
            return func(*args, **kwargs)
        if any(map(dispatches, types)):
            if are_fake(types, args, kwargs, self._is_ours):
                return func(*args, **kwargs)
            return NotImplemented  # such as DTensor, whose local tensors come back here
        is_work = isinstance(func, OpOverload) and not is_view(func) and name_of(func) != ITEM
        is_ours = is_work and any(map(self._is_ours, tensors_in((*args, *kwargs.values()))))
        if is_ours and func.namespace not in _NAMESPACES:
            raise CallerError(f"{func} between two steps is not metered by chips; write it as plain operators")
        if is_ours and is_composite(func):
            with self:  # under inference_mode it has not been taken apart yet
                return take_apart(func, args, kwargs)
        if is_ours and is_uncounted(func):
            raise CallerError(f"{func} between two steps does multiplications that no chip can count")
        out = func(*args, **kwargs)
        if is_ours:
            charge(self._meter, live_work(func, args, kwargs, out))
            self._meter.holdings.note([*written_arguments(func, args, kwargs), *tensors_in([out])])
        return out

    def _is_ours(self, tensor: Tensor) -> bool:
        return is_dense(tensor) and (self._state.reaches(tensor) or self._meter.holdings.holds(tensor))


def _no_owner() -> None:
    """In place of an owner."""


def _leave_ended() -> None:
    """Leave those that count no more, as long as no other mode was entered since."""
    while (stack := dispatch_modes()) and isinstance(stack[-1], Apart) and stack[-1].has_ended:
        stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


_NAMESPACES = ("aten", "prims", "c10d", "_c10d_functional", "fsdp")
"""Of operators whose work a chip knows, and of those that move memory between ranks."""


@lru_cache(maxsize=4096)
def _is_counted(func: OpOverload) -> bool:
    return str(func) not in _MOVES and not is_view(func)


def sums_at(program: Program, gradients: int) -> int:
    """The first call that adds gradients of micro-batches, or losses where none learns; EvidenceError without one."""
    operators = [call["operator"] for call in program.calls]
    if not gradients and STACK in operators:
        return max(at for at, operator in enumerate(operators) if operator == STACK)
    pattern = [STACK, _SUM] * gradients
    for at in range(len(operators)):
        if operators[at : at + len(pattern)] == pattern:
            return at
    raise EvidenceError("the step's program does not add up the gradients of micro-batches")


def expected_work(program: Program, gradients: int, micro_batches: int, ranks: int) -> Work:
    """What each rank's meter counts in a step of a program.

    Args:
        gradients: number of parameters that learn.
        micro_batches: of the step.
        ranks: number of processes. Norms of single gradients belong to the exchange.

    Raises:
        EvidenceError: the program's micro-batches are not alike.
    """
    start = sums_at(program, gradients)
    end = start + 2 * gradients
    size, rest = divmod(start, micro_batches)
    parts = [_calls(program, first, first + size) for first in range(0, start - rest, size)] if size else []
    if rest or not parts or any(part != parts[0] for part in parts):
        raise EvidenceError("the step's micro-batches do not all run the same operators")
    passes = micro_batches // ranks
    part = sum((work for _, work in parts[0] * passes), NO_WORK)
    norms = norms_of(program, gradients)
    update = _calls(program, end, norms.start) + _calls(program, norms.stop, len(program.calls))
    return part + sum((work for _, work in update), NO_WORK)


def norms_of(program: Program, gradients: int) -> range:
    """Which calls take norms of single gradients before the update; EvidenceError if the program adds no gradients."""
    end = sums_at(program, gradients) + 2 * gradients
    last = program.updates[0][0] if program.updates else len(program.calls)
    start = next((at for at in range(end, last) if program.calls[at]["operator"] == _NORM), last)
    stop = next((at for at in range(start, last) if program.calls[at]["operator"] != _NORM), last)
    return range(start, min(stop, start + gradients)) if gradients else range(end, end)


def expected_moves(
    pieces: Mapping[str, Sequence[tuple[int, int]]],
    frozen: Mapping[str, Sequence[tuple[int, int]]],
    *,
    micro_batches: int,
    is_sharded: bool,
    is_clipped: bool,
) -> dict[str, tuple[int, int]]:
    """Least and most bytes that a rank of several gives to each kind of collective in a step, as ``RankMeter.moved``.

    In each backward pass all ranks' rows of all gradients are exchanged; in addition, every loss travels as its bits.
    Where parameters are sharded, each pass gathers each of them once or twice, and clipping adds up norms: the largest
    magnitude of each gradient, and the nine digits and the flags of its squares' exact sum. Where they are whole, the
    sums are gathered once, and DDP may tell once in which order gradients come: 4 bytes for each and for each bucket.
    With each of these goes a seal, and at the end all ranks compare theirs; how many parameters travel together is the
    layout's own matter.

    Args:
        pieces: of each gradient, first and end of each rank's part; none in an evaluation, which only gathers.
        frozen: those of parameters that do not learn.
    """
    ranks, learns = len(next(iter((pieces or frozen).values()))), bool(pieces)
    passes = micro_batches // ranks
    row, rest = (
        4 * sum(last - first for first, last in (parts[0] for parts in each.values())) for each in (pieces, frozen)
    )
    norms = 2 if is_sharded and is_clipped else 0
    small = 4 * passes + (4 + 8 * 10) * len(pieces) * (norms // 2)
    gathered = (passes * (row + rest), 2 * passes * (row + rest)) if is_sharded else (row, row)
    chunk, seals = SEAL_BYTES + (ranks - 1) * DIGEST_BYTES, SEAL_BYTES * (1 + norms) + ranks * DIGEST_BYTES
    most = len(pieces) + len(frozen)
    gathers = (passes, 2 * passes * most) if is_sharded else (learns, learns * most)
    return {
        "alltoall_base": (passes * ranks * row, passes * ranks * row),
        "allgather_base": (gathered[0] + small, gathered[1] + small),
        "allgather": (
            learns * passes * chunk + gathers[0] * SEAL_BYTES + seals,
            learns * passes * most * chunk + gathers[1] * SEAL_BYTES + seals,
        ),
        "broadcast": (0, 0 if is_sharded else 4 * (2 * len(pieces) + 1)),
    }


def beyond(works: Sequence[Work], expected: Work) -> Work:
    """What all ranks together counted more than they should."""
    extra = [work - expected for work in works]
    return Work(*(sum(max(getattr(each, name), 0) for each in extra) for name in ("calls", "flop", "moved")))


def _calls(program: Program, first: int, last: int) -> list[tuple[str, Work]]:
    """Some calls of a program that meters count, each with its work without bytes."""
    calls = [(program.calls[number]["operator"], program.works[number]) for number in range(first, last)]
    return [(name, Work(work.calls, work.flop)) for name, work in calls if _is_counted(operator_of(name))]
