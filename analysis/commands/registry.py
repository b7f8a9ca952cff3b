"""``chipwitness registry``: the chip-owner directory from the command line."""

from __future__ import annotations

import argparse
import importlib
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]

_DATABASE = "SQLite file, or postgresql://… URL"


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``registry`` and its subcommands."""
    parser = subparsers.add_parser(
        "registry",
        description="Directory of the owner of each chip, from fab to destruction. Private keys are files and never "
        "in the database. Exit codes: 0 done, 1 refused or suspicious, 2 wrong flags or paths, 3 database out of "
        "reach.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_set_up(actions)
    _add_moves(actions)
    _add_census(actions)
    _add_checks(actions)
    _add_inspectors(actions)
    _add_statistics(actions)


def _lazily(name: str) -> Callable[[argparse.Namespace], int]:
    """The function ``name`` of ``_registry_actions``, or of another module as in ``module.name``."""
    module, _, function = name.rpartition(".")

    def handler(arguments: argparse.Namespace) -> int:
        action: Callable[[argparse.Namespace], int] = getattr(
            importlib.import_module(f"analysis.commands.{module or '_registry_actions'}"), function
        )
        return action(arguments)

    return handler


def _action(
    actions: _SubParsersAction[ArgumentParser], name: str, handler: str, text: str, keys: str, *, database: bool = True
) -> ArgumentParser:
    parser = actions.add_parser(name, help=text, epilog=f"JSON keys: {keys}.")
    parser.set_defaults(handler=_lazily(handler))
    if database:
        parser.add_argument("database", metavar="DB", help=_DATABASE)
    add_json(parser)
    return parser


def _writes(parser: ArgumentParser) -> None:
    parser.add_argument("--registrar-key", type=Path, required=True, metavar="FILE", help="the registrar's private key")
    parser.add_argument(
        "--at", metavar="TIME", help="the registry's time, as 2026-01-31T12:00:00Z (default: the clock)"
    )


def _add_set_up(actions: _SubParsersAction[ArgumentParser]) -> None:
    keygen = _action(
        actions, "keygen", "keygen", "make an Ed25519 key: FILE (private) and FILE.pub", "private, public, key_id",
        database=False,
    )  # fmt: skip
    keygen.add_argument("file", type=Path, metavar="FILE")
    init = _action(
        actions, "init", "init", "create an empty directory", "database, origin, registrar, head_size, head_root"
    )
    init.add_argument("--name", required=True, help="name of the directory, part of every signed head")
    _writes(init)
    enrol = _action(actions, "enrol", "enrol", "admit a maker, owner or inspector", "event, head_size, head_root")
    enrol.add_argument("--party", required=True)
    enrol.add_argument("--role", required=True, choices=("maker", "owner", "inspector"))
    enrol.add_argument("--public", type=Path, required=True, metavar="FILE", help="the party's public key")
    _writes(enrol)
    importing = _action(
        actions, "import", "import_chips",
        "take in a maker's new chips from a CSV with columns chip, optionally model and identity (digest of the chip's "
        "certificate, as sha256:HEX with 64 digits in small letters)",
        "event, chips, head_size, head_root",
    )  # fmt: skip
    importing.add_argument("csv", type=Path, metavar="CSV")
    importing.add_argument("--maker", required=True)
    importing.add_argument("--key", type=Path, required=True, metavar="FILE", help="the maker's private key")
    importing.add_argument("--label", help="name of the batch (default: the file's stem)")
    importing.add_argument("--made", metavar="TIME", help="when the chips were made (default: the registry's time)")
    _writes(importing)


def _name_chips(parser: ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--chip", action="append", metavar="ID", help="a chip (repeat for more)")
    group.add_argument("--chips", type=Path, metavar="CSV", help="file with a column 'chip'")


def _answered(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--evidence", type=Path, metavar="DIR", help=f"a folder for each chip, with {text}")


def _signing(parser: ArgumentParser, first: str, second: str | None) -> None:
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help=f"private key of the {first}")
    if second is not None:
        parser.add_argument("--counter-key", type=Path, metavar="FILE", help=f"private key of the {second}")
        parser.add_argument("--out", type=Path, metavar="FILE", help=f"write it for the {second} to accept instead")
    parser.add_argument("--registrar-key", type=Path, metavar="FILE", help="the registrar's private key")
    parser.add_argument("--at", metavar="TIME", help="the time, as 2026-01-31T12:00:00Z (default: the clock)")


def _add_moves(actions: _SubParsersAction[ArgumentParser]) -> None:
    applied = "event, chips, head_size, head_root"
    receipt = f"{applied} (with --out: out and signatures in place of these)"

    challenge = _action(
        actions, "challenge", "challenge", "nonces to answer before chips change hands", "verifier, nonces (by chip)"
    )
    _name_chips(challenge)
    transfer = _action(actions, "transfer", "transfer", "pass chips on; sender and receiver sign", receipt)
    transfer.add_argument("--from", dest="sender", required=True, metavar="PARTY")
    transfer.add_argument("--to", dest="receiver", required=True, metavar="PARTY")
    _name_chips(transfer)
    _answered(transfer, "its answer to `registry challenge`, to deposit. The next owner's records begin there")
    _signing(transfer, "sender", "receiver")
    for name, handler, text, witnessed in (
        ("lost", "lost", "declare chips lost; the holder stays responsible for them", False),
        ("found", "found", "declare lost chips found; an inspector countersigns", True),
        ("retire", "retire", "declare chips destroyed; an inspector countersigns", True),
    ):
        claim = _action(actions, name, handler, text, receipt)
        claim.add_argument("--holder", required=True, metavar="PARTY")
        claim.add_argument("--reason", default="", help="free text, at most 500 characters")
        if witnessed:
            claim.add_argument("--witness", required=True, metavar="PARTY", help="the inspector")
        _name_chips(claim)
        _answered(claim, "its last answer, to deposit. The holder is responsible for its records up to there")
        _signing(claim, "holder", "witness" if witnessed else None)
    accept = _action(
        actions, "accept", "accept", "add the second signature to a statement made with --out",
        "out, kind, chips, signatures", database=False,
    )  # fmt: skip
    accept.add_argument("statement", type=Path, metavar="STATEMENT")
    _answered(accept, "its answer to its new owner. The chip must have done nothing since the signed position")
    accept.add_argument("--key", type=Path, required=True, metavar="FILE")
    accept.add_argument("--out", type=Path, required=True, metavar="FILE")
    submit = _action(actions, "submit", "submit", "apply a statement that all its parties signed", applied)
    submit.add_argument("statement", type=Path, metavar="STATEMENT")
    _answered(submit, "the chip's answer for the log position that the statement names")
    _writes(submit)


def _add_census(actions: _SubParsersAction[ArgumentParser]) -> None:
    census = actions.add_parser("census", help="draw chips at random, record which were shown")
    steps = census.add_subparsers(dest="step", required=True, metavar="STEP")
    draw = _action(
        steps, "draw", "census_draw", "draw chips evenly from all that are held, and log the draw",
        "census, event, population, chips (a list of chip, holder)",
    )  # fmt: skip
    draw.add_argument("--sample", type=count, required=True, metavar="N", help="chips to draw")
    draw.add_argument("--owner", default="", metavar="PARTY", help="draw from this holder's chips only")
    draw.add_argument("--seed", help="64 hex digits, unknown to the lab (default: from the system's randomness)")
    draw.add_argument("--out", type=Path, metavar="CSV", help="also write the chips to be shown, with their holders")
    record = _action(
        steps, "record", "census_record",
        "log which chips were shown. The others become lost; their holder stays responsible. Exit code 1: a chip "
        "is lost",
        "census, event, present, retired, resurfaced, missing (a list of chip, holder, observed)",
    )  # fmt: skip
    record.add_argument("--census", type=count, required=True, metavar="NUMBER")
    record.add_argument(
        "--answers",
        type=Path,
        required=True,
        metavar="CSV",
        help="columns 'chip', 'observed' (serial number found on the chip) and, optionally, 'identity' (digest of "
        "the certificate presented, as sha256:HEX)",
    )
    for step in (draw, record):
        step.add_argument("--inspector", required=True, metavar="PARTY")
        step.add_argument("--key", type=Path, required=True, metavar="FILE", help="the inspector's private key")
        _writes(step)


def _add_checks(actions: _SubParsersAction[ArgumentParser]) -> None:
    show = _action(
        actions, "show", "show", "one chip and its history, or the totals by holder and state",
        "chip, model, identity, holder, state, sequence, digest, revoked, history, spans; or events, chips, holdings"
    )  # fmt: skip
    show.add_argument("chip", nargs="?", metavar="CHIP")
    head = _action(actions, "head", "head", "the newest signed head of the log", "size, root, signed")
    head.add_argument("--out", type=Path, metavar="FILE", help="keep it, for a later audit --head")
    audit = _action(
        actions, "audit", "audit", "rebuild owner table and tree from the log and compare (exit 1 if they differ)",
        "ok, events, chips, root, findings",
    )  # fmt: skip
    audit.add_argument("--head", type=Path, metavar="FILE", help="a signed head kept from earlier")
    prove = _action(actions, "prove", "prove", "write a proof of all records of one chip", "out, chip, records")
    prove.add_argument("chip", metavar="CHIP")
    prove.add_argument("--out", type=Path, required=True, metavar="FILE")
    check = _action(
        actions, "check-proof", "check_proof", "check a proof without the database",
        "chip, model, records, head_size, head_root", database=False,
    )  # fmt: skip
    check.add_argument("proof", type=Path, metavar="PROOF")
    check.add_argument("--name", required=True, help="name of the directory")
    for parser in (audit, check):
        parser.add_argument(
            "--registrar", type=Path, required=True, metavar="FILE", help="the registrar's public key, from elsewhere"
        )


def _add_inspectors(actions: _SubParsersAction[ArgumentParser]) -> None:
    module = "_registry_publications"
    values = _action(
        actions, "reference-values", f"{module}.reference_values",
        "record which CAs, firmware and snapshot settings a maker vouches for", "event, chips, head_size, head_root",
    )  # fmt: skip
    values.add_argument("--maker", required=True, metavar="PARTY")
    values.add_argument("--key", type=Path, required=True, metavar="FILE", help="the maker's private key")
    values.add_argument("--ca", action="append", required=True, metavar="DIGEST", help="of a CA certificate (repeat)")
    values.add_argument(
        "--measurement", action="append", required=True, metavar="DIGEST", help="firmware that may run (repeat)"
    )
    values.add_argument("--minimum-security-version", type=count, required=True, metavar="N")
    values.add_argument(
        "--snapshot-rate", required=True, metavar="P", help="snapshots per chip and tick of its clock, such as 1/4"
    )
    values.add_argument("--snapshot-algorithm", metavar="NAME", help="digest of snapshots (default: the chips' own)")
    _writes(values)
    revoke = _action(
        actions, "revoke", f"{module}.revoke",
        "evidence under these chips' certificates never counts again",
        "event, chips, head_size, head_root",
    )  # fmt: skip
    _name_chips(revoke)
    revoke.add_argument("--evidence", type=Path, metavar="DIR", help="earlier answers of the chips, to deposit")
    revoke.add_argument("--reason", required=True, help="at most 500 characters, for everybody to read")
    _writes(revoke)
    publish = _action(
        actions, "publish", f"{module}.publish",
        "sign and log what the directory says now, for inspectors",
        "event, size, root, map_root, entries, head_size, head_root",
    )  # fmt: skip
    _writes(publish)
    _add_trust(actions)


def _add_trust(actions: _SubParsersAction[ArgumentParser]) -> None:
    module = "_registry_publications"
    trust = _action(
        actions, "trust", f"{module}.trust",
        "write an inspector's trust file from the newest published view",
        "out, size, root, map_root, labs, chips, withdrawn, verifier, nonce, inspectorates (number of their keys), "
        "countersigned (number of declarations), later_events, spans (by chip), deposits (number written)"
    )  # fmt: skip
    trust.add_argument("--registrar", type=Path, required=True, metavar="FILE", help="its public key, from elsewhere")
    trust.add_argument(
        "--lab", action="append", default=[], metavar="NAME", help="lab to inspect (repeat; default: all owners)"
    )
    trust.add_argument("--verifier", metavar="NAME", help="id of this inspector, as quotes name it")
    trust.add_argument("--nonce", metavar="HEX", help="challenge of 32 bytes (default: from the system's randomness)")
    trust.add_argument(
        "--challenge",
        type=Path,
        metavar="TRUST",
        help="trust file that gives verifier, nonce, countersignatures and, without --inspectorate, inspectorates",
    )
    trust.add_argument(
        "--inspectorate", type=Path, action="append", default=[], metavar="FILE",
        help="public key whose signature under a lab's declaration counts (repeatable)",
    )  # fmt: skip
    trust.add_argument(
        "--maximum-flop", type=count, metavar="H", help="most FLOP of a lab's runs together, and of a chain of runs"
    )
    trust.add_argument(
        "--head", type=Path, metavar="FILE", help="a signed head kept from earlier, which must be extended"
    )
    trust.add_argument(
        "--deposits", type=Path, metavar="DIR", help="write what chips answered when they changed hands, for --answers"
    )
    trust.add_argument("--out", type=Path, required=True, metavar="FILE")


def _add_statistics(actions: _SubParsersAction[ArgumentParser]) -> None:
    losses = _action(
        actions, "losses", "_registry_estimates.losses",
        "test whether owners lose more chips than a base rate explains (exit 1 if so)",
        "suspicious, model, rate_per_chip_year, false_alarm, attained, owners, pooled",
    )  # fmt: skip
    losses.add_argument("--rate", type=float, required=True, help="greatest honest loss rate, per chip and year")
    losses.add_argument("--false-alarm", type=float, default=0.01, help="probability of any alarm if all are honest")
    losses.add_argument("--since", required=True, metavar="TIME")
    losses.add_argument("--until", metavar="TIME", help="default: now")
    losses.add_argument("--model", choices=("poisson", "binomial"), default="poisson")
    leakage = _action(
        actions, "leakage", "_registry_estimates.leakage",
        "probability that diverted chips stay unseen by a random census",
        "rows: a list of diverted, fleet, census, months, unseen, log_unseen; false_alarm: 0, by construction; "
        "months_until_seen with --confidence",
        database=False,
    )  # fmt: skip
    fleet = leakage.add_mutually_exclusive_group(required=True)
    fleet.add_argument("--fleet", type=count, metavar="N", help="chips that the directory records as held")
    fleet.add_argument("--registry", metavar="DB", help=f"take that number from a directory ({_DATABASE})")
    leakage.add_argument("--diverted", type=count, nargs="+", required=True, metavar="N")
    leakage.add_argument("--census", type=count, required=True, metavar="M", help="chips drawn by each census")
    leakage.add_argument("--months", type=float, nargs="+", required=True, metavar="T")
    leakage.add_argument("--per-month", type=float, default=1.0, help="censuses each month")
    leakage.add_argument(
        "--sensitivity", type=float, default=1.0, help="probability that a drawn diverted chip is recognised as missing"
    )
    leakage.add_argument(
        "--confidence",
        type=float,
        help="also print after how many months a diverted chip is noticed with this probability",
    )
