"""The ``chipwitness`` command.

Exit codes: 0 accepted or done, 1 rejected (evidence at fault), 2 the caller's mistake, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.resident.client import forward

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Without ``argv`` it is this process's own command, which a pool that it names may run in its place.
    """
    code = forward(sys.argv[1:]) if argv is None else None
    if code is not None:
        return code
    try:
        from analysis.commands.running import run  # what a command that is forwarded never loads

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while it was loaded, or while it ended
        return _told("interrupted", 130)
    except (ImportError, OSError, MemoryError) as error:  # in this library or one that it needs
        return _told(f"it cannot be loaded: {error!a:.500}", 3)


def _told(text: str, code: int) -> int:
    if sys.stderr is not None:
        print(f"chipwitness: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
