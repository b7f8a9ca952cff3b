"""The verifier's side: sampling, provenance, replay, dispute, detection probability, registry, campaigns.

Names are loaded when they are first used, so that asking for a probability does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspector.devices import DEVICES
    from inspector.dispute.dispute import Disputant, settle
    from inspector.dispute.prover import Prover
    from inspector.inspection.guards import Guard, Settings
    from inspector.inspection.inspection import inspect, verify
    from inspector.inspection.sources import Past, Sources
    from inspector.inspection.trust import Trust
    from inspector.inspection.verdict import Outcome, Reason, Verdict
    from inspector.probability.detection import samples_needed, samples_per_year, stretch_detection
    from inspector.replay.pool import DevicePool

__all__ = [
    "DEVICES",
    "DevicePool",
    "Disputant",
    "Guard",
    "Outcome",
    "Past",
    "Prover",
    "Reason",
    "Settings",
    "Sources",
    "Trust",
    "Verdict",
    "inspect",
    "samples_needed",
    "samples_per_year",
    "settle",
    "stretch_detection",
    "verify",
]

_HOMES = {
    "devices": ("DEVICES",),
    "dispute.dispute": ("Disputant", "settle"),
    "dispute.prover": ("Prover",),
    "inspection.guards": ("Guard", "Settings"),
    "inspection.inspection": ("inspect", "verify"),
    "inspection.sources": ("Past", "Sources"),
    "inspection.trust": ("Trust",),
    "inspection.verdict": ("Outcome", "Reason", "Verdict"),
    "probability.detection": ("samples_needed", "samples_per_year", "stretch_detection"),
    "replay.pool": ("DevicePool",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"inspector.{home}"), name)
    raise AttributeError(f"module 'inspector' has no attribute {name!r}")
