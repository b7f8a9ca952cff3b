"""Device processes: how jobs are dealt out to them, what happens when one dies, and the pool that commands share."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import Any

import pytest

from analysis.cli import main
from firmware_sim.errors import CallerError, DeviceError
from inspector.replay import pool as pools
from inspector.replay.pool import DevicePool
from inspector.replay.served import PoolClient, serving
from inspector.replay.sources import program_digest
from monitor.transcript import RunFolder
from tests.guards import off

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
    return {"action": "replay", **where, "segments": [0, 1], "check_rounding": True}


def process(pool: DevicePool) -> Any:
    return pool._crew.processes[0]._process


def test_parts_of_a_job_give_the_result_of_the_whole(two, devices, job):
    whole, parts = devices.run(DEVICE, job), two.run(DEVICE, job)
    assert [replay["segment"][0] for replay in parts["replays"]] == [0, 1]
    alike = ("device", "fingerprint", "replays")
    assert {key: parts[key] for key in alike} == {key: whole[key] for key in alike}


def test_evidence_that_one_part_cannot_read_fails_the_whole_job(two, job):
    result = two.run(DEVICE, {**job, "manifest": "00" * 32})
    assert "replays" not in result
    assert result["evidence_error"]


def test_processes_that_do_not_compute_alike_are_no_device(two, job, monkeypatch):
    prints = iter(["f", "g"])
    answer = {"device": DEVICE, "settings": {}, "versions": {}, "replays": [], "seconds": 0.0}
    monkeypatch.setattr(pools._Worker, "run", lambda self, job: {**answer, "fingerprint": next(prints)})
    with pytest.raises(DeviceError, match="do not compute alike"):
        two.run(DEVICE, job)


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
    real = pools.subprocess.Popen

    def dying(command, **options):
        started.append(command)
        return real([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], **options)

    monkeypatch.setattr(pools.subprocess, "Popen", dying)
    with DevicePool() as pool, pytest.raises(DeviceError, match="sse41 broke: exit code -9"):
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


@contextmanager
def served(path, pool):
    """A pool behind a socket, served by a thread of this process."""
    with serving(path, pool) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield PoolClient(path)
        finally:
            server.shutdown()
            thread.join()


def test_commands_share_a_pool(tmp_path, two, honest, capsys):
    path = tmp_path / "socket"
    trust = tmp_path / "trust.json"
    trust.write_text(json.dumps(honest.trust.to_json()))
    with served(path, two) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert client.run(DEVICE, {"action": "fingerprint"})["device"] == DEVICE
        with pytest.raises(DeviceError, match="abacus"):
            client.run("abacus", {"action": "fingerprint"})
        words = ["--trust", str(trust), "--samples", "2", "--now", "2026-01-01T00:30:00Z", "--json"]
        words += ["--device", DEVICE, "--pool", str(path), "--confidence", "0.999"]
        assert main(["inspect", str(honest.run), *words]) == 0
        (replay,) = json.loads(capsys.readouterr().out)["evidence"]["replays"]
        assert (replay["device"], replay["segments"]) == (DEVICE, [0, 1])
        assert main(["inspect", str(honest.run), *words, "--workers", "2"]) == 2
        assert "--workers is an option of the pool" in capsys.readouterr().err
    assert not path.exists()
    with pytest.raises(DeviceError, match="gave no answer"):
        client.run(DEVICE, {"action": "fingerprint"})


def test_a_pool_whose_program_was_changed_meanwhile_computes_nothing_for_the_new_one(tmp_path, two, monkeypatch):
    with served(tmp_path / "socket", two) as client:
        monkeypatch.setattr(client, "_program", "0" * 64)
        with pytest.raises(CallerError, match="the pool runs another version of this program"):
            client.run(DEVICE, {"action": "fingerprint"})
        with off("same program"):
            assert client.run(DEVICE, {"action": "fingerprint"})["device"] == DEVICE


@pytest.mark.parametrize(
    "asked",
    [
        *(b"\n", b"[]\n", b'{"device":"sse41"}\n', b'{"device":"sse41","job":{}}\n', b"[" * 9999),
        f'{{"device":"sse41","job":[],"program":"{program_digest()}"}}\n'.encode(),
    ],
)
def test_a_pool_answers_what_is_no_job_with_an_error(tmp_path, asked):
    with DevicePool() as pool, served(tmp_path / "socket", pool), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "socket"))
        connection.sendall(asked)
        connection.shutdown(socket.SHUT_WR)
        assert list(json.loads(connection.makefile().readline())) == ["error"]


def test_a_pool_ends_when_it_is_told_to_and_one_that_was_killed_is_in_nobody_s_way(tmp_path):
    path = tmp_path / "socket"
    for end, there in ((signal.SIGKILL, True), (signal.SIGTERM, False)):
        command = [sys.executable, "-m", "analysis.cli", "pool", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "interrupt to end" in process.stdout.readline()
            with DevicePool() as pool, pytest.raises(CallerError, match="cannot serve at"), serving(path, pool):
                pass
            process.send_signal(end)
        assert path.exists() == there


def test_what_is_no_socket_of_ones_own_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CallerError, match="there is no pool at"):
        PoolClient(tmp_path / "none")
    with pytest.raises(CallerError, match="is no socket of this user"):
        PoolClient(tmp_path / "file")
    with DevicePool() as pool, pytest.raises(CallerError, match="cannot serve at"), serving(tmp_path / "file", pool):
        pass
    assert (tmp_path / "file").exists()


def test_a_part_is_of_the_run_that_it_names(devices, job):
    """Who orders jobs chooses their words: a part that has another's name gets no other run's result."""
    part = {**job, "part_of": "x", "segments": [0]}
    assert "replays" in devices.run(DEVICE, part)
    for other in ({"manifest": "00" * 32}, {"lab_key": "00" * 32}):
        assert "evidence_error" in devices.run(DEVICE, {**part, **other})
