"""The operators of one training step as a committed list: what a dispute bisects (Arun et al. 2025, section 3).

Each ATen call is a node: operator, arguments, where each input tensor comes from, and the digests of inputs and
outputs. An input names its source, the last thing that wrote the memory it lies in: an earlier node, the state before
the step or the batch. The specification of a node is everything but the digests; it is the same for all honest provers
and can be found without any arithmetic on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical, digest_tensor
from monitor.numerics import strides
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import row_named

__all__ = [
    "COMMIT_STATE",
    "DIGEST_LAYOUT",
    "Node",
    "content_of",
    "cut_out",
    "described",
    "gather",
    "in_numbers",
    "layout_of",
    "name_of",
    "reach",
    "restore_arguments",
    "result_tensors",
    "tensor_digest",
    "tensors_in",
    "written_arguments",
    "written_positions",
]

COMMIT_STATE = "chipwitness.commit_state"
"""The last node of a step: the state digest over all tensors of the new state."""

_SEQUENCES = (list, tuple)
_AS_THEY_ARE = (bool, int, str)

DIGEST_LAYOUT: dict[str, Any] = {"dtype": "digest", "shape": [], "stride": []}
"""The layout of that node's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call of a step.

    Attributes:
        arguments: positional and keyword arguments; a tensor is ``{"$tensor": slot}``.
        sources: for each slot, where it comes from and how it lies there: source, dtype, shape, stride, offset.
        results: for each output, its dtype, shape and stride.
        inputs: digest of each slot before the call.
        outputs: digest of each result, and of each argument that was written.
    """

    index: int
    operator: str
    arguments: Any
    sources: tuple[dict[str, Any], ...]
    results: tuple[dict[str, Any], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def specification(self) -> dict[str, Any]:
        """Everything but the digests."""
        return {
            "operator": self.operator,
            "arguments": self.arguments,
            "sources": list(self.sources),
            "results": list(self.results),
        }

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "index": self.index,
            **self.specification(),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
        }

    def encoded(self) -> bytes:
        """Canonical bytes: the input of the leaf hash."""
        return canonical.encode(self.to_json())

    @classmethod
    def from_json(cls, data: object) -> Node:
        """Parse; EvidenceError on any other form."""
        keys = {"index", "operator", "arguments", "sources", "results", "inputs", "outputs"}
        if not isinstance(data, dict) or set(data) != keys or type(data["index"]) is not int:
            raise EvidenceError("a trace node is malformed")
        lists = (data["sources"], data["results"], data["inputs"], data["outputs"])
        if not isinstance(data["operator"], str) or not all(isinstance(value, list) for value in lists):
            raise EvidenceError("a trace node is malformed")
        if len(data["sources"]) != len(data["inputs"]) or len(data["results"]) != len(data["outputs"]):
            raise EvidenceError("a trace node's digests do not match its inputs and results in number")
        if not all(isinstance(text, str) for text in (*data["inputs"], *data["outputs"])):
            raise EvidenceError("a trace node holds a digest that is not text")
        return cls(
            index=data["index"],
            operator=data["operator"],
            arguments=data["arguments"],
            sources=tuple(data["sources"]),
            results=tuple(data["results"]),
            inputs=tuple(data["inputs"]),
            outputs=tuple(data["outputs"]),
        )


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's type, shape and content, whatever its strides; empty on the meta device."""
    if tensor.device.type == "meta":
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return str(digest_tensor(name="", dtype=dtype, shape=tuple(tensor.shape), offset=0, data=content_of(tensor)))


def content_of(tensor: Tensor) -> memoryview:
    """A tensor's elements as bytes, in their order, whatever its strides."""
    dense = tensor.detach().cpu().contiguous()
    if tensor.numel() == 1:
        dense = dense.clone(memory_format=torch.contiguous_format)  # a lone element may keep its stride
    return dense.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def gather(source: Tensor, layout: Mapping[str, Any], place: Mapping[str, Any]) -> Tensor:
    """Cut out of a source's memory the tensor that lies there as ``place`` says.

    Args:
        source: the source's content.
        layout: its shape and stride in memory.

    Raises:
        EvidenceError: the place does not lie inside the source.
    """
    kind: torch.dtype = getattr(torch, place["dtype"])
    if list(source.shape) != layout["shape"]:
        raise EvidenceError("a source does not have the shape and type that its place gives")
    mine, within = in_numbers({**place, "dtype": str(kind)}), in_numbers({**layout, "dtype": str(source.dtype)})
    size = reach(within["shape"], within["stride"])
    if place["offset"] < 0 or place["offset"] + reach(mine["shape"], mine["stride"]) > size:
        raise EvidenceError("an input does not lie inside its source")
    limits.GATHERED_BYTES.check(size * source.dtype.itemsize)
    memory = torch.zeros(reach(layout["shape"], layout["stride"]), dtype=source.dtype)
    memory.as_strided(layout["shape"], layout["stride"]).copy_(source)
    return cut_out(memory, kind, place["shape"], place["stride"], place["offset"])


