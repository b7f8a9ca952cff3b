"""The counter-based generator: published vectors, both forms, distributions."""

from __future__ import annotations

import math

import pytest
import torch

from firmware_sim.errors import CallerError
from monitor.numerics.engines.eager.exact import philox as eager
from monitor.numerics.engines.eager.exact.philox import philox_rounds
from monitor.numerics.exact import philox

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""philox4x32, 10 rounds, from `kat_vectors` of the Random123 distribution (Salmon et al. 2011)."""


@pytest.mark.parametrize(("counter", "key", "wanted"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]) -> None:
    words = philox_rounds([torch.tensor([word]) for word in counter], key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == wanted


def test_compiled_rounds_give_the_published_vector() -> None:
    assert tuple(philox.bits(0, 0, 4).tolist()) == VECTORS[0][2]


@pytest.mark.parametrize(
    ("key", "counter"), [(0, 0), (1 << 63, 5), ((1 << 64) - 1, (1 << 32) - 3), (7, (1 << 64) - 300)]
)
def test_compiled_kernel_equals_the_reference(key: int, counter: int) -> None:
    for count in (0, 1, 3, 4, 1001):
        assert torch.equal(philox.bits(key, counter, count), eager.bits(key, counter, count, torch.device("cpu")))


def test_a_stream_can_be_entered_anywhere() -> None:
    whole = philox.bits(11, 0, 4000)
    assert torch.equal(philox.bits(11, 250, 3000), whole[1000:])


def test_distribution() -> None:
    """n = 2^20; each check allows 6 standard errors: false alarm below 2e-9 each, about 1e-8 in all."""
    n, errors = 1 << 20, 6.0
    u = philox.bits(2024, 0, n).double() * 2.0**-32
    assert abs(float(u.mean()) - 0.5) < errors * math.sqrt(1 / 12 / n)
    assert abs(float((u**2).mean()) - 1 / 3) < errors * math.sqrt(4 / 45 / n)
    assert abs(float(((u[0::2] - 0.5) * (u[1::2] - 0.5)).mean())) < errors / 12 / math.sqrt(n / 2)
    for p in (0.1, 0.5):
        assert abs(float((u < p).double().mean()) - p) < errors * math.sqrt(p * (1 - p) / n)


def test_arguments_out_of_range() -> None:
    for key, counter, count in ((-1, 0, 1), (1 << 64, 0, 1), (0, -1, 1), (0, 1 << 64, 1), (0, 0, -1)):
        with pytest.raises(CallerError):
            philox.bits(key, counter, count)
