"""Law 3: what labs try in rounds: to show some runs, another world, another history, or one chip to two buyers."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sampling import challenge_seed, draw
from inspector.inspection.sources import Sources
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.rounds import steps
from inspector.rounds.exchange import announced_in
from inspector.rounds.world import World, sealed
from monitor import Recorder
from monitor.lab.evidence import LiveChips
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import lab_path
from monitor.transcript import RunFolder
from tests.conftest import STARTED
from tests.guards import off

SETTINGS = Settings(samples=2, seed=None, devices=("sse41",))
SMALL = {"steps": 2, "chips": 2, "checkpoint_every": 1, "batch_size": 4, "rate": Fraction(1)}
MINUTE = timedelta(minutes=1)
WORLDS, DRAWS, FALSE_ALARM = 200, 2000, 1e-3


@pytest.fixture
def play(devices):
    """A round of one lab, in which it hands over some of its runs."""

    def run(world, *, hand=None, now=STARTED):
        steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now)
        steps.hand(world, "lab", runs=hand, now=now)
        steps.reveal(world, now=now)
        steps.answer(world, "lab", now=now)
        steps.order(world, now=now)
        steps.disclose(world, "lab", now=now)
        steps.replay(world, now=now, worker=devices.run)
        return steps.decide(world, now=now).verdict

    return run


def texts(verdict):
    return " | ".join(each.text for each in verdict.reasons)


def test_a_second_world_of_folders(make_run, play, tmp_path):
    """Chips and folders are put back to before a run; what an earlier round was shown convicts the lab twice."""
    first = make_run("first", **SMALL)
    shutil.copytree(lab_path(first.run) / "chips", tmp_path / "copy")
    second = make_run("second", after=first.run, seed=6, **SMALL)
    world = World.create(tmp_path / "world", LabSide)
    world.join(second.trust, {"first": first.run, "second": second.run})
    assert play(world).outcome is Outcome.ACCEPT
    shutil.rmtree(lab_path(first.run) / "chips")
    shutil.copytree(tmp_path / "copy", lab_path(first.run) / "chips")
    verdict = play(world, hand=["first"])
    assert verdict.outcome is Outcome.REJECT
    assert "whose head it signed for an earlier round" in texts(verdict)
    assert "at the last inspection" in texts(verdict)
    with off("heads handed over again", "answer goes on"):
        assert play(world, hand=["first"]).outcome is Outcome.ACCEPT


def recorder_of(run, *, resume=False, after=None):
    """A model, its optimizer and a recorder of a loop whose batches come as it goes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if resume:
        return model, optimizer, Recorder.resume(model, optimizer, out=run)
    every = 2 if after is None else 3
    options: dict[str, Any]
    options = {"seed": 5, "chips": 2, "checkpoint_every": every, "lab": "lab", "started": STARTED, "hours": 1.0}
    return model, optimizer, Recorder(model, optimizer, out=run, after=after, **options)


def train(parts, numbers, seed):
    model, optimizer, recorder = parts
    for number in numbers:
        generator = torch.Generator().manual_seed(seed + number)
        x, y = torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)
        with recorder.step({"x": x, "y": y}) as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)


