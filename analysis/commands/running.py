"""The parser of all subcommands, and how one is run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from analysis.commands import _common, register_all
from analysis.version import version
from firmware_sim.errors import CallerError, DeviceError, EvidenceError

__all__ = ["Handler", "build_parser", "run"]

Handler = Callable[[argparse.Namespace], int]


_NEGATIVE_NUMBER = re.compile(r"^-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        # argparse before Python 3.14 takes -1e25 for an option and says that --flop has no value.
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        self.exit(2, _common.visible(f"{self.prog}: {message}") + "\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands; each sets ``handler`` to a function Namespace -> exit code."""
    parser = _Parser(prog="chipwitness", description="On-chip compute-monitoring simulator.")
    parser.add_argument("--version", action="version", version=f"chipwitness {version()}")
    register_all(parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser))
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one subcommand in this process; an error is one line on stderr, never a traceback."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin stall those of other processes
    arguments = build_parser().parse_args(argv)
    handler: Handler = arguments.handler
    try:
        code = handler(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except CallerError as error:
        return _fail(arguments.command, error, 2)
    except EvidenceError as error:
        return _fail(arguments.command, error, 1)
    except DeviceError as error:
        return _fail(arguments.command, error, 3)
    except MemoryError:
        return _fail(arguments.command, "there is not enough memory", 3)
    except KeyboardInterrupt:
        return _fail(arguments.command, "interrupted", 3)


def _fail(command: str, error: object, code: int) -> int:
    print(_common.visible(f"chipwitness {command}: {error}"), file=sys.stderr)
    return code
