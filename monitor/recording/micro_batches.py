"""The micro-batch as the unit of rounding: gradients of a step's parts are added exactly, and rounded once.

What comes out depends on the parts alone, not on their order, nor on how many processes computed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from monitor.programs.keys import MAXIMUM_STREAMS, RecordedKeys

__all__ = ["gradient_missing", "micro_batch", "micro_batches", "total", "trainable"]


def micro_batch(batch: Any, number: int, count: int) -> Any:
    """Part ``number`` of ``count`` equal parts of a batch along its first dimension, in the batch's own form.

    Raises:
        CallerError: a tensor cannot be cut into that many equal parts.
    """
    if isinstance(batch, Tensor | np.ndarray) or (isinstance(batch, list) and batch and _are_texts(batch)):
        if not getattr(batch, "ndim", 1):
            return batch
        size, rest = divmod(len(batch), count)
        if rest or not size:
            raise CallerError(
                f"a batch entry of {len(batch)} samples cannot be cut into {count} equal micro-batches; choose a "
                "number of micro-batches that divides it"
            )
        return batch[number * size : (number + 1) * size]
    if isinstance(batch, Mapping):
        return {name: micro_batch(value, number, count) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [micro_batch(value, number, count) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: micro_batch(getattr(batch, f.name), number, count) for f in fields(batch)})
    return batch


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that get gradients."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def gradient_missing(name: str, number: int) -> CallerError:
    """Why a step whose micro-batch leaves a parameter without a gradient is refused."""
    return CallerError(f"micro-batch {number} gives {name} no gradient; freeze it, or let every micro-batch reach it")


def total(terms: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape, as one operator: exact, and rounded once."""
    return torch.stack(terms).sum(0)


def micro_batches(
    batch: object, count: int, parameters: Mapping[str, nn.Parameter], keys: RecordedKeys
) -> Iterator[Any]:
    """Parts of a batch, one after another; at the end each parameter has the sum of its gradients."""
    if type(count) is not int or not 1 <= count < MAXIMUM_STREAMS:
        raise CallerError(f"a step can have 1 … {MAXIMUM_STREAMS - 1} micro-batches, not {count!r:.40}")
    learning = trainable(parameters)
    gathered: dict[str, list[Tensor]] = {name: [] for name in learning}
    for parameter in parameters.values():
        parameter.grad = None
    for number in range(count):
        with keys.stream(number + 1):
            yield micro_batch(batch, number, count)
        for name, parameter in learning.items():
            if parameter.grad is None:
                raise gradient_missing(name, number)
            gathered[name].append(parameter.grad)
            parameter.grad = None
    with torch.no_grad():
        for name, parameter in learning.items():
            parameter.grad = total(gathered.pop(name))
