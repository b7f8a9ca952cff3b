"""No text leaves its figure, and no legend covers other text: by bounding boxes, for every figure and awkward ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from analysis.cli import main
from analysis.report import figures, style
from analysis.report.figures import EvasionBar, Mark, RegimeColumn
from inspector.probability.timing import time_to_detection

LONG = "a strategy with a rather long name, as people write them"
NOTE = style.setting(flop=2.56e24, chips=1e5, days=365, period=30, rate=0.1, confidence=0.9, flop_per_day=8.64e19)


def regimes(target: Any, number: int) -> None:
    columns = [
        RegimeColumn(
            name=f"regime {place} with a long name",
            detections=(0.9, 0.00012345, 1.0),
            delays=(30.0, None, 12345.0),
            worst=1,
            false_alarm=0.012345,
            inspectors=1234.5,
            cost=1e9,
        )
        for place in range(number)
    ]
    figures.regimes_figure(target, strategies=["as planned", LONG, "x"], columns=columns, title=LONG, note=NOTE)


DRAWINGS: dict[str, Callable[[Any], None]] = {
    "detection": lambda to: figures.detection_curve(
        to, chips=16, used=4, mark=[Mark(samples=15, text=LONG), Mark(samples=1)], confidence=0.9, title=LONG, note=NOTE
    ),
    "detection, late": lambda to: figures.detection_curve(to, chips=100_000, used=3, confidence=0.999, mark=99_999),
    "stretch, many": lambda to: figures.stretch_figure(to, shares=np.linspace(0.01, 0.9, 12).tolist()),
    "chips": lambda to: figures.chips_figure(to, flops={LONG: 2.56e24, "GPT-3": 3.14e23, "Big": 1e30}),
    "rate": lambda to: figures.rate_figure(to, flop=2.56e24, chips=1e5, periods=[1, 7, 30, 90, 365]),
    "time": lambda to: figures.time_to_detection_figure(
        to,
        schemes={
            LONG: time_to_detection(share=0.01, samples=20, days=365),
            "b": time_to_detection(share=1, samples=5, days=90),
        },
        run_days=365,
        note=NOTE,
    ),
    "cost": lambda to: figures.cost_figure(
        to, costs={LONG: np.array([1e3, 2e3, 3e7])}, confidence=[0.5, 0.9, 0.99], title=LONG, note=NOTE
    ),
    "found": lambda to: figures.found_figure(
        to,
        chips=np.array([1e2, 1e4, 1.4e5]),
        found={LONG: np.array([0, 0.5, 1]), "b": np.array([1, 1, 1])},
        title=LONG,
        note=NOTE,
    ),
    "evasion": lambda to: figures.evasion_figure(
        to,
        estimates=[
            EvasionBar(name=LONG, value=1.0, low=0.99, high=1.0, closed_form=1.0),
            EvasionBar(name="b", value=0.0, low=0.0, high=0.0123),
        ],
        confidence=0.9,
        title=LONG,
        note=NOTE,
    ),
    "leakage": lambda to: figures.leakage_figure(
        to, months=[0, 1, 2], unseen={f"{10**n:,} chips": [1, 0.9, 0.81**n] for n in range(7)}, note=NOTE
    ),
    "sensitivity": lambda to: figures.sensitivity_figure(
        to, rows=[(LONG, 2e3, 0.5), ("chips", float("nan"), 2.0)], ends=("at its 5 % quantile", "at its 95 % quantile")
    ),
    "roc": lambda to: figures.roc_figure(
        to,
        false_alarm=[1.0, 0.96, 0.4, 0.01, 1e-5, 0.0],
        detection=[1.0, 0.99, 0.8, 0.3, 0.01, 0.0],
        tolerated=range(6),
        best=0,
        note=NOTE,
    ),
    "regimes": lambda to: regimes(to, 6),
    "one regime": lambda to: regimes(to, 1),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is encoded while the test runs."""
    found: list[Figure] = []
    encode = style._encode

    def keep(figure: Figure, *rest: Any) -> bytes:
        data = encode(figure, *rest)
        found.append(figure)
        return data

    monkeypatch.setattr(style, "_encode", keep)
    return found


