"""``verify``, ``replay``, ``inspect`` and ``devices``."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import keys_text
from analysis.commands._common import (
    add_json,
    add_now,
    add_trust,
    count,
    parse_now,
    print_json,
    progress,
    say,
    show_verdict,
)
from analysis.commands._inspection_options import (
    DEFAULT_REPLAY_DEVICES,
    add_executor,
    add_settings,
    executor,
    settings_of,
)
from analysis.commands._one_process import costs, inspect_alone
from analysis.commands.rules import add_rules
from analysis.commands.runs import require_runs, trust_path
from analysis.parser import show_every_day
from analysis.text import visible
from firmware_sim.errors import CallerError
from inspector.bundle.evidence import CheckedBundle
from inspector.inspection.document import Evidence, ReplayEvidence

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands."""
    _add_verify(subparsers.add_parser("verify"))
    _add_replay(subparsers.add_parser("replay"))
    _add_inspect(subparsers.add_parser("inspect"))
    _add_devices(subparsers.add_parser("devices"))


def _add_verify(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN|FILE", help="run folder, or a file of `inspect --bundle` or `dispute --out`"
    )
    add_trust(parser)
    for name, what in (
        ("inspectorate", "a bundle's verdict or the record of a dispute"),
        ("cluster", "a bundle's replays"),
    ):
        text = f"public key, in addition to those of the trust file, that may sign {what} (repeatable)"
        parser.add_argument(f"--{name}", type=Path, action="append", default=[], metavar="FILE", help=text)
    parser.add_argument("--model", type=Path, metavar="PATH", help="for a bundle: the model that it must be about")
    text = "for a bundle: answers of lab and cluster about a step on which they differ (`world contest`; repeatable)"
    parser.add_argument("--contest", type=Path, action="append", default=[], metavar="FILE", help=text)
    _add_answers(parser)
    add_now(parser)
    add_json(parser)
    parser.epilog = (
        "The outcome of a bundle is that of its verdict; a REJECT that rests on the inspectorate's word alone "
        "becomes INCONCLUSIVE. The record of a dispute has `verifies` in its evidence, and the keys of `dispute`.\n"
        "JSON keys: outcome, reasons, evidence. For a run, evidence has what `inspect` lists for each of its runs, and "
        "lineages, ledger, draws, chips, past_spans, clones and chips_listed.\n"
        f"{keys_text(CheckedBundle, 'For a bundle, keys of evidence')}"
    )
    parser.set_defaults(handler=_verify)


def _add_replay(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--segment", type=count, required=True, metavar="I", help="number of the segment, from 0")
    parser.add_argument("--device", default=DEFAULT_REPLAY_DEVICES[0], metavar="NAME", help="default: sse41")
    parser.add_argument(
        "--draw",
        type=_draw,
        metavar="HEX",
        help=(
            "repeat an earlier inspection's test that each step uses its batch: it replays steps with altered "
            "batches. HEX is the draw in that inspection's verdict"
        ),
    )
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_executor(parser)
    add_json(parser)
    lead = "JSON keys: outcome, reasons, evidence (replays).\n"
    parser.epilog = lead + keys_text(ReplayEvidence, "Each of replays")
    parser.set_defaults(handler=_replay)


def _add_inspect(parser: ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="all runs that the lab declares")
    add_trust(parser, required=False)
    parser.add_argument(
        "--world",
        type=Path,
        metavar="DIR",
        help=(
            "without --trust, the inspection takes place in a world, and this is its folder (default: RUN.world next "
            "to the first RUN; created if new). Keys and chips are then read from RUN.trust.json, and "
            "the only other options are --rules, --samples, --segments, --device, --shared, --confidence and --against"
        ),
    )
    add_settings(parser)
    add_executor(parser)
    parser.add_argument(
        "--seed",
        metavar="X",
        help="seed of the draw, any text, to repeat a simulation (default: the system's randomness)",
    )
    _add_kept(parser)
    _add_terms(parser)
    add_now(parser)
    add_json(parser)
    keys = (
        "JSON keys: outcome, reasons (one that is about a single run has the keys run, run_id and lab, too), evidence."
    )
    parser.epilog = f"{keys}\n{keys_text(Evidence, 'Keys of evidence')}"
    show_every_day(parser, "trust samples device confidence against memory bundle key rules live seed")
    parser.set_defaults(handler=_inspect)


def _add_kept(parser: ArgumentParser) -> None:
    """Add what an inspection remembers, signs and goes on from."""
    parser.add_argument(
        "--memory",
        type=Path,
        metavar="FILE",
        help="file that says where each chip's log ended at earlier inspections; each log must go on from there. It "
        "is updated",
    )
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="write the signed verdict and its evidence here")
    parser.add_argument("--key", type=Path, metavar="FILE", help="with --bundle: the inspectorate's private key")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="with --bundle: a model with the final weights of a run (safetensors file or folder); its digest "
        "becomes a subject of the verdict",
    )
    parser.add_argument(
        "--cluster-key", type=Path, metavar="FILE", help="with --bundle: the replay cluster's private key"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help=(
            "on ACCEPT: write a signed DIR/CHIP/checkpoint.json (log checkpoint) for each drawn chip. It says how "
            "much of the chip's log was accepted; `chip prune` makes the chip delete that part"
        ),
    )
    parser.add_argument(
        "--prune-key",
        type=Path,
        metavar="FILE",
        help="with --checkpoints: private key that signs them; `train --inspectorate` gave its public key to the chips",
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help=(
            "bundle of an earlier inspection (repeatable). Every run of the bundle must now continue from the last "
            "step that was signed then. Steps accepted then are not replayed again, if a known inspectorate signed "
            "the bundle and the confidence is the same"
        ),
    )


