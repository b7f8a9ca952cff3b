"""A training step as data: a flat list of ATen calls with wiring, constants and scalars.

An input tensor is a place in the memory of its source: an earlier call's result, a tensor of the state, of the batch,
or a constant. Storages and aliases are real: a call that writes a view writes what it is a view of. Numbers with a
fraction are numbered through all calls; a step may give some of them other values than the program does, and these are
the program's slots. Everything else is equal in all steps that run the program.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from firmware_sim import NO_WORK, Work, limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES, canonical
from monitor.programs import Compute, compute_of
from monitor.programs.calls import ITEM, build_arguments, check_arguments, operator_of, scalar_numbers
from monitor.programs.constants import Constant, apart, parse_constants, with_content
from monitor.programs.creations import births
from monitor.programs.flop import call_work, made_bytes
from monitor.programs.keys import MAXIMUM_DRAWS, MAXIMUM_STREAMS
from monitor.programs.liveness import absent_state, dead_calls, first_writes, unread, written_state
from monitor.programs.memory import Memory
from monitor.programs.plan import CallPlan, plan_of

__all__ = [
    "ITEM",
    "MANY_PROGRAMS",
    "MAXIMUM_PROGRAMS",
    "Constant",
    "Program",
    "build_arguments",
    "operator_of",
    "parse_hex",
    "read_program",
    "scalar_numbers",
]

MAXIMUM_PROGRAMS = 4096
"""Of one run. Each is a file, a line of the countersigned declaration, and Python objects of some fifteen times its
file in a process that records or inspects the run."""
MANY_PROGRAMS = 64
"""From here on a recorder warns."""
_KEPT, _SMALL = 8, 1 << 20
"""Programs that a process keeps for its next runs, and bytes of the largest of them, constants included."""
_MOST_CALLS = 1 << 20
_MOST_DRAWS = MAXIMUM_STREAMS * MAXIMUM_DRAWS
_MOST_UPDATES = 64
_FORM = "chipwitness/program/4"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_KEYS = {"form", "calls", "scalars", "batch", "constants", "commit", "updates", "loss"}
_CALL_KEYS = {"operator", "arguments", "sources", "results", "draws"}
_PLACE_KEYS = {"source", "dtype", "shape", "stride", "offset"}
_LAYOUT_KEYS = {"dtype", "shape", "stride"}
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SOURCE = re.compile(r"(node:\d{1,8}:\d{1,6}|constant:\d{1,6}|(state|batch):.{1,512})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One step.

    Attributes:
        calls: operator, arguments, sources (places of the tensor inputs), results (layouts of what it returns and
            writes) and draws (which of the step's random keys it takes) of each ATen call.
        scalars: hexadecimal values of all fractional arguments, in the order of the calls.
        batch: dtype and shape of each declared batch tensor.
        constants: in the order of their first use; the bytes of some may be known by their digest alone.
        commit: for each tensor of the state, where its new value lies; None where it is absent, which counts as zeros.
        updates: for each run of the optimizer's ``step``, its first call and the one after its last.
        loss: where the step's scalar FP32 loss lies; None if the step commits to none.
    """

    calls: tuple[Mapping[str, Any], ...]
    scalars: tuple[str, ...]
    batch: Mapping[str, Mapping[str, Any]]
    constants: tuple[Constant, ...]
    commit: Mapping[str, Mapping[str, Any] | None]
    updates: tuple[tuple[int, int], ...]
    loss: Mapping[str, Any] | None = None

    def structure(self) -> tuple[Any, ...]:
        """Everything but scalars and the constants' values: what two runs of one program share."""
        kinds = [(constant.dtype, constant.elements) for constant in self.constants]
        return (self.updates, len(self.scalars), kinds, self.batch, self.commit, self.loss, self.calls)

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "form": _FORM,
            "calls": [dict(call) for call in self.calls],
            "scalars": list(self.scalars),
            "batch": {name: dict(layout) for name, layout in self.batch.items()},
            "constants": [constant.to_json() for constant in self.constants],
            "commit": {name: None if place is None else dict(place) for name, place in self.commit.items()},
            "updates": [list(update) for update in self.updates],
            "loss": None if self.loss is None else dict(self.loss),
        }

    @cached_property
    def encoded(self) -> bytes:
        """Canonical bytes."""
        return canonical.encode(self.to_json())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes, lower-case hex: the program's name."""
        return hashlib.sha256(self.encoded).hexdigest()

    def carrying(self, names: Mapping[int, str], others: Mapping[str, str] = _NOTHING) -> Program:
        """The same step, where the constants with these numbers are tensors of the batch, flat, by these names.

        Tensors of the batch have ``others``, by those that they had.
        """
        sources = {f"constant:{number}": f"batch:{name}" for number, name in names.items()}
        sources |= {f"batch:{old}": f"batch:{new}" for old, new in others.items()}
        kept = [number for number in range(len(self.constants)) if number not in names]
        sources |= {f"constant:{old}": f"constant:{new}" for new, old in enumerate(kept) if new != old}

        def moved(place: Mapping[str, Any]) -> Mapping[str, Any]:
            return {**place, "source": sources.get(place["source"], place["source"])}

        return replace(
            self,
            calls=tuple(
                {**call, "sources": list(map(moved, call["sources"]))}
                if any(place["source"] in sources for place in call["sources"])
                else call
                for call in self.calls
            ),
            commit={name: None if place is None else moved(place) for name, place in self.commit.items()},
            batch={
                **{others.get(name, name): layout for name, layout in self.batch.items()},
                **{
                    name: {"dtype": self.constants[number].dtype, "shape": [self.constants[number].elements]}
                    for number, name in names.items()
                },
            },
            constants=tuple(self.constants[number] for number in kept),
        )

    @property
    def apart(self) -> bytes:
        """Bytes of the constants that it holds by their digests, one after the other; EvidenceError if not known."""
        return b"".join(constant.content for constant in apart(self.constants))

    @property
    def apart_bytes(self) -> int:
        """How many these are."""
        return sum(constant.length for constant in apart(self.constants))

    def complete(self, content: bytes) -> Program:
        """The same program with these bytes (``apart``); EvidenceError unless it has their digests."""
        return replace(self, constants=with_content(self.constants, content))

    @cached_property
    def compute(self) -> Compute:
        """What the program computes; EvidenceError on shapes that fit no call."""
        return compute_of(self)

    @property
    def flop(self) -> int:
        """Multiply-adds of products, times two; EvidenceError on shapes that fit no call."""
        return self.compute.flop

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """What a chip's meter counts for each call; EvidenceError on shapes that fit no call."""
        try:
            return tuple(map(call_work, self.calls))
        except _MISFITS:
            raise EvidenceError("the program holds a product of shapes that do not fit") from None

    @cached_property
    def work(self) -> Work:
        """What a chip's meter counts for all calls; EvidenceError as above."""
        return sum(self.works, NO_WORK)

    @cached_property
    def made(self) -> int:
        """Bytes of all results of its calls; EvidenceError where a call's form is none."""
        try:
            return made_bytes(self.calls)
        except _MISFITS:
            raise EvidenceError("the program holds results of an impossible form") from None

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The tensors of the state, ``kind/name``, that may get another value; EvidenceError as above."""
        try:
            return written_state(self)
        except _MISFITS:
            raise EvidenceError("the program holds results of an impossible form") from None

    @property
    def absent(self) -> frozenset[str]:
        """The tensors of the state, ``kind/name``, but for gradients, that it leaves absent, which counts as zeros."""
        return absent_state(self)

    @cached_property
    def unread(self) -> frozenset[str]:
        """The tensors of the state, ``kind/name``, that it overwrites before it reads them; EvidenceError as above."""
        return unread(self)

    @cached_property
    def dead(self) -> Work:
        """Work whose results it uses for nothing that it commits or reads; EvidenceError as above.

        Calls that neither compute nor move anything are none.
        """
        works = (self.works[number] for number in dead_calls(self))
        return sum((work for work in works if work.flop or work.moved), NO_WORK)

    @cached_property
    def births(self) -> dict[int, str]:
        """The calls that make a tensor of an optimizer's state, with its name ``kind/name``; EvidenceError as above.

        It comes into its region there, if the step before left it absent.
        """
        try:
            return births(self, Memory(self))
        except _MISFITS:
            raise EvidenceError("a call of the program has arguments that its operator does not take") from None

    @cached_property
    def first_writes(self) -> dict[str, int]:
        """How many counted operators have run once each tensor of the state, ``kind/name``, is first written in place.

        EvidenceError as above.
        """
        ends = list(accumulate(work.calls for work in self.works))
        return {name: ends[call] - left for name, (call, left) in first_writes(self).items()}

    def first_held(self, left: Collection[str]) -> dict[str, int]:
        """The same with what it makes of an optimizer's state, where the step before left that absent."""
        ends = list(accumulate(work.calls for work in self.works))
        made = {name: ends[call] for call, name in self.births.items() if name in left}
        return {**made, **self.first_writes}

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Number of the call of each operator that a meter counts, in order.

        Calls that return views are none, and those on lists are one for each tensor.
        """
        return tuple(number for number, work in enumerate(self.works) for _ in range(work.calls))

    @cached_property
    def outlines(self) -> dict[int, Sequence[Any]]:
        """Of calls that were captured again, by number: the outline by which one is recognised."""
        return {}

    @cached_property
    def _plans(self) -> dict[tuple[torch.device, bool], CallPlan]:
        return {}

    def plan(self, place: torch.device, *, every: bool) -> CallPlan:
        """How to run it on a device, made once; ``every`` also makes the calls that nothing but an observer sees."""
        if (place, every) not in self._plans:
            self._plans[place, every] = plan_of(self, place, every=every)
        return self._plans[place, every]

    @cached_property
    def operators(self) -> tuple[OpOverload, ...]:
        """The ATen overload of each call."""
        return tuple(operator_of(call["operator"]) for call in self.calls)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The scalars' values."""
        return tuple(map(parse_hex, self.scalars))

    @cached_property
    def scalar_places(self) -> tuple[tuple[tuple[int, tuple[Any, ...]], ...], ...]:
        """For each call its scalars, with the place of each: ``args`` or ``kwargs``, and the keys from there on."""
        return tuple(tuple(_scalar_places(call["arguments"], ())) for call in self.calls)

    @classmethod
    def decode(cls, data: bytes) -> Program:
        """Parse; EvidenceError on any other form, an unknown operator, or a source that does not come before."""
        raw = canonical.decode(data, most=limits.PROGRAM_BYTES, items=limits.AGREED_ITEMS)
        try:
            return cls._parse(raw)
        except _MISFITS:
            raise EvidenceError("a program is malformed") from None

    @classmethod
    def _parse(cls, raw: Any) -> Program:
        if not isinstance(raw, dict) or set(raw) != _KEYS or raw["form"] != _FORM:
            raise EvidenceError("a program has missing or extra keys")
        calls, scalars, updates = raw["calls"], raw["scalars"], raw["updates"]
        if not isinstance(calls, list) or len(calls) > _MOST_CALLS or not isinstance(scalars, list):
            raise EvidenceError("a program's calls or scalars are malformed")
        _check_updates(updates, len(calls))
        for text in scalars:
            parse_hex(text)
        forms = {"constants": list, "batch": dict, "commit": dict}
        if not all(isinstance(raw[name], form) for name, form in forms.items()):
            raise EvidenceError("a program's constants, batch or commit are malformed")
        constants = parse_constants(raw["constants"])
        for layout in raw["batch"].values():
            _check_layout(layout, {"dtype", "shape"})
        known = {f"batch:{name}" for name in raw["batch"]} | {f"constant:{i}" for i in range(len(constants))}
        for number, call in enumerate(calls):
            _check_call(call, known)
            known |= {f"node:{number}:{slot}" for slot in range(len(call["results"]))}
        for place in [each for each in (*raw["commit"].values(), raw["loss"]) if each is not None]:
            _check_place(place, known)
        if raw["loss"] is not None and (raw["loss"]["dtype"], raw["loss"]["shape"]) != ("float32", []):
            raise EvidenceError("a program's loss is not an FP32 scalar")
        numbers = [number for call in calls for number in scalar_numbers(call["arguments"])]
        if numbers != list(range(len(scalars))):
            raise EvidenceError("a program's scalars do not match its calls")
        return cls(
            calls=tuple(calls),
            scalars=tuple(scalars),
            batch=raw["batch"],
            constants=constants,
            commit=raw["commit"],
            updates=tuple((first, last) for first, last in updates),
            loss=raw["loss"],
        )


