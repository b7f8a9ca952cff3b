"""The commands, in groups; the module of each exports ``register(subparsers)``, and is loaded when it is asked for."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["GROUPS", "register"]

GROUPS = {
    "Start here": {"demo": ("demo", "the main job: labs, inspections, verdicts, curves, report")},
    "Record a training run": {
        "check": ("check", "everything in a training loop that cannot be recorded, with the line and what to write"),
        "train": ("runs", "train on monitored chips and leave a run folder"),
        "declare": ("declarations", "what a lab declares before it trains: show and countersign"),
        "program": ("programs", "what the recorded steps of a run do: show and review"),
        "run": ("storage", "contents of a run folder; an archive of it, with a list of files that its lab signs"),
        "fsck": ("storage", "recompute every digest, root and signature of a run folder with independent code"),
        "chip": ("chips", "one chip's identity, log and quote: show, log, quote, challenge, prune, verify-log"),
    },
    "Inspect it": {
        "verify": (
            "inspections",
            "check a run as far as possible without re-execution, or a verdict's bundle, or a dispute's game",
        ),
        "replay": ("inspections", "re-execute one segment of a run on a device"),
        "inspect": ("inspections", "sample chips, match snapshots, replay segments, give a verdict"),
        "rules": ("rules", "rules that runs are inspected by: compute, data, hyperparameters"),
        "world": ("world", "an inspection as rounds of signed messages between parties"),
        "dispute": ("disputes", "referee labs: first diverging step and operator, who is wrong, whose claim prevails"),
        "serve": ("serving", "answer a referee's questions about a run over HTTP"),
        "ranks": ("ranks", "which process of a distributed run departed from its program"),
        "registry": ("registry", "directory of chip owners: import, transfer, revoke, publish, census, audit, leakage"),
    },
    "Plan and estimate": {
        "odds": ("odds", "how likely a violation escapes an inspection of given size, and what certainty costs"),
        "samples": ("detection", "how many chips to inspect to catch a run (Eq. 1)"),
        "table": ("detection", "Table 1 of the paper, and the same for today's models, chips and stocks"),
        "curve": ("detection", "draw a figure (PNG, SVG or PDF) and give its numbers"),
        "plan": ("detection", "the cheapest inspection schedule, with inspectors and cost"),
        "alarms": ("detection", "what an accusation means: ROC, likelihood ratio, posterior and expected cost"),
        "campaign": ("campaign", "Monte Carlo over a fleet of chips"),
        "evidence": ("evidence", "evidence beyond chips: alarms weighed together, hidden sites, jobs in parts"),
        "explore": ("explore", "a page with sliders, figures, campaigns and recorded runs, which works from disk"),
    },
    "Look at the numerics": {
        "operators": ("operators", "coverage of ATen operators, and the battery that compares them across devices"),
        "devices": ("inspections", "list replay devices and the fingerprints of their arithmetic"),
        "drift": ("drift", "repeat a run's steps in native arithmetic, and compare devices"),
        "bench": ("bench", "measure on this machine, with ratios to plain PyTorch of the same run"),
    },
    "Read": {"docs": ("docs", "write the manual: pages for each reader, commands, glossary and API")},
}
"""Of each group its commands: module in this package, and what the command does."""


def register(subparsers: _SubParsersAction[ArgumentParser], command: str | None = None) -> None:
    """Add a command, or all; handlers import torch only when they run."""
    commands = {name: entry for group in GROUPS.values() for name, entry in group.items()}
    for module in dict.fromkeys(commands[command][:1] if command else (home for home, _ in commands.values())):
        importlib.import_module(f"analysis.commands.{module}").register(subparsers)
    for name, parser in subparsers.choices.items():
        parser.description = parser.description or f"{commands[name][1][0].upper()}{commands[name][1][1:]}."
