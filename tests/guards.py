"""Switches guards off: the one place that knows how, for tests that show what each guard is good for.

A guard is one function of the product that stands between a piece of evidence and its acceptance. Its entry in
``GUARDS`` says what takes its place while it is off. No option, variable or file of the product does the same.

    with off("snapshot moment"):
        ...                                                   # in this process
    python -m tests.guards "snapshot moment" -- inspect RUN   # a command in a process of its own
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from firmware_sim.bounds import Bound
from firmware_sim.errors import EvidenceError

__all__ = ["GUARDS", "off"]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check that raises or records what it finds."""


def _always(*_: Any, **__: Any) -> bool:
    """In place of a question that the evidence has to pass."""
    return True


def _unbounded_shape(shape: list[int]) -> None:
    """In place of the check of a shape: its size, whatever its rank."""
    if math.prod(shape) > _ANY:
        raise EvidenceError("a tensor's size is impossible")


_ANY = 1 << 62
"""In place of a limit."""

GUARDS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    # law 1: a snapshot's moment
    # law 2: busy ticks
    # law 3: draws
    # law 4: the same bytes
    # law 5: declared numbers
    # law 6: bounds and printing
    "json items": (("firmware_sim.bounds.JSON_ITEMS", Bound(_ANY, "items")),),
    "json integers": (("firmware_sim.bounds.JSON_INTEGER_BITS", Bound(_ANY, "bits")),),
    "tensor shapes": (("firmware_sim.bounds.check_shape", _unbounded_shape),),
    "signed lengths": (("monitor.transcript.lengths.check_lengths", _nothing),),
    "steps have files": (("monitor.transcript.manifest.check_steps", _nothing),),
    "agreed before opened": (("inspector.agreement.may_decode", _always),),
    "lab names": (("firmware_sim.bounds.check_lab", _nothing),),
    "visible text": (("analysis.commands._common.visible", str),),
    "answered tensors": (("inspector.messages.check_materialised", _nothing),),
    # law 7: no host code in firmware
    # law 8: honest labs
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
