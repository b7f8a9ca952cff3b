"""A run that is copied is the one that would be recorded, and a forked process computes as one that is started."""

from __future__ import annotations

import os
from typing import Any

from inspector.replay.pool import DevicePool
from monitor import processes
from tests.conftest import record_run
from tests.guards import off


def content(run):
    """What a run and its lab's files hold."""
    places = [run, run.with_name(f"{run.name}.lab")]
    files = [each for place in places for each in place.rglob("*") if each.is_file()]
    return {str(each.relative_to(run.parent)): each.read_bytes() for each in [*files, run.with_name("run.trust.json")]}


def test_a_copied_run_is_the_recorded_one(make_run, tmp_path):
    options: dict[str, Any] = {"lie": "wrong-operator", "steps": 2}
    make_run("first/run", **options)
    copy, recorded = make_run("second/run", **options), record_run(tmp_path / "third" / "run", **options)
    assert content(copy.run) == content(recorded.run)
    assert copy.trust == recorded.trust


def test_with_a_guard_off_each_run_is_recorded(kept_runs, tmp_path):
    options = {"lie": "wrong-operator", "steps": 2}
    kept_runs(tmp_path / "kept" / "run", **options)
    with off("watched memory"):
        one, other = (kept_runs(tmp_path / name / "run", **options) for name in ("one", "other"))
    assert one.trust is not other.trust


def answer(name):
    with DevicePool() as pool:
        found = pool.run(name, {"action": "fingerprint"})
        return {key: value for key, value in found.items() if key != "seconds"}


def test_a_forked_device_is_the_started_one(forks, monkeypatch):
    forked = answer("sse41")
    started = []

    def start(*words, **streams):
        started.append(words)
        return forks.started(*words, **streams)

    monkeypatch.setattr(processes, "start", start)
    assert answer("sse41") == forked
    assert len(started) == 1


def test_a_fork_ends_as_a_process_does(forks):
    with DevicePool() as pool:
        pool.prepare(["sse41"])
        process = pool._crew.processes[0]._process
        assert process is not None
        assert process.poll() is None
        assert process.pid != os.getpid()
        process.kill()
        assert process.wait(60) == process.poll() == -9
