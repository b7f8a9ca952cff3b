"""Switches of PyTorch that stay thrown while a step is observed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["plain_kernels", "plain_operators"]


@contextmanager
def _plain_layers() -> Iterator[None]:
    """Attention, transformer layers in evaluation and compiled modules take their plain operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _no_libraries() -> Iterator[None]:
    """Recurrent layers, normalisation and convolutions are neither cuDNN's nor, on a CPU, oneDNN's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # its public form sets other flags too, and warns of them
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class Switches:
    """Switches of torch that are thrown while anybody is in here.

    They are the whole process's: the first to enter throws them, the last to leave puts them back.
    """

    def __init__(self, *switches: Callable[[], AbstractContextManager[object]]) -> None:
        self._each = switches
        self._lock = threading.Lock()
        self._inside = 0
        self._switches = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                for switch in self._each:
                    self._switches.enter_context(switch())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._switches.close()


plain_kernels = Switches(_plain_layers, _no_libraries)
"""While anybody is in here, torch takes no fused layers (attention, recurrence) that only some devices have.

Every controlled step computes in it; it also serves to find a step's operators without computing."""


plain_operators = Switches(_plain_layers)
"""In which native steps are observed: their operators are those that a program may hold, their kernels are torch's."""
