"""Runs that a lab forged with its own key and with honest chips that it drives dishonestly; each is rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from firmware_sim import LogRecord, Meter, RecordKind
from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.commits import CommitOrder, SnapshotMoment
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from monitor.lab.conduct import Conduct
from monitor.lab.host import Host
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.transcript import RunData, RunFolder
from monitor.transcript.draft import Draft
from tests.guards import blind

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


def reasons(verdict) -> str:
    return "\n".join(each.text for each in verdict.reasons)


def check(recorded):
    return verify(recorded.run, recorded.trust, now=recorded.now)


@pytest.fixture
def passes_without():
    """The twin: with these guards off the forgery is accepted."""

    def blind_check(recorded, *off: Guard) -> None:
        with blind(*off):
            verdict = check(recorded)
        assert verdict.outcome is Outcome.ACCEPT, verdict.reasons

    return blind_check


class Resigner:
    """The lab, editing a copy of its own run and signing the manifest anew."""

    def __init__(self, recorded, run) -> None:
        shutil.copytree(recorded.run, run)
        self.run = run
        self.key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))

    def sign(self, change) -> None:
        draft = Draft.read(self.run, self.key)
        change(draft)
        draft.sign(self.run, self.key)

    def add(self, path: str, content: bytes) -> None:
        self.sign(lambda draft: draft.put(self.run, path, content))


def test_heads_without_work_are_rejected(make_run, monkeypatch, passes_without):
    """The lab takes two steps where no chip meters them: no time passes for its chips, and no snapshot falls there."""
    elsewhere: set[Any]
    announce, charge, elsewhere = Host.announce, Meter.charge, set()

    def heard(self, step):
        announce(self, step)
        elsewhere.clear()
        elsewhere.update({self.memory.meter} if step in (4, 5) else ())

    monkeypatch.setattr(Host, "announce", heard)
    monkeypatch.setattr(Meter, "charge", lambda self, work: None if self in elsewhere else charge(self, work))
    recorded = make_run()
    verdict = check(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert "calls, " in reasons(verdict)
    assert "; the meter lacks " in reasons(verdict)
    passes_without(recorded, Guard.METER)


def test_heads_committed_late_are_rejected(make_run, monkeypatch):
    """The lab commits only after training, when it knows which steps held a snapshot."""

    def late(self, step):
        if step == 6:
            for number in range(1, 7):
                for chip in self.lab.chips:
                    chip.commit(self._run_id, number, self.root(number))

    announce = Host.announce
    monkeypatch.setattr(Host, "announce", lambda self, step: late(self, step) if step else announce(self, step))
    verdict = check(make_run())
    assert verdict.outcome is Outcome.REJECT
    assert "; the meter counts another " in reasons(verdict)


def test_chip_without_attached_memory_is_rejected(make_run, monkeypatch):
    from firmware_sim import FirmwareChip

    attach = FirmwareChip.attach

    def skip(self, memory, run_id, step):
        return None if self.chip_id.endswith("1") else attach(self, memory, run_id, step)

    monkeypatch.setattr(FirmwareChip, "attach", skip)
    verdict = check(make_run())
    assert verdict.outcome is Outcome.REJECT
    assert "committed before the run's memory was attached" in reasons(verdict)


def test_decoy_memory_attached_in_between_is_rejected(make_run, monkeypatch, passes_without):
    from monitor.sharding import ShardedMemory

    def decoy(self, step, host):
        if step != 3:
            return
        memory = host.memory
        tensors = {key: tensor.clone() for key, tensor in memory.tensors.items()}
        copy = ShardedMemory(tensors, len(host.lab.chips))
        for chip, shard in zip(host.lab.chips, copy.shards, strict=True):
            chip.attach(shard, host._run_id, step)
        for _ in range(10):
            host.idle_chips()
        for chip, shard in zip(host.lab.chips, memory.shards, strict=True):
            chip.attach(shard, host._run_id, step)

    monkeypatch.setattr(Conduct, "after_step", decoy)
    recorded = make_run()
    verdict = check(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert "attached again in the same boot" in reasons(verdict)
    passes_without(recorded, Guard.COMMITMENT, Guard.METER)


def test_another_batch_than_the_committed_data_is_rejected(make_run, monkeypatch, passes_without):
    """The lab's leaves name batches that are not those of the data that it committed to before training."""
    monkeypatch.setattr(
        Conduct, "declare", lambda self, leaf: replace(leaf, batch="ab" * 32) if leaf.step == 4 else leaf
    )
    recorded = make_run()
    verdict = check(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert reasons(verdict) == "step 4 commits to a batch that is not the one in the declared data order"
    passes_without(recorded, Guard.DATA)


def test_two_transcripts_of_one_run_are_rejected_in_either_order(honest, tmp_path, devices):
    forged = Resigner(honest, tmp_path / "forged")

    def change(draft):
        leaf = json.loads(draft.leaves[6])
        draft.leaves[6] = json.dumps({**leaf, "loss": "00000000"}, sort_keys=True, separators=(",", ":")).encode()

    forged.sign(change)
    for runs in ([honest.run, forged.run], [forged.run, honest.run]):
        verdict = inspect(runs, honest.trust, SETTINGS, now=honest.now, worker=devices.run)
        assert verdict.outcome is Outcome.REJECT
    with pytest.raises(CallerError, match="given twice"):
        inspect([honest.run, honest.run], honest.trust, SETTINGS, now=honest.now, worker=devices.run)


@pytest.mark.parametrize("kind", ["larger", "extra"])
def test_samples_of_another_shape_or_name_are_rejected(make_run, monkeypatch, kind):
    """Larger images may pass a network, but take more compute than the task declares."""
    select = RunData.select

    def altered(cls, samples, order, salt):
        if kind == "extra":
            return select({**samples, "unused": samples["label"]}, order, salt)
        return select({**samples, "pixels": np.pad(samples["pixels"], ((0, 0), (0, 1), (0, 1)))}, order, salt)

    monkeypatch.setattr(RunData, "select", classmethod(altered))
    verdict = check(make_run())
    assert verdict.outcome is Outcome.REJECT
    assert "the samples are not those of preset digits-cnn" in reasons(verdict)


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/00000077.safetensors",
        "logs/00000099.rlog",
        "checkpoints/00000001.safetensors",
        "chips/ghost/log.bin",
    ],
)
def test_signed_files_that_are_no_part_of_the_run_are_rejected(honest, tmp_path, path):
    forged = Resigner(honest, tmp_path / "run")
    forged.add(path, b"junk")
    verdict = verify(forged.run, honest.trust, now=honest.now)
    assert verdict.outcome is Outcome.REJECT
    assert "not a file of this run" in reasons(verdict)