def test_a_history_forked_at_a_resume(tmp_path, play):
    """Steps 3 and 4 are shown to an inspection, then trained again on other data from a backup of step 2."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    lab = lab_path(run)
    parts = recorder_of(run)
    train(parts, (1, 2), seed=0)
    shutil.copytree(run, backup / "run")
    shutil.copytree(lab, backup / "lab")
    train(parts, (3, 4), seed=0)
    parts[2]._run.lab.power_off()
    parts[2]._run._desk.close()
    world = World.create(tmp_path / "world", LabSide)
    world.join(Trust.load([tmp_path / "run.trust.json"], [run]), {"run": run})
    seen = play(world)
    assert seen.outcome is Outcome.ACCEPT, seen.reasons
    assert "lab.run is unfinished, and this covers its first 4 steps" in seen.reasons[0].text
    shutil.rmtree(run)
    shutil.rmtree(lab)
    shutil.copytree(backup / "run", run)
    shutil.copytree(backup / "lab", lab)
    parts = recorder_of(run, resume=True)
    train(parts, (3, 4, 5), seed=100)
    parts[2].finish()
    verdict = play(world)
    assert verdict.outcome is Outcome.REJECT
    assert "does not continue from step 4 as lab signed it earlier: one run has two histories" in texts(verdict)
    assert "at the last inspection" in texts(verdict)
    with off("one history", "answer goes on"):
        assert play(world).outcome is Outcome.ACCEPT


def test_a_head_that_never_moves(tmp_path, play):
    """The lab keeps handing over step 2, while its chips go on: the next round sees it, the one after rejects it."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    parts = recorder_of(run)
    train(parts, (1, 2), seed=0)
    shutil.copytree(run, kept)
    shutil.copytree(lab_path(run), lab_path(kept))
    train(parts, (3, 4), seed=0)
    parts[2]._run.lab.power_off()
    parts[2]._run._desk.close()
    shutil.rmtree(lab_path(kept) / "chips")
    lab_path(kept).joinpath("chips").symlink_to(lab_path(run) / "chips")
    world = World.create(tmp_path / "world", LabSide)
    world.join(Trust.load([tmp_path / "run.trust.json"], [run]), {"run": kept})
    seen = play(world)
    assert seen.outcome is Outcome.ACCEPT, seen.reasons
    assert "since then chips have taken up to 2 more steps, which the next inspection covers" in seen.reasons[0].text
    verdict = play(world)
    assert verdict.outcome is Outcome.REJECT
    assert (
        "an earlier inspection saw this record, but it lies beyond the head that is handed over now (step 3)"
        in texts(verdict)
    )
    with off("heads keep up"):
        assert play(world).outcome is Outcome.ACCEPT
        hidden = recorder_of(tmp_path / "hidden", after=run)
        train(hidden, (1,), seed=7)
        hidden[2].finish()
        assert "this record belongs to a run that was not declared" in texts(play(world))


def test_one_chip_is_sold_twice(make_run, tmp_path):
    """The registry of a world gives a chip to one lab; without that, the second buyer would own it too."""
    one, two = make_run("one", lab="lab-a", **SMALL), make_run("two", lab="lab-b", **SMALL)
    sold = replace(two.trust, chips={**two.trust.chips, "lab-a-chip-0000": "lab-b"})
    world = World.create(tmp_path / "world", LabSide)
    world.join(one.trust, {"one": one.run})
    with pytest.raises(CallerError, match="disagree about chip lab-a-chip-0000"):
        world.join(sold, {"two": two.run})
    assert "lab-b" not in world.trust().labs
    with off("one owner"):
        world.join(sold, {"two": two.run})
        assert "lab-a-chip-0000" in world.trust().chips_of("lab-b")


def test_a_lab_that_signs_that_it_has_no_run(make_run, devices):
    """One of four chips is drawn, two of which have trained in secret: predicted 1/2, and measured in 200 worlds."""
    honest, liar = make_run("honest", lab="lab-a", **SMALL), make_run("liar", lab="lab-b", **SMALL)
    trust = honest.trust.merge(liar.trust)
    heads = [RunFolder(honest.run, trust.labs["lab-a"]).manifest_digest]
    live, pool = LiveChips([lab_path(each.run) for each in (honest, liar)]), sorted(trust.chips)

    def judged(secret):
        settings = replace(SETTINGS, samples=1, seed=secret, committed=True, labs=tuple(trust.labs))
        return inspect(
            [honest.run],
            trust,
            settings,
            now=honest.now,
            worker=devices.run,
            sources=Sources(ask=live.ask, heads=heads),
        )

    def caught():
        @cache
        def outcome(chip):
            return judged(next(each for each in secrets if drawn(each) == chip)).outcome

        return sum(outcome(drawn(secret)) is Outcome.REJECT for secret in secrets)

    def drawn(secret):
        return draw(pool, 1, challenge_seed(secret, heads))[0]

    secrets = [f"world {number}" for number in range(WORLDS)]
    low, high = binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], WORLDS, 0.5)
    assert low <= caught() <= high
    verdict = judged(next(each for each in secrets if drawn(each).startswith("lab-b")))
    assert verdict.evidence["labs"] == {"lab-a": "ACCEPT", "lab-b": "REJECT"}
    assert "this record belongs to a run that was not declared" in texts(verdict)
    with off("undeclared runs"):
        assert caught() == 0


