"""A dishonest chip departs from firmware at documented hooks alone, and no host reaches these."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from firmware_sim import CHIP_LIES, FirmwareChip
from firmware_sim.hooks import Hooks

ROOT = Path(__file__).parents[2]
PARTS = [ROOT / "firmware_sim" / f"{name}.py" for name in ("_power", "_clock", "_log", "_snapshots", "firmware")]
INSTRUMENTS = {"Drawn"}
"""Notes the snapshots of honest firmware for `python -m tests.measurements interference`, and tells no lie."""


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]


def private_names(node: ast.AST) -> set[str]:
    """Names with one underscore that a class defines, or reaches for in anything."""
    used = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    used |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
    return {name for name in used if name.startswith("_") and not name.startswith("__")}


def derived(nodes: list[ast.ClassDef], kinds: set[str]) -> list[ast.ClassDef]:
    """Those that derive from one of these classes, or from one that does, by their names."""
    while (
        found := {node.name for node in nodes if {ast.unparse(base).rpartition(".")[2] for base in node.bases} & kinds}
        - kinds
    ):
        kinds |= found
    return [node for node in nodes if {ast.unparse(base).rpartition(".")[2] for base in node.bases} & kinds]


def test_no_chip_or_hook_touches_what_firmware_keeps_to_itself():
    parts = [node for path in PARTS for node in classes(path)]
    kept = {name for node in parts for name in private_names(node)}
    assert {"_moments", "_freeze", "_silicon", "_close_epoch"} <= kept
    folders = ("firmware_sim", "monitor", "inspector", "analysis", "tests")
    others = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path not in PARTS]
    chips = derived([node for path in others for node in classes(path)], {node.name for node in parts} | {"Hooks"})
    assert len(chips) > len(CHIP_LIES)
    assert {node.name: private_names(node) & kept for node in chips if private_names(node) & kept}.keys() <= INSTRUMENTS


@pytest.mark.parametrize("name", [name for name in vars(Hooks) if not name.startswith("_")])
def test_each_hook_says_when_it_is_called_and_what_honesty_is(name):
    said = inspect.getdoc(getattr(Hooks, name))
    assert said is not None
    assert said.startswith("Called ")
    assert "onest" in said


def test_no_host_hands_a_chip_its_hooks(world):
    class Evil(Hooks):
        """Takes no snapshots."""

    with pytest.raises(TypeError, match="hooks"):
        world.make(hooks=Evil)
    world.make().cut_power()
    with pytest.raises(TypeError, match="hooks"):
        FirmwareChip.power_on(world.folder / "chip-1", hooks=Evil)  # type: ignore[call-arg]
