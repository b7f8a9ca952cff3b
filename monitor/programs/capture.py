"""Captures the program of a step while it runs: wiring, constants, scalars, draws and reads, no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import Meter
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES, canonical, digest_bytes
from monitor.programs.keys import RecordedKeys
from monitor.programs.lists import charge_each, is_awaited_inside
from monitor.programs.program import ITEM, Constant, Program, operator_of
from monitor.programs.trace import COMMIT_STATE, Tracer, name_of, written_arguments
from monitor.programs.watching import WriteWatch
from monitor.programs.work import call_work, makes

__all__ = ["Capture", "digest_reads", "numbered", "read_value"]

MAXIMUM_CONSTANTS = 64 << 20


def read_value(value: object) -> str:
    """A value that a call read into Python, as text with its type."""
    return f"{type(value).__name__}:{value.hex() if isinstance(value, float) else value}"


def digest_reads(reads: list[str]) -> str:
    """Digest of all values that a step read, in order."""
    return str(digest_bytes("reads", canonical.encode(reads)))


class Capture(Tracer):
    """Observes one step.

    Attributes:
        reads: values that the body read with ``.item()``, ``bool()`` and the like.
        writes: the watch over memory that something else may write.
    """

    def __init__(self, keys: RecordedKeys, watch: WriteWatch, inner: Any = None, *, meter: Meter | None = None) -> None:
        """``inner`` is an observer that runs first, such as one that alters results; ``meter`` that of the memory."""
        super().__init__(inner=inner)
        self.writes = watch
        self._meter = Meter() if meter is None else meter
        self.reads: list[str] = []
        self._before: list[Tensor] | None = None
        self._keys = keys
        self._draws: list[list[int]] = []
        self._constants: list[Constant] = []
        self._readers: list[str] = []

    def before(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operator_of(name_of(func))
        try:
            super().before(index, func, args, kwargs)
        except EvidenceError as error:
            raise CallerError(f"this step cannot be recorded: {error}") from None
        self.writes.before(func, self._inputs)
        self._before = None
        if is_awaited_inside(self._meter, func, args):
            self._before = [tensor.clone() for tensor in written_arguments(func, args, kwargs)]

    def after(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        super().after(index, func, args, kwargs, out)
        self._charge()
        if makes(func):
            self._meter.holdings.note(out)
        self.writes.after(self._written)
        self._draws.append(self._keys.take())
        if name_of(func) == ITEM:
            self.reads.append(read_value(out))

    def _charge(self) -> None:
        """Have the memory's meter count the call."""
        work = call_work(self.nodes[-1].specification())
        if self._before is None:
            self._meter.charge(work)
        else:
            charge_each(self._meter, work, self._written, self._before)

    @property
    def taken(self) -> int:
        """Number of operators so far."""
        return len(self.nodes)

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
        scalars: list[str] = []
        calls = []
        for node, draws in zip(self.nodes, self._draws, strict=True):
            arguments = {
                "args": numbered(node.arguments["args"], scalars),
                "kwargs": {name: numbered(value, scalars) for name, value in sorted(node.arguments["kwargs"].items())},
            }
            calls.append({**node.specification(), "arguments": arguments, "draws": draws})
        known = len(self._constants)
        commit = {}
        for name, tensor in state.items():
            commit[name] = None if tensor is None else self._source_of(tensor, COMMIT_STATE)
            if len(self._constants) > known:
                raise CallerError(f"{name} was set to a tensor that no operator, state or batch of this step produced")
        place = None if loss is None else self._source_of(loss, "the loss")
        if len(self._constants) > known:
            raise CallerError("the loss is a tensor that no operator, state or batch of this step produced")
        return Program(
            calls=tuple(calls),
            scalars=tuple(scalars),
            batch=batch,
            constants=tuple(self._constants),
            commit=commit,
            updates=tuple(updates),
            loss=place,
        )

    def _digest(self, tensor: Tensor) -> str:
        return ""

    def _stranger(self, tensor: Tensor, operator: str) -> None:
        """A tensor from nowhere is a constant: its whole storage, by value."""
        storage = tensor.untyped_storage()
        dtype = str(tensor.dtype).removeprefix("torch.")
        total = sum(len(constant.data) for constant in self._constants) + storage.nbytes()
        if dtype not in DTYPE_SIZES or total > MAXIMUM_CONSTANTS:
            raise CallerError(
                f"{operator} reads a {dtype} tensor of {storage.nbytes()} bytes that no recorded operator, state or "
                "batch produced; declare it in the batch or register it as a buffer"
            )
        whole = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage)
        raw = whole.view(torch.uint8).cpu().numpy().tobytes() if whole.numel() else b""
        self._record_write(whole, f"constant:{len(self._constants)}")
        self._constants.append(Constant(dtype, raw))
        self._readers.append(operator)


def numbered(value: Any, scalars: list[str]) -> Any:
    """Described arguments of a call: replace each fractional number by its place in ``scalars``."""
    if isinstance(value, list):
        return [numbered(item, scalars) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$float"}:
        scalars.append(value["$float"])
        return {"$scalar": len(scalars) - 1}
    return value
