"""The declared batch of a step: named tensors, as memory and as a file.

Tensors that share memory (inputs and targets cut out of one sequence) are one entry that holds the stretch of memory
under all of them, named by all of them; any other contiguous tensor is an entry with its own shape.
"""

from __future__ import annotations

import hmac
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from firmware_sim.evidence import DTYPE_SIZES, MerkleTree, digest_bytes
from monitor.programs.parts import RECALLED
from monitor.programs.trace import reach

__all__ = ["IN_NO_FILE", "batch_layout", "batch_root", "flatten_batch", "salted_digest", "step_salt"]

_MOST_SPREAD = 4
_RESERVED = "__metadata__"
"""What a safetensors file keeps for itself."""
IN_NO_FILE = {torch.complex128}
"""Types that safetensors does not have."""


def batch_root(salt: bytes, step: int, content: bytes) -> bytes:
    """RFC 9162 root over the salted digest of a step's batch file: 32 bytes."""
    tree = MerkleTree()
    tree.append(salted_digest(step_salt(salt, step), content))
    return tree.root()


def step_salt(salt: bytes, step: int) -> bytes:
    """A step's own salt, which tells nothing of those of others: 32 bytes."""
    return hmac.digest(salt, b"batch" + struct.pack("<Q", step), "sha256")


def salted_digest(own: bytes, content: bytes) -> bytes:
    """Digest of a step's batch file under the step's own salt: 32 bytes."""
    return digest_bytes("batch", own + content).value


def batch_layout(batch: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """Dtype and shape of each entry, as a program declares them."""
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in batch.items()
    }


def flatten_batch(batch: object) -> dict[str, Tensor]:
    """Entries of a batch: a tensor or NumPy array, or dicts, tuples, lists and dataclasses of them.

    Values of other types, such as strings, are left out. An array's entry lies in the array's memory.

    Raises:
        CallerError: no tensor, two of one name, one that is not dense, or one whose memory cannot be taken as it lies.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in _named("", batch):
        if named.setdefault(name, tensor) is not tensor:
            raise CallerError(f"two tensors of the batch are called {name}; give one of them another name")
    if not named:
        raise CallerError(f"a batch of type {type(batch).__name__} holds no tensor; give a tensor, tuple or dict")
    for name, tensor in named.items():
        _require_recordable(name, tensor)
    entries: dict[str, Tensor] = {}
    for group in _groups(named):
        names = sorted(group)
        first = group[names[0]]
        if all(_alike(tensor, first) for tensor in group.values()) and first.is_contiguous():
            entries["+".join(names)] = first.detach()
            continue
        if len({tensor.dtype for tensor in group.values()}) != 1:
            raise CallerError(f"batch tensors {', '.join(names)} share memory as different types; copy one of them")
        start = min(int(tensor.storage_offset()) for tensor in group.values())
        stop = max(_end(tensor) for tensor in group.values())
        if stop - start > _MOST_SPREAD * max(sum(tensor.numel() for tensor in group.values()), 1):
            raise CallerError(f"batch tensor {', '.join(names)} is a sparse view of other memory; make it contiguous")
        entries["+".join(names)] = torch.as_strided(first.detach(), (stop - start,), (1,), start)
    return dict(sorted(entries.items()))


def _require_recordable(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise CallerError(f"batch tensor {name} is a nested tensor; pad its parts to one length (monitor.padded)")
    if tensor.is_conj() or tensor.is_neg():
        raise CallerError(f"batch tensor {name} is a lazy view of a conjugate; give its resolve_conj()")
    if tensor.layout != torch.strided:
        raise CallerError(f"batch tensor {name} is sparse; give its to_dense(), or its indices and values")
    if tensor.device.type == "meta":
        raise CallerError(f"batch tensor {name} lies on the meta device and has no values; give one that has")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_SIZES or tensor.dtype in IN_NO_FILE:
        raise CallerError(f"batch tensor {name} is {tensor.dtype}, which is not recorded; give it in another type")


def _named(prefix: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        is_taken = prefix == _RESERVED or prefix.startswith(RECALLED)
        yield f"batch.{prefix}" if is_taken else prefix or "batch", value
    elif isinstance(value, np.ndarray):
        tensor = _of_array(prefix or "batch", value)
        yield from () if tensor is None else _named(prefix, tensor)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _named(prefix, {field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(f"{prefix}.{number}" if prefix else str(number), item)


def _of_array(name: str, array: np.ndarray[Any, Any]) -> Tensor | None:
    """The tensor in an array's memory; None for an array of what no tensor holds, such as strings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one that must not be written; a batch is only read
            return torch.from_numpy(array)
    except TypeError:
        return None
    except ValueError as error:
        raise CallerError(f"batch array {name} cannot be a tensor: {error}; give a copy of it") from None


def _groups(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors whose stretches of memory overlap, together."""
    groups: list[dict[str, Tensor]] = []
    for name, tensor in named.items():
        touching = [group for group in groups if any(_overlap(tensor, other) for other in group.values())]
        merged = {name: tensor}
        for group in touching:
            merged |= group
            groups.remove(group)
        groups.append(merged)
    return groups


def _end(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) + reach(list(tensor.shape), list(tensor.stride()))


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    sizes = one.itemsize, other.itemsize
    starts = int(one.storage_offset()) * sizes[0], int(other.storage_offset()) * sizes[1]
    return starts[0] < _end(other) * sizes[1] and starts[1] < _end(one) * sizes[0]


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.storage_offset(),
    )
