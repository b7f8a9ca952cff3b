"""The parser of all subcommands, and how one is run."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from analysis.commands import GROUPS, _common, register
from analysis.parser import Parser
from analysis.version import version
from firmware_sim.errors import CallerError, DeviceError, EvidenceError, file_error, lacks_memory

__all__ = ["Handler", "build_parser", "run"]

Handler = Callable[[argparse.Namespace], int]


_WORDS = {
    "run": "one declared training; its run folder is what the lab hands over as evidence",
    "segment": "the steps of a run from one checkpoint to the next",
    "trust file": "keys, chips and terms that an inspector knows from elsewhere, never from the run",
    "cluster": "the inspectorate's own processors, which replay segments",
    "bundle": "a signed verdict with the evidence that it rests on",
    "epoch": "a part of a chip's log under one secret key, which is revealed once that part is closed",
}
"""What the help of several commands takes as known."""


def _overview() -> str:
    """The commands in their groups, a line each."""
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"\n{group}:", *(f"  {name:10} {text}" for name, (_, text) in commands.items())]
    ends = "Exit codes: 0 accepted or done, 1 rejected, 2 a mistake in the call, 3 nothing could be concluded."
    words = [f"  {word:11} {text}" for word, text in _WORDS.items()]
    return "\n".join([*lines, "\nWords:", *words, "", "`chipwitness COMMAND --help` explains a command.", ends])


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of these words, or of all subcommands; each sets ``handler`` (Namespace -> exit code)."""
    known = [name for commands in GROUPS.values() for name in commands]
    parser = Parser(
        prog="chipwitness",
        usage="chipwitness [-h] [--version] COMMAND ...",
        description="On-chip compute-monitoring simulator.\n" + _overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"chipwitness {version()}")
    if words is not None and not (words and words[0] in known):
        if not words:
            parser.error("give a command: `demo` shows the main job, `--help` lists all")
        parser.add_argument("command", choices=known, metavar="COMMAND", help=argparse.SUPPRESS)
        return parser
    named: dict[str, Any] = {"dest": "command", "required": True, "metavar": "COMMAND", "prog": "chipwitness"}
    register(parser.add_subparsers(parser_class=Parser, **named), words[0] if words else None)
    return parser


def run(argv: Sequence[str], parser: Callable[[Sequence[str]], argparse.ArgumentParser] = build_parser) -> int:
    """Run one subcommand in this process; an error is one line on stderr, never a traceback.

    Args:
        parser: makes the parser of these words, whose subcommands set ``command`` and ``handler``.

    Returns:
        0 accepted or done, 1 rejected (or what ``check``, ``fsck``, ``ranks``, ``chip``, ``registry`` or ``operators``
        finds), 2 the caller's mistake, 3 nothing could be concluded, 130 interrupted.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin stall those of other processes
    named = "chipwitness"
    try:
        _prepare_output()
        try:
            arguments = parser(argv).parse_args(argv)
        except SystemExit:  # argparse has said all that was asked for
            _finish_output()
            raise
        named = f"chipwitness {arguments.command}"
        handler: Handler = arguments.handler
        code = handler(arguments)
        _finish_output()
        return code
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # libraries written in Rust panic with no Exception
        code, text = _ending(error, _judges(named, argv))
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # what was printed before, and not at the process's end, where a failure goes unseen
        if os.environ.get("CHIPWITNESS_TRACEBACK"):
            traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            print(_common.visible(f"{named}: {text}"), file=sys.stderr, flush=True)
        return code


_JUDGING = frozenset(
    {"verify", "replay", "inspect", "world", "dispute", "check", "fsck", "ranks", "chip", "registry", "operators"}
)
"""Commands whose exit code 1 says something about the evidence; for others, a file at fault is the caller's choice."""


def _judges(named: str, argv: Sequence[str]) -> bool:
    return named.removeprefix("chipwitness ") in _JUDGING or list(argv[:2]) == ["program", "review"]


class _Output(io.FileIO):
    """Standard output that keeps the reason why it could not be written, even if ignored; nothing is tried again."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
                raise
        return len(data)


def _prepare_output() -> None:
    """Make ready to print: DeviceError where there is no standard output; without standard error, errors are lost."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        raise DeviceError("standard output is closed; redirect it to /dev/null to do without")
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        raw, lines = _Output(sys.stdout.fileno(), "w", closefd=False), sys.stdout.isatty()
        encoding = sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=lines
        )


def _failure() -> OSError | None:
    """Why standard output could not be written, if that is so."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Output) else None


def _finish_output() -> None:
    """OSError unless all that was printed has been written."""
    sys.stdout.flush()
    if (failure := _failure()) is not None:
        raise failure


def _ending(error: BaseException, judges: bool) -> tuple[int, object]:
    """The exit code of what ended a command, and the line that says so."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, OSError) and error is _failure():
        return 3, f"cannot write to standard output: {error.strerror or error}"
    if isinstance(error, OSError) and error.filename is not None and error.errno != errno.ENOMEM:
        error = file_error(_common.visible(os.fsdecode(error.filename)), error)
    if isinstance(error, CallerError):
        return 2, error
    if isinstance(error, DeviceError):  # a damaged copy among them
        return 3, error
    if isinstance(error, EvidenceError):
        return 1 if judges else 2, error
    if lacks_memory(f"{type(error).__name__}: {error}"):
        return 3, "there is not enough memory"
    if isinstance(error, OSError):
        return 3, error.strerror or error
    if isinstance(error, ImportError):
        return 3, f"a library that this needs cannot be loaded: {error}"
    kind = type(error).__name__
    return 3, f"internal error: {kind}: {error} (please report it; with CHIPWITNESS_TRACEBACK=1 it says where)"