def texts_of(figure: Figure) -> Iterator[tuple[Text, Bbox]]:
    """Every visible text with its box in pixels; tick labels beyond the axes' limits exist, but are not drawn."""
    undrawn: set[int] = set()
    for axis in figure.findobj(Axis):
        assert isinstance(axis, Axis)
        drawn: Any = axis
        ticks = {id(tick) for tick in drawn._update_ticks()}
        undrawn |= {
            id(label)
            for tick in (*axis.majorTicks, *axis.minorTicks)
            for label in (tick.label1, tick.label2)
            if id(tick) not in ticks
        }
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in undrawn:
            yield text, text.get_window_extent()


def problems(figure: Figure) -> list[str]:
    """What leaves the figure, and what a legend covers."""
    figure.draw_without_rendering()
    width, height = figure.bbox.width, figure.bbox.height
    texts = list(texts_of(figure))
    found = [
        f"{text.get_text()!r} leaves the figure: {box}"
        for text, box in texts
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for axes in figure.get_axes():
        legend = axes.get_legend()
        if legend is None:
            continue
        own = {id(text) for text in legend.findobj(Text)}
        box = legend.get_window_extent()
        found += [
            f"the legend covers {text.get_text()!r}"
            for text, other in texts
            if id(text) not in own and shared(box, other) > 2.0
        ]
    return found


def shared(one: Bbox, other: Bbox) -> float:
    """Pixels of the smaller side of what two boxes share."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else min(both.width, both.height)


@pytest.mark.parametrize("name", DRAWINGS)
def test_text_stays_inside_and_legends_cover_none(name: str, tmp_path: Path, made: list[Figure]) -> None:
    DRAWINGS[name](tmp_path / "a.png")
    (figure,) = made
    assert len(list(texts_of(figure))) > 5
    assert problems(figure) == []


def test_the_sheet_holds_every_figure(tmp_path: Path, made: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "sheet", "--trials", "20", "--out", str(tmp_path / "sheet.png")]) == 0
    assert "stretch, chips, rate, samples, time, cost, evasion, leakage, regimes" in capsys.readouterr().out
    (figure,) = made
    assert len([part for part in figure.subfigs if isinstance(part, SubFigure)]) == 9
    assert problems(figure) == []


def test_the_measure_finds_what_is_wrong() -> None:
    figure = Figure(figsize=(3, 2))
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], label="a line")
    axes.text(0.5, 0.5, "covered", ha="center")
    axes.legend(loc="center")
    figure.text(0.95, 0.5, "this leaves the figure")
    found = problems(figure)
    assert "the legend covers 'covered'" in found
    assert any(each.startswith("'this leaves the figure' leaves the figure") for each in found)


def test_every_figure_of_a_run_states_what_it_holds_for(tmp_path: Path, made: list[Figure]) -> None:
    """Fleet, FLOP, T, T_m, f and p: those that the figure does not have on an axis or in its legend."""
    for kind, missing in {
        "samples": "",
        "time": "Tₘ",
        "cost": "Cp",
        "evasion": "",
        "rate": "fTₘ",
        "chips": "HC",
    }.items():
        assert main(["curve", kind, "--out", str(tmp_path / "a.svg")]) == 0
        text = " ".join(" ".join(each.get_text().split()) for each, _ in texts_of(made[-1]))
        for symbol in ("H", "C", "T", "Tₘ", "f", "p"):
            assert f"{symbol} =" in text or symbol.strip("$") in missing, (kind, symbol, text)


def test_evasions_have_names_for_people(tmp_path: Path, made: list[Figure]) -> None:
    assert (
        main(["curve", "evasion", "--evasion", "stretch=4", "--evasion", "hide=0.25", "--out", str(tmp_path / "a.svg")])
        == 0
    )
    words = [text.get_text() for text, _ in texts_of(made[-1])]
    assert "4 times as long, on 1/4 of the chips" in words
    assert "25% of its chips undeclared" in words
    assert not any("stretch=" in word or "hide=" in word for word in words)
