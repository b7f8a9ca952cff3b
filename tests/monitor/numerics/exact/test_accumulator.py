"""The exact accumulator gives what the exact sum of all terms at once gives."""

from __future__ import annotations

import pytest
import torch

from firmware_sim.errors import CallerError
from monitor.numerics.exact import sums
from monitor.numerics.exact.accumulator import ExactSum
from monitor.numerics.kernels.arrays import array


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize(("low", "high"), [(0, 255), (100, 130), (0, 30), (250, 254), (0, 1)])
def test_any_bits_add_as_one_exact_sum(low, high):
    generator = torch.Generator().manual_seed(low + high)
    for count in (1, 2, 7):
        bits = torch.randint(-(2**31), 2**31, (count, 3000), generator=generator).to(torch.int32)
        exponents = torch.randint(low, high + 1, (count, 3000), generator=generator).to(torch.int32)
        terms = ((bits & ~0x7F80_0000) | (exponents << 23)).view(torch.float32)
        terms = torch.cat([terms, -terms[torch.randperm(count, generator=generator)]]) if count == 7 else terms
        held = ExactSum(3000)
        for row in terms:
            held.add(row)
        assert same(held.rounded(), sums.sum(terms, [0]))


def test_ties_overflow_zeros_and_what_is_not_finite():
    one, half, tiny = 1.0, 2.0**-24, 2.0**-149
    largest = torch.finfo(torch.float32).max
    cases = [
        [one, half],
        [one, half, tiny],
        [one, half, -tiny],
        [one + 2.0**-23, half],
        [largest, largest],
        [largest, largest, -largest],
        [-0.0, -0.0],
        [tiny, -tiny],
        [torch.inf, one],
        [torch.inf, -torch.inf],
        [torch.nan, one],
    ]
    for case in cases:
        terms = torch.tensor(case, dtype=torch.float32)
        held, streams = ExactSum(1), ExactSum(1)
        held.add_all(terms)
        for term in terms:
            streams.add(term[None])
        assert same(held.rounded()[0], sums.sum(terms)), case
        assert same(streams.rounded(), held.rounded()), case


def test_sums_of_processes_are_sums_of_digits():
    terms = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    parts = [ExactSum(50) for _ in range(2)]
    for number, row in enumerate(terms):
        parts[number % 2].add(row)
    parts[0].digits += parts[1].digits
    assert same(parts[0].rounded(), sums.sum(terms, [0]))


def test_other_types_and_sizes_are_refused():
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(CallerError, match="FP32"):
            ExactSum(2).add(wrong)


def test_a_kernel_does_not_keep_a_storage_from_being_freed():
    tensor = torch.arange(4.0)
    seen = array(tensor)
    seen[0] = 5.0
    assert tensor[0] == 5.0
    tensor.untyped_storage().resize_(0)
    assert not tensor.untyped_storage().size()
