"""A program planned once: which registers each call takes its arguments from, and what is cut out of which memory.

A register holds a number, an argument, the memory of a region or a tensor that lies there. Everything that does not
depend on values is settled here, so that a call of a step is left with its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics.arguments import Keywords
from monitor.numerics.operators import row_named
from monitor.numerics.strides import canonical_strides
from monitor.programs.calls import ITEM, build_arguments, operator_of
from monitor.programs.creations import births
from monitor.programs.memory import Access, Form, Memory, Spot
from monitor.programs.trace import cut_out, layout_of, result_tensors

__all__ = ["Birth", "Call", "CallPlan", "Commit", "Cut", "Registers", "Result", "as_evidence", "plan_of"]

Registers = list[Any]
_PROGRAM_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Cut(NamedTuple):
    """A tensor that lies in the memory of a region: register to fill, the region's, and how it lies there."""

    register: int
    region: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """Cut it out; EvidenceError where the region holds numbers of another size."""
        return cut_out(whole, self.dtype, self.shape, self.stride, self.offset)


class Result(NamedTuple):
    """A tensor that a call returns: its register, -1 if nothing reads it, and how it must lie in memory."""

    register: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    layout: Mapping[str, Any]


class Birth(NamedTuple):
    """A tensor of the state that comes into its region: its name, the register of what was made, and cuts of that."""

    name: str
    register: int
    cuts: tuple[Cut, ...]


class Call(NamedTuple):
    """One call.

    Attributes:
        operator: its place among the plan's operators.
        cuts: tensors that it is the first to read.
        lists: registers to be filled with lists of other registers' contents, as they are when it begins.
        draws: the random keys that it takes; None if neither it nor the call before it takes any.
        inputs, written: registers of its tensors, and of those that it overwrites.
        rewritten: how those lie in memory afterwards, where the operator changes that.
        spent: registers that nothing reads after it.
        birth: what of the new state it makes.
    """

    number: int
    operator: int
    cuts: tuple[Cut, ...]
    lists: tuple[tuple[int, Callable[[Registers], Any]], ...]
    args: Callable[[Registers], Any]
    kwargs: Callable[[Registers], Keywords]
    draws: list[int] | None
    is_read: bool
    is_unset: bool
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    rewritten: tuple[Mapping[str, Any], ...]
    results: tuple[Result, ...]
    spent: tuple[int, ...]
    birth: Birth | None


class Commit(NamedTuple):
    """Where the new value of a tensor of the state lies; no cut where it is absent."""

    name: str
    cut: Cut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """All calls of a program that do anything, ready to run.

    Attributes:
        registers: what each holds before the step, as far as no step and no memory decides it.
        scalars: number of scalars, which lie in the first registers.
        regions: registers of state, batch and constants by their sources.
        fresh: those of them that are made anew for each step.
        fixed: tensors that lie in the memory of the others.
        commit: tensors of the state that do not lie there already at the end.
        loss: where the loss lies, if the step commits to one.
    """

    registers: tuple[Any, ...]
    scalars: int
    regions: Mapping[str, int]
    fresh: frozenset[str]
    fixed: tuple[Cut, ...]
    operators: tuple[OpOverload, ...]
    calls: tuple[Call, ...]
    commit: tuple[Commit, ...]
    loss: Cut | None


class _Register(int):
    """A register's content among arguments."""


def plan_of(program: Form, place: torch.device, *, every: bool) -> CallPlan:
    """Plan a program for a device.

    Args:
        program: the step.
        place: where it runs.
        every: also make calls that return views, which nothing but an observer sees.

    Raises:
        EvidenceError: the program does not fit itself or what its operators return.
    """
    with as_evidence():
        return _Planner(program, place, every).plan()


@contextmanager
def as_evidence() -> Iterator[None]:
    """What operators raise on arguments that do not fit them, as EvidenceError: a program brings its own."""
    try:
        yield
    except CallerError as error:
        raise EvidenceError(f"the program cannot be executed: {error}") from None
    except _PROGRAM_ERRORS as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvidenceError(f"the program cannot be executed: {text}") from None


