"""A batch's file: salted within, so that its plain digest tells nothing of the batch."""

from __future__ import annotations

import pytest
import torch

from firmware_sim.errors import CallerError, EvidenceError
from monitor.programs.batches import batch_layout, step_salt
from monitor.transcript import encode_state
from monitor.transcript.data import FILE_SALT, decode_batch, encode_batch
from monitor.transcript.listing import batch_bytes

BATCH = {"x": torch.arange(6.0).view(3, 2), "y": torch.tensor([1, 0, 2])}
KEY = b"k" * 32


def test_a_file_gives_its_batch_back_and_differs_by_step_and_run():
    owns = [step_salt(key, step) for key in (KEY, b"l" * 32) for step in (1, 2)]
    files = [encode_batch(BATCH, own) for own in owns]
    assert len(set(files)) == 4
    assert all(own not in content for own, content in zip(owns, files, strict=True))
    for own, content in zip(owns, files, strict=True):
        found = decode_batch(content, "a batch", own)
        assert found.keys() == BATCH.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in BATCH.items())
        assert len(content) <= batch_bytes(batch_layout(BATCH))


@pytest.mark.parametrize(
    "salt",
    [
        {},
        {FILE_SALT: torch.zeros(32, dtype=torch.uint8)},
        {FILE_SALT: torch.zeros(32)},
        {FILE_SALT: torch.zeros(0, dtype=torch.uint8)},
    ],
)
def test_a_file_that_is_not_salted_as_declared_is_refused(salt):
    with pytest.raises(EvidenceError, match="does not have the salt that its run declares"):
        decode_batch(encode_state({**BATCH, **salt}), "a batch", step_salt(KEY, 1))
    with pytest.raises(EvidenceError, match="does not have the salt that its run declares"):
        decode_batch(encode_batch(BATCH, step_salt(KEY, 2)), "a batch", step_salt(KEY, 1))


def test_an_entry_with_the_name_of_the_salt_is_refused():
    with pytest.raises(CallerError, match="rename the entry 'file-salt'"):
        encode_batch({FILE_SALT: torch.zeros(32, dtype=torch.uint8)}, step_salt(KEY, 1))
