"""``fuzz``: coverage-guided fuzzing of every parser that foreign bytes reach.

Each parser runs in a process of its own under libFuzzer (Atheris). It must accept, or raise one of the product's own
errors, within a second and 256 MB; anything else is a finding.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from analysis.bench.origin import commit, write_among
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from monitor import processes

__all__ = ["run", "table", "verdict", "write"]

Row = dict[str, Any]


def run(
    *,
    seconds: float = 60.0,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    jobs: int = 1,
    sockets: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Fuzz the named parsers, or all, for so many seconds of a processor each, ``jobs`` of them at a time.

    Args:
        sockets: in their place, send so many mutated HTTP requests to servers.

    Returns:
        A row for each: executions, how many inputs were accepted, and findings (text, bytes, input in hex).

    Raises:
        CallerError: Atheris is not installed, or there is no such parser.
    """
    if sockets:
        return [_over_sockets(sockets, seed)]
    if importlib.util.find_spec("atheris") is None:
        raise CallerError("bench fuzz needs Atheris: pip install 'chipwitness[fuzz]'")
    from tests.measurements._fuzz_targets import World, prepare
    from tests.measurements._fuzz_targets import targets as parsers

    if not 0 < seconds < 1e6:
        raise CallerError(f"the time must lie in (0, 1000000) seconds, not {seconds}")
    if jobs < 1:
        raise CallerError(f"jobs must be at least 1, not {jobs}")
    with tempfile.TemporaryDirectory(prefix="chipwitness-fuzz-") as folder:
        known = parsers(World(Path(folder)))
        for name in targets or ():
            if name not in known:
                raise CallerError(f"there is no parser {name!r}; known: {', '.join(known)}")
        prepare(Path(folder))
        names = list(targets or known)
        command = processes.python("tests.measurements._fuzz_child", str(seconds), str(seed), folder)
        with (Path(folder) / "errors").open("w+b") as errors, ExitStack() as stack:
            read, write_end = os.pipe()
            for number in range(min(jobs, len(names))):
                own = names[number::jobs]
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="chipwitness-"))
                stack.enter_context(processes.start([*command, *own], place, {}, stdout=write_end, stderr=errors))
            os.close(write_end)
            with open(read, encoding="utf-8") as lines:
                for _ in lines:
                    progress(1)
        return [_row(name, seed, Path(folder)) for name in names]


def _over_sockets(count: int, seed: int) -> Row:
    from tests.measurements._fuzz_sockets import send_all
    from tests.measurements._fuzz_targets import record_loop

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chipwitness-fuzz-") as folder:
        record_loop(Path(folder) / "loop", "lab")
        found = send_all(Path(folder), Path(folder) / "loop", count, seed)
    common = {"work": "sockets", "mode": "http", "seconds": round(time.monotonic() - begun, 1), "ratio": None}
    return {**common, "seed": seed, "executions": count, "accepted": 0, **found, **commit()}


def _row(name: str, seed: int, folder: Path) -> Row:
    out = folder / f"{name}.json"
    if not out.exists():
        lines = (folder / "errors").read_text(errors="replace").strip().splitlines()
        raise DeviceError(f"fuzzing {name} broke: {lines[-1] if lines else 'no result'}")
    result = canonical.loads(out.read_text(encoding="utf-8"))
    return {
        "work": name,
        "mode": "atheris",
        "seconds": round(result["seconds"], 1),
        "ratio": None,
        "seed": seed,
        "executions": result["executions"],
        "accepted": result["accepted"],
        "findings": result["findings"],
        **commit(),
    }


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; those of other parsers that are in it stay, each with the commit that it was made at."""
    write_among(rows, path)


def verdict(rows: Sequence[Row]) -> str | None:
    """Which parsers failed, or None."""
    odd = [f"{row['work']} ({row['findings'][0]['text']})" for row in rows if row["findings"]]
    return f"parsers that fail: {', '.join(odd)}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'parser':16} {'executions':>11} {'accepted':>10} {'seconds':>8} findings"]
    for row in rows:
        texts = "; ".join(finding["text"] for finding in row["findings"]) or "none"
        lines.append(f"{row['work']:16} {row['executions']:11,} {row['accepted']:10,} {row['seconds']:8.1f} {texts}")
    return lines
