"""Runs jobs in a device's own process: a line of JSON in, a line of JSON out.

Its argument, if there is one, is its number of threads.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import torch

from firmware_sim.errors import DeviceError, EvidenceError, Unreadable
from firmware_sim.evidence import canonical
from inspector.devices import current_device, device
from inspector.devices.emulation import install_from_environment
from inspector.replay.curve import run_curve
from inspector.replay.drift import run_drift
from inspector.replay.examination import run_examination
from inspector.replay.scheduler import Answer, Job
from inspector.replay.segment import Look, replay_segment
from inspector.replay.trial import run_trial
from inspector.replay.work import open_job_run
from monitor.environment import accelerator, check_subnormals, fingerprint, settings, versions
from monitor.numerics.known_answers import require_engines
from monitor.transcript import RunFolder


def main(threads: int | None = None) -> None:
    """Run jobs until the input ends; evidence at fault is a result, anything else that goes wrong ends the process.

    Args:
        threads: compute with at most so many. The fingerprint is that of the device with all its threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted too, and ends this process
    name = current_device()
    install_from_environment()
    wanted = device(name).capability
    found = settings()["cpu_capability"]
    if wanted is not None and found != wanted:
        raise DeviceError(f"this process computes with {found}, not {wanted}")
    check_subnormals()
    identity = {"device": name, "fingerprint": str(fingerprint()), "settings": settings(), "versions": versions()}
    if threads is not None:
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    gc.freeze()  # what is loaded by now stays: no collection goes through it again
    for job in _jobs():
        started = time.perf_counter()
        try:
            result = _ACTIONS[job["action"]](job)
        except Unreadable as error:
            result = {"unreadable": str(error)}
        except EvidenceError as error:
            result = {"evidence_error": str(error)}
        print(json.dumps({**identity, **result, "seconds": time.perf_counter() - started}), flush=True)


def _jobs() -> Iterator[Job]:
    """Jobs as they come in; once the input ends no one waits for an answer, and the process ends, also in a job."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield canonical.loads(lines.get())


def _fingerprint(_: Job) -> Answer:
    return {"engines": require_engines("exact", "rounded", device=str(accelerator()))}


_opened: dict[tuple[str, ...], RunFolder] = {}
"""The run of a job that came in parts, by the job's name and what says which run: the caller chooses the name."""


def _run_of(job: Job) -> RunFolder:
    """Open a job's run, once for all of its parts."""
    if "part_of" not in job:
        return open_job_run(job)
    part = tuple(str(job[name]) for name in ("part_of", "run", "lab_key", "manifest"))
    if part not in _opened:
        _opened.clear()
        _opened[part] = open_job_run(job)
    return _opened[part]


def _replay(job: Job) -> Answer:
    run = _run_of(job)
    require_engines(run.declared.numerics, device=str(accelerator()))
    inside = [(step, operators) for step, operators in job.get("inside", ())]
    replays = [replay_segment(run, i, inside=inside, look=Look.for_segment(job, i)) for i in job["segments"]]
    return {"replays": [each.to_json() for each in replays]}


_ACTIONS = {
    "curve": run_curve,
    "drift": run_drift,
    "examine": run_examination,
    "fingerprint": _fingerprint,
    "replay": _replay,
    "trial": run_trial,
}

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
