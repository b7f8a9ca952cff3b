"""A rank of a job whose ranks compare nothing of what they get from each other."""

from __future__ import annotations

from monitor.distributed.launcher import arguments
from tests.guards import off
from tests.monitor.distributed.lying_rank import main

if __name__ == "__main__":
    with off("bytes between ranks"):
        main(arguments())
