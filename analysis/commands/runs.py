"""``train``."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import (
    add_json,
    count,
    finish,
    parse_now,
    progress_bar,
)
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError, is_about_name

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from monitor.lab.simulated_lab import LabConfig
    from monitor.presets.task import Task

__all__ = ["register", "require_runs", "trust_path"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("train")
    _add_task(parser)
    _add_chips(parser)
    parser.add_argument("--steps", type=count, default=16, metavar="N", help="optimizer steps of the run (default 16)")
    parser.add_argument(
        "--seed", type=count, default=0, metavar="S", help="decides weights, data order and all secrets"
    )
    parser.add_argument("--checkpoint-every", type=count, default=4, metavar="K", help="steps between full states")
    parser.add_argument(
        "--keep",
        type=count,
        metavar="N",
        help=("keep the newest N full states, and fewer and fewer of the older ones (default: all)"),
    )
    parser.add_argument("--snapshot-rate", default="1/4", metavar="P", help="snapshots per chip and step (default 1/4)")
    parser.add_argument(
        "--keep-snapshots",
        type=count,
        default=0,
        metavar="N",
        help="store the bytes of each chip's newest N snapshots in RUN.lab (default 0)",
    )
    parser.add_argument("--lab", metavar="NAME", help="name of the simulated lab (default: lab-1, or that of --after)")
    parser.add_argument("--lie", metavar="NAME", help="simulate this lie of a lab or chip; --lie list names them")
    parser.add_argument("--lie-step", type=count, metavar="T", help="step of the lie (default: the middle)")
    parser.add_argument("--device", default="native", metavar="NAME", help="device to train on")
    parser.add_argument(
        "--hours",
        type=float,
        default=24.0,
        help=("hours that the lab declares for the run (default 24); the training is not stopped by it"),
    )
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="run folder to write, with RUN.trust.json and RUN.lab next to it"
    )
    parser.add_argument("--after", type=Path, metavar="RUN", help="train the next run on the chips of this run")
    parser.add_argument("--parent", type=Path, metavar="RUN", help="start from the final weights of a finished run")
    parser.add_argument(
        "--sync", action="store_true", help="flush each step to the disk's medium, so that it outlives a power loss"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume a run after a crash")
    parser.add_argument(
        "--registry", type=Path, metavar="DIR", help="register the lab and its chips in this registry (created if new)"
    )
    add_json(parser)
    parser.epilog = "JSON keys: run, run_id, state_digest, steps, rounding_log_bytes, trust, device"
    show_every_day(parser, "preset data numerics chips steps seed out lie device parent resume")
    parser.set_defaults(handler=_train)


def _add_task(parser: ArgumentParser) -> None:
    """Add what is trained, and in which arithmetic."""
    parser.add_argument("--preset", metavar="NAME", help="model, data and loss; `--preset list` names them")
    parser.add_argument("--data", type=Path, metavar="FILE", help="your own text, for presets that read one")
    parser.add_argument(
        "--numerics",
        choices=("exact", "rounded", "rounded-probabilistic", "rounded-calibrated", "native"),
        default="rounded",
        help=(
            "arithmetic (default rounded). exact: the same bits on every device. rounded: where two devices could "
            "round differently, the log records which way the rounding went. A bound on the devices' errors decides "
            "which roundings are logged, and it always holds. rounded-probabilistic: the bound fails in 1 of 1e6 "
            "runs. rounded-calibrated: the bound was measured. native: plain PyTorch"
        ),
    )
    parser.add_argument("--batch-size", type=count, metavar="N", help="samples a step (default: the preset's)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), help="default: the preset's")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="peak rate (default: the preset's)")


def _add_chips(parser: ArgumentParser) -> None:
    """Add the options about the chips that a run is trained on."""
    parser.add_argument("--chips", type=count, default=4, metavar="N", help="chips that hold a shard each (default 4)")
    parser.add_argument(
        "--shares",
        metavar="N,N,…",
        help="in place of --chips: sizes of the chips' parts of the state, as a ratio such as 2,1,1",
    )
    parser.add_argument(
        "--beacon-every",
        type=count,
        default=0,
        metavar="N",
        help="steps between two signed time beacons (default: no beacons)",
    )
    parser.add_argument(
        "--inspectorate",
        type=Path,
        metavar="FILE",
        help="public key (registry keygen) of the inspectorate that may allow the chips to delete old log records "
        "(default: a simulated inspectorate)",
    )
    parser.add_argument(
        "--idle-chips",
        type=count,
        default=0,
        metavar="N",
        help="registered chips that take no part in the run; their evidence goes to RUN.answers",
    )


def trust_path(run: Path) -> Path:
    """Where ``train`` writes what the maker and the registry tell the inspector."""
    run = run if run.name else run.resolve()
    return run.with_name(run.name + ".trust.json")


def require_runs(runs: Sequence[Path]) -> None:
    """CallerError where there is no folder, or nothing of a run in it; what is in it is its lab's affair."""
    from monitor.transcript.layout import JOURNAL, MANIFEST, METADATA

    parts = {MANIFEST, JOURNAL, METADATA, "data", "logs", "checkpoints", "batches", "programs", "constants", "chips"}
    for run in runs:
        try:
            names = os.listdir(run)
        except OSError as error:
            if not is_about_name(error):
                continue  # an inspection says so, with what it finds of other runs
            raise CallerError(f"there is no run folder {run}") from None
        if not parts & {name.lower() for name in names}:  # as some file systems hand them on
            raise CallerError(f"{run} does not contain a run")


