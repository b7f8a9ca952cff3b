"""Law 2 in the chip's own log: every tick lies in an epoch whose schedule can be audited."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim import FirmwareChip
from tests.guards import off

ACCEPT, REJECT = 0, 1
NOW = ("--now", "2026-01-01T00:30:00Z")


class ClosesOnce(FirmwareChip):
    """Closes its epoch before the first tick and never again, and takes one snapshot where all ticks are due."""

    def _start(self):
        super()._start()
        super().close_epoch()

    def _is_due(self, tick):
        return tick == 1

    def close_epoch(self):
        return self._epoch - 1


@pytest.fixture
def inspect_open_epoch(make_run, monkeypatch, capsys):
    """Inspects a lab whose chips all leave their epoch open; returns exit code and output."""

    def make(lie, folder, *, maker, chip_id, seed, snapshot_rate):
        return ClosesOnce.manufacture(folder, maker=maker, chip_id=chip_id, seed=seed, snapshot_rate=snapshot_rate)

    monkeypatch.setattr("monitor.site.make_chip", make)

    def call():
        recorded = make_run(chips=2, steps=4, rate=Fraction(1))
        trust_path(recorded.run).write_text(json.dumps(recorded.trust.to_json()))
        words = [
            "inspect",
            recorded.run,
            "--trust",
            trust_path(recorded.run),
            "--samples",
            2,
            "--device",
            "sse41",
            *NOW,
        ]
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, capsys.readouterr().out

    return call


def test_a15_epoch_that_stays_open(inspect_open_epoch):
    code, out = inspect_open_epoch()
    assert code == REJECT
    for chip in ("lab-chip-0000", "lab-chip-0001"):
        assert f"chip {chip}: epoch 1 is still open and covers ticks 1 to 5: its schedule cannot be audited" in out


def test_a15_guard_off_epoch_that_stays_open(inspect_open_epoch):
    with off("open epoch"):
        code, out = inspect_open_epoch()
    assert code == ACCEPT, out
