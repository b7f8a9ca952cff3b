"""Switches guards off: the one place that knows how, for tests that show what each guard is good for.

A guard is one function of the product that stands between a piece of evidence and its acceptance. Its entry in
``GUARDS`` says what takes its place while it is off. No option, variable or file of the product does the same.

    with off("snapshot moment"):
        ...                                                   # in this process
    python -m tests.guards "snapshot moment" -- inspect RUN   # a command in a process of its own
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

__all__ = ["GUARDS", "off"]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check that raises or records what it finds."""


GUARDS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    # law 1: a snapshot's moment
    # law 2: busy ticks
    # law 3: draws
    # law 4: the same bytes
    # law 5: declared numbers
    # law 6: bounds and printing
    # law 7: no host code in firmware
    # law 8: honest labs
    "equal layouts": (("monitor.numerics.strides.canonical_strides", lambda tensor: tensor.stride()),),
    "watched memory": (("monitor.loops.watching.unwritten", lambda now, copy: True),),
    "repeated steps": (("monitor.loops.recorder._is_picked", lambda seed, step, one_in: False),),
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
