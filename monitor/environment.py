"""What this process computes with: where tensors lie, versions, settings, a fingerprint of its native arithmetic."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from firmware_sim.errors import DeviceError
from firmware_sim.evidence import Digest, digest_list, digest_tensor

__all__ = [
    "ACCELERATOR",
    "ARITHMETIC",
    "accelerator",
    "check_subnormals",
    "device_name",
    "fingerprint",
    "processor",
    "settings",
    "versions",
]

ACCELERATOR = "CHIPWITNESS_ACCELERATOR"
"""Environment variable that names the torch device on which a process keeps what it trains."""

ARITHMETIC = "2"
"""The arithmetic of ``exact``: 1, which runs do not name, multiplies large BF16 matrices to other bits, as FP32."""

SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "CHIPWITNESS_EMULATED_ORDER",
    ACCELERATOR,
)


def accelerator() -> torch.device:
    """Where this process keeps what it trains: the host, or the torch device that its environment names.

    Raises:
        DeviceError: torch finds no such device.
    """
    name = os.environ.get(ACCELERATOR, "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"torch finds no device {name!r}: {str(error).splitlines()[0]}") from None


def processor() -> str:
    """Name of the host's processor with its family and model, as names alone cover several generations.

    Family and model are Linux's; elsewhere the platform's own word serves.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    known = [f"{label} {fields[key]}" for label, key in (("family", "cpu family"), ("model", "model")) if key in fields]
    return ", ".join([fields["model name"], *known])


def versions() -> dict[str, str]:
    """Versions that decide which kernels run, and the bits of ``exact``."""
    libraries = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return {**libraries, "arithmetic": ARITHMETIC}


def settings(place: torch.device | None = None) -> dict[str, object]:
    """Settings as they are in effect: asked of PyTorch where it tells, else as the environment has them.

    Args:
        place: where tensors lie; None means where this process trains.
    """
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accelerator": _model_of(accelerator() if place is None else place),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _model_of(place: torch.device) -> str | None:
    """Name of an accelerator as its maker gives it; None for the host."""
    if place.type == "cpu":
        return None
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)


def device_name(place: torch.device) -> str:
    """Name of the replay device that computes as this process does with tensors on ``place``."""
    return os.environ.get("CHIPWITNESS_DEVICE", "native") if place == accelerator() else place.type


def check_subnormals() -> None:
    """Raise DeviceError if this process flushes subnormal numbers to zero, as that changes results silently."""
    for place in (torch.device("cpu"), accelerator()):
        smallest = torch.tensor([2.0**-149, 2.0**-126], dtype=torch.float32, device=place)
        if not bool(((smallest * 0.5).sum() == 2.0**-127) & (smallest[0] * 1.0 == 2.0**-149)):
            raise DeviceError(f"this process flushes subnormal numbers to zero on {place}")


def fingerprint(place: torch.device | None = None) -> Digest:
    """Digest of a fixed set of native FP32 operators: equal fingerprints mean the same kernels, as far as seen.

    The inputs come from integers, so they are the same everywhere.
    """
    raw = np.random.Philox(key=2026).random_raw(1 << 16)
    values = ((raw >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-22)
    x = torch.from_numpy(values).to(accelerator() if place is None else place)
    a, b = x[:49152].view(128, 384), x[:24576].view(384, 64)
    image, kernel = x[:24576].view(2, 12, 32, 32), x[:2160].view(20, 12, 3, 3)
    with torch.no_grad():
        results = {
            "matmul": a @ b,
            "matmul-small": a[:8, :24] @ b[:24, :8],
            "bmm": torch.bmm(x.view(8, 64, 128), x.view(8, 128, 64)),
            "conv2d": functional.conv2d(image, kernel, padding=1),
            "sum": x.sum(),
            "sum-rows": a.sum(1),
            "exp": a.exp(),
            "tanh": a.tanh(),
            "gelu": functional.gelu(a),
            "softmax": a.softmax(1),
            "layer-norm": functional.layer_norm(a, (384,)),
        }
    return digest_list(
        "fingerprint",
        [
            (
                name,
                digest_tensor(
                    name=name,
                    dtype="float32",
                    shape=tuple(result.shape),
                    offset=0,
                    data=result.cpu().contiguous().numpy().tobytes(),
                ),
            )
            for name, result in results.items()
        ],
    )
