"""Law 3: nothing that an inspector has seen is forgotten since another inspection ran at the same time (row A33)."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from firmware_sim import LogPosition
from inspector.inspection.memory import hold_memory, load_memory, save_memory
from tests.conftest import STARTED

WAITS = "waits for another inspection that uses"


@pytest.fixture
def begin(make_run, tmp_path):
    """Begin an inspection of a run in a process of its own, with guards off; returns it, and its memory."""
    recorded = make_run(steps=2, chips=1, checkpoint_every=1, batch_size=4, rate=Fraction(1))
    memory = tmp_path / "memory.json"
    words = ["inspect", str(recorded.run), "--trust", str(recorded.run.with_name("run.trust.json")), "--samples", "1"]
    words += ["--device", "sse41", "--memory", str(memory), "--now", f"{recorded.now:%Y-%m-%dT%H:%M:%SZ}", "--json"]

    def begun(*off):
        command = [sys.executable, "-m", "tests.guards", *off, "--", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return begun, memory


def test_a33_what_another_inspection_saw_meanwhile_is_not_lost(begin):
    begun, memory = begin
    other = LogPosition(counter=9, size=9, head=b"h" * 32, time=int(STARTED.timestamp()))
    with hold_memory(memory):
        process = begun()
        assert WAITS in process.stderr.readline()
        save_memory(memory, {"another-chip": other})
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert load_memory(memory)["another-chip"] == other
    assert len(load_memory(memory)) == 2


def test_a33_guard_off_it_writes_what_the_other_reads(begin):
    begun, memory = begin
    with hold_memory(memory):
        process = begun("memory held")
        process.communicate(timeout=120)
        assert process.returncode == 0
        assert len(load_memory(memory)) == 1
