"""``run stats``, ``fsck`` and ``storage``, as commands."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from analysis.cli import main
from firmware_sim.errors import CallerError
from tests.measurements import storage
from tests.measurements.__main__ import main as measure


@pytest.fixture(scope="module")
def run(tmp_path_factory, record) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    made = record(folder / "run", steps=4, chips=2, checkpoint_every=2, numerics="rounded", rate=Fraction(1))
    (folder / "run.trust.json").write_text(json.dumps(made.trust.to_json()))
    return made.run


def test_stats_count_every_byte_of_the_folder(run, capsys):
    assert main(["run", "stats", str(run), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert stats["bytes"] == sum(path.stat().st_size for path in files)
    assert stats["files"] == len(files)
    assert (stats["steps"], stats["finished"]) == (4, True)
    kinds = {kind["kind"]: kind for kind in stats["kinds"]}
    states = [path for path in files if path.parent.name == "checkpoints"]
    assert kinds["checkpoints"]["files"] == len(states) == 3
    assert kinds["checkpoints"]["bytes"] == sum(path.stat().st_size for path in states)
    assert kinds["leaves"]["bytes"] + kinds["entries"]["bytes"] == (run / "journal.tsv").stat().st_size
    assert 0 < stats["first"] < 2 * stats["last"] < 4 * stats["first"]
    assert main(["run", "stats", str(run)]) == 0
    assert "bytes a step without checkpoints" in capsys.readouterr().out


def test_fsck_exits_with_one_line_for_each_problem(run, capsys, tmp_path):
    assert main(["fsck", str(run)]) == 0
    assert "4 steps agree with each other" in capsys.readouterr().out
    assert main(["fsck", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    path = run / "data/salt.bin"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1])
        (run / "a\nb").write_bytes(b"")
        assert main(["fsck", str(run)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert "data/salt.bin has 31 bytes, not 32 as signed" in lines
        assert "ignored, unread: a\\nb" in lines
    finally:
        path.write_bytes(content)
        (run / "a\nb").unlink()


def test_commands_need_a_run_and_a_trust_file(run, capsys, tmp_path):
    for words in (["fsck"], ["run", "stats"]):
        assert main([*words, str(tmp_path / "nowhere"), "--trust", str(run) + ".trust.json"]) == 2
        assert main([*words, str(run), "--trust", str(tmp_path / "nothing.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_bench_storage_costs_the_same_at_the_end(tmp_path, capsys):
    """Bytes are exact; times of so short a run are only required to be there."""
    out = tmp_path / "storage.json"
    code = measure(["storage", "--leaves", "2000", "--steps", "20", "--json", "--out", str(out)])
    rows = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert [(row["work"], row["mode"]) for row in rows] == [
        ("leaves", "first 1000"), ("leaves", "last 1000"), ("leaves", "all"), ("leaves", "fsck"),
        ("training", "first 10"), ("training", "last 10"), ("training", "all"), ("training", "fsck"),
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["cpu_ms"] > 0 and row["bytes"] > 0 for row in rows)
    assert all(0.9 < row["bytes_ratio"] < 1.1 for row in rows if row["mode"].startswith("last"))
    document = json.loads(out.read_text())
    assert document["rows"] == rows
    assert document["hardware"]["cores"] >= 1


def test_growth_is_named():
    row = {"work": "leaves", "mode": "last 10", "ratio": 1.0, "bytes_ratio": 1.6}
    assert storage.verdict([{**row, "bytes_ratio": 1.4}]) is None
    assert storage.verdict([row]) == "leaves: the last 10 steps take 1.60 times the bytes of the first"
    assert storage.verdict([{**row, "bytes_ratio": 1.0, "ratio": 2.0}]) is not None
    with pytest.raises(CallerError, match="fewest"):
        storage.run(leaves=1, steps=10)
