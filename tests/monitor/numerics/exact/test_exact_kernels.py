"""Compiled kernels: a cache that serves the next process and sees every file; sums that are settled where they lie."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monitor.numerics.engines.cpu.exact import sums as _sum_engine
from monitor.numerics.engines.cpu.exact.sum_kernels import settle, sum_of
from monitor.numerics.exact import sum as exact_sum
from monitor.numerics.reference.resolution import round_fraction

_CALLS = """
import torch
from monitor.numerics import exact
from monitor.numerics.engines.cpu.fused.elementwise_kernels import IN_PLACE
from monitor.numerics.engines.cpu.exact.function_kernels import UNARY_KERNELS
from monitor.numerics.engines.cpu.fused.elementwise import in_place
exact.unary("tanh", torch.ones(3))
in_place("add", torch.ones(3), torch.ones(3))
print(*(sum(kernel.stats.cache_hits.values()) for kernel in (UNARY_KERNELS["tanh"], IN_PLACE["add"])))
"""


def test_the_next_process_finds_the_kernels_compiled(tmp_path: Path) -> None:
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _CALLS], env=environment, capture_output=True, text=True, check=True
        )
        hits.append(done.stdout.split())
    assert hits == [["0", "0"], ["1", "1"]]


def _exact(values: np.ndarray) -> float:
    return round_fraction(sum((Fraction(float(v)) for v in values), Fraction(0)))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_a_settled_sum_is_correctly_rounded(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    for value, undecided in (settle(values, 1.0), sum_of(values, 1.0)):
        if not undecided:
            assert np.float32(value).tobytes() == np.float32(_exact(values) + 0.0).tobytes()


def test_ties_and_exact_cancellations_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("a sum left the kernel")

    monkeypatch.setattr(_sum_engine, "exact_value", never)
    generator = np.random.default_rng(6)
    pairs = generator.standard_normal((4000, 2)).astype(np.float32)
    pairs[::2, 1] = -pairs[::2, 0]
    want = np.array([_exact(pair) for pair in pairs], np.float32)
    x = torch.from_numpy(pairs)
    assert np.array_equal(exact_sum(x, [1]).numpy().view(np.int32), want.view(np.int32))
    assert np.array_equal(exact_sum(x.t().contiguous(), [0]).numpy().view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("shape", [(3, 1), (4, 511), (5, 512), (6, 513), (1027, 700), (2, 9, 600)])
def test_column_sums_across_tiles(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    dim = len(shape) - 2
    columns = x.movedim(dim, -1).reshape(-1, shape[dim]).numpy()
    some = columns[:: max(len(columns) // 200, 1)]
    got = exact_sum(x, [dim]).reshape(-1).numpy()[:: max(len(columns) // 200, 1)]
    assert np.array_equal(got, np.array([_exact(row) for row in some], np.float32))
