"""Law 2 in the chip's own log: every tick lies in an epoch whose schedule can be audited."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from analysis.cli import main
from analysis.commands.runs import trust_path
from tests.guards import off

pytestmark = pytest.mark.usefixtures("kept_devices")

ACCEPT, REJECT = 0, 1
NOW = ("--now", "2026-01-01T00:30:00Z")


@pytest.fixture
def inspect_open_epoch(make_run, capsys):
    """Inspects a lab whose first chip leaves its epoch open; returns exit code and output."""

    def call():
        recorded = make_run(lie="open-epoch", chips=2, steps=4, rate=Fraction(1))
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
    text = "chip lab-chip-0000: epoch 1 is still open and covers ticks 0.00 to 4.00: its schedule cannot be audited"
    assert text in out


def test_a15_guard_off_epoch_that_stays_open(inspect_open_epoch):
    with off("open epoch"):
        code, out = inspect_open_epoch()
    assert code == ACCEPT, out
