"""What a run would be on other devices without control: in plain FP32, and with its roundings decided freely."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from inspector.devices import device
from inspector.inspection.agreement import agreement_of, unread_files
from inspector.inspection.execution import examine_execution
from inspector.inspection.replays import Worker, verified_manifest
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import NotCountersigned, Trust
from inspector.inspection.verdict import Findings
from inspector.replay.drift import DRIFT_FORMATS, native_weights, record_decisions
from inspector.replay.pool import run_worker
from monitor.transcript import RunFolder
from monitor.transcript.state import decode_state

__all__ = ["drift", "drift_text", "executable_run"]


def drift(
    folder: Path, trust: Trust, devices: Sequence[str], *, worker: Worker = run_worker
) -> Iterator[dict[str, object]]:
    """Take a run's steps without control here and on each device; yield a row for each device.

    Keys: ``device``; of plain FP32 ``native_seconds`` (all steps, here), ``native_first_different_step`` (None if no
    state differs), ``native_step_digests_equal``, and at the end ``native_drift_max`` and ``native_weights_different``
    (a share); of the decisions that this process logs under ``policy`` (compute, grid) ``logged_decisions``,
    ``turned_decisions``, ``turned_by_step`` and ``diverges_from_step_without_log``.

    Raises:
        CallerError: an unknown device, or a run without steps.
        EvidenceError: there is no agreement to execute the run's programs, or they cannot be executed.
        DeviceError: a device broke.
    """
    for name in devices:
        device(name)
    run, named = executable_run(folder, trust)
    started = time.perf_counter()
    mine, digests = native_weights(run)
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch, f"step-{step}.log") for step in range(1, run.committed + 1)]
        for path, log in zip(logs, record_decisions(run), strict=True):
            path.write_bytes(log)
        weights = Path(scratch, "weights")
        job = {
            **named,
            "action": "drift",
            "logs": [str(path) for path in logs],
            "weights": str(weights),
        }
        for name in devices:
            result = worker(name, job)
            if "evidence_error" in result:
                raise EvidenceError(result["evidence_error"])
            equal = [one == other for one, other in zip(digests, result["native_digests"], strict=True)]
            decisions = result["decisions"]
            yield {
                "device": name,
                "native_seconds": seconds,
                "native_first_different_step": equal.index(False) + 1 if False in equal else None,
                "native_step_digests_equal": sum(equal),
                **_distance(mine, decode_state(weights.read_bytes(), "the weights of a device")),
                "policy": [DRIFT_FORMATS.compute, DRIFT_FORMATS.grid],
                "logged_decisions": sum(decisions["logged"]),
                "turned_decisions": sum(decisions["turned"]),
                "turned_by_step": decisions["turned"],
                "diverges_from_step_without_log": decisions["first_turned_step"],
            }


def executable_run(folder: Path, trust: Trust) -> tuple[RunFolder, dict[str, str]]:
    """Open a run whose programs devices may execute; returns also how a job names it (``inspector.replay.work``).

    Raises:
        CallerError: it has no step, or its lab's declaration is not countersigned, or a program that it runs.
        EvidenceError: its programs are not those that were agreed on.
    """
    run = open_run(folder, trust)
    leaves, _ = run.load_steps()
    if len(leaves) < 2:
        raise CallerError(f"{folder.name} has no step yet")
    findings, agreed = Findings(), agreement_of(run, trust)
    unread_files(run, leaves, agreed, findings)
    if not examine_execution(run, leaves, agreed, findings).executable:
        raise (EvidenceError if findings.found else NotCountersigned)((findings.found + findings.doubts)[0].text)
    key = trust.key_of(run.metadata.lab).raw.hex()
    return run, {"run": str(folder.resolve()), "manifest": verified_manifest(run), "lab_key": key}


def drift_text(row: Mapping[str, Any]) -> str:
    """A row of ``drift`` in words."""
    parted, first = row["native_first_different_step"], row["diverges_from_step_without_log"]
    compute, grid = row["policy"]
    return (
        f"in plain FP32 {row['device']} "
        + (
            "ends in the same bits"
            if parted is None
            else f"parts from this one at step {parted} and ends {row['native_drift_max']:.1e} away "
            f"({100 * row['native_weights_different']:.0f} % of the weights differ)"
        )
        + f"; under {compute} → {grid}, {row['turned_decisions']} of {row['logged_decisions']} logged roundings would "
        "have gone the other way" + ("" if first is None else f", the first in step {first}")
    )


def _distance(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference of two sets of weights, and the share of elements that differ."""
    pairs = [(tensor.cpu().double(), theirs[name].double()) for name, tensor in mine.items()]
    return {
        "native_drift_max": max(float((one - other).abs().max()) for one, other in pairs),
        "native_weights_different": sum(int((one != other).sum()) for one, other in pairs)
        / sum(one.numel() for one, _ in pairs),
    }
