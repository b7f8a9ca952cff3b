"""The published dense log (Srivastava 2024, Alg. 3 and 4) as a baseline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.bench.published_scheme import (
    correct,
    decode_dense,
    encode_dense,
    round_to_bits,
    search_threshold,
    symbols,
)
from firmware_sim.errors import CallerError, EvidenceError


def devices() -> tuple[torch.Tensor, torch.Tensor]:
    """One product as two devices compute it: apart by a relative 2^-34 in FP64."""
    generator = torch.Generator().manual_seed(12)
    a = torch.randn(400, 200, generator=generator, dtype=torch.float64).float().double()
    b = torch.randn(200, 300, generator=generator, dtype=torch.float64).float().double()
    first = a @ b
    return first, first * (1.0 + torch.randn(400, 300, generator=generator, dtype=torch.float64) * 2.0**-34)


@given(st.lists(st.integers(0, 2), max_size=64))
@settings(max_examples=60, deadline=None)
def test_dense_code_round_trips_at_1_6_bits(values: list[int]) -> None:
    original = np.array(values, dtype=np.uint8)
    data = encode_dense(original)
    assert len(data) == -(-len(values) // 5)
    np.testing.assert_array_equal(decode_dense(data, len(values)), original)


@pytest.mark.parametrize(("data", "count"), [(b"\xf3", 5), (b"\x03", 1), (b"", 1), (b"\0\0", 5)])
def test_other_bytes_are_errors(data: bytes, count: int) -> None:
    with pytest.raises(EvidenceError):
        decode_dense(data, count)


def test_32_bits_are_fp32() -> None:
    first, _ = devices()
    assert torch.equal(round_to_bits(first, 32).float(), first.float())
    assert torch.equal(round_to_bits(first, 32), first.float().double())


@pytest.mark.parametrize("bits", [32, 28])
def test_auditor_follows_the_trainer_and_would_differ_without_the_log(bits: int) -> None:
    trainer, auditor = devices()
    threshold = search_threshold([(trainer, auditor)], bits)
    logged = symbols(trainer, bits, threshold)
    expected = round_to_bits(trainer, bits)
    assert torch.equal(correct(auditor, bits, logged), expected)
    if bits == 32:
        assert not torch.equal(round_to_bits(auditor, bits), expected)
        with pytest.raises(EvidenceError, match="119999 symbols for 120000"):
            correct(auditor, bits, logged[:-1])


def test_devices_too_far_apart_have_no_threshold() -> None:
    """Cancellation does this: the error of a sum does not shrink with the sum. The adaptive grid exists for it."""
    first, _ = devices()
    with pytest.raises(CallerError, match="below the smallest threshold"):
        search_threshold([(first, first + 2.0**-22)], 32)
    with pytest.raises(CallerError, match="below the smallest threshold"):
        search_threshold([(first, first.float().double() + 2.0**-20 * first.abs())], 32)
