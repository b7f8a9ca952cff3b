"""The public names of Chipwitness; each is loaded when it is first used.

The packages behind it have short names (``monitor``, ``inspector``, ``analysis``, ``firmware_sim``), which other files
may have, too. Where Python would find another of that name, this import fails and names the file.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = [
    "Disputant",
    "DistributedRecorder",
    "Job",
    "LabConfig",
    "LabProver",
    "Mark",
    "Outcome",
    "Past",
    "Reason",
    "RecordedFit",
    "Recorder",
    "RunConfig",
    "RunFolder",
    "Settings",
    "SimulatedLab",
    "Sources",
    "Task",
    "Trust",
    "Verdict",
    "arguments",
    "detection_curve",
    "initialised",
    "inspect",
    "join",
    "launch",
    "open_run",
    "padded",
    "record_trainer",
    "resume",
    "samples_needed",
    "samples_needed_without_replacement",
    "samples_per_year",
    "settle",
    "snapshot_probability",
    "train",
    "used_share",
    "verify",
]

_HOMES = {
    "monitor": "LabConfig LabProver Recorder RunConfig RunFolder SimulatedLab Task initialised padded resume train",
    "monitor.adapters.lightning": "RecordedFit",
    "monitor.adapters.trainer": "record_trainer",
    "monitor.distributed.job": "Job",
    "monitor.distributed.launcher": "arguments join launch",
    "monitor.distributed.recorder": "DistributedRecorder",
    "inspector": "Disputant Outcome Past Reason Settings Sources Trust Verdict inspect settle verify",
    "inspector.probability.detection": "samples_needed samples_needed_without_replacement samples_per_year "
    "snapshot_probability used_share",
    "inspector.inspection.transcripts": "open_run",
    "analysis.report.figures": "Mark detection_curve",
}


def _check_packages() -> None:
    """Raise ImportError where Python finds another module under the name of one of our packages."""
    here = Path(__file__).resolve().parent
    homes = (here.parent, here.parents[2])  # of an installed package, and of a checkout
    for name in ("firmware_sim", "monitor", "inspector", "analysis"):
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found not in [home / name / "__init__.py" for home in homes]:
            where = "nothing" if spec is None else found or list(spec.submodule_search_locations or ())
            raise ImportError(
                f"chipwitness has a package {name!r}, but Python finds {where} under that name: rename that file or "
                "folder, or keep its folder out of sys.path"
            )


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'chipwitness' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if __name__ != "chipwitness":
    raise ImportError(f"this package is called chipwitness, not {__name__}")
_check_packages()
