"""Training gives the same bits on kernel families whose native arithmetic differs, each in its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("training_child.py")
FAMILIES = {
    "widest": {"OMP_NUM_THREADS": "1"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "avx2": {
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "sse4": {
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "compatible": {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"},
}
STEPS = 2
BF16 = {
    "formats": {"compute": "float32", "grid": "bfloat16"},
    "bound": {"kind": "calibrated", "factor": 0.5, "contradictions": 1000},
}


def child(family: str, folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MKL_", "ONEDNN_", "ATEN_", "OMP_NUM"))}
    full = [{"folder": str(folder), "kinds": ["gpt", "cnn"], "steps": STEPS, **job} for job in jobs]
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(full)],
        env={**clean, **FAMILIES[family]},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by family and mode; the first family records, the others replay its logs."""
    folder = tmp_path_factory.mktemp("logs")
    out = {}
    for family in FAMILIES:
        replay = None if family == "widest" else "fp32"
        replay_bf16 = None if family == "widest" else "bf16"
        native, rounded, coarse, exact = child(
            family,
            folder,
            [
                {"name": "native", "numerics": "native"},
                {"name": "fp32", "numerics": "rounded", "replay": replay},
                {"name": "bf16", "numerics": "rounded", "replay": replay_bf16, "options": BF16},
                {"name": "exact", "numerics": "exact"},
            ],
        )
        out[family] = {"native": native, "rounded": rounded, "bf16": coarse, "exact": exact}
    return out


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_native_arithmetic_differs_between_the_families(runs: dict[str, dict[str, dict[str, Any]]], kind: str) -> None:
    """Without this the equality below would mean nothing."""
    assert len({run["native"][kind]["digests"][-1] for run in runs.values()}) >= 3


@pytest.mark.parametrize("mode", ["rounded", "bf16", "exact"])
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_weights_optimizer_and_loss_are_bit_equal(
    runs: dict[str, dict[str, dict[str, Any]]], kind: str, mode: str
) -> None:
    digests = {family: run[mode][kind]["digests"] for family, run in runs.items()}
    assert all(d == digests["widest"] for d in digests.values()), digests
    assert len(set(digests["widest"])) == STEPS


def test_some_device_had_to_be_corrected(runs: dict[str, dict[str, dict[str, Any]]]) -> None:
    """In (float32, bfloat16) the families do decide differently, so the log is what makes them equal."""
    assert any(run["bf16"]["gpt"]["forced"] > 0 for run in runs.values())


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_controlled_training_stays_near_native(runs: dict[str, dict[str, dict[str, Any]]], kind: str) -> None:
    run = runs["widest"]
    assert run["exact"][kind]["losses"] == pytest.approx(run["native"][kind]["losses"], abs=1e-5)
    assert run["rounded"][kind]["losses"] == pytest.approx(run["native"][kind]["losses"], abs=1e-5)
    assert run["bf16"][kind]["losses"] == pytest.approx(run["native"][kind]["losses"], abs=1e-2)