def test_a_root_cannot_be_ground_against_the_draw():
    """A lab that may sign any of 64 heads takes the one that its rehearsal drew its bad chips least by."""
    pool = [f"lab-chip-{number:04d}" for number in range(8)]
    heads = [hashlib.sha256(f"head {number}".encode()).hexdigest() for number in range(64)]

    def missed(secret, head):
        return pool[0] not in draw(pool, 3, challenge_seed(secret, [head]))

    best = max(heads, key=lambda head: sum(missed(f"rehearsal {number}", head) for number in range(100)))
    escaped = sum(missed(f"world {number}", best) for number in range(DRAWS))
    assert escaped <= binom.ppf(1 - FALSE_ALARM, DRAWS, 5 / 8)
    assert all(any(missed(f"known {number}", head) for head in heads) for number in range(20))  # who knows the secret


@pytest.fixture
def strange_folders(make_run, devices, tmp_path):
    """A round in which somebody else puts folders among the openings: a copy of the head alone, and a name of bytes."""

    def run():
        recorded = make_run(**SMALL)
        world = World.create(tmp_path / "world", LabSide)
        world.join(recorded.trust, {"run": recorded.run})
        steps.announce(world, SETTINGS, minutes=1, refusals=0, now=STARTED)
        steps.hand(world, "lab", now=STARTED)
        steps.reveal(world, now=STARTED)
        steps.answer(world, "lab", now=STARTED)
        openings = world.folder / "inspectorate" / "openings" / "0001"
        for name in ("lab.zz", os.fsdecode(b"lab.\xff")):
            (openings / name).mkdir()
            shutil.copy(recorded.run / "manifest.json", openings / name)
        steps.order(world, now=STARTED)
        steps.disclose(world, "lab", now=STARTED)
        steps.replay(world, now=STARTED, worker=devices.run)
        return steps.decide(world, now=STARTED).verdict

    return run


def test_c22_b16_folders_that_others_put_beside_change_nothing(strange_folders):
    verdict = strange_folders()
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_c22_guard_off_the_lab_is_not_accepted(strange_folders):
    with off("sound folder of a run"):
        verdict = strange_folders()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "is missing" in texts(verdict)


def test_b16_guard_off_a_name_of_bytes_stops_the_round(strange_folders):
    with off("folders that can be named", "sound folder of a run"), pytest.raises(CallerError, match="surrogates"):
        strange_folders()


@pytest.mark.parametrize("name", ["inspectorate", "cluster"])
def test_b17_no_lab_has_another_partys_name(make_run, tmp_path, name):
    recorded = make_run(lab=name, **SMALL)
    world = World.create(tmp_path / "world", LabSide)
    with pytest.raises(CallerError, match=f"in every world {name} is the name of a party that is not a lab"):
        world.join(recorded.trust, {"run": recorded.run})
    with pytest.raises(CallerError, match="no lab has joined"):
        world.trust()


def test_b17_guard_off_a_lab_named_inspectorate_hides_what_the_inspectorate_sends(make_run, tmp_path):
    recorded = make_run(lab="inspectorate", **SMALL)
    world = World.create(tmp_path / "world", LabSide)
    with off("names of parties"):
        world.join(recorded.trust, {"run": recorded.run})
        steps.announce(world, SETTINGS, minutes=1, refusals=0, now=STARTED)
        assert "announcement" not in [kind for _, _, kind, _, _ in world.timeline()]


