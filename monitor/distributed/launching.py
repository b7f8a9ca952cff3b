"""Starts the processes of a job on this machine, as ``torchrun --nproc-per-node`` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError

__all__ = ["launch"]


def launch(module: str, ranks: int, arguments: dict[str, Any], *, timeout: float = 600.0) -> Any:
    """Run ``python -m module`` in ``ranks`` processes of one gloo job.

    Each gets the arguments as JSON in ``CHIPWITNESS_JOB``, and torchrun's variables. What rank 0 writes as JSON to the
    file that ``CHIPWITNESS_RESULT`` names is returned; None if it writes nothing.

    Raises:
        CallerError: a process failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        common = {
            **os.environ,
            "CHIPWITNESS_JOB": json.dumps(arguments),
            "CHIPWITNESS_RESULT": str(result),
            "CHIPWITNESS_STORE": str(Path(folder) / "store"),
            "WORLD_SIZE": str(ranks),
        }
        running = [
            subprocess.Popen(
                [sys.executable, "-m", module],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=(Path(folder) / f"{rank}.err").open("wb"),
            )
            for rank in range(ranks)
        ]
        try:
            codes = _wait(running, timeout)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            texts = {rank: (Path(folder) / f"{rank}.err").read_text(errors="replace").strip() for rank in failed}
            rank, text = next(((rank, text) for rank, text in texts.items() if text), (failed[0], ""))
            raise CallerError(f"rank {rank} failed: {text.splitlines()[-1] if text else 'without a word'}")
        return json.loads(result.read_text()) if result.exists() else None


def _wait(running: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes; those that a failed rank leaves waiting are ended."""
    import time

    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if any(codes) or all(code is not None for code in codes):
            time.sleep(0.3 if any(codes) else 0)
            return [process.poll() or 0 for process in running]
        time.sleep(0.02)
    raise CallerError(f"the job did not end within {timeout:.0f} seconds")