class _Planner:
    def __init__(self, program: Form, place: torch.device, every: bool) -> None:
        self._program, self._place, self._every = program, place, every
        self._memory = Memory(program)
        self._births = births(program, self._memory)
        self._registers: list[Any] = [None] * len(program.scalars)
        self._regions = [self._new() for _ in self._memory.regions]
        written = {access.inputs[slot].region for access in self._memory.accesses for slot in access.written}
        self._fixed_regions = {
            number
            for number, region in enumerate(self._memory.regions)
            if region.source.startswith("state:") or (region.source.startswith("constant:") and number not in written)
        }
        self._fixed: dict[tuple[Any, ...], Cut] = {}
        self._cuts: dict[tuple[Any, ...], Cut] = {}
        self._last: dict[int, int] = {}

    def plan(self) -> CallPlan:
        operators: dict[OpOverload, int] = {}
        calls: list[Call] = []
        had_draws = False
        for access in self._memory.accesses:
            func = operator_of(access.operator)
            if self._is_idle(access, func):
                continue
            draws = list(access.call["draws"])
            call = self._call(access, func, operators.setdefault(func, len(operators)))
            calls.append(call if draws or had_draws else call._replace(draws=None))
            had_draws = bool(draws)
        end = len(self._memory.accesses)
        commit = []
        for name, place in self._program.commit.items():
            cut = None if place is None else self._cut(place, self._memory.spot(place), end)[0]
            commit.append(Commit(name, cut))
        loss = self._program.loss
        found = None if loss is None else self._cut(loss, self._memory.spot(loss), end)[0]
        regions = self._memory.regions
        first = {region.source: self._regions[i] for i, region in enumerate(regions) if not _is_made(region.source)}
        fixed = {regions[number].source for number in self._fixed_regions}
        return CallPlan(
            registers=tuple(self._registers),
            scalars=len(self._program.scalars),
            regions=first,
            fresh=frozenset(first) - fixed,
            fixed=tuple(self._fixed.values()),
            operators=tuple(operators),
            calls=tuple(self._with_spent(calls)),
            commit=tuple(commit),
            loss=found,
        )

    def _new(self, content: Any = None) -> int:
        self._registers.append(content)
        return len(self._registers) - 1

    def _cut(
        self, place: Mapping[str, Any], spot: Spot, number: int, *, canonical: bool = False, own: bool = False
    ) -> tuple[Cut, bool]:
        """The tensor that lies at a place, and whether the call must cut it out."""
        shape, stride = tuple(place["shape"]), tuple(place["stride"])
        if canonical:
            stride = _canonical(shape, stride)
        kind: torch.dtype = getattr(torch, place["dtype"])
        key = (spot.region, kind, shape, stride, spot.start)
        is_fixed = spot.region in self._fixed_regions and not own
        known = self._fixed if is_fixed else self._cuts
        cut = None if own else known.get(key)
        is_new = cut is None
        if cut is None:
            cut = Cut(self._new(), self._regions[spot.region], kind, shape, stride, spot.start)
            if not own:  # a tensor whose layout its call overwrites has no other user
                known[key] = cut
        if not is_fixed:
            self._last[cut.register] = number
        self._last[cut.region] = number
        return cut, is_new and not is_fixed

    def _call(self, access: Access, func: OpOverload, operator: int) -> Call:
        call, number = access.call, access.number
        row = row_named(access.operator)
        is_mutable = func._schema.is_mutable
        cuts, inputs = [], []
        for place, spot in zip(call["sources"], access.inputs, strict=True):
            cut, is_new = self._cut(place, spot, number, canonical=not is_mutable, own=_changes_layout(func))
            inputs.append(_Register(cut.register))
            cuts += [cut] if is_new else []
        args, kwargs = build_arguments(call["arguments"], inputs, _Register, self._place)  # type: ignore[arg-type]
        lists: list[tuple[int, Callable[[Registers], Any]]] = []
        positional = [self._argument(value, lists) for value in args]
        named = {name: self._argument(value, lists) for name, value in kwargs.items()}
        written = tuple(int(inputs[slot]) for slot in access.written)
        returned, rewritten = call["results"][: len(access.results)], call["results"][len(access.results) :]
        if not _changes_layout(func):
            for slot, layout in zip(access.written, rewritten, strict=True):
                place = call["sources"][slot]
                canonical = _canonical(tuple(place["shape"]), tuple(place["stride"]))
                if layout != {"dtype": place["dtype"], "shape": place["shape"], "stride": list(canonical)}:
                    raise _misfit(number, func)
        results = [self._result(layout, spot, access) for layout, spot in zip(returned, access.results, strict=True)]
        return Call(
            number=number,
            operator=operator,
            cuts=tuple(cuts),
            lists=tuple(lists),
            args=_tuple_of(positional),
            kwargs=_dict_of(named),
            draws=list(call["draws"]),
            is_read=access.operator == ITEM,
            is_unset=row.unset,
            inputs=tuple(map(int, inputs)),
            written=written,
            rewritten=tuple(rewritten) if _changes_layout(func) else (),
            results=tuple(results),
            spent=(),
            birth=self._birth(number),
        )

    def _birth(self, number: int) -> Birth | None:
        """What of the new state a call makes, whose tensors are known by now."""
        name = self._births.get(number)
        spot = None if name is None else self._memory.commit[name]
        if name is None or spot is None:
            return None
        register = self._regions[spot.region]
        cuts = [cut for cut in self._cuts.values() if cut.region == register != cut.register]
        return Birth(name, register, tuple(cuts))

    def _result(self, layout: Mapping[str, Any], spot: Spot, access: Access) -> Result:
        register = -1
        kind: torch.dtype = getattr(torch, layout["dtype"])
        shape, stride = tuple(layout["shape"]), tuple(layout["stride"])
        if not access.is_view:
            register = self._regions[spot.region]
            self._last[register] = access.number
            # Who reads all of it needs no cut: the register of the region holds this very tensor.
            self._cuts[(spot.region, kind, shape, stride, 0)] = Cut(register, register, kind, shape, stride, 0)
        return Result(register, kind, torch.Size(shape), stride, layout)

    def _argument(self, value: Any, lists: list[tuple[int, Callable[[Registers], Any]]]) -> int:
        """The register that holds an argument when the call begins."""
        if isinstance(value, _Register):
            return int(value)
        if not any(isinstance(leaf, _Register) for leaf in _leaves(value)):
            return self._new(value)
        parts = [self._argument(item, lists) for item in value]
        register = self._new()
        lists.append((register, _list_of(parts)))
        return register

    def _is_idle(self, access: Access, func: OpOverload) -> bool:
        """Whether a call returns views and does nothing else; they must lie as the program says."""
        row = row_named(access.operator)
        call = access.call
        if access.number in self._births:
            return False
        if self._every or not access.is_view or access.written or call["draws"] or row.kind != "exact":
            return False
        if [str(each.type) for each in func._schema.returns] != ["Tensor"]:
            return False  # how many results there are depends on sizes
        inputs = [_imitation(place) for place in call["sources"]]
        args, kwargs = build_arguments(call["arguments"], inputs, self._number, torch.device("meta"))
        out = func(*args, **kwargs)
        if [layout_of(tensor) for tensor in result_tensors(out, [])] != call["results"]:
            raise _misfit(access.number, func)
        return True

    def _number(self, scalar: int) -> float:
        return float.fromhex(self._program.scalars[scalar])

    def _with_spent(self, calls: list[Call]) -> Iterator[Call]:
        kept = {self._regions[number] for number in self._fixed_regions}
        due: dict[int, list[int]] = {}
        for register, number in self._last.items():
            if register not in kept:
                due.setdefault(number, []).append(register)
        for call in calls:
            own = [register for register, _ in call.lists]
            yield call._replace(spent=(*due.get(call.number, ()), *own))


