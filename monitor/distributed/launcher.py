"""Starts the processes of a job on this machine, as ``torchrun --nproc-per-node`` does."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from monitor import processes
from monitor.distributed.roll_call import DEADLINE

__all__ = ["answer", "arguments", "join", "launch"]


@contextmanager
def join() -> Iterator[None]:
    """Take part in the job that ``launch`` or ``torchrun`` started this process for."""
    store = os.environ.get("CHIPWITNESS_STORE")
    if store is None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE))
    else:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        method, timeout = f"file://{store}", timedelta(seconds=DEADLINE)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def arguments() -> Any:
    """What ``launch`` was given for this process."""
    return canonical.loads(os.environ["CHIPWITNESS_JOB"])


def answer(result: Any) -> None:
    """Give ``launch`` a result as JSON; rank 0's counts."""
    if os.environ["RANK"] == "0":
        Path(os.environ["CHIPWITNESS_RESULT"]).write_text(json.dumps(result))


def launch(
    module: str, ranks: int, given: Any, *, timeout: float = 600.0, environment: Mapping[str, str] | None = None
) -> Any:
    """Run a module in ``ranks`` processes of one gloo job, each as ``monitor.processes`` starts it.

    A process ends as soon as the module has: gloo's threads may still let go of tensors then, which aborts an
    interpreter that takes its objects down.

    Each finds what it is given by ``arguments``, takes part by ``join``, and finds torchrun's variables. What rank 0
    gives by ``answer`` is returned; None if it gives nothing.

    Args:
        given: JSON-able.
        environment: further variables, such as those that choose a device's kernels.

    Raises:
        CallerError: a process failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        common = {
            **(environment or {}),
            "CHIPWITNESS_JOB": json.dumps(given),
            "CHIPWITNESS_RESULT": str(result),
            "CHIPWITNESS_STORE": str(Path(folder) / "store"),
            "WORLD_SIZE": str(ranks),
        }
        command, running = processes.python(module, begun=__name__), []
        try:
            for rank in range(ranks):
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                (Path(folder) / f"{rank}.empty").mkdir()
                with (Path(folder) / f"{rank}.err").open("wb") as errors:
                    running.append(processes.start(command, f"{folder}/{rank}.empty", own, stderr=errors))
            codes = _wait(running, timeout)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            raise CallerError(_failure(codes, [Path(folder) / f"{rank}.err" for rank in range(ranks)]))
        return canonical.loads(result.read_text()) if result.exists() else None


def _failure(codes: Sequence[int], errors: Sequence[Path]) -> str:
    """Which rank failed first, and its last words: one that fails takes others along, which write theirs later."""
    ended = [rank for rank, code in enumerate(codes) if code < 0]
    if ended:
        return f"rank {ended[0]} failed: signal {-codes[ended[0]]} ended it"
    failed = [rank for rank, code in enumerate(codes) if code]
    rank = min(failed, key=lambda each: (not errors[each].stat().st_size, errors[each].stat().st_mtime_ns))
    text = errors[rank].read_text(errors="replace").strip()
    return f"rank {rank} failed: {text.splitlines()[-1] if text else 'without a message'}"


def _wait(running: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes; those that a failed rank leaves waiting are ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if any(codes) or all(code is not None for code in codes):
            time.sleep(0.3 if any(codes) else 0)
            return [process.poll() or 0 for process in running]
        time.sleep(0.02)
    raise CallerError(f"the job did not end within {timeout:.0f} seconds")


def _main(module: str) -> int:
    """Run a module; its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _code = _main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)
