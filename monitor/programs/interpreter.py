"""Executes a program under controlled numerics: no Python of the lab runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from firmware_sim import NO_WORK
from firmware_sim.errors import CallerError, EvidenceError
from monitor import numerics
from monitor.numerics.session import MakesCall
from monitor.programs.calls import charge, charge_part, writes_list
from monitor.programs.capture import read_value
from monitor.programs.keys import RepeatedKeys
from monitor.programs.plan import Birth, Call, CallPlan, Cut, Registers, as_evidence
from monitor.programs.program import Program
from monitor.programs.trace import layout_of, result_tensors
from monitor.sharding import ShardedMemory

__all__ = ["Prepared", "Watch", "loss_bits", "loss_of"]


def loss_bits(loss: Tensor) -> str:
    """The FP32 bits of a scalar loss as 8 hex digits."""
    return f"{int(loss.detach().reshape(1).cpu().view(torch.int32)) & 0xFFFF_FFFF:08x}"


def loss_of(bits: str) -> Tensor:
    """The scalar FP32 loss of given bits; CallerError where a step has committed to none."""
    if not bits:
        raise CallerError("the step commits to no loss, so that there is nothing to compare")
    return torch.frombuffer(bytearray.fromhex(bits)[::-1], dtype=torch.float32).reshape(())


class Watch(Protocol):
    """Sees the tensors of every call, outside the session; nothing that it does is part of the step."""

    def before(self, inputs: Sequence[Tensor]) -> None:
        """The next call is about to run on these tensors."""

    def after(self, outputs: Sequence[Tensor]) -> None:
        """It has returned and written these."""


class Prepared:
    """A program made ready to run on one memory, as often as wanted.

    A program names no device: everything lies and is computed where the memory is.
    """

    def __init__(self, program: Program, memory: ShardedMemory) -> None:
        """Nothing is allocated before the first run but the program's constants."""
        self.program = program
        self._memory = memory
        self._registers: dict[bool, Registers] = {}

    def run(
        self,
        batch: Mapping[str, Tensor],
        scalars: Sequence[float],
        session: numerics.Session,
        keys: RepeatedKeys,
        watch: Watch | None = None,
        left: Collection[str] = (),
    ) -> tuple[list[str], str]:
        """Take one step: the memory goes from the state before to the state after it, and its meter counts the calls.

        Args:
            left: names, ``kind/name``, of what the step before left absent; what an optimizer makes of it comes into
                the memory as it is made, and all else that is made anew as the step ends.

        Returns what the step read, and the bits of its loss (``loss_bits``), empty where the program commits to none.

        Raises:
            EvidenceError: the program does not fit the state, the batch or what its operators really return.
        """
        state = self._memory.export()
        if set(self.program.commit) != set(state):
            raise EvidenceError("the tensors that the program commits are not exactly those of the state")
        _check_batch(self.program, batch)
        with as_evidence(), torch.no_grad():
            plan, registers = self._ready(state, batch, every=watch is not None or session.is_observed)
            registers[: plan.scalars] = scalars
            with torch._C._DisableAutocast(), session.direct(len(self.program.calls)):
                held = {name: state[name] for name in left if name in state}
                reads = self._run(plan, registers, held, session, keys, watch)
            keys.expect(())
            loss = "" if plan.loss is None else loss_bits(_placed(plan.loss, registers))
            _commit(plan, state, registers)
        return reads, loss

    def _run(
        self,
        plan: CallPlan,
        registers: Registers,
        left: Mapping[str, Tensor],
        session: numerics.Session,
        keys: RepeatedKeys,
        watch: Watch | None,
    ) -> list[str]:
        """Make all calls of the plan; returns what they read."""
        reads: list[str] = []
        operators = [session.operator(func) for func in plan.operators]
        meter, works = self._memory.meter, self.program.works
        in_parts = [writes_list(func) for func in plan.operators]
        work = NO_WORK
        session.wrote_part = lambda number, count: charge_part(meter, work, number, count)
        for call in plan.calls:
            if call.draws is not None:
                keys.expect(call.draws)
            work = works[call.number]
            if not _make(call, operators[call.operator], registers, reads, watch, session.numerics == "native"):
                raise EvidenceError(
                    f"call {call.number} ({plan.operators[call.operator]}) returns tensors whose layout is not the one "
                    "in its program"
                )
            if call.birth is not None and call.birth.name in left:
                _bear(call.birth, left[call.birth.name], registers)
            if not in_parts[call.operator]:
                charge(meter, work)
            for register in call.spent:
                registers[register] = None
        return reads

    def _ready(
        self, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], *, every: bool
    ) -> tuple[CallPlan, Registers]:
        """The plan, and registers that hold all that exists before its first call."""
        plan, place = self.program.plan(self._memory.place, every=every), self._memory.place
        if every not in self._registers:
            fixed = list(plan.registers)
            for source, register in plan.regions.items():
                if source not in plan.fresh:
                    fixed[register] = self._region(source, state, batch)
            for cut in plan.fixed:
                fixed[cut.register] = cut.of(fixed[cut.region])
            self._registers[every] = fixed
        registers = self._registers[every].copy()
        for source in plan.fresh:
            registers[plan.regions[source]] = self._region(source, state, batch).to(place, copy=True)
        return plan, registers

    def _region(self, source: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        kind, _, name = source.partition(":")
        if kind == "constant":
            return self.program.constants[int(name)].tensor().to(self._memory.place)
        found = (state if kind == "state" else batch).get(name)
        if found is None:
            raise EvidenceError(f"the program reads {source}, which does not exist at that point")
        return found


def _check_batch(program: Program, batch: Mapping[str, Tensor]) -> None:
    found = {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for name, t in batch.items()}
    if found != {name: dict(layout) for name, layout in program.batch.items()}:
        raise EvidenceError("the batch does not have the tensors that the program reads")


def _make(
    call: Call, operator: MakesCall, registers: Registers, reads: list[str], watch: Watch | None, is_native: bool
) -> bool:
    """Make one call; tells whether what it returns lies in memory as the program says."""
    for cut in call.cuts:
        registers[cut[0]] = cut.of(registers[cut[1]])
    for register, parts in call.lists:
        registers[register] = parts(registers)
    if watch is not None:
        watch.before([registers[register] for register in call.inputs])
    out: Any = operator(call.number, call.args(registers), call.kwargs(registers))
    if call.is_read:
        reads.append(read_value(out))
    if call.is_unset:
        out.zero_()
    written = [registers[register] for register in call.written]
    given = [out] if type(out) is Tensor and not written else result_tensors(out, written)
    if call.rewritten and [layout_of(tensor) for tensor in written] != list(call.rewritten):
        return False
    if not _put_results(call, given, registers, is_native):
        return False
    if watch is not None:
        watch.after([*given, *written])
    return True


def _put_results(call: Call, given: Sequence[Tensor], registers: Registers, is_native: bool) -> bool:
    """Put what a call returned into its registers; tells whether it lies in memory as the program says.

    What PyTorch's own kernels return is copied into that layout: they choose others than controlled ones.
    """
    if len(given) != len(call.results):
        return False
    for (register, dtype, shape, stride, layout), tensor in zip(call.results, given, strict=True):
        if tensor.stride() != stride or tensor.shape != shape or tensor.dtype is not dtype:
            if layout_of(tensor) == layout:
                tensor = tensor.as_strided(shape, stride)
            elif is_native and (tensor.shape, tensor.dtype) == (shape, dtype):
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)
            else:
                return False
        if register >= 0:
            registers[register] = tensor
    return True


