"""A lab opens to the cluster what was drawn, and nothing else; nobody can ask for more or hand over more."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim import Work
from firmware_sim.errors import CallerError, EvidenceError
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.probability.odds import Violation
from inspector.rounds import steps
from inspector.rounds.cluster import without_words
from inspector.rounds.openings import Asked
from inspector.rounds.receipts import take
from inspector.rounds.world import CLUSTER, INSPECTORATE, World, time_text
from monitor import Recorder
from monitor.lab.rounds import LabSide
from monitor.transcript import RunFolder
from monitor.transcript.data import encode_arrays
from monitor.transcript.layout import JOURNAL, MANIFEST, METADATA, SALT, batch_path, checkpoint_path, log_path
from monitor.transcript.leaf import EVALUATION
from tests.conftest import STARTED, Recorded
from tests.guards import off

SETTINGS = Settings(
    samples=1, seed=None, devices=("sse41",), sampling=Sampling(confidence=0.3, against=Violation.parse("swap"))
)
SCHEMA = json.loads((Path(steps.__file__).parent / "schemas" / "messages.json").read_text())
STEPS, MINUTE = 8, timedelta(minutes=1)


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    """A loop of eight steps, each a segment of its own, whose batches come as it goes."""
    run = tmp_path_factory.mktemp("opening") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any]
    options = {"numerics": "rounded", "seed": 5, "chips": 2, "checkpoint_every": 1, "snapshot_rate": Fraction(1, 2)}
    recorder = Recorder(model, optimizer, out=run, lab="lab", started=STARTED, hours=1.0, **options)
    for _ in range(STEPS):
        batch = {"x": torch.randn(5, 8), "y": torch.randint(0, 4, (5,))}
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()
    return Recorded(run, Trust.load([run.with_name("run.trust.json")], [run]))


@pytest.fixture
def begin(tmp_path):
    """Plays a round up to the order."""

    def run(recorded, *, rules=None, settings=SETTINGS, runs=None, trust=None):
        world = World.create(tmp_path / "world", LabSide)
        world.join(trust or recorded.trust, runs or {"run": recorded.run})
        steps.announce(world, settings, minutes=1, refusals=0, now=STARTED, rules=rules)
        steps.hand(world, "lab", now=STARTED)
        steps.reveal(world, now=STARTED)
        steps.answer(world, "lab", now=STARTED)
        steps.order(world, now=STARTED)
        return world

    return run


def opened(world, name="lab.run"):
    """What lies in the cluster's folder of a run."""
    folder = world.folder / CLUSTER / "openings" / "0001" / name
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def asked(world, name="lab.run"):
    order = world.read(CLUSTER, "order", INSPECTORATE, world.public(INSPECTORATE))
    return Asked.from_json(order.predicate["open"][name])


def decided(world, devices, now=STARTED):
    steps.replay(world, now=now, worker=devices.run)
    return steps.decide(world, now=now)


def test_segments_that_were_not_drawn_never_reach_the_cluster(looped, begin, devices):
    world = begin(looped)
    drawn = asked(world).segments
    assert 1 < len(drawn) < STEPS
    steps.disclose(world, "lab", now=STARTED)
    taken = [segment + 1 for segment in drawn]
    files = {MANIFEST, JOURNAL, METADATA, SALT, *map(checkpoint_path, drawn)}
    files |= {*map(batch_path, taken), *map(log_path, taken)}
    files = {name for name in files if (looped.run / name).exists()}  # a log of no bytes is listed and not stored
    assert {name for name in opened(world) if not name.startswith("programs/")} == files
    verdict = decided(world, devices)
    assert verdict.verdict.outcome is Outcome.ACCEPT, verdict.verdict.reasons
    assert {name for name in opened(world) if not name.startswith("programs/")} == files
    (row,) = verdict.verdict.evidence["opened"]
    assert row["segments"] == list(drawn)
    assert 0 < row["files"] < row["of_files"]
    assert 0 < row["bytes"] < row["of_bytes"]
    text = f"of {row['of_files']} files ({row['of_bytes']} bytes) labs opened {row['files']} ({row['bytes']} bytes)"
    assert text in verdict.verdict.reasons[0].text
    assert check_bundle(verdict.bundle.read_bytes(), world.trust()).outcome is Outcome.ACCEPT


