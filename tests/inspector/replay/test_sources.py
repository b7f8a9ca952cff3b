"""A program's digest: equal for equal sources, and another after any change that a process could have loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inspector.replay.sources import program_digest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("monitor/deep/one.py", "inspector/two.py", "analysis/data/rows.json", "monitor/schema.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_the_place_of_the_sources_does_not_matter(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "root"
    root.rename(other)
    before = program_digest(other)
    other.rename(root)
    assert program_digest(root) == before != program_digest()


@pytest.mark.parametrize("name", ["monitor/deep/one.py", "inspector/two.py", "monitor/schema.json", "analysis/new.py"])
def test_any_change_of_a_source_is_another_program(root, name):
    before = program_digest(root)
    (root / name).write_text("changed")
    assert program_digest(root) != before


def test_a_source_that_goes_or_moves_is_another_program(root):
    seen = {program_digest(root)}
    (root / "inspector/two.py").rename(root / "inspector/three.py")
    seen.add(program_digest(root))
    (root / "inspector/three.py").unlink()
    seen.add(program_digest(root))
    assert len(seen) == 3


def test_measurements_and_compiled_files_are_no_sources(root):
    before = program_digest(root)
    (root / "analysis/data/rows.json").write_text("[]")
    (root / "monitor/deep/one.pyc").write_text("")
    (root / "README.md").write_text("")
    assert program_digest(root) == before


def test_another_release_beside_it_is_another_program(root, tmp_path_factory, monkeypatch):
    before = program_digest(root)
    place = tmp_path_factory.mktemp("site")
    (place / "torch-99.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    assert program_digest(root) != before
