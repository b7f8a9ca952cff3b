"""Switches guards off: the one place that knows how, for tests that show what each guard is good for.

A guard is one function of the product that stands between a piece of evidence and its acceptance. Its entry in
``GUARDS`` says what takes its place while it is off. No option, variable or file of the product does the same.

    with off("snapshot moment"):
        ...                                                   # in this process
    python -m tests.guards "snapshot moment" -- inspect RUN   # a command in a process of its own
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

__all__ = ["GUARDS", "off"]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check that raises or records what it finds."""


def _draw_any(wanted: list[Any], count: int, seed: bytes) -> list[Any]:
    """Draw among all segments, so that the first may be left out."""
    return sorted(wanted, key=lambda segment: hashlib.sha256(seed + str(segment.index).encode()).digest())[:count]


GUARDS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    # law 1: a snapshot's moment
    "snapshot moment": (("inspector.commits.SnapshotMoment.take", _nothing),),
    # law 2: busy ticks
    "busy ticks": (("inspector.commits.BusyTicks.take", _nothing),),
    "open epoch": (("firmware_sim.audit.check_open_epoch", _nothing),),
    # law 3: draws
    "fresh draw": (("inspector.session.secret_of", lambda settings: settings.seed or "0"),),
    "first segment": (("inspector.session.first_and_drawn", _draw_any),),
    # law 4: the same bytes
    "verified manifest": (("inspector.session.verified_manifest", _nothing),),
    # law 5: declared numbers
    "agreed data": (("inspector.transcripts.check_agreed_data", lambda *_: True),),
    # law 6: bounds and printing
    # law 7: no host code in firmware
    # law 8: honest labs
    "answers outside runs": (("inspector.answers.Answers.holds", lambda self, chip: False),),
    "evidence of the chip's own lab": (
        ("inspector.provenance.runs_of_owner", lambda chip, transcripts, trust: list(transcripts)),
    ),
}
"""Name of each guard, and what is put in place of which attribute while it is off."""


@contextmanager
def off(*names: str) -> Iterator[None]:
    """Switch guards off in this process."""
    with ExitStack() as stack:
        for name in names:
            for target, replacement in GUARDS[name]:
                stack.enter_context(mock.patch(target, replacement))
        yield


def main(arguments: list[str]) -> int:
    """Run a command of the product with guards off."""
    from analysis.cli import main as command

    split = arguments.index("--")
    with off(*arguments[:split]):
        return command(arguments[split + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
