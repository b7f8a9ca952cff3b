"""The battery: each operator's results on hard inputs as one digest, to be compared across devices.

Inputs are ±0, infinities, NaNs with payloads, subnormals, ties, the largest numbers, duplicates, odd lengths (tail
lanes), strided views and sizes that several threads share. ``python -m analysis.bench.battery NUMERICS`` prints the
digests of the process it runs in; kernel families are chosen by environment variables, so each needs its own process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from analysis.bench.battery_cases import cases
from inspector.devices.emulation import install_from_environment
from monitor.environment import accelerator
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.declared import recording
from monitor.numerics.operators import find, overload_named

__all__ = ["row_of", "run_battery"]


def row_of(operator: str) -> str:
    """The row of the operator table that governs an overload, itself where it has none."""
    overload = overload_named(operator)
    found = None if overload is None else find(overload)
    return operator if found is None else found.row.name


class _Digests:
    """Observer that digests the result of every call under the name of its row."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Nothing to see yet."""

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Add dtype, shape and bytes of each tensor of the result, but for what brings values to the device."""
        moved = isinstance(out, Tensor) and args and isinstance(args[0], Tensor) and args[0].device != out.device
        if not moved and not any(part in str(func) for part in ("empty", "lift_fresh.", "scalar_tensor")):
            self._add(self._hashes.setdefault(row_of(str(func)), hashlib.sha256()), out)

    def _add(self, sha: Any, out: object) -> None:
        if isinstance(out, Tensor):
            values = out.detach().cpu().clone(memory_format=torch.contiguous_format)
            sha.update(f"{values.dtype}{tuple(values.shape)}".encode())
            sha.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(out, list | tuple):
            for one in out:
                self._add(sha, one)

    def hexdigests(self) -> dict[str, str]:
        """Hex digest of each row, by name."""
        return {name: self._hashes[name].hexdigest() for name in sorted(self._hashes)}


def run_battery(numerics: str) -> dict[str, str]:
    """Digest of every row's results on this device, by row name.

    Under ``exact`` they are equal on every device. Under ``native`` they tell devices apart.
    """
    digests = _Digests()
    with accelerator():  # where torch makes tensors that no argument places
        for case in cases():
            with recording(numerics, observer=digests):
                case()
    return digests.hexdigests()


if __name__ == "__main__":
    install_from_environment()
    print(json.dumps(run_battery(sys.argv[1] if len(sys.argv) > 1 else "exact")))
