"""Executes a program under controlled numerics: no Python of the lab runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor import numerics
from monitor.numerics.operators import row_named
from monitor.programs.capture import read_value
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import ITEM, Program, build_arguments
from monitor.programs.trace import layout_of, result_tensors, written_arguments
from monitor.sharding import ShardedMemory

__all__ = ["Watch", "execute", "loss_bits"]

_PROGRAM_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What operators raise on arguments that do not fit them; a program brings its own."""


def loss_bits(loss: Tensor) -> str:
    """The FP32 bits of a scalar loss as 8 hex digits."""
    return f"{int(loss.detach().reshape(1).cpu().view(torch.int32)) & 0xFFFF_FFFF:08x}"


class Watch(Protocol):
    """Sees the tensors of every call, outside the session; nothing that it does is part of the step."""

    def before(self, inputs: Sequence[Tensor]) -> None:
        """The next call is about to run on these tensors."""

    def after(self, outputs: Sequence[Tensor]) -> None:
        """It has returned and written these."""


def execute(
    program: Program,
    memory: ShardedMemory,
    batch: Mapping[str, Tensor],
    scalars: Sequence[float],
    session: numerics.Session,
    keys: RepeatedKeys,
    watch: Watch | None = None,
) -> tuple[list[str], str]:
    """Take one step: ``memory`` goes from the state before to the state after it.

    Returns what the step read, and the bits of its loss (``loss_bits``), empty where the program commits to none.

    A program names no device: everything lies and is computed where ``memory`` is.

    Raises:
        EvidenceError: the program does not fit the state, the batch or what its operators really return.
    """
    state = memory.export()
    if set(program.commit) != set(state):
        raise EvidenceError("the program does not say what becomes of each tensor of the state, and of no other")
    _check_batch(program, batch)
    values = {f"state:{name}": tensor for name, tensor in state.items()}
    values |= {f"batch:{name}": tensor.to(memory.place, copy=True) for name, tensor in batch.items()}
    values |= {f"constant:{i}": constant.tensor().to(memory.place) for i, constant in enumerate(program.constants)}
    reads: list[str] = []
    try:
        with torch.no_grad():
            with session.direct():
                for number in range(len(program.calls)):
                    _call(program, number, values, scalars, session, keys, reads, memory.place, watch)
            keys.expect(())
            loss = "" if program.loss is None else loss_bits(_place(values, program.loss))
            _commit(program, state, values)
    except CallerError as error:
        raise EvidenceError(f"the program cannot be executed: {error}") from None
    except _PROGRAM_ERRORS as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvidenceError(f"the program cannot be executed: {text}") from None
    return reads, loss


def _check_batch(program: Program, batch: Mapping[str, Tensor]) -> None:
    found = {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for name, t in batch.items()}
    if found != {name: dict(layout) for name, layout in program.batch.items()}:
        raise EvidenceError("the batch does not have the tensors that the program reads")


def _call(
    program: Program,
    number: int,
    values: dict[str, Tensor],
    scalars: Sequence[float],
    session: numerics.Session,
    keys: RepeatedKeys,
    reads: list[str],
    place: torch.device,
    watch: Watch | None,
) -> None:
    call = program.calls[number]
    func = program.operators[number]
    tensors = [_place(values, place) for place in call["sources"]]
    args, kwargs = build_arguments(call["arguments"], tensors, scalars.__getitem__, place)
    if watch is not None:
        watch.before(tensors)
    keys.expect(call["draws"])
    out: Any = session.call(func, args, kwargs)
    if call["operator"] == ITEM:
        reads.append(read_value(out))
    written = written_arguments(func, args, kwargs)
    outputs = [*result_tensors(out, written), *written]
    if [layout_of(tensor) for tensor in outputs] != call["results"]:
        raise EvidenceError(f"call {number} ({func}) returns tensors of another layout than its program says")
    if row_named(call["operator"]).unset:
        out.zero_()
    if watch is not None:
        watch.after(outputs)
    for slot, tensor in enumerate(outputs):
        values[f"node:{number}:{slot}"] = tensor
    last = program.last_uses
    spent = [f"node:{number}:{slot}" for slot in range(len(outputs))] + [place["source"] for place in call["sources"]]
    for source in spent:
        if source.startswith("node:") and last.get(source, -1) <= number:
            values.pop(source, None)


def _place(values: Mapping[str, Tensor], place: Mapping[str, Any]) -> Tensor:
    """The tensor that lies in its source's memory as ``place`` says."""
    source = values.get(place["source"])
    if source is None:
        raise EvidenceError(f"the program reads {place['source']}, which is not there")
    kind = getattr(torch, place["dtype"])
    if source.dtype != kind:
        if source.dtype.itemsize != kind.itemsize:
            raise EvidenceError(f"the program reads {place['source']} as {place['dtype']}, which it is not")
        source = source.view(kind)
    offset = int(source.storage_offset()) + place["offset"]
    if offset < 0:
        raise EvidenceError(f"the program reads before the memory of {place['source']}")
    return torch.as_strided(source, place["shape"], place["stride"], offset)


def _commit(program: Program, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Move every tensor of the new state to where the chips hold it."""
    moved: list[tuple[Tensor, Tensor | None]] = []
    for name, place in program.commit.items():
        target = state[name]
        if place is None:
            moved.append((target, None))
            continue
        value = _place(values, place)
        if value.dtype != target.dtype or value.shape != target.shape:
            raise EvidenceError(f"the program gives {name} another type or shape than the declared state")
        if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
            moved.append((target, value.clone()))
    for target, new in moved:
        if new is None:
            target.zero_()
        else:
            target.copy_(new)
