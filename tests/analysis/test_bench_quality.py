"""The criterion of training quality: on the committed losses, on a short run, and on losses made to fail it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import analysis
from analysis.bench import quality
from analysis.cli import main
from firmware_sim.errors import CallerError
from inspector.replay.curve import CONTROL, CONTROL_BITS, run_curve, shorten

DATA = Path(analysis.__file__).parent / "data" / "quality.json"


def by_column(judged, work):
    return {(row["mode"], row["device"]): row for row in judged if row["work"] == work}


@pytest.fixture(scope="module")
def committed():
    document = quality.load(DATA)
    assert {"processor", "cores", "torch"} <= set(document["hardware"])
    return quality.judge(document["rows"])


@pytest.mark.parametrize("work", quality.PRESETS)
def test_controlled_numerics_pass_and_the_control_is_detected_early(committed, work):
    rows = by_column(committed, work)
    assert set(rows) == set(quality.COLUMNS)
    assert all((row["steps"], row["seeds"]) == (300, 5) for row in rows.values())
    for mode in quality.JUDGED:
        assert rows[mode, "native-1"]["passes"]
        assert rows[mode, "native-1"]["passes_early"]
        assert rows[mode, "native-1"]["gap"] > 0
    assert rows["native", "avx2"]["passes_early"]
    control = rows[CONTROL, "native-1"]
    assert not control["passes_early"]
    assert control["early_ratio"] > 20
    assert quality.verdict(committed) is None


def test_models_learn(committed):
    """The gaps are small beside what was learned: first loss about ln 256 and ln 10."""
    for work, first in (("tiny-gpt", np.log(256)), ("digits-cnn", np.log(10))):
        assert all(row["loss"] < 0.6 * first for row in by_column(committed, work).values())


def test_a_short_run_end_to_end(tmp_path, capsys):
    out = tmp_path / "quality.json"
    words = ["bench", "quality", "--preset", "digits-cnn", "--steps", "8", "--seeds", "1", "--out", str(out), "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["mode"], row["device"]) for row in rows} == set(quality.COLUMNS)
    stored = quality.load(out)["rows"]
    curves = {(row["mode"], row["device"]): row["losses"] for row in stored}
    assert all(
        np.float32(loss) == loss or abs(np.float32(loss) - loss) < 1e-9 * loss for loss in curves["native", "sse41"]
    )
    assert len({tuple(losses) for losses in curves.values()}) >= 3
    control = by_column(rows, "digits-cnn")[CONTROL, "native-1"]
    assert not control["passes_early"]
    before = out.read_bytes()
    assert main(words) == 0  # nothing is trained again
    assert json.loads(capsys.readouterr().out) == rows
    assert quality.load(out)["rows"] == json.loads(before)["rows"]


def made(gap: float, early: float, family: float = 1e-5):
    """Rows in which exact numerics end ``gap`` and begin ``early`` from native, and families are ``family`` apart."""
    rows = []
    for mode, name in quality.COLUMNS:
        losses = np.linspace(2, 1, 300)
        if (mode, name) == ("exact", "native-1"):
            losses[-50:] += gap
            losses[:20] += early
        elif (mode, name) != quality.REFERENCE:
            losses = losses + family
        losses = losses.tolist()
        rows.append(
            {"work": "w", "mode": mode, "device": name, "steps": 300, "seed": 0, "losses": losses, "seconds": 1}
        )
    return rows


@pytest.mark.parametrize(
    ("gap", "early", "family", "reason"),
    [
        (0.0, 0.0, 1e-5, None),
        (0.99e-4, 0.0, 1e-5, None),
        (1.01e-4, 0.0, 1e-5, "exact: gap 1.01e-04 is above the threshold 1.00e-04"),
        (2.9e-3, 0.0, 1e-3, None),
        (3.1e-3, 0.0, 1e-3, "exact: gap 3.10e-03 is above the threshold 3.00e-03"),
        (0.0, 2.9e-5, 1e-5, None),
        (0.0, 0.9e-6, 1e-8, None),
        (0.0, 1.1e-6, 1e-8, "exact: early gap 1.10e-06 is above its threshold"),
        (0.0, 3.1e-5, 1e-5, "exact: early gap 3.10e-05 is above its threshold"),
    ],
)
def test_thresholds(gap, early, family, reason):
    found = quality.verdict(quality.judge(made(gap, early, family)))
    assert found == (None if reason is None else f"w, {reason}")


def test_a_missing_run_is_no_table():
    rows = made(0.0, 0.0)
    with pytest.raises(CallerError, match="w lacks runs"):
        quality.judge(rows[:-1])
    with pytest.raises(CallerError, match="w lacks runs"):
        quality.judge([*rows, {**rows[0], "seed": 1}])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--preset", "huge"), "unknown preset 'huge'"),
        (("--steps", "1"), "--steps must be at least 2"),
        (("--seeds", "0"), "--seeds at least 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, words, text):
    assert main(["bench", "quality", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}', '{"hardware": {}, "rows": [7]}'])
def test_a_file_of_another_form_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(CallerError):
        quality.load(path)


def test_shortening_rounds_to_nearest_even_with_eleven_bits():
    """Against FP16, which has as many significant bits, within its normal range."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    x = x[x.abs() > 2.0**-14]
    assert torch.equal(shorten(x), x.half().float())
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), 0.0, 1e30])
    assert shorten(ties)[:4].tolist() == [1.0, 1 + 2.0**-9, -1.0, 0.0]
    assert abs(shorten(ties)[4].item() / 1e30 - 1) <= 2.0**-CONTROL_BITS


def test_the_control_alters_operands_of_products_and_nothing_else():
    job = {"preset": "digits-cnn", "steps": 1, "seed": 3}
    native, short = (run_curve({**job, "mode": mode})["losses"][0] for mode in ("native", CONTROL))
    assert native != short
    assert abs(native - short) < 1e-2
