"""``serve``: a party of rounds between machines, or one that answers a referee, over HTTP."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, count, say, show_verdict
from analysis.commands._inspection_options import add_executor, executor
from analysis.commands.world import add_announcement, announce_round
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.rounds.party import Place
    from inspector.rounds.world import World

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``serve``."""
    group = subparsers.add_parser("serve")
    actions = group.add_subparsers(dest="action", required=True, metavar="PARTY")
    text = "answers a referee's questions about one finished RUN, or does the --tasks of clients, until interrupted"
    parser = actions.add_parser("provider", help=text, epilog=_EXAMPLE)
    _add_provider(parser)
    _add_witness(actions)
    for name, (text, handler) in _PARTIES.items():
        parser = actions.add_parser(name, help=text)
        _add_place(parser)
        parser.set_defaults(handler=handler)
        if name == "lab":
            parser.add_argument("--name", required=True, metavar="NAME", help="the lab's name in the registry")
            text = "folder of a run, in place of those that the lab's folder names (repeat for several)"
            parser.add_argument("--run", type=Path, action="append", metavar="DIR", help=text)
            continue
        _add_budget(parser)
        if name == "cluster":
            add_executor(parser)
            parser.set_defaults(json=True)  # no bar
        else:
            add_announcement(parser)
            add_json(parser)
            parser.epilog = "JSON keys: outcome, reasons, evidence (the keys of `inspect`, and round)"
            show_every_day(parser, "folder port tls peer samples minutes refusals rules device")


_FILES = 1 << 20
_LEAST = 60
_AT_ONCE = 32
"""Questions that a witness carries at once."""


def _add_provider(parser: ArgumentParser) -> None:
    """Add what a provider answers for, or does."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="folder of a run, with RUN.lab next to it")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="folder for questions and answers")
    text = "public keys of those who may ask, or order tasks"
    parser.add_argument("--referees", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    _add_server(parser)
    parser.add_argument("--device", default="native", metavar="NAME", help="device on which steps run, or run again")
    text = "with RUN: copy of another party's run, to confirm or deny it under its rounding logs (repeat for several)"
    parser.add_argument("--follow", type=Path, action="append", default=[], metavar="COPY", help=text)
    text = "of --follow: trust file that names the labs of these runs (repeat to merge several)"
    parser.add_argument("--trust", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "in place of RUN: do the tasks that clients order (`delegate`), and keep them and their runs in this folder"
    parser.add_argument("--tasks", type=Path, metavar="DIR", help=text)
    parser.add_argument("--key", type=Path, metavar="FILE", help="of --tasks: the provider's private key")
    parser.add_argument("--lab", metavar="NAME", help="of --tasks: the provider's name")
    parser.add_argument("--most-flop", type=count, metavar="N", help="of --tasks: refuse a task of more FLOP")
    text = "of --tasks: refuse a task that takes more memory and disk (default: what the disk has free)"
    parser.add_argument("--most-bytes", type=count, metavar="N", help=text)
    text = "of --tasks: tasks that are sent, wait or run at once; they run one after another (default 4)"
    parser.add_argument("--most-tasks", type=count, default=4, metavar="N", help=text)
    text = "of --tasks: delete a task about which its client has asked nothing for so many days (default 30)"
    parser.add_argument("--keep-days", type=count, default=30, metavar="N", help=text)
    text = "of --tasks: public keys of witnesses that this provider accepts: they may say when its answers came"
    parser.add_argument("--witness", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--lie", metavar="NAME", help="of --tasks: simulate this lie (`train --lie list` names them)")
    parser.add_argument("--lie-step", type=count, default=1, metavar="T", help="step of the lie (default 1)")
    parser.set_defaults(handler=_provider)
    show_every_day(parser, "store referees port host tls device follow trust tasks key lab most-flop")


def _add_witness(actions: _SubParsersAction[ArgumentParser]) -> None:
    """Add the witness between clients and providers."""
    text = "carries questions of clients to providers, and signs when each was answered, until interrupted"
    parser = actions.add_parser("witness", help=text)
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the witness's private key")
    text = "trust file (`task trust`) with the keys of clients and providers (repeat to merge several)"
    parser.add_argument("--trust", type=Path, action="append", required=True, metavar="FILE", help=text)
    text = "name and address of a provider, as lab-a=https://HOST:PORT (repeat for each)"
    parser.add_argument("--provider", type=_peer, action="append", required=True, metavar="NAME=URL", help=text)
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="folder for statements and answers")
    _add_server(parser)
    text = "delete statements and answers after so many days (default 30)"
    parser.add_argument("--keep-days", type=count, default=30, metavar="N", help=text)
    text = f"carry no question that gives a provider less time, in seconds (default {_LEAST})"
    parser.add_argument("--least", type=count, default=_LEAST, metavar="N", help=text)
    parser.epilog = (
        "Both sides trust it for the time alone: it can alter no answer, and make no one guilty. Example: chipwitness "
        "serve witness --key witness --trust parties.json --provider lab-a=https://a:8443 --store seen --port 8450"
    )
    parser.set_defaults(handler=_witness)


def _add_budget(parser: ArgumentParser) -> None:
    """Add what one lab may take up."""
    text = "most bytes of one lab's messages and runs in a round (default: an equal share of the free disk)"
    parser.add_argument("--most-bytes", type=count, metavar="N", help=text)
    text = f"most files of runs that one lab may send in a round (default {_FILES})"
    parser.add_argument("--most-files", type=count, default=_FILES, metavar="N", help=text)


def _add_place(parser: ArgumentParser) -> None:
    """Add where the party is, and where the others are."""
    text = "the party's own folder, as `world split` makes it"
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help=text)
    text = "trust file of the registry (default: registry/trust.json in that folder)"
    parser.add_argument("--trust", type=Path, metavar="FILE", help=text)
    _add_server(parser)
    text = "name and address of another party, as lab-1=https://HOST:PORT (repeat for each)"
    parser.add_argument("--peer", type=_peer, action="append", required=True, metavar="NAME=URL", help=text)
    text = "port on 127.0.0.1 of /metrics (Prometheus) and /health"
    parser.add_argument("--metrics-port", type=_port, metavar="N", help=text)


def _add_server(parser: ArgumentParser) -> None:
    """Add where the server listens, and how."""
    parser.add_argument("--port", type=_port, required=True, metavar="N", help="port of the server")
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address of the server (default 127.0.0.1)")
    parser.add_argument("--tls", action="store_true", help=_TLS)


_TLS = (
    "encrypt what is sent; the others then write https://. At each start this party's key signs a new certificate, "
    "valid for 90 days. Without --tls everything can be read on its way: use that on 127.0.0.1 or in a "
    "tunnel that encrypts"
)


def _url(arguments: argparse.Namespace) -> str:
    return f"http{'s' * arguments.tls}://{arguments.host}:{arguments.port}"


def _peer(text: str) -> tuple[str, str]:
    """A party's name and its address."""
    name, equals, url = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!a:.100} is not a party: write NAME=https://HOST:PORT")
    return name, url


