"""The published scheme, as a baseline: a threshold on the distance to the grid, one ternary symbol for each element.

Srivastava 2024, Alg. 3 (threshold search), Alg. 4 (log and correction) and Sec. 4 (five symbols a byte in base 3).
Exponents are binary, as in the paper; the released code takes decimal ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics.engines.eager.rounded.rounding_rule import exponent
from monitor.numerics.kernels.bits import power_of_two

__all__ = ["correct", "decode_dense", "encode_dense", "round_to_bits", "search_threshold", "symbols"]

_DIGITS = 5
_PLACES = 3 ** np.arange(_DIGITS)

Symbols = npt.NDArray[np.uint8]


def _spacing(x: Tensor, bits: int) -> Tensor:
    if not 10 <= bits <= 32:
        raise CallerError(f"a rounded format has 10 to 32 bits (1 sign, 8 exponent), not {bits}")
    return power_of_two(exponent(x).clamp(min=-126) - (bits - 9))


def round_to_bits(x: Tensor, bits: int) -> Tensor:
    """FP64 ``x`` rounded to nearest even at 1 sign, 8 exponent and bits − 9 fraction bits; x must not overflow FP32."""
    spacing = _spacing(x, bits)
    return torch.round(x / spacing) * spacing


def symbols(x: Tensor, bits: int, threshold: float) -> Symbols:
    """2 where x was rounded up from more than 2^exponent·threshold away, 0 where down, else 1 (Alg. 4)."""
    rounded = round_to_bits(x, bits)
    far = (x - rounded).abs() > power_of_two(exponent(x).clamp(min=-126)) * threshold
    out = torch.where(far, torch.where(x < rounded, 2, 0), 1).to(torch.uint8)
    flat: Symbols = out.reshape(-1).cpu().numpy()
    return flat


def correct(x: Tensor, bits: int, logged: Symbols) -> Tensor:
    """The auditor's rounding: its own, except where it went the other way than the log says (Alg. 4)."""
    if logged.size != x.numel():
        raise EvidenceError(f"dense rounding log holds {logged.size} symbols for {x.numel()} elements")
    rounded, spacing = round_to_bits(x, bits), _spacing(x, bits)
    said = torch.from_numpy(logged.astype(np.int64)).reshape(x.shape).to(x.device)
    down = (x < rounded) & (said == 0)
    up = (x > rounded) & (said == 2)
    return torch.where(down, rounded - spacing, torch.where(up, rounded + spacing, rounded))


def encode_dense(values: Symbols) -> bytes:
    """Five symbols a byte: 1.6 bits an element."""
    if values.size and int(values.max()) > 2:
        raise CallerError("a symbol of the dense code is 0, 1 or 2")
    padded = np.zeros(-(-values.size // _DIGITS) * _DIGITS, dtype=np.int64)
    padded[: values.size] = values
    return (padded.reshape(-1, _DIGITS) @ _PLACES).astype(np.uint8).tobytes()


def decode_dense(data: bytes, count: int) -> Symbols:
    """``count`` symbols; EvidenceError unless the bytes are their one encoding."""
    if len(data) != -(-count // _DIGITS):
        raise EvidenceError(f"dense rounding log has {len(data)} bytes for {count} symbols")
    digits = np.frombuffer(data, dtype=np.uint8).astype(np.int64)[:, None] // _PLACES % 3
    out: Symbols = digits.reshape(-1)[:count].astype(np.uint8)
    if encode_dense(out) != data:
        raise EvidenceError("dense rounding log has bytes above 242 or padding that is not zero")
    return out


def search_threshold(pairs: Sequence[tuple[Tensor, Tensor]], bits: int, *, steps: int = 40) -> float:
    """Largest threshold that logs every element on which two devices round differently (Alg. 3).

    Args:
        pairs: the same results from two devices, FP64.
        bits: format that they are rounded to.
        steps: halvings of [0.25·2^-23, 0.5·2^(9−bits)].

    Raises:
        CallerError: some disagreement lies below the smallest threshold, so that this scheme cannot serve the devices.
    """
    closest = float("inf")
    for first, second in pairs:
        differ = round_to_bits(first, bits) != round_to_bits(second, bits)
        for value in (first[differ], second[differ]):
            if value.numel():
                scale = power_of_two(exponent(value).clamp(min=-126))
                closest = min(closest, float(((value - round_to_bits(value, bits)).abs() / scale).min()))
    low, high = 0.25 * 2.0**-23, 0.5 * 2.0 ** (9 - bits)
    if closest <= low:
        raise CallerError(
            f"devices disagree at {closest:.3g} from the grid, which is below the smallest threshold {low:.3g}"
        )
    if closest > high:
        return high
    for _ in range(steps):
        middle = (low + high) / 2.0
        low, high = (middle, high) if closest > middle else (low, middle)
    return low
