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
        "check": ("check", "list the lines of a training loop that cannot be recorded, and what to write instead"),
        "train": ("runs", "train on monitored chips and leave a run folder"),
        "declare": ("declarations", "show and countersign what a lab declares before it trains"),
        "program": ("programs", "show and review what the recorded steps of a run do"),
        "run": ("storage", "list what is in a run folder; pack it into a signed archive, or unpack one"),
        "fsck": ("storage", "recompute every digest, root and signature of a run folder with independent code"),
        "chip": ("chips", "read, challenge or check one chip: its identity, log and signed statement (quote)"),
    },
    "Inspect it": {
        "verify": (
            "inspections",
            "check without replay: a run, a verdict with its evidence (bundle), the record of a dispute",
        ),
        "replay": ("inspections", "re-execute one segment of a run on a device"),
        "inspect": ("inspections", "sample chips, match snapshots, replay segments, give a verdict"),
        "rules": ("rules", "rules that runs are inspected by: compute, data, hyperparameters"),
        "world": ("world", "run an inspection by signed messages between the parties, in a folder called a world"),
        "dispute": (
            "disputes",
            "settle a dispute between labs: the first step and operator that differ, and who is wrong",
        ),
        "serve": ("serving", "serve one party over HTTP: a party to an inspection, or a training provider"),
        "task": ("delegation", "write a client's order for a training run, and list who may carry it out"),
        "delegate": ("delegation", "have providers do a task; the result is right if at least one of them is honest"),
        "ranks": ("ranks", "which process of a distributed run departed from its program"),
        "registry": ("registry", "keep the directory of chip owners: import, transfer, revoke, publish, count, audit"),
    },
    "Plan and estimate": {
        "odds": ("odds", "how likely a violation is to escape an inspection of a given size, and what certainty costs"),
        "samples": (
            "detection",
            ("how many chips to inspect to detect a training run of a given size (Shavit 2023, Eq. 1)"),
        ),
        "table": ("detection", "Table 1 of Shavit 2023, and the same for today's models, chips and fleets"),
        "curve": ("detection", "draw a figure (PNG, SVG or PDF) and give its numbers"),
        "plan": ("detection", "the cheapest inspection schedule, with inspectors and cost"),
        "alarms": ("detection", "what an accusation means: ROC, likelihood ratio, posterior and expected cost"),
        "campaign": ("campaign", "Monte Carlo over a fleet of chips"),
        "evidence": (
            "evidence",
            "weigh evidence from sources other than chips, such as signs of hidden sites",
        ),
        "explore": ("explore", "a page with sliders, figures, campaigns and recorded runs, which works from disk"),
    },
    "Look at the numerics": {
        "operators": ("operators", "list the ATen operators that are covered, and compare them across devices"),
        "devices": ("inspections", "list replay devices and the fingerprints of their arithmetic"),
        "drift": ("drift", "repeat a run's steps in native arithmetic, and compare devices"),
        "bench": ("bench", "measure costs on this machine, next to plain PyTorch in the same run"),
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
