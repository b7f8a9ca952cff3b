"""The form of each message of a round: what another party signed in another form counts as never sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from firmware_sim.errors import EvidenceError

__all__ = ["check_form"]

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_JOB = ("run", "action", "manifest", "lab_key")


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_job(value: object) -> bool:
    """Whether a job has what the cluster itself reads of one; a device judges the rest."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in _JOB)


def _are_rules(value: object) -> bool:
    """Whether rules say of what kind each is, which is what a lab reads of them."""
    rules = value.get("rules") if isinstance(value, dict) else None
    return isinstance(rules, list) and all(
        isinstance(each, dict) and isinstance(each.get("kind"), str) for each in rules
    )


RESULT: Mapping[str, Any] = {
    "fingerprint?": str,
    "seconds?": float,
    "signed?": str,
    "replays?": [{str: object}],
    "examined?": {str: object},
    "device_error?": str,
    "evidence_error?": str,
}
"""Of a device; what it replayed and examined is parsed where it is judged."""

_RECEIPT: Mapping[str, Any] = {"kind": str, "sender": str, "message": str, "time": str}

FORMS: Mapping[str, Any] = {
    "announcement": {
        "round": int,
        "time": str,
        "settings": {str: object},
        "deadlines": {"heads": str, "answers": str, "openings": str, "results": str},
        "refusals": int,
        "labs": [str],
        "chips": {str: str},
        "rules?": _are_rules,
    },
    "heads": {"heads": [str], "names?": [str]},
    "draw": {
        "time": str,
        "secret": str,
        "heads": [_is_hash],
        "silent": [str],
        "receipts": [_RECEIPT],
        "chips": {str: _is_hash},
    },
    "answers": {"chips": {str: {str: str}}},
    "order": {
        "time": str,
        "jobs": [{"device": str, "job": _is_job}],
        "open": {str: {"head": str, "since": int, "segments": [int], "last": bool, "batches": bool}},
    },
    "openings": {"runs": [{"head": str, "segments": [int], "files": int, "bytes": int, "listed": str}]},
    "results": {
        "results": [{"device": str, "action": str, "manifest": str, "result": RESULT}],
        "checks": [str],
        "refused": int,
    },
    "receipts": {"receipts": [_RECEIPT]},
}
"""By kind: a type, a test, a list of one form, a mapping of any texts to one form, or one form for each of the keys.

A key with a question mark may be left out.
"""


def check_form(kind: str, predicate: object) -> None:
    """Check what a message says; EvidenceError if that has another form than its kind's."""
    if not _fits(predicate, FORMS[kind]):
        raise EvidenceError(f"a message of kind {kind} is malformed")


def _fits(value: object, form: Any) -> bool:
    if isinstance(form, type):
        return isinstance(value, form) and not (form is int and isinstance(value, bool))
    if callable(form):
        return bool(form(value))
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if not isinstance(value, dict):
        return False
    if str in form:
        return all(_fits(each, form[str]) for each in value.values())
    needed = {key for key in form if not key.endswith("?")}
    known = {key.removesuffix("?"): part for key, part in form.items()}
    return needed <= set(value) <= set(known) and all(_fits(part, known[key]) for key, part in value.items())
