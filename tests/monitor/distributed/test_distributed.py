"""A job of many processes is recorded as the run of one, and a rank that departs is named."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from torch import nn

from analysis.cli import main
from analysis.examples.train_on_two_processes import MODULE, STEPS, batches, gpt_job, judge
from firmware_sim.errors import CallerError
from firmware_sim.evidence import seal
from firmware_sim.evidence.envelope import read_sealed
from inspector import Outcome, Trust
from monitor import RunFolder
from monitor.distributed.attribution import _Truth, departures
from monitor.distributed.job import Job
from monitor.distributed.launcher import launch
from monitor.distributed.layouts import Sharded
from monitor.distributed.metering import expected_moves
from monitor.distributed.rank import Rank
from monitor.distributed.recorder import DistributedRecorder
from monitor.distributed.reduction import even_pieces, row_pieces
from monitor.distributed.statements import Statements, rank_key
from monitor.distributed.wire import Wire
from monitor.lab.simulated_lab import simulated_secret
from tests.monitor.distributed.straying_rank import small_job

pytestmark = pytest.mark.usefixtures("kept_devices")
WRONG = 3
STEP = "application/vnd.chipwitness.rank-step+json"
STRAYING = "tests.monitor.distributed.straying_rank"
LYING = "tests.monitor.distributed.lying_rank"


def lab_of(run):
    return Trust.load([run.with_name(f"{run.name}.trust.json")], [run]).labs["lab-1"]


def opened(run):
    return RunFolder(run, lab_of(run))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    recorder = DistributedRecorder(small_job(), layout="alone", out=run, seed=1)
    for batch in batches(STEPS):
        recorder.step(batch)
    recorder.finish()
    return run


def test_two_processes_are_killed_and_four_leave_the_run_of_one(tmp_path, alone):
    run = tmp_path / "run"
    with pytest.raises(CallerError, match="rank 1 failed: signal 9"):
        launch(STRAYING, 2, {"run": str(run), "dies": [1, 2]})
    launch(STRAYING, 4, {"run": str(run)})
    one, four = opened(alone), opened(run)
    assert [four.leaf(step) for step in range(5)] == [one.leaf(step) for step in range(5)]
    assert judge(run).outcome is Outcome.ACCEPT
    assert departures(four, lab_of(run)) == []
    assert len(list(run.with_name("run.ranks").glob("keys-*"))) == 2


def tell(run, lie, module=LYING):
    """Record a small job in which a rank lies."""
    launch(module, 2, {"runs": [(str(run), "fsdp2", lie)]})


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Where two processes, started once, have recorded jobs in which rank 1 lies; no test may change them."""
    folder = tmp_path_factory.mktemp("told")
    layouts = {"chunk": "ddp", "weight": "fsdp2"}
    for kind in layouts:
        (folder / kind).mkdir()
    runs = [(str(folder / kind / "run"), layout, (kind, 1, WRONG)) for kind, layout in layouts.items()]
    launch(LYING, 2, {"runs": runs})
    return folder


def test_a_wrong_chunk_is_rejected_and_named(told, capsys):
    run = told / "chunk" / "run"
    assert judge(run).outcome is Outcome.REJECT
    found = departures(opened(run), lab_of(run))
    assert {(each.step, each.rank, each.kind) for each in found} == {(WRONG, 1, "chunk")}
    assert main(["ranks", str(run), "--trust", str(run.with_name("run.trust.json"))]) == 1
    assert f"step {WRONG}, rank 1: for micro-batch 1 it sent rank 0 wrong gradients" in capsys.readouterr().out


def test_c27_bytes_unlike_what_their_sender_signed_stop_the_step(tmp_path, capsys):
    """No victim is blamed, and the run goes on once nobody lies."""
    run = tmp_path / "run"
    with pytest.raises(
        CallerError, match=r"step 3: rank 1 got chunk of .* from rank 0, with bytes that rank 0 did not sign"
    ):
        tell(run, ("bytes", 0, WRONG))
    assert opened(run).committed == WRONG - 1
    assert main(["ranks", str(run), "--trust", str(run.with_name("run.trust.json"))]) == 1
    assert f"step {WRONG}, rank 1: it says that it got chunk of" in capsys.readouterr().out
    tell(run, None)
    assert judge(run).outcome is Outcome.ACCEPT
    assert {each.kind for each in departures(opened(run), lab_of(run))} == {"complaint"}


def test_c27_weights_that_a_rank_does_not_hold_are_its_own_fault(told):
    """All other ranks compute with them, and none is blamed."""
    run = told / "weight" / "run"
    assert judge(run).outcome is Outcome.REJECT
    found = departures(opened(run), lab_of(run))
    assert {(each.step, each.rank, each.kind) for each in found} == {(WRONG, 1, "weight")}


