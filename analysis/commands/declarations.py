"""``declare show`` and ``declare countersign``: what a lab proposes to train, and the other side's signature."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_now, count, finish, parse_now, write_new
from analysis.commands._program_pages import declared_lines, page_lines

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from inspector.inspection.proposals import Proposal
    from monitor.declaration.countersignature import Countersigned

__all__ = ["register"]

_KEYS = (
    "JSON keys: shown (digest that `declare countersign --shown` takes, or null), run_id, digest, lab, declaration "
    "(numerics, seed, checkpoint_every, keep, shares, optimizer, groups, parameters, state, schedule, length or null "
    "for an open end, recipe, origin), state_bytes, programs (program, flop, most_flop, bytes), pages (as program "
    "show), data (what the run commits to), agreed (of a statement: free, direct_paths, data, number, since, signed), "
    "changes (against --amends, or null), signer (id of a key, not checked here, or null)"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``declare``."""
    group = subparsers.add_parser("declare")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser("show", help="the declaration as a person reads it", epilog=_KEYS)
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a run folder, or a countersigned declaration")
    _add_amends(parser, "a countersigned statement about the run: show what has changed since then")
    add_json(parser)
    parser.set_defaults(handler=_show)

    parser = actions.add_parser(
        "countersign",
        help="agree to a run's declaration and to all programs that `declare show` printed",
        description="Signs what `declare show` printed, for this run alone, with an inspectorate's key (see `registry "
        "keygen`). If later steps run a new program, sign an amendment (--amends): it repeats all that is "
        "agreed, and counts from step --since on. Give each signed file to an inspection as one more "
        "--trust FILE. It counts if the trust files name its key.",
        epilog="JSON keys: out, signer. The others are those of `declare show`",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--shown", required=True, metavar="DIGEST", help="what `declare show` printed for this run")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the inspectorate's private key")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the signed statement, a new file")
    parser.add_argument(
        "--free",
        action="append",
        default=[],
        metavar="NAME",
        help="a hyper-parameter to leave unbound, or a tensor that takes gradients, such as buffer/sums (repeatable)",
    )
    parser.add_argument(
        "--direct-path",
        action="append",
        default=[],
        metavar="TENSOR|PROGRAM",
        help="a direct path: a tensor, such as buffer/codes, or the digest of an evaluation with derivatives "
        "(repeatable)",
    )
    parser.add_argument("--data", action="store_true", help="agree to the run's own samples and their order")
    _add_amends(parser, "the newest statement about the run, which this one replaces")
    parser.add_argument(
        "--since", type=count, default=1, metavar="STEP", help="first step for which an amendment counts (default 1)"
    )
    add_now(parser)
    add_json(parser)
    parser.set_defaults(handler=_countersign)


def _add_amends(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--amends", type=Path, metavar="FILE", help=text)


def _show(arguments: argparse.Namespace) -> int:
    from inspector.inspection.proposals import read_proposal, read_statement

    before = None if arguments.amends is None else read_statement(arguments.amends)[0]
    proposal = read_proposal(arguments.path)
    return finish(arguments, proposal.to_json(before), _lines(proposal, before))


def _countersign(arguments: argparse.Namespace) -> int:
    from inspector.inspection.proposals import countersign, read_proposal, read_statement
    from inspector.registry import load_private

    key = load_private(arguments.key)
    before = None if arguments.amends is None else read_statement(arguments.amends)[0]
    signed = countersign(
        arguments.run,
        shown=arguments.shown,
        now=parse_now(arguments.now),
        amends=before,
        since=arguments.since,
        free=arguments.free,
        direct_paths=arguments.direct_path,
        with_data=arguments.data,
    )
    write_new(arguments.out, signed.sign(key))
    shown = read_proposal(arguments.out)
    data = {"out": str(arguments.out), **shown.to_json(before)}
    return finish(arguments, data, [*_lines(shown, before), f"written to {arguments.out}"])


def _lines(proposal: Proposal, before: Countersigned | None) -> list[str]:
    terms, pages = proposal.terms, {page.digest: page for page in proposal.pages}
    declared, begun = terms.declaration, terms.declaration.origin.initialisation
    lines = [
        f"run            {terms.run}",
        f"lab            {terms.lab}, on {declared.shards} chips{_shares(declared.shares)}",
        *declared_lines(declared),
    ]
    for digest, cost in terms.programs.items():
        when = "once" if begun is not None and begun.program == digest else "a step"
        kind = f"{pages[digest].kind}, " if digest in pages else ""
        lines.append(
            f"program        {digest}: {kind}{cost.flop} FLOP {when}, at most {cost.most_flop}; {cost.bytes} bytes"
        )
        lines += page_lines(pages[digest].to_json()) if digest in pages else ()
    lines += [f"data           {name!a:.20} {value!a:.100}" for name, value in proposal.data.items()]
    if before is not None:
        lines.append(f"against statement {before.number}, of {before.signed}:")
        lines += [f"{each[:1]:<15}{each[2:]:.200}" for each in proposal.changes(before)] or ["unchanged"]
    if proposal.signer is None:
        lines.append("not bound      `program review` compares numbers with the arithmetic, once steps are committed")
        return [*lines, "signed by      no one yet", f"shown          {proposal.shown}"]
    for name, agreed in (("free", terms.free), ("direct path", terms.direct_paths), ("data agreed", terms.data)):
        lines += [f"{name:<15}{each!a:.200}" for each in sorted(agreed)]
    lines.append(f"statement      {terms.number}, of {terms.signed}, counts since step {terms.since}")
    return [*lines, f"signed by      key {proposal.signer} (not checked here)"]


def _shares(shares: Sequence[int]) -> str:
    """How they hold the state, unless they do so evenly."""
    shown = [*map(str, shares[:16]), *(["…"] if len(shares) > 16 else [])]
    return "" if len(set(shares)) == 1 else f" with shares {', '.join(shown)}"
