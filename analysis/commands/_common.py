"""What several subcommands share: options, JSON output, progress."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import json_fields
from analysis.text import visible
from firmware_sim import limits
from firmware_sim.errors import CallerError, file_error
from monitor.files import write_whole

if TYPE_CHECKING:
    from tqdm import tqdm

    from inspector.inspection.verdict import Reason, Verdict

__all__ = [
    "add_json",
    "add_now",
    "add_trust",
    "count",
    "finish",
    "number",
    "parse_now",
    "plural",
    "print_json",
    "progress",
    "progress_bar",
    "say",
    "show_verdict",
    "visible",
    "write_new",
]


_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")


def say(line: object) -> None:
    """Print one line, made visible."""
    print(visible(line))


def number(text: str) -> float:
    """Parse a number, in groups of three digits too: 2000000, 2e6 or 2,000,000."""
    return float(text.replace(",", "") if _GROUPS.fullmatch(text) else text)


def count(text: str) -> int:
    """Parse a whole number in any of these forms; of digits it is exact."""
    digits = text.replace(",", "") if _GROUPS.fullmatch(text) else text
    if digits.lstrip("+-").isdecimal():
        return int(digits)
    value = float(digits)
    if not abs(value) <= 2**53 or value != value // 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: write 2000000, 2,000,000 or 2e6")
    return int(value)


def plural(many: float, noun: str) -> str:
    """Return a number with its noun, which takes an s (es after another) unless there is one."""
    text = f"{many:,g}" if isinstance(many, float) else f"{many:,}"
    return f"{text} {noun}" if many == 1 else f"{text} {noun}{'es' if noun.endswith('s') else 's'}"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_trust(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--trust FILE``, which may be given for several labs."""
    parser.add_argument(
        "--trust",
        type=Path,
        action="append",
        required=required,
        metavar="FILE",
        help="makers, firmware, labs and chips as the inspector knows them (repeat to merge several)",
    )


def add_now(parser: argparse.ArgumentParser) -> None:
    """Add ``--now TIME``."""
    parser.add_argument("--now", metavar="TIME", help="the current time, as 2026-01-31T12:00:00Z (default: the clock)")


def parse_now(text: str | None) -> datetime:
    """Return the time given, or the clock's; CallerError on another form."""
    if text is None:
        return datetime.now(UTC)
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise CallerError(f"{text!r} is not a time like 2026-01-31T12:00:00Z") from None


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; CallerError if it is, DeviceError if it cannot be written."""
    try:
        write_whole(path, data, new=True)
    except FileExistsError:
        raise CallerError(f"{path}: exists already") from None
    except OSError as error:
        raise file_error(str(path), error) from None


def print_json(data: object) -> None:
    """Print one JSON document on standard output; of an answer, and of each part of it, the fields."""
    json.dump(data, sys.stdout, indent=2, sort_keys=False, default=json_fields)
    sys.stdout.write("\n")


def finish(arguments: argparse.Namespace, data: object, lines: Iterable[str]) -> int:
    """Print the result as JSON or as lines, and return exit code 0."""
    if arguments.json:
        print_json(data)
    else:
        for line in lines:
            say(line)
    return 0


def show_verdict(arguments: argparse.Namespace, verdict: Verdict) -> int:
    """Print a verdict and return its exit code."""
    if arguments.json:
        print_json(verdict.to_json())
    else:
        from analysis.words import parts

        say(verdict.outcome.value)
        groups, most = _alike(verdict), limits.REASONS_SHOWN.most
        for run, reason, *others in groups[:most]:
            text, *details = parts(reason.text)
            say(f"  [{reason.guard}] {run + ': ' if run not in text else ''}{text}")
            for each in [*details, *([f"the same for {_places(others)}"] if others else [])]:
                say(f"    - {each}")
        if len(groups) > most:
            say(f"  … and {len(groups) - most} more")
        if "model" in verdict.evidence:
            from inspector.bundle.models import about_model

            say(f"  [model] {about_model(verdict.evidence['model'])}")
    return verdict.outcome.exit_code


def _alike(verdict: Verdict) -> list[list[Any]]:
    """The reasons, those about chips that differ in numbers alone in one list, behind the run if there are several."""
    from analysis.words import kind

    several, groups = len(verdict.evidence.get("runs", ())) > 1, dict[object, list[Any]]()
    for place, reason in enumerate(verdict.reasons):
        run = str(reason.where.get("run", "")) if several else ""
        key = (run, reason.guard, kind(reason.text)) if "chip" in reason.where else place
        groups.setdefault(key, [run]).append(reason)
    return list(groups.values())


def _places(reasons: Iterable[Reason]) -> str:
    """Chips with the records that reasons are about."""
    chips: dict[str, list[str]] = {}
    for each in reasons:
        records = chips.setdefault(str(each.where["chip"]), [])
        records += [str(each.where["record"])] if "record" in each.where else []
    return "; ".join(f"{chip} (record {', '.join(records)})" if records else chip for chip, records in chips.items())


def progress(arguments: argparse.Namespace, total: int | None, unit: str, label: str | None = None) -> tqdm[Any]:
    """Return a bar on standard error, if that is a terminal and no program reads the answer."""
    from tqdm import tqdm

    quiet = arguments.json or not sys.stderr.isatty()
    return tqdm(total=total, desc=label or arguments.command, unit=unit, disable=quiet, leave=False)


def progress_bar(arguments: argparse.Namespace, total: int, label: str) -> Callable[[int, int, str], None]:
    """Return a callback (done, total, note) that draws such a bar over steps."""
    bar = progress(arguments, total, "step", label)

    def advance(done: int, _: int, note: str) -> None:
        bar.update(done - bar.n)
        if note:
            bar.set_postfix_str(visible(note))
        if done >= total:
            bar.close()

    return advance
