"""What a command answers: ``--json`` prints its fields, and the help names each of them with what it means."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import pytest

from analysis.cli import main
from analysis.commands._answers import fields_of, keys_text

COMMANDS = (
    ("alarms", "--flop 2.56e24 --chips 1e5 --refusals 1e-4 --prior 0.05 --samples 3"),
    ("evidence site", ""),
    ("evidence split", "--trials 10"),
    ("evidence unmetered", ""),
    ("table", ""),
)


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        low, high: ends, over
            two lines.
    """

    low: float
    high: float
    plain: int


@dataclass(frozen=True)
class Whole:
    """A whole, whose parts are told once."""

    parts: Sequence[Part]
    other: Part | None


def test_help_tells_each_part_once():
    assert keys_text(Whole) == ("JSON keys: parts, other.\nEach of parts: low and high (ends, over two lines), plain.")
    assert fields_of(Part(1, 2, 3)) == {"low": 1, "high": 2, "plain": 3}
    with pytest.raises(TypeError):
        fields_of({"no": "answer"})


class Box(TypedDict):
    """A box.

    Attributes:
        inside: its one part, or None.
    """

    inside: Part | None


@dataclass(frozen=True)
class Boxes(Part):
    """Boxes by name, next to what a part has."""

    boxes: Mapping[str, Box]


def test_help_names_what_a_part_lies_in_and_takes_over_what_a_base_class_says():
    assert keys_text(Boxes).splitlines() == [
        "JSON keys: low and high (ends, over two lines), plain, boxes.",
        "Each of boxes: inside (its one part, or null).",
        "Keys of inside in boxes: low and high (ends, over two lines), plain.",
    ]


BY_NAME = ("found", "origins")
"""Keys of objects whose own keys are names that a scenario gives to its sources."""


def keys_in(value: object) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for name, each in value.items() if name not in BY_NAME for key in keys_in(each))}
    return {key for each in value for key in keys_in(each)} if isinstance(value, list) else set()


@pytest.mark.parametrize(("command", "options"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_help_names_what_json_prints(command, options, capsys):
    assert main([*command.split(), *shlex.split(options), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main([*command.split(), "--help-all"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    if command == "table":
        assert data.pop("chips")[0]["chip"]  # rows of a file of the program, under that file's keys
    assert not keys_in(data) - words
