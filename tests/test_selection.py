"""Which tests run: all of a named file, all with ``--whole``, and otherwise a part of what takes long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import BUDGET, LONG, Clock, chosen, pytest_collection_modifyitems, read_durations

LIES, MODELS = ("a", "b", "c", "d", "e", "f", "g", "h"), ("x", "y", "z")


def members(function="tests/test_file.py::test_it", *marks):
    """Items as pytest collects them."""
    return [
        SimpleNamespace(
            nodeid=f"{function}[{lie}-{model}]",
            callspec=SimpleNamespace(params={"lie": lie, "model": model}),
            iter_markers=lambda name: marks,
        )
        for lie in LIES
        for model in MODELS
    ]


def lies_of(names):
    return [name.partition("[")[2].partition("-")[0] for name in sorted(names)]


def test_each_value_that_is_named_runs_once():
    items = members("tests/test_file.py::test_it", pytest.mark.sampled("lie").mark)
    kept = chosen(items, {"tests/test_file.py::test_it": (24, 12.0)})
    assert lies_of(kept) == list(LIES)
    assert len({name.partition("-")[2] for name in kept}) == len(MODELS)
    assert chosen(items, {}) == kept


def test_of_what_takes_long_as_many_members_run_as_fit():
    items = members()
    for seconds, count in ((BUDGET, 24), (4 * BUDGET, 6), (24 * LONG, 1)):
        assert len(chosen(items, {"tests/test_file.py::test_it": (24, seconds)})) == count
    assert len(chosen(items, {})) == len(items)


def test_what_takes_long_is_drawn_the_less_often_the_longer_it_takes():
    names = [f"tests/test_file.py::test_{number}" for number in range(400)]
    items = [SimpleNamespace(nodeid=name, iter_markers=lambda name: ()) for name in names]
    counts = [len(chosen(items, dict.fromkeys(names, (1, times * LONG)))) for times in (1, 2, 10)]
    assert counts[0] == 400
    assert 160 < counts[1] < 240
    assert 20 < counts[2] < 70


@pytest.mark.parametrize(
    ("args", "whole", "count"),
    [
        (["tests"], False, 1),
        (["tests"], True, 24),
        (["tests/test_long.py"], False, 24),
        (["tests/test_long.py::test_it[a-x]"], False, 24),  # pytest has taken out the others
        (["tests/test_other.py"], False, 1),
    ],
)
def test_all_run_that_are_asked_for(monkeypatch, args, whole, count):
    name = "tests/test_long.py::test_it"
    monkeypatch.setattr("tests.selection.read_durations", lambda: {name: (24, 24 * LONG)})
    items, gone = members(name), []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    for item in items:
        item.path = Path("/anywhere/tests/test_long.py")
    config: Any = SimpleNamespace(getoption=lambda name: whole, args=args, hook=hook)
    pytest_collection_modifyitems(config, items)
    assert (len(items), len(gone)) == (count, 24 - count)


def test_the_list_holds_what_took_long(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.selection.DURATIONS", tmp_path / "durations.json")
    clock = Clock()
    for name, seconds in (("t.py::long[a]", 3.0), ("t.py::long[b]", 4.0), ("t.py::short", 0.1)):
        for when, part in (("setup", 0.25), ("call", 0.5), ("teardown", 0.25)):
            report: Any = SimpleNamespace(nodeid=name, duration=part * seconds, when=when, outcome="passed")
            clock.pytest_runtest_logreport(report)
    clock.pytest_sessionfinish()
    assert read_durations() == {"t.py::long": (2, 7.0)}