@pytest.mark.parametrize("steps", [-1, 0, 5, 7, 10**8, 10**30])
def test_wrong_number_of_steps_in_the_manifest_is_rejected(honest, tmp_path, devices, steps):
    forged = Resigner(honest, tmp_path / "run")
    forged.sign(lambda draft: setattr(draft, "steps", steps))
    assert verify(forged.run, honest.trust, now=honest.now).outcome is Outcome.REJECT
    verdict = inspect([forged.run], honest.trust, SETTINGS, now=honest.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT


@pytest.mark.parametrize(
    "change",
    [
        {"preset": ["x"]},
        {"preset": None},
        {"beta_1": 1.5, "optimizer": "adamw"},
        {"steps": 10**12},
        {"learning_rate": 1e308},
        {"batch_size": 10**9},
        {"optimizer": {}},
        {"seed": 1.0},
        {"learning_rate": 1},
    ],
)
def test_impossible_task_in_the_metadata_is_an_evidence_error(honest, change):
    task = RunFolder(honest.run, honest.trust.labs["lab"]).task
    with pytest.raises(EvidenceError):
        Task.from_json({**task.to_json(), **change})


def test_an_unfinished_run_beside_it_does_not_hide_a_forged_one(make_run, devices, tmp_path):
    forged = make_run("forged", lab="lab-a", lie="extra-steps")
    other = make_run("other", lab="lab-b")
    unfinished = Resigner(other, tmp_path / "unfinished")
    unfinished.sign(lambda draft: draft.cut(unfinished.run, len(draft.leaves) - 1))
    trust = forged.trust.merge(other.trust)
    settings = replace(SETTINGS, samples=6)
    verdict = inspect([forged.run, unfinished.run], trust, settings, now=forged.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    honest_part = make_run("honest-part", lab="lab-c")
    trust = honest_part.trust.merge(other.trust)
    verdict = inspect([honest_part.run, unfinished.run], trust, settings, now=forged.now, worker=devices.run)
    assert verdict.outcome is Outcome.INCONCLUSIVE


def record(kind: RecordKind, *, step: int = 0, run: bytes = b"r" * 32) -> LogRecord:
    return LogRecord(
        counter=9,
        kind=kind,
        boot=1,
        tick=0,
        busy=0,
        run_id=run,
        step=step,
        op=0,
        digest=bytes(32),
        previous=bytes(32),
    )


BOOT, REGIONS, COMMIT = RecordKind.BOOT, RecordKind.REGIONS, RecordKind.COMMIT


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([record(BOOT), record(REGIONS), record(COMMIT), record(COMMIT, step=1)], None),
        ([record(BOOT), record(COMMIT)], "before the run's memory was attached"),
        ([record(BOOT), record(REGIONS), record(BOOT), record(COMMIT)], "before the run's memory was attached"),
        ([record(BOOT), record(REGIONS), record(REGIONS)], "attached again"),
        ([record(BOOT), record(REGIONS), record(COMMIT, step=1)], "committed after step -1"),
        ([record(BOOT), record(REGIONS), record(COMMIT), record(COMMIT, step=2)], "committed after step 0"),
        ([record(BOOT), record(REGIONS), record(COMMIT), record(COMMIT, step=0)], "committed after step 0"),
        ([record(BOOT), record(RecordKind.SNAPSHOT)], "memory that was not attached"),
        ([record(BOOT), record(REGIONS), record(RecordKind.SNAPSHOT)], "was not committed before its snapshot"),
        (
            [record(BOOT), record(REGIONS), record(COMMIT), record(COMMIT, step=1)] * 2,
            None,
        ),
        (
            [record(BOOT), record(REGIONS), record(COMMIT), record(BOOT), record(REGIONS), record(COMMIT, step=2)],
            "committed after step 0",
        ),
    ],
)
def test_order_of_commits(records, error):
    laws = (CommitOrder("chip"), SnapshotMoment("chip"))

    def take_all() -> None:
        for each in records:
            for law in laws:
                law.take(each)

    if error is None:
        take_all()
    else:
        with pytest.raises(EvidenceError, match=error):
            take_all()
