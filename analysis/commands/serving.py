"""``serve``: a party answers over HTTP."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import count, say
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``serve``."""
    group = subparsers.add_parser("serve")
    actions = group.add_subparsers(dest="action", required=True, metavar="PARTY")
    text = "a lab answers a referee's questions about one finished run, until it is interrupted"
    parser = actions.add_parser("provider", help=text, description=text)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, with RUN.lab next to it")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="folder for questions and answers")
    text = "public keys of those who may ask"
    parser.add_argument("--referees", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    parser.add_argument("--port", type=_port, required=True, metavar="N", help="port of the server")
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address of the server (default 127.0.0.1)")
    parser.add_argument("--device", default="native", metavar="NAME", help="device on which steps run again")
    parser.set_defaults(handler=_provider)


def _port(text: str) -> int:
    """A number from 1 to 65535."""
    if not 0 < (port := count(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!a:.100} is no port from 1 to 65535")
    return port


def _provider(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    enter(arguments.device)
    from analysis.commands.runs import require_runs
    from inspector.dispute.provider import desk_of
    from inspector.registry.keyfiles import load_public
    from monitor.lab.prover import LabProver
    from monitor.transcript import RunFolder

    try:
        from inspector.wire.server import serve
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    require_runs([arguments.run])
    prover = LabProver(arguments.run)
    run = RunFolder(arguments.run, prover.key.verifying)
    desk = desk_of(run, prover, arguments.store, list(map(load_public, arguments.referees)))
    say(f"lab {run.metadata.lab} answers for {arguments.run.name} on http://{arguments.host}:{arguments.port}")
    serve(desk, arguments.host, arguments.port)
    return 0
