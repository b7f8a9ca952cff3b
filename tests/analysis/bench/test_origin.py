"""Measurements that are made in parts, in one file."""

from __future__ import annotations

import json

import pytest

from analysis.bench.origin import commit, write, write_among
from firmware_sim import CallerError


def test_rows_of_other_works_stay_with_the_commit_that_they_were_made_at(tmp_path):
    path = tmp_path / "rows.json"
    write([{"work": "a", "seconds": 1.0}, {"work": "b", "seconds": 2.0}], path)
    old = {**json.loads(path.read_text()), "commit": "old"}
    path.write_text(json.dumps(old))
    write_among([{"work": "b", "seconds": 3.0}, {"work": "c", "seconds": 4.0}], path)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["work"], row["seconds"]) for row in rows] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    assert rows[0]["commit"] == "old"
    assert {row.get("commit") for row in rows[1:]} == {commit().get("commit")}


def test_another_file_is_not_written_over(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("[]")
    with pytest.raises(CallerError, match="holds no measurements"):
        write_among([{"work": "a"}], path)
    assert path.read_text() == "[]"
