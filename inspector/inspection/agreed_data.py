"""Are a run's samples and their order those that its declaration gives? Nothing of them is decoded before that."""

from __future__ import annotations

import hashlib

from firmware_sim.errors import EvidenceError
from inspector.inspection.agreement import Agreement
from inspector.inspection.findings import Findings
from inspector.inspection.guards import Guard
from monitor.transcript import RunFolder
from monitor.transcript.declared_data import agreement_digest, declared_data
from monitor.transcript.layout import ORDER, SAMPLES

__all__ = ["check_agreed_data"]

_INDEX_BYTES = 8


def check_agreed_data(run: RunFolder, agreed: Agreement, findings: Findings) -> bool:
    """Compare the data files of a preset's run, by digest, with what lab and inspector both know.

    They are the preset's own samples in the order that the declared seed gives, which the inspector computes from its
    own copy; or data of the lab's that were countersigned. Data that are neither leave the verdict open if the run
    says that they are another set, and reject it if the run says that they are the preset's.

    Returns whether the data may be read.

    Raises:
        EvidenceError: a data file is missing, or too short for the declared steps.
    """
    entries = {path: run.files.get(path) for path in (SAMPLES, ORDER)}
    found = {path: entry.sha256 for path, entry in entries.items() if entry is not None}
    order = entries[ORDER]
    if order is None or len(found) != len(entries):
        raise EvidenceError("the run holds no samples or no order of samples")
    task = run.task
    if order.length < task.steps * task.batch_size * _INDEX_BYTES:
        raise EvidenceError(f"{ORDER} is too short for {task.steps} batches of {task.batch_size}")
    if agreement_digest(found) in agreed.always("data"):
        return True
    own = declared_data(task, None)
    where = run.where
    if {path: hashlib.sha256(content).hexdigest() for path, content in own.files.items()} == found:
        return True
    if run.metadata.data.get("set") == own.name:
        findings.add(
            Guard.DATA,
            f"the samples or their order are not those that preset {task.preset} and seed {task.seed} give",
            **where,
        )
        return False
    findings.doubt(
        f"the data are not the inspector's copy of preset {task.preset}'s, and were not countersigned: "
        f"{agreement_digest(found)}",
        **where,
    )
    return False
