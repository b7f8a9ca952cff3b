"""How old measurements are, of files whose age is known."""

from __future__ import annotations

import json

import pytest

from analysis.bench import status
from analysis.bench.origin import FORMATS, commit
from firmware_sim import CallerError


def written(folder, name: str, **document: object) -> None:
    """A file of measurements."""
    (folder / name).write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of measurements, in place of the committed ones."""
    monkeypatch.setattr(status, "_FOLDERS", [tmp_path])
    return tmp_path


def test_a_file_says_what_it_noted(folder):
    written(folder, "old.json", formats=["chipwitness/run/1"], hardware={"processor": "P"}, commit="0" * 40, rows=[])
    written(folder, "new.json", formats=FORMATS, rows=[{"commit": "f" * 40}, {"commit": "e" * 40 + "+"}])
    written(folder, "none.json", rows=[{}])
    written(folder, "few.json", formats=FORMATS[:3], rows=[])
    written(folder, "game.json", formats=[*FORMATS[:3], "chipwitness/game/2"], rows=[])
    rows = {row["file"]: row for row in status.run()}
    assert [rows[f"{name}.json"]["formats"] for name in ("old", "new", "none", "few", "game")] == [
        "older",
        "current",
        "unnoted",
        "current",
        "older",
    ]
    assert rows["old.json"]["processor"] == "P"
    assert rows["new.json"]["commits"] == ["e" * 40, "f" * 40]
    assert all(row["changed"] is None for row in rows.values()), "no checkout has these commits"
    assert [line.split()[0] for line in status.table(list(rows.values()))[1:]] == list(rows)


def test_nothing_changed_since_this_commit(folder):
    if not (here := commit()):
        pytest.skip("not a git checkout")
    written(folder, "now.json", rows=[], **here)
    (row,) = status.run()
    assert row["changed"] == {}
    assert status.table([row])[1].endswith("nothing")


def test_an_unreadable_file_is_an_error(folder):
    (folder / "bad.json").write_text("{")
    with pytest.raises(CallerError, match=r"bad\.json holds no measurements"):
        status.run()


def test_every_committed_file_has_a_row(monkeypatch):
    monkeypatch.setattr(status, "_changed_by", lambda commit: {})  # git looks for moved files, in a second for each
    assert {row["file"] for row in status.run()} >= {"equality.json", "precision.json", "honest_logs.json"}