def _train(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    if arguments.lie == "list":
        return _list_lies(arguments)
    if arguments.preset == "list":
        return _list_presets(arguments)
    if (arguments.resume is None) == (arguments.out is None):
        raise CallerError("give either --out RUN for a new run or --resume RUN for a killed one")
    if arguments.resume is not None and arguments.registry is not None:
        raise CallerError("the lab of a killed run is already registered: leave out --registry")
    enter(arguments.device)
    from monitor.recording.options import RunConfig
    from monitor.recording.recipes import resume, train

    if arguments.resume is not None:
        bar = progress_bar(arguments, arguments.steps, "resume")
        result = resume(arguments.resume, sync=arguments.sync, progress=bar)
    else:
        config = _lab(arguments)
        task = _task(arguments, config.chips)
        reference = _reference(arguments, task, config)
        bar = progress_bar(arguments, task.steps, f"train {task.preset}")
        result = train(
            task,
            arguments.out,
            config,
            device=arguments.device,
            run=RunConfig(shares=_shares(arguments), reference=reference, sync=arguments.sync),
            parent=arguments.parent,
            progress=bar,
        )
    data = {
        "run": str(result.run),
        "run_id": result.run_id,
        "state_digest": result.state_digest,
        "steps": result.steps,
        "rounding_log_bytes": result.rounding_log_bytes,
        "trust": str(trust_path(result.run)),
        "device": arguments.device,
    }
    return finish(arguments, data, [f"{name:20} {value}" for name, value in data.items()])


def _task(arguments: argparse.Namespace, chips: int) -> Task:
    from monitor.presets.task import Task

    if arguments.preset is None:
        raise CallerError("give --preset NAME")
    return Task.for_preset(
        arguments.preset,
        seed=arguments.seed,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        numerics=arguments.numerics,
        checkpoint_every=arguments.checkpoint_every,
        keep=arguments.keep,
        shards=chips,
    )


def _shares(arguments: argparse.Namespace) -> list[int] | None:
    try:
        return None if arguments.shares is None else [int(part) for part in arguments.shares.split(",")]
    except ValueError:
        raise CallerError(f"{arguments.shares!a:.100} is not a list of shares such as 3,1,2") from None


def _lab(arguments: argparse.Namespace) -> LabConfig:
    from inspector.registry.keyfiles import load_public
    from monitor.lab.lies import lie_name
    from monitor.lab.simulated_lab import LabConfig

    try:
        rate = Fraction(arguments.snapshot_rate)
    except (ValueError, ZeroDivisionError):
        raise CallerError(f"{arguments.snapshot_rate!r} is not a rate such as 1/4") from None
    if not 0 < rate <= 1:
        raise CallerError(f"the snapshot rate must lie in (0, 1], not {rate}")
    lie = None if arguments.lie is None else lie_name(arguments.lie)
    if not 0 < arguments.hours < 1e6:
        raise CallerError(f"--hours must lie in (0, 1000000), not {arguments.hours}")
    lie_step = arguments.lie_step if arguments.lie_step is not None else max(1, arguments.steps // 2)
    if lie is not None and not 1 <= lie_step <= arguments.steps:
        raise CallerError(f"--lie-step must lie in 1 … {arguments.steps}, the steps of the run, not {lie_step}")
    started, duration = parse_now(None), timedelta(hours=arguments.hours)
    if arguments.after is not None and arguments.inspectorate is not None:
        raise CallerError("the chips of --after RUN have their inspectorate already: leave out --inspectorate")
    settings: dict[str, Any] = {"lie": lie, "lie_step": lie_step, "source": arguments.data}
    settings |= {"started": started, "duration": duration}
    if arguments.lab is not None:
        settings["lab"] = arguments.lab
    if arguments.after is not None:
        return LabConfig.following(arguments.after, **settings)
    return LabConfig(
        seed=arguments.seed,
        chips=len(_shares(arguments) or ()) or arguments.chips,
        idle_chips=arguments.idle_chips,
        beacon_every=arguments.beacon_every,
        keep_snapshots=arguments.keep_snapshots,
        inspectorate=None if arguments.inspectorate is None else load_public(arguments.inspectorate),
        snapshot_rate=rate,
        **settings,
    )


def _list_presets(arguments: argparse.Namespace) -> int:
    from monitor.presets import PRESETS

    data = {name: preset.summary for name, preset in PRESETS.items()}
    return finish(arguments, data, [f"{name:16} {text}" for name, text in data.items()])


def _list_lies(arguments: argparse.Namespace) -> int:
    from monitor.lab.lies import every_lie

    data = {lie.name: lie.text for lie in every_lie().values()}
    return finish(arguments, data, [f"{name:24} {text}" for name, text in data.items()])


def _reference(arguments: argparse.Namespace, task: Task, config: LabConfig) -> dict[str, object]:
    """What maker and registry know before the run begins: the trust file but for what will be countersigned.

    With a registry's folder the lab is registered there, and the trust file holds what the registry then publishes.
    """
    from monitor.recording.recipes import reference_of

    if arguments.out.exists():
        raise CallerError(f"{arguments.out} exists already; choose another --out or resume it")
    reference = reference_of(task, config, _shares(arguments))
    if arguments.registry is not None:
        from analysis.registration import registered_trust
        from inspector.inspection.trust import Trust

        trust = Trust.from_json(reference, "the simulated world")
        reference = registered_trust(arguments.registry, config, trust).to_json()
    return reference
