"""An inspection by a command with a resident pool, in pairs with the same command without one."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from firmware_sim.errors import DeviceError

__all__ = ["pooled"]

Row = dict[str, Any]

_PROGRAM = (sys.executable, "-c", "import sys; from analysis.cli import main; sys.exit(main())")
"""The command line as a user starts it, in a process of its own."""


def pooled(words: Sequence[str], folder: Path, pairs: int, tell: Callable[[int], object]) -> Row:
    """Run ``inspect`` with these words, once to fill the pool, then by turns without it and with it.

    Returns ``seconds`` (median of commands with the pool), ``ratio`` (median of the pairs' ratios to the command
    without it), ``alone_seconds``, ``first_seconds``, ``pairs``, ``outcome`` and ``equal`` (all of every verdict but
    how long replays took).
    """
    with _pool(folder / "socket") as socket:
        shared = [*words, "--pool", str(socket)]
        verdict, first = _timed(shared)
        measured, same = [], True
        for _ in range(pairs):
            (one, alone), (other, second) = _timed(words), _timed(shared)
            measured.append((second, alone))
            same = same and verdict == one == other
            tell(1)
    return {
        "work": "pool",
        "mode": "inspect",
        "seconds": statistics.median(second for second, _ in measured),
        "ratio": statistics.median(second / alone for second, alone in measured),
        "alone_seconds": statistics.median(alone for _, alone in measured),
        "first_seconds": first,
        "pairs": pairs,
        "outcome": verdict["outcome"],
        "equal": same,
    }


def _timed(words: Sequence[str]) -> tuple[Row, float]:
    """The verdict, without what differs from one time to the next, and how long the command took."""
    command = [*_PROGRAM, "inspect", *words, "--json"]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    try:
        found: Row = json.loads(done.stdout)
    except ValueError:
        raise DeviceError(f"an inspection ended without a verdict: {done.stderr.strip()[-200:]}") from None
    for replay in found["evidence"].get("replays", ()):
        del replay["seconds"]
    return found, seconds


@contextlib.contextmanager
def _pool(path: Path) -> Iterator[Path]:
    """A pool that begins before the first command, as one does that is there for several."""
    command = [*_PROGRAM, "pool", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield path
        finally:
            process.terminate()
