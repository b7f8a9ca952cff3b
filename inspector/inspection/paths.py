"""Paths by which batches and constants reach the new state past every loss, and which of them were agreed.

The analysis may name a path too many, so that one which was not agreed leaves the verdict open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.inspection.agreement import Agreement
from inspector.inspection.findings import Findings
from inspector.inspection.guards import Guard
from monitor.declaration.statement import Declaration
from monitor.programs import Path, direct_paths
from monitor.programs.program import Program

__all__ = ["PathReport", "check_paths", "find_paths"]

PathReport = dict[str, list[dict[str, Any]]]
"""Paths as JSON-able values under ``not_agreed``, ``agreed`` and ``running_statistics``."""


def find_paths(programs: Mapping[str, Program], declared: Declaration, free: Collection[str] = ()) -> list[Path]:
    """All direct paths of a run's programs, under the declared layout of its state; ``free`` as agreed.

    Raises:
        EvidenceError: a program names memory that is not its own.
    """
    state = {f"{entry.kind}/{entry.name}": entry.shape for entry in declared.state}
    return direct_paths(programs, state, free=free)


def check_paths(
    programs: Mapping[str, Program],
    declared: Declaration,
    agreed: Agreement,
    findings: Findings,
    where: Mapping[str, Any],
) -> PathReport:
    """Each direct path is agreed, or ends in a running statistic; any other is a doubt."""
    report: PathReport = {"not_agreed": [], "agreed": [], "running_statistics": []}
    try:
        found = find_paths(programs, declared, agreed.free)
    except EvidenceError as error:
        findings.add(Guard.PROGRAM, str(error), **where)
        return report
    report["running_statistics"] = [path.to_json() for path in found if path.statistic]
    report["agreed"] = [path.to_json() for path in found if not path.statistic and is_agreed(path, agreed)]
    for path in not_agreed(found, agreed) if findings.is_on(Guard.PROGRAM) else ():
        report["not_agreed"].append(path.to_json())
        text = (
            f"program {path.program[:16]}…: {path.source!a:.200} reaches {path.tensor!a:.200} by {path.operator} "
            "without passing a loss, which was not agreed; who agrees to it signs "
            f"`declare countersign --direct-path {path.tensor!a:.200}`"
        )
        place = {"program": path.program, "tensor": path.tensor, "source": path.source, "operator": path.operator}
        findings.doubt(text, **place, **where)
    return report


def not_agreed(paths: Sequence[Path], agreed: Agreement) -> list[Path]:
    """The paths that neither end in a running statistic nor were agreed."""
    return [path for path in paths if not path.statistic and not is_agreed(path, agreed)]


def is_agreed(path: Path, agreed: Agreement) -> bool:
    """Whether lab and inspector agreed to a path: by the tensor that it ends in, or by its program."""
    return path.tensor in agreed.direct_paths or path.program in agreed.direct_paths
