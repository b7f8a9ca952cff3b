"""Search for the thresholds of calibrated rounding bounds on this machine's kernel families (Srivastava 2024, Alg. 3).

Alg. 3 looks for the threshold that covers every element on which two device types round to opposite sides. Such
elements are rare, so the errors that cause them are observed instead: a device's result against the exact one, in units
of u·‖row‖·‖column‖. A threshold that covers all errors covers all disagreements.

A process of this module's own measures for each device: a JSON object in, one out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from firmware_sim.compilation import compiled
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from inspector.devices import current_device, device
from monitor import processes
from monitor.numerics.rounding.calibration import OPERATORS

__all__ = ["DEVICES", "INPUTS", "SampleSizes", "measure", "search"]

DEVICES = ("native", "native-1", "avx2", "sse41", "mkl-compatible")
INPUTS = ("gaussian", "relu", "uniform", "lognormal")
"""Distributions of one operand; the other is Gaussian. Two operands without negative numbers are measured apart."""
UNCOVERED = "both-positive"

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSizes:
    """Extent of the measurement: ``results`` elements at most for each device, operator, input and number of terms."""

    terms: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)
    products: int = 1 << 22
    results: int = 1 << 14
    safety: float = 2.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.terms or min(self.terms) < 16 or self.products < max(self.terms):
            raise CallerError(
                "a calibration needs sums of at least 16 terms, and room for at least one sum of the longest kind"
            )
        if not self.safety >= 1:
            raise CallerError(f"a safety factor must be at least 1, not {self.safety}")


@partial(compiled, error_model="numpy")
def _exact(left: Any, right: Any, out: Any) -> None:
    """(m, k) × (n, k) FP32 products with an error of about 2^-100: every product is exact, sums keep their rests."""
    for i in range(left.shape[0]):
        for j in range(right.shape[0]):
            total = rest = 0.0
            for k in range(left.shape[1]):
                term = np.float64(left[i, k]) * np.float64(right[j, k])
                new = total + term
                back = new - total
                rest += (total - (new - back)) + (term - back)
                total = new
            out[i, j, 0], out[i, j, 1] = total, rest


def _drawn(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> Values:
    x = generator.standard_normal(shape, dtype=np.float32)
    if kind == "gaussian":
        return x
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "lognormal":
        return x * np.exp2(np.round(2.0 * generator.standard_normal(shape, dtype=np.float32)))
    return generator.random(shape, dtype=np.float32)


def _errors(found: Any, left: Values, right: Values) -> float:
    """Largest |v − x|/β of a result (rows of ``left`` by rows of ``right``) whose elements are all listed."""
    exact = np.empty((len(left), len(right), 2))
    _exact(left, right, exact)
    positions = found.near.positions
    exact = exact.reshape(-1, 2)[positions]
    if len(positions) < 0.9 * len(left) * len(right):
        raise DeviceError(f"only {len(positions)} of {len(left) * len(right)} results can be compared")
    return float((np.abs((found.near.values - exact[:, 0]) - exact[:, 1]) / found.near.betas).max())


def _measured(operator: str, inputs: str, terms: int, plan: SampleSizes) -> float:
    """Largest error of one operator class on one distribution, with the engine that records and replays."""
    import torch

    from monitor.numerics.engines.cpu.rounded import patches, products
    from monitor.numerics.engines.results import Rounding
    from monitor.numerics.geometry import ConvolutionShape

    generator = np.random.Generator(np.random.Philox(key=[plan.seed, terms]))
    every = Rounding(multiple=64.0, grid_bits=24)
    # β = 2^-18·‖row‖·‖column‖ sets the grid, so that all elements have a midpoint within 16β and are listed.
    factor = 2.0**-18
    unit = factor / 2.0**-53
    first, second = ("uniform", "uniform") if inputs == UNCOVERED else (inputs, "gaussian")
    count = int(min((plan.products // terms), plan.results) ** 0.5)
    place = ConvolutionShape(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    if operator == "product":
        left, right = _drawn(first, (count, terms), generator), _drawn(second, (count, terms), generator)
        found = products.multiply(torch.from_numpy(left), torch.from_numpy(right).t(), factor, every)
        return _errors(found, left, right) * unit
    channels, side = max(terms // 4, 1), max(int(count**0.5), 2)
    if operator == "convolution":
        x, w = (
            _drawn(first, (1, channels, side + 1, side + 1), generator),
            _drawn(second, (count, channels, 2, 2), generator),
        )
        found = patches.forward(torch.from_numpy(x), torch.from_numpy(w), place, factor, every)
        right = np.lib.stride_tricks.sliding_window_view(x[0], (2, 2), axis=(1, 2)).transpose(1, 2, 0, 3, 4)
        return _errors(found, w.reshape(count, -1), right.reshape(side * side, -1)) * unit
    if operator == "grad-input":
        grad, w = (
            _drawn(first, (1, channels, side, side), generator),
            _drawn(second, (channels, count, 2, 2), generator),
        )
        size = (1, count, side + 1, side + 1)
        found = patches.grad_input(torch.from_numpy(grad), size, torch.from_numpy(w), place, factor, every)
        spread = np.pad(grad[0], ((0, 0), (1, 1), (1, 1)))
        right = np.lib.stride_tricks.sliding_window_view(spread, (2, 2), axis=(1, 2))[..., ::-1, ::-1]
        right = right.transpose(1, 2, 0, 3, 4).reshape((side + 1) ** 2, -1)
        return _errors(found, np.ascontiguousarray(w.transpose(1, 0, 2, 3).reshape(count, -1)), right) * unit
    samples, width = max(terms // 16, 1), min(terms, 16)
    grad, x = (
        _drawn(first, (samples, count, 1, width), generator),
        _drawn(second, (samples, count, 1, width), generator),
    )
    found = patches.grad_weight(torch.from_numpy(grad), torch.from_numpy(x), (count, count, 1, 1), place, factor, every)
    left, right = (np.ascontiguousarray(y.transpose(1, 0, 2, 3).reshape(count, -1)) for y in (grad, x))
    return _errors(found, left, right) * unit


def measure(plan: SampleSizes) -> dict[str, object]:
    """Largest errors on this process's device, by operator, input and terms."""
    return {
        operator: {
            inputs: [_measured(operator, inputs, terms, plan) for terms in plan.terms]
            for inputs in (*INPUTS, UNCOVERED)
        }
        for operator in OPERATORS
    }


