"""Arrays over the memory of a tensor, inside compiled kernels.

An address and a length are integers, which a kernel takes in a fraction of the time that it needs for a NumPy array; so
a step of many small tensors is not spent on wrapping them.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor, nn

from firmware_sim.compilation import numba
from monitor.numerics.kernels.jit import inlined

__all__ = ["floats", "is_float32", "is_host", "is_index", "is_plain", "overlaps_partly"]

_TENSORS = (Tensor, nn.Parameter)


def _pointer_type(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return numba.types.CPointer(numba.types.float32)(address), generate


_pointer: Any = numba.extending.intrinsic(_pointer_type)


@inlined
def floats(address: Any, shape: Any) -> Any:
    """C-contiguous FP32 array of that shape at an address; the caller keeps the memory alive."""
    return numba.carray(_pointer(address), shape)


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the processor's own."""
    return device.type == "cpu"


def is_float32(x: object) -> bool:
    """Whether `x` is an FP32 tensor in the processor's memory."""
    return type(x) in _TENSORS and x.dtype is torch.float32 and x.is_cpu  # type: ignore[attr-defined]


def is_plain(x: object) -> bool:
    """Whether `x` is an FP32 tensor in the processor's memory, without gaps and in row-major order."""
    return type(x) in _TENSORS and x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()  # type: ignore[attr-defined]


def is_index(x: object) -> bool:
    """Whether `x` is an int64 tensor in the processor's memory, without gaps and in row-major order."""
    return type(x) is Tensor and x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()


def overlaps_partly(x: Tensor, y: Tensor) -> bool:
    """Whether two plain tensors of one size share memory without lying on the very same addresses."""
    distance = abs(x.data_ptr() - y.data_ptr())
    return 0 < distance < 4 * x.numel()
