"""Strides that decide nothing have one form, whatever a kernel chose."""

from __future__ import annotations

import pytest
import torch

from monitor.numerics.strides import canonical_strides, with_canonical_strides
from monitor.programs.trace import layout_of

LAST = torch.channels_last


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 0, 2), (3, 1, 5), (1, 1), (6, 1, 5, 5), (4, 3, 1, 1)])
def test_a_dense_tensor_has_the_strides_of_a_fresh_one(shape: tuple[int, ...]) -> None:
    fresh = torch.zeros(shape)
    odd = fresh.as_strided(shape, [7 if size <= 1 else step for size, step in zip(shape, fresh.stride(), strict=True)])
    if fresh.numel():
        assert canonical_strides(odd) == fresh.stride()
    assert layout_of(odd) == layout_of(fresh)
    assert with_canonical_strides(odd).stride() == canonical_strides(fresh)


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (2, 3, 4, 1), (2, 3, 1, 5), (1, 3, 1, 4)])
def test_channels_last_stays_channels_last(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape).to(memory_format=LAST)
    odd = x.as_strided(shape, [7 if size == 1 else step for size, step in zip(shape, x.stride(), strict=True)])
    seen = with_canonical_strides(odd)
    assert seen.is_contiguous(memory_format=LAST)
    assert torch.constant_pad_nd(seen, [1, 1, 1, 1]).is_contiguous(memory_format=LAST)
    assert canonical_strides(odd) == canonical_strides(x)


def test_other_tensors_keep_what_their_elements_decide() -> None:
    x = torch.arange(60.0).reshape(3, 4, 5)[:, 1:2, ::2]
    assert canonical_strides(x) == (20, 6, 2)
    assert torch.equal(with_canonical_strides(x), x)
    assert canonical_strides(torch.zeros(3, 1).expand(3, 4)) == (1, 0)
    plain = torch.zeros(3, 4).t()
    assert with_canonical_strides(plain) is plain
    pair = [torch.zeros(2, 2), torch.zeros(2, 1).as_strided((2, 1), (1, 9))]
    assert [tensor.stride() for tensor in with_canonical_strides(pair)] == [(2, 1), (1, 1)]