@pytest.fixture
def two_labs(make_run, devices, tmp_path):
    """A round of an honest lab; at the time of a step another lab does something."""

    def run(*, joins_late=False, hands_late=False, place="world"):
        one = make_run(f"{place}-one", **SMALL)
        two = make_run(f"{place}-two", lab="rival", seed=6, **SMALL)
        world = World.create(tmp_path / place, LabSide)
        world.join(one.trust, {"one": one.run})
        if not joins_late:
            world.join(two.trust, {"two": two.run})
        steps.announce(world, replace(SETTINGS, samples=2 if joins_late else 4), minutes=1, refusals=0, now=STARTED)
        if joins_late:
            world.join(two.trust, {"two": two.run})
        steps.hand(world, "lab", now=STARTED)
        now = STARTED + 2 * MINUTE
        if not joins_late and not hands_late:
            steps.hand(world, "rival", now=STARTED)
        steps.reveal(world, now=now)
        if hands_late:
            steps.hand(world, "rival", now=STARTED)  # says its own clock
        for lab in ("lab",) if joins_late else ("lab", "rival"):
            steps.answer(world, lab, now=STARTED)
        steps.order(world, now=now)
        for lab in ("lab",) if joins_late else ("lab", "rival"):
            steps.disclose(world, lab, now=now)
        steps.replay(world, now=now, worker=devices.run)
        return steps.decide(world, now=now).verdict

    return run


def test_c17_a32_heads_that_come_after_the_draw_change_nothing(two_labs):
    verdict = two_labs(hands_late=True)
    assert verdict.evidence["labs"] == {"lab": "ACCEPT", "rival": "REJECT"}, verdict.reasons
    assert "rival handed over no heads by the deadline" in texts(verdict)


def test_c17_guard_off_a_rival_has_the_honest_lab_rejected(two_labs):
    with off("arrived before the draw"):
        assert two_labs(hands_late=True).evidence["labs"]["lab"] == "REJECT"


def test_c18_who_joins_after_the_announcement_takes_part_in_the_next_round(two_labs):
    verdict = two_labs(joins_late=True)
    assert verdict.evidence["labs"] == {"lab": "ACCEPT"}, verdict.reasons


def test_c18_guard_off_the_honest_lab_is_rejected(two_labs):
    """Two of four chips are drawn, both of the honest lab in one of six rounds: in none of five, one time in 7,776."""
    with off("labs of the announcement", "chips of the draw"):
        rounds = (two_labs(joins_late=True, place=f"world-{number}") for number in range(5))
        assert any(verdict.evidence["labs"]["lab"] == "REJECT" for verdict in rounds)


@pytest.fixture
def announced(make_run, tmp_path):
    """A world in which a round was announced, and its one run."""
    recorded = make_run(**SMALL)
    world = World.create(tmp_path / "world", LabSide)
    world.join(recorded.trust, {"run": recorded.run})
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=STARTED)
    return world, recorded


def named(number, kind, content=b"junk"):
    return f"0001-{number}-{kind}.{hashlib.sha256(content).hexdigest()}.json"


def litter(folder):
    """One of each kind of file that is no message."""
    os.mkfifo(folder / named(1, "heads"))
    (folder / named(3, "answers")).mkdir()
    (folder / named(5, "openings")).write_bytes(b"junk")
    (folder / named(1, "heads", b"link")).symlink_to("/dev/zero")
    with (folder / named(1, "heads", b"hole")).open("wb") as sparse:
        sparse.truncate(1 << 30)
    (folder / os.fsdecode(b"0001-1-heads.\xff.json")).write_bytes(b"[]")
    (folder / "0001-6-results.json").write_text("[]")


