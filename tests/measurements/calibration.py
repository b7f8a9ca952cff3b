"""``calibration``: the errors of this machine's kernel families, and the thresholds that follow from them.

``python -m tests.measurements.calibration FILE`` also writes them; the committed file is
monitor/numerics/rounding/data/calibration.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from monitor.environment import processor
from tests.measurements._threshold_search import DEVICES, INPUTS, UNCOVERED, SampleSizes, search

__all__ = ["document", "run"]


def document(plan: SampleSizes | None = None) -> dict[str, Any]:
    """What the search found, with the hardware named."""
    started = time.perf_counter()
    found = search(SampleSizes() if plan is None else plan)
    hardware = {"processor": processor(), "cores": torch.get_num_threads(), "torch": torch.__version__}
    return {**found, "hardware": hardware, "seconds": round(time.perf_counter() - started, 1)}


def run() -> list[dict[str, Any]]:
    """One row for each operator class and device: the largest error by number of terms, in u·‖row‖·‖column‖."""
    found = document()
    terms = found["plan"]["terms"]
    rows = []
    for operator, thresholds in found["thresholds"].items():
        for name in DEVICES:
            errors = found["devices"][name]["errors"][operator]
            rows.append(
                {
                    "work": f"calibration {operator}",
                    "mode": name,
                    "seconds": found["seconds"],
                    "ratio": None,
                    "terms": terms,
                    "covered": [max(errors[inputs][i] for inputs in INPUTS) for i in range(len(terms))],
                    UNCOVERED: errors[UNCOVERED],
                    "thresholds": [threshold for _, threshold in thresholds],
                }
            )
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
