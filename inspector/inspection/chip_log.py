"""A chip's log by itself, against its quote and certificates: what holds whatever any run declares."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from inspector.inspection.answers import EvidenceSource
from inspector.inspection.cases import open_case
from inspector.inspection.provenance import is_listed, is_sound
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Verdict

__all__ = ["verify_log"]

_SCOPE = "not covered: whether declared runs explain the log, and what was not reported to the chip"


def verify_log(chip: str, source: EvidenceSource, trust: Trust) -> Verdict:
    """Check one chip's log, quote, certificates and epoch keys under the trust file, and nothing of a run."""
    findings = Findings()
    evidence: dict[str, Any] = {"chip": chip}
    if is_listed(chip, trust, findings):
        case = findings.read(partial(open_case, chip, source, trust, None), chip=chip)
        if case is not None:
            is_sound(case, trust, findings)
            evidence |= {
                "certificate": str(case.identity.certificate_digest),
                "firmware": case.identity.firmware,
                "boot": case.quote.boot,
                "tick": case.quote.tick,
                "epoch": case.quote.epoch,
                "counter": case.quote.counter,
                "log_start": case.since.size,
                "log_head": case.quote.log_head.hex(),
                "records": dict(Counter(record.kind.name for record in case.records)),
            }
    size = sum(evidence.get("records", {}).values())
    start = evidence.get("log_start")
    behind = f" after a signed checkpoint at record {start}" if start else ""
    text = f"the log of chip {chip} with {size} records{behind} is whole, and is the log that the chip quoted to "
    text += trust.challenge_of(trust.chips.get(chip))[0]
    return Verdict.of(findings.found, findings.doubts, evidence, accept=text, scope=_SCOPE)
