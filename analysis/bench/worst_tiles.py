"""What a referee receives about each operator of a step where two parties differ in it, by shapes alone.

Both parties of these games hold zeros everywhere, and differ in one element of a result, in its middle. The referee's
own code asks for what it needs; the bodies of all answers are counted, as they would come. No step is taken.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import CHUNK_BYTES, DTYPE_SIZES, block_elements, canonical, chunk_hash, digest_of_chunks
from inspector.dispute.messages import CheckedProver, Contradiction, Traffic
from inspector.dispute.operators import settle_operator
from inspector.dispute.ruling import StepTask
from monitor.numerics.declared import written
from monitor.numerics.operators.partial_sums import Part, Parted, part_of, spans
from monitor.numerics.operators.tiles import Operand, Untiled
from monitor.presets.task import Task
from monitor.programs.trace import COMMIT_STATE, Node, content_of
from monitor.protocol.dispute import SUBTREES
from monitor.replay.derivation import derive
from monitor.replay.parted import parted_of
from monitor.transcript.leaf import Execution

__all__ = ["Need", "needs"]

_HASH = 44
"""Characters of a SHA-256 in base64."""
_PART = 400
"""Bytes of a part's numbers, of which those of zeros have few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one operator takes, and how many of the step are like it.

    Attributes:
        mode: the operator.
        bytes: of the bodies of all answers after the search.
        seconds: processor time of the referee, and of the parties' parts.
        case: of the ruling; "not opened" where nothing decides.
    """

    mode: str
    shapes: str
    calls: int
    bytes: int
    seconds: float
    case: str
    questions: Mapping[str, int]


def needs(task: Task) -> tuple[list[Need], int]:
    """Needs of the operators of a step, the largest first, those that are alike once; and of its program, from both."""
    derived = derive(task)
    program, declared = derived.program, derived.declaration
    execution = Execution(program=program.digest, slots={}, hyper=(), reads="")
    step = StepTask(
        step=1,
        declared=declared,
        layout=declared.layout,
        program=program,
        execution=execution,
        batch=lambda: {},
        constant=lambda number: program.constants[number],
    )
    expected = step.specification()
    alike: dict[bytes, list[int]] = {}
    for index, call in enumerate(expected):
        if not call["results"]:  # reads a number, which the leaf holds
            continue
        alike.setdefault(_kind(expected, index), []).append(index)
    found = [_need(step, expected, numbers) for numbers in alike.values()]
    return sorted(found, key=lambda each: -each.bytes), 2 * _encoded(len(program.encoded))


def _kind(expected: list[dict[str, Any]], index: int) -> bytes:
    """What calls have in common that take the same bytes."""
    call = expected[index]

    def seen(place: Mapping[str, Any]) -> list[Any]:
        kind, _, name = place["source"].partition(":")
        made: Any = None
        if kind == "node":
            number, slot = map(int, name.split(":"))
            made = [expected[number]["operator"], expected[number]["results"][slot]]
        return [kind, {**place, "source": ""}, made]

    return canonical.encode([call["operator"], call["arguments"], list(map(seen, call["sources"])), call["results"]])


def _need(step: StepTask, expected: list[dict[str, Any]], alike: list[int]) -> Need:
    index, counted = alike[0], Counter[str]()
    parties = tuple(_Zeros(name, step, expected, index, counted) for name in ("right", "wrong"))
    start = time.process_time()
    try:
        case = settle_operator(parties, index, step, expected[index]).case  # type: ignore[arg-type]
    except EvidenceError as error:
        case = f"not opened: {error}"
    call = expected[index]
    return Need(
        mode=call["operator"],
        shapes=", ".join("×".join(map(str, place["shape"])) or "1" for place in call["sources"][:6]),
        calls=len(alike),
        bytes=sum(counted.values()),
        seconds=time.process_time() - start,
        case=case,
        questions=dict(counted),
    )


class _Zeros(CheckedProver):
    """A party whose tensors are zeros, but that "wrong" has one other element in each result of the disputed call."""

    def __init__(
        self, name: str, task: StepTask, expected: list[dict[str, Any]], disputed: int, counted: Counter[str]
    ) -> None:
        self.name, self.traffic, self._task = name, Traffic(), task
        self._expected, self._disputed, self._counted = expected, disputed, counted

    def node(self, step: int, index: int) -> Node:
        call = self._expected[index]
        inputs = [_digest(place, None) for place in call["sources"]]
        outputs = [_digest(layout, self._odd(index, layout)) for layout in call["results"]]
        if call["operator"] == COMMIT_STATE:
            outputs = [self.name]
        return Node(index=index, inputs=tuple(inputs), outputs=tuple(outputs), **_tuples(call))

    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        layout = self._place_of(index, side, slot)
        found = _hashes(layout, self._odd(index, layout) if side == "out" else None)
        self._counted["hashes"] += len(found) * _HASH
        return found

    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        layout = self._place_of(index, side, slot)
        content = _chunk(layout, number, self._odd(index, layout) if side == "out" else None)
        self._counted["chunk"] += _encoded(len(content))
        return content

    def block(self, step: int, number: int, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
        length = block_elements(dtype, shape)
        size = (min(length, math.prod(shape) - number * length)) * DTYPE_SIZES[dtype]
        self._counted["block"] += _encoded(size) + 64 * 32
        return bytes(size)

    def parts(
        self, step: int, index: int, slot: int, place: int, widths: Sequence[tuple[int, int]]
    ) -> tuple[Part, ...]:
        parted, whole = self._reduced(slot)
        parts = []
        for number, span in enumerate(spans(parted.terms, len(widths))):
            one = part_of(parted, span, whole.most)
            is_lie = self.name == "wrong" and number == len(widths) // 2
            parts.append(_raised(one, _lie(parted, whole)) if is_lie else one)
        self._counted["parts"] += len(parts) * _PART
        return tuple(parts)

    def _reduced(self, slot: int) -> tuple[Parted, Part]:
        """The element in the middle of a result as a reduction of zeros, and the numbers of all its terms."""
        call = self._expected[self._disputed]
        node = Node(
            index=self._disputed,
            inputs=("",) * len(call["sources"]),
            outputs=("",) * len(call["results"]),
            **_tuples(call),
        )
        place, operands = math.prod(call["results"][slot]["shape"]) // 2, list(map(_zeros, call["sources"]))
        parted = parted_of(node, slot, place, operands, self._task.declared.numerics)
        values = parted.taken(range(parted.terms))
        return parted, Part(parted.most(values), parted.sums(values, parted.most(values)))

    def rounding_entries(self, step: int, index: int) -> bytes:
        """Of zeros nothing is ambiguous."""
        return written(self._task.declared.numerics, [])

    def leaf(self, step: int) -> Any:
        """A leaf of which the state alone is looked at, another one in its largest subtree."""
        sizes = [size for _, size in self._task.layout.subtrees]
        hashes = [bytes(32)] * len(sizes)
        hashes[sizes.index(max(sizes))] = bytes(32) if self.name == "right" else b"\x01" * 32
        return SimpleNamespace(state=SimpleNamespace(hashes=tuple(hashes)))

    def blocks(self, step: int, start: int, size: int, committed: bytes) -> tuple[bytes, ...]:
        found = [bytes(32)] * min(size, SUBTREES)
        found[len(found) // 2] = committed
        self._counted["blocks"] += _encoded(32 * len(found))
        return tuple(found)

    def contradicts(self, what: str) -> Contradiction:
        raise AssertionError(f"zeros contradict {what}")

    def _place_of(self, index: int, side: str, slot: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._expected[index]["sources" if side == "in" else "results"][slot]
        return found

    def _odd(self, index: int, layout: Mapping[str, Any]) -> tuple[int, bytes] | None:
        """Where a result has an element that is not zero, and its bytes."""
        if self.name == "right" or index != self._disputed:
            return None
        return math.prod(layout["shape"]) // 2, self._content

    @cached_property
    def _content(self) -> bytes:
        try:
            parted, whole = self._reduced(0)
        except (CallerError, Untiled):
            return b"\x01"
        return bytes(content_of(parted.value(_raised(whole, _lie(parted, whole)))))


def _zeros(layout: Mapping[str, Any]) -> Operand:
    kind: torch.dtype = getattr(torch, layout["dtype"])
    return Operand(tuple(layout["shape"]), kind, lambda places: torch.zeros(len(places), dtype=kind), 1 << 26)


def _raised(part: Part, by: int) -> Part:
    return Part(part.most, (part.sums[0] + by, *part.sums[1:]))


def _lie(parted: Parted, whole: Part) -> int:
    """What to add to the first sum so that it gives another element, which is finite."""
    true = float(parted.value(whole))
    return next(
        x for x in (1 << 20, 1 << 190, 1 << 344) if float(parted.value(_raised(whole, x))) not in (true, math.inf)
    )


def _tuples(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in call.items()}


def _encoded(size: int) -> int:
    return -(-size // 3) * 4 + 2


def _length(layout: Mapping[str, Any]) -> int:
    return int(math.prod(layout["shape"])) * DTYPE_SIZES.get(layout["dtype"], 0)


def _chunk(layout: Mapping[str, Any], number: int, odd: tuple[int, bytes] | None) -> bytes:
    size = min(CHUNK_BYTES, _length(layout) - number * CHUNK_BYTES)
    content = bytearray(size)
    if odd is not None:
        place = odd[0] * DTYPE_SIZES[layout["dtype"]] - number * CHUNK_BYTES
        if 0 <= place < size:
            content[place : place + len(odd[1])] = odd[1]
    return bytes(content)


def _hashes(layout: Mapping[str, Any], odd: tuple[int, bytes] | None) -> tuple[bytes, ...]:
    length = _length(layout)
    where = None if odd is None else odd[0] * DTYPE_SIZES[layout["dtype"]] // CHUNK_BYTES
    sizes = [min(CHUNK_BYTES, length - start) for start in range(0, length, CHUNK_BYTES)]
    return tuple(
        chunk_hash(_chunk(layout, number, odd)) if number == where else _zeros_hash(size)
        for number, size in enumerate(sizes)
    )


@lru_cache
def _zeros_hash(size: int) -> bytes:
    return chunk_hash(bytes(size))


def _digest(layout: Mapping[str, Any], odd: tuple[int, bytes] | None) -> str:
    if layout["dtype"] not in DTYPE_SIZES:
        return ""
    return str(digest_of_chunks(dtype=layout["dtype"], shape=layout["shape"], hashes=_hashes(layout, odd)))
