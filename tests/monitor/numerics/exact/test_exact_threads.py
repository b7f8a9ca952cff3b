"""Compiled kernels in threads: pieces cover the range in order, callers may be threads, no cache folder is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import pytest
import torch

from firmware_sim.errors import DeviceError
from monitor.numerics.exact import matmul, unary
from monitor.numerics.exact import sum as exact_sum
from monitor.numerics.kernels import jit as _jit
from monitor.numerics.kernels.workers import run_pieces


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_results_cover_the_range_once_and_in_order(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    pieces = run_pieces(lambda begin, end: list(range(begin, end)), rows, 1 << 30)
    assert [row for piece in pieces for row in piece] == list(range(rows))


def test_an_error_in_a_helper_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def fail(begin: int, end: int) -> None:
        raise DeviceError(f"piece {begin} to {end}")

    with pytest.raises(DeviceError, match="piece"):
        run_pieces(fail, 100, 1 << 30)


def test_kernels_compile_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Any = numba.njit

    def refusing(*signature: str, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return honest(*signature, **options)

    monkeypatch.setattr(numba, "njit", refusing)

    def double(x: Any) -> Any:
        return x * 2

    assert _jit.compiled(double)(21) == 42


def test_several_callers_and_thread_counts_get_the_same_bits() -> None:
    """Callers share the pool but not their scratch memory."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(200, 180, generator=generator), torch.randn(180, 170, generator=generator)) for _ in range(6)]

    def work(pair: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        product = matmul(*pair)
        return [product, unary("exp", product), exact_sum(product, [0])]

    wanted = [work(pair) for pair in pairs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            for got, expected in zip(pool.map(work, pairs), wanted, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert all(torch.equal(x, y) for x, y in zip(work(pairs[0]), wanted[0], strict=True))
    finally:
        torch.set_num_threads(threads)
