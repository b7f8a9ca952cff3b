"""One look for every figure: readable in black and white, labelled, reproducible to the byte, no global state kept.

A figure is drawn on ``Axes`` that the caller owns, or into a file named by its path; the extension chooses PNG, SVG or
PDF. The file says which command and which seed made it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from firmware_sim.errors import CallerError, file_error
from firmware_sim.folders import in_empty_folder
from monitor.files import write_whole

with in_empty_folder():  # a matplotlibrc in a run's folder is not read
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, PercentFormatter

__all__ = [
    "FAINT",
    "FORMATS",
    "HATCHES",
    "LINES",
    "NOTE",
    "Axes",
    "Figure",
    "FuncFormatter",
    "Origin",
    "Rectangle",
    "Target",
    "canvas",
    "count_axis",
    "crown",
    "drawn",
    "label",
    "line",
    "percent_axis",
    "setting",
    "sheet",
    "short_count",
]

Target = Axes | Path | str

FORMATS = ("png", "svg", "pdf")

LINES: tuple[dict[str, Any], ...] = (
    {"color": "#08306b", "linestyle": "-", "marker": "o"},
    {"color": "#c44e00", "linestyle": "--", "marker": "s"},
    {"color": "#2a7d4f", "linestyle": "-.", "marker": "^"},
    {"color": "#8a3d8f", "linestyle": ":", "marker": "D"},
    {"color": "#4d4d4d", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#b8860b", "linestyle": (0, (8, 2)), "marker": "P"},
)
"""Dash and marker alone distinguish them; the colours also differ in lightness and for the colour-blind."""

HATCHES = ("", "///", "...", "\\\\\\", "xx", "oo")

NOTE = 8
"""Font size of notes and legends."""

FAINT = "#777777"
"""Colour of reference lines."""

_HANDLE, _LETTER, _TITLE_LETTER, _ROW, _NOTE_ROW = 44.0, 4.5, 5.6, 13.8, 11.0
"""Points that a legend's handle, a note's letter, a title's letter, a legend's row and a note's row take."""

