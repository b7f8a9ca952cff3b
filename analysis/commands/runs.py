"""``train``, ``verify``, ``replay``, ``inspect`` and ``devices``."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from analysis.commands._common import (
    add_json,
    add_now,
    add_trust,
    finish,
    parse_now,
    print_json,
    progress_bar,
    say,
    show_verdict,
    write_new,
)
from analysis.commands.odds import add_sampling, violation
from analysis.commands.rules import add_rules
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from monitor.lab.simulated import LabConfig
    from monitor.presets.task import Task

__all__ = ["register", "trust_path"]

DEFAULT_REPLAY_DEVICES = ("sse41", "mkl-compatible")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands."""
    _register_train(subparsers)
    parser = subparsers.add_parser(
        "verify", help="check everything of a run that needs no re-execution, or a verdict's bundle"
    )
    parser.add_argument("run", type=Path, metavar="RUN|BUNDLE", help="run folder, or a file of `inspect --bundle`")
    add_trust(parser)
    for name, whose in (("inspectorate", "verdict"), ("cluster", "replays")):
        text = f"of a bundle: a public key that may sign its {whose}, besides the trust file's {name}s (repeatable)"
        parser.add_argument(f"--{name}", type=Path, action="append", default=[], metavar="FILE", help=text)
    _add_answers(parser)
    add_now(parser)
    add_json(parser)
    parser.epilog = (
        "JSON keys: outcome, reasons, evidence. Of a bundle the outcome is its verdict's, or INCONCLUSIVE where it "
        "rejects on the inspectorate's word alone; evidence has verifies (false: the bundle is not sound, and says "
        "nothing of the lab), verdict, inspectorate, grounds, reasons, runs, drawn_chips, odds and rules"
    )
    parser.set_defaults(handler=_verify)

    parser = subparsers.add_parser("replay", help="re-execute one segment of a run on a device")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--segment", type=int, required=True, metavar="I", help="number of the segment, from 0")
    parser.add_argument("--device", default=DEFAULT_REPLAY_DEVICES[0], metavar="NAME", help="default: sse41")
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_json(parser)
    parser.epilog = "JSON keys: outcome, reasons, evidence"
    parser.set_defaults(handler=_replay)

    parser = subparsers.add_parser("inspect", help="sample chips, match snapshots, replay segments, give a verdict")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="all runs that the lab declares")
    add_trust(parser)
    parser.add_argument("--samples", type=int, required=True, metavar="S", help="chips to draw from the registry")
    parser.add_argument(
        "--seed", metavar="X", help="draw by this text, to repeat a simulation (default: the system's randomness)"
    )
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="replay device, repeatable (default: sse41 and mkl-compatible)",
    )
    parser.add_argument("--segments", type=int, metavar="N", help="replay at most N segments of a run")
    add_sampling(parser)
    parser.add_argument(
        "--memory",
        type=Path,
        metavar="FILE",
        help="where each chip's log ended at earlier inspections; its extension is checked, and the file updated",
    )
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="write the signed verdict and its evidence here")
    parser.add_argument("--key", type=Path, metavar="FILE", help="of --bundle: the inspectorate's private key")
    parser.add_argument(
        "--cluster-key", type=Path, metavar="FILE", help="of --bundle: the replay cluster's private one"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help="of an earlier inspection: its runs must go on from the heads that their labs signed then, and what it "
        "accepted at the same confidence, signed by a known inspectorate, is not replayed again (repeatable)",
    )
    parser.add_argument(
        "--maximum-flop",
        type=int,
        metavar="H",
        help="reject a lab whose runs take more together, and a run that takes more with those that it continues; "
        "nor accept supplied weights (default: the trust file's maximum_flop, or no such rule)",
    )
    add_rules(parser)
    parser.add_argument(
        "--every-lab",
        action="store_true",
        help="draw chips of every lab in the trust file, of those whose runs are not given too: silence is a refusal",
    )
    _add_answers(parser)
    parser.add_argument(
        "--live",
        type=Path,
        action="append",
        default=[],
        metavar="RUN.lab",
        help="challenge the drawn chips of this simulated lab now (repeatable); no older quote of theirs counts, and "
        "of a run that goes on the committed steps can be accepted",
    )
    add_now(parser)
    add_json(parser)
    parser.epilog = (
        "JSON keys: outcome, reasons, evidence (runs, lineages with run, origin, chain, chain_flop, chain_most_flop "
        "and past_unknown, labs, draw, drawn_chips, chips, clones, chances, odds (of each run: coverage and what "
        "each violation's chance of escape is, as `chipwitness odds` says), replays, and with --rules also rules: "
        "digest, rules, require, found, results and labs)"
    )
    parser.set_defaults(handler=_inspect)

    parser = subparsers.add_parser("devices", help="list replay devices and the fingerprints of their arithmetic")
    add_json(parser)
    parser.epilog = (
        "JSON: a list of name, kind (cpu, cuda, or emulated: an order of additions that this machine does not have), "
        "summary, fingerprint, status, engines (what serves after its known-answer test)"
    )
    parser.set_defaults(handler=_devices)


