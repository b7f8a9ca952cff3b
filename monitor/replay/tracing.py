"""A program as the graph that a dispute bisects (Arun et al. 2025, section 3): calls as nodes with digests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.declaration.statement import Declaration, StateEntry
from monitor.programs.program import Program
from monitor.programs.trace import COMMIT_STATE, DIGEST_LAYOUT, Node, layout_of, tensor_digest
from monitor.replay.repetition import scalars_of
from monitor.transcript.leaf import Execution

__all__ = ["ABSENT", "REFUSED", "ProgramTracer", "refusal", "specification"]

ABSENT = "absent"
"""Source of a tensor of the new state that the step leaves without a value: zeros."""


def specification(program: Program, task: Declaration, execution: Execution) -> list[dict[str, object]]:
    """Specification of a step's operators for all honest provers: the program's calls with its numbers, and the state.

    Raises:
        EvidenceError: the execution or the declared state does not fit the program.
    """
    scalars = scalars_of(program, execution)
    names = [f"{entry.kind}/{entry.name}" for entry in task.state]
    if set(names) != set(program.commit):
        raise EvidenceError("the tensors that the program commits are not exactly those of the state")
    calls = [
        {
            "operator": call["operator"],
            "arguments": _with_numbers(call["arguments"], scalars),
            "sources": list(call["sources"]),
            "results": list(call["results"]),
        }
        for call in program.calls
    ]
    state = {
        "operator": COMMIT_STATE,
        "arguments": {"names": names},
        "sources": [program.commit[name] or _absent(entry) for name, entry in zip(names, task.state, strict=True)],
        "results": [DIGEST_LAYOUT],
    }
    return [*calls, state]


def _with_numbers(value: Any, scalars: Sequence[float]) -> Any:
    if isinstance(value, list):
        return [_with_numbers(item, scalars) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$scalar"}:
        return {"$float": scalars[value["$scalar"]].hex()}
    return {name: _with_numbers(item, scalars) for name, item in value.items()}


def _absent(entry: StateEntry) -> dict[str, object]:
    zeros = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    return {"source": ABSENT, **layout_of(zeros), "offset": 0}


REFUSED = ""
"""In place of the digests of what an operator gives that cannot be executed as it was recorded."""
_AT = "refused at element "


def refusal(outputs: Sequence[str]) -> tuple[int, int] | None:
    """The result, and its element, at which a log stops an operator, as its party states it; None where it does not."""
    for slot, text in enumerate(outputs):
        number = text.removeprefix(_AT)
        if number != text and number.isascii() and number.isdecimal() and len(number) < 20:
            return slot, int(number)
    return None


class ProgramTracer:
    """Watches a program run and makes its nodes.

    Attributes:
        nodes: one for each call so far.
        captured_inputs, captured_outputs: tensors of the call that is to be captured.
    """

    def __init__(self, specification: Sequence[Mapping[str, Any]], *, capture: int | None = None) -> None:
        """Takes the step's ``specification``, and the index of the node whose tensors are kept."""
        self.nodes: list[Node] = []
        self.captured_inputs: list[Tensor] = []
        self.captured_outputs: list[Tensor] = []
        self._specification = specification
        self._capture = capture
        self._inputs: tuple[str, ...] = ()

    def before(self, inputs: Sequence[Tensor]) -> None:
        """Note the inputs of the next call before it can write them."""
        if len(self.nodes) == self._capture:
            self.captured_inputs = [tensor.detach().clone() for tensor in inputs]
        self._inputs = tuple(map(tensor_digest, inputs))

    def after(self, outputs: Sequence[Tensor]) -> None:
        """Note what the call returned and wrote."""
        if len(self.nodes) == self._capture:
            self.captured_outputs = [tensor.detach().clone() for tensor in outputs]
        self._finish(tuple(map(tensor_digest, outputs)))

    def stop(self, at: int, part: int, element: int | None, size: int) -> None:
        """Forget all operators from one on that has begun; it has no results then.

        Args:
            part: number of the sub-operation that the log stops.
            element: of it; named where the result of that number, or the only one, has as many elements.
            size: its elements.
        """
        if at < len(self.nodes):
            self._inputs = self.nodes[at].inputs
            del self.nodes[at:]
        sizes = [math.prod(each["shape"]) for each in self._specification[at]["results"]]
        outputs, slot = [REFUSED] * len(sizes), part if len(sizes) > 1 else 0
        if element is not None and slot < len(sizes) and size == sizes[slot]:
            outputs[slot] = f"{_AT}{element}"
        self._finish(tuple(outputs))

    def commit_state(self, state: Mapping[str, Tensor], root: str) -> None:
        """Add the last node: the new state's tensors, and the digest that the step commits to."""
        names = self._specification[-1]["arguments"]["names"]
        self.before([state[name] for name in names])  # memory may hold them in another order
        self._finish((root,))

    def _finish(self, outputs: tuple[str, ...]) -> None:
        wanted = self._specification[len(self.nodes)]
        self.nodes.append(
            Node(
                index=len(self.nodes),
                operator=wanted["operator"],
                arguments=wanted["arguments"],
                sources=tuple(wanted["sources"]),
                results=tuple(wanted["results"]),
                inputs=self._inputs,
                outputs=outputs,
            )
        )
