"""A run that dies at any file operation verifies as unfinished, loses nothing, and goes on to the same bytes."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, digest_bytes
from inspector.storage.fsck import fsck
from monitor.declaration.origin import Origin
from monitor.declaration.statement import Declaration, StateEntry
from monitor.files import Files, Replaced
from monitor.sharding import StateDigest
from monitor.transcript import Execution, Leaf, Metadata, RunFolder, TranscriptWriter
from monitor.transcript.layout import (
    JOURNAL,
    MANIFEST,
    SALT,
    batch_path,
    checkpoint_path,
    chip_path,
    log_path,
    program_path,
)

PROGRAM = b"{}"
EXECUTION = Execution(
    program=hashlib.sha256(PROGRAM).hexdigest(), slots={}, hyper=(), reads=str(digest_bytes("reads", b""))
)
KEY = SigningKey.generate(bytes(32))
STEPS = 3
TASK = Declaration(
    numerics="exact",
    seed=0,
    checkpoint_every=2,
    shares=(1,),
    optimizer="torch.optim.sgd.SGD",
    groups=({"lr": 0.1},),
    parameters=(("w",),),
    state=(StateEntry(kind="weight", name="w", dtype="float32", shape=(1,)),),
    origin=Origin(state=str(digest_bytes("state", b""))),
)
METADATA = Metadata(
    lab="lab",
    task=TASK,
    data={},
    chips=("chip-0",),
    device={"name": "none", "fingerprint": ""},
    versions={},
    settings={},
    started="2026-01-01T00:00:00Z",
    declared_end="2026-01-02T00:00:00Z",
)


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product catches it."""


def files_of(step: int) -> dict[str, bytes]:
    """Files that come with a step: an empty log every other time, a checkpoint every other time."""
    files = {} if step == 0 else {log_path(step): b"log" * (step % 2), batch_path(step): b"batch %d" % step}
    if step == 1:
        files[program_path(EXECUTION.program)] = PROGRAM
    before = step and step - 1  # a checkpoint comes with the next step, but for the first
    if before % TASK.checkpoint_every == 0 and (step == 0 or before > 0):
        files[checkpoint_path(before)] = b"state %d" % before
    return files


def leaf_of(step: int) -> Leaf:
    state = StateDigest(TASK.layout, (hashlib.sha256(b"%d" % step).digest(),))
    if step == 0:
        return Leaf(step=0, batch="", state=state, log="", loss="", flop=0)
    log = str(digest_bytes("rounding-log", files_of(step)[log_path(step)]))
    return Leaf(step=step, batch="ab" * 32, state=state, log=log, loss="00000000", flop=1, execution=EXECUTION)


def create(folder: Path, staging: Path) -> TranscriptWriter:
    run = METADATA.run_id.hex()
    return TranscriptWriter.create(
        folder, staging, KEY, run=run, metadata=METADATA.to_json(), data={SALT: bytes(range(32))}
    )


def go_on(writer: TranscriptWriter) -> None:
    """Commit what is missing and close the run."""
    if not writer.holds_chip_evidence:
        for step in range(writer.steps + 1, STEPS + 1):
            writer.append(leaf_of(step), files_of(step))
        writer.finish({checkpoint_path(STEPS): b"last", chip_path("chip-0", "log.bin"): b"said"})
    else:
        writer.finish({})


def reopen(folder: Path, staging: Path) -> TranscriptWriter:
    writer = TranscriptWriter.reopen(folder, staging, KEY)
    for step in range(writer.steps + 1):
        writer.tree.append(leaf_of(step).encoded())
    return writer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    go_on(create(folder, tmp_path / "whole.staging"))
    return folder


