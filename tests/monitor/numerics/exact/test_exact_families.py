"""Equal bits on several kernel families of one machine, chosen by environment before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FAMILIES = {
    "as it is": ({}, "2"),
    "avx2": ({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell"}, "1"),
    "sse4.1, compatible": (
        {
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_CBWR": "COMPATIBLE",
            "NUMBA_CPU_NAME": "nehalem",
        },
        "2",
    ),
}


@pytest.mark.skipif(
    "avx512" not in torch.backends.cpu.get_cpu_capability().lower(), reason="needs an AVX-512 processor"
)
def test_families_agree_where_native_fp32_does_not() -> None:
    script = Path(__file__).with_name("_families.py")
    children = {}
    for name, (settings, threads) in FAMILIES.items():
        environment = {**os.environ, **settings}
        children[name] = subprocess.Popen(
            [sys.executable, str(script), threads],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    reports = {}
    for name, child in children.items():
        output, errors = child.communicate(timeout=400)
        assert child.returncode == 0, errors
        reports[name] = json.loads(output)
    assert len({report["exact"] for report in reports.values()}) == 1, reports
    assert len({report["native"] for report in reports.values()}) == len(FAMILIES)
    assert len({report["capability"] for report in reports.values()}) == len(FAMILIES)
    assert reports["as it is"]["int8"]
    for name in ("avx2", "sse4.1, compatible"):
        assert not reports[name]["int8"], "the known-answer test must refuse saturating int8 products"
        assert reports[name]["forced_int8"] == "refused", "the run-time check must refuse them too"
