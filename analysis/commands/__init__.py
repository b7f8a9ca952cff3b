"""One module for each group of subcommands; each exports ``register(subparsers)``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from analysis.commands import (
    bench,
    campaign,
    check,
    chips,
    declarations,
    demo,
    detection,
    disputes,
    docs,
    drift,
    evidence,
    explore,
    inspections,
    odds,
    operators,
    programs,
    ranks,
    registry,
    rules,
    runs,
    storage,
    world,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register_all"]

_GROUPS = (
    demo,
    bench,
    check,
    runs,
    inspections,
    world,
    rules,
    drift,
    storage,
    chips,
    disputes,
    ranks,
    detection,
    odds,
    campaign,
    evidence,
    explore,
    registry,
    operators,
    programs,
    declarations,
    docs,
)


def register_all(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Let each group add its subcommands; handlers import torch only when they run."""
    for group in _GROUPS:
        group.register(subparsers)
