"""Weights and samples stay with lab and cluster: nothing of them lies in the inspectorate's folder, in any form."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from inspector.bundle import contents
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Settings
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.rounds import steps
from inspector.rounds.exchange import announced_in
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor import Recorder
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from monitor.transcript.export import signed_list
from monitor.transcript.layout import SAMPLES, batch_path
from tests.conftest import STARTED
from tests.guards import off

WINDOW, DISTINCT = 16, 8
SETTINGS = Settings(samples=2, seed=None, devices=("sse41",))


def windows(content: bytes) -> np.ndarray:
    """All windows of 16 bytes with at least 8 distinct values, each as a 64-bit number that its bytes give."""
    if len(content) < WINDOW:
        return np.empty(0, dtype=np.uint64)
    every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(content, np.uint8), WINDOW)
    ordered = np.sort(every, axis=1)
    rich = (np.diff(ordered, axis=1) != 0).sum(axis=1) >= DISTINCT - 1
    high, low = np.ascontiguousarray(every[rich]).view(np.uint64).T
    return high * np.uint64(0x9E3779B97F4A7C15) ^ low


def forms(content: bytes, depth: int = 3) -> list[bytes]:
    """The content, and what its stretches of hex and base64 stand for, wherever these begin."""
    found = [content]
    if depth:
        for text in re.findall(rb"[0-9a-fA-F]{32,}", content):
            found += [bytes.fromhex(text[at : len(text) - (len(text) - at) % 2].decode()) for at in (0, 1)]
        for text in re.findall(rb"[A-Za-z0-9+/]{22,}", content):
            for at in range(4):
                part = text[at : len(text) - (len(text) - at) % 4]
                try:
                    found += forms(base64.b64decode(part), depth - 1) if part else []
                except binascii.Error:  # a stretch that is none
                    continue
    return found


def holds(content: bytes, secrets: np.ndarray) -> bool:
    """Whether any window of it is among the secret ones, which are sorted."""
    found = windows(content)
    places = np.searchsorted(secrets, found).clip(max=len(secrets) - 1)
    return bool((secrets[places] == found).any())


def leaked(folder: Path, secrets: np.ndarray) -> list[str]:
    """Files that hold a window of what is secret."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [
        str(path.relative_to(folder))
        for path in paths
        if any(holds(form, secrets) for form in forms(path.read_bytes()))
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    return record(
        tmp_path_factory.mktemp("secret") / "run", steps=2, chips=2, checkpoint_every=1, batch_size=4, rate=Fraction(1)
    )


@pytest.fixture(scope="module")
def secrets(small):
    """Windows of every sample, and of every tensor of every kept state."""
    run = RunFolder(small.run, small.trust.labs["lab"])
    states = [tensor for at in (0, 2) for name, tensor in run.checkpoint(at).items() if "/" in name]  # but for proofs
    arrays = [*run.data().samples.values(), *(tensor.numpy() for tensor in states)]
    return np.unique(np.concatenate([windows(array.tobytes()) for array in arrays]))


def played(folder, recorded, devices):
    """A round up to the verdict, which comes when the folders of lab and cluster are gone."""
    world, now = World.create(folder, LabSide), STARTED
    world.join(recorded.trust, {"run": recorded.run})
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now)
    steps.hand(world, "lab", now=now)
    steps.reveal(world, now=now)
    steps.answer(world, "lab", now=now)
    steps.order(world, now=now)
    steps.disclose(world, "lab", now=now)
    steps.replay(world, now=now, worker=devices.run)
    for party in ("labs", CLUSTER):
        shutil.rmtree(world.folder / party)
    return world, steps.decide(world, now=now)


