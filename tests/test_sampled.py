"""Of the members of a sampled test one runs for each value of the named parameters, and with ``--whole`` all do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems

LIES, MODELS = ("a", "b", "c", "d", "e", "f", "g", "h"), ("x", "y", "z")


def member(lie, model, *marks):
    """An item as pytest collects it."""
    return SimpleNamespace(
        nodeid=f"test_file.py::test_it[{lie}-{model}]",
        callspec=SimpleNamespace(params={"lie": lie, "model": model}),
        iter_markers=lambda name: marks,
    )


def kept(*marks, args=("tests",), whole=False):
    """What is run, and how many members are reported as left out."""
    items = [member(lie, model, *marks) for lie in LIES for model in MODELS]
    gone = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: whole, args=args, hook=hook), items)
    return [(each.callspec.params["lie"], each.callspec.params["model"]) for each in items], len(gone)


def test_each_value_runs_once_and_the_others_are_drawn():
    items, gone = kept(pytest.mark.sampled("lie").mark)
    assert [lie for lie, _ in items] == list(LIES)
    assert {model for _, model in items} == set(MODELS)
    assert gone == len(LIES) * (len(MODELS) - 1)
    assert kept(pytest.mark.sampled("lie").mark)[0] == items


def test_without_a_name_one_member_runs():
    assert len(kept(pytest.mark.sampled().mark)[0]) == 1


@pytest.mark.parametrize("options", [{"whole": True}, {"args": ("test_file.py::test_it[a-x]",)}])
def test_all_run_that_are_asked_for(options):
    assert kept(pytest.mark.sampled("lie").mark, **options) == ([(a, b) for a in LIES for b in MODELS], 0)


def test_what_is_not_sampled_runs():
    assert len(kept()[0]) == len(LIES) * len(MODELS)
