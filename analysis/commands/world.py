"""``world``: parties with folders, keys and inboxes, and an inspection among them in rounds."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, add_now, count, finish, parse_now, plural, show_verdict, write_new
from analysis.commands._inspection_options import add_executor, add_settings, executor, settings_of
from analysis.commands._machines import add_split, run_machines, split_world
from analysis.commands.rules import add_rules
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.rounds.world import World

__all__ = ["add_announcement", "announce_round", "register"]

_ACTIONS = {
    "announce": "inspectorate: begin a round; publish the hash of a secret, and the deadlines",
    "hand": "a lab: hand over the signed head of each run's log, or sign that it has no run",
    "reveal": "inspectorate: reveal the secret; this fixes which chips, nonces and segments are drawn",
    "answer": "a lab: let the drawn chips answer live",
    "order": "inspectorate: tell the cluster which segments to replay, and the labs what to open",
    "open": "a lab: send the cluster the drawn parts of its runs",
    "replay": "cluster: replay the drawn segments, and sign the results",
    "decide": "inspectorate: sign the verdict, with its bundle",
    "round": "a whole round, from announce to decide; each party uses only its own folder",
}


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``world``."""
    group = subparsers.add_parser("world")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser("init", help="make a world: inspectorate, cluster, registry, and room for labs")
    _finish(parser, _init, "JSON keys: world, inspectorate and cluster (id of the key of each)")
    parser = actions.add_parser("join", help="register a lab, its chips and its runs, from the trust file of a run")
    _finish(parser, _join, "JSON keys: world, labs")
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="runs of one lab, finished or not, with RUN.trust.json"
    )
    parser.add_argument("--trust", type=Path, action="append", default=[], metavar="FILE", help="trust file, if no RUN")
    for name, text in _ACTIONS.items():
        parser = actions.add_parser(name, help=text)
        _finish(parser, _act, _KEYS.get(name, "JSON keys: world, round, done"))
        add_now(parser)
        if name in ("announce", "round"):
            add_announcement(parser)
        if name in ("replay", "round"):
            add_executor(parser)
        if name in ("hand", "answer", "open"):
            parser.add_argument("--lab", required=True, metavar="NAME", help="which lab acts")
        if name == "hand":
            parser.add_argument(
                "--run", action="append", metavar="NAME", help="only these runs (a lab that hides others)"
            )
            parser.add_argument("--none", action="store_true", help="sign that there is no run")
    text = "copy each party's folder for its own machine, with a file of options for `serve`"
    parser = actions.add_parser("split", help=text)
    _finish(parser, split_world, "JSON keys: folder, parties")
    add_split(parser)
    text = "a round between processes, one for each party of a split world, over HTTP on this machine"
    parser = actions.add_parser("run", help=text)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `world split` wrote")
    add_announcement(parser)
    add_json(parser)
    parser.epilog = _VERDICT
    parser.set_defaults(handler=_run)
    text = "lab and cluster play a game about a step on which they differ; `verify BUNDLE --contest FILE` decides it"
    parser = actions.add_parser("contest", help=text)
    _finish(parser, _contest, "JSON keys: contest (the file)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write; it opens one operator")
    parser = actions.add_parser("show", help="the messages of all rounds on a time line")
    _finish(
        parser, _show, "JSON, an object for each message: round, time, kind (ignored: no valid message), sender, to"
    )


_VERDICT = (
    "JSON keys: outcome, reasons, evidence (the keys of `inspect`, and round). The bundle lies in inspectorate/verdicts"
)
_ANNOUNCED = ("samples", "shared", "segments", "confidence", "against", "minutes", "refusals")
_KEYS = {"decide": _VERDICT, "round": _VERDICT}


def _finish(parser: ArgumentParser, handler: Any, keys: str) -> None:
    parser.add_argument(
        "world", type=Path, metavar="WORLD", help="folder of the simulated inspection: its parties and their messages"
    )
    add_json(parser)
    parser.epilog = keys
    parser.set_defaults(handler=handler)


def add_announcement(parser: ArgumentParser) -> None:
    """Add what an inspectorate announces."""
    add_settings(parser)
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="M", help="minutes between two deadlines (default 60)"
    )
    parser.add_argument(
        "--refusals",
        type=count,
        default=0,
        metavar="N",
        help="most refusals for which the verdict is INCONCLUSIVE; with more of them it is REJECT (default 0)",
    )
    add_rules(parser)


