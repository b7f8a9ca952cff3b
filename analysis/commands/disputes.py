"""``dispute``: referee two or more parties that ran the same task."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._addresses import add_witness, by_name, witness_of
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
_WORKERS = 16
"""Parties that are asked at once."""


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("dispute")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="labs' runs of the same task, two or more")
    add_trust(parser)
    text = "a lab's name in the trust file, and the address of its `serve provider`; give two or more, in place of RUNs"
    parser.add_argument("--provider", action="append", default=[], metavar="LAB=URL", help=text)
    parser.add_argument("--key", type=Path, metavar="FILE", help="with --provider: the referee's private key")
    text = f"with --provider: seconds for each answer (default {_SECONDS}); a lab that takes longer counts as absent"
    parser.add_argument("--seconds", type=count, default=_SECONDS, metavar="N", help=text)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the signed record of the dispute here; `verify` checks it"
    )
    add_witness(parser, "the labs")
    text = "parts into which each round of the search divides the steps, 2 to 32 (default 2): more make fewer rounds"
    parser.add_argument("--branching", type=count, default=2, metavar="M", help=text)
    parser.add_argument(
        "--device",
        default="native",
        metavar="NAME",
        help="device on which the referee computes; with RUNs also the device on which the labs' side is computed",
    )
    add_json(parser)
    parser.epilog = (
        "JSON keys: outcome, reasons, evidence, guilty, absent (who sent no signed answer in time, as the referee or "
        "a witness says), unfinished (who claims a run that has not ended), prevails (who made the claim that "
        "stands), rounds, bytes. With two parties also: step, operator, tile (the elements that were computed; null "
        "if all were), case (rule that decided), operators_executed, search (for each comparison: what was compared, "
        "a step or an operator; its number; how many of these there are; whether the parties agree). With more "
        "parties also: undecided (parties between whom no rule decided), steps (number of steps in the claim that "
        "stands), state (its digest), games (for each pair of parties that was compared: parties, and the keys "
        "listed for two parties), losses (each: party, kind (why it is out), step, operator, case, game (number in "
        "games), text)"
    )
    parser.set_defaults(handler=_dispute)


def _check(arguments: argparse.Namespace) -> None:
    """CallerError where words are missing, too many or out of range."""
    if min(len(arguments.runs), len(arguments.provider)) or len(arguments.runs) + len(arguments.provider) < 2:
        raise CallerError("give two or more RUN folders, or --provider LAB=URL two or more times")
    if arguments.witness is not None and not arguments.provider:
        raise CallerError("--witness is for labs elsewhere: give --provider LAB=URL in place of RUN folders")
    if arguments.provider and arguments.key is None:
        raise CallerError("--provider needs the referee's --key FILE (`registry keygen` makes one)")
    if not 0 < arguments.seconds <= _LONGEST:
        raise CallerError(f"--seconds must be 1 to {_LONGEST}, not {arguments.seconds}")
    if arguments.out is not None and arguments.out.exists():
        raise CallerError(f"{arguments.out}: exists already")


def _dispute(arguments: argparse.Namespace) -> int:
    places = by_name(arguments.provider, "URL", "provider")
    _check(arguments)
    from inspector.devices import enter

    enter(arguments.device)
    from inspector.inspection.trust import Trust

    require_runs(arguments.runs)
    trust = Trust.load(arguments.trust, arguments.runs, chips=not places)
    if places:
        verdict, game = _asked(arguments, trust, places)
    else:
        verdict, game = _here(arguments, trust)
    if arguments.json:
        print_json({**verdict.to_json(), **verdict.evidence})
    else:
        say(verdict.outcome.value)
        for reason in verdict.reasons:
            say(f"  {reason.text}")
        for name, value in verdict.evidence.items():
            if name not in ("search", "losses", "games"):
                say(f"  {name:20} {', '.join(value) or None if isinstance(value, list) else value}")
        for each in verdict.evidence.get("games", ()):
            say(f"  game {' against '.join(each['parties'])}: {each['outcome']}")
    if arguments.out is not None and len(game) > limits.BUNDLE_BYTES.most:
        raise CallerError(f"the verdict is valid, but its evidence of {len(game)} bytes is too long for `verify`")
    if arguments.out is not None:
        write_new(arguments.out, game)
    return verdict.outcome.exit_code


def _here(arguments: argparse.Namespace, trust: Trust) -> tuple[Verdict, bytes]:
    from inspector.dispute.dispute import Disputant, play_here, settle_all
    from inspector.inspection.transcripts import open_run
    from monitor.lab.prover import LabProver

    runs = [Disputant(run=open_run(folder, trust), prover=LabProver(folder)) for folder in arguments.runs]
    if len(runs) == 2:
        return play_here(runs[0], runs[1], trust, branching=arguments.branching)
    return settle_all(runs, trust, branching=arguments.branching)


def _asked(arguments: argparse.Namespace, trust: Trust, places: list[tuple[str, str]]) -> tuple[Verdict, bytes]:
    from inspector.dispute.arena import play_tournament
    from inspector.dispute.game import Party, Terms, play
    from inspector.registry.keyfiles import load_private

    try:
        from inspector.wire.client import Http
        from inspector.wire.witness import ByWitness
    except ImportError as error:
        raise CallerError(f"{error.name} is not installed: pip install 'chipwitness[server]'") from None
    for name, _ in places:
        if name not in trust.labs:
            raise CallerError(f"the trust file names no lab {name!a:.100}: write --provider LAB=URL")
    keys = trust.labs
    parties = [Party(name=name, key=keys[name], transport=Http(url, keys[name])) for name, url in places]
    if (witness := witness_of(arguments.witness, trust)) is not None:
        parties = [replace(party, transport=ByWitness(witness, party.transport)) for party in parties]
    key, now = load_private(arguments.key), datetime.now(UTC)
    terms = Terms(seconds=arguments.seconds, branching=arguments.branching)
    if len(parties) == 2:
        return play(parties, trust, key, now=now, **terms.to_json())
    return play_tournament(parties, trust, key, terms, now=now, workers=min(len(parties), _WORKERS))
