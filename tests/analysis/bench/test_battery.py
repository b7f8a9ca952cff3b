"""The battery: equal digests for every operator on devices whose native ones differ; coverage of the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from analysis.bench.battery import row_of
from monitor.numerics.operators import operator_table

KERNELS = (
    {"OMP_NUM_THREADS": "2"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
)
ACCELERATOR = {
    "OMP_NUM_THREADS": "1",
    "CHIPWITNESS_EMULATED_ORDER": "split-k",
    "CHIPWITNESS_ACCELERATOR": "emulated",
}
# Rows whose result is not a number to compare, spellings of rows that the battery runs under another overload, and
# operators that only graphics cards have.
NOT_RUN = {
    "aten._fused_rms_norm.default",
    "aten._fused_rms_norm_backward.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.detach_.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_permuted.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten._has_same_storage_numel.default",
    "aten.is_same_size.default",
    "aten.isfinite.default",
    "aten.lift_fresh.default",
    "aten.normal_functional.default",
    "aten.rand.generator",
    "aten.randint.default",
    "aten.randint.generator",
    "aten.randint.low_generator",
    "aten.randn.generator",
    "aten.randperm.generator",
    "aten.scalar_tensor.default",
    "aten.unfold_backward.default",
}


BOTH = """
import json
from analysis.bench.battery import run_battery

print(json.dumps([run_battery("exact"), run_battery("native")]))
"""


def both(environment: dict[str, str]) -> list[dict[str, str]]:
    """Digests of exact and of native arithmetic, in one process."""
    found: list[dict[str, str]] = child(["-c", BOTH], environment)
    return found


def battery(numerics: str, environment: dict[str, str]) -> dict[str, str]:
    digests: dict[str, str] = child(["-m", "analysis.bench.battery", numerics], environment)
    return digests


def child(words: list[str], environment: dict[str, str]) -> Any:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MKL_", "ONEDNN_", "ATEN_", "OMP_NUM"))}
    done = subprocess.run(
        [sys.executable, *words],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_operator_is_equal_where_native_ones_differ() -> None:
    (first, native_first), (second, native_second) = map(both, KERNELS)
    third = battery("exact", ACCELERATOR)
    assert first == second
    assert [name for name in first if first[name] != third.get(name)] == []
    differing = {name for name in native_first if native_first[name] != native_second[name]}
    assert {"aten.mm.default", "aten.sqrt.default", "aten.exp.default", "aten.sum.default"} <= differing
    assert set(operator_table()) - set(first) == NOT_RUN


def test_rows_of_in_place_and_out_overloads() -> None:
    assert row_of("aten.add_.Tensor") == "aten.add.Tensor"
    assert row_of("aten.pow_.Scalar") == "aten.pow.Tensor_Scalar"
    assert row_of("aten.maximum.out") == "aten.maximum.default"
    assert row_of("aten.cumprod.default") == "aten.cumprod.default"
    assert row_of("aten.and_then_.x") == "aten.and_then_.x"
