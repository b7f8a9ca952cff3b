"""Where figures come from: the machine and the commit that a measurement names."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from analysis.bench import origin
from monitor import environment


def test_hardware_is_named() -> None:
    found = origin.hardware()
    assert {"processor", "cores", "torch", "numpy", "numba", "python"} <= set(found)
    assert all(found.values())


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_a_checkout_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "origin.py"
    monkeypatch.setattr(origin, "__file__", str(module))
    monkeypatch.setattr(origin, "DATA", tmp_path / "data")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert origin.commit() == {}

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    module.touch()
    assert origin.commit() == {}
    git("add", ".")
    git("commit", "-m", "first")
    name = git("rev-parse", "--short", "HEAD")
    origin.DATA.mkdir()
    (origin.DATA / "table.json").touch()
    assert origin.commit() == {"commit": name}
    module.write_text("changed")
    assert origin.commit() == {"commit": f"{name}+"}


def test_generations_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n"

    def named(family: int) -> str:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text.format(family))
        return environment.processor()

    assert named(25) == "AMD EPYC, family 25, model 2"
    assert named(26) == "AMD EPYC, family 26, model 2"


def test_rows_of_another_machine_keep_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, here = tmp_path / "rows.json", {"processor": "first"}
    monkeypatch.setattr(origin, "hardware", lambda: here)
    origin.write_among([{"work": "a", "value": 1}, {"work": "b", "value": 1}], path)
    here = {"processor": "second"}
    for value in (2, 3):
        origin.write_among([{"work": "b", "value": value}], path)
    document = json.loads(path.read_text())
    assert document["hardware"] == {"processor": "second"}
    assert [row.get("hardware") for row in document["rows"]] == [{"processor": "first"}, None]
    assert [row["value"] for row in document["rows"]] == [1, 3]
