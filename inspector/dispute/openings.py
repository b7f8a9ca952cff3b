"""Tensors of a disputed step as a referee sees them: chunks that a party opens, each checked against what it committed.

An input of an operator has two commitments: its own digest, and that of the tensor in whose memory it lies, which both
agreed on before. A column of a transposed weight takes all chunks of the first and one of the second.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import CHUNK_BYTES, DTYPE_SIZES, block_elements, chunk_hash, digest_of_chunks
from inspector.dispute.messages import CheckedProver, shown
from monitor.declaration.statement import Declaration
from monitor.programs.trace import content_of, gather, in_numbers, reach

__all__ = ["Allowance", "Committed", "Input", "Known", "Placed", "Source", "Where", "hash_of", "state_tensor"]

_SAMPLED = 1 << 16
"""Elements of a tensor that is taken whole, of which one is looked at to count its chunks."""
_DIRECT = 2
"""Chunks of an input itself that are asked for, before its source is looked at."""


@dataclass(slots=True)
class Allowance:
    """Bytes of operands that are still asked for; what a game's evidence could not hold is not."""

    spent: int = 0

    def spend(self, amount: int) -> None:
        """EvidenceError beyond ``limits.OPERANDS_BYTES``."""
        self.spent = limits.OPERANDS_BYTES.check(self.spent + amount)


