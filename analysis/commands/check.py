"""``check``: everything in a training loop that cannot be recorded, at once, before a run is begun."""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import runpy
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, count, print_json, say, visible
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from monitor.recording.refusals import Refusal
    from monitor.recording.rehearsal import Rehearsals

__all__ = ["register"]

_KEYS = (
    "JSON keys: loop, recorders, steps, programs, refusals (a list with step, file, line, code, operator, shapes, "
    "cause, remedy), tables (one for each recorder; each: recorded (operators), bound (numbers, such as learning "
    "rates, that the run's declaration would fix), unbound (the other numbers), refused, numerics, seed, cost (in "
    "seconds)), stopped_by "
    "(the error that ended the loop "
    "early, or null). Exit code 0: nothing is refused; 1: something is; 2: the loop cannot be run, or makes no "
    "recorder"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``check``."""
    parser = subparsers.add_parser(
        "check",
        description="Runs a script or a function with its recorders in dry-run mode: nothing is written, signed or "
        "sent to a chip. Each loop ends after a few steps. The code's own output goes to standard error. The code "
        "runs in the script's folder and sees your environment variables. No other command runs your code.",
        epilog=_KEYS,
    )
    parser.add_argument("loop", metavar="FILE.py|MODULE:FUNCTION", help="code that makes a monitor.Recorder")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the script, after --")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps to take of each loop (default: 3)")
    add_json(parser)
    parser.set_defaults(handler=_check)


def _check(arguments: argparse.Namespace) -> int:
    from monitor.recording.rehearsal import EnoughSteps, rehearsals

    if arguments.steps < 1:
        raise CallerError("give at least one step")
    run = _runner(arguments.loop, arguments.arguments)
    stopped: str | None = None
    with rehearsals(arguments.steps) as found, contextlib.redirect_stdout(sys.stderr):
        try:
            run()
        except EnoughSteps:
            pass
        except SystemExit as error:
            stopped = None if error.code in (None, 0) else f"SystemExit: {error.code}"
        except Exception as error:
            stopped = _described(error)
    refusals = [refusal for each in found.made for refusal in each.refusals]
    if refusals and stopped is not None and stopped.startswith("CallerError"):
        stopped = None  # a dry run's finish() says all of them once more
    if not refusals and stopped is not None:
        raise CallerError(f"{arguments.loop} ended with {stopped}")
    if not any(each.steps for each in found.made) and not refusals:
        what = "takes no step of its monitor.Recorder" if found.made else "makes no monitor.Recorder"
        raise CallerError(f"{arguments.loop} {what}, so there is nothing to say about it")
    _show(arguments, found, refusals, stopped)
    return 1 if refusals else 0


def _show(arguments: argparse.Namespace, found: Rehearsals, refusals: Sequence[Refusal], stopped: str | None) -> None:
    steps, programs = (sum(getattr(each, name) for each in found.made) for name in ("steps", "programs"))
    if arguments.json:
        document: dict[str, object] = {
            "loop": arguments.loop,
            "recorders": len(found.made),
            "steps": steps,
            "programs": programs,
            "refusals": [refusal.to_json() for refusal in refusals],
            "tables": [each.overview().to_json() for each in found.made],
            "stopped_by": stopped,
        }
        print_json(document)
        return
    for refusal in refusals:
        say(refusal.line or "before the loop")
        for line in _lines(refusal):
            say(f"    {line}")
    for each in found.made:
        for name, said in each.overview().rows():
            say(f"{name:9}{said}")
    counted = f"{len(refusals)} refusal{'s' * (len(refusals) != 1)}" if refusals else "nothing is refused"
    say(f"{counted} in {steps} steps, which run {programs} programs")
    if stopped is not None:
        say(f"the loop ended early with {stopped}")


def _lines(refusal: Refusal) -> Iterator[str]:
    if refusal.line is not None and refusal.line.code:
        yield f"> {refusal.line.code}"
    yield refusal.cause
    if refusal.shapes:
        yield f"on {', '.join(refusal.shapes)}"
    if refusal.remedy:
        yield f"instead: {refusal.remedy}"


def _runner(loop: str, arguments: Sequence[str]) -> Callable[[], object]:
    """What runs the caller's code; CallerError if there is no such file or function."""
    if loop.endswith(".py"):
        path = Path(loop)
        if not path.is_file():
            raise CallerError(f"there is no file {loop}")
        return lambda: _run_script(path, arguments)
    if ":" not in loop:
        raise CallerError(f"{loop} is neither a FILE.py nor a MODULE:FUNCTION")
    if arguments:
        raise CallerError("a function is called without arguments; to pass arguments, give a script instead")
    return lambda: _call(loop)


def _run_script(path: Path, arguments: Sequence[str]) -> None:
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _call(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CallerError(f"{name} cannot be found: {error}") from None
    finally:
        sys.path.pop(0)
    function()


def _described(error: Exception) -> str:
    """An error in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return visible(f"{type(error).__name__}: {error}{where}")
