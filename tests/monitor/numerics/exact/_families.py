"""Runs in a child process: digests of every exact kernel and of native FP32 on this process's kernel family."""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from firmware_sim.errors import DeviceError
from monitor.numerics.engines.capability import int8_serves
from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul
from monitor.numerics.exact import UNARY_FUNCTIONS, matmul, mean, philox, power, scatter_rows, unary
from monitor.numerics.exact import sum as exact_sum


def _digest(tensors: list[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _numbers(key: int, rows: int, columns: int) -> torch.Tensor:
    """FP32 numbers in [-2, 2), equal on every device."""
    return (philox.bits(key, 0, rows * columns) - (1 << 31)).to(torch.float32).reshape(rows, columns) * 2.0**-30


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    x = _numbers(1, 300, 260)
    y = _numbers(2, 260, 190)
    heavy = unary("exp", 4 * y)
    exact = [
        matmul(x, y),
        matmul(x, heavy),
        matmul(x.t(), x),
        matmul(x.reshape(10, 30, 260), y),
        matmul(y, x.t()[:190]),
    ]
    exact += [unary(name, torch.cat([x.reshape(-1), 40 * y.reshape(-1)])) for name in UNARY_FUNCTIONS]
    exact += [power(x.abs(), 1.7), exact_sum(x), exact_sum(x, [0]), mean(heavy, [1])]
    exact += [scatter_rows(50, philox.bits(3, 0, 300) % 50, x)]
    forced_int8 = "equal"
    try:
        product = cpu_matmul(x[None], y[None], engine="int8")[0]
        if not torch.equal(product, exact[0]):
            forced_int8 = "silently wrong"
    except DeviceError:
        forced_int8 = "refused"
    native = [x @ y, x.exp(), x.sum(), torch.nn.functional.gelu(x)]
    report = {
        "exact": _digest(exact),
        "native": _digest(native),
        "int8": int8_serves(torch.device("cpu")),
        "forced_int8": forced_int8,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
