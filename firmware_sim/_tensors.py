"""Tensors as firmware reads them: by their exact types, with no code of the host."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from firmware_sim.errors import CallerError
from firmware_sim.evidence.digest import DTYPE_SIZES

__all__ = [
    "check_plain",
    "dtype_name",
    "fastened",
    "flat_bytes",
    "is_simulated",
    "loaded_torch",
    "on_host",
    "simulate_device",
    "without_overrides",
]

# By type, since the text of a data type may be the host's. The first name of each type is its own.
_NUMPY_DTYPES = {
    type(np.dtype(code)): str(np.dtype(code)) for code in "?bBhHiIlLqQefdFD" if str(np.dtype(code)) in DTYPE_SIZES
}

_SIMULATED: dict[type, Callable[[Any], Any]] = {}
"""How the memory of a simulated device is read, by the exact class of its tensors."""


def simulate_device(tensor_class: type, held: Callable[[Any], Any]) -> None:
    """Let chips hold the tensors of a simulated device; `held` returns the plain tensor that holds its memory.

    Class and function are simulated silicon, like this module, and no part of the host's program: only code that builds
    the device into the simulation calls this, once in a process.

    Raises:
        CallerError: there is another simulated device already.
    """
    if _SIMULATED and tensor_class not in _SIMULATED:
        raise CallerError("there is already another simulated device")
    _SIMULATED.setdefault(tensor_class, held)


def is_simulated(tensor_class: type) -> bool:
    """Whether the tensors of a class are those of a simulated device."""
    return tensor_class in _SIMULATED


def on_host(tensor: Any) -> Any:
    """Return what holds a tensor's bytes: itself, but for the tensors of a simulated device."""
    held = _SIMULATED.get(type(tensor))
    return tensor if held is None else held(tensor)


def check_plain(name: str, tensor: Any) -> None:
    """Check that a tensor is what it is by type, and no subclass, whose methods are the host's.

    Raises:
        CallerError: it is anything else.
    """
    kind: type = type(tensor)
    if kind is np.ndarray:
        return
    torch = loaded_torch()
    if torch is None or kind not in (torch.Tensor, torch.nn.Parameter):
        raise CallerError(
            f"region {name!r}: is of type {kind.__name__!r:.100}, not a plain NumPy array or torch tensor"
        )

    if tensor.is_nested or tensor.layout is not torch.strided:
        raise CallerError(f"region {name!r}: tensor is sparse or nested")


def dtype_name(tensor: Any) -> str:
    if isinstance(tensor, np.ndarray):
        name = _NUMPY_DTYPES.get(type(tensor.dtype))
        return name if name is not None and tensor.dtype.isnative else "of another kind"
    return str(tensor.dtype).removeprefix("torch.")


def flat_bytes(name: str, tensor: Any, offset: int, elements: int) -> Any:
    """The bytes of some elements, where they lie: an array in the host's memory, a tensor in any other."""
    if isinstance(tensor, np.ndarray):
        _check_present(name, tensor)
        return tensor.reshape(-1)[offset : offset + elements].view(np.uint8)
    if tensor.device.type == "meta":
        raise CallerError(f"region {name!r}: tensor has no memory")
    torch = loaded_torch()
    try:
        # The method of the class: a tensor's own attribute of that name would be the host's.
        flat = torch.Tensor.detach(tensor).reshape(-1)[offset : offset + elements].view(torch.uint8)
        far = flat.device.type != "cpu"
        raw = flat[:0].cpu().numpy() if far else flat.numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise CallerError(f"region {name!r}: the bytes of its tensor can't be read: {text}") from None
    return flat if far else raw


def _check_present(name: str, tensor: Any) -> None:
    """Check that an array has as much memory as its shape says; torch checks that of its tensors."""
    owner, last = tensor.base, tensor
    while type(owner) is np.ndarray:  # a subclass may say anything
        owner, last = owner.base, owner
    low, high = _bounds(last) if owner is None else _buffer_bounds(owner)
    start, stop = _bounds(tensor)
    if start < stop and not low <= start < stop <= high:
        raise CallerError(f"region {name!r}: array reaches beyond the memory that it is a part of")


def fastened(tensor: Any) -> object:
    """Keep memory where it is: NumPy resizes no array with weak references to it, and torch none that NumPy reads."""
    while type(tensor) is np.ndarray and type(tensor.base) is np.ndarray:
        tensor = tensor.base
    return weakref.ref(tensor) if type(tensor) is np.ndarray else None


def _bounds(array: Any) -> tuple[int, int]:
    """Addresses between which a contiguous array lies."""
    start = array.ctypes.data
    return start, start + array.nbytes


def _buffer_bounds(owner: Any) -> tuple[int, int]:
    """Addresses of memory that belongs to no array; nowhere, if it is of no type that says so truly."""
    if type(owner) in (bytes, bytearray, memoryview):
        return _bounds(np.frombuffer(owner, dtype=np.uint8))
    torch = loaded_torch()
    if torch is not None and type(owner) is torch.Tensor:
        storage = torch.Tensor.untyped_storage(owner)
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return 0, 0


@contextmanager
def without_overrides() -> Iterator[None]:
    """Switch off what Python code can put before PyTorch's operators: overrides of subclasses and modes."""
    torch = loaded_torch()
    if torch is None:
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def loaded_torch() -> Any:
    """Return PyTorch if it is loaded: without it there is no tensor of its types."""
    return sys.modules.get("torch")