def read_program(data: bytes, apart: bytes = b"") -> Program:
    """The program of these bytes, and of these constants where it is given them (``Program.complete``).

    Of small ones the last few are kept, with all that was found out about them: bytes alone say which one it is, and
    everything that is kept follows from them, so that it does not matter who brought them first.

    Raises:
        EvidenceError: as ``Program.decode`` and ``Program.complete``.
    """
    return (_kept if len(data) + len(apart) <= _SMALL else _kept.__wrapped__)(data, apart)


@lru_cache(maxsize=_KEPT)
def _kept(data: bytes, apart: bytes) -> Program:
    return read_program(data).complete(apart) if apart else Program.decode(data)


def parse_hex(text: object) -> float:
    """A number from its one hexadecimal form; EvidenceError on any other."""
    if isinstance(text, str):
        try:
            value = float.fromhex(text)
        except (ValueError, OverflowError):
            value = math.nan
        if value.hex() == text:
            return value
    raise EvidenceError(f"{text!r} is not a number in hexadecimal form")


def _scalar_places(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _scalar_places(item, (*place, number))
    elif isinstance(value, dict):
        if set(value) == {"$scalar"}:
            yield value["$scalar"], place
        else:
            for name in sorted(value):
                yield from _scalar_places(value[name], (*place, name))


def _check_updates(updates: object, calls: int) -> None:
    """Updates are stretches of calls, one after the other."""
    if not isinstance(updates, list) or len(updates) > _MOST_UPDATES:
        raise EvidenceError("a program's updates are malformed")
    end = 0
    for update in updates:
        if not isinstance(update, list) or [type(bound) for bound in update] != [int, int]:
            raise EvidenceError("a program's updates are malformed")
        first, last = update
        if not end <= first <= last <= calls:
            raise EvidenceError("a program's updates do not lie among its calls in order")
        end = last


def _check_call(call: object, known: set[str]) -> None:
    if not isinstance(call, dict) or set(call) != _CALL_KEYS or not isinstance(call["operator"], str):
        raise EvidenceError("a program's call has missing or extra keys")
    try:
        operator_of(call["operator"])
    except CallerError as error:
        raise EvidenceError(f"a program calls an operator that is not allowed: {error}") from None
    arguments, draws = call["arguments"], call["draws"]
    if not isinstance(arguments, dict) or set(arguments) != {"args", "kwargs"}:
        raise EvidenceError("a call's arguments are malformed")
    if not isinstance(call["sources"], list) or not isinstance(call["results"], list):
        raise EvidenceError("a call's sources or results are malformed")
    if not isinstance(draws, list) or not all(type(draw) is int and 0 <= draw < _MOST_DRAWS for draw in draws):
        raise EvidenceError("a call's draws are malformed")
    for place in call["sources"]:
        _check_place(place, known)
    for layout in call["results"]:
        _check_layout(layout, _LAYOUT_KEYS)
    check_arguments(call)


def _check_place(place: object, known: set[str]) -> None:
    _check_layout(place, _PLACE_KEYS)
    assert isinstance(place, dict)
    source, offset = place["source"], place["offset"]
    if type(offset) is not int or abs(offset) > limits.TENSOR_ELEMENTS.most:
        raise EvidenceError("a place's offset is malformed")
    if not isinstance(source, str) or _SOURCE.fullmatch(source) is None:
        raise EvidenceError("a place's source is malformed")
    if source not in known and not source.startswith("state:"):
        raise EvidenceError(f"a place's source {source!r} does not come before it")


def _check_layout(layout: object, keys: set[str]) -> None:
    if not isinstance(layout, dict) or set(layout) != keys or layout["dtype"] not in DTYPE_SIZES:
        raise EvidenceError("a tensor's layout in a program is malformed")
    lists = [layout[name] for name in ("shape", "stride") if name in keys]
    limits.check_shape(layout["shape"])
    for sizes in lists:
        if not isinstance(sizes, list) or not all(
            type(size) is int and 0 <= size <= limits.TENSOR_ELEMENTS.most for size in sizes
        ):
            raise EvidenceError("a tensor's layout in a program is malformed")
    if len({len(sizes) for sizes in lists}) != 1:
        raise EvidenceError("a tensor's layout in a program is malformed")