def _on(name: str, plan: SampleSizes, timeout: float) -> JsonObject:
    process = processes.run(
        processes.python("tests.measurements._threshold_search"),
        variables=device(name).variables,
        given=json.dumps(asdict(plan)),
        timeout=timeout,
    )
    if process.returncode:
        raise DeviceError(f"device {name} broke: {(process.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: JsonObject = canonical.loads(process.stdout)
    if found.pop("device") != name:
        raise DeviceError(f"device {name} gave the answer of a different device")
    return found


def search(
    plan: SampleSizes,
    devices: Sequence[str] = DEVICES,
    *,
    timeout: float = 3600,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, object]:
    """Thresholds for each operator class: the largest error on any device and covered input, times the safety factor.

    Raises:
        CallerError: fewer than two devices.
        DeviceError: a device broke, or no two of them compute differently.
    """
    if len(set(devices)) < 2:
        raise CallerError("a calibration compares at least two devices")
    found: dict[str, JsonObject] = {}
    for name in devices:
        found[name] = _on(name, plan, timeout)
        advance()
    if len({json.dumps(result["errors"]) for result in found.values()}) < 2:
        raise DeviceError("all devices make the same errors; a calibration needs two that compute differently")
    thresholds: dict[str, list[list[float]]] = {}
    for operator in OPERATORS:
        rows, highest = [], 0.0
        for place, terms in enumerate(plan.terms):
            errors = [result["errors"][operator][inputs][place] for result in found.values() for inputs in INPUTS]
            # A longer sum is never given less room than a shorter one.
            highest = max(highest, *errors)
            rows.append([terms, round(plan.safety * highest, 3)])
        thresholds[operator] = rows
    return {"plan": asdict(plan), "inputs": list(INPUTS), "thresholds": thresholds, "devices": found}


def main() -> int:
    """Measure on this device: a plan on standard input, errors and what the device is on standard output."""
    from monitor.environment import fingerprint, settings, versions

    given = canonical.loads(sys.stdin.read())
    plan = SampleSizes(**{**given, "terms": tuple(given["terms"])})
    name = current_device()
    result = {"device": name, "fingerprint": str(fingerprint()), "settings": settings(), "versions": versions()}
    json.dump({**result, "errors": measure(plan)}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
