"""The notebook runs from top to bottom, and what it shows is what the code says now."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import nbformat
import pytest

import analysis

STORY = Path(analysis.__file__).with_name("story.ipynb")
NUMBER = re.compile(r" *\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def values(text: str) -> list[float]:
    """The numbers of a printed text."""
    return [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell printed on standard output."""
    return [
        "".join(output.text for output in cell.get("outputs", ()) if output.get("name") == "stdout")
        for cell in notebook.cells
    ]


def test_story_runs_and_its_numbers_are_current() -> None:
    with warnings.catch_warnings():
        # The kernel's own libraries warn about themselves.
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient
        from nbclient.exceptions import DeadKernelError

        stored = nbformat.read(STORY, as_version=4)
        notebook = nbformat.read(STORY, as_version=4)
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": "."}})
        try:
            client.execute()
        except (DeadKernelError, RuntimeError, OSError) as error:
            pytest.fail(f"the Jupyter kernel did not run: {error}")
    for now, then in zip(printed(notebook), printed(stored), strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", then)
        # The planner may round a sample up elsewhere with another solver; nothing else may move.
        assert values(now) == pytest.approx(values(then), rel=0.02, abs=0.5)
    figures = sum(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert figures >= 7


def test_story_names_no_place_on_a_machine() -> None:
    text = STORY.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "/root/" not in text
    assert "/tmp/" not in text


def test_story_promises_what_the_planner_does() -> None:
    """Only work beyond H incriminates, so a plan for H = 1e26 catches runs of 2e26; ``plan`` says so too."""
    notebook = nbformat.read(STORY, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "problem = Problem(" in cell.source]
    assert "flop=1e26" in cell.source
    assert any("a run of 2e+26 FLOP or more:" in text for text in printed(notebook))
    assert "no run of 1e26 FLOP unnoticed" not in STORY.read_text(encoding="utf-8")