def _init(arguments: argparse.Namespace) -> int:
    from inspector.rounds.world import CLUSTER, INSPECTORATE, World

    world = World.create(arguments.world)
    data = {"world": str(arguments.world)} | {name: world.public(name).key_id for name in (INSPECTORATE, CLUSTER)}
    return finish(arguments, data, [f"{name:14} {value}" for name, value in data.items()])


def _join(arguments: argparse.Namespace) -> int:
    from analysis.commands.runs import trust_path
    from inspector.inspection.trust import Trust
    from inspector.rounds.world import World

    files = [*(trust_path(run) for run in arguments.runs), *arguments.trust]
    if not files:
        raise CallerError("give RUN, or the --trust file of a lab without runs")
    world = World(arguments.world)
    trust = Trust.load(files, arguments.runs)
    labs = world.join(trust, {})
    for run in arguments.runs:
        world.join(trust, {run.resolve().name: run})
    return finish(arguments, {"world": str(arguments.world), "labs": labs}, [f"{', '.join(labs)} joined"])


def _act(arguments: argparse.Namespace) -> int:
    from inspector.rounds import steps
    from inspector.rounds.world import World
    from monitor.lab.rounds import LabSide

    world, now, action = World(arguments.world, LabSide), parse_now(arguments.now), arguments.action
    if action == "round":
        return _round(arguments)
    if action == "decide":
        return show_verdict(arguments, steps.decide(world, now=now).verdict)
    done: Any
    if action == "announce":
        announce_round(arguments, world, now)
        done, text = world.round, f"round {world.round} is announced"
    elif action == "hand":
        chosen = [] if arguments.none else arguments.run
        done = steps.hand(world, arguments.lab, runs=chosen, now=now)
        text = f"{arguments.lab} handed over {plural(len(done), 'head')}"
    elif action == "reveal":
        done = steps.reveal(world, now=now)
        text = f"drawn: {', '.join(done)}"
    elif action == "answer":
        done = steps.answer(world, arguments.lab, now=now)
        text = f"{plural(len(done), 'chip')} of {arguments.lab} answered"
    elif action == "order":
        done = steps.order(world, now=now)
        text = f"{plural(done, 'job')} for the cluster"
    elif action == "open":
        done = steps.disclose(world, arguments.lab, now=now)
        text = f"{arguments.lab} opened what was drawn of {plural(len(done), 'run')}"
    else:
        with executor(arguments) as devices:
            done = steps.replay(world, now=now, worker=devices.run)
        text = f"{plural(done, 'signed result')}"
    return finish(arguments, {"world": str(arguments.world), "round": world.round, "done": done}, [text])


def _round(arguments: argparse.Namespace) -> int:
    from inspector.rounds.turns import play_round
    from inspector.rounds.world import World
    from monitor.lab.rounds import LabSide

    with executor(arguments) as devices:
        decided = play_round(
            World(arguments.world, LabSide),
            settings_of(arguments, seed=None),
            minutes=arguments.minutes,
            refusals=arguments.refusals,
            rules=arguments.rules,
            now=parse_now(arguments.now),
            worker=devices.run,
        )
    return show_verdict(arguments, decided.verdict)


def _run(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in _ANNOUNCED}
    options["rules"] = arguments.rules and arguments.rules.absolute()
    words = [f"--{name}={each}" for name, each in options.items() if each is not None]
    words += [f"--device={name}" for name in arguments.device or ()] + ["--json"] * arguments.json
    return run_machines(arguments, words)


def announce_round(arguments: argparse.Namespace, world: World, now: datetime) -> None:
    """Announce a round as these options say."""
    from inspector.rounds import steps

    steps.announce(
        world,
        settings_of(arguments, seed=None),
        minutes=arguments.minutes,
        refusals=arguments.refusals,
        now=now,
        rules=arguments.rules,
    )


def _contest(arguments: argparse.Namespace) -> int:
    from inspector.rounds.contest import contest
    from inspector.rounds.world import World
    from monitor.lab.rounds import LabSide

    write_new(arguments.out, contest(World(arguments.world, LabSide), now=datetime.now(UTC)))
    return finish(arguments, {"contest": str(arguments.out)}, [f"lab and cluster signed {arguments.out}"])


def _show(arguments: argparse.Namespace) -> int:
    from inspector.rounds.world import World

    rows = World(arguments.world).timeline()
    data = [dict(zip(("round", "time", "kind", "sender", "to"), row, strict=True)) for row in rows]
    return finish(
        arguments,
        data,
        [f"{number:4}  {time:20}  {kind:12}  {sender} -> {', '.join(to)}" for number, time, kind, sender, to in rows],
    )