def _bear(birth: Birth, place: Tensor, registers: Registers) -> None:
    """Have what was just made lie where the chips hold it, for all calls to come."""
    made = registers[birth.register]
    if (made.dtype, made.numel()) != (place.dtype, place.numel()):
        raise EvidenceError(
            f"{birth.name} does not have the same type and shape in the program as in the declared state"
        )
    registers[birth.register] = place.copy_(made.reshape(place.shape))
    for cut in birth.cuts:
        registers[cut.register] = cut.of(place)


def _placed(cut: Cut, registers: Registers) -> Tensor:
    """What lies there at the end of the step."""
    found = registers[cut.register]
    return cut.of(registers[cut.region]) if found is None else found


def _commit(plan: CallPlan, state: Mapping[str, Tensor], registers: Registers) -> None:
    """Move every tensor of the new state to where the chips hold it."""
    moved: list[tuple[Tensor, Tensor | None]] = []
    for name, cut in plan.commit:
        target = state[name]
        if cut is None:
            moved.append((target, None))
            continue
        value = _placed(cut, registers)
        if value.dtype != target.dtype or value.shape != target.shape:
            raise EvidenceError(f"{name} does not have the same type and shape in the program as in the declared state")
        if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
            moved.append((target, value.clone()))
    for target, new in moved:
        if new is None:
            target.zero_()
        else:
            target.copy_(new)
