"""A run is inspected while it goes on, by parties in processes of their own, and pays for new steps alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.verdict import Outcome
from inspector.probability.odds import Violation
from inspector.rounds import steps
from inspector.rounds.world import World
from monitor.lab.rounds import LabSide
from tests.conftest import STARTED

SETTINGS = Settings(
    samples=2, seed=None, devices=("sse41",), sampling=Sampling(confidence=0.9, against=Violation.parse("swap"))
)
MINUTE = timedelta(minutes=1)
KINDS = ("meter", "clock")


class Party:
    """A process that does what it is told by a line, and answers by one."""

    def __init__(self, stack: ExitStack, *words: object) -> None:
        script = Path(__file__).with_name("party.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self._process.__exit__, None, None, None)
        stack.callback(self._process.kill)

    def begin(self, line: str) -> None:
        """Let it begin with something."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def end(self) -> int:
        """What it answers."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def tell(self, line: str) -> int:
        """Both."""
        self.begin(line)
        return self.end()


@pytest.fixture
def parties():
    with ExitStack() as stack:
        yield lambda *words: Party(stack, *words)


def look(lab, run, done, capsys):
    """The command line asks a lab at work, and one that does not ask its chips concludes nothing."""
    words = ["--trust", f"{run}.trust.json", "--samples", "2", "--device", "sse41", "--now", "2026-01-01T00:30:00Z"]
    lab.begin(f"wait {done}")
    try:
        assert main(["inspect", str(run), *words, "--live", f"{run}.lab"]) == 0
        told = capsys.readouterr().out
        assert "run is unfinished, and this covers its first 6 of 12 steps" in told
        assert "[cost] run on sse41: 6 of 6 steps replayed (100%) in" in told
        assert main(["inspect", str(run), *words]) == 3
    finally:
        done.touch()
    lab.end()


def test_a_run_is_inspected_three_times_while_it_trains_and_once_after(parties, tmp_path, capsys, kept_devices):
    world = World.create(tmp_path / "world", LabSide)
    lab, cluster = parties("lab", world.folder, tmp_path / "run", 12), parties("cluster", world.folder)
    decisions: list[Any]
    replayed, covered, decisions, now = [], [], [], STARTED
    rules = tmp_path / "rules.toml"  # the chips' clocks and meters count what is declared, in each round
    rules.write_text(
        "".join(f'[[rule]]\nname = "{each}"\nkind = "{each}"\nat_least = 1\nat_most = 1\n' for each in KINDS)
    )
    for count, meanwhile in ((6, 0), (2, 1), (1, 0), (2, 0)):  # the chips are one step beyond the second head
        lab.tell(f"train {count}")
        lab.tell("join" if len(decisions) < 3 else "finish")
        steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now, rules=rules)
        lab.tell(f"hand {now.isoformat()}")
        lab.tell(f"train {meanwhile}")
        steps.reveal(world, now=now)
        lab.tell(f"answer {now.isoformat()}")
        steps.order(world, now=now)
        lab.tell(f"open {now.isoformat()}")
        cluster.tell(f"replay {now.isoformat()}")
        decisions.append(steps.decide(world, now=now))
        verdict, now = decisions[-1].verdict, now + 5 * MINUTE
        assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
        assert verdict.evidence["rules"]["results"] == dict.fromkeys(KINDS, "pass")
        replayed.append(sum(each["steps"] for each in verdict.evidence["replays"]))
        covered.append(verdict.evidence["runs"][0]["steps"])
        if len(decisions) == 1:
            look(lab, tmp_path / "run", tmp_path / "done", capsys)
    assert covered == [6, 8, 10, 12]
    assert replayed == [6, 2, 2, 2]
    first, third, last = (each.verdict.reasons[0].text for each in (decisions[0], decisions[2], decisions[3]))
    assert "lab.run is unfinished, and this covers its first 6 of 12 steps" in first
    assert "lab.run is unfinished, and this covers its first 10 of 12 steps" in third
    assert "; an earlier inspection accepted lab.run up to step 8" in third
    assert "that are new replayed" in third
    assert "is unfinished," not in last
    trust = world.trust()
    for party in ("labs", "cluster"):
        shutil.rmtree(world.folder / party)
    for decided in decisions:
        shown = check_bundle(decided.bundle.read_bytes(), trust)
        assert (shown.outcome, shown.evidence["verifies"]) == (Outcome.ACCEPT, True), shown.reasons
    assert "is unfinished, and is judged up to step 10; up to step 8 it rests on an earlier verdict" in shown_text(
        decisions[2], trust
    )


def shown_text(decided, trust):
    return check_bundle(decided.bundle.read_bytes(), trust).reasons[0].text