def _add_terms(parser: ArgumentParser) -> None:
    """Add what an inspection allows, and where else it finds evidence."""
    parser.add_argument(
        "--maximum-flop",
        type=count,
        metavar="H",
        help=(
            "limit for the FLOP of all runs of a lab together, and for each run's FLOP together with that of all "
            "earlier runs that it continues, also of other labs. A run that starts from weights of unknown origin is "
            "then not accepted (default: the trust file's maximum_flop, or no limit)"
        ),
    )
    parser.add_argument(
        "--clock",
        metavar="DEVICE",
        help=(
            "hardware type of the chips, as named in analysis/data/chips.csv; a chip is rejected if its meter counts "
            "more work between two beacons than this hardware can do (default: the trust file's rates, or no check)"
        ),
    )
    add_rules(parser)
    parser.add_argument(
        "--every-lab",
        action="store_true",
        help="also draw chips of labs in the trust file whose runs are not given; a missing answer counts as a refusal",
    )
    _add_answers(parser)
    parser.add_argument(
        "--live",
        type=Path,
        action="append",
        default=[],
        metavar="RUN.lab",
        help="challenge the drawn chips of this simulated lab now (repeatable). Their older quotes do not count "
        "then. A run in progress can be accepted up to its last committed step",
    )
    parser.add_argument(
        "--shards",
        type=Path,
        action="append",
        default=[],
        metavar="RUN.lab",
        help="let this simulated lab open the stored snapshots of the drawn chips (train --keep-snapshots; "
        "repeatable). If no run explains a snapshot, the verdict names the first element at which it differs from "
        "the replayed state",
    )


