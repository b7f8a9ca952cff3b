"""``bench``: measurements that a user makes on their own machine, each with its own options."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, count, print_json, progress
from analysis.commands.runs import trust_path

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from analysis.bench.origin import Row

__all__ = ["ROWS", "Work", "add_works", "option", "presets", "register"]

ROWS = "JSON, a list of rows: work, mode, seconds, ratio (to the native figure)"
Option = tuple[str, dict[str, Any]]


def option(flag: str, **keywords: Any) -> Option:
    """An option of a work, as ``argparse`` takes it."""
    return flag, keywords


def presets(default: str) -> Option:
    """The option that chooses presets."""
    return option(
        "--preset", action="append", metavar="NAME", dest="presets", help=f"what to train (default: {default})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A measurement: a module whose function ``run`` takes the options by name.

    ``write`` of that module puts what ``run`` returns into a file, ``table`` prints it, ``verdict`` says what is not as
    the work promises; the last two may be missing.

    Attributes:
        keys: what its JSON holds, as the help prints it.
        device: the device of this process, where the work needs one.
        resumes: the file of ``--out`` keeps what was measured, and ``run`` measures what it lacks.
    """

    text: str
    keys: str
    options: tuple[Option, ...] = ()
    device: str | None = None
    resumes: bool = False


WORKS: Mapping[str, Work] = {
    "numerics": Work(
        text="time of native, FP64, rounded and exact arithmetic, for matrix products and training steps",
        keys=ROWS,
        options=(
            presets("small ones"),
            option("--device", default="native", metavar="NAME", help="what to measure (default: native)"),
        ),
    ),
    "recording": Work(
        text="a step of a GPT of 5M parameters: plain, in controlled numerics, and recorded with them",
        keys=(
            f"{ROWS}, median_ratio, cpu_seconds, cpu_ratio, parameters, batch_size, steps. The ratio is to the same "
            "numerics alone. Exit code 3: a recorded step takes more than 1.3 times as long as the numerics alone"
        ),
        options=(
            option("--steps", type=count, metavar="N", help="steps that are measured (default: 32)"),
            option(
                "--batch", action="append", type=count, metavar="N", dest="sizes", help="sequences (default: 4 and 32)"
            ),
        ),
    ),
    "inspection": Work(
        text="cost of an inspection: by checkpoint interval, for a long run, with one worker and with two",
        keys=(
            "JSON, a list of rows: work (interval, long or workers), mode, seconds, ratio (share of the steps that one "
            "device replays, or the time relative to one worker), interval, against, confidence, outcome, segments, "
            "replayed_segments, replayed_steps, predicted_steps, replay_seconds (by device), step_ms, "
            "training_seconds, bytes_a_step, checkpoint_bytes. Exit code 3: a run is not accepted, the long one needs "
            "more than a tenth of its steps, or two workers take more than 0.65 of the time of one"
        ),
        options=(
            option(
                "--cases",
                nargs="+",
                choices=("interval", "long", "workers"),
                metavar="WORK",
                help="which of interval, long, workers to measure (default: all)",
            ),
            option("--steps", type=count, metavar="N", help="steps of the long run (default: 10000)"),
            option(
                "--curve-steps", type=count, metavar="N", help="steps of the run with each interval (default: 1024)"
            ),
        ),
    ),
    "dispute": Work(
        text="cost of a dispute between two labs, by the length of the run, of a step and of a sum, and for each "
        "operator",
        keys=(
            "JSON, a list of rows: work, mode (the labs agree or differ), seconds (the referee's processor time), "
            "ratio (to the fewest steps or operators), steps, nodes (operators of a step), branching, guilty, "
            "rounds, most_rounds, questions, bytes, leaf_bytes, program_bytes, bytes_by_question, evidence_bytes, "
            "providers_seconds (of both labs' answers), step_seconds (of a recorded step), terms (of a product). For "
            "a preset's operators: numerics, mode (the operator), shapes, calls, bytes, program_bytes, seconds, "
            "questions, case. Exit code 3: a wrong party is guilty, rounds grow by more than the logarithms of steps "
            "and operators, or an operator is not decided with 20 MB"
        ),
        options=(
            option("--steps", action="append", type=count, metavar="N", help="of runs (default: 16, 64, 256 and 1024)"),
            option("--layers", action="append", type=count, metavar="N", help="of networks (default: 1, 4, 16 and 64)"),
            option("--terms", action="append", type=count, metavar="N", help="of products (default: 2^15 to 2^18)"),
            option("--preset", metavar="NAME", help="whose operators are counted (default: gpt2-117m)"),
        ),
        device="native",
    ),
    "chip": Work(
        text=(
            "overhead of a simulated chip: pauses for snapshots, digests, meter, memory, audits, ten years in 64 KiB "
            "of NVRAM"
        ),
        keys=(
            "JSON, a list of rows: work (freeze, digest, tiny-gpt, meter, chips, audit or decade), mode, seconds, "
            "ratio (to a plain copy, SHA-256 in one thread, a plain step, the youngest log). Further keys depend on "
            "work. Exit code 3: a target is missed"
        ),
        options=(
            option("--chips", type=count, metavar="N", help="chips in one process (default: 1000)"),
            option("--megabytes", type=count, metavar="M", help="memory that is frozen and hashed (default: 512)"),
            option("--years", type=count, metavar="Y", help="years of a chip in the field (default: 10)"),
        ),
    ),
    "distributed": Work(
        text="one training on one process, FSDP2 and DDP, and whether it reaches the same bits",
        keys=(
            "JSON, a list of rows: work, mode (layout and processes), seconds, ratio (step_mib at 48 micro-batches "
            "over that at 12, or a step's time on two processes over that of one at half the batch), numerics, "
            "device, foreach, micro_batches, step_mib (the most that a rank's memory grows by in a step), freed "
            "(storages that FSDP2 let go), uneven (tensors in pieces of different lengths), norms, clip, roots (of "
            "the state after each step). Exit code 3: a layout ends in other bits under exact numerics, memory or "
            "time grows, fewer storages are freed than natively, clipping or uneven pieces do not occur, or a lying "
            "rank is not named"
        ),
        options=(
            option("--steps", type=count, metavar="N", help="steps of each training, at least 3 (default: 3)"),
            option(
                "--cases",
                nargs="+",
                choices=("equality", "elastic", "memory", "lie", "speed"),
                metavar="WORK",
                help="which of equality, elastic, memory, lie, speed to measure (default: all)",
            ),
        ),
    ),
    "fleet": Work(
        text="detection probability of large fleets",
        keys=ROWS,
    ),
    "quality": Work(
        text="losses of controlled training against native training",
        resumes=True,
        keys=(
            "JSON, a list of rows: work, mode, device, steps, seeds, loss, gap, bias, bias_error, threshold, "
            "passes, early_gap, early_ratio, passes_early. Exit code 3: exact or rounded training does not pass"
        ),
        options=(
            presets("tiny-gpt and digits-cnn"),
            option("--steps", type=count, metavar="N", help="default: 300"),
            option("--seeds", type=count, metavar="N", help="seeds, counted from 0 (default: 5)"),
            option("--run", type=Path, metavar="RUN", help="compare a recorded run's own steps instead"),
            option("--trust", type=Path, action="append", metavar="FILE", help="with --run (default: RUN.trust.json)"),
        ),
    ),
    "explore": Work(
        text="the explorer in a browser: whether JavaScript agrees with Python, and how fast it draws",
        keys=(
            "JSON, a list of rows: points, seed, work, value, most (the largest value that is accepted), unit. "
            "Exit code 3: a value is larger. Needs Chromium and `pip install 'chipwitness[browser]'`"
        ),
        options=(
            option("--points", type=count, metavar="N", help="random settings of the sliders (default: 10000)"),
            option("--seed", type=count, metavar="S", help="seed of the settings (default: 1)"),
        ),
    ),
    "status": Work(
        text="how old the committed measurements are, and which parts of the product have changed since",
        keys=(
            "JSON, a list of rows: file, commits (that measured it), formats (current, older or unnoted), "
            "processor, changed (lines of Python by folder since the oldest of these commits; null outside a "
            "checkout that has them)"
        ),
    ),
}


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    add_works(subparsers.add_parser("bench"), WORKS)


