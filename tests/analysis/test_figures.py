"""Figures: every format, reproducible, labelled, told apart without colour, and drawing the right numbers."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from analysis.report import figures
from analysis.report import style as style
from analysis.report.figures import EvasionBar, Mark, Origin
from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.timing import time_to_detection

BARS = [
    EvasionBar(name="as declared", value=0.9, low=0.88, high=0.92, closed_form=0.905),
    EvasionBar(name="hidden", value=0.5, low=0.45, high=0.55),
]

DRAWINGS: dict[str, Callable[..., None]] = {
    "detection": lambda target, **more: figures.detection_curve(target, chips=16, used=4, mark=6, **more),
    "stretch": figures.stretch_figure,
    "chips": lambda target, **more: figures.chips_figure(target, flops={"PaLM": 2.56e24, "GPT-3": 3.14e23}, **more),
    "rate": lambda target, **more: figures.rate_figure(target, flop=2.56e24, chips=1e5, **more),
    "time": lambda target, **more: figures.time_to_detection_figure(
        target, schemes={"monthly": time_to_detection(share=0.01, samples=20, days=365)}, run_days=365, **more
    ),
    "cost": lambda target, **more: figures.cost_figure(
        target, costs={"fleet": np.array([1.0, 2.0, 3.0])}, confidence=[0.5, 0.9, 0.99], **more
    ),
    "evasion": lambda target, **more: figures.evasion_figure(target, estimates=BARS, confidence=0.9, **more),
    "leakage": lambda target, **more: figures.leakage_figure(
        target, months=[0, 1, 2], unseen={"1 chip": [1, 0.9, 0.81]}, **more
    ),
    "sensitivity": lambda target, **more: figures.sensitivity_figure(
        target, rows=[("flop", 2.0, 0.5), ("chips", math.nan, 2.0)], **more
    ),
}


def axes() -> Axes:
    return Figure().add_subplot()


@pytest.mark.sampled("name")
@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_format_says_what_made_it_and_is_reproducible(tmp_path: Path, name: str, kind: str) -> None:
    files = [tmp_path / f"{number}.{kind}" for number in range(2)]
    for file in files:
        DRAWINGS[name](file, origin=Origin(command="chipwitness example", seed=1234))
    first, second = (file.read_bytes() for file in files)
    assert first == second
    about = "command: chipwitness example; seed: 1234"
    if kind == "png":
        with Image.open(files[0]) as image:
            assert image.info["Description"] == about
            assert image.info["Software"] == "chipwitness"
            assert len(set(image.convert("L").resize((200, 120)).tobytes())) > 10
    else:
        assert about.encode() in first


@pytest.mark.parametrize("name", DRAWINGS)
def test_both_axes_are_labelled(name: str) -> None:
    drawn = axes()
    DRAWINGS[name](drawn)
    assert drawn.get_xlabel()
    assert drawn.get_ylabel() or name in ("evasion", "sensitivity")
    assert drawn.get_legend() is not None


def test_lines_are_told_apart_without_colour() -> None:
    for one, other in itertools.combinations(style.LINES, 2):
        assert one["linestyle"] != other["linestyle"]
        assert one["marker"] != other["marker"]
    assert len(set(style.HATCHES)) == len(style.HATCHES)


def test_no_two_lines_of_a_figure_look_alike() -> None:
    looks = {(str(look["linestyle"]), look["marker"]) for look in map(style.line, range(36))}
    assert len(looks) == 36
    with pytest.raises(CallerError, match="can distinguish 36 lines, not 37"):
        style.line(36)
    drawn = axes()
    figures.stretch_figure(drawn, shares=[0.01 * n for n in range(1, 9)], confidence=0.5)
    assert len({(str(line.get_linestyle()), line.get_marker(), line.get_color()) for line in drawn.lines}) == 8
    assert "hardly" not in drawn.get_title(loc="left")


def test_pyplot_and_its_settings_stay_out(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib as m; read = lambda: {k: m.rcParams[k] for k in m.rcParams if k != 'backend'}; "
        "before = read(); from analysis.report import figures; figures.stretch_figure(sys.argv[1]); "
        "assert read() == before; "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "a.svg")]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def lines_of(drawn: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in drawn.lines}


def test_detection_curve_draws_both_laws_and_the_mark() -> None:
    drawn = axes()
    mark = Mark(samples=6, text="Lab A")
    figures.detection_curve(drawn, chips=16, used=4, catch=0.95, confidence=0.9, mark=mark)
    lines = lines_of(drawn)
    x, exact = lines["different chips (hypergeometric)"]
    assert x.tolist() == list(range(17))
    expected = closed.log_miss_without_replacement(chips=16, used=4, samples=np.arange(17), catch=0.95)
    assert exact == pytest.approx(closed.detection(expected))
    _, replaced = lines["with replacement (Eq. 1)"]
    assert replaced == pytest.approx(1 - (1 - 0.25 * 0.95) ** np.arange(17))
    stars = [line for line in drawn.lines if line.get_marker() == "*"]
    assert [(np.asarray(line.get_xdata())[0], round(float(np.asarray(line.get_ydata())[0]), 12)) for line in stars] == [
        (6, round(float(exact[6]), 12))
    ]
    texts = " | ".join(text.get_text() for text in drawn.texts)
    assert f"Lab A: 6 chips, {100 * exact[6]:.3g}%" in texts
    assert "90% takes 7 chips" in texts


def test_detection_curve_of_a_large_fleet_shows_where_it_saturates() -> None:
    drawn = axes()
    figures.detection_curve(drawn, chips=100_000, used=82, mark=[Mark(samples=3000), Mark(samples=500)])
    x, _ = lines_of(drawn)["different chips (hypergeometric)"]
    assert x.size <= 300
    assert 3000 < x[-1] < 20_000
    drawn = axes()
    figures.detection_curve(drawn, chips=1000, used=1, catch=0.5, confidence=0.9)
    assert any("out of reach" in text.get_text() for text in drawn.texts)


def test_stretch_figure_draws_figure_2() -> None:
    drawn = axes()
    figures.stretch_figure(drawn)
    (name,) = [name for name in lines_of(drawn) if name.startswith("b = 0.2 ")]
    x, y = lines_of(drawn)[name]
    assert (x[0], x[-1]) == (1, 100)
    assert round(float(y[-1]), 4) == 0.9703


def test_chips_figure_starts_where_the_run_fits() -> None:
    drawn = axes()
    figures.chips_figure(drawn, flops={"big": 1.27e26, "impossible": 1e30})
    lines = {name: line for name, line in lines_of(drawn).items() if not name.startswith("_")}
    assert list(lines) == ["big (1.27e+26 FLOP)", "impossible needs 3.17e+07 chips: left out"]
    with pytest.raises(CallerError, match="no run to draw: 'impossible' needs"):
        figures.chips_figure(drawn, flops={"impossible": 1e30})
    assert lines["big (1.27e+26 FLOP)"][0][0] == 4028


def test_rate_figure_ends_on_the_floor() -> None:
    drawn = axes()
    figures.rate_figure(drawn, flop=2.56e24, chips=1e5, periods=[30.0])
    _, y = lines_of(drawn)["Tₘ = 30 days"]
    floor = closed.samples_for(hit=closed.used_share(flop=2.56e24, chips=1e5, days=365))
    assert y[-1] == pytest.approx(float(floor), rel=1e-9)
    assert (np.diff(y) <= 1e-9).all()


def test_bytes_for_a_report() -> None:
    data = figures.drawn(lambda on: figures.stretch_figure(on), kind="svg", origin=Origin(command="report"))
    assert b"<svg" in data
    assert b"command: report; seed: none (closed form)" in data
    with pytest.raises(CallerError, match="must be png, svg or pdf"):
        figures.drawn(lambda on: None, kind="gif")


def test_a_failed_drawing_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="share must be"):
        figures.stretch_figure(tmp_path / "a.png", shares=[2.0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda on: figures.evasion_figure(on, estimates=[]), "no strategy to draw"),
        (lambda on: figures.sensitivity_figure(on, rows=[]), "there is no parameter to draw"),
        (lambda on: figures.time_to_detection_figure(on, schemes={}), "there is no scheme to draw"),
        (lambda on: figures.cost_figure(on, costs={"a": np.ones(2)}, confidence=[0.5]), "2 values for 1 confidences"),
        (lambda on: figures.cost_figure(on, costs={}, confidence=[1.0]), "confidence must be at least 0 and below 1"),
        (lambda on: figures.leakage_figure(on, months=[1, 2], unseen={"a": [1]}), "1 probabilities for 2 months"),
        (lambda on: figures.detection_curve(on, chips=5, used=6), "share must be|used chips must not exceed"),
        (lambda on: EvasionBar(name="x", value=0.5, low=0.6, high=0.7), "needs 0 <= low <= value <= high <= 1"),
        (lambda on: EvasionBar(name="x", value=0.5, low=0.5, high=0.5, closed_form=2), "must be a probability"),
        (lambda on: figures.stretch_figure("figure.jpeg"), "must be .png, .svg or .pdf"),
    ],
)
def test_nonsense(draw: Callable[[Axes], None], text: str) -> None:
    with pytest.raises(CallerError, match=text):
        draw(axes())
