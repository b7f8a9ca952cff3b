"""An opened batch is the one that its leaf commits to, and nobody opens another."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch

from firmware_sim.errors import EvidenceError
from monitor.programs.batches import step_salt
from monitor.transcript import RunData
from monitor.transcript.batches import RecordedBatches
from monitor.transcript.data import BatchOpening, encode_batch
from monitor.transcript.layout import step_of

BATCH = {"x": torch.arange(6.0).view(3, 2), "y": torch.tensor([1, 0, 2])}


def declared():
    samples: dict[str, np.ndarray] = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.arange(5)}
    return RunData(samples=samples, order=np.array([[0, 1, 2], [4, 1, 3]]), salt=b"s" * 32)


def recorded():
    def read(path):
        step = step_of(path)
        assert step is not None
        return encode_batch(BATCH, step_salt(b"s" * 32, step))

    return RecordedBatches(read, b"s" * 32)


@pytest.mark.parametrize("make", [declared, recorded])
def test_an_opening_gives_root_and_tensors_of_its_step(make):
    batches = make()
    for step in (1, 2):
        opening, batch = batches.opening(step), batches.batch(step)
        assert opening.root() == batches.batch_root(step)
        assert {name: tensor.tolist() for name, tensor in opening.tensors().items()} == {
            name: tensor.tolist() for name, tensor in batch.items()
        }
    assert batches.opening(1).root() != batches.batch_root(2)


@pytest.mark.parametrize("make", [declared, recorded])
def test_another_salt_content_or_kind_is_another_batch(make):
    opening, root = make().opening(1), make().batch_root(1)
    [(salt, content), *others] = opening.parts
    for parts in (
        [(bytes(32), content), *others],
        [(salt, content.replace(b"\x00\x00\x80?", b"\x00\x00\x00@")), *others],
        [*others, (salt, content)] if others else [(salt, content)] * 2,
    ):
        assert BatchOpening(parts, is_file=opening.is_file).root() != root
    other = BatchOpening(opening.parts, is_file=not opening.is_file)
    with suppress(EvidenceError):
        assert other.root() != root


@pytest.mark.parametrize("is_file", [True, False])
def test_what_holds_no_batch_is_refused(is_file):
    for parts in ([], [(b"s" * 32, b"nothing")]):
        with pytest.raises(EvidenceError):
            BatchOpening(parts, is_file=is_file).tensors()
