"""Law 9: a probability in a verdict covers the best lie that fits under it."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from scipy.stats import binom
from torch import nn

import analysis
from analysis.cli import main
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sampling import choose, evaluations_in, run_seed
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome
from inspector.probability.chances import chances, snapshots_within
from inspector.probability.odds import Violation
from inspector.replay.segment import segments
from tests.firmware_sim.conftest import RUN, World, work
from tests.guards import off

pytestmark = pytest.mark.usefixtures("kept_devices")

SWAP, DATA = Violation.parse("swap"), Violation.parse("data:0.25")
FALSE_ALARM = 1e-3


def swap_escapes(verdict) -> float:
    """The stated chance of a swap of all weights."""
    (odds,) = verdict.evidence["odds"]
    return next(row["escapes"] for row in odds["violations"] if row["violation"] == "swap")


@pytest.fixture
def swapped(make_run):
    """Another model's weights, swapped in at the last step of a segment in which no chip took a snapshot."""
    return make_run(lie="fake-layers", lie_step=6, steps=6, checkpoint_every=2, rate=Fraction(1, 1000))


@pytest.fixture
def judge(devices):
    def run(recorded, sampling, seed="x"):
        settings = Settings(samples=3, seed=seed, devices=("sse41",), sampling=sampling)
        return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)

    return run


def test_a18_weights_swapped_in_a_segment_without_a_snapshot(swapped, judge):
    """The odds state what a lab gets away with; with the confidence that is paid for, it gets away with less."""
    unpaid = judge(swapped, None)
    assert unpaid.outcome is not Outcome.REJECT
    assert swap_escapes(unpaid) == 1.0
    verdict = judge(swapped, Sampling(confidence=0.9, against=SWAP))
    assert verdict.outcome is Outcome.REJECT
    assert swap_escapes(verdict) == 0.0
    with off("uniform segments"):
        assert judge(swapped, Sampling(confidence=0.9, against=SWAP)).outcome is not Outcome.REJECT


def test_a18_half_of_the_draws_at_half_the_confidence(swapped, judge):
    half = Sampling(confidence=0.5, against=SWAP)
    verdicts = [judge(swapped, half, seed=str(number)) for number in range(8)]
    assert {swap_escapes(verdict) for verdict in verdicts} == {0.5}
    caught = sum(verdict.outcome is Outcome.REJECT for verdict in verdicts)
    assert 1 <= caught <= 7  # 8 fair draws are all alike with a chance of 1/128, and these are seeded


