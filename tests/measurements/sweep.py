"""Exhaustive comparison of a unary function with an independent oracle over all 2^32 FP32 inputs.

python -m tests.measurements.sweep exp tanh --out sweep.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from analysis.bench.origin import machine
from firmware_sim.errors import CallerError, ChipwitnessError
from firmware_sim.evidence import canonical
from monitor.numerics.exact.unary import power, unary
from tests.measurements.oracle import ODD, expected, expected_power, require_extended_precision

__all__ = ["SweepResult", "sweep", "sweep_power"]

_CHUNK = 1 << 19
_SIGN = 1 << 31
_FIRST_INFINITY = 0x7F80_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Outcome of one sweep: `inputs` compared, `mismatches` among them, `decided_by_mpmath` by its last resort."""

    function: str
    inputs: int
    mismatches: int
    first_mismatch: str | None
    decided_by_mpmath: int
    seconds: float


def _specials(name: str) -> int:
    """Number of NaN patterns whose result is not 0x7FC00000 among all 2^24 - 2 of them."""
    wrong = 0
    for sign in (0, _SIGN):
        for start in range(_FIRST_INFINITY + 1, _SIGN, _CHUNK):
            bits = np.arange(start, min(start + _CHUNK, _SIGN), dtype=np.uint32) | np.uint32(sign)
            out = _apply(name, bits)
            wrong += int((out != 0x7FC0_0000).sum())
    return wrong


def _apply(name: str, bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return unary(name, torch.from_numpy(bits.view(np.float32))).numpy().view(np.uint32)


def sweep(name: str, *, stride: int = 1, progress: bool = False) -> SweepResult:
    """Compares every `stride`-th chunk of 2^19 neighbouring inputs, both signs, and every NaN if stride is 1.

    Zeros and infinities are left to the tests of special values.

    Raises:
        DeviceError: no extended precision here.
    """
    require_extended_precision()
    began = time.monotonic()
    inputs = mismatches = unclear = 0
    first: str | None = None
    starts = range(0, _FIRST_INFINITY, _CHUNK)
    for number, start in enumerate(starts):
        if number % stride:
            continue
        bits = np.arange(max(start, 1), min(start + _CHUNK, _FIRST_INFINITY), dtype=np.uint32)
        mirrored: NDArray[np.uint32] | None = None
        for sign in (0, _SIGN):
            pattern = bits | np.uint32(sign)
            result = _apply(name, pattern)
            if sign and name in ODD and mirrored is not None:
                wanted = mirrored ^ np.uint32(_SIGN)
            else:
                values, asked = expected(name, pattern.view(np.float32))
                wanted = np.where(np.isnan(values), np.uint32(0x7FC0_0000), values.view(np.uint32))
                mirrored = wanted
                unclear += asked
            wrong = np.flatnonzero(result != wanted)
            inputs += len(pattern)
            mismatches += len(wrong)
            if len(wrong) and first is None:
                i = wrong[0]
                first = f"input {int(pattern[i]):#010x} gave {int(result[i]):#010x}, not {int(wanted[i]):#010x}"
        if progress and number % 64 == 0:
            print(f"\r{name} {100 * number // len(starts):3d} %", end="", file=sys.stderr)
    if stride == 1:
        inputs += 2 * (_SIGN - _FIRST_INFINITY - 1)
        mismatches += _specials(name)
    return SweepResult(
        function=name,
        inputs=inputs,
        mismatches=mismatches,
        first_mismatch=first,
        decided_by_mpmath=unclear,
        seconds=round(time.monotonic() - began, 1),
    )


def sweep_power(pairs: int, seed: int = 2026) -> SweepResult:
    """Compares two-argument `power` on random pairs: half with any bits, half with a result inside FP32's range.

    Raises:
        DeviceError: no extended precision here.
    """
    require_extended_precision()
    began = time.monotonic()
    generator = np.random.default_rng(seed)
    inputs = mismatches = unclear = 0
    first: str | None = None
    while inputs < pairs:
        count = min(_CHUNK, pairs - inputs)
        x, y = (generator.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32) for _ in range(2))
        half = count // 2
        x[:half] = np.abs(x[:half])
        x[:half][~(np.isfinite(x[:half]) & (x[:half] > 0))] = 1.5
        with np.errstate(all="ignore"):
            y[:half] = (generator.uniform(-104, 89, half) / np.log(x[:half].astype(np.float64))).astype(np.float32)
        wanted, asked = expected_power(x, y)
        result = power(torch.from_numpy(x), torch.from_numpy(y)).numpy().view(np.uint32)
        wrong = np.flatnonzero(result != wanted)
        inputs += count
        mismatches += len(wrong)
        unclear += asked
        if len(wrong) and first is None:
            i = wrong[0]
            first = f"pow({x[i]!r}, {y[i]!r}) gave {int(result[i]):#010x}, not {int(wanted[i]):#010x}"
    return SweepResult(
        function="pow",
        inputs=inputs,
        mismatches=mismatches,
        first_mismatch=first,
        decided_by_mpmath=unclear,
        seconds=round(time.monotonic() - began, 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every input agrees, 1 if not, 2 for a usage error, 3 where the oracle can't run."""
    parser = argparse.ArgumentParser(prog="python -m tests.measurements.sweep", description=__doc__)
    parser.add_argument("functions", nargs="+", metavar="FUNCTION")
    parser.add_argument("--stride", type=int, default=1, help="compare every N-th chunk of 2^19 inputs only")
    parser.add_argument("--pairs", type=int, default=1 << 28, help="number of random pairs for pow")
    parser.add_argument("--out", type=Path, help="JSON file; results of other functions already in it are kept")
    options = parser.parse_args(arguments)
    failed = False
    for name in options.functions:
        try:
            if name == "pow":
                result = sweep_power(options.pairs)
            else:
                result = sweep(name, stride=options.stride, progress=sys.stderr.isatty())
        except CallerError as error:
            print(error, file=sys.stderr)
            return 2
        except ChipwitnessError as error:
            print(error, file=sys.stderr)
            return 3
        print(json.dumps(asdict(result)), flush=True)
        failed = failed or result.mismatches > 0
        if options.out:
            document = canonical.loads(options.out.read_text()) if options.out.exists() else {"results": []}
            others = [row for row in document["results"] if row["function"] != name]
            document = {"machine": machine(), "results": [*others, asdict(result)]}
            options.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