def _misfit(number: int, func: OpOverload) -> EvidenceError:
    return EvidenceError(f"call {number} ({func}) returns tensors whose layout is not the one in its program")


def _is_made(source: str) -> bool:
    return source.startswith("node:")


def _imitation(place: Mapping[str, Any]) -> Tensor:
    """A tensor without values that lies as a place says."""
    return torch.empty_strided(place["shape"], place["stride"], dtype=getattr(torch, place["dtype"]), device="meta")


@lru_cache(maxsize=4096)
def _canonical(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return canonical_strides(torch.empty_strided(shape, stride, device="meta"))


def _changes_layout(func: OpOverload) -> bool:
    """Whether an operator overwrites how its argument lies in memory, such as ``t_``."""
    return torch.Tag.inplace_view in func.tags


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _tuple_of(registers: list[int]) -> Callable[[Registers], Any]:
    if len(registers) > 1:
        return itemgetter(*registers)
    if not registers:
        return lambda _: ()
    (only,) = registers
    return lambda held: (held[only],)


def _list_of(registers: list[int]) -> Callable[[Registers], Any]:
    return lambda held: [held[register] for register in registers]


def _dict_of(registers: dict[str, int]) -> Callable[[Registers], Keywords]:
    if not registers:
        nothing: dict[str, object] = {}
        return lambda _: nothing
    named = tuple(registers.items())
    return lambda held: {name: held[register] for name, register in named}
