"""FLOP of a program: two for each multiply-add of a product, however the product is written.

1. Matrix products, convolutions and products with vectors count by their shapes; distances, decompositions and
   solvers as chips count them (``firmware_sim.operations``).
2. An elementwise operator that spreads its operands over more elements than any of them has, as a broadcast of
   ``(m, k, 1)`` and ``(k, n)`` does, makes all the terms of a product. If these are added up afterwards, by an operator
   that returns fewer elements than it reads, by one that neither moves nor works element by element (a running sum or
   product, a softmax, a sum by place), or by one addition after the other, each counts as a multiply-add. Copies, views
   and literal fills do not make an operand larger than what they were made from.
3. Elementwise products that are summed at once, each with no more elements than its larger factor, count if the
   smaller factor is broadcast, as in a product with a vector, or if the elements of both factors take part in more than
   ``MOST_USES`` of them on average: a matrix product row by row.

Everything else is elementwise work and counts nothing; ``elementwise`` says how much of that there is, and ``most`` is
what a product that no rule sees through can hide there: each of its terms takes an element of elementwise work.

The work and the results of a program's calls, as the meter of a chip that runs them counts them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from firmware_sim import DTYPE_SIZES, NO_WORK, Operand, Work, work_of
from firmware_sim.errors import EvidenceError
from firmware_sim.operations import COUNTS, UNCOUNTED, per_complex
from monitor.programs.calls import argument, base_name, build_arguments, is_view, operator_of, tensor_slots
from monitor.programs.memory import Access, Form, Memory, Spot
from monitor.programs.moves import FILLS, LOOKUPS, MOVES
from monitor.programs.trace import name_of, result_tensors, tensors_in, written_arguments

__all__ = [
    "MOST_USES",
    "Compute",
    "call_work",
    "compute_of",
    "counted",
    "is_uncounted",
    "live_work",
    "made_bytes",
    "makes",
]


def call_work(call: Mapping[str, Any]) -> Work:
    """The work of one call in a program's form; none for one that returns views."""
    operator = call["operator"]
    if _returns_views(operator):
        return NO_WORK
    inputs = [(place["dtype"], place["shape"]) for place in call["sources"]]
    outputs = [(layout["dtype"], layout["shape"]) for layout in call["results"]]
    transposed = _may_be_transposed(operator) and argument(call, "transposed") is True
    dims = argument(call, "dim") if _is_transform(operator) else ()
    return work_of(operator, inputs, outputs, transposed=transposed, dims=dims)


