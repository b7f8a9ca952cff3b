"""Inputs of a plan that committed measurements give: what recording and replaying took, and bytes of logs."""

from __future__ import annotations

from functools import cache
from importlib import resources

from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from inspector.probability.distributions import Distribution, Fixed, Uniform
from inspector.probability.inputs import Inputs

__all__ = ["MEASURED", "measured_inputs"]

MEASURED = "recording.json, replay.json, storage.json and chip.json, small models on two cores of a processor"
"""Where the inputs are from that somebody measured, and what they are of."""


@cache
def measured_inputs() -> Inputs:
    """Return what the package's own measurements say, from the least to the greatest figure of each."""
    recorded = _rows("recording")
    plain = {row["batch_size"]: row["seconds"] for row in recorded if row["mode"] == "plain PyTorch"}
    (decade,) = (row for row in _rows("chip") if row["work"] == "decade")
    (step,) = (row["bytes"] for row in _rows("storage") if (row["work"], row["mode"]) == ("training", "all"))
    return Inputs(
        slowdown=_span([row["seconds"] / plain[row["batch_size"]] for row in recorded if row["mode"] == "recorded"]),
        replay=_span([row["ratio"] for row in _rows("replay") if row["mode"] == "replay"]),
        step_bytes=Fixed(step),
        other_records=Fixed((decade["records"] - decade["snapshots"]) / decade["years"]),
    )


def _rows(name: str) -> list[JsonObject]:
    text = resources.files("analysis").joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    rows: list[dict[str, object]] = canonical.loads(text)["rows"]
    return rows


def _span(values: list[float]) -> Distribution:
    return Uniform(min(values), max(values))
