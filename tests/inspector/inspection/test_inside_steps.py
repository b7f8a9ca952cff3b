"""A snapshot inside of a step is explained by a replay of that step, up to the very operator."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from firmware_sim import LogRecord, RecordKind, parse_log
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.chiplog import LATE
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.mid_step_snapshots import committed_after, place_of
from inspector.inspection.transcripts import read_transcript
from inspector.inspection.verdict import Findings, Outcome
from inspector.replay.segment import replay_segment, segments
from monitor.replay.steps import ProgramSteps, execution_of
from monitor.sharding import StateDigest
from monitor.transcript import RunFolder
from monitor.transcript.layout import chip_path
from tests.guards import off

STEPS, EVERY, CHIPS = 5, 2, 3
SETTINGS = Settings(samples=CHIPS, seed="x", devices=("sse41",))
DIRECT = ["buffer/fresh", "buffer/norm.running_mean", "buffer/norm.running_var"]


class Net(nn.Module):
    """Two layers, a normalisation and buffers that each step makes anew, wholly or in part."""

    fresh: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 6), nn.Linear(6, 3), nn.BatchNorm1d(6)
        self.register_buffer("fresh", torch.ones(4))

    def forward(self, batch):
        with torch.no_grad():
            self.fresh.copy_(batch.mean(0))
        return self.second(torch.tanh(self.norm(self.first(batch * self.fresh))))


def body(set_to_none):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


@pytest.fixture(params=[(True, False), (False, False), (False, True)], ids=["dropped", "zeroed", "foreach"])
def recorded(request, record_loop):
    """Checkpoints leave out gradients, which the next step drops or overwrites one by one."""
    set_to_none, foreach = request.param
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=foreach)
    batches = [torch.randn(5, 4) for _ in range(STEPS)]
    options = {"checkpoint_every": EVERY, "chips": CHIPS, "snapshot_rate": Fraction(1), "direct_paths": DIRECT}
    return record_loop(model, optimizer, batches, body(set_to_none), **options)


def opened(recorded) -> RunFolder:
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


def snapshots_of(run: RunFolder) -> list[tuple[int, LogRecord]]:
    """All snapshots that the chips took, with their shards; each lies inside of a step."""
    found = []
    for shard, chip in enumerate(run.metadata.chips):
        records = parse_log(run.read(chip_path(chip, "log.bin")))
        found += [(shard, each) for each in records if each.kind is RecordKind.SNAPSHOT and each.operators]
    assert {each.step for _, each in found} == set(range(STEPS)), "the first step of a boot among them"
    return found


def states_inside(run: RunFolder, step: int) -> list[StateDigest]:
    """The state after each operator of a step, by a replay from the checkpoint before it."""
    [segment] = [each for each in segments(run) if step in each]
    program = run.program(execution_of(run.leaf(step)).program)
    moments = [(step, count) for count in range(1, len(program.counted) + 1)]
    replay = replay_segment(run, segment.index, inside=moments)
    assert [(at, count) for at, count, _ in replay.inside] == moments
    return [state for _, _, state in replay.inside]


def test_every_snapshot_is_found_at_its_operator_and_behind_no_other_write(recorded):
    """Any shift of the operator's number across a write of the shard gives another digest."""
    run = opened(recorded)
    states = {step: states_inside(run, step) for step in range(1, STEPS + 1)}
    inside = snapshots_of(run)
    assert len(inside) >= CHIPS * (STEPS - 1)
    changes = 0
    for shard, record in inside:
        digests = [state.shard(shard).value for state in states[record.step + 1]]
        equal = [count for count, digest in enumerate(digests, start=1) if digest == record.digest]
        assert record.operators in equal
        assert equal == list(range(equal[0], equal[-1] + 1)), "all of them between two writes"
        changes += len(set(digests)) - 1
    assert changes > len(inside)


