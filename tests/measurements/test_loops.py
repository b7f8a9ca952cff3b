"""Loops of many kinds: recorded and equal on devices that differ, or refused with the line to write instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from analysis.bench.origin import DATA
from firmware_sim.errors import CallerError
from tests.measurements import loops
from tests.measurements._library_cases import library_cases
from tests.measurements._loop_cases import plain_cases

pytestmark = pytest.mark.usefixtures("kept_devices")

CASES = (
    "convolution 3-D",
    "GRU, batch first",
    "LSTM, batch first",
    "weight norm",
    "upsampling, bilinear",
    "loss: connectionist temporal",
    "embedding bag, mean",
    "relative positions in buckets",
    "mixture of experts",
    "adversarial, two optimizers",
    "averaged weights (EMA)",
    "inference without an optimizer",
)
NAMED = (
    *("AdamW, fused", "NAdam", "Adafactor", "Lion of one's own, counting in Python", "histogram of activations"),
    *("smallest and largest", "transformer encoder, evaluated", "averaged weights (SWA)", "unfreezing in mid-run"),
    *("annealed weight of a loss", "evaluation between training steps", "torch.compile", "module.compile"),
    *("GRU, two layers, both ways", "loss: contrast", "upsampling, nearest"),
)
ARCHITECTURES = ("Mixtral", "OLMoE", "Mamba", "T5", "BART", "ViT", "Swin", "Whisper", "wav2vec 2.0", "BLOOM")


@pytest.mark.filterwarnings("default")
def test_loops_are_recorded_and_equal_on_devices_that_differ() -> None:
    rows = loops.run(cases=CASES)
    assert [row["work"] for row in rows] == list(CASES)
    for row in rows:
        assert (row["recorded"], row["equal"], row["outcome"]) == (True, True, "ACCEPT"), row
    assert loops.verdict(rows) is None
    assert loops.table(rows)[-1].startswith("12 of 12 recorded and equal on sse41 and mkl-compatible")


@pytest.mark.filterwarnings("default")
def test_loop_that_is_refused_says_what_to_write_instead() -> None:
    (row,) = loops.run(cases=["another parameter group in mid-run"])
    assert (row["recorded"], row["equal"], row["outcome"]) == (False, None, None)
    assert "requires_grad_(False)" in row["refusals"][0]["remedy"]
    assert loops.verdict([{**row, "refusals": []}]) is not None
    assert loops.verdict([{**row, "recorded": True, "equal": False}]) is not None


def test_wrong_arguments_are_named() -> None:
    for options in ({"cases": ["absent"]}, {"seeds": 0}, {"sizes": [0]}):
        with pytest.raises(CallerError):
            loops.run(**options)


def test_committed_table_has_every_case_and_none_unequal() -> None:
    """At least nine cases of ten, and all that were asked for by name, are recorded and equal."""
    document = json.loads((DATA / "loops.json").read_text(encoding="utf-8"))
    rows = document["rows"]
    known = {case.name for case in loops.all_cases()} | {row["work"] for row in rows if row["package"] != "torch"}
    assert known == {row["work"] for row in rows}
    assert loops.verdict(rows) is None
    equal = {row["work"] for row in rows if row["equal"]}
    assert len(equal) >= 0.9 * len(rows)
    assert {*CASES, *NAMED, *ARCHITECTURES} <= equal
    assert sum(row["package"] == "transformers" and bool(row["equal"]) for row in rows) >= 20
    assert sum(row["package"] == "timm" and bool(row["equal"]) for row in rows) >= 10
    assert not [row for row in rows if row["outcome"] == "REJECT"]
    assert document["commit"]
    assert document["hardware"]


def test_most_used_loops_are_equal_with_three_seeds_and_four_batch_sizes() -> None:
    document = json.loads((DATA / "loops_most_used.json").read_text(encoding="utf-8"))
    rows = document["rows"]
    kinds = {(row["seed"], row["batch_size"]) for row in rows}
    assert kinds == {(seed, size) for seed in range(3) for size in (1, 7, 50, 100)}
    assert len(rows) == len({row["work"] for row in rows}) * len(kinds) == 12 * 12
    assert all(row["equal"] and row["outcome"] == "ACCEPT" for row in rows)


def test_library_cases_need_the_library() -> None:
    pytest.importorskip("transformers")
    assert len(list(library_cases())) >= 20


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_cases_of_a_library_that_is_absent_are_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def broken() -> Iterator[Any]:
        raise error("no such library\nand more")
        yield

    plain = [case.name for case in plain_cases()]
    monkeypatch.setattr(loops, "LIBRARIES", {"other": broken})
    assert [case.name for case in loops.all_cases()] == plain
    assert loops.absent() == {"other": "no such library"}
    rows = json.loads((DATA / "loops.json").read_text(encoding="utf-8"))["rows"]
    assert "left out: the cases of other (no such library)" in loops.table(rows)
    assert not any("left out" in line for line in loops.table(rows[:1]))
