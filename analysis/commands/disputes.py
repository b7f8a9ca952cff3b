"""``dispute``: referee two provers that ran the same task."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_trust, count, print_json, say, write_new
from analysis.commands.runs import require_runs
from firmware_sim import limits
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.inspection.trust import Trust
    from inspector.inspection.verdict import Verdict

__all__ = ["register"]

_SECONDS = 600
_LONGEST = 24 * 3600


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("dispute")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="two labs' finished runs of the same task")
    add_trust(parser)
    text = "twice, in place of the RUNs: a lab's name in the trust file, and the address of its `serve provider`"
    parser.add_argument("--provider", action="append", default=[], metavar="LAB=URL", help=text)
    parser.add_argument("--key", type=Path, metavar="FILE", help="of --provider: the referee's private key")
    text = f"with --provider: seconds for each answer (default {_SECONDS}); a lab that takes longer counts as absent"
    parser.add_argument("--seconds", type=count, default=_SECONDS, metavar="N", help=text)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the signed game here, which `verify` plays again"
    )
    parser.add_argument(
        "--device",
        default="native",
        metavar="NAME",
        help="device on which the referee, and RUNs on this machine, compute",
    )
    add_json(parser)
    parser.epilog = (
        "JSON keys: outcome, reasons, evidence, step, operator, guilty, absent (the lab that sent no signed answer "
        "in time, by the referee's account), case, rounds, bytes, operators_executed, search (where the referee "
        "compared: step or operator, place, of how many, whether the labs agree)"
    )
    parser.set_defaults(handler=_dispute)


def _check(arguments: argparse.Namespace) -> None:
    """CallerError where words are missing, too many or out of range."""
    if (len(arguments.runs), len(arguments.provider)) not in ((2, 0), (0, 2)):
        raise CallerError("give two RUN folders, or --provider LAB=URL twice")
    if arguments.provider and arguments.key is None:
        raise CallerError("--provider needs the referee's --key FILE (`registry keygen` makes one)")
    if not 0 < arguments.seconds <= _LONGEST:
        raise CallerError(f"--seconds is 1 to {_LONGEST}, not {arguments.seconds}")
    if arguments.out is not None and arguments.out.exists():
        raise CallerError(f"{arguments.out}: exists already")


def _dispute(arguments: argparse.Namespace) -> int:
    places = [each.partition("=") for each in arguments.provider]
    _check(arguments)
    from inspector.devices import enter

    enter(arguments.device)
    from inspector.inspection.trust import Trust

    require_runs(arguments.runs)
    trust = Trust.load(arguments.trust, arguments.runs)
    if places:
        verdict, game = _asked(arguments, trust, [(name, url) for name, _, url in places])
    else:
        verdict, game = _here(arguments.runs, trust)
    if arguments.out is not None:
        if len(game) > limits.BUNDLE_BYTES.most:
            raise CallerError(f"the game has {len(game)} bytes, more than `verify` reads: leave --out away")
        write_new(arguments.out, game)
    if arguments.json:
        print_json({**verdict.to_json(), **verdict.evidence})
    else:
        say(verdict.outcome.value)
        for reason in verdict.reasons:
            say(f"  {reason.text}")
        for name, value in verdict.evidence.items():
            if name != "search":
                say(f"  {name:20} {value}")
    return verdict.outcome.exit_code


def _here(runs: list[Path], trust: Trust) -> tuple[Verdict, bytes]:
    from inspector.dispute.dispute import Disputant, play_here
    from inspector.inspection.transcripts import open_run
    from monitor.lab.prover import LabProver

    first, second = (Disputant(run=open_run(folder, trust), prover=LabProver(folder)) for folder in runs)
    return play_here(first, second, trust)


def _asked(arguments: argparse.Namespace, trust: Trust, places: list[tuple[str, str]]) -> tuple[Verdict, bytes]:
    from inspector.dispute.game import Party, play
    from inspector.registry.keyfiles import load_private

    try:
        from inspector.wire.client import Http
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    for name, _ in places:
        if name not in trust.labs:
            raise CallerError(f"the trust file names no lab {name!a:.100}: write --provider LAB=URL")
    parties = [Party(name=name, key=trust.labs[name], transport=Http(url)) for name, url in places]
    key = load_private(arguments.key)
    return play(parties, trust, key, seconds=arguments.seconds, now=datetime.now(UTC))