def test_what_was_not_asked_for_is_refused(looped, begin, devices):
    world = begin(looped)
    steps.disclose(world, "lab", now=STARTED)
    before = opened(world)
    folder = world.folder / CLUSTER / "openings" / "0001"
    extra = sorted(set(range(STEPS)) - set(asked(world).segments))[0]
    (folder / "lab.run" / checkpoint_path(extra)).write_bytes((looped.run / checkpoint_path(extra)).read_bytes())
    (folder / "lab.run" / "link").symlink_to(looped.run / checkpoint_path(extra))
    (folder / "lab.other").mkdir()
    (folder / "lab.other" / "weights").write_bytes(b"1")
    (folder / "stray").write_bytes(b"1")
    verdict = decided(world, devices).verdict
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert opened(world) == before
    assert {path.name for path in folder.iterdir()} == {"lab.run", "lab.run.export.json"}
    assert verdict.evidence["refused_files"] == 4
    assert "which refused 4 that it had not asked for" in verdict.reasons[0].text


def test_a_drawn_file_that_is_not_opened_is_asked_for_anew(looped, begin, devices):
    world = begin(looped)
    steps.disclose(world, "lab", now=STARTED)
    (world.folder / CLUSTER / "openings" / "0001" / "lab.run" / batch_path(asked(world).segments[-1] + 1)).unlink()
    verdict = decided(world, devices).verdict
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.reasons
    assert any(
        "the files of this run that were opened to the cluster are damaged" in each.text for each in verdict.reasons
    ), verdict.reasons


MORE = (
    (
        {"segments": tuple(range(STEPS))},
        "(a segment that the secret does not draw|segments with snapshots, but announced)",
    ),
    ({"segments": (0, STEPS)}, "a segment that the secret does not draw"),
    ({"since": 3}, "it asks for the steps since step 3, but no earlier head ends at that step"),
    ({"batches": True}, "all batches, although no rule counts samples"),
    ({"last": True}, "the last state, although no rule needs a score"),
)


def test_an_inspectorate_cannot_ask_for_more_than_was_drawn(looped, begin):
    world = begin(looped)
    announced = world.read("lab", "announcement", INSPECTORATE, world.public(INSPECTORATE))
    wanted = asked(world)

    def send(more):
        for path in world.folder.rglob("*-order.*"):
            path.unlink()
        told = {"time": time_text(STARTED), "jobs": [], "open": {"lab.run": more.to_json()}}
        world.send("order", INSPECTORATE, ["lab", CLUSTER], told, announced.digest, world.key(INSPECTORATE))

    for changes, text in MORE:
        send(replace(wanted, **changes))
        with pytest.raises(EvidenceError, match=rf"asks for more of lab.run than was drawn: .*{text}"):
            steps.disclose(world, "lab", now=STARTED)
        assert opened(world) == set()
    send(replace(wanted, segments=tuple(range(STEPS))))
    with off("orders of what was drawn"):
        steps.disclose(world, "lab", now=STARTED)
    assert {checkpoint_path(step) for step in range(STEPS)} <= opened(world)


def test_openings_that_come_late_never_came(looped, begin, devices):
    world = begin(looped)
    with pytest.raises(CallerError, match=r"lab has not opened its runs yet, and has time until .*"):
        steps.replay(world, now=STARTED, worker=devices.run)
    for party in (INSPECTORATE, CLUSTER):
        take(world, party, STARTED + 4 * MINUTE)  # whoever looked by then has not found them
    steps.disclose(world, "lab", now=STARTED)
    decision = decided(world, devices, STARTED + 4 * MINUTE).verdict
    assert decision.outcome is Outcome.REJECT
    assert "lab did not open run" in decision.reasons[0].text
    assert opened(world) == set()


