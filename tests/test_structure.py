"""The four floors: an import never points up, and nothing else lies at the top."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("firmware_sim", "monitor", "inspector", "analysis")
TOP = {*FLOORS, "tests", "pyproject.toml", "README.md", "constraints.txt", "LICENSE"}


def imported(source: str) -> set[str]:
    """First names of all absolute imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("number", range(len(FLOORS)), ids=FLOORS)
def test_imports_never_point_up(number):
    above = set(FLOORS[number + 1 :]) | {"tests"}
    files = sorted((ROOT / FLOORS[number]).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path.read_text(encoding="utf-8")) & above, path


def test_nothing_else_lies_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP


def test_evidence_is_never_unpickled():
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            assert not imported(source) & {"pickle", "dill", "joblib", "marshal", "shelve"}, path
            assert "torch.load(" not in source, path


@pytest.mark.parametrize("name", FLOORS)
def test_public_names_exist(name):
    package = __import__(name)
    if name != "analysis":
        assert package.__all__
        for public in package.__all__:
            getattr(package, public)