def test_c27_who_leaves_out_what_it_gave_is_named_beside_who_got_it(tmp_path, told):
    run = shutil.copytree(told / "weight", tmp_path / "copy") / "run"
    path = run.with_name("run.ranks") / f"{WRONG:08d}-0001.json"
    payload = read_sealed(path.read_bytes(), STEP)[0]
    payload["given"] = [each for each in payload["given"] if each[0] != "weight"]
    path.write_bytes(seal(STEP, payload, rank_key(simulated_secret(1), 1)))
    found = departures(opened(run), lab_of(run))
    assert {(each.step, each.kind) for each in found} == {(WRONG, "complaint")}
    assert all("rank 1 gave it is not what rank 1 signed" in each.text for each in found)


def test_c27_guard_off_a_victim_is_blamed(tmp_path):
    run = tmp_path / "run"
    tell(run, ("bytes", 0, WRONG), "tests.monitor.distributed.unsealed_rank")
    assert 1 in {each.rank for each in departures(opened(run), lab_of(run))}


def test_a46_ranks_without_a_micro_batch_are_refused(tmp_path):
    with pytest.raises(CallerError, match="3 ranks do not share 4 micro-batches evenly; take 3 or 6 of them, or a num"):
        launch(MODULE, 3, {"run": str(tmp_path / "run")})


@pytest.mark.parametrize("kind", ["batch", "norm", "shard", "work"])
def test_what_a_rank_alters_is_named(tmp_path, kind):
    run = tmp_path / "run"
    recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=run, seed=1, lie=(kind, 0, WRONG))
    for batch in batches(4, 2):
        recorder.step(batch)
    recorder.finish()
    assert {(each.step, each.rank, each.kind) for each in departures(opened(run), lab_of(run))} == {(WRONG, 0, kind)}
    assert kind != "work" or "meter" in judge(run).reasons[0].text


@pytest.mark.parametrize("is_looked_for", [True, False])
def test_bytes_that_collectives_take_beside_the_step_are_named(tmp_path, monkeypatch, is_looked_for):
    """And are not where nobody looks at them."""
    close = Statements.close

    def closed(self, work, moved, shards):
        close(self, work, {"allreduce": 4096} if self._step == WRONG else moved, shards)

    monkeypatch.setattr(Statements, "close", closed)
    if not is_looked_for:
        monkeypatch.setattr(_Truth, "_exchanged", lambda *_: [])
    recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=tmp_path / "run", seed=1)
    for batch in batches(4, 2):
        recorder.step(batch)
    recorder.finish()
    found = departures(opened(tmp_path / "run"), lab_of(tmp_path / "run"))
    assert [(each.step, each.rank, each.kind) for each in found] == [(WRONG, 0, "moved")] * is_looked_for


def test_what_collectives_take_by_formula():
    pieces = {"a": [(0, 6), (6, 10)], "b": [(0, 1), (1, 1)]}
    frozen = {"c": [(0, 2), (2, 4)]}
    found = expected_moves(pieces, frozen, micro_batches=4, is_sharded=True, is_clipped=True)
    row, passes, small = 4 * (6 + 1), 2, 4 * 2 + 2 * (4 + 80)
    chunk, seal = 64 + 2 * 32, 64 + 32
    assert found["alltoall_base"] == (passes * 2 * row,) * 2
    assert found["allgather_base"] == (passes * (row + 8) + small, 2 * passes * (row + 8) + small)
    assert found["allgather"] == (
        2 * chunk + 2 * seal + 3 * seal + 64,
        2 * 3 * chunk + 2 * 2 * 3 * seal + 3 * seal + 64,
    )
    whole = expected_moves(pieces, frozen, micro_batches=4, is_sharded=False, is_clipped=True)
    assert (whole["allgather_base"], whole["broadcast"]) == ((row + 8, row + 8), (0, 20))


def test_a_statement_that_is_missing_or_forged_is_told(alone):
    assert departures(opened(alone), lab_of(alone)) == []
    path = alone.with_name("run.ranks") / "00000002-0000.json"
    content = path.read_bytes()
    for forged in (content.replace(b"payload", b"Payload", 1), path.with_name("00000001-0000.json").read_bytes()):
        path.write_bytes(forged)
        assert [(each.step, each.kind) for each in departures(opened(alone), lab_of(alone))] == [(2, "statement")]
    path.unlink()
    assert "is missing" in departures(opened(alone), lab_of(alone))[0].text
    path.write_bytes(content)