def test_nothing_secret_reaches_the_inspectorate(small, secrets, devices, tmp_path):
    """It decides when the folders of lab and cluster are gone."""
    world, decided = played(tmp_path / "world", small, devices)
    assert decided.verdict.outcome is Outcome.ACCEPT, decided.verdict.reasons
    home = world.folder / INSPECTORATE
    assert check_bundle(decided.bundle.read_bytes(), world.trust()).outcome is Outcome.ACCEPT
    signed = json.loads(base64.b64decode(json.loads(decided.bundle.read_bytes())["items"]["checks/0.json"]))
    schema = json.loads((Path(contents.__file__).parent / "schemas" / "check.json").read_text())
    pytest.importorskip("jsonschema").validate(json.loads(base64.b64decode(signed["payload"])), schema)
    assert leaked(home, secrets) == []
    weights = RunFolder(small.run, small.trust.labs["lab"]).checkpoint(2)
    tensor = max(weights.values(), key=lambda each: each.numel()).numpy().tobytes()
    forms: list[Callable[[bytes], bytes]] = [bytes, binascii.hexlify, base64.b64encode]
    for number, form in enumerate(forms):
        (home / f"planted-{number}").write_bytes(b"x" * 5 + form(tensor[3:40]) + b"-")
    assert leaked(home, secrets) == ["planted-0", "planted-1", "planted-2"]


SAMPLE = np.random.default_rng(0).standard_normal((8, 4), np.float32)


@pytest.fixture
def baked(record_loop):
    """A loop in whose program samples and the weights of a teacher are constants, and those constants as windows."""
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)
    optimizer, sample = torch.optim.SGD(model.parameters(), lr=0.1), torch.from_numpy(SAMPLE)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        (model(sample + batch["x"]) - teacher(sample)).square().mean().backward()
        optimizer.step()

    def record():
        batches = [{"x": 0.01 * torch.ones(8, 4)} for _ in range(2)]
        return record_loop(model, optimizer, batches, body, chips=2, checkpoint_every=1)

    hidden = [SAMPLE, teacher.weight.numpy()]
    return record, np.unique(np.concatenate([windows(array.tobytes()) for array in hidden]))


def test_samples_and_weights_in_constants_do_not_reach_it_either(baked, devices, tmp_path):
    record, secrets = baked
    recorded = record()
    assert any("constants/" in path for path in leaked(recorded.run, secrets))
    world, decided = played(tmp_path / "world", recorded, devices)
    assert decided.verdict.outcome is Outcome.ACCEPT, decided.verdict.reasons
    assert leaked(world.folder / INSPECTORATE, secrets) == []
    assert check_bundle(decided.bundle.read_bytes(), world.trust()).outcome is Outcome.ACCEPT


def test_guard_off_constants_within_programs_reach_it(baked, devices, tmp_path, monkeypatch):
    monkeypatch.setattr("monitor.programs.constants.APART_BYTES", 1 << 30)
    record, secrets = baked
    world, _ = played(tmp_path / "world", record(), devices)
    assert any("programs/" in path for path in leaked(world.folder / INSPECTORATE, secrets))


def test_guard_off_files_of_constants_reach_it(baked, devices, tmp_path):
    record, secrets = baked
    with off("constants withheld"):
        world, decided = played(tmp_path / "world", record(), devices)
    assert decided.verdict.outcome is Outcome.ACCEPT
    assert any("constants/" in path for path in leaked(world.folder / INSPECTORATE, secrets))


@pytest.mark.parametrize("helped", [False, True])
def test_what_the_cluster_finds_in_samples_rejects(make_run, devices, tmp_path, helped):
    """Another sample than the lab committed to lies in the run; the inspectorate sees neither.

    Another lab that lists that run as opened, too, does not help.
    """
    lied = make_run(lie="change-sample", lie_step=2, steps=2, chips=2, checkpoint_every=1)
    samples = lied.run / SAMPLES
    samples.write_bytes(samples.read_bytes()[:-1] + b"\x07")
    world, now = World.create(tmp_path / "world", LabSide), STARTED
    world.join(lied.trust, {"run": lied.run})
    labs = ["lab"]
    if helped:
        friend = make_run(name="friend", lab="zz", seed=9, steps=2, chips=2, checkpoint_every=1)
        world.join(friend.trust, {"friend": friend.run})
        labs.append("zz")
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now)
    for lab in labs:
        steps.hand(world, lab, now=now)
    steps.reveal(world, now=now)
    for lab in labs:
        steps.answer(world, lab, now=now)
    steps.order(world, now=now)
    steps.disclose(world, "lab", now=now)
    if helped:
        announced = announced_in(world, "zz")
        message = world.sent("lab", "openings", world.trust().labs["lab"])
        assert message is not None
        (run,) = message.predicate["runs"]
        key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(friend.run)))
        listed = signed_list("0" * 64, {}, key).decode()
        world.send("openings", "zz", [CLUSTER], {"runs": [{**run, "listed": listed}]}, announced.digest, key)
    steps.replay(world, now=steps.past(world, "openings", now), worker=devices.run)
    decided = steps.decide(world, now=steps.past(world, "results", now))
    assert decided.verdict.evidence["labs"]["lab"] == "REJECT"
    assert any("the cluster found that the check evidence fails" in each.text for each in decided.verdict.reasons)
    shown = check_bundle(decided.bundle.read_bytes(), world.trust())
    assert shown.outcome is Outcome.REJECT
    assert "fails the checks evidence: contested, rests on cluster key" in shown.reasons[0].text