def layout_of(tensor: Tensor) -> dict[str, Any]:
    """Type, shape and canonical strides as JSON-able values: equal for tensors whose elements lie alike in memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "stride": list(strides.canonical_strides(tensor))}


def in_numbers(layout: Mapping[str, Any]) -> Mapping[str, Any]:
    """Shape and stride in real numbers: a complex one is two of them side by side, as which other calls may view it.

    Offsets, and the extent of memory, count real numbers too.
    """
    if not str(layout["dtype"]).removeprefix("torch.").startswith("complex"):
        return layout
    found = {**layout, "shape": [*layout["shape"], 2]}
    if "stride" in layout:
        found["stride"] = [*(2 * step for step in layout["stride"]), 1]
    return found


def cut_out(whole: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """The tensor that lies in the memory of another one, ``offset`` real numbers behind its first element.

    Raises:
        EvidenceError: the memory holds numbers of another size, or a complex one would begin between two of them.
    """
    if whole.dtype is dtype and not dtype.is_complex:
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)
    flat = torch.view_as_real(whole) if whole.is_complex() else whole
    kind = dtype.to_real() if dtype.is_complex else dtype
    if flat.dtype.itemsize != kind.itemsize:
        raise EvidenceError(f"the program reads memory that holds {whole.dtype} as if it held {dtype}")
    flat, start = flat if flat.dtype is kind else flat.view(kind), flat.storage_offset() + offset
    if not dtype.is_complex:
        return flat.as_strided(shape, stride, start)
    if start % 2:
        raise EvidenceError(f"the program reads {dtype} from the middle of a complex number")
    return torch.view_as_complex(flat.as_strided((*shape, 2), (*(2 * step for step in stride), 1), start))


def reach(shape: list[int], stride: list[int]) -> int:
    """Number of elements of memory from the first that a tensor touches to the last."""
    if 0 in shape:
        return 0
    last = 0
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
    return 1 + last


def written_arguments(func: OpOverload, args: Arguments, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the call writes, each once, in the order of the schema."""
    found: list[Tensor] = []
    for position, name in written_positions(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [tensor for tensor in tensors_in(value) if not any(tensor is other for other in found)]
    return found


@lru_cache(maxsize=4096)
def name_of(func: OpOverload) -> str:
    """An overload's name, such as ``aten.mm.default``, which takes PyTorch microseconds to put together."""
    return str(func)


@lru_cache(maxsize=4096)
def written_positions(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that the operator writes."""
    hidden = row_named(name_of(func)).writes
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or position in hidden
    )


def result_tensors(out: object, written: list[Tensor]) -> list[Tensor]:
    """The tensors that a call returned, but for the written arguments that it hands back."""
    return [tensor for tensor in tensors_in(out) if not any(tensor is other for other in written)]


def _position(tensor: Tensor, tensors: list[Tensor]) -> int:
    return next(index for index, other in enumerate(tensors) if other is tensor)


def tensors_in(value: object) -> Iterable[Tensor]:
    """The tensors among a call's arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from tensors_in(item)


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Arguments as JSON-able values, with tensors taken out into ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, _SEQUENCES):
        return [described(item, tensors) for item in value]
    if isinstance(value, float):
        return {"$float": value.hex()}
    if value is None or isinstance(value, torch.Generator):
        return None  # a step's random numbers come from its own keys, whichever generator a call names
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, dict):
        return {key: described(item, tensors) for key, item in value.items()}
    if isinstance(value, torch.device):
        return {"$device": "any"}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {f"${type(value).__name__}": str(value)}
    raise EvidenceError(f"an operator has an argument of type {type(value).__name__}, which a trace cannot hold")


def restore_arguments(arguments: Any, tensors: list[Tensor]) -> tuple[Arguments, Keywords]:
    """Rebuild ``args`` and ``kwargs`` from a node's arguments and tensors."""

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"$tensor"}:
            return tensors[value["$tensor"]]
        if set(value) == {"$float"}:
            return float.fromhex(value["$float"])
        if set(value) == {"$device"}:
            return torch.device("cpu")
        for kind in ("$dtype", "$layout", "$memory_format"):
            if set(value) == {kind}:
                return getattr(torch, value[kind].removeprefix("torch."))
        return {key: build(item) for key, item in value.items()}

    try:
        return tuple(build(arguments["args"])), build(arguments["kwargs"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EvidenceError("a trace node's arguments are malformed") from None
