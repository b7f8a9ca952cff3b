"""The prover's side: numerics, presets, training on chips, transcript, disputes.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.lab import resume, train
    from monitor.loops.recorder import Recorder
    from monitor.presets import PRESETS
    from monitor.prover import LabProver, Prover
    from monitor.site import Site, new_site_config
    from monitor.task import Task
    from monitor.transcript import RunFolder

__all__ = [
    "PRESETS",
    "LabProver",
    "Prover",
    "Recorder",
    "RunFolder",
    "Site",
    "Task",
    "new_site_config",
    "resume",
    "train",
]

_HOMES = {
    "lab": ("resume", "train"),
    "loops.recorder": ("Recorder",),
    "presets": ("PRESETS",),
    "prover": ("LabProver", "Prover"),
    "site": ("Site", "new_site_config"),
    "task": ("Task",),
    "transcript": ("RunFolder",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"monitor.{home}"), name)
    raise AttributeError(f"module 'monitor' has no attribute {name!r}")
