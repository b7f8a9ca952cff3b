"""Replays on two nodes of a Ray cluster: the same verdict as in this process, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from analysis.cli import main
from firmware_sim.errors import DeviceError
from inspector.replay.ray_pool import RayPool
from monitor.transcript import RunFolder
from tests.measurements._ray_nodes import Nodes, device_processes, ray_nodes

DEVICE = "sse41"


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes, whose second one the tests of this module may kill."""
    pytest.importorskip("ray")
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture
def job(honest) -> dict[str, Any]:
    """Replay both segments of a run, time and again."""
    run = RunFolder(honest.run, honest.trust.labs["lab"])
    where = {"run": str(honest.run), "manifest": run.manifest_digest, "lab_key": honest.trust.labs["lab"].raw.hex()}
    return {"action": "replay", **where, "segments": [0, 1] * 8}


def wait_for(condition) -> Any:
    """What the condition gives, once it is true."""
    for _ in range(2000):
        found = condition()
        if found:
            return found
        time.sleep(0.03)
    raise AssertionError("it never happened")


def inspect(honest, trust, capsys, *words: str) -> Any:
    """The verdict without what differs from one replay to the next: how long it took."""
    given = ["inspect", str(honest.run), "--trust", str(trust), "--samples", "2", "--seed", "s", "--device", DEVICE]
    assert main([*given, "--now", "2026-01-01T00:30:00Z", "--confidence", "0.999", "--json", *words]) == 0
    verdict = json.loads(capsys.readouterr().out)
    for replay in verdict["evidence"]["replays"]:
        del replay["seconds"]
    return verdict


def test_an_inspection_on_ray_gives_the_verdict_of_one_here(nodes: Nodes, honest, tmp_path, capsys, kept_devices):
    trust = tmp_path / "trust.json"
    trust.write_text(json.dumps(honest.trust.to_json()))
    here, there = (inspect(honest, trust, capsys, *words) for words in ((), ("--ray", nodes.address)))
    assert there == here
    assert here["evidence"]["replays"][0]["segments"] == [0, 1]
    assert wait_for(lambda: not device_processes())


def test_whatever_is_killed_the_result_is_complete(nodes: Nodes, devices, job, kept_devices, capfd):
    second = nodes.newest
    with RayPool(nodes.address) as pool, ThreadPoolExecutor(1) as threads:
        found = threads.submit(pool.run, DEVICE, {**job, "segments": [0, 1] * 30})

        def more() -> None:
            known = pool.answered
            wait_for(lambda: pool.answered > known + 3 or found.done())
            assert not found.done()

        more()
        os.kill(next(iter(device_processes())), signal.SIGKILL)
        more()
        os.kill(next(iter(device_processes().values())), signal.SIGKILL)
        more()
        nodes.kill(second)
        assert found.result()["replays"] == devices.run(DEVICE, job)["replays"][:2] * 30
    assert "raylet" not in capfd.readouterr().out


def test_a_node_with_another_fingerprint_takes_no_part(nodes: Nodes, devices, job, tmp_path, kept_devices):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'default_worker.py' in ' '.join(sys.orig_argv):\n"
        "    from inspector.replay.pool import DevicePool\n"
        "    run = DevicePool.run\n"
        "    DevicePool.run = lambda *given: {**run(*given), 'fingerprint': 'wrong'}\n"
    )
    wrong = nodes.add(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    with RayPool(nodes.address) as pool:
        found = pool.run(DEVICE, job)
        assert wait_for(lambda: pool._seats.refusals or not pool.run(DEVICE, job))
        assert "its fingerprint is wrong, not sha256" in next(iter(pool._seats.refusals[DEVICE]))
        whole = devices.run(DEVICE, job)
        assert (found["replays"], found["fingerprint"]) == (whole["replays"], whole["fingerprint"])
    nodes.kill(wrong)


def test_c25_a_node_with_a_damaged_copy_is_dropped_and_named_and_others_replay_its_share(
    nodes: Nodes, devices, job, tmp_path, kept_devices
):
    damaged = shutil.copytree(job["run"], tmp_path / "damaged")
    path = damaged / "checkpoints" / "00000000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'default_worker.py' in ' '.join(sys.orig_argv):\n"
        "    from inspector.replay.pool import DevicePool\n"
        "    run = DevicePool.run\n"
        f"    own = {{'run': {str(damaged)!r}}}\n"
        "    DevicePool.run = lambda pool, name, job: run(pool, name, {**job, **(own if 'run' in job else {})})\n"
    )
    wrong = nodes.add(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    with RayPool(nodes.address) as pool:
        found = wait_for(lambda: (told := pool.run(DEVICE, job))["dropped"] and told)
        assert found["replays"] == devices.run(DEVICE, job)["replays"]
        assert "checkpoints/00000000.safetensors was altered" in found["dropped"][0]
    nodes.kill(wrong)


def test_what_a_node_cannot_read_is_not_the_lab_s_fault(nodes: Nodes, job, kept_devices, tmp_path):
    with RayPool(nodes.address, workers=1) as pool:
        for wrong in ({"run": "/nowhere"}, {"manifest": "00" * 32}):
            with pytest.raises(DeviceError, match="all nodes must find the runs under the same path"):
                pool.run(DEVICE, {**job, **wrong})
        part = tmp_path / "run"
        shutil.copytree(job["run"], part, ignore=shutil.ignore_patterns("checkpoints"))
        with pytest.raises(DeviceError, match=r"no node takes part: .*this copy is damaged: checkpoints/"):
            pool.run(DEVICE, {**job, "run": str(part)})
        other: Future[dict[str, Any]] = Future()
        other.set_result({"fingerprint": "another"})
        pool._seats.wanted["native-1"] = other
        with pytest.raises(DeviceError, match=r"no node takes part: .* is not the device native-1: its fingerprint is"):
            pool.run("native-1", job)


def refusal(honest, capsys, address: str) -> str:
    """The one line that a command ends with."""
    assert main(["replay", str(honest.run), "--segment", "0", "--device", DEVICE, "--ray", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:10001", "127.0.0.1", "[::1", "127.0.0.1:6379; id", ""])
def test_a_cluster_has_a_host_and_a_port(honest, capsys, address):
    pytest.importorskip("ray")
    assert "HOST:PORT" in refusal(honest, capsys, address)


def test_without_ray_or_a_cluster_there_is_one_line(honest, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'chipwitness[ray]'" in refusal(honest, capsys, "127.0.0.1:6379")
    monkeypatch.undo()
    pytest.importorskip("ray")
    assert "there is no Ray cluster at 127.0.0.1:1: " in refusal(honest, capsys, "127.0.0.1:1")


def test_another_machine_s_cluster_is_not_used_without_a_token(nodes: Nodes, honest, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inspector.replay._ray_access.is_here", lambda host: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name)
        assert "is another machine: set RAY_AUTH_MODE=token" in refusal(honest, capsys, nodes.address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)


def test_a_cluster_lets_no_other_token_in(nodes: Nodes):
    code = "import sys; from inspector.replay.ray_pool import RayPool; RayPool(sys.argv[1])"
    given = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "1"}
    done = subprocess.run([sys.executable, "-c", code, nodes.address], env=given, capture_output=True, text=True)
    assert done.returncode
    assert "does not let this process in" in done.stderr.splitlines()[-1]
