"""Device processes: how jobs are dealt out to them, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from firmware_sim.errors import CallerError, DeviceError, Unreadable
from inspector.replay import pool as pools
from inspector.replay.pool import DevicePool, run_worker
from monitor import processes
from monitor.transcript import RunFolder

DEVICE = "sse41"


@pytest.fixture(scope="module")
def two():
    """A pool of two processes."""
    with DevicePool(workers=2) as pool:
        yield pool


@pytest.fixture
def job(honest) -> dict[str, Any]:
    """Replay both segments of a run."""
    run = RunFolder(honest.run, honest.trust.labs["lab"])
    where = {"run": str(honest.run), "manifest": run.manifest_digest, "lab_key": honest.trust.labs["lab"].raw.hex()}
    return {"action": "replay", **where, "segments": [0, 1]}


def process(pool: DevicePool) -> Any:
    return pool._crew.processes[0]._process


def test_parts_of_a_job_give_the_result_of_the_whole(two, devices, job):
    whole, parts = devices.run(DEVICE, job), two.run(DEVICE, job)
    assert [replay["segment"][0] for replay in parts["replays"]] == [0, 1]
    alike = ("device", "fingerprint", "replays")
    assert {key: parts[key] for key in alike} == {key: whole[key] for key in alike}


def test_evidence_that_one_part_cannot_read_fails_the_whole_job(two, job):
    with pytest.raises(Unreadable, match="has changed since it was verified"):
        two.run(DEVICE, {**job, "manifest": "00" * 32})


def test_processes_that_do_not_compute_alike_are_no_device(two, job, monkeypatch):
    prints = iter(["f", "g"])
    answer = {"device": DEVICE, "settings": {}, "versions": {}, "replays": [], "seconds": 0.0}
    monkeypatch.setattr(pools._Worker, "run", lambda self, job: {**answer, "fingerprint": next(prints)})
    with pytest.raises(DeviceError, match="do not all compute the same bits"):
        two.run(DEVICE, job)


@pytest.mark.usefixtures("started_processes")
def test_a_process_that_was_killed_is_replaced():
    with DevicePool() as pool:
        pool.prepare([DEVICE])
        first = process(pool)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert pool.run(DEVICE, {"action": "fingerprint"})["device"] == DEVICE
        assert process(pool).pid != first.pid


def test_a_process_that_is_killed_again_is_an_error(monkeypatch):
    started = []
    real = processes.start

    def dying(command, *where, **streams):
        started.append(command)
        command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
        return real(command, *where, **streams)

    monkeypatch.setattr(processes, "start", dying)
    with DevicePool() as pool, pytest.raises(DeviceError, match="sse41 broke: it was ended by SIGKILL"):
        pool.run(DEVICE, {"action": "fingerprint"})
    assert len(started) == 2


def test_no_more_processes_start_than_may_run():
    with DevicePool(workers=1) as pool:
        pool.prepare([DEVICE, "mkl-compatible"])
        assert [worker.device.name for worker in pool._crew.processes] == [DEVICE]
    for number in (0, 1000):
        with pytest.raises(CallerError, match="workers must lie in"):
            DevicePool(workers=number)
    with DevicePool() as pool, pytest.raises(CallerError):
        pool.prepare(["abacus"])


def test_a_part_is_of_the_run_that_it_names(devices, job):
    """Who orders jobs chooses their words: a part that has another's name gets no other run's result."""
    part = {**job, "part_of": "x", "segments": [0]}
    assert "replays" in devices.run(DEVICE, part)
    assert "evidence_error" in devices.run(DEVICE, {**part, "lab_key": "00" * 32})
    with pytest.raises(Unreadable):
        devices.run(DEVICE, {**part, "manifest": "00" * 32})


def test_a_process_answers_for_a_later_run_as_one_of_its_own(job, make_run):
    """Also after a run that lies, one that cannot be read, and the very programs of the run before."""
    jobs = [job]
    for options in ({"lie": "wrong-operator"}, {"numerics": "exact"}, {}):
        recorded = make_run(f"run-{len(jobs)}", **options)
        run = RunFolder(recorded.run, recorded.trust.labs["lab"])
        key = recorded.trust.labs["lab"].raw.hex()
        jobs.append({**job, "run": str(recorded.run), "manifest": run.manifest_digest, "lab_key": key})
    jobs += [{**job, "manifest": "00" * 32}, {**job, "lab_key": "00" * 32}, jobs[0]]

    def answer(run, each):
        try:
            return {**run(DEVICE, each), "seconds": 0}
        except Unreadable as error:
            return str(error)

    with DevicePool() as pool:
        answers, pids = [], set()
        for each in jobs:
            answers.append(answer(pool.run, each))
            pids.add(process(pool).pid)
    assert len(pids) == 1
    for each, found in zip(jobs, answers, strict=True):
        assert found == answer(run_worker, each)


def test_programs_that_a_process_has_read_are_checked_again_in_the_next_run(job, make_run):
    """What it keeps of one run stands for no file of another."""
    recorded = make_run()
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    key = recorded.trust.labs["lab"].raw.hex()
    other = {**job, "run": str(recorded.run), "manifest": run.manifest_digest, "lab_key": key}
    with DevicePool() as pool:
        assert "replays" in pool.run(DEVICE, other)
        (file,) = (recorded.run / "programs").glob("*.json")
        content = file.read_bytes()
        file.write_bytes(content.replace(b"aten.", b"atem.", 1))
        with pytest.raises(Unreadable, match="was altered"):
            pool.run(DEVICE, other)
        file.unlink()
        with pytest.raises(Unreadable, match="is missing"):
            pool.run(DEVICE, other)
        file.write_bytes(content)
        assert "replays" in pool.run(DEVICE, other)
