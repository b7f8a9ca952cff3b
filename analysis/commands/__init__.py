"""One module for each group of subcommands; each exports ``register(subparsers)``."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register_all"]

_GROUPS: tuple[str, ...] = (
    "demo",
    "bench",
    "runs",
    "storage",
    "disputes",
    "detection",
    "campaign",
    "registry",
    "operators",
    "programs",
)


def register_all(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Let each group add its subcommands; handlers import torch only when they run."""
    for group in _GROUPS:
        importlib.import_module(f"analysis.commands.{group}").register(subparsers)
