"""The ``chipwitness`` command.

Exit codes: 0 accepted or done, 1 rejected (evidence at fault), 2 the caller's mistake, 3 inconclusive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.commands.running import run

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: its words; None for those of this process.
    """
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
