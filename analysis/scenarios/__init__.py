"""Ready scenarios, shipped with the package, and the public figures that a scenario may name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from analysis import public_data
from firmware_sim.errors import CallerError
from inspector.campaign import Catalogue, Kind, Scenario, load_regimes, load_scenario

__all__ = ["open_regimes", "open_scenario", "public_catalogue", "ready_scenarios", "scenario_text"]

STOCK_KIND = "H100 SXM"


def ready_scenarios() -> dict[str, Traversable]:
    """Return the ready scenarios by name."""
    folder = files("analysis.scenarios") / "data"
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


def public_catalogue() -> Catalogue:
    """Return kinds, models and stocks of the shipped tables; stocks are H100 equivalents, so chips of that kind.

    A stock may be named in full or as ``table`` prints it.
    """
    kinds = {
        chip.chip: Kind(name=chip.chip, flop_per_day=chip.flop_per_day, link_gbps=chip.interconnect_gbps)
        for chip in public_data.chips()
    }
    models = {model.model: model.training_flop for model in public_data.trained_models()}
    named = public_data.holder_names()
    stocks = {
        (name, stock.as_of): (STOCK_KIND, stock.chips_h100_equivalent)
        for stock in public_data.stocks()
        for name in (stock.holder, named[stock.holder, stock.as_of])
    }
    return Catalogue(kinds=kinds, models=models, stocks=stocks)


def open_scenario(
    name: str,
    *,
    regime: str | None = None,
    false_alarms: float | None = None,
    at: Mapping[str, float] | None = None,
    sized: Scenario | None = None,
) -> Scenario:
    """Load a scenario by path, or a ready one by name; a path that exists comes first.

    ``regime``, ``false_alarms``, ``at`` and ``sized`` are as in ``load_scenario``.

    Raises:
        CallerError: There is no such file and no such ready scenario, or the file is wrong.
    """
    with as_file(_found(name)) as path:
        return load_scenario(path, public_catalogue(), regime=regime, false_alarms=false_alarms, at=at, sized=sized)


def open_regimes(name: str, *, false_alarms: float | None = None) -> tuple[Scenario, ...]:
    """Load a scenario once for each of its regimes, as ``open_scenario`` does."""
    with as_file(_found(name)) as path:
        return load_regimes(path, public_catalogue(), false_alarms=false_alarms)


def scenario_text(name: str) -> str:
    """Return a ready scenario's file, to start one's own from.

    Raises:
        CallerError: there is no such ready scenario.
    """
    ready = ready_scenarios()
    if name not in ready:
        raise CallerError(f"there is no ready scenario {name!r}; ready ones are {', '.join(ready)}")
    return ready[name].read_text(encoding="utf-8")


def _found(name: str) -> Traversable:
    path, ready = Path(name), ready_scenarios()
    if path.is_file():
        return path
    if name not in ready:
        raise CallerError(
            f"there is no scenario file {name!r}, and no ready scenario of that name; ready ones are {', '.join(ready)}"
        )
    return ready[name]