class Clock:
    """Counts operations on files and dies at one of them, in the middle if it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.count, self._last = 0, last
        for name in ("open", "link", "replace", "truncate", "unlink", "ftruncate"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        true_write = os.write

        def write(file: int, data: memoryview) -> int:
            self._tick(lambda: true_write(file, data[: len(data) // 2]))
            return true_write(file, data)

        monkeypatch.setattr(os, "write", write)

    def _tick(self, before_death=lambda: None) -> None:
        self.count += 1
        if self.count == self._last:
            before_death()
            raise Killed

    def _wrap(self, call):
        def wrapped(*arguments, **named):
            self._tick()
            return call(*arguments, **named)

        return wrapped


def created(folder, staging):
    return go_on(create(folder, staging))


def reopened(folder, staging):
    return go_on(reopen(folder, staging))


def die(monkeypatch: pytest.MonkeyPatch, last: int, call: Callable[[], object]) -> None:
    """Let a call die at its ``last``-th operation on files."""
    with monkeypatch.context() as patch:
        Clock(patch, last)
        with pytest.raises(Killed):
            call()


def test_dying_at_each_file_operation(tmp_path, monkeypatch):
    expected = contents(whole(tmp_path))
    with monkeypatch.context() as patch:
        clock = Clock(patch, -1)
        go_on(create(tmp_path / "counted", tmp_path / "counted.staging"))
    assert clock.count > 50
    committed = set()
    for last in range(1, clock.count + 1):
        folder, staging = tmp_path / f"run-{last}", tmp_path / f"staging-{last}"
        die(monkeypatch, last, partial(created, folder, staging))
        if not folder.exists():
            continue
        run = RunFolder(folder, KEY.verifying)
        run.check_listing()
        run.check_contents()
        leaves, tree = run.load_steps()
        assert list(leaves) == [leaf_of(step) for step in range(len(leaves))]
        assert tree.size == len(leaves)
        committed.add(len(leaves))
        if not run.finished:
            go_on(reopen(folder, staging))
        assert contents(folder) == expected
        shutil.rmtree(folder)
    assert committed == set(range(STEPS + 2))


def test_dying_again_while_the_run_is_reopened(tmp_path, monkeypatch):
    expected = contents(whole(tmp_path))
    for first in range(20, 70, 7):
        for second in range(1, 9):
            folder, staging = tmp_path / f"run-{first}-{second}", tmp_path / f"staging-{first}-{second}"
            die(monkeypatch, first, partial(created, folder, staging))
            die(monkeypatch, second, partial(reopened, folder, staging))
            RunFolder(folder, KEY.verifying).check_contents()
            go_on(reopen(folder, staging))
            assert contents(folder) == expected


def test_the_manifest_does_not_grow_and_the_journal_grows_evenly(tmp_path):
    folder, sizes = tmp_path / "run", []
    writer = create(folder, tmp_path / "staging")
    for step in range(100):
        writer.append(leaf_of(step), {log_path(step): b""} if step else {})
        sizes.append(((folder / MANIFEST).stat().st_size, (folder / JOURNAL).stat().st_size))
    assert max(size for size, _ in sizes[10:]) - min(size for size, _ in sizes[10:]) < 32
    steps = {after[1] - before[1] for before, after in itertools.pairwise(sizes[10:])}
    assert max(steps) - min(steps) <= 4


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert contents(whole(tmp_path / "plain"))[MANIFEST]
    assert RunFolder(tmp_path / "plain/whole", KEY.verifying).finished


def test_a_failed_replacement_leaves_the_last_one_whole(tmp_path, monkeypatch):
    """The two files that take turns must not be exchanged by an error: the one in place would be overwritten."""

    def fail(*_):
        raise OSError("disk full")

    target, replaced = tmp_path / "head", Replaced(tmp_path / "head", tmp_path / "staging", Files())
    for content in (b"first", b"second"):
        replaced.replace(content)
    for attempt in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="disk full"):
                replaced.replace(b"attempt %d" % attempt)
        assert target.read_bytes() == b"second"
    replaced.replace(b"third")
    assert target.read_bytes() == b"third"


def test_a_step_out_of_order_a_stray_file_and_a_program_twice_are_refused(tmp_path):
    writer = create(tmp_path / "run", tmp_path / "staging")
    with pytest.raises(ValueError, match="does not follow"):
        writer.append(leaf_of(1), files_of(1))
    writer.append(leaf_of(0), files_of(0))
    with pytest.raises(ValueError, match="does not come with step 1"):
        writer.append(leaf_of(1), {log_path(2): b"log"})
    program = f"programs/{'0' * 64}.json"
    writer.append(leaf_of(1), {program: b"{}"})
    for opened in (writer, reopen(tmp_path / "run", tmp_path / "staging")):
        with pytest.raises(ValueError, match="written already"):
            opened.append(leaf_of(2), {program: b"{}"})


def test_a_finished_run_and_a_lost_announcement_cannot_be_reopened(tmp_path, monkeypatch):
    with pytest.raises(CallerError, match="finished"):
        reopen(whole(tmp_path), tmp_path / "staging")
    folder, staging = tmp_path / "run", tmp_path / "staging"
    writer = create(folder, staging)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Files, "move", kill)
        with pytest.raises(Killed):
            writer.append(leaf_of(0), files_of(0))
    shutil.rmtree(staging)
    with pytest.raises(EvidenceError, match="neither in the run nor staged"):
        reopen(folder, staging)


def test_a_second_opinion_on_a_run_that_died(tmp_path, monkeypatch):
    folder, staging = tmp_path / "run", tmp_path / "staging"
    die(monkeypatch, 40, partial(created, folder, staging))
    problems = fsck(folder, {"lab": KEY.verifying.raw}).problems
    assert [text for text in problems if "digest" in text or "listed" in text] == []
    journal = folder / JOURNAL
    journal.write_bytes(journal.read_bytes() + b"\t")
    assert any("unsigned bytes" in text for text in fsck(folder, {"lab": KEY.verifying.raw}).problems)
    with pytest.raises(EvidenceError, match=r"not the announced one|bytes, not"):
        RunFolder(folder, KEY.verifying)