def test_a_rule_on_samples_asks_for_all_batches_and_one_on_a_score_for_the_last_state(looped, begin, devices, tmp_path):
    test = RunFolder(looped.run, looped.trust.labs["lab"]).batches().batch(1)
    (tmp_path / "test.safetensors").write_bytes(encode_arrays({name: each.numpy() for name, each in test.items()}))
    (tmp_path / "rules.toml").write_text(
        f'[[rule]]\nname = "clean"\nkind = "data"\nat_most = 0\ndigests = ["{"0" * 64}"]\n'
        '[[rule]]\nname = "weak"\nkind = "score"\nat_least = 0\ntest = "test.safetensors"\n'
    )
    world = begin(looped, rules=tmp_path / "rules.toml")
    steps.disclose(world, "lab", now=STARTED)
    assert {batch_path(step) for step in range(1, STEPS + 1)} <= opened(world)
    assert checkpoint_path(STEPS) in opened(world)
    assert len([name for name in opened(world) if name.startswith("checkpoints/")]) == len(asked(world).segments) + 1
    verdict = decided(world, devices).verdict
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["rules"]["results"] == {"clean": "pass", "weak": "pass"}


def test_a_parent_opens_its_last_state_too(make_run, begin, devices):
    small = {"steps": 2, "chips": 2, "checkpoint_every": 1, "batch_size": 4, "rate": Fraction(1)}
    parent = make_run("parent", **small)
    child = make_run("child", parent=parent.run, after=parent.run, **small)
    world = begin(child, runs={"parent": parent.run, "child": child.run}, settings=replace(SETTINGS, samples=2))
    steps.disclose(world, "lab", now=STARTED)
    assert checkpoint_path(2) in opened(world, "lab.parent")
    assert checkpoint_path(2) not in opened(world, "lab.child")
    verdict = decided(world, devices).verdict
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


@pytest.mark.parametrize("lie", [None, "wrong-operator", "edited-rounding-log"])
def test_what_leaves_the_cluster_has_a_fixed_form(make_run, begin, devices, lie):
    """What devices say in words stays in the cluster's folder."""
    numerics = "exact" if lie == "wrong-operator" else "rounded"
    options = {
        "steps": 2,
        "chips": 2,
        "checkpoint_every": 1,
        "batch_size": 4,
        "numerics": numerics,
        "rate": Fraction(1),
    }
    world = begin(make_run(lie=lie, lie_step=2, **options), settings=replace(SETTINGS, samples=2))
    steps.disclose(world, "lab", now=STARTED)
    verdict = decided(world, devices).verdict
    assert (verdict.outcome is Outcome.ACCEPT) == (lie is None)
    (path,) = (world.inbox(INSPECTORATE) / CLUSTER).glob("*-results.*")
    payload = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    pytest.importorskip("jsonschema").validate(payload, SCHEMA)
    if lie == "edited-rounding-log":
        said = (world.folder / CLUSTER / "errors" / "0001.txt").read_text()
        assert said.startswith("'sse41 step 2 ")
        assert any("the step cannot be taken as it was recorded" in each.text for each in verdict.reasons)


def test_words_of_a_device_are_left_out():
    secret = {"text": "weight 0.125", "step": 3, "operator": "aten.mm.default", "hidden": "weight"}
    names = (
        "segment",
        "start_state",
        "initial_state",
        "leaves",
        "inside",
        "witness",
        "returned",
        "changes",
        "decisions",
    )
    told = without_words({"replays": [{**dict.fromkeys(names), "contradiction": secret, "more": 1}], "more": 2})
    assert "weight" not in json.dumps(told)
    assert "more" not in json.dumps(told)
    assert told["replays"][0]["contradiction"]["step"] == 3
    for kind in ("device_error", "evidence_error"):
        told = without_words({kind: "weight 0.125", "signed": "{}"})
        assert "weight" not in json.dumps(told)
        assert set(told) == {kind, "signed"}


def test_the_documented_form_knows_what_a_leaf_says(looped):
    leaf = RunFolder(looped.run, looped.trust.labs["lab"]).leaf(1)
    assert leaf.execution is not None
    told = replace(leaf, execution=replace(leaf.execution, kind=EVALUATION, outside=Work(1, 2, 3))).to_json()
    result = SCHEMA["$defs"]["results"]["properties"]["predicate"]["properties"]["results"]["items"]["properties"][
        "result"
    ]
    leaves = result["properties"]["replays"]["items"]["properties"]["leaves"]
    pytest.importorskip("jsonschema").validate([told, leaf.to_json()], leaves)