def test_statements_of_an_older_form_blame_nobody(alone):
    path = alone.with_name("run.ranks") / "00000002-0000.json"
    content = path.read_bytes()
    payload = read_sealed(content, STEP)[0]
    older = {key: payload[key] for key in payload if key not in ("given", "between")} | {"chunks": []}
    path.write_bytes(seal(STEP, older, rank_key(simulated_secret(1), 0)))
    with pytest.raises(CallerError, match="of an older form"):
        departures(opened(alone), lab_of(alone))
    path.write_bytes(content)


def test_a_run_goes_on_on_another_number_of_processes():
    job = gpt_job(2, layers=1)
    whole, first = Rank(job, "alone", seed=1), Rank(job, "alone", seed=1)
    tokens = torch.randint(0, 9, (2, 4, 7), generator=torch.Generator().manual_seed(2))
    for batch in tokens:
        whole.step(batch)
    first.step(tokens[0])
    second = Rank(job, "fsdp2", seed=1)  # on one process
    second.load(first.state(), 1)
    second.step(tokens[1])
    for key, value in whole.state().items():
        assert torch.equal(second.state()[key], value), key


def test_a_state_is_gathered_in_one_order_whatever_file_it_comes_from():
    job = gpt_job(1, layers=1, width=6)
    first, second = Rank(job, "alone", seed=1), Rank(job, "alone", seed=1)
    first.step(torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(2)))
    state = first.state()
    second.load(dict(reversed(state.items())), 1)
    assert list(second.state()) == list(state)
    for key, value in second.state().items():
        assert torch.equal(state[key], value), key


def test_the_state_of_another_job_is_refused():
    job = gpt_job(1, layers=1, width=6)
    rank = Rank(job, "alone", seed=1)
    state = rank.state()
    key = ("weight", "head.weight")
    for wrong in (
        {name: each for name, each in state.items() if name != key},
        {**state, ("optimizer", "other/exp_avg"): torch.zeros(1)},
        {**state, key: state[key].T},
    ):
        with pytest.raises(CallerError, match="another job"):
            rank.load(wrong, 0)


def test_pieces_cover_each_element_once():
    for cut in (even_pieces, row_pieces):
        for shape in ((1,), (7,), (5, 3), (2, 0)):
            for ranks in (1, 2, 3, 8):
                pieces = cut(shape, ranks)
                assert len(pieces) == ranks
                assert [place for first, last in pieces for place in range(first, last)] == list(
                    range(torch.Size(shape).numel())
                )


def test_other_parallelism_and_written_buffers_are_refused():
    with pytest.raises(CallerError, match="hybrid sharding, tensor and pipeline"):
        Rank(gpt_job(), "hsdp", seed=1)
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters),
        loss=lambda model, part: model(part).sum(),
        micro_batches=2,
    )
    with pytest.raises(CallerError, match="is written in each micro-batch"):
        Rank(job, "alone", seed=1).step(torch.ones(4, 3))


def test_a_rank_that_fails_ends_the_job(tmp_path):
    with pytest.raises(CallerError, match=r"rank \d failed: .*unknown layout"):
        launch(MODULE, 2, {"run": str(tmp_path / "run"), "layout": "hsdp"})


@pytest.mark.parametrize(
    ("parts", "options", "line"),
    [
        (
            {"model": lambda: nn.Linear(2, 2).bfloat16()},
            {},
            "weight is trained in bfloat16, but ranks add gradients in FP32",
        ),
        ({}, {"state": [nn.Linear(2, 2)]}, "a job's state is what its model, optimizer and scaler hold"),
        (
            {"loss": lambda model, part: model(part)},
            {},
            r"the loss of a micro-batch must be one number, not float32\[1, 2\]",
        ),
    ],
)
def test_what_a_job_may_not_hold_is_refused_in_a_line(tmp_path, parts, options, line):
    given = {
        "model": lambda: nn.Linear(2, 2),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "loss": lambda model, part: model(part).sum(),
        "micro_batches": 2,
    }
    job = Job(**{**given, **parts})
    with pytest.raises(CallerError, match=line):
        DistributedRecorder(job, layout="alone", out=tmp_path / "run", seed=1, **options).step(torch.ones(2, 2))


def test_a_scaler_and_shards_are_refused_in_a_line():
    job = dataclasses.replace(gpt_job(1), scaler=lambda: torch.amp.GradScaler("cpu"))
    with pytest.raises(CallerError, match="no rank of fsdp2 holds; take layout 'ddp'"):
        Sharded(job, nn.Linear(2, 2), Wire(0, 2))
