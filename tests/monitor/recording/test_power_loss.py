"""What a crash may leave of a run's files, and what resuming makes of it: the same run, or one line that refuses.

A seeded few of each kind; `python -m tests.measurements crashes` takes more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from firmware_sim import RecordKind, parse_log
from firmware_sim.errors import CallerError
from firmware_sim.evidence import MerkleTree
from monitor import Recorder
from monitor.files import Files
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording import recording
from monitor.recording.loop_state import HostState
from monitor.recording.resumption import heard_beyond
from monitor.transcript import RunFolder, writer
from tests.measurements import _disk, crashes
from tests.measurements.__main__ import main as measure
from tests.measurements.crashes import Crashes


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Crashes(tmp_path_factory.mktemp("plain") / "crashes", sync=False)


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    return Crashes(tmp_path_factory.mktemp("synced") / "crashes", sync=True)


def problems(found):
    return [crash for crash in found if crash.problem]


def once_taken(made, step):
    """Number of operations after which that step was taken."""
    return next(at for at, steps in made.taken if steps == step)


@pytest.mark.parametrize("sync", [False, True])
def test_every_operation_is_noted(plain, synced, sync, tmp_path):
    """Played again to the end, they make the same folder."""
    disk = (synced if sync else plain).disk
    disk.image(tmp_path / "again", after=len(disk), kind="kill", seed=0)
    one, other = (
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (disk.root, tmp_path / "again")
    )
    assert one == other
    assert any(each.what == "sync" for each in disk.operations) is sync


def test_the_end_of_the_process_costs_no_step(plain):
    found = list(plain.all("kill", count=10, seed=1))
    assert problems(found) == []
    assert {crash.resumed - crash.taken for crash in found if crash.taken >= 0} == {0, 1}


def test_a_power_loss_costs_no_step_of_a_run_that_waits_for_the_disk(synced):
    found = list(synced.all("power", count=16, seed=2))
    assert problems(found) == []
    assert len({crash.taken for crash in found}) > 4
    assert not any(crash.refusal for crash in found if crash.taken >= 0)


@pytest.mark.parametrize("kind", ["power", "put back"])
def test_else_a_power_loss_is_told_by_one_line_or_costs_nothing(plain, kind):
    found = list(plain.all(kind, count=24, seed=3))
    assert problems(found) == []
    assert {bool(crash.refusal) for crash in found if crash.taken > 0} == {True, False}
    assert all("\n" not in crash.refusal for crash in found)


@pytest.mark.parametrize("guard", ["contents", "names", "pending"])
def test_guard_off_a_run_that_waits_for_less(synced, guard, monkeypatch, tmp_path):
    """Each flush, and what resuming puts right, is needed: without it a step that was taken is gone."""
    made = synced
    if guard == "pending":
        monkeypatch.setattr(writer, "_cut_pending", lambda *_: None)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Files, *{"contents": ("_put", plain_put), "names": ("flush", lambda *_: None)}[guard])
            made = Crashes(tmp_path / "crashes", sync=True)
    after = once_taken(made, 5) + (guard == "pending") * 20  # in the middle of the next step
    assert any(made.crash(after, "power", seed=seed).problem for seed in range(30))


def plain_put(self, path, flags, *pieces, put=Files._put):
    put(Files(), path, flags, *pieces)


def test_steps_that_chips_heard_of_come_again_or_not_at_all(plain, tmp_path, monkeypatch):
    """The folder is put back, the chips are not, and the next process has other batches."""
    after, before = once_taken(plain, 5), once_taken(plain, 3)
    monkeypatch.setattr("tests.measurements._disk.random.Random.randrange", lambda *_: before)
    plain.disk.image(tmp_path / "back", after=after, kind="put back", seed=0, apart="run.lab/chips")
    monkeypatch.undo()
    run = tmp_path / "back" / "run"
    loop = crashes.Loop()
    recorder = Recorder.resume(loop.model, loop.optimizer, out=run, stateful=loop.stateful)
    assert recorder.steps == 3
    loop.source.next()  # another batch than the chips' step 4
    with pytest.raises(CallerError, match="step 4 is not the one that the chips heard of before the crash"):
        loop.train(recorder)
    recorder._run.lab.cut_power()
    assert plain.resumed(run) == (3, "")  # the same ones are taken


class Told:
    """A chip with a log."""

    chip_id = "chip"

    def __init__(self, records):
        self._records = records

    def log_bytes(self):
        return b"".join(record.to_bytes() for record in self._records)


def test_what_chips_must_have_heard(plain):
    folder = plain.disk.root / "run"
    run = RunFolder(folder, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(folder))).verifying)
    _, tree = run.load_steps()
    log = parse_log((folder / "chips/lab-1-chip-0000/log.bin").read_bytes())
    told = {each.step: place for place, each in enumerate(log) if each.kind is RecordKind.COMMIT}

    def ask(*logs, steps=crashes.STEPS):
        leaves, _ = run.load_steps()
        before = MerkleTree(leaf.encoded() for leaf in leaves[: steps + 1])
        return heard_beyond([cast(Any, Told(each)) for each in logs], run, before)

    assert ask(log) == ask(log[: told[6] + 1]) == {}
    assert ask(log[told[7] + 1 :], []) == {}  # a verifier has taken over what came before
    assert ask(log, steps=5) == {step: tree.root(step + 1) for step in (6, 7)}
    with pytest.raises(CallerError, match="chip last heard of step 5, but run ends with step 7"):
        ask(log, log[: told[5] + 1])
    with pytest.raises(CallerError, match="last heard of step -1"):
        ask(log[: told[0]])
    for place, steps in ((told[7], 7), (told[7], 5)):  # of a step on disk, and of one to come
        other = [*log[:place], replace(log[place], digest=bytes(32))]
        with pytest.raises(CallerError, match="heard of are not those of run"):
            ask(log, other, steps=steps)


def test_guard_off_a_second_history(plain, monkeypatch):
    """Without asking the chips, other steps than they heard of are taken, which an inspection rejects in the end."""
    monkeypatch.setattr(recording, "heard_beyond", lambda *_: {})
    monkeypatch.setattr(crashes._Source, "load_state_dict", lambda *_: None)
    after = once_taken(plain, 6)
    assert any(plain.crash(after, "put back", seed=seed).problem == "ends in another state" for seed in range(12))


def test_guard_off_files_that_nobody_reads(plain, monkeypatch):
    """A log or batch from before the last checkpoint is needed by no resumption, but by each inspection."""
    after, disk = once_taken(plain, 6), plain.disk
    lost = next(
        node for node in range(disk._count) if disk.find(str(disk.root / "run/batches/00000002.safetensors")) == node
    )
    kept = [each for each in disk.operations[:after] if each.what != "write" or each.node != lost]
    monkeypatch.setattr(disk, "operations", kept)
    crash = plain.crash(len(kept) + 1, "kill", seed=0)
    assert "batches/00000002.safetensors has 0 bytes" in crash.refusal
    monkeypatch.setattr(RunFolder, "check_contents", lambda *_: 0)
    assert "damaged" in plain.crash(len(kept) + 1, "kill", seed=0).problem


def test_states_beside_the_chips_are_whole_or_not_read(tmp_path):
    """A newer state that was written over an older one by half would pass for the older one's."""
    loop = crashes.Loop()
    state = HostState(loop.stateful, loop.optimizer, tmp_path)
    state.keep(2)
    path = tmp_path / "host-state-0.json"
    older = path.read_bytes()
    loop.source.next()
    state.keep(4)
    newer = path.read_bytes()
    half = len(newer) // 2
    path.write_bytes(newer[:half] + older[half:])
    with pytest.raises(CallerError, match="no state outside the chips' memory was kept with step 2"):
        state.give_back(2)
    with pytest.raises(CallerError, match="those of step 2 are lost; resume without stateful, after"):
        HostState.require_none(tmp_path, 2)


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_settled_outlives_a_power_loss(tmp_path, sync):
    """Whoever wrote it, however deep it lies."""
    with _disk.noted(tmp_path / "whole") as disk:
        folder = disk.root / "run"
        for path in ("a/b", "a/c/d", "e"):
            Files().write(str(folder / path), path.encode())
        Files(sync=sync).settle(folder)
    seen = set()
    for seed in range(20):
        image = tmp_path / str(seed)
        disk.image(image, after=len(disk), kind="power", seed=seed)
        seen.add(
            frozenset((str(each.relative_to(image)), each.read_bytes()) for each in image.rglob("*") if each.is_file())
        )
    whole = {(f"run/{path}", path.encode()) for path in ("a/b", "a/c/d", "e")}
    assert (seen == {frozenset(whole)}) is sync


