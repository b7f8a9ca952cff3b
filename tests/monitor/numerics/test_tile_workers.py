"""Tiles in threads: the same result as in one, and no setting of the caller's thread changed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import DeviceError
from inspector.devices.emulation import EmulatedArithmetic
from monitor.numerics import exact
from monitor.numerics.engines.cpu.rounded import patches, products
from monitor.numerics.engines.results import Rounding, Settled
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.kernels.workers import run_tiles, workers

EVERY = Rounding(multiple=64.0, grid_bits=24)
COARSE = 2.0**-18
"""A bound that sets the grid, so that no last bit of FP64 shows and every element is listed."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def both(compute: object) -> list[Settled]:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(compute())  # type: ignore[operator]
        assert torch.get_num_threads() == threads
    return results


def test_two_threads_give_what_one_gives(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(300, 200, generator=generator), torch.randn(200, 700, generator=generator)
    x, w = torch.randn(4, 32, 20, 20, generator=generator), torch.randn(48, 32, 3, 3, generator=generator)
    grad = torch.randn(4, 48, 20, 20, generator=generator)
    shape = ConvolutionShape(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    assert workers(a.numel() * b.shape[1]) == 2
    for compute in (
        lambda: products.multiply(a, b, COARSE, EVERY),
        lambda: products.multiply(b.t(), a.t(), COARSE, EVERY),
        lambda: patches.forward(x, w, shape, COARSE, EVERY),
        lambda: patches.grad_input(grad, tuple(x.shape), w, shape, COARSE, EVERY),
        lambda: patches.grad_weight(grad, x, tuple(w.shape), shape, COARSE, EVERY),
    ):
        one, two = both(compute)
        assert torch.equal(one.out, two.out)
        np.testing.assert_array_equal(one.near.positions, two.near.positions)
        np.testing.assert_array_equal(one.near.betas, two.near.betas)
        assert len(two.near.positions) == two.out.numel()


def test_tiles_keep_their_order_and_are_shared_with_the_caller(two_threads: None) -> None:
    ran: set[int] = set()
    both_run = threading.Barrier(2, timeout=30)

    def tile(i: int) -> int:
        if threading.get_ident() not in ran:
            ran.add(threading.get_ident())
            both_run.wait()
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        return i * i

    assert run_tiles(40, 1 << 30, tile) == [i * i for i in range(40)]
    assert len(ran) == 2
    assert threading.get_ident() in ran
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 2
    assert run_tiles(3, 10, lambda i: threading.get_ident()) == [threading.get_ident()] * 3


def test_arithmetic_that_a_mode_emulates_stays_in_its_thread(two_threads: None) -> None:
    with EmulatedArithmetic("no-fma"):
        assert workers(1 << 40) == 1


def test_a_failing_tile_fails_the_call(two_threads: None) -> None:
    def tile(i: int) -> int:
        if i == 7:
            raise ValueError("tile 7")
        return i

    with pytest.raises(ValueError, match="tile 7"):
        run_tiles(20, 1 << 30, tile)
    assert torch.get_num_threads() == 2


def test_small_work_stays_on_one_core(two_threads: None) -> None:
    """Waking another core for a matrix product of microseconds would take longer than the product."""
    assert (
        run_tiles(3, 10, lambda i: (threading.get_ident(), torch.get_num_threads())) == [(threading.get_ident(), 1)] * 3
    )


def test_flushing_threads_are_refused() -> None:
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(DeviceError, match="subnormal"):
            products.multiply(torch.ones(2, 2), torch.ones(2, 2), COARSE, EVERY)
    finally:
        torch.set_flush_denormal(False)


def test_a_failing_tile_stops_the_others(two_threads: None) -> None:
    """The call ends with the first error, and no thread goes on behind its back."""
    ran: list[int] = []

    def tile(i: int) -> None:
        ran.append(i)
        time.sleep(0.01)
        raise ValueError(f"tile {i}")

    with pytest.raises(ValueError, match="tile"):
        run_tiles(200, 1 << 30, tile)
    seen = len(ran)
    assert seen <= 4
    time.sleep(0.05)
    assert len(ran) == seen


def test_threads_made_while_the_caller_flushed_keep_subnormals() -> None:
    code = (
        "import torch\n"
        "from firmware_sim.errors import DeviceError\n"
        "from monitor.numerics.kernels.workers import run_tiles\n"
        "torch.set_num_threads(2)\n"
        "torch.set_flush_denormal(True)\n"
        "try:\n"
        "    run_tiles(8, 1 << 30, lambda i: i)\n"
        "except DeviceError:\n"
        "    torch.set_flush_denormal(False)\n"
        "    print(run_tiles(8, 1 << 30, lambda i: i))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == str(list(range(8)))


def test_scratch_made_in_inference_mode_serves_later_calls() -> None:
    a = torch.randn(24, 24)
    with torch.inference_mode():
        first = exact.matmul(a, a)
    assert torch.equal(exact.matmul(a, a), first)


def test_threads_that_begin_with_a_mode_of_their_own_compute_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder gives one to threads that start under it, and its first product starts the threads of kernels."""
    begin, before = threading.Thread.run, torch.get_num_threads()

    def run(thread: threading.Thread) -> None:
        TorchDispatchMode().__enter__()
        begin(thread)

    monkeypatch.setattr(threading.Thread, "run", run)
    torch.set_num_threads(5)  # more than any pool that is there has
    try:
        found = run_tiles(40, 1 << 30, lambda i: (i, torch._C._len_torch_dispatch_stack()))
    finally:
        torch.set_num_threads(before)
    assert found == [(i, 0) for i in range(40)]