def _add_answers(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--answers",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="evidence of registered chips that take part in no run (repeatable)",
    )


def _register_train(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    parser = subparsers.add_parser("train", help="train on monitored chips and leave a run folder")
    parser.add_argument("--preset", metavar="NAME", help="model, data and loss; an unknown name lists them")
    parser.add_argument("--data", type=Path, metavar="FILE", help="your own text, for presets that read one")
    parser.add_argument(
        "--numerics",
        choices=("exact", "rounded", "rounded-probabilistic", "rounded-calibrated", "native"),
        default="rounded",
        help="rounded: worst-case error bounds; -probabilistic fails with at most 1e-6 a run, -calibrated was measured",
    )
    parser.add_argument("--chips", type=int, default=4, metavar="N", help="chips that hold a shard each (default 4)")
    parser.add_argument("--shares", metavar="N,N,…", help="instead: how many parts of the state each chip holds")
    parser.add_argument(
        "--beacon-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between beacons of simulated time: none",
    )
    parser.add_argument(
        "--idle-chips", type=int, default=0, metavar="N", help="registered chips that take no part: RUN.answers"
    )
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="optimizer steps of the run (default 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides weights, data order and all secrets")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples a step (default: the preset's)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), help="default: the preset's")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="peak rate (default: the preset's)")
    parser.add_argument("--checkpoint-every", type=int, default=4, metavar="K", help="steps between full states")
    parser.add_argument("--keep", type=int, metavar="N", help="newest states that stay, and sparser ones before: all")
    parser.add_argument("--snapshot-rate", default="1/4", metavar="P", help="snapshots per chip and step (default 1/4)")
    parser.add_argument("--lab", default="lab-1", metavar="NAME", help="name of the simulated lab (default lab-1)")
    parser.add_argument("--lie", metavar="NAME", help="simulate this lie of a lab or chip; --lie list names them")
    parser.add_argument("--lie-step", type=int, metavar="T", help="step of the lie (default: the middle)")
    parser.add_argument("--device", default="native", metavar="NAME", help="device to train on")
    parser.add_argument("--hours", type=float, default=24.0, help="hours until the declared end of the run")
    parser.add_argument("--out", type=Path, metavar="RUN", help="run folder; also RUN.trust.json, RUN.lab")
    parser.add_argument("--after", type=Path, metavar="RUN", help="the same lab's next run, on the same chips")
    parser.add_argument("--parent", type=Path, metavar="RUN", help="start from the final weights of a finished run")
    parser.add_argument(
        "--sync", action="store_true", help="flush each step to the disk's medium, so that it outlives a power loss"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume a run after a crash")
    parser.add_argument(
        "--registry", type=Path, metavar="DIR", help="register the simulated lab and its chips there, made if need be"
    )
    add_json(parser)
    parser.epilog = "JSON keys: run, run_id, state_digest, steps, rounding_log_bytes, trust, device"
    parser.set_defaults(handler=_train)


def trust_path(run: Path) -> Path:
    """Where ``train`` writes what the maker and the registry tell the inspector."""
    run = run if run.name else run.resolve()
    return run.with_name(run.name + ".trust.json")


def _train(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    if arguments.lie == "list":
        return _list_lies(arguments)
    if (arguments.resume is None) == (arguments.out is None):
        raise CallerError("give either --out RUN for a new run or --resume RUN for a killed one")
    if arguments.resume is not None and arguments.registry is not None:
        raise CallerError("a killed run's lab is registered already: leave --registry out")
    enter(arguments.device)
    from monitor.recording.recipes import resume, train

    if arguments.resume is not None:
        bar = progress_bar(arguments.steps, "resume", quiet=arguments.json)
        result = resume(arguments.resume, sync=arguments.sync, progress=bar)
    else:
        config = _lab(arguments)
        task = _task(arguments, config.chips)
        reference = reference_of(arguments.out, config, registry=arguments.registry)
        bar = progress_bar(task.steps, f"train {task.preset}", quiet=arguments.json)
        result = train(
            task,
            arguments.out,
            config,
            device=arguments.device,
            shares=_shares(arguments),
            parent=arguments.parent,
            reference=reference,
            sync=arguments.sync,
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
        raise CallerError(f"{arguments.shares!a:.100} is no list of shares such as 3,1,2") from None


def _lab(arguments: argparse.Namespace) -> LabConfig:
    from monitor.lab.conduct import simulated_lie
    from monitor.lab.simulated import new_lab_config, next_lab_config

    try:
        rate = Fraction(arguments.snapshot_rate)
    except (ValueError, ZeroDivisionError):
        raise CallerError(f"{arguments.snapshot_rate!r} is not a rate such as 1/4") from None
    if not 0 < rate <= 1:
        raise CallerError(f"the snapshot rate must lie in (0, 1], not {rate}")
    lie = None if arguments.lie is None else simulated_lie(arguments.lie).value
    if not 0 < arguments.hours < 1e6:
        raise CallerError(f"--hours must lie in (0, 1000000), not {arguments.hours}")
    lie_step = arguments.lie_step if arguments.lie_step is not None else max(1, arguments.steps // 2)
    started, duration = parse_now(None), timedelta(hours=arguments.hours)
    if arguments.after is not None:
        return next_lab_config(
            arguments.after, lie=lie, lie_step=lie_step, source=arguments.data, started=started, duration=duration
        )
    return new_lab_config(
        lab=arguments.lab,
        seed=arguments.seed,
        chips=len(_shares(arguments) or ()) or arguments.chips,
        idle_chips=arguments.idle_chips,
        beacon_every=arguments.beacon_every,
        lie=lie,
        lie_step=lie_step,
        snapshot_rate=rate,
        source=arguments.data,
        started=started,
        duration=duration,
    )


def _list_lies(arguments: argparse.Namespace) -> int:
    from firmware_sim import ChipLie
    from monitor.lab.conduct import LIES

    data = {lie.value: lie.description for lie in (*LIES, *ChipLie)}
    return finish(arguments, data, [f"{name:24} {text}" for name, text in data.items()])


def reference_of(run: Path, config: LabConfig, *, registry: Path | None = None) -> dict[str, Any]:
    """What maker and registry know before the run begins: the trust file but for what will be countersigned.

    With a registry's folder the lab is registered there, and the trust file holds what the registry then publishes.
    """
    from monitor.lab.simulated import SimulatedLab

    if run.exists():
        raise CallerError(f"{run} exists already; choose another --out or resume it")
    reference = SimulatedLab.reference_values(config)
    if registry is not None:
        from analysis.registration import registered_trust
        from inspector.inspection.trust import Trust

        reference = registered_trust(registry, config, Trust.from_json(reference, "the simulated world")).to_json()
    return reference


def _verify(arguments: argparse.Namespace) -> int:
    from inspector.inspection.judging import verify
    from inspector.inspection.trust import Trust

    now = parse_now(arguments.now)
    if arguments.run.is_file():
        return _verify_bundle(arguments)
    _require_runs([arguments.run])
    trust = Trust.load(arguments.trust, [arguments.run])
    return show_verdict(arguments, verify(arguments.run, trust, now=now, answers=arguments.answers))


def _verify_bundle(arguments: argparse.Namespace) -> int:
    from inspector.bundle.checking import check_bundle
    from inspector.bundle.contents import read_bundle
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_public

    trust = Trust.load(arguments.trust)
    trust = replace(
        trust,
        inspectorates=trust.inspectorates | frozenset(map(load_public, arguments.inspectorate)),
        clusters=trust.clusters | frozenset(map(load_public, arguments.cluster)),
    )
    return show_verdict(arguments, check_bundle(read_bundle(arguments.run), trust))


def _inspect(arguments: argparse.Namespace) -> int:
    from inspector.bundle.building import bundle_of, settings_json
    from inspector.bundle.contents import accepted_in, heads_in, read_bundle
    from inspector.bundle.replays import signing
    from inspector.inspection.casefile import CaseFile
    from inspector.inspection.guards import Sampling, Settings
    from inspector.inspection.judging import inspect
    from inspector.inspection.memory import load_memory, remember, save_memory
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_private
    from inspector.replay.pool import run_worker
    from inspector.rules.judging import apply_rules
    from inspector.rules.reading import read_rules
    from monitor.lab.evidence import LiveChips

    now = parse_now(arguments.now)
    _require_runs(arguments.runs)
    if len({arguments.bundle is None, arguments.key is None, arguments.cluster_key is None}) > 1:
        raise CallerError("--bundle FILE, --key FILE and --cluster-key FILE are given together")
    if arguments.bundle is not None and arguments.bundle.exists():
        raise CallerError(f"{arguments.bundle}: exists already")
    key = None if arguments.key is None else load_private(arguments.key)
    worker = run_worker if key is None else signing(run_worker, load_private(arguments.cluster_key))
    bundles = [read_bundle(path) for path in arguments.earlier]
    earlier = [head for data in bundles for head in heads_in(data)]
    rules = None if arguments.rules is None else read_rules(arguments.rules)
    trust = Trust.load(arguments.trust, arguments.runs)
    settings = Settings(
        samples=arguments.samples,
        seed=arguments.seed,
        devices=tuple(arguments.device or DEFAULT_REPLAY_DEVICES),
        segments=arguments.segments,
        sampling=Sampling(confidence=arguments.confidence, against=violation(arguments.against)),
    )
    if arguments.maximum_flop is not None:
        trust = replace(trust, maximum_flop=arguments.maximum_flop)
    memory = None if arguments.memory is None else load_memory(arguments.memory)
    ask = LiveChips(arguments.live).ask if arguments.live else None
    case = CaseFile()
    with TemporaryDirectory() as place:
        verdict = inspect(
            [_still(run, arguments.live, Path(place)) for run in arguments.runs],
            trust,
            settings,
            now=now,
            worker=worker,
            memory=memory,
            answers=arguments.answers,
            ask=ask,
            labs=trust.labs if arguments.every_lab else None,
            earlier=earlier,
            accepted=accepted_in(bundles, trust.inspectorates, settings_json(settings)),
            case=case,
        )
        if rules is not None:
            verdict = apply_rules(verdict, rules, case, trust, settings, worker=worker)
        if key is not None:
            write_new(arguments.bundle, bundle_of(case, verdict, trust, settings, key))
    code = show_verdict(arguments, verdict)
    if not arguments.json:
        for line in _costs(verdict.evidence):
            say(line)
    if memory is not None:
        save_memory(arguments.memory, remember(memory, verdict))
    return code


def _costs(evidence: dict[str, Any]) -> list[str]:
    """What the replays of each run took, beside what all of its steps would take on the same device."""
    lines = []
    steps = {each["run"]: each["steps"] for each in evidence["runs"]}
    for each in evidence.get("replays", []):
        taken, seconds = each.get("steps"), each["seconds"]
        if taken and seconds is not None:
            whole = steps[each["run"]]
            text = (
                f"  [cost] {each['run']} on {each['device']}: {taken} of {whole} steps replayed ({taken / whole:.0%})"
            )
            lines.append(f"{text} in {seconds:.2g} s; all of them would take {seconds * whole / taken:.2g} s")
    return lines


def _still(run: Path, live: list[Path], place: Path) -> Path:
    """The run, or where a lab that was named is at work on it a copy, as it is between two steps."""
    from monitor.lab.desk import is_at_work
    from monitor.lab.evidence import copy_run
    from monitor.lab.simulated import lab_path

    lab = lab_path(run).resolve()
    if lab not in {each.resolve() for each in live} or not is_at_work(lab):
        return run
    copy_run(run, place / run.resolve().name)
    return place / run.resolve().name


def _replay(arguments: argparse.Namespace) -> int:
    from inspector.inspection.judging import replay
    from inspector.inspection.trust import Trust

    _require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    return show_verdict(arguments, replay(arguments.run, trust, arguments.segment, arguments.device))


def _require_runs(runs: list[Path]) -> None:
    for run in runs:
        if not run.is_dir():
            raise CallerError(f"there is no run folder {run}")


def _devices(arguments: argparse.Namespace) -> int:
    from firmware_sim.errors import DeviceError
    from inspector.devices import DEVICES
    from inspector.replay.pool import run_worker

    rows = []
    for name, entry in DEVICES.items():
        row: dict[str, Any] = {
            "name": name,
            "kind": entry.kind,
            "summary": entry.summary,
            "fingerprint": None,
            "status": "ready",
            "engines": {},
        }
        try:
            missing = entry.missing()
            if missing is not None:
                raise DeviceError(missing)
            result = run_worker(name, {"action": "fingerprint"})
            row["fingerprint"], row["engines"] = result["fingerprint"], result["engines"]
        except DeviceError as error:
            row["status"] = str(error)
        rows.append(row)
    if arguments.json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['name']:22} {row['fingerprint'] or row['status']:78} {row['summary']}")
            for engine, state in row["engines"].items():
                if state != "serves":
                    say(f"{'':22} {engine}: {state}")
    return 0
