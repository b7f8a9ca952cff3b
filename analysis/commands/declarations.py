"""``declare show`` and ``declare countersign``: what a lab proposes to train, and the other side's signature."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish, write_new

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from inspector.inspection.declaring import Proposal
    from monitor.declaration.origin import Origin

__all__ = ["register"]

_KEYS = (
    "JSON keys: digest, lab, declaration (numerics, seed, checkpoint_every, keep, shares, optimizer, groups, "
    "parameters, state, schedule, length or null for an open end, recipe, origin), state_bytes, programs (program, "
    "flop, most_flop, bytes), data (what the run commits to), signer (id of a key, not checked here, or null)"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``declare``."""
    group = subparsers.add_parser("declare", help="what a lab declares before it trains: show and countersign")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser("show", help="the declaration as a person reads it", epilog=_KEYS)
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a run folder, or a countersigned declaration")
    add_json(parser)
    parser.set_defaults(handler=_show)

    parser = actions.add_parser(
        "countersign",
        help="agree to a run's declaration and to all programs that it holds so far",
        description="Signs with an inspectorate's key (registry keygen). Programs that come later need another "
        "signature. An inspection reads the file as one more --trust FILE, under the keys that trust files name.",
        epilog="JSON keys: out, signer, and those of declare show",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the inspectorate's private key")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the signed statement, a new file")
    parser.add_argument(
        "--free",
        action="append",
        default=[],
        metavar="NAME",
        help="leave a hyper-parameter unbound, or a tensor that takes gradients, such as buffer/sums (repeatable)",
    )
    parser.add_argument(
        "--direct-path",
        action="append",
        default=[],
        metavar="TENSOR|PROGRAM",
        help="such as buffer/codes, or the digest of an evaluation that takes derivatives (repeatable)",
    )
    parser.add_argument("--data", action="store_true", help="agree to the run's own samples and their order")
    add_json(parser)
    parser.set_defaults(handler=_countersign)


def _show(arguments: argparse.Namespace) -> int:
    from inspector.inspection.declaring import read_proposal

    proposal = read_proposal(arguments.path)
    return finish(arguments, proposal.to_json(), _lines(proposal))


def _countersign(arguments: argparse.Namespace) -> int:
    from inspector.inspection.declaring import countersign, read_proposal
    from inspector.registry import load_private

    key = load_private(arguments.key)
    signed = countersign(
        arguments.run, free=arguments.free, direct_paths=arguments.direct_path, with_data=arguments.data
    )
    write_new(arguments.out, signed.sign(key))
    shown = read_proposal(arguments.out)
    data = {"out": str(arguments.out), **shown.to_json()}
    return finish(arguments, data, [*_lines(shown), f"written to {arguments.out}"])


def _lines(proposal: Proposal) -> list[str]:
    from monitor.declaration.countersigning import declaration_digest

    declared = proposal.declaration
    recipe = "a loop of the lab's own" if declared.recipe is None else f"preset {declared.recipe.preset}"
    end = "open end" if declared.length is None else f"{declared.length} steps"
    schedule = declared.schedule
    kept = "" if declared.keep is None else f" (the last {declared.keep} stay, and sparser ones before)"
    checkpoints = f"a checkpoint every {declared.checkpoint_every} steps{kept}"
    lines = [
        f"declaration    {declaration_digest(declared)}",
        f"lab            {proposal.lab}, on {declared.shards} chips{_shares(declared.shares)}",
        f"training       {recipe}, {end}, {checkpoints}, seed {declared.seed}",
        f"numerics       {declared.numerics}",
        f"initial state  {_origin(declared.origin, declared.seed)}",
        f"state          {len(declared.state)} tensors of {declared.byte_count} bytes",
        f"optimizer      {declared.optimizer!a:.200}",
        f"learning rate  {'declared in each step' if schedule is None else f'by schedule {schedule.to_json()!a:.500}'}",
    ]
    for number, group in enumerate(declared.groups):
        values = ", ".join(f"{name!a:.60} {value!a:.60}" for name, value in group.items())
        lines.append(f"group {number:<9}{values}")
    for digest, cost in proposal.programs.items():
        begun = declared.origin.initialisation
        when = "once" if begun is not None and begun.program == digest else "a step"
        lines.append(f"program        {digest}: {cost.flop} FLOP {when}, at most {cost.most_flop}; {cost.bytes} bytes")
    lines += [f"data           {name!a:.20} {value!a:.100}" for name, value in proposal.data.items()]
    signer = "nobody yet" if proposal.signer is None else f"key {proposal.signer} (not checked here)"
    return [*lines, f"signed by      {signer}"]


def _shares(shares: Sequence[int]) -> str:
    """How they hold the state, unless they do so evenly."""
    shown = [*map(str, shares[:16]), *(["…"] if len(shares) > 16 else [])]
    return "" if len(set(shares)) == 1 else f" with shares {', '.join(shown)}"


def _origin(origin: Origin, seed: int) -> str:
    if origin.state is None:
        return f"what seed {seed} gives"
    if origin.initialisation is not None:
        begun = origin.initialisation
        return f"{origin.state}, made by program {begun.program} with seed {begun.seed}"
    if origin.parent is None:
        return f"{origin.state}, supplied: past FLOP is unknown"
    past = origin.parent
    return f"{' and '.join(past.kinds)} of run {past.run} after its last step {past.step}, else zero: {origin.state}"
