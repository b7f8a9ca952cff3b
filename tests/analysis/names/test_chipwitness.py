"""The public names: each is there, under one module name, loaded when it is used, with a type."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

chipwitness: Any = importlib.import_module("chipwitness")
FOLDER = Path(chipwitness.__file__).parent
ROOT = FOLDER.parents[2]


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these folders first on its path."""
    words = [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {[str(each) for each in folders]!r}; {code}"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_every_public_name_is_there():
    assert sorted(chipwitness.__all__) == sorted(
        name for names in chipwitness._HOMES.values() for name in names.split()
    )
    for name in chipwitness.__all__:
        assert getattr(chipwitness, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = chipwitness.nothing


def test_the_stub_names_the_same_things_from_the_same_places():
    stub = ast.parse((FOLDER / "__init__.pyi").read_text())
    typed = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {name: home for home, names in chipwitness._HOMES.items() for name in names.split()}


def test_importing_it_loads_nothing_large():
    done = run(
        "import chipwitness; print(sorted({'torch', 'numpy', 'monitor'} & set(sys.modules)))", FOLDER.parent, ROOT
    )
    assert done.stdout == "[]\n", done.stderr


def test_it_has_one_name():
    with pytest.raises(ImportError, match="is called chipwitness, not analysis"):
        importlib.import_module("analysis.names.chipwitness")


@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_module_of_the_users_under_one_of_our_names_is_one_clear_line(tmp_path, kind):
    (tmp_path / "monitor").mkdir()
    file = tmp_path / ("monitor.py" if kind == "file" else "monitor/__init__.py")
    file.write_text("")
    done = run("import chipwitness", tmp_path, FOLDER.parent, ROOT)
    (last,) = done.stderr.splitlines()[-1:]
    assert last.startswith("ImportError: chipwitness has a package 'monitor', but Python finds ")
    assert str(file) in last
    assert done.returncode == 1
