"""Replay devices: the same machine computing with different kernels, each in its own process.

Kernel families are chosen by environment variables that must be set before torch is imported, so a device is entered
only by starting a process. A CUDA device keeps what it trains in its own memory; the host's part of such a process is
that of ``native``. Emulated devices add in an order that this machine does not have (``emulated``) and say so in their
name and kind. Each device reports the fingerprint of its native arithmetic; equal fingerprints mean that two devices do
not really differ.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from firmware_sim.errors import CallerError, DeviceError

__all__ = ["DEVICES", "ORDER", "Device", "current_device", "device", "enter"]

ORDER = "CHIPWITNESS_EMULATED_ORDER"
"""Environment variable that names the emulated order of a process."""
_ACCELERATOR = "CHIPWITNESS_ACCELERATOR"
"""As ``monitor.environment`` has it, which this module must not import: it would load torch."""
_CONTROLLED = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    ORDER,
    _ACCELERATOR,
)
_NAME = "CHIPWITNESS_DEVICE"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A named way to compute.

    Attributes:
        kind: ``cpu`` for kernels of this machine's processor, ``cuda`` for its graphics card, ``emulated`` for an order
            of additions that it does not have.
        environment: variables that select the kernels; all other controlled ones are unset.
        capability: what PyTorch must report after it was imported, or None where it depends on the machine.
    """

    name: str
    kind: str
    summary: str
    environment: Mapping[str, str]
    capability: str | None = None

    def missing(self) -> str | None:
        """Why this machine cannot be the device, or None; loads torch where that has to be asked."""
        if self.kind != "cuda":
            return None
        import torch

        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    @property
    def variables(self) -> dict[str, str]:
        """Of a process that is to be this device, without the other controlled ones."""
        return {**self.environment, _NAME: self.name}

    def process_environment(self) -> dict[str, str]:
        """Environment of this process's own command, begun again as this device."""
        kept = {name: value for name, value in os.environ.items() if name not in _CONTROLLED}
        return {**kept, **self.variables}


def _emulated(order: str, summary: str) -> Device:
    environment = {**_ONE_THREAD, ORDER: order}
    return Device(name=f"emulated-{order}", kind="emulated", summary=f"emulated: {summary}", environment=environment)


DEVICES: dict[str, Device] = {
    entry.name: entry
    for entry in (
        Device(name="native", kind="cpu", summary="the machine's best kernels, all cores", environment={}),
        Device(
            name="native-1",
            kind="cpu",
            summary="the machine's best kernels, one thread",
            environment=_ONE_THREAD,
        ),
        Device(
            name="avx2",
            kind="cpu",
            summary="AVX2 kernels, one thread",
            environment={
                **_ONE_THREAD,
                "ATEN_CPU_CAPABILITY": "avx2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
                "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            },
            capability="AVX2",
        ),
        Device(
            name="sse41",
            kind="cpu",
            summary="SSE4.1 kernels and ATen's default ones, one thread",
            environment={
                **_ONE_THREAD,
                "ATEN_CPU_CAPABILITY": "default",
                "ONEDNN_MAX_CPU_ISA": "SSE41",
                "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            },
            capability="DEFAULT",
        ),
        Device(
            name="mkl-compatible",
            kind="cpu",
            summary="MKL's compatible mode, one code path for all processors; one thread",
            environment={**_ONE_THREAD, "MKL_CBWR": "COMPATIBLE"},
        ),
        Device(name="cuda", kind="cuda", summary="the first CUDA device", environment={_ACCELERATOR: "cuda"}),
        _emulated("split-k", "K in four parts whose sums are added"),
        _emulated("tiles", "tiles of 96 × 256 × 96, added by falling K"),
        _emulated("no-fma", "term by term, product and sum rounded separately"),
        _emulated("tensor-core", "chunks of 8 exact products, FP32 sums truncated"),
        Device(
            name="emulated-accelerator",
            kind="emulated",
            summary="emulated: an accelerator's memory and code paths, K in four parts",
            environment={**_ONE_THREAD, ORDER: "split-k", _ACCELERATOR: "emulated"},
        ),
    )
}


def device(name: str) -> Device:
    """Return the device of that name; CallerError lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        raise CallerError(f"unknown device {name!r}; known: {', '.join(DEVICES)}") from None


def current_device() -> str:
    """Name of the device that this process was started as."""
    return os.environ.get(_NAME, "native")


def enter(name: str) -> None:
    """Make this process that device, by starting the same command again with its environment where it has another.

    Must be called before torch is imported. Does not return if the process is replaced. An emulated device computes in
    this thread only. DeviceError where the machine has no such device.
    """
    wanted = device(name).process_environment()
    if "torch" in sys.modules:
        raise DeviceError(f"cannot become device {name}: torch is loaded already")
    if any(os.environ.get(key) != wanted.get(key) for key in (*_CONTROLLED, _NAME)):
        os.execve(sys.executable, sys.orig_argv, wanted)
    if ORDER in wanted or _ACCELERATOR in wanted:
        from inspector.devices.emulation import install_from_environment
        from monitor.environment import accelerator

        install_from_environment()
        accelerator()