_SIZE = (6.4, 4.2)
_DOTS_PER_INCH = 200
_SHEET_DOTS_PER_INCH = 110
_TEXT = "#222222"
_SETTINGS: Any = {name: value for name, value in mpl.rcParamsDefault.items() if not name.startswith("backend")}
"""The library's own, whatever a user's file says, and these."""
_SETTINGS |= {"svg.hashsalt": "chipwitness", "pdf.fonttype": 42, "svg.fonttype": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Provenance of a figure, for its metadata.

    Attributes:
        command: the command line or call.
        seed: the seed of whatever was random; None for closed forms.
    """

    command: str
    seed: int | None = None

    def __str__(self) -> str:
        return f"command: {self.command}; seed: {'none (closed form)' if self.seed is None else self.seed}"


@contextmanager
def canvas(target: Target, *, title: str, origin: Origin | None, size: tuple[float, float] = _SIZE) -> Iterator[Axes]:
    """Yield axes to draw on: the caller's own, or those of a new figure that is saved to the path at the end.

    Raises:
        CallerError: an extension other than png, svg, pdf, or a path that cannot be written.
    """
    if isinstance(target, Axes):
        _dress(target)
        yield target
        return
    path = Path(target)
    kind = path.suffix[1:].lower()
    if kind not in FORMATS:
        raise CallerError(f"figure {path}: the extension must be .png, .svg or .pdf")
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure(size)
        yield axes
        data = _encode(figure, kind, title, origin)
    try:
        write_whole(path, data)
    except OSError as error:
        raise file_error(f"figure {path} cannot be written", error) from None


def sheet(
    path: Path,
    *,
    drawings: Mapping[str, Callable[[Axes], None]],
    wide: Mapping[str, Callable[[Axes], None]],
    title: str,
    origin: Origin,
) -> None:
    """Write all drawings on one sheet, two in a row, the ``wide`` ones below over the whole width.

    Raises:
        CallerError: as ``canvas``.
    """
    kind = path.suffix[1:].lower()
    if kind not in FORMATS:
        raise CallerError(f"figure {path}: the extension must be .png, .svg or .pdf")
    rows = -(-len(drawings) // 2) + len(wide)
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(2.1 * _SIZE[0], _SIZE[1] * rows), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(rows, 2)
        cells = [grid[place // 2, place % 2] for place in range(len(drawings))]
        cells += [grid[rows - len(wide) + place, :] for place in range(len(wide))]
        for cell, draw in zip(cells, [*drawings.values(), *wide.values()], strict=True):
            # A separate figure, so that long labels of one do not narrow its neighbours.
            axes = figure.add_subfigure(cell).add_subplot()
            _dress(axes)
            draw(axes)
        data = _encode(figure, kind, title, origin, _SHEET_DOTS_PER_INCH)
    try:
        write_whole(path, data)
    except OSError as error:
        raise file_error(f"figure {path} cannot be written", error) from None


def drawn(
    draw: Callable[[Axes], None],
    *,
    kind: str = "svg",
    title: str = "",
    origin: Origin | None = None,
    size: tuple[float, float] = _SIZE,
    dots_per_inch: int = _DOTS_PER_INCH,
) -> bytes:
    """Return what ``draw`` puts on fresh axes as the bytes of one PNG, SVG or PDF (to embed in a report)."""
    if kind not in FORMATS:
        raise CallerError(f"figure format {kind!r}: must be png, svg or pdf")
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure(size)
        draw(axes)
        return _encode(figure, kind, title, origin, dots_per_inch)


def label(axes: Axes, *, x: str, y: str) -> None:
    """Label both axes, with units in the text."""
    axes.set_xlabel(x, color=_TEXT)
    axes.set_ylabel(y, color=_TEXT)


def setting(
    *,
    flop: float | None = None,
    chips: float | None = None,
    days: float | None = None,
    period: float | None = None,
    rate: float | None = None,
    confidence: float | None = None,
    flop_per_day: float | None = None,
    utilisation: float | None = None,
) -> str:
    """Return in a line what a figure holds for: run, fleet and scheme as Shavit 2023 calls them, as far as given."""
    words = {
        "H = {:.3g} FLOP": flop,
        "C = {:,.0f} chips": chips,
        "T = {:g} d": days,
        "Tₘ = {:g} d": period,
        "f = {:g} a day": rate,
        "p = {:g}": confidence,
        "a = {:.3g} FLOP a day": flop_per_day,
        "utilisation {:g}": utilisation,
    }
    # No-break spaces: a line may end between two of these, not within one.
    given = [
        text.format(value).replace(" ", "\N{NO-BREAK SPACE}") for text, value in words.items() if value is not None
    ]
    return ", ".join(given)


def crown(axes: Axes, *, title: str = "", note: str = "") -> None:
    """Put the legend in rows above the axes, what the figure holds for above it, and the title on top.

    Nothing inside the axes is covered, whatever is drawn there. The legend has as many columns as fit.
    """
    _, names = axes.get_legend_handles_labels()
    height, width = 4.0, _points(axes)
    if names:
        fit = int(width / (_HANDLE + _LETTER * max(map(len, names))))
        across = max(1, min(len(names), fit))
        axes.legend(
            fontsize=NOTE,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=across,
            borderaxespad=0.2,
            frameon=False,
            columnspacing=1.2,
        )
        height += _ROW * -(-len(names) // across)
    if note:
        rows = [row for part in note.split("\n") for row in wrap(part, max(20, int(width / _LETTER)))]
        axes.annotate(
            "\n".join(rows),
            (0, 1),
            (0, height),
            "axes fraction",
            "offset points",
            va="bottom",
            fontsize=NOTE,
            color="#555555",
        )
        height += _NOTE_ROW * len(rows) + 2.0
    if title:
        rows = wrap(title, max(20, int(width / _TITLE_LETTER)))
        axes.set_title("\n".join(rows), loc="left", fontsize=10, color=_TEXT, pad=height + 2.0)


def _points(axes: Axes) -> float:
    """Return the width of the axes in points, as the labels that it has leave it."""
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("axes without figure")
    figure.draw_without_rendering()
    return float(axes.get_window_extent().width / figure.dpi * 72)


def percent_axis(axis: Any) -> None:
    """Show a probability as per cent."""
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def count_axis(axis: Any) -> None:
    """Show counts as 1, 1k, 1M, 1G."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def short_count(value: float) -> str:
    """Return a count with three digits and a k, M or G."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def line(number: int, marker: str | None = None) -> dict[str, Any]:
    """Return the style of the n-th line, no two alike; ``marker`` overrides its marker.

    Raises:
        CallerError: more lines than pairs of dash and marker.
    """
    turn, place = divmod(number, len(LINES))
    if turn >= len(LINES):
        raise CallerError(f"a figure can distinguish {len(LINES) ** 2} lines, not {number + 1}")
    look = LINES[place] | {"marker": LINES[(place + turn) % len(LINES)]["marker"]}
    style = dict(look, linewidth=1.6, markersize=4.5, markerfacecolor="white")
    return style if marker is None else style | {"marker": marker}


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _dress(axes)
    return figure, axes


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=_TEXT)


def _encode(figure: Figure, kind: str, title: str, origin: Origin | None, dots_per_inch: int = _DOTS_PER_INCH) -> bytes:
    about = str(origin) if origin else "command: not given"
    metadata: dict[str, dict[str, str | None]] = {
        "png": {"Title": title, "Description": about, "Software": "chipwitness"},
        "svg": {"Title": title, "Description": about, "Creator": "chipwitness", "Date": None},
        "pdf": {"Title": title, "Subject": about, "Creator": "chipwitness", "CreationDate": None},
    }
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dots_per_inch, metadata=metadata[kind])
    return buffer.getvalue()
