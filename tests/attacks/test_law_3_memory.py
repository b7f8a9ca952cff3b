"""Law 3: nothing that an inspector has seen is forgotten since another inspection ran at the same time (row A33)."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest

from analysis.cli import main
from firmware_sim import LogPosition
from inspector.inspection.memory import hold_memory, load_memory, save_memory
from tests.conftest import STARTED
from tests.guards import off

OTHER = LogPosition(counter=9, size=9, head=b"h" * 32, time=int(STARTED.timestamp()))


@pytest.fixture
def inspected(make_run, kept_devices, tmp_path):
    """Inspects a run while another inspection has the memory, into which that writes at its end; returns the memory."""
    recorded = make_run(steps=2, chips=1, checkpoint_every=1, batch_size=4, rate=Fraction(1))
    memory = tmp_path / "memory.json"
    words = ["inspect", str(recorded.run), "--trust", str(recorded.run.with_name("run.trust.json")), "--samples", "1"]
    words += ["--device", "sse41", "--memory", str(memory), "--now", f"{recorded.now:%Y-%m-%dT%H:%M:%SZ}", "--json"]

    def run(*, seconds):
        begun, ended = threading.Event(), threading.Event()

        def another():
            with hold_memory(memory):
                known = load_memory(memory)
                begun.set()
                ended.wait(seconds)
                save_memory(memory, {**known, "another-chip": OTHER})

        other = threading.Thread(target=another)
        other.start()
        begun.wait()
        assert main(words) == 0
        ended.set()
        other.join()
        return load_memory(memory)

    return run


def test_a33_what_another_inspection_saw_meanwhile_is_not_lost(inspected, capsys):
    assert set(inspected(seconds=1)) == {"another-chip", "lab-chip-0000"}
    assert "waits for another inspection that uses" in capsys.readouterr().err


def test_a33_guard_off_one_forgets_what_the_other_saw(inspected):
    with off("memory held"):
        assert set(inspected(seconds=600)) == {"another-chip"}