def _port(text: str) -> int:
    """A number from 1 to 65535."""
    if not 0 < (port := count(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!a:.100} is not a port from 1 to 65535")
    return port


_EXAMPLE = (
    "example: chipwitness serve provider --tasks tasks --key a.key --lab lab-a --store asked --referees client.pub "
    "--port 8443"
)


def _provider(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    if (arguments.run is None) == (arguments.tasks is None):
        raise CallerError("the following arguments are required: RUN, or --tasks DIR instead")
    enter(arguments.device)
    if arguments.tasks is not None:
        return _serve_tasks(arguments)
    from analysis.commands.runs import require_runs
    from inspector.dispute.provider import desk_of
    from inspector.inspection.transcripts import open_run
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_public
    from monitor.lab.prover import LabProver
    from monitor.transcript import RunFolder

    try:
        from inspector.wire.server import serve
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    require_runs([arguments.run, *arguments.follow])
    prover = LabProver(arguments.run)
    run = RunFolder(arguments.run, prover.key.verifying)
    followed = []
    if arguments.follow:
        trust = Trust.load(arguments.trust, arguments.follow)
        followed = [open_run(copy, trust) for copy in arguments.follow]
    desk = desk_of(run, prover, arguments.store, list(map(load_public, arguments.referees)), followed)
    say(f"lab {run.metadata.lab} answers for {arguments.run.name} on {_url(arguments)}")
    serve(desk, arguments.host, arguments.port, tls=prover.key if arguments.tls else None)
    return 0


def _witness(arguments: argparse.Namespace) -> int:
    from inspector.inspection.trust import Trust
    from inspector.registry.keyfiles import load_private
    from inspector.wire.witness import Witness

    try:
        from inspector.wire.client import Http
        from inspector.wire.server import serve
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    trust, key = Trust.load(arguments.trust, chips=False), load_private(arguments.key)
    parties = {}
    for name, url in arguments.provider:
        if name not in trust.labs:
            raise CallerError(f"the trust file names no provider {name!a:.100}")
        parties[trust.labs[name]] = Http(url, trust.labs[name])
    witness = Witness(
        folder=arguments.store,
        key=key,
        referees=trust.inspectorates,
        parties=parties,
        least=arguments.least,
        keep=arguments.keep_days * 86_400,
    )
    say(f"the witness carries questions to {', '.join(name for name, _ in arguments.provider)} on {_url(arguments)}")
    own = key if arguments.tls else None
    serve(witness, arguments.host, arguments.port, tls=own, workers=_AT_ONCE)
    return 0


def _inspectorate(arguments: argparse.Namespace) -> int:
    """Play the newest round if it is not decided, and a new one otherwise."""
    from inspector.rounds.turns import is_open
    from inspector.rounds.world import INSPECTORATE

    world = _world(arguments, INSPECTORATE)
    place = _place(arguments, world, INSPECTORATE)
    serve_party = _server()
    if not is_open(world):
        announce_round(arguments, world, datetime.now(UTC))
    decided = serve_party(world, INSPECTORATE, world.key(INSPECTORATE), place, until_decided=True)
    return 0 if decided is None else show_verdict(arguments, decided.verdict)


def _cluster(arguments: argparse.Namespace) -> int:
    from inspector.rounds.world import CLUSTER

    world = _world(arguments, CLUSTER)
    place = _place(arguments, world, CLUSTER)
    serve_party = _server()
    with executor(arguments) as devices:
        serve_party(world, CLUSTER, world.key(CLUSTER), place, worker=devices.run)
    return 0


def _lab(arguments: argparse.Namespace) -> int:
    from firmware_sim.evidence import canonical
    from monitor.files import write_whole

    world = _world(arguments, arguments.name)
    if arguments.run:
        runs = {run.resolve().name: str(run.absolute()) for run in arguments.run}
        write_whole(world.home(arguments.name) / "runs.json", canonical.encode(runs))
    _server()(world, arguments.name, world.side(arguments.name).key, _place(arguments, world, arguments.name))
    return 0


_PARTIES = {
    "inspectorate": (
        "run the inspectorate over HTTP: announce a round, and print its verdict",
        _inspectorate,
    ),
    "cluster": ("run the replay cluster over HTTP, for rounds of an inspection, until you interrupt it", _cluster),
    "lab": ("run a lab over HTTP, for rounds of an inspection, until you interrupt it", _lab),
}


def _world(arguments: argparse.Namespace, party: str) -> World:
    from inspector.rounds.world import World
    from monitor.lab.rounds import LabSide

    return World(arguments.folder, LabSide, own=party, registry=arguments.trust)


def _place(arguments: argparse.Namespace, world: World, party: str) -> Place:
    """Where all parties are; CallerError where one has no address."""
    from inspector.rounds.budget import LEAST, Budget
    from inspector.rounds.parts import parties_of
    from inspector.rounds.party import Place
    from inspector.rounds.world import CLUSTER, INSPECTORATE
    from inspector.wire.client import address

    peers, every = dict(arguments.peer), parties_of(world)
    needed = set(every if party in (INSPECTORATE, CLUSTER) else [INSPECTORATE, CLUSTER]) - {party}
    if party not in every:
        raise CallerError(f"--name: the registry has no lab {party!a:.50}; it has {', '.join(every[2:])}")
    for name in sorted(needed ^ set(peers)):
        what = f"has no address; write {name}=https://HOST:PORT" if name in needed else "is no party that this one asks"
        raise CallerError(f"--peer: {name!a:.50} {what}")
    addresses = {name: address(url) for name, url in peers.items()}
    budget = Budget()
    if party in (INSPECTORATE, CLUSTER):
        if arguments.most_bytes is not None and arguments.most_bytes < LEAST:
            raise CallerError(f"--most-bytes must be at least {LEAST}, so that a lab's messages have room")
        budget = Budget(bytes=arguments.most_bytes, files=arguments.most_files)
    place = {"host": arguments.host, "port": arguments.port, "tls": arguments.tls, "metrics": arguments.metrics_port}
    return Place(**place, peers=addresses, budget=budget)


def _server() -> Any:
    try:
        from inspector.rounds.party import serve_party
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    return serve_party


def _serve_tasks(arguments: argparse.Namespace) -> int:
    from analysis.commands._workshop import TaskProcesses
    from inspector.delegation.reception import Bounds, Reception
    from inspector.registry.keyfiles import load_private, load_public
    from monitor.lab.lies import lie_name

    try:
        from inspector.wire.server import serve
        from inspector.wire.uploads import upload_route
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    if arguments.key is None or arguments.lab is None:
        raise CallerError("--tasks needs --key FILE (`registry keygen` makes one) and --lab NAME")
    lie = None if arguments.lie is None else lie_name(arguments.lie)
    workshop = TaskProcesses(
        key=arguments.key,
        clients=arguments.referees,
        name=arguments.lab,
        device=arguments.device,
        lie=lie,
        lie_step=arguments.lie_step,
    )
    key = load_private(arguments.key)
    reception = Reception(
        folder=arguments.tasks,
        store=arguments.store,
        key=key,
        clients=list(map(load_public, arguments.referees)),
        bounds=Bounds(
            flop=arguments.most_flop,
            bytes=arguments.most_bytes,
            tasks=arguments.most_tasks,
            keep=arguments.keep_days * 86_400,
        ),
        workshop=workshop,
        witnesses=list(map(load_public, arguments.witness)),
    )
    say(f"provider {arguments.lab} takes tasks on {_url(arguments)}")
    try:
        routes = [upload_route(reception.wanted)]
        serve(reception, arguments.host, arguments.port, others=routes, tls=key if arguments.tls else None)
    finally:
        reception.close()
        workshop.stop()
    return 0