def add_works(parser: ArgumentParser, works: Mapping[str, Work], package: str = "analysis.bench") -> None:
    """Add works whose modules lie in a package, under their names, as subcommands."""
    actions = parser.add_subparsers(dest="work", required=True, metavar="WORK")
    for name, work in works.items():
        one = actions.add_parser(name, help=work.text, epilog=work.keys)
        for flag, keywords in work.options:
            one.add_argument(flag, **keywords)
        about = (
            "file of rows: those that it holds are kept, and only the others are measured"
            if work.resumes
            else "write the rows with this machine's description"
        )
        one.add_argument("--out", type=Path, metavar="FILE", help=about)
        add_json(one)
        module = f"{package}.{name.replace('-', '_')}"
        one.set_defaults(handler=_bench, measured=work, module=module, told_by=parser.prog)


def _bench(arguments: argparse.Namespace) -> int:
    """Run a work; exit code 3 where what it found is not what it promises."""
    from inspector.devices import enter

    device = getattr(arguments, "device", None) or arguments.measured.device
    if device is not None:
        enter(device)
    module = importlib.import_module(arguments.module)
    names = inspect.signature(module.run).parameters
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    if getattr(arguments, "run", None) is not None:
        from inspector.inspection.trust import Trust

        trust = arguments.trust or [trust_path(arguments.run)]
        options["recorded"] = (arguments.run, Trust.load(trust, [arguments.run]))
    with progress(arguments, None, "row", arguments.work) as bar:
        found = module.run(**options, **({"progress": bar.update} if "progress" in names else {}))
    if arguments.out is not None and "out" not in names:
        module.write(found, arguments.out)
    problem: str | None = _report(module, found, arguments.json)
    if problem is not None:
        print(f"{arguments.told_by}: {problem}", file=sys.stderr)
    return 0 if problem is None else 3


def _report(module: ModuleType, found: Any, as_json: bool) -> str | None:
    """Print what a work found; why it is not what the work promises, or None."""
    if as_json:
        print_json(found)
    else:
        print("\n".join(getattr(module, "table", _lines)(found)))
    return module.verdict(found) if hasattr(module, "verdict") else None


def _lines(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("work", "mode", "seconds", "ratio")}
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
        lines.append(f"{row['work']:36} {row['mode']:20} {row['seconds']:10.3f} s {ratio:>8}  {rest or ''}")
    return lines
