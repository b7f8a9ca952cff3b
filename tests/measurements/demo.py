"""Where the time of the demo goes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from analysis.demo import run_demo

__all__ = ["run"]


def run() -> list[dict[str, Any]]:
    """Run the demo once; one row a part, with the ratio to native FP32 training of one lab's steps."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        demo = run_demo(Path(folder) / "demo", say=lambda _: None, advance=lambda: None)
        total = time.perf_counter() - started
    native = demo.summary["control"]["native_seconds"]
    rows = [
        {"work": "demo", "mode": part, "seconds": seconds, "ratio": seconds / native}
        for part, seconds in demo.seconds.items()
    ]
    return [*rows, {"work": "demo", "mode": "total", "seconds": total, "ratio": total / native}]