class Source(Protocol):
    """A tensor of which elements can be had.

    Attributes:
        dtype: as a program writes it, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str

    @abstractmethod
    def pieces(self, places: Tensor) -> int:
        """In how many chunks the elements at places (n,) of the flattened tensor lie."""

    @abstractmethod
    def fetch(self, places: Tensor) -> Tensor:
        """These elements (n,); EvidenceError where no party opens them, Failure where one has lost by its answer."""

    def whole(self) -> Tensor:
        """All of it."""
        return self.fetch(torch.arange(math.prod(self.shape))).reshape(self.shape)


@dataclass(slots=True)
class Known(Source):
    """A tensor that lies here."""

    tensor: Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: str = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.tensor.shape), str(self.tensor.dtype).removeprefix("torch.")

    def pieces(self, places: Tensor) -> int:
        return 0

    def fetch(self, places: Tensor) -> Tensor:
        return self.tensor.reshape(-1)[places]


class _Pieces(Source):
    """A tensor that is opened piece by piece; each is kept and so asked for once. The allowance bounds their sum."""

    _allowance: Allowance
    _length: int
    _held: dict[int, Tensor]

    @abstractmethod
    def _open(self, number: int, size: int) -> bytes: ...

    def piece(self, number: int) -> Tensor:
        """Its elements from ``number`` times the length of a piece on."""
        if number not in self._held:
            kind: torch.dtype = getattr(torch, self.dtype)
            count = min(self._length, math.prod(self.shape) - number * self._length)
            self._allowance.spend(count * kind.itemsize)
            content = self._open(number, count * kind.itemsize)
            self._held[number] = torch.frombuffer(bytearray(content), dtype=kind)
        return self._held[number]

    def pieces(self, places: Tensor) -> int:
        return len(self._numbers(places // self._length))

    def _numbers(self, numbers: Tensor) -> list[int]:
        """Each number of a piece once; they are few next to the places."""
        if not len(numbers):
            return []
        first = int(numbers.min())
        return (torch.bincount(numbers - first).nonzero().reshape(-1) + first).tolist()

    def fetch(self, places: Tensor) -> Tensor:
        found = torch.empty(len(places), dtype=getattr(torch, self.dtype))
        numbers = places // self._length
        for number in self._numbers(numbers):
            mine = numbers == number
            found[mine] = self.piece(number)[places[mine] - number * self._length]
        return found

    def whole(self) -> Tensor:
        size = math.prod(self.shape)
        pieces = [self.piece(number) for number in range(-(-size // self._length))]
        return (
            torch.cat(pieces).reshape(self.shape)
            if pieces
            else torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        )


class Where(NamedTuple):
    """Which tensor of an operator: an input (``side`` is ``in``) or an output (``out``), by its number."""

    step: int
    call: int
    side: str
    slot: int


class Committed(_Pieces):
    """A tensor of an operator, by the digest to which the nodes of these parties commit.

    Args:
        layout: its type and shape.
    """

    def __init__(
        self,
        parties: Sequence[CheckedProver],
        allowance: Allowance,
        where: Where,
        digest: str,
        layout: Mapping[str, Any],
    ) -> None:
        self.shape, self.dtype = tuple(layout["shape"]), str(layout["dtype"])
        if self.dtype not in DTYPE_SIZES:
            raise EvidenceError(f"an operator's tensor has the type {self.dtype!a:.50}")
        self._parties, self._allowance, self._place = parties, allowance, where
        self._digest = digest
        self._length = CHUNK_BYTES // DTYPE_SIZES[self.dtype]
        self._held: dict[int, Tensor] = {}
        self._hashes: tuple[bytes, ...] | None = None

    def hashes(self) -> tuple[bytes, ...]:
        """Hashes of all chunks, which have the committed digest."""

        def opened(party: CheckedProver) -> tuple[bytes, ...]:
            hashes = party.hashes(*self._place)
            if not self._fits(hashes):
                raise party.contradicts(self._named)
            return hashes

        if self._hashes is None:
            self._hashes = shown(self._parties, self._named, opened)
        return self._hashes

    def _open(self, number: int, size: int) -> bytes:
        is_alone = math.prod(self.shape) <= self._length  # then its hash gives the digest
        wanted = None if is_alone else self.hashes()[number]

        def opened(party: CheckedProver) -> bytes:
            content = party.chunk(*self._place, number)
            found = chunk_hash(content)
            if len(content) != size or (not self._fits([found]) if wanted is None else found != wanted):
                raise party.contradicts(self._named)
            return content

        return shown(self._parties, self._named, opened)

    def is_of(self, values: Tensor) -> bool:
        """Whether the commitment, of a tensor of one chunk at most, is to these elements."""
        return self._fits([hash_of(values)] if len(values) else [])

    def _fits(self, hashes: Sequence[bytes]) -> bool:
        try:
            return str(digest_of_chunks(dtype=self.dtype, shape=self.shape, hashes=hashes)) == self._digest
        except CallerError:  # not as many as the tensor has chunks
            return False

    @property
    def _named(self) -> str:
        step, call, side, slot = self._place
        return f"{'input' if side == 'in' else 'output'} {slot} of operator {call} of step {step}"


class StateTensor(_Pieces):
    """A tensor of the state after a step, to which both parties committed."""

    def __init__(
        self,
        parties: Sequence[CheckedProver],
        allowance: Allowance,
        *,
        step: int,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._parties, self._allowance, self._step, self._name = parties, allowance, step, name
        self._length = block_elements(dtype, shape)
        self._held: dict[int, Tensor] = {}

    def _open(self, number: int, size: int) -> bytes:
        what = f"{self._name} of the agreed state after step {self._step}"
        return shown(
            self._parties, what, lambda party: party.block(self._step, number, self._name, self.dtype, self.shape)
        )


def state_tensor(
    parties: Sequence[CheckedProver], allowance: Allowance, declared: Declaration, step: int, name: str
) -> StateTensor:
    """A tensor, ``kind/name``, of the state after a step; EvidenceError where none of that name is declared."""
    for each in declared.state:
        if f"{each.kind}/{each.name}" == name:
            return StateTensor(parties, allowance, step=step, name=name, dtype=each.dtype, shape=tuple(each.shape))
    raise EvidenceError(f"the declared state has no {name!a:.100}")


class Placed(Source):
    """A tensor that lies in the memory of another one, as a node says where.

    Args:
        layout: how the other one lies in memory.
        place: type, shape, stride and offset.
        before: the same place as it was before the other one was written there, where that is part of older memory:
            what lies around it is still the older one's.
    """

    def __init__(
        self,
        source: Source,
        layout: Mapping[str, Any],
        place: Mapping[str, Any],
        before: Callable[[], Source] | None = None,
    ) -> None:
        self.shape, self.dtype = tuple(place["shape"]), str(place["dtype"])
        self._source, self._layout, self._place, self._before = source, layout, place, before
        self._all: Tensor | None = None
        axes = sorted(
            (
                (stride, size, axis)
                for axis, (size, stride) in enumerate(zip(layout["shape"], layout["stride"], strict=True))
                if size > 1
            ),
            reverse=True,
        )
        self._axes = axes
        apart = all(step >= size * below for (step, _, _), (below, size, _) in pairwise(axes))
        apart = apart and all(step for step, _, _ in axes)
        self.is_simple = self.dtype == source.dtype and not self.dtype.startswith("complex") and apart
        if before is None or not self.is_simple:
            self._check()
        elements = math.prod(source.shape)
        if before is not None and not self.is_simple and elements != reach(layout["shape"], layout["stride"]):
            raise EvidenceError(
                "the last write to an input's memory left gaps, and the input reads this memory in another form"
            )

    def _check(self) -> None:
        """EvidenceError where it does not lie inside, as ``gather`` says it."""
        mine, within = in_numbers(self._place), in_numbers({**self._layout, "dtype": self._source.dtype})
        if list(self._source.shape) != list(self._layout["shape"]):
            raise EvidenceError("a source does not have the shape and type that its place gives")
        size = reach(within["shape"], within["stride"])
        if mine["offset"] < 0 or mine["offset"] + reach(mine["shape"], mine["stride"]) > size:
            raise EvidenceError("an input does not lie inside its source")

    def _found(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Places in the flattened source, and which of them lie between its elements."""
        memory = torch.full_like(places, int(self._place["offset"]))
        stride = math.prod(self.shape)
        for size, step in zip(self.shape, self._place["stride"], strict=True):
            stride //= max(size, 1)
            memory += places // max(stride, 1) % max(size, 1) * step
        found, rest, between = torch.zeros_like(places), memory, torch.zeros_like(places, dtype=torch.bool)
        for step, size, axis in self._axes:
            at = rest // step
            between |= (at < 0) | (at >= size)
            found += at.clamp(min=0, max=size - 1) * math.prod(self._source.shape[axis + 1 :])
            rest = rest - at * step
        return found, between | (rest != 0)

    def pieces(self, places: Tensor) -> int:
        if not self.is_simple:
            return self._source.pieces(torch.arange(0, math.prod(self._source.shape), _SAMPLED))
        return self._source.pieces(self._found(places)[0])

    def fetch(self, places: Tensor) -> Tensor:
        if not self.is_simple:
            if self._all is None:
                self._all = gather(self._source.whole(), self._layout, self._place).reshape(-1)
            return self._all[places]
        found, between = self._found(places)
        values = torch.zeros(len(places), dtype=getattr(torch, self.dtype))
        values[~between] = self._source.fetch(found[~between])
        if self._before is not None and bool(between.any()):
            values[between] = self._before().fetch(places[between])
        return values


class Input(Source):
    """An agreed input: from the chunks of its digest, or those of its source where these are fewer."""

    def __init__(self, own: Committed, source: Callable[[], Source]) -> None:
        self.shape, self.dtype = own.shape, own.dtype
        self._own, self._make = own, source
        self._source: Source | None = None

    def _best(self, places: Tensor) -> Source:
        direct = self._own.pieces(places)
        if direct <= _DIRECT:
            return self._own
        if self._source is None:
            try:
                self._source = self._make()
            except EvidenceError:  # it does not lie in one source's memory as this referee reads it
                self._source = self._own
        return self._source if self._source.pieces(places) < direct else self._own

    def pieces(self, places: Tensor) -> int:
        return self._best(places).pieces(places)

    def fetch(self, places: Tensor) -> Tensor:
        return self._best(places).fetch(places)

    def whole(self) -> Tensor:
        return self._own.whole()


def hash_of(values: Tensor) -> bytes:
    """The chunk hash of elements."""
    return chunk_hash(content_of(values))