def live_work(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> Work:
    """The work of a call that has just been made; where its shapes fit no product, bytes alone count."""
    if is_view(func):
        return NO_WORK
    inputs = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    written = written_arguments(func, args, kwargs)
    outputs = [*result_tensors(out, written), *written]
    at = _place_of_transposed(func)
    transposed = at is not None and len(args) > at and args[at] is True
    dims = args[1] if _is_transform(name_of(func)) and len(args) > 1 else ()
    try:
        return work_of(name_of(func), _operands(inputs), _operands(outputs), transposed=transposed, dims=dims)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Work(1, 0, sum(each.nbytes for each in (*inputs, *outputs)))


def _is_transform(operator: str) -> bool:
    return operator.startswith("aten._fft_")


def _operands(tensors: Iterable[Tensor]) -> list[Operand]:
    return [(str(each.dtype).removeprefix("torch."), each.shape) for each in tensors]


@lru_cache(maxsize=4096)
def is_uncounted(func: OpOverload) -> bool:
    """Whether an operator multiplies, and nothing counts how often."""
    return name_of(func).split(".")[1].rstrip("_") in UNCOUNTED


@lru_cache(maxsize=4096)
def makes(func: OpOverload) -> bool:
    """Whether an operator returns new memory: it neither returns views nor writes what it is given."""
    return not func._schema.is_mutable and not is_view(func)


def made_bytes(calls: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of all results of calls in a program's form."""
    made = (layout for call in calls if makes(operator_of(call["operator"])) for layout in call["results"])
    return sum(prod(layout["shape"]) * DTYPE_SIZES[layout["dtype"]] for layout in made)


@lru_cache(maxsize=4096)
def _returns_views(operator: str) -> bool:
    return is_view(operator_of(operator))


@lru_cache(maxsize=4096)
def _may_be_transposed(operator: str) -> bool:
    return _place_of_transposed(operator_of(operator)) is not None


@lru_cache(maxsize=4096)
def _place_of_transposed(func: OpOverload) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("transposed") if "transposed" in names else None


MOST_USES = 7
"""Summed products in which an element of elementwise work may take part: norms written by hand around one residual
stream use its elements four times."""

_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError)
_VECTORS = {"mv": "self", "addmv": "mat", "dot": "self", "vdot": "self"}
"""Products that PyTorch's own counter leaves out, and the factor whose elements are each multiplied once."""
_ADDED_PRODUCTS = {"addcmul": ("tensor1", "tensor2"), "addcdiv": ("tensor1", "tensor2"), "lerp": ("end", "weight")}
_ADDED_PRODUCTS |= {"addr": ("vec1", "vec2")}
"""Operators that add a product of these two arguments to something."""
_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
_SUMS = frozenset({"add", "sub", "rsub"})
_UNTAGGED = """
elu_backward softplus_backward leaky_relu_backward hardtanh_backward hardswish hardswish_backward hardsigmoid_backward
mish_backward log_sigmoid_forward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward softshrink_backward
hardshrink_backward rsub floor_divide masked_fill native_dropout rrelu_with_noise rrelu_with_noise_backward addr
bernoulli smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward mse_loss mse_loss_backward
soft_margin_loss soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits
"""
_ELEMENTWISE = frozenset(_UNTAGGED.split())
"""What works element by element, and PyTorch does not mark so."""


@dataclass(frozen=True, slots=True)
class Compute:
    """FLOP of products, and the elements that all other operators compute."""

    flop: int
    elementwise: int

    @property
    def most(self) -> int:
        """What the program computes at most, however its products are written."""
        return self.flop + 2 * self.elementwise


@dataclass(frozen=True, slots=True)
class _Value:
    """What a region holds.

    Attributes:
        kinds: elements that can differ from each other by what the value was made from.
        origin: the region whose elements these are.
        terms: calls whose terms it holds, which count wherever they are added up.
        narrow: the elementwise product that it is, as its call.
    """

    kinds: int
    origin: int
    terms: frozenset[int] = frozenset()
    narrow: int | None = None


def compute_of(program: Form) -> Compute:
    """FLOP and elementwise work of a program; EvidenceError on shapes that fit no call."""
    try:
        return _Count(Memory(program)).total()
    except (*_MISFITS, ValueError) as error:
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError("the program multiplies matrices whose shapes do not fit") from None


class _Count:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._values: dict[int, _Value] = {}
        self._flop = 0
        self._elementwise = 0
        self._weight = 1  # of each element of the call that is looked at
        self._calls = 0  # elementwise ones, each tensor of a list being one
        self._reduced = 0  # elements with such terms that were summed
        self._terms: dict[int, int] = {}  # a call that spreads its operands -> its elements
        self._added: set[int] = set()  # those of them whose terms are added to others
        self._factors: dict[int, tuple[int, tuple[int, ...]]] = {}  # an elementwise product -> elements, its origins
        self._broadcast: set[int] = set()  # those of them with a factor of fewer elements
        self._summed: set[int] = set()  # those of them that are summed at once

    def total(self) -> Compute:
        for access in self._memory.accesses:
            self._take(access)
        spread = self._reduced + sum(self._terms[number] for number in self._added)
        return Compute(self._flop + 2 * spread + 2 * self._narrow(), self._elementwise)

    def _narrow(self) -> int:
        """Elements of summed elementwise products that use both factors too often."""
        uses: dict[int, int] = defaultdict(int)
        for number in self._summed:
            elements, origins = self._factors[number]
            for origin in set(origins):
                uses[origin] += elements
        often = {origin for origin, used in uses.items() if used > MOST_USES * self._size(origin)}
        return sum(
            self._factors[number][0]
            for number in self._summed
            if number in self._broadcast or often >= set(self._factors[number][1])
        )

    def _size(self, region: int) -> int:
        elements = self._memory.regions[region].elements
        return max(1, elements or 0)

    def _value(self, region: int) -> _Value:
        if region not in self._values:
            self._values[region] = _Value(self._size(region), region)
        return self._values[region]

    def _take(self, access: Access) -> None:
        name, self._weight = base_name(access.operator), _per_number(access.call)
        lists = name.startswith("_foreach_")
        if count := counted(access.call):
            self._flop += count
            self._finish(access, [None] * (len(access.results) + len(access.written)))
        elif name in _VECTORS:
            (slot,) = tensor_slots(argument(access.call, _VECTORS[name]))
            self._flop += 2 * access.inputs[slot].elements * self._weight
            self._finish(access, [None] * (len(access.results) + len(access.written)))
        elif not access.is_view:
            outputs = [spot.elements for spot in access.results] + [access.inputs[i].elements for i in access.written]
            if name not in MOVES and name not in FILLS and not lists:
                most = max([*outputs, *(spot.elements for spot in access.inputs)], default=0)
                self._elementwise += most * self._weight
            elif lists:
                self._elementwise += sum(outputs) * self._weight
            self._finish(access, self._outcome(access, name, outputs, lists))

    def _finish(self, access: Access, values: list[_Value | None]) -> None:
        """Store what the call makes; None is a value too, with nothing left to count."""
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        if access.is_view:
            return
        for number, (spot, value) in enumerate(zip(targets, values, strict=True)):
            fresh = number < len(access.results)
            new = value or _Value(spot.elements, spot.region)
            if not fresh and not spot.whole:
                old = self._value(spot.region)
                new = _Value(max(old.kinds, new.kinds), spot.region, old.terms | new.terms)
            self._values[spot.region] = new

    def _outcome(self, access: Access, name: str, outputs: list[int], lists: bool) -> list[_Value | None]:
        targets = self._targets(access)
        if not lists:
            return self._made(access, name, outputs, targets, self._read(access, name), self._multiplied(access, name))
        short = name.removeprefix("_foreach_")
        read = set(self._read(access, name))
        taken = [[slot for slot in tensor_slots(each) if slot in read] for each in _values(access.call)]
        factors = self._multiplied(access, short)
        made: list[_Value | None] = []
        for number, (size, target) in enumerate(zip(outputs, targets, strict=True)):
            slots = [each[min(number, len(each) - 1)] for each in taken if each]
            slots = slots[1:] if short == "copy" else slots
            mine = None if factors is None else [slot for slot in slots if slot in factors]
            made += self._made(access, short, [size], [target], slots, mine)
        return made

    def _made(
        self,
        access: Access,
        name: str,
        outputs: list[int],
        targets: list[Spot],
        slots: list[int],
        factors: list[int] | None,
    ) -> list[_Value | None]:
        """What a call makes, or one on a list of one of its places: ``factors`` are multiplied, by default all."""
        if name in FILLS:
            return [_Value(1, spot.region) for spot in targets]
        values = [self._value(access.inputs[slot].region) for slot in slots]
        kinds = [min(value.kinds, access.inputs[slot].elements) for slot, value in zip(slots, values, strict=True)]
        terms = frozenset().union(*(value.terms for value in values))
        if name in MOVES or name in LOOKUPS:
            first = values[0] if len(values) == 1 or name in LOOKUPS else None
            return [
                _Value(size, spot.region, terms)
                if first is None
                else _Value(size if name in LOOKUPS else min(size, kinds[0]), first.origin, terms, first.narrow)
                for size, spot in zip(outputs, targets, strict=True)
            ]
        spots = [access.inputs[slot] for slot in slots]
        if name in _RUNNING or any(out < spot.elements for out in outputs for spot in spots if spot.elements > 1):
            self._sum(spots, values)
            return [_Value(min(size, sum(kinds)), spot.region) for size, spot in zip(outputs, targets, strict=True)]
        if terms and not _is_elementwise(access.operator):
            self._sum(spots, [_Value(value.kinds, value.origin, value.terms) for value in values])
        return [
            self._elementwise_value(name, out, target, kinds, values, [slots.index(each) for each in factors or slots])
            for out, target in zip(outputs, targets, strict=True)
        ]

    def _elementwise_value(
        self, name: str, elements: int, target: Spot, kinds: list[int], values: list[_Value], factors: list[int]
    ) -> _Value:
        terms = frozenset().union(*(value.terms for value in values))
        mine, self._calls = [kinds[place] for place in factors], self._calls + 1
        if sum(size > 1 for size in mine) > 1 and elements > max(mine):
            self._terms[self._calls] = elements * self._weight
            terms |= {self._calls}
            if name in _ADDED_PRODUCTS:
                self._added.add(self._calls)
        holders = [value.terms for value in values if value.terms]
        if (name in _SUMS or name in _ADDED_PRODUCTS) and len(set(holders)) > 1:
            self._added |= terms
        varied = [(size, value) for size, value in zip(kinds, values, strict=True) if size > 1]
        size = min(elements, math.prod(kinds)) if kinds else elements
        narrow = None
        if name == "mul" and len(varied) > 1 and self._calls not in self._terms:
            self._factors[self._calls] = (elements * self._weight, tuple(value.origin for _, value in varied))
            narrow = self._calls
            if min(size for size, _ in varied) < elements:
                self._broadcast.add(self._calls)
        elif name in {"mul", "div", "neg"} and len(varied) == 1:
            narrow = varied[0][1].narrow
        return _Value(max(size, 1), target.region, terms, narrow)

    def _sum(self, spots: list[Spot], values: list[_Value]) -> None:
        self._reduced += self._weight * max(
            (spot.elements for spot, value in zip(spots, values, strict=True) if value.terms), default=0
        )
        self._summed |= {value.narrow for value in values if value.narrow is not None}

    @staticmethod
    def _multiplied(access: Access, name: str) -> list[int] | None:
        """Inputs whose product is added to something; None where all are taken alike."""
        if name not in _ADDED_PRODUCTS:
            return None
        return [slot for each in _ADDED_PRODUCTS[name] for slot in tensor_slots(argument(access.call, each))]

    @staticmethod
    def _targets(access: Access) -> list[Spot]:
        return [*access.results, *(access.inputs[slot] for slot in access.written)]

    @staticmethod
    def _read(access: Access, name: str) -> list[int]:
        """Tensor inputs whose values matter: not what ``out=`` or a copy overwrites, nor where a lookup looks."""
        slots = list(range(len(access.inputs)))
        if access.operator.endswith("out"):
            slots = [slot for slot in slots if slot not in access.written]
        if name == "copy":
            slots = slots[1:]
        return slots[:1] if name in LOOKUPS else slots


def _values(call: Mapping[str, Any]) -> list[Any]:
    """A call's arguments, those by name last."""
    return [*call["arguments"]["args"], *call["arguments"]["kwargs"].values()]


def _per_number(call: Mapping[str, Any]) -> int:
    """Multiply-adds for each real number of a call's largest tensor: a complex product has four for its two."""
    return 2 if any(place["dtype"].startswith("complex") for place in (*call["sources"], *call["results"])) else 1


@functools.lru_cache(maxsize=4096)
def _is_elementwise(operator: str) -> bool:
    name = base_name(operator)
    return name in _ELEMENTWISE or name.startswith("_foreach_") or torch.Tag.pointwise in operator_of(operator).tags


def _grouped(a: list[int], b: list[int]) -> int:
    """Products of groups of rows, columns or terms, each of which belongs to one group at most."""
    once = a[1:] if len(a) == 3 and len(b) == 2 else a
    return 2 * math.prod(once) * b[-1]


def counted(call: Mapping[str, Any]) -> int | None:
    """FLOP of a product that PyTorch's counter knows, or of one in groups; None for anything else."""
    if base_name(call["operator"]) == "_grouped_mm":
        return _grouped(*(place["shape"] for place in call["sources"][:2]))
    name = base_name(call["operator"])
    packet = operator_of(call["operator"]).overloadpacket
    count = flop_registry.get(packet)
    if count is None:
        return None if name not in COUNTS or name in _VECTORS else call_work(call).flop
    tensors = [torch.empty(place["shape"], device="meta") for place in call["sources"]]
    results: list[Tensor | None] = [torch.empty(layout["shape"], device="meta") for layout in call["results"]]
    args, kwargs = build_arguments(call["arguments"], tensors, lambda _: 0.0, torch.device("meta"))
    if packet == torch.ops.aten.convolution_backward:
        found = iter(results)
        results = [next(found) if wanted else None for wanted in args[-1]]
    flop = int(count(*args, **kwargs, out_val=results[0] if len(results) == 1 else tuple(results)))
    return flop * per_complex(name, (place["dtype"] for place in call["sources"]))