def test_operators_on_lists_are_boundaries_tensor_by_tensor(record_loop):
    """Each tensor of an update in place is a write of its own, and its bits are the list's."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    options = {"checkpoint_every": EVERY, "chips": CHIPS, "snapshot_rate": Fraction(1), "direct_paths": DIRECT}
    run = opened(record_loop(model, optimizer, [torch.randn(5, 4)] * STEPS, body(False), **options))
    program = run.program(execution_of(run.leaf(2)).program)
    [(first, last)] = program.updates
    update = [place for place, call in enumerate(program.counted) if first <= call < last]
    count = len(list(model.parameters()))
    assert len(update) == count, "one call on a list of all parameters"
    states = states_inside(run, 2)
    assert len({state.root for state in states[update[0] - 1 : update[-1] + 1]}) == 1 + count
    first_writes = program.first_writes
    assert sorted(first_writes[f"weight/{name}"] for name, _ in model.named_parameters()) == [at + 1 for at in update]
    for shard, record in snapshots_of(run):
        assert record.digest == states_inside(run, record.step + 1)[record.operators - 1].shard(shard).value


def test_inspection_says_where_they_fell_and_how_many_were_replayed(recorded, devices):
    look = {"now": recorded.now, "worker": devices.run}
    settings = Settings(samples=CHIPS, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, **look)
    assert verdict.outcome is Outcome.ACCEPT
    inside = len(snapshots_of(opened(recorded)))
    assert verdict.evidence["snapshots_compared_inside_steps"] == inside
    assert f"{inside} of the snapshots fell inside steps" in verdict.reasons[0].text
    assert [replay["snapshots_inside_steps"] for replay in verdict.evidence["replays"]] == [inside]
    fewer = inspect([recorded.run], recorded.trust, replace(settings, segments=1), **look)
    assert fewer.outcome is Outcome.ACCEPT
    compared = fewer.evidence["snapshots_compared_inside_steps"]
    assert 0 < compared < inside
    assert f"{inside - compared} of them in segments that were not replayed" in fewer.reasons[0].text
    unreplayed = verify(recorded.run, recorded.trust, now=recorded.now)
    assert f"so {inside} snapshots inside steps were not compared" in unreplayed.reasons[0].text


def test_a_replay_that_lacks_a_moment_is_the_devices_fault(recorded, devices):
    def forgetful(name, job):
        return devices.run(name, {**job, "inside": job["inside"][1:]})

    settings = Settings(samples=CHIPS, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=forgetful)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "is missing" in verdict.reasons[0].text


def test_only_moments_of_the_step_can_be_looked_at(recorded):
    steps = ProgramSteps(opened(recorded), 0)
    for operators in (0, len(steps.program(1).counted) + 1):
        with pytest.raises(CallerError, match="cannot be stopped"):
            steps.stop_after(operators, print)


def record(kind, counter, *, step=0, op=0):
    return LogRecord(
        counter=counter, kind=kind, boot=1, tick=counter, busy=0, run_id=bytes(32), step=step, op=op,
        digest=bytes(32), previous=bytes(32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("after", "committed"),
    [
        ([(RecordKind.COMMIT, 4)], True),
        ([(RecordKind.BEACON, 0), (RecordKind.COMMIT, 4)], True),
        ([(RecordKind.COMMIT, 5), (RecordKind.COMMIT, 4)], False),
        ([(RecordKind.POWER_GAP, 0), (RecordKind.BOOT, 0), (RecordKind.COMMIT, 4)], False),
        ([(RecordKind.CLOSE_EPOCH, 0)], False),
    ],
)
def test_the_step_around_a_snapshot_is_the_next_commit_of_its_boot(after, committed):
    records = [record(RecordKind.SNAPSHOT, 0, step=3)]
    records += [record(kind, number, step=step) for number, (kind, step) in enumerate(after, start=1)]
    assert committed_after(records) == {0: committed}


def test_a_snapshot_that_operators_overtook_is_explained_by_nothing(recorded, devices):
    """Whoever works in another thread meanwhile would choose what it shows."""
    run = opened(recorded)
    transcript = read_transcript(run, recorded.trust, Findings(), now=recorded.now)
    assert transcript is not None
    for _, each in snapshots_of(run):
        assert place_of(each, transcript) == (each.step + 1, each.operators)
        with pytest.raises(EvidenceError, match="another thread of the host"):
            place_of(replace(each, op=each.op | LATE), transcript)
        with off("snapshots in time"):
            assert place_of(replace(each, op=each.op | LATE), transcript) == (each.step + 1, each.operators)
        beyond = len(run.program(execution_of(run.leaf(each.step + 1)).program).counted) + 1
        with pytest.raises(EvidenceError, match=f"taken after {beyond} operators"):
            place_of(replace(each, op=beyond), transcript)


def test_verdict_as_json_names_step_and_operators(recorded, devices):
    settings = Settings(samples=1, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
    [chip] = json.loads(json.dumps(verdict.evidence["chips"]))
    assert [each["step"] for each in chip["snapshots"]] == sorted(each["step"] for each in chip["snapshots"])
    assert {each["step"] for each in chip["snapshots"]} <= set(range(1, STEPS + 1))
    assert all(each["operators"] > 0 for each in chip["snapshots"])
