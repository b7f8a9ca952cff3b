"""Each pass counts once, and what is remembered of passes has a bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspector.wire.passes import UsedPasses

NONCES = [f"{number:032x}" for number in range(5)]


def test_a_pass_counts_once_and_a_flood_of_them_waits_until_earlier_ones_are_void(tmp_path):
    used = UsedPasses(3, tmp_path / "passes", 0.0)
    assert [used.use(NONCES[0], 10.0, 0.0) for _ in range(3)] == [True, False, False]
    assert [used.use(each, 20.0, 1.0) for each in NONCES[1:4]] == [True, True, None]
    assert used.use(NONCES[1], 20.0, 1.0) is False
    assert used.use(NONCES[4], 30.0, 11.0) is True  # the first one is void by now
    assert used.use(NONCES[3], 30.0, 12.0) is None
    assert [used.use(each, 50.0, 31.0) for each in NONCES[:3]] == [True] * 3


def test_a_pass_that_was_shown_before_a_server_was_killed_does_not_count_afterwards(tmp_path):
    file = tmp_path / "home" / "passes"
    before = UsedPasses(3, file, 0.0)
    assert [before.use(NONCES[0], 10.0, 0.0), before.use(NONCES[1], 20.0, 0.0)] == [True, True]
    with file.open("a") as torn:
        torn.write(NONCES[2][:8])  # the disk was full
    assert before.use(NONCES[2], 20.0, 0.0) is True
    with file.open("a") as torn:
        torn.write(NONCES[3][:8])  # and then the server was killed
    after = UsedPasses(9, file, 15.0)
    assert [after.use(each, 30.0, 15.0) for each in NONCES[:4]] == [True, False, False, True]


def test_a_flood_of_passes_does_not_make_each_of_them_rewrite_the_file(tmp_path, monkeypatch):
    written: list[int] = []
    monkeypatch.setattr("inspector.wire.passes.write_whole", lambda path, content: written.append(len(content)))
    used = UsedPasses(3, tmp_path / "passes", 0.0)
    for number in range(400):  # ten a second, each valid for a second
        used.use(f"{number:032x}", number / 10 + 1.0, number / 10)
    assert len(written) <= 1 + 4


def test_a_pass_that_cannot_be_noted_does_not_count(tmp_path, monkeypatch):
    used = UsedPasses(3, tmp_path / "passes", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space left")))
        with pytest.raises(OSError, match="no space"):
            used.use(NONCES[0], 10.0, 0.0)
    assert used.use(NONCES[0], 10.0, 0.0) is True
