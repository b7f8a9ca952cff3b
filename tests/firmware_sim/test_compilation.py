"""The cache of compiled functions: a process finds the code of the very function that it asks for, or compiles it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firmware_sim import compilation

_ELEMENTWISE = """
import json, sys
import numpy as np
from monitor.numerics.engines.cpu.fused.elementwise_kernels import FRESH

x, a, out = np.full(4, 3.0, np.float32), np.full(4, 2.0, np.float32), np.zeros(4, np.float32)
print("ready", flush=True)
sys.stdin.readline()
found = {}
for name in sys.argv[1:]:
    FRESH[name](0, 4, x.ctypes.data, a.ctypes.data, 0, 8.0, out.ctypes.data)
    found[name] = (float(out[0]), sum(FRESH[name].stats.cache_hits.values()))
print(json.dumps(found))
"""
_AMOUNT: Any = 1
_RESULTS = {"add": 5.0, "mul": 6.0, "mul_constant": 24.0, "add_constant": 11.0}


def _start(folder: Path, names: list[str]) -> subprocess.Popen[str]:
    environment = {"PATH": "", "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _ELEMENTWISE, *names]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def _results(processes: list[subprocess.Popen[str]]) -> list[dict[str, list[float]]]:
    for each in processes:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in processes:  # they compile at the same time
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [json.loads(each.communicate()[0]) for each in processes]


def test_processes_that_compile_at_once_keep_each_kernel_apart(tmp_path: Path) -> None:
    """With numba's index, a kernel got the code of another now and then: wrong numbers, or SIGSEGV."""
    names = list(_RESULTS)
    orders = [names[turn:] + names[:turn] for turn in (0, 1, 2)]
    for found in _results([_start(tmp_path, order) for order in orders]):
        assert {name: value for name, (value, _) in found.items()} == _RESULTS
    [later] = _results([_start(tmp_path, names)])
    assert later == {name: [value, 1] for name, value in _RESULTS.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of compiled functions."""
    place = tmp_path / "compiled"
    place.mkdir()
    monkeypatch.setattr(compilation, "_folder", lambda: str(place))
    return place


def _plus(amount: int) -> Any:
    def plus(x: Any) -> Any:
        return x + amount

    return compilation.compiled(plus)


def _times(x: Any) -> Any:
    return x * _AMOUNT


def _is_read(function: Any, *arguments: Any) -> tuple[Any, bool]:
    """What a compiled function returns, and whether its code was read from the cache."""
    return function(*arguments), bool(sum(function.stats.cache_hits.values()))


def test_forms_differ_by_types_and_by_what_the_closure_holds(folder: Path) -> None:
    assert _is_read(_plus(1), 1) == (2, False)
    assert _is_read(_plus(2), 1) == (3, False)
    assert _is_read(_plus(1), 1.5) == (2.5, False)
    assert len(os.listdir(folder)) == 3
    assert _is_read(_plus(2), 1) == (3, True)
    assert _is_read(_plus(1), 1) == (2, True)


@pytest.mark.parametrize("damage", ["cut", "altered", "empty", "of another"])
def test_b25_a_file_that_is_not_as_it_was_written_is_compiled_anew(folder: Path, damage: str) -> None:
    assert _is_read(_plus(1), 1) == (2, False)
    [kept] = folder.iterdir()
    content = kept.read_bytes()
    if damage == "of another":
        kept.rename(folder / "moved")
        assert _is_read(_plus(2), 1) == (3, False)
        [other] = set(folder.iterdir()) - {folder / "moved"}
        other.rename(kept)
    else:
        altered = content[:-1] + bytes([content[-1] ^ 1])
        kept.write_bytes({"cut": content[:-1], "altered": altered, "empty": b""}[damage])
    assert _is_read(_plus(1), 1) == (2, False)
    assert _is_read(_plus(1), 1) == (2, True)


def test_a_folder_that_is_gone_costs_only_time(folder: Path) -> None:
    function = _plus(1)
    folder.rmdir()
    assert _is_read(function, 1) == (2, False)
    assert not folder.exists()


def test_a_constant_of_the_module_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for amount, found in ((1, False), (2, False), (2, True), (np.float32(2), False), (np.array([2, 3]), False)):
        monkeypatch.setattr(sys.modules[__name__], "_AMOUNT", amount)
        result, is_read = _is_read(compilation.compiled(_times), 3)
        assert (np.max(result), is_read) == (3 * np.max(amount), found)


def test_a_change_of_a_helper_or_of_an_option_is_seen(folder: Path, tmp_path: Path) -> None:
    def function(helper: str, **options: Any) -> Any:
        (tmp_path / "helper.py").write_text(
            f"from firmware_sim.compilation import compiled\n\n@compiled\ndef part(x):\n    return {helper}\n"
        )
        compilation._text.cache_clear()
        modules = []
        for name in ("helper", "whole"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            modules.append(importlib.util.module_from_spec(spec))
            modules[-1].__dict__.update({"part": getattr(modules[0], "part", None)})
            spec.loader.exec_module(modules[-1])
        return compilation.compiled(modules[-1].whole, **options)

    (tmp_path / "whole.py").write_text("def whole(x):\n    return part(x)\n")
    assert _is_read(function("x + 1"), 1) == (2, False)
    assert _is_read(function("x + 1"), 1) == (2, True)
    assert _is_read(function("x + 1", error_model="numpy"), 1) == (2, False)
    assert _is_read(function("x + 20"), 1) == (21, False)  # of another size, which Python's own cache sees


def test_functions_on_one_line_are_two(folder: Path) -> None:
    one, two = compilation.compiled(lambda x: x + 1), compilation.compiled(lambda x: x + 2)
    assert [_is_read(one, 1), _is_read(two, 1)] == [(2, False), (3, False)]


_FACTORY = """
import sys
import numpy as np
from firmware_sim.compilation import compiled

def make(which):
    def kernel(n):
        out = np.empty(n, np.int32) if which == 0 else np.empty(n, np.float32)
        for i in range(n):
            out[i] = 1
        return out
    return compiled(kernel)

def helper(which):
    def part(x):
        return x + which
    return compiled(part)

h0, h100 = helper(0), helper(100)

@compiled
def k0(x):
    return h0(x) + 0.0

@compiled
def k100(x):
    return h100(x) + 0.0

call = {"int": lambda: make(0)(2)[0], "float": lambda: make(1)(2)[0], "k0": lambda: k0(2), "k100": lambda: k100(2)}
print(*(call[name]() for name in sys.argv[1:]))
"""


@pytest.mark.parametrize(("names", "values"), [(("int", "float"), "1 1.0"), (("k0", "k100"), "2.0 102.0")])
def test_forms_of_different_processes_do_not_share_symbols(tmp_path: Path, names: tuple[str, str], values: str) -> None:
    """Numba numbers symbols by the order in which a process compiles: two files held different code of one name."""
    script = tmp_path / "factory.py"
    script.write_text(_FACTORY)
    root = str(Path(compilation.__file__).parents[1])
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": root}
    found = []
    for words in (*((name,) for name in names), names):
        command = [sys.executable, str(script), *words]
        found.append(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        )
    assert found == [*([value] for value in values.split()), values.split()]


def test_a_helper_without_a_source_file_costs_only_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec("def part(x):\n    return x + 40\n", scope)
    helper = compilation.compiled(scope["part"])

    def whole(x: Any) -> Any:
        return _AMOUNT(x)

    monkeypatch.setitem(globals(), "_AMOUNT", helper)
    assert _is_read(compilation.compiled(whole), 2) == (42, False)
    assert not list(folder.iterdir())