@pytest.mark.parametrize("sync", [True, False])
def test_paths_may_be_relative(tmp_path, monkeypatch, sync):
    monkeypatch.chdir(tmp_path)
    files = Files(sync=sync)
    files.write("a/b/c", b"c")
    files.move("a/b/c", "d")
    files.move("d", "e/f/g")
    files.flush("e", ["f/g"])
    files.settle(Path("e"))
    assert Path("e/f/g").read_bytes() == b"c"
    loop = crashes.Loop()
    recorder = Recorder(loop.model, loop.optimizer, out="run", chips=1, sync=sync, stateful=loop.stateful)
    recorder._run.lab.cut_power()
    again = crashes.Loop()
    assert Recorder.resume(again.model, again.optimizer, out="run", sync=sync, stateful=again.stateful).steps == 0


def test_what_sync_takes(tmp_path):
    loop = crashes.Loop()
    with pytest.raises(CallerError, match="sync must be True or False, not 'always'"):
        Recorder(loop.model, loop.optimizer, out=tmp_path / "run", sync="always")
    assert list(tmp_path.iterdir()) == []


def test_the_command(capsys, tmp_path):
    out = tmp_path / "crashes.json"
    assert measure(["crashes", "--trials", "1", "--seed", "1", "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text())["rows"] == rows
    assert {row["work"] for row in rows} == {"kill", "power", "put back"}
    assert all(row["crashes"] == row["resumed"] + row["refused"] for row in rows)
    assert crashes.verdict([{"lost": 1, "crashes": 2}]) == "1 of 2 crashes did not end as they must"
    with pytest.raises(CallerError, match="a crash at least"):
        crashes.run(trials=0)
