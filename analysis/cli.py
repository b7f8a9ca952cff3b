"""The ``chipwitness`` command.

Exit codes: 0 accepted or done, 1 rejected (evidence at fault), 2 the caller's mistake, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: its words; None for those of this process, which then begins again as ``monitor.processes`` starts one:
            it finds installed code alone. ``check`` does not, as it runs the user's code.
    """
    try:
        if argv is None:
            argv = sys.argv[1:]
            if argv[:1] != ["check"]:
                _begin(argv)
        from analysis.commands.dispatch import run

        return run(argv)
    except KeyboardInterrupt:  # while it was loaded, or while it ended
        return _failed("interrupted", 130)
    except (ImportError, OSError, MemoryError) as error:  # in this library or one that it needs
        return _failed(f"it cannot be loaded: {error!a:.500}", 3)


def _failed(text: str, code: int) -> int:
    if sys.stderr is not None:
        print(f"chipwitness: {text}", file=sys.stderr)
    return code


def _begin(words: Sequence[str]) -> None:
    """See to it that neither the working folder nor variables that are not named say what is loaded."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not (sys.flags.no_site and sys.flags.safe_path and sys.flags.ignore_environment):
        options = ["-E", "-P", "-S", *(["-s"] if sys.flags.no_user_site else [])]
        begin = os.path.join(root, "monitor", "_begin.py")
        os.execv(sys.executable, [sys.executable, *options, begin, "", "analysis.cli", *words])
    from monitor.processes import forget_unnamed

    forget_unnamed()


if __name__ == "__main__":
    sys.exit(main())
