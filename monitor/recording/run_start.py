"""A run that cannot start leaves its folder free for the next attempt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monitor.lab.simulated_lab import LabConfig, lab_path

__all__ = ["free_again", "freeing"]


def free_again(run: Path, config: LabConfig) -> bool:
    """Remove run folder, lab folder and trust file of a run without a step; False where an earlier run's chips go on.

    Those chips have heard of it, and their logs say so.
    """
    if config.silicon is not None:
        return False
    for folder in (run, lab_path(run)):
        shutil.rmtree(folder, ignore_errors=True)
    run.resolve().with_name(f"{run.resolve().name}.trust.json").unlink(missing_ok=True)
    return True


@contextmanager
def freeing(run: Path, config: LabConfig) -> Iterator[None]:
    """While it is open, an error or interrupt leaves nothing behind; a process that dies leaves an unfinished run."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        free_again(run, config)
        raise
