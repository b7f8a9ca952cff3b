"""The verifier's side: sampling, provenance, replay, dispute, detection probability, registry, campaigns.

Names are loaded when they are first used, so that asking for a probability does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspector.detection import samples_needed, samples_per_year, stretch_detection
    from inspector.devices import DEVICES, DevicePool
    from inspector.dispute import Claim, settle
    from inspector.guards import Guard, Settings
    from inspector.session import inspect, verify
    from inspector.trust import Trust
    from inspector.verdict import Outcome, Reason, Verdict

__all__ = [
    "DEVICES",
    "Claim",
    "DevicePool",
    "Guard",
    "Outcome",
    "Reason",
    "Settings",
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
    "detection": ("samples_needed", "samples_per_year", "stretch_detection"),
    "devices": ("DEVICES", "DevicePool"),
    "dispute": ("Claim", "settle"),
    "guards": ("Guard", "Settings"),
    "session": ("inspect", "verify"),
    "trust": ("Trust",),
    "verdict": ("Outcome", "Reason", "Verdict"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"inspector.{home}"), name)
    raise AttributeError(f"module 'inspector' has no attribute {name!r}")
