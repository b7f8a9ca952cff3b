"""Eight writers at once, some killed with SIGKILL: what was acknowledged is in the log, and nothing is there twice."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import func, select

from inspector.registry import audit, show_chip, summarise
from inspector.registry._schema import changes, events, genesis, parties

WRITER = Path(__file__).with_name("writer_process.py")
WRITERS = 8


def start(world, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WRITER), world.where, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def consistent(world) -> None:
    report = audit(world.registry, registrar=world.keys["registrar"].verifying)
    assert report.findings == ()


def test_eight_writers_some_killed(world) -> None:
    """Every writer is killed without warning, each after its own number of acknowledged moves."""
    _, known = world.registry.head()
    before = summarise(world.registry).events
    writers = [start(world, str(number)) for number in range(WRITERS)]
    acknowledged: list[str] = []
    try:
        # The last writer is waited for longest, so the early kills fall among running writers.
        for number, writer in enumerate(writers):
            assert writer.stdout is not None
            for _ in range(2 + 2 * number):
                line = writer.stdout.readline()
                assert line, writer.stderr.read() if writer.stderr else ""
                acknowledged.append(line)
            writer.kill()
            acknowledged += writer.stdout.readlines()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    complete = [line.split() for line in acknowledged if line.endswith("\n")]
    with world.registry.reader() as connection:
        rows = connection.execute(
            select(changes.c.event, genesis.c.chip, parties.c.name, changes.c.sequence)
            .join(genesis, genesis.c.ordinal == changes.c.ordinal)
            .join(parties, parties.c.party == changes.c.holder)
        ).all()
        logged = connection.execute(select(func.count()).select_from(events)).scalar_one() - before
    stored = {str(row.event): (row.chip, row.name) for row in rows}
    assert len(stored) == len(rows) == logged
    assert max(Counter((row.chip, row.sequence) for row in rows).values()) == 1
    assert {event: (chip, receiver) for event, chip, receiver in complete}.items() <= stored.items()
    assert len({event for event, _, _ in complete}) == len(complete) >= sum(2 + 2 * n for n in range(WRITERS))
    # At most one move per killed writer was committed but not yet acknowledged.
    assert len(complete) <= logged <= len(complete) + WRITERS
    assert summarise(world.registry).chips == 20
    report = audit(world.registry, registrar=world.keys["registrar"].verifying, known_head=known)
    assert report.findings == ()


def test_killed_at_every_step_of_a_transfer(world) -> None:
    """A move has some 20 database steps; a process killed at any of them leaves the move out, or in, but never half."""
    points = list(range(1, 50))
    writer = start(world, "crash", *map(str, points))
    output, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    lines = output.splitlines()
    fates = dict(line.split() for line in lines if line.endswith(("killed", "survived")))
    killed = [int(point) for point, fate in fates.items() if fate == "killed"]
    assert killed == list(range(1, len(killed) + 1))
    assert 15 <= len(killed) < len(points)
    view = show_chip(world.registry, "chip-0000")
    assert (view.holder, view.sequence) == ("lab-b", 1)
    consistent(world)


def test_two_imports_of_the_same_chips(world) -> None:
    writers = [start(world, "import", prefix) for prefix in ("x", "y", "z")]
    answers = [writer.communicate(timeout=120) for writer in writers]
    outcomes = sorted(output.split()[0] for output, _ in answers)
    assert outcomes == ["refused", "refused", "taken"], answers
    assert all("is known already" in output for output, _ in answers if output.startswith("refused"))
    assert summarise(world.registry).chips == 20 + 60
    consistent(world)


def test_a_reader_sees_one_moment(world) -> None:
    """Two queries of one reader agree although a writer commits between them."""
    with world.registry.reader() as connection:
        query = select(func.count()).select_from(events)
        first = connection.execute(query).scalar_one()
        world.pass_on("chip-0001")
        assert connection.execute(query).scalar_one() == first
    assert summarise(world.registry).events == first + 1


def test_a_failed_move_leaves_the_connection_usable(world) -> None:
    choice = random.Random(5)
    for _ in range(10):
        with pytest.raises(Exception, match="held by"):
            world.pass_on(choice.choice(world.chips), sender="lab-a", receiver="lab-b")
    world.pass_on("chip-0001")
    consistent(world)
