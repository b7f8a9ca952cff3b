"""Ready scenarios, shipped with the package, and the public figures that a scenario may name."""

from __future__ import annotations

import csv
import io
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.campaign import Catalogue, Kind, Scenario, load_scenario

__all__ = ["open_scenario", "public_catalogue", "ready_scenarios"]

STOCK_KIND = "H100 SXM"
SECONDS_PER_DAY = 86_400.0


def ready_scenarios() -> dict[str, Traversable]:
    """Return the ready scenarios by name."""
    folder = files("analysis.scenarios") / "data"
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


def public_catalogue() -> Catalogue:
    """Read kinds, models and stocks from the shipped tables; stocks are H100 equivalents, so chips of that kind."""
    kinds = {
        row["chip"]: Kind(
            name=row["chip"],
            flop_per_day=float(row["peak_dense_flops_bf16"]) * SECONDS_PER_DAY,
            link_gbps=float(row["interconnect_gbps"]),
        )
        for row in _rows("chips.csv")
    }
    models = {row["model"]: float(row["training_flop"]) for row in _rows("training_compute.csv")}
    stocks = {
        (row["holder"], row["as_of"]): (STOCK_KIND, int(row["chips_h100_equivalent"])) for row in _rows("stocks.csv")
    }
    return Catalogue(kinds=kinds, models=models, stocks=stocks)


def open_scenario(name: str, *, false_alarms: float | None = None) -> Scenario:
    """Load a scenario by path, or a ready one by name; a path that exists comes first.

    ``false_alarms`` is the cap on false alarms, instead of the file's.

    Raises:
        CallerError: There is no such file and no such ready scenario, or the file is wrong.
    """
    path, ready = Path(name), ready_scenarios()
    if path.is_file():
        return load_scenario(path, public_catalogue(), false_alarms=false_alarms)
    if name not in ready:
        raise CallerError(f"no scenario file {name!r} and no ready scenario of that name; ready: {', '.join(ready)}")
    with as_file(ready[name]) as shipped:
        return load_scenario(shipped, public_catalogue(), false_alarms=false_alarms)


def _rows(name: str) -> list[dict[str, str]]:
    text = (files("analysis") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))
