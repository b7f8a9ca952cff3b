"""A rank of a job whose ranks compare nothing of what they get from each other."""

from __future__ import annotations

from pathlib import Path

from analysis.examples.train_on_two_processes import train
from monitor.distributed.launcher import arguments
from tests.guards import off

if __name__ == "__main__":
    given = arguments()
    with off("bytes between ranks"):
        train(Path(given["run"]), given.get("layout", "fsdp2"), given.get("lie"))
