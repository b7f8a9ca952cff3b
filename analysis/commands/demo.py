"""``demo`` and ``bench``."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, print_json
from firmware_sim.errors import CallerError, DeviceError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]

BENCHES = ("demo", "numerics", "rounding_logs", "calibration", "accuracy", "equality", "quality", "fleet", "registry")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands."""
    parser = subparsers.add_parser("demo", help="the main job: labs, inspections, verdicts, curves, report")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where to write (default: demo)")
    add_json(parser)
    parser.epilog = "JSON: the content of summary.json; exit code 0 if every verdict is the right one"
    parser.set_defaults(handler=_demo)

    parser = subparsers.add_parser("bench", help="measure in one run, with ratios to the native figure")
    parser.add_argument("work", choices=BENCHES)
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help="numerics, equality, quality: presets to train (default: small ones; for equality all)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="equality: steps (default: 20, for large presets 3); quality: steps (default: 300)",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="quality: seeds, counted from 0 (default: 5)")
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="equality: the first records (default: every known one)"
    )
    parser.add_argument(
        "--numerics", action="append", choices=("native", "rounded", "exact"), help="equality (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="equality, quality: keep runs here, run only others; accuracy: write the report",
    )
    add_json(parser)
    parser.epilog = (
        "JSON: a list of rows with work, mode, seconds, ratio and what else was measured; equality: work, mode, "
        "device, kind, steps, batch_size, seed, status, weights, optimizer, losses (digests), seconds, log_bytes, "
        "and exit code 1 where controlled rows do not all end in the same bits; accuracy: an object with hardware, "
        "operators, unmeasured, products and convolutions, errors against FP64; quality: "
        "work, mode, device, steps, seeds, loss, gap, bias, bias_error, threshold, passes, early_gap, early_ratio, "
        "passes_early, and exit code 1 where exact or rounded training does not pass"
    )
    parser.set_defaults(handler=_bench)


def _demo(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    enter("native")
    from tqdm import tqdm

    from analysis.demo import LABS, as_expected, run_demo

    with tqdm(total=len(LABS) + 3, desc="demo", disable=not sys.stderr.isatty(), leave=False) as bar:

        def say(line: str) -> None:
            if not arguments.json:
                bar.write(line)
                sys.stdout.flush()

        demo = run_demo(arguments.out, say=say, advance=lambda: bar.update() and None)
    if arguments.json:
        print_json(demo.summary)
    else:
        print(f"summary  {arguments.out / 'summary.json'}")
        print(f"report   {arguments.out / 'report.html'}")
    if not as_expected(demo.summary):
        raise DeviceError("a verdict of the demo is not the expected one; see summary.json")
    return 0


def _refuse(arguments: argparse.Namespace, *options: str) -> None:
    for option in options:
        if getattr(arguments, option) is not None:
            raise CallerError(f"--{option} is no option of `bench {arguments.work}`")


def _equality(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from analysis.bench import equality

    _refuse(arguments, "seeds")
    names = {"presets": "preset", "steps": "steps", "devices": "device", "numerics": "numerics", "out": "out"}
    given = {name: getattr(arguments, option) for name, option in names.items()}
    options = {name: value for name, value in given.items() if value is not None}
    with tqdm(desc="equality", unit="row", disable=not sys.stderr.isatty(), leave=False) as bar:
        rows = equality.run(progress=lambda row: bar.update() and None, **options)
    if arguments.json:
        print_json(rows)
    else:
        print("\n".join(equality.table(rows)))
    problem = equality.verdict(rows)
    if problem is not None:
        print(f"chipwitness bench: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


def _accuracy(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    _refuse(arguments, "preset", "steps", "seeds", "device", "numerics")
    enter("native")
    from analysis.bench import accuracy

    report = accuracy.run()
    if arguments.out is not None:
        accuracy.write(report, arguments.out)
    if arguments.json:
        print_json(report)
    else:
        print("\n".join(accuracy.table(report)))
    return 0


def _quality(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from analysis.bench import quality

    _refuse(arguments, "device", "numerics")
    names = {"presets": "preset", "steps": "steps", "seeds": "seeds", "out": "out"}
    given = {name: getattr(arguments, option) for name, option in names.items()}
    options = {name: value for name, value in given.items() if value is not None}
    with tqdm(desc="quality", unit="run", disable=not sys.stderr.isatty(), leave=False) as bar:
        judged = quality.judge(quality.run(progress=lambda row: bar.update() and None, **options))
    if arguments.json:
        print_json(judged)
    else:
        print("\n".join(quality.table(judged)))
    problem = quality.verdict(judged)
    if problem is not None:
        print(f"chipwitness bench: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


def _bench(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    if arguments.work == "equality":
        return _equality(arguments)
    if arguments.work == "accuracy":
        return _accuracy(arguments)
    if arguments.work == "quality":
        return _quality(arguments)
    _refuse(arguments, "steps", "seeds", "device", "numerics", "out")
    if arguments.work in ("demo", "numerics"):
        enter("native")
    options = {}
    if arguments.work != "numerics":
        _refuse(arguments, "preset")
    elif arguments.preset:
        options["presets"] = arguments.preset
    rows = importlib.import_module(f"analysis.bench.{arguments.work}").run(**options)
    if arguments.json:
        print_json(rows)
    else:
        for row in rows:
            rest = {key: value for key, value in row.items() if key not in ("work", "mode", "seconds", "ratio")}
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
            print(f"{row['work']:36} {row['mode']:20} {row['seconds']:10.3f} s {ratio:>8}  {rest or ''}")
    return 0
