"""Captures the program of a step while it runs: wiring, constants, scalars, draws and reads, no copies.

The outline of a call: everything about it but the values of its fractional numbers, as plain tuples.

A step mostly makes the calls of a step before it. An outline costs a fraction of a call's form in a program and
determines it, so that a call whose outline is known need not be put into that form again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import NO_WORK, Meter, limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES, canonical, digest_bytes
from monitor.numerics import Observer
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import operator_table
from monitor.programs.calls import charge, charge_part, writes_list
from monitor.programs.flop import call_work, live_work, makes
from monitor.programs.keys import OwnKeys, RecordedKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import ITEM, Constant, Program, operator_of
from monitor.programs.trace import (
    COMMIT_STATE,
    described,
    layout_of,
    name_of,
    reach,
    result_tensors,
    written_arguments,
)
from monitor.programs.wiring import Place, Wiring

__all__ = [
    "UNSET",
    "Capture",
    "digest_reads",
    "layout_outline",
    "made_of_number",
    "numbered",
    "outline_of",
    "parse_value",
    "read_value",
]


_TENSOR, _NUMBER, _DEVICE = "$tensor", "$number", "$device"
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def outline_of(value: Any, tensors: list[Tensor], numbers: list[str]) -> Any:
    """Arguments without tensors and fractional numbers, which are taken out into ``tensors`` and ``numbers`` as text.

    Each value comes with its kind where another kind's could be equal to it.

    Raises:
        EvidenceError: a value that no program can hold.
    """
    kind = type(value)
    if kind is int or value is None:
        return value
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor):
        tensors.append(value)
        return (_TENSOR,)
    if kind is bool or kind is str:
        return kind, value
    if isinstance(value, list | tuple):
        return [outline_of(item, tensors, numbers) for item in value]
    if isinstance(value, float):
        numbers.append(value.hex())
        return (_NUMBER,)
    if isinstance(value, torch.device):
        return (_DEVICE,)
    if not isinstance(value, _NAMED):
        described(value, [])
    return kind, value


def layout_outline(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Types, shapes and strides of results."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


UNSET = frozenset(name for name, row in operator_table().items() if row.unset)
"""Operators whose results hold whatever lay in memory; a session makes it zeros."""
_MOST_FILLED = 1 << 16
_Call = tuple[OpOverload, Arguments, Keywords]
_SUMMED = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def read_value(value: object) -> str:
    """A value that a call read into Python, as text with its type."""
    return f"{type(value).__name__}:{value.hex() if isinstance(value, float) else value}"


def parse_value(text: str) -> bool | int | float:
    """The value that ``read_value`` has written; ValueError on any other text."""
    kind, _, value = text.partition(":")
    if kind == "bool" and value in ("True", "False"):
        return value == "True"
    if kind not in ("int", "float"):
        raise ValueError(f"{text!a:.80} is no value that a step can read")
    return int(value) if kind == "int" else float.fromhex(value)


def made_of_number(func: OpOverload, args: Arguments, knows: Callable[[Tensor], bool]) -> _Call | None:
    """The call that makes a tensor of a Python number, as an update does; None for another call.

    Its number may be another one in each update; as a constant it could not.
    """
    if func is not torch.ops.aten.lift_fresh.default or args[0].dtype != torch.float32 or args[0].shape:
        return None
    if knows(args[0]):
        return None
    return torch.ops.aten.scalar_tensor.default, (float(args[0]),), {"dtype": args[0].dtype}


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def digest_reads(reads: list[str]) -> str:
    """Digest of all values that a step read, in order."""
    return str(digest_bytes("reads", canonical.encode(reads)))


class Capture:
    """Observes one step and makes its program.

    Attributes:
        reads: values that the body read with ``.item()``, ``bool()`` and the like.
        writes: the watch over memory that something else may write.
        work: of the calls so far.
        carried: what the step found of steps before, outside the state, once that is known; it belongs to the batch.
        updating: an optimizer's update is under way; what it makes of a Python number is a number of the program then.
    """

    def __init__(
        self,
        keys: RecordedKeys | OwnKeys,
        watch: WriteWatch,
        inner: Observer | None = None,
        *,
        meter: Meter | None = None,
        known: Iterable[Program] = (),
    ) -> None:
        """Make one for the step that draws from ``keys``.

        Args:
            inner: an observer that runs first, such as one that alters results.
            meter: that of the memory.
            known: programs that the step may run again; calls of theirs are taken over instead of made anew.
        """
        self.writes = watch
        self.work = NO_WORK
        self._inner = inner
        self._meter = Meter() if meter is None else meter
        self.reads: list[str] = []
        self.updating = False
        self._in_parts = False  # of the call that is under way
        self._list_work = NO_WORK
        self._keys = keys
        self._known = list(known)
        self._wiring = Wiring()
        self._batch: list[Tensor] = []
        self._batch_ends: dict[str, int] = {}  # real numbers of each entry
        self.carried: dict[str, Tensor] = {}
        self._calls: list[Mapping[str, Any]] = []
        self._scalars: list[str] = []
        self._constants: list[Constant] = []
        self._readers: list[str] = []
        self._made_of: _Call | None = None
        self._open: tuple[list[Any], list[str], list[Place]] | None = None
        self._written: list[Tensor] = []
        self._given: set[int] = set()  # storages of state and batch
        self._unset: set[str] = set()  # results of calls that leave memory as it is, which nothing has written since
        self._ends: dict[int, Tensor] = {}  # by storage, results that no call has computed with

    def declare_inputs(self, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Say what exists before the step: the state and the batch, and nothing else."""
        for kind, tensors in (("state", state), ("batch", batch)):
            for name, tensor in tensors.items():
                self._wiring.record(tensor, f"{kind}:{name}")
                self._given.add(tensor.untyped_storage()._cdata)
        self._batch = list(batch.values())
        self._batch_ends = {f"batch:{name}": each.numel() * (1 + each.is_complex()) for name, each in batch.items()}

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Note the arguments of a call and where its inputs come from, before it can write them."""
        self._made_of = made_of_number(func, args, self._wiring.knows) if self.updating else None
        if self._made_of is not None:
            func, args, kwargs = self._made_of
        name = name_of(func)
        if index != len(self._calls):
            raise CallerError(
                f"this step cannot be recorded: an operator before {name} failed and the loop went on, so its effects "
                "are unknown; do not catch errors of operators that write or are refused, but check before the call"
            )
        operator_of(name)
        tensors: list[Tensor] = []
        numbers: list[str] = []
        try:
            if self._inner is not None:
                self._inner.before(index, func, args, kwargs)
            outline: list[Any] = [func, len(self._scalars), outline_of(args, tensors, numbers)]
            if kwargs:
                named: dict[str, list[str]] = {key: [] for key in sorted(kwargs)}
                outline.append([(key, outline_of(value, tensors, named[key])) for key, value in kwargs.items()])
                numbers += chain.from_iterable(named.values())
            places = [self._place_of(tensor, name) for tensor in tensors]
        except EvidenceError as error:
            raise CallerError(f"this step cannot be recorded: {error}") from None
        self._open = outline, numbers, places
        self._written = written_arguments(func, args, kwargs)
        if self._written or makes(func):
            for tensor in filter(_is_strided, tensors):
                self._ends.pop(tensor.untyped_storage()._cdata, None)
        self.writes.before(self._written)
        self._in_parts = writes_list(func)
        if self._in_parts:
            self._list_work = live_work(func, args, kwargs, None)

    def wrote_part(self, number: int, count: int) -> None:
        """One of the tensors of a list that a call writes is written."""
        charge_part(self._meter, self._list_work, number, count)

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Note what the call returned, wrote, drew and read."""
        if self._made_of is not None:
            func, args, kwargs = self._made_of
        if self._inner is not None:
            self._inner.after(index, func, args, kwargs, out)
        assert self._open is not None
        (outline, numbers, places), written = self._open, self._written
        results = result_tensors(out, written)
        for slot, tensor in chain(enumerate(written, len(results)), enumerate(results)):
            if slot >= len(results) or not self._wiring.knows(tensor):
                self._wiring.record(tensor, f"node:{index}:{slot}")
        if name_of(func) in UNSET and out is not None:
            self._unset.add(f"node:{index}:0")
        results += written
        draws = self._keys.take()
        outline += (places, layout_outline(results), draws)
        known = self._program_with(outline)
        if known is not None:
            self._calls.append(known.calls[len(self._calls)])
            self._scalars += numbers
        else:
            known = self._put_down(func, args, kwargs, places, results, draws, outline)
        self._charge(known)
        if makes(func):
            self._meter.holdings.note(out)
        if written or makes(func):
            self._note_ends(results)
        self.writes.after(written)
        if name_of(func) == ITEM:
            self.reads.append(read_value(out))

    def _put_down(
        self,
        func: OpOverload,
        args: Arguments,
        kwargs: Keywords,
        places: Sequence[Place],
        results: Sequence[Tensor],
        draws: list[int],
        outline: Sequence[Any],
    ) -> Program | None:
        """Put a call into a program's form; a known program that makes it in the same place gets its outline."""
        tensors: list[Tensor] = []
        given, named = described(args, tensors), described(kwargs, tensors)
        call = {
            "operator": name_of(func),
            "arguments": {
                "args": numbered(given, self._scalars),
                "kwargs": {name: numbered(value, self._scalars) for name, value in sorted(named.items())},
            },
            "sources": [place.to_json() for place in places],
            "results": [layout_of(tensor) for tensor in results],
            "draws": draws,
        }
        place = len(self._calls)
        known = next((each for each in self._known if place < len(each.calls) and each.calls[place] == call), None)
        if known is not None:
            known.outlines[place] = outline
        self._calls.append(call if known is None else known.calls[place])
        return known

    def _program_with(self, outline: Sequence[Any]) -> Program | None:
        """A known program whose call in the same place has the same outline; it is asked first from now on."""
        place = len(self._calls)
        for number, program in enumerate(self._known):
            if program.outlines.get(place) == outline:
                if number:
                    self._known.insert(0, self._known.pop(number))
                return program
        return None

    def _charge(self, known: Program | None) -> None:
        """Have the memory's meter count the last call, which ``known`` makes too."""
        work = call_work(self._calls[-1]) if known is None else known.works[len(self._calls) - 1]
        self.work += work
        if not self._in_parts:
            charge(self._meter, work)

    def _note_ends(self, results: Iterable[Tensor]) -> None:
        """Hold results until a call computes with them, by other tensors: autograd copies gradients that are held."""
        for tensor in filter(_is_strided, results):
            key = tensor.untyped_storage()._cdata
            if key not in self._given:
                self._ends[key] = tensor.detach()

    def read_ends(self, kept: Iterable[Tensor | None], make: Callable[..., Any]) -> None:
        """Read the sum of each unused result, so that a replay can tell that it was computed.

        Args:
            kept: what the step commits.
            make: makes a call, given an operator and its argument.
        """
        ends, self._ends = self._ends, {}
        for tensor in kept:
            if tensor is not None and _is_strided(tensor):
                ends.pop(tensor.untyped_storage()._cdata, None)
        for tensor in ends.values():
            if tensor.numel() and tensor.dtype in _SUMMED:
                total = tensor if tensor.numel() == 1 else make(torch.ops.aten.sum.default, tensor)
                make(torch.ops.aten._local_scalar_dense.default, total)
        self._ends = {}

    def move(self, tensor: Tensor, place: Tensor) -> None:
        """Count ``place``, which holds what a call has left in a tensor, as left there by that call."""
        self._wiring.record(place, self._wiring.place_of(tensor, COMMIT_STATE).source)

    @property
    def taken(self) -> int:
        """Number of operators so far."""
        return len(self._calls)

    def reader_of(self, constant: int) -> str:
        """The operator that read a constant first."""
        return self._readers[constant]

    def program(
        self,
        state: Mapping[str, Tensor | None],
        batch: Mapping[str, Mapping[str, Any]],
        updates: Sequence[tuple[int, int]],
        loss: Tensor | None = None,
    ) -> Program:
        """Close the step with what each tensor of the state now is, None where it is absent, and with its loss."""
        known = len(self._constants)
        commit = {}
        for name, tensor in state.items():
            commit[name] = None if tensor is None else self._place_of(tensor, COMMIT_STATE).to_json()
            if len(self._constants) > known:
                raise CallerError(
                    f"{name} was set to a tensor that no operator, state or batch of this step produced; pass it in "
                    "the batch, or list what holds it: state=[…]"
                )
        place = None if loss is None else self._place_of(loss, "the loss").to_json()
        if len(self._constants) > known:
            raise CallerError(
                "the loss is a tensor that no operator, state or batch of this step produced; commit the loss that "
                "the step's body computes"
            )
        return Program(
            calls=tuple(self._calls),
            scalars=tuple(self._scalars),
            batch=batch,
            constants=tuple(self._constants),
            commit=commit,
            updates=tuple(updates),
            loss=place,
        )

    def _place_of(self, tensor: Tensor, reader: str) -> Place:
        if not self._wiring.knows(tensor):
            self._stranger(tensor, reader)
        place = self._wiring.place_of(tensor, reader)
        if self._unset and place.source in self._unset and _is_filled(tensor):
            self._stranger(tensor, reader)
            place = self._wiring.place_of(tensor, reader)
        if (most := self._batch_ends.get(place.source)) is not None:
            numbers = reach(list(place.shape), list(place.stride)) * (2 if tensor.is_complex() else 1)
            if not 0 <= place.offset <= most - numbers:
                raise CallerError(
                    f"{reader} reads memory outside of what {place.source} holds; slice the batch once, before the "
                    "step, and use that tensor in it"
                )
        return place

    def _stranger(self, tensor: Tensor, operator: str) -> None:
        """A tensor from nowhere lies in an array of the batch, or is a constant: its whole storage, by value."""
        if any(self._wiring.adopt(tensor, known) for known in self._batch):
            return
        storage = tensor.untyped_storage()
        dtype = str(tensor.dtype).removeprefix("torch.")
        total = sum(constant.length for constant in self._constants) + storage.nbytes()
        if dtype not in DTYPE_SIZES or total > limits.CONSTANTS_BYTES.most:
            raise CallerError(
                f"{operator} reads a {dtype} tensor of {storage.nbytes()} bytes that no recorded operator, state or "
                "batch produced; declare it in the batch, register it as a buffer, or list what holds it: state=[…]"
            )
        whole = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage)
        raw = whole.view(torch.uint8).cpu().numpy().tobytes() if whole.numel() else b""
        self._wiring.record(whole, f"constant:{len(self._constants)}")
        self._constants.append(Constant.of(dtype, raw))
        self._readers.append(operator)


def _is_filled(tensor: Tensor) -> bool:
    """Whether memory that was made as zeros holds something: PyTorch's own code writes a list of numbers there."""
    is_small = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() <= _MOST_FILLED
    return is_small and bool(tensor.count_nonzero())


def numbered(value: Any, scalars: list[str]) -> Any:
    """Described arguments of a call: replace each fractional number by its place in ``scalars``."""
    if isinstance(value, list):
        return [numbered(item, scalars) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and "$float" in value:
        scalars.append(value["$float"])
        return {"$scalar": len(scalars) - 1}
    return value
