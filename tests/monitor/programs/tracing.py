"""Programs of small steps, and their execution with the seeds of all backward passes set to zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from monitor.programs.calls import ITEM, build_arguments, operator_of
from monitor.programs.program import Program, parse_hex
from monitor.programs.trace import result_tensors, written_arguments
from tests.measurements.paths import Step, traced

__all__ = ["declared_update", "state_without_gradients", "trace"]


_NOW: list[Step] = []


def trace(
    body: Callable[[dict[str, Tensor], dict[str, Tensor]], object],
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
) -> Program:
    """The program of ``body(state, batch)``, which writes the state or returns a dict of tensors that replace it."""

    def run(step: Step) -> None:
        _NOW.append(step)
        try:
            replaced = body(step.state, step.batch)
        finally:
            _NOW.pop()
        step.state |= replaced if isinstance(replaced, dict) else {}

    return traced(run, state, batch)


def declared_update() -> AbstractContextManager[None]:
    """The calls inside are an update of the optimizer of the step that is traced."""
    return _NOW[-1].update()


def state_without_gradients(
    program: Program, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The new state where every backward pass begins with zeros."""
    values = {f"state:{name}": tensor.detach().clone() for name, tensor in state.items()}
    values |= {f"batch:{name}": tensor.clone() for name, tensor in batch.items()}
    values |= {f"constant:{number}": constant.tensor() for number, constant in enumerate(program.constants)}
    scalars = [parse_hex(text) for text in program.scalars]
    with torch.no_grad():
        for number, call in enumerate(program.calls):
            func = operator_of(call["operator"])
            tensors = [_at(values, place) for place in call["sources"]]
            args, kwargs = build_arguments(call["arguments"], tensors, scalars.__getitem__, torch.device("cpu"))
            out = func(*args, **kwargs)
            if call["operator"] == ITEM:
                continue
            if call["operator"] == "aten.ones_like.default":
                out.zero_()
            written = written_arguments(func, args, kwargs)
            for slot, tensor in enumerate([*result_tensors(out, written), *written]):
                values[f"node:{number}:{slot}"] = tensor
        return {name: _at(values, place).clone() for name, place in program.commit.items() if place is not None}


def _at(values: Mapping[str, Tensor], place: Mapping) -> Tensor:
    source = values[place["source"]]
    offset = source.storage_offset() + place["offset"]
    return torch.as_strided(source, place["shape"], place["stride"], offset)