def test_b11_what_is_no_message_stops_nobody_and_is_named(announced):
    world, _ = announced
    inbox = world.inbox("inspectorate")
    (inbox / "lab").mkdir()
    for folder in (inbox, inbox / "lab", world.inbox("lab") / "inspectorate"):
        litter(folder)
    with pytest.raises(CallerError, match="lab has not handed over its heads yet"):
        steps.reveal(world, now=STARTED)
    rows = world.timeline()
    assert [row[2:4] for row in rows if row[0]] == [("announcement", "inspectorate")]
    assert sum(row[2] == "ignored" and row[4] == ["inspectorate"] for row in rows) == 14
    assert all(row[3].isascii() for row in rows)
    assert steps.hand(world, "lab", now=STARTED) == ["run"]
    steps.reveal(world, now=STARTED)


def test_b11_guard_off_a_folder_stops_the_inspectorate(announced):
    world, _ = announced
    (world.inbox("inspectorate") / "lab" / named(3, "answers")).mkdir(parents=True)
    steps.hand(world, "lab", now=STARTED)
    with off("plain files in inboxes"), pytest.raises(IsADirectoryError):
        steps.reveal(world, now=STARTED)
    steps.reveal(world, now=STARTED)


def test_a24_nobodys_flood_touches_another(announced):
    """10,001 files of good names in a lab's own folder, and 64 MiB in one: two seconds at most, and one line each."""
    world, _ = announced
    folder = world.inbox("inspectorate") / "lab"
    folder.mkdir()
    for number in range(10_001):
        content = b"%d" % number
        (folder / named(1, "heads", content)).write_bytes(content)
    content = bytes(64 << 20).replace(b"\0", b"x")
    (folder / named(1, "heads", content)).write_bytes(content)
    steps.hand(world, "lab", now=STARTED)
    began = time.process_time()
    steps.reveal(world, now=STARTED)
    assert time.process_time() - began < 4  # with the rest of the command, on a slow machine
    assert world.read("lab", "draw", "inspectorate", world.public("inspectorate")).predicate["silent"] == []
    ignored = [row[3] for row in world.timeline() if row[2] == "ignored"]
    assert len(ignored) == 21
    assert ignored[-1] == "and 9982 more"


def test_a25_a_taken_place_makes_room(announced):
    """Others put a pipe, a file or a folder where a message belongs, or a file where its sender's folder does."""
    world, _ = announced
    place = world.inbox("inspectorate") / "lab"
    place.write_text("junk")
    steps.hand(world, "lab", now=STARTED)
    [path] = place.iterdir()
    assert hashlib.sha256(path.read_bytes()).hexdigest() in path.name


@pytest.mark.parametrize("without", [(), ("who signed a message",)])
def test_a24_a25_what_others_post_in_a_partys_name_is_nothing(make_run, devices, tmp_path, without):
    """A rival signs heads for the lab, and results for the cluster, by a key of its own, before they send theirs.

    With the guard off, these count, and the lab is rejected.
    """
    recorded = make_run(**SMALL)
    world = World.create(tmp_path / "world", LabSide)
    world.join(recorded.trust, {"run": recorded.run})
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=STARTED)
    about = announced_in(world, "inspectorate").digest
    rival = SigningKey.generate()
    for kind, sender, told in (
        ("heads", "lab", {"heads": []}),
        ("results", "cluster", {"results": [], "checks": [], "refused": 0}),
    ):
        world.post("inspectorate", kind, sender, sealed(kind, about, told, rival))
    with off(*without):
        steps.hand(world, "lab", now=STARTED)
        steps.reveal(world, now=STARTED)
        steps.answer(world, "lab", now=STARTED)
        steps.order(world, now=STARTED)
        steps.disclose(world, "lab", now=STARTED)
        steps.replay(world, now=STARTED, worker=devices.run)
        with pytest.raises(CallerError, match="lab has already sent heads of round 1"):
            steps.hand(world, "lab", now=STARTED)
        verdict = steps.decide(world, now=STARTED).verdict
    if without:
        assert verdict.outcome is Outcome.REJECT
        return
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    rows = world.timeline()
    assert {row[3] for row in rows if row[0]} == {"inspectorate", "cluster", "lab"}
    ignored = [row[3].partition(".")[0] for row in rows if not row[0]]
    assert ignored == ["'cluster/0001-6-results", "'lab/0001-1-heads"]
