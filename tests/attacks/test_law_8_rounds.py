"""Law 8: in a round, what one party signs or puts somewhere is its own, and nobody else's."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from typing import Any

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Settings
from inspector.inspection.verdict import Outcome
from inspector.rounds import steps
from inspector.rounds.exchange import announced_in, openings
from inspector.rounds.receipts import noted, take, twice
from inspector.rounds.world import CLUSTER, INSPECTORATE, World, sealed
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import MANIFEST
from tests.conftest import STARTED
from tests.guards import off
from tests.measurements import placements

SETTINGS = Settings(samples=2, seed=None, devices=("sse41",))
SMALL = {"steps": 2, "chips": 2, "checkpoint_every": 1, "batch_size": 4, "rate": Fraction(1)}


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    return record(tmp_path_factory.mktemp("law 8") / "run", **SMALL)


def begin(folder, recorded):
    world = World.create(folder, LabSide)
    world.join(recorded.trust, {"run": recorded.run})
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=STARTED)
    return world


def go_on(world, until="decide", worker=None):
    """The honest steps up to one of them."""
    for name, step in (
        ("hand", lambda: steps.hand(world, "lab", now=STARTED)),
        ("reveal", lambda: steps.reveal(world, now=STARTED)),
        ("answer", lambda: steps.answer(world, "lab", now=STARTED)),
        ("order", lambda: steps.order(world, now=STARTED)),
        ("disclose", lambda: steps.disclose(world, "lab", now=STARTED)),
        ("replay", lambda: steps.replay(world, now=STARTED, worker=worker)),
    ):
        if name == until:
            return None
        step()
    return steps.decide(world, now=STARTED)


def lab_key(recorded):
    return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))


def texts(verdict):
    return " | ".join(each.text for each in verdict.reasons)


def test_two_heads_for_one_round_are_the_labs_and_a_message_posted_again_is_nothing(small, devices, tmp_path):
    world = begin(tmp_path / "world", small)
    steps.hand(world, "lab", now=STARTED)
    sent = world.sent("lab", "heads", small.trust.labs["lab"])
    for party in (INSPECTORATE, CLUSTER):
        world.post(party, "heads", "lab", sent.envelope)  # by anybody
    steps.reveal(world, now=STARTED)
    assert twice(world) == []
    other = sealed("heads", announced_in(world, INSPECTORATE).digest, {"heads": []}, lab_key(small))
    world.post(INSPECTORATE, "heads", "lab", other)
    steps.answer(world, "lab", now=STARTED)
    steps.order(world, now=STARTED)
    steps.disclose(world, "lab", now=STARTED)
    steps.replay(world, now=STARTED, worker=devices.run)
    shutil.copytree(world.folder, tmp_path / "twin")
    decided = steps.decide(world, now=STARTED)
    assert decided.verdict.outcome is Outcome.REJECT
    [(_, _, digests)] = twice(world)
    assert f"lab signed two different messages of kind heads for one round: {' and '.join(digests)}" in texts(
        decided.verdict
    )
    with off("one message of a kind"):
        assert steps.decide(World(tmp_path / "twin", LabSide), now=STARTED).verdict.outcome is Outcome.ACCEPT


SENSELESS = (
    {"results": [], "checks": ["junk"], "refused": 0},
    {"results": [], "checks": ["\ud7ff"], "refused": -1},
    {"results": [{"device": "sse41", "action": "replay", "manifest": "", "result": {}}], "checks": [], "refused": 0},
)


def results_of(world):
    """What the cluster says honestly, and the same with something in it that has no sense."""
    found = noted(world, INSPECTORATE, "results", CLUSTER)
    assert found is not None
    told = json.loads(json.dumps(dict(found.predicate)))
    yield from SENSELESS
    change: Any
    for change in ({"replays": [{}]}, {"replays": []}, {"signed": "junk"}, {"fingerprint": "x"}, {"examined": {}}):
        changed = [{**each, "result": {**each["result"], **change}} for each in told["results"]]
        yield {**told, "results": changed}
    yield {**told, "results": [{**each, "result": {"examined": {"x": 1}}} for each in told["results"]]}
    yield {**told, "checks": told["checks"][:0]}
    yield {**told, "refused": 1 << 100}


@pytest.fixture(scope="module")
def replayed(small, devices, tmp_path_factory):
    """A world in which all is done but the verdict, and what else the cluster could say."""
    world = begin(tmp_path_factory.mktemp("replayed") / "world", small)
    go_on(world, "replay")
    before = world.folder.with_name("before")
    shutil.copytree(world.folder, before)
    steps.replay(world, now=STARTED, worker=devices.run)
    take(world, INSPECTORATE, STARTED)
    return before, list(results_of(world))


def decide_on(replayed, told, folder):
    shutil.copytree(replayed[0], folder)
    world = World(folder, LabSide)
    about = announced_in(world, INSPECTORATE).digest
    world.post(INSPECTORATE, "results", CLUSTER, sealed("results", about, told, world.key(CLUSTER)))
    return world, steps.decide(world, now=STARTED)


def test_b12_whatever_the_cluster_signs_the_round_ends_in_a_verdict_that_blames_no_lab(replayed, tmp_path):
    for number, told in enumerate(replayed[1]):
        world, decided = decide_on(replayed, told, tmp_path / str(number))
        assert decided.verdict.evidence["labs"]["lab"] != "REJECT", (told, texts(decided.verdict))
        assert check_bundle(decided.bundle.read_bytes(), world.trust()).outcome is decided.verdict.outcome
    _, decided = decide_on(replayed, SENSELESS[0], tmp_path / "last")
    assert decided.verdict.outcome is Outcome.INCONCLUSIVE
    key = world.public(CLUSTER).raw.hex()[:16]
    assert f"the cluster (key {key}…): what it signed is malformed" in texts(decided.verdict)


def test_b12_guard_off_there_is_no_verdict(replayed, tmp_path):
    with off("senseless results"), pytest.raises(EvidenceError):
        decide_on(replayed, SENSELESS[0], tmp_path / "world")
    told = next(each for each in replayed[1] if any(one["result"].get("signed") == "junk" for one in each["results"]))
    assert "has not signed what it says" in texts(decide_on(replayed, told, tmp_path / "on")[1].verdict)
    with off("senseless results"):
        world, decided = decide_on(replayed, told, tmp_path / "off")
        assert not check_bundle(decided.bundle.read_bytes(), world.trust()).evidence["verifies"]


@pytest.fixture
def opened_by_others(small, devices, tmp_path):
    """A round in which others put files into what the lab has opened to inspectorate and cluster."""

    def run():
        world = begin(tmp_path / "world", small)
        (world.folder / INSPECTORATE / "openings" / "0001").write_bytes(b"junk")  # where the folder belongs
        go_on(world, "order")
        folder = openings(world, INSPECTORATE) / "lab.run"
        (folder / "log").mkdir()
        (folder / ".DS_Store").write_bytes(b"junk")
        (folder / "programs" / "x").symlink_to("/dev/zero")
        shutil.copytree(small.run, openings(world, INSPECTORATE) / "0.whole")
        (openings(world, INSPECTORATE) / "lab.0").mkdir()
        shutil.copy(small.run / MANIFEST, openings(world, INSPECTORATE) / "lab.0")
        steps.order(world, now=STARTED)
        steps.disclose(world, "lab", now=STARTED)
        for name in ("log", "programs"):
            (openings(world, CLUSTER) / "lab.run" / name).mkdir(parents=True, exist_ok=True)
        (openings(world, CLUSTER) / "lab.run" / "programs" / "x").write_bytes(b"junk")
        steps.replay(world, now=STARTED, worker=devices.run)
        return steps.decide(world, now=STARTED).verdict

    return run


def test_c22_what_others_put_into_an_opened_run_changes_nothing(opened_by_others):
    verdict = opened_by_others()
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_a25_guard_off_a_rivals_message_counts_as_the_labs(small, tmp_path):
    for guarded in (True, False):
        world = begin(tmp_path / str(guarded), small)
        forged = sealed("heads", announced_in(world, INSPECTORATE).digest, {"heads": []}, SigningKey.generate())
        world.post(INSPECTORATE, "heads", "lab", forged)
        if guarded:
            with pytest.raises(CallerError, match="lab has not handed over its heads yet"):
                steps.reveal(world, now=STARTED)
        else:
            with off("who signed a message"):
                steps.reveal(world, now=STARTED)  # it is drawn from no heads, and the lab's own come too late


def test_a32_a_date_of_the_senders_decides_nothing(small, tmp_path):
    """Heads that come after the draw are late, whatever date they are given; a date out of the round is refused."""
    world = begin(tmp_path / "world", small)
    with pytest.raises(CallerError, match="is before that or years after it"):
        steps.hand(world, "lab", now=STARTED.replace(year=2062))
    with pytest.raises(CallerError, match="is before that or years after it"):
        steps.reveal(world, now=STARTED.replace(year=2025))
    late = STARTED.replace(minute=2)
    steps.reveal(world, now=late)
    steps.hand(world, "lab", now=STARTED)
    take(world, INSPECTORATE, late)
    assert noted(world, INSPECTORATE, "heads", "lab") is None
    receipts = world.read("lab", "receipts", INSPECTORATE, world.public(INSPECTORATE))
    assert [each["kind"] for each in receipts.predicate["receipts"]] == ["heads"]


def test_a_message_that_did_not_reach_all_is_sent_again_as_it_was(small, tmp_path):
    world = begin(tmp_path / "world", small)
    go_on(world, "disclose")
    steps.disclose(world, "lab", now=STARTED)
    sent = world.sent("lab", "openings", small.trust.labs["lab"])
    shutil.rmtree(world.inbox(CLUSTER) / "lab")
    steps.disclose(world, "lab", now=STARTED.replace(second=9))
    assert [path.read_bytes() for path in (world.inbox(CLUSTER) / "lab").iterdir()] == [sent.envelope]
    with pytest.raises(CallerError, match="lab has already sent openings of round 1"):
        steps.disclose(world, "lab", now=STARTED)


def test_whatever_a_party_puts_anywhere_makes_nobody_elses_verdict_worse(devices, tmp_path):
    found = placements.measure(tmp_path, devices.run, placements=120, seconds=60, seed=7, each=60)
    assert found["wrong"] == []
    assert found["placements"] >= 100
    assert max(found["processor_seconds_beyond_an_honest_command"].values()) < 2


def test_a_head_that_is_handed_over_twice_stops_nobody(small, devices, tmp_path):
    world = begin(tmp_path / "world", small)
    about = announced_in(world, INSPECTORATE).digest
    heads = [(small.run / MANIFEST).read_text()] * 2
    world.send("heads", "lab", [INSPECTORATE], {"heads": heads}, about, lab_key(small))
    steps.reveal(world, now=STARTED)
    steps.answer(world, "lab", now=STARTED)
    steps.order(world, now=STARTED)
    steps.disclose(world, "lab", now=STARTED)
    steps.replay(world, now=STARTED, worker=devices.run)
    assert steps.decide(world, now=STARTED).verdict.outcome is Outcome.ACCEPT