@pytest.mark.parametrize(("says", "without"), [(False, ()), (True, ()), (True, ("runs that a lab says it opened",))])
def test_a_lab_that_opens_nothing_to_the_cluster_refuses(small, devices, tmp_path, says, without):
    """The inspectorate has a thin copy, and the cluster has nothing to check or replay.

    Where the lab says that it opened the run, the cluster may have lost it, or hide it (row A26 of the attacks): with
    that guard off, the lab is blamed.
    """
    world, now = World.create(tmp_path / "world", LabSide), STARTED
    world.join(small.trust, {"run": small.run})
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now)
    steps.hand(world, "lab", now=now)
    steps.reveal(world, now=now)
    steps.answer(world, "lab", now=now)
    steps.order(world, now=now)
    if says:
        steps.disclose(world, "lab", now=now)
        shutil.rmtree(world.folder / CLUSTER / "openings" / "0001" / "lab.run")
    else:
        about = announced_in(world, "lab").digest
        key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(small.run)))
        world.send("openings", "lab", [INSPECTORATE, CLUSTER], {"runs": []}, about, key)
    steps.replay(world, now=now, worker=devices.run)
    with off(*without):
        verdict = steps.decide(world, now=now).verdict
    doubted = says and not without
    assert verdict.outcome is (Outcome.INCONCLUSIVE if doubted else Outcome.REJECT)
    begins = world.public(CLUSTER).raw.hex()[:16]
    told = f"the cluster (key {begins}…) says nothing about run" if doubted else "lab did not open run"
    assert told in verdict.reasons[0].text


def test_two_loops_on_the_same_batches_share_no_digest_of_a_file(tmp_path):
    """What the journal lists goes to the inspectorate too."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(model, optimizer, out=tmp_path / f"{seed}", seed=seed, lab="lab")
        for _ in range(2):
            batch = torch.ones(1, 4)
            with recorder.step({"x": batch}):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        recorder.finish()
        key = next(iter(Trust.load([tmp_path / f"{seed}.trust.json"], [tmp_path / f"{seed}"]).labs.values()))
        runs.append(RunFolder(tmp_path / f"{seed}", key))
    files = [run.files[batch_path(step)].sha256 for run in runs for step in (1, 2)]
    assert len(set(files)) == 4
    batches = [run.batches().batch(step)["x"] for run in runs for step in (1, 2)]
    assert all(torch.equal(each, torch.ones(1, 4)) for each in batches)


def test_two_runs_over_one_data_set_share_no_sample_digest(make_run):
    """Of one lab, and of two labs with one seed; otherwise whoever sees the digests learns who trains on what."""
    options = {"steps": 2, "chips": 1, "checkpoint_every": 1, "batch_size": 4}
    first = make_run("first", **options)
    runs = [
        first,
        make_run("second", after=first.run, **options),
        make_run("third", lab="other", **options),
        make_run("fourth", parent=first.run, **options),
        make_run("fifth", **{**options, "steps": 3}),
    ]
    data = [RunFolder(each.run, next(iter(each.trust.labs.values()))).data() for each in runs]
    rows = [{values[row].tobytes() for values in each.samples.values() for row in range(len(values))} for each in data]
    assert all(each >= rows[0] for each in rows)  # the same samples
    digests = [{each.sample_digest(row) for row in range(int(each.order.max()) + 1)} for each in data]
    assert not any(one & other for one, other in itertools.combinations(digests, 2))
    again = make_run("again", **options)  # and a simulation can be repeated
    assert RunFolder(again.run, again.trust.labs["lab"]).data().salt == data[0].salt
