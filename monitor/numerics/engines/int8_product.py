"""The only caller of torch's int8 matrix product.

Controlled steps run with oneDNN switched off, so that layers fall into their plain operators; without it torch
multiplies bytes in a plain loop, some hundred times slower than FP32. It is switched on again for the product alone: by
the known-answer test as by the engines that it admits, so that what was tested is what computes.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["int8_product"]


class _OneDNN:
    """While anybody is in here, oneDNN computes; the switch is the whole process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(True)  # its public form sets other flags too
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch._C._set_mkldnn_enabled(self._before)


_onednn = _OneDNN()


def int8_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The int32 product of int8 a (M, K) and b (K, N), into `out` where it is given."""
    with _onednn:
        return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)