def test_a18_through_the_command_line(swapped, tmp_path, capsys):
    (tmp_path / "trust.json").write_text(json.dumps(swapped.trust.to_json()))
    words = ["--trust", str(tmp_path / "trust.json"), "--json"]
    inspection = ["--samples", "3", "--seed", "x", "--device", "sse41", "--now", "2026-01-01T00:30:00Z"]
    assert main(["inspect", str(swapped.run), *words, *inspection]) == 1
    (stated,) = json.loads(capsys.readouterr().out)["evidence"]["odds"]
    assert main(["odds", str(swapped.run), *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["violations"] == [{**each, "seconds": None} for each in stated["violations"]]
    assert (stated["coverage"], stated["drawn"], stated["drawn_from"]) == (1.0, 2, 2)


def stated(lie, **inspection):
    """What a verdict says of a lie."""
    return {row["lie"]: row["probability"] for row in chances(**inspection)}[lie]


@pytest.fixture(scope="module")
def stretches(tmp_path_factory):
    """Of stretches of so many ticks in which a chip holds another state, how many its lab saw no snapshot fall into.

    The lab sees each snapshot as its chip takes it, and begins when one has fallen into the first quarter of a tick.
    """
    world, rate = World(tmp_path_factory.mktemp("watched")), Fraction(1, 4)
    chip = world.make(snapshot_rate=rate)
    memory = world.attach(chip)
    chip.commit(RUN, 0, bytes(32))

    def seen(ticks, trials):
        caught = 0
        for _ in range(trials):
            found = False
            while not found:
                before = chip.position[1]
                work(memory, Fraction(1, 4))
                found = chip.position[1] > before
                if not found:
                    work(memory, Fraction(3, 4))
            world.set_step(7)
            before = chip.position[1]
            chip.idle(ticks)
            caught += chip.position[1] > before
            world.set_step(0)
            work(memory, Fraction(3, 4))
        return caught

    yield seen, rate
    chip.cut_power()


@pytest.mark.parametrize("ticks", [1, 2])
def test_a41_a_lab_that_sees_its_snapshots_does_no_better_than_is_stated(stretches, ticks):
    """400 stretches of a real chip; one-sided at 1e-3, by fixed secrets."""
    seen, rate = stretches
    lie = f"all chips hold another state for {ticks} ticks at a stretch, put there past every operator"
    caught = seen(ticks, 400)
    assert caught >= binom.ppf(FALSE_ALARM, 400, stated(lie, chips=1, drawn=1, rate=rate))
    with off("labs see snapshots"):
        assert caught < binom.ppf(FALSE_ALARM, 400, stated(lie, chips=1, drawn=1, rate=rate))


def test_a41_a_false_step_at_the_end_of_a_segment_without_a_snapshot_has_no_chance_but_the_odds(make_run, judge):
    """Where nothing is drawn uniformly, a lab that sees its snapshots falsifies a step in silence, and it is said."""
    silent = make_run(lie="unseen-step", lie_step=3, steps=6, checkpoint_every=2, rate=Fraction(1, 1000))
    lie = "one false step at the end of a segment in which the lab has seen no snapshot"
    for sampling in (None, Sampling(confidence=0.9, against=SWAP)):
        verdict = judge(silent, sampling)
        said = {row["lie"]: row["probability"] for row in verdict.evidence["chances"]}
        assert said.get(lie) == (0.0 if sampling is None else None)
        assert (verdict.outcome is Outcome.REJECT) is (sampling is not None)


def test_a_chip_that_lies_about_itself_is_caught_as_often_as_is_stated():
    """Against the committed measurements: of each lie, once it is told, which one in a snapshot takes one to be due."""
    path = Path(analysis.__file__).parent / "data" / "evasions.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["mode"] == "chip"]
    due = {"skip-snapshots": 1, "swap-weights": 1, "replay-snapshot": 2}
    assert set(due) < {row["work"] for row in rows}
    for row in rows:
        scene, least = row["scene"], due.get(row["work"])
        rate = Fraction(scene["rate"])
        lie = "one chip lies in its log, its keys or its firmware"
        lie = lie if least is None else "one chip lies in a snapshot, once one is due"
        told = 1.0 if least is None else snapshots_within(scene["steps"], rate, least)
        chance = stated(lie, chips=scene["chips"], drawn=scene["samples"], rate=rate) * told
        assert row["low"] <= chance <= row["high"], row


@pytest.fixture
def evaluating(record_loop):
    """Eight steps of training, of which one of the last four is false, and 24 evaluations between the two halves."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) for step in range(8)]

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def evaluate(recorder, step):
        for _ in range(24 if step == 5 else 0):
            with recorder.evaluation(batches[0]), torch.no_grad():
                model(batches[0])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {"lie": "change-sample", "lie_step": 30, "chips": 2, "checkpoint_every": 4}
    return record_loop(model, optimizer, batches, body, before=evaluate, snapshot_rate=Fraction(1, 1000), **told)


def test_a42_evaluations_do_not_thin_out_steps_of_training(evaluating, devices):
    """A quarter of the training fits into one segment, whatever is declared beside it. 500 draws, one-sided at 1e-3."""
    settings = Settings(samples=2, seed="x", devices=("sse41",), sampling=Sampling(confidence=0.5, against=DATA))

    def odds():
        verdict = inspect([evaluating.run], evaluating.trust, settings, now=evaluating.now, worker=devices.run)
        (said,) = verdict.evidence["odds"]
        return said["steps"], said["violations"][0]["escapes"]

    run = open_run(evaluating.run, evaluating.trust)
    every = segments(run)
    last = max(every)

    def escaped(evaluations):
        seeds = (run_seed(hashlib.sha256(bytes([n >> 8, n & 255])).digest(), run.manifest.run) for n in range(500))
        picked = (choose(every, (), settings, seed, evaluations=evaluations).segments for seed in seeds)
        return sum(last not in some for some in picked)

    steps, chance = odds()
    assert steps == 8
    assert escaped(evaluations_in(every, run.load_steps()[0])) <= binom.ppf(1 - FALSE_ALARM, 500, chance)
    with off("steps of training"):
        steps, chance = odds()
    assert steps == 32
    assert escaped({}) > binom.ppf(1 - FALSE_ALARM, 500, chance)