def _add_devices(parser: ArgumentParser) -> None:
    add_json(parser)
    parser.epilog = (
        "JSON, an object for each device: name, kind (cpu, cuda, or emulated: imitates another machine's order of "
        "additions), summary, fingerprint, status, engines (implementations of exact products that passed their "
        "known-answer test)"
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


def _verify(arguments: argparse.Namespace) -> int:
    from inspector.inspection.inspection import verify
    from inspector.inspection.trust import Trust

    now = parse_now(arguments.now)
    if arguments.run.is_file():
        return _verify_file(arguments)
    if arguments.model is not None or arguments.contest:
        raise CallerError("--model PATH and --contest FILE can only be used with a bundle")
    require_runs([arguments.run])
    trust = Trust.load(arguments.trust, [arguments.run])
    return show_verdict(arguments, verify(arguments.run, trust, now=now, answers=arguments.answers))


def _verify_file(arguments: argparse.Namespace) -> int:
    from inspector.bundle.checker import check_bundle
    from inspector.bundle.contents import read_bundle
    from inspector.bundle.contests import read_contest
    from inspector.bundle.models import read_model
    from inspector.delegation.evidence import check_audit, is_audit
    from inspector.dispute.arena import check_tournament, is_tournament
    from inspector.dispute.game import check_game, is_game
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_public

    data = read_bundle(arguments.run)
    checks = ((is_game, check_game), (is_tournament, check_tournament), (is_audit, check_audit))
    check = next((check for is_one, check in checks if is_one(data)), None)
    trust = Trust.load(arguments.trust, chips=check is None)
    trust = replace(
        trust,
        inspectorates=trust.inspectorates | frozenset(map(load_public, arguments.inspectorate)),
        clusters=trust.clusters | frozenset(map(load_public, arguments.cluster)),
    )
    if check is not None:
        if arguments.model is not None or arguments.contest:
            raise CallerError("--model PATH and --contest FILE can only be used with a bundle")
        return show_verdict(arguments, check(data, trust))
    try:
        model = None if arguments.model is None else read_model(arguments.model, tensors=False)
        contests = [read_contest(path) for path in arguments.contest]
        verdict = check_bundle(data, trust, model=model, contests=contests)
    except CallerError:  # of the caller alone, so that the bundle shows what it shows without it
        show_verdict(arguments, check_bundle(data, trust))
        raise
    return show_verdict(arguments, verdict)


_ALONE = (
    "seed",
    "memory",
    "bundle",
    "key",
    "cluster_key",
    "model",
    "checkpoints",
    "prune_key",
    "earlier",
    "maximum_flop",
    "clock",
    "every_lab",
    "answers",
    "live",
    "shards",
)
"""Options of an inspection by one process, all of whose parts the rounds of a world have in another form."""


def _inspect_in_world(arguments: argparse.Namespace) -> int:
    """A round in the world of these runs, made if need be."""
    from inspector.inspection.trust import Trust
    from inspector.inspection.wording import REVEALS
    from inspector.rounds.turns import play_round, world_of
    from monitor.lab.rounds import LabSide

    require_runs(arguments.runs)
    given = next((name for name in _ALONE if getattr(arguments, name) not in (None, False, [])), None)
    if given is not None:
        raise CallerError(f"--{given.replace('_', '-')} can only be used in an inspection with --trust FILE")
    folder = arguments.world or trust_path(arguments.runs[0]).with_name(f"{arguments.runs[0].resolve().name}.world")
    joining = [(run, Trust.load([trust_path(run)], [run])) for run in arguments.runs]
    settings, now = settings_of(arguments, seed=None), parse_now(arguments.now)
    with executor(arguments) as devices:
        devices.prepare(settings.devices)
        world = world_of(folder, joining, LabSide)
        decided = play_round(world, settings, rules=arguments.rules, now=now, worker=devices.run)
    code = show_verdict(arguments, decided.verdict)
    if not arguments.json:
        for line in costs(decided.verdict.evidence):
            say(line)
        say(f"  [world] round {world.round} among the parties in {folder}; its bundle is {decided.bundle}")
        say(f"  [reveals] {REVEALS}")
    return code


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.trust is None:
        return _inspect_in_world(arguments)
    if arguments.world is not None:
        raise CallerError("--world DIR has its own trust file: leave out --trust")
    from inspector.inspection.memory import hold_memory

    waits = f"waits for another inspection that uses {visible(arguments.memory)}"
    with hold_memory(arguments.memory, lambda: print(waits, file=sys.stderr)):
        return inspect_alone(arguments)


def _draw(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "a draw is a hexadecimal number, as the reasons of a verdict give it"
        ) from None


def _replay(arguments: argparse.Namespace) -> int:
    from inspector.inspection.replays import replay
    from inspector.inspection.trust import Trust

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    with executor(arguments) as devices:
        verdict = replay(
            arguments.run, trust, arguments.segment, arguments.device, draw=arguments.draw, worker=devices.run
        )
    return show_verdict(arguments, verdict)


def _devices(arguments: argparse.Namespace) -> int:
    from firmware_sim.errors import DeviceError
    from inspector.devices import DEVICES
    from inspector.replay.pool import run_worker

    rows = []
    bar = progress(arguments, len(DEVICES), "device")
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
        bar.update()
    bar.close()
    if arguments.json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['name']:22} {row['fingerprint'] or row['status']:78} {row['summary']}")
            for engine, state in row["engines"].items():
                if state != "serves":
                    say(f"{'':22} {engine}: {state}")
    return 0
