"""``declarations``: declarations that hide something, each under a rule that it must not pass, and honest ones.

A dishonest lab (``HIDING``) keeps to the letter of a rule that the same training breaks where it is declared as what
it is. Whatever else an inspection says of it, the verdict must be no ACCEPT. An honest loop (``HONEST``) is never
rejected; where it is left open, agreeing to what the reasons name leads to an ACCEPT. Runs and inspections are real.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import write
from firmware_sim.errors import CallerError, ChipwitnessError
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.proposals import countersign, read_proposal
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Verdict
from inspector.replay.pool import DevicePool
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.measurements._declared_world import STARTED, World
from tests.measurements._hiding_declarations import HIDING
from tests.measurements._honest_declarations import HONEST

__all__ = ["HIDING", "HONEST", "run", "table", "verdict", "write"]

Row = dict[str, Any]
_SHOWN = 120
"""Characters of a reason."""

_AGREED = re.compile(r"--(free|direct-path) (?:'([^']+)'|([A-Za-z0-9_/.*-]+))")
"""What a reason says that can be agreed to."""


_MANUAL = """
[[rule]]
name = "rates"
kind = "hyper"
parameter = "lr"
at_most = 1
[[rule]]
name = "meters"
kind = "meter"
at_most = 1
[[rule]]
name = "clocks"
kind = "clock"
at_most = 1
"""


def _judge(world: World, trust: Trust, devices: DevicePool) -> Verdict:
    path, case = world.folder / "rules.toml", CaseFile()
    path.write_text(world.rule)
    settings = Settings(samples=len(trust.chips), seed="x", devices=("sse41",))
    now = STARTED + timedelta(minutes=30)
    found = inspect(world.runs, trust, settings, now=now, worker=devices.run, case=case)
    return apply_rules(found, read_rules(path), case, trust, settings, worker=devices.run)


def _trust(world: World) -> Trust:
    trusts = [Trust.load([out.with_name(f"{out.name}.trust.json")], [out]) for out in world.runs]
    return reduce(Trust.merge, trusts)


def _agree(world: World, trust: Trust, verdict: Verdict) -> Trust:
    """The trust once the inspectorate has countersigned what the reasons name."""
    named: dict[str, list[str]] = {"free": [], "direct-path": []}
    for reason in verdict.reasons:
        for kind, quoted, bare in _AGREED.findall(reason.text):
            named[kind].append(quoted or bare)
    signed = set()
    for out in world.runs:
        key = SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab_path(out)))
        proposal = read_proposal(out)
        before = next(each for each in trust.agreed() if each.run == proposal.terms.run)
        told = countersign(
            out,
            shown=proposal.shown,
            now=STARTED,
            amends=before,
            free=[*before.free, *named["free"]],
            direct_paths=[*before.direct_paths, *named["direct-path"]],
        )
        signed.add(told.sign(key))
    return replace(trust, countersigned=trust.countersigned | signed)


def _played(family: str, seed: int, devices: DevicePool) -> Row:
    honest = family in HONEST
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="chipwitness-declarations-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        world = World(Path(folder), random.Random(f"chipwitness/declarations/{family}/{seed}"), _MANUAL)
        agreed = ""
        try:
            (HONEST if honest else HIDING)[family](world)
        except ChipwitnessError as error:
            outcome, reasons = "refused", [f"{type(error).__name__}: {error}"]
        else:
            trust = _trust(world)
            verdict = _judge(world, trust, devices)
            outcome, reasons = verdict.outcome.value, [reason.text for reason in verdict.reasons]
            if honest and verdict.outcome is Outcome.INCONCLUSIVE:
                agreed = _judge(world, _agree(world, trust, verdict), devices).outcome.value
    return {
        "work": family,
        "mode": "honest" if honest else "hiding",
        "seconds": time.perf_counter() - begun,
        "ratio": None,
        "seed": seed,
        "outcome": outcome,
        "agreed": agreed,
        "reasons": [text[:_SHOWN] for text in reasons[:1]],
    }


def run(*, cases: int = 300, seed: int = 0, progress: Callable[[int], object] = lambda done: None) -> list[Row]:
    """Play so many hiding labs and as many honest ones, each family in turn.

    Rows have ``work`` (the family), ``mode`` (hiding or honest), ``seconds``, ``ratio`` (None), ``seed``, ``outcome``
    (or refused, where nothing is recorded), ``agreed`` (of an honest one that is left open, once what its reasons name
    is countersigned) and ``reasons`` (the first, cut short).

    Raises:
        CallerError: fewer than one case, or a negative seed.
    """
    if cases < 1 or seed < 0:
        raise CallerError("give at least one case, and a seed from 0 on")
    rows: list[Row] = []
    with DevicePool() as devices:
        for families in (list(HIDING), list(HONEST)):
            for case in range(cases):
                rows.append(_played(families[case % len(families)], seed * 1_000_000 + case, devices))
                progress(1)
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """What breaks a promise, or None."""
    odd = [
        row
        for row in rows
        if (row["mode"] == "hiding" and row["outcome"] == Outcome.ACCEPT.value)
        or (row["mode"] == "honest" and Outcome.ACCEPT.value not in (row["outcome"], row["agreed"]))
    ]
    text = "; ".join(
        f"{row['work']} (seed {row['seed']}): {row['outcome']}: {' '.join(row['reasons'][:1])}" for row in odd
    )
    return f"{len(odd)} of {len(rows)} are not judged as they must be: {text}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'':8} {'family':23} {'cases':>6} ACCEPT INCONCLUSIVE REJECT refused  then agreed"]
    for mode, families in (("hiding", HIDING), ("honest", HONEST)):
        for family in families:
            mine = [row for row in rows if (row["mode"], row["work"]) == (mode, family)]
            counts = [
                sum(row["outcome"] == each for row in mine) for each in ("ACCEPT", "INCONCLUSIVE", "REJECT", "refused")
            ]
            agreed = sum(row["agreed"] == Outcome.ACCEPT.value for row in mine)
            lines.append(
                f"{mode:8} {family:23} {len(mine):6} {counts[0]:6} {counts[1]:12} {counts[2]:6} {counts[3]:7}  {agreed}"
            )
    return lines
