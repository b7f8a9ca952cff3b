"""Judges the rules of an inspectorate on what an inspection has found, lab by lab, and joins them to its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from firmware_sim.errors import DeviceError
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.judging import Worker, verified_manifest
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.rules.quantities import Finding, flop, hyper, meter
from inspector.rules.reading import Expression, Rule, Rules, digests_name
from inspector.rules.truth import Truth

__all__ = ["apply_rules"]

_OUTCOMES = {Truth.FAIL: Outcome.REJECT, Truth.UNDECIDED: Outcome.INCONCLUSIVE}
_NO_SCORE = "no score: it is unfinished, or its program does not read the test set, or the loss is not finite"
_Results = Mapping[tuple[str, str], Mapping[str, Any]]
"""What devices answered, by run and device; nothing where one broke."""


def apply_rules(
    verdict: Verdict, rules: Rules, case: CaseFile, trust: Trust, settings: Settings, *, worker: Worker
) -> Verdict:
    """The verdict with the rules: a lab that breaks what they require is rejected, and nothing is left open in silence.

    Evidence ``rules`` has ``digest``, ``rules``, ``require``, ``found`` (of each rule a list of labs, result, text,
    value and where), ``results`` (of each rule, pass, fail or undecided) and ``labs`` (of each, what is required).

    Args:
        case: what the inspection met; results of examinations are added to ``case.replays``.
        worker: runs what only those may see who may see samples and weights.
    """
    labs = sorted(verdict.evidence.get("labs", {}))
    if "draw" not in verdict.evidence:
        text = "not every run could be read"
        unread = Finding(labs=tuple(labs), truth=Truth.UNDECIDED, text=text, value=None, where={})
        found = {name: [unread] for name in rules.rules}
    else:
        results = _examine(rules, case, trust, settings, worker)
        found = {name: list(_find(rule, case, verdict, trust, settings, results)) for name, rule in rules.rules.items()}
    required = {lab: _required(rules.require, found, lab) for lab in labs}
    evidence = {
        "digest": rules.digest,
        **rules.to_json(),
        "found": {name: [each.to_json() for each in findings] for name, findings in found.items()},
        "results": {name: Truth.all(each.truth for each in findings).value for name, findings in found.items()},
        "labs": {lab: truth.value for lab, truth in required.items()},
    }
    outcomes = {lab: _OUTCOMES[truth] for lab, truth in required.items() if truth in _OUTCOMES}
    reasons = [reason for lab in outcomes for reason in _reasons(rules, found, lab)]
    told = "what the rules require holds: " + ", ".join(f"{name} {each}" for name, each in evidence["results"].items())
    return verdict.joined(reasons, outcomes, {"rules": evidence}, told=told)


def _examine(rules: Rules, case: CaseFile, trust: Trust, settings: Settings, worker: Worker) -> _Results:
    """Have samples and weights looked at: samples on one device, weights on each."""
    kinds = {kind: [each for each in rules.rules.values() if each.kind == kind] for kind in ("data", "score")}
    sets = {digests_name(each.about["digests"]): list(each.about["digests"]) for each in kinds["data"]}
    tests = {each.about["test_sha256"]: str(each.about["test"].resolve()) for each in kinds["score"]}
    results: dict[tuple[str, str], Mapping[str, Any]] = {}
    for item in case.transcripts if sets or tests else ():
        for number, device in enumerate(settings.devices):
            wanted = {"sets": {} if number else sets, "tests": tests if item.execution.executable else {}}
            if not any(wanted.values()):
                continue
            job = {
                "action": "examine",
                "run": str(item.run.folder.resolve()),
                "manifest": verified_manifest(item.run),
                "lab_key": trust.key_of(item.run.metadata.lab).raw.hex(),
                **wanted,
            }
            try:
                result = worker(device, job)
            except DeviceError as error:
                result = {"device_error": str(error)}
            results[item.run.manifest.run, device] = result
            case.examinations += [result] if "signed" in result else []
    return results


def _find(
    rule: Rule, case: CaseFile, verdict: Verdict, trust: Trust, settings: Settings, results: _Results
) -> Iterator[Finding]:
    transcripts, evidence = case.transcripts, verdict.evidence
    judge: Mapping[str, Callable[[], Iterator[Finding]]] = {
        "flop": lambda: flop(rule, transcripts, evidence["lineages"]),
        "hyper": lambda: hyper(rule, transcripts),
        "meter": lambda: meter(rule, transcripts, evidence.get("chips", []), trust.chips),
        "data": lambda: _data(rule, transcripts, settings, results),
        "score": lambda: _score(rule, transcripts, settings, results),
    }
    return judge[rule.kind]()


def _data(rule: Rule, transcripts: Sequence[Transcript], settings: Settings, results: _Results) -> Iterator[Finding]:
    name = digests_name(rule.about["digests"])
    for item in transcripts:
        device = settings.devices[0]
        result = results.get((item.run.manifest.run, device), {})
        told, text = result.get("data", {}).get(name), f"run {item.run.folder.name}"
        where: dict[str, Any] = {"run": item.run.folder.name, "device": device}
        if "evidence_error" in result:
            yield _finding(item, Truth.FAIL, f"{text}: {result['evidence_error']}", None, where)
        elif not told or not told["places"]:
            why = result.get("device_error", "its batches do not show which rows are one sample")
            yield _finding(item, Truth.UNDECIDED, f"{text}: {why}", None, where)
        else:
            share = told["matched"] / told["places"]
            text += f": {told['matched']} of {told['places']} places hold a sample of set {name[:16]}…"
            if told["first"] is not None:
                text += f", the first in step {told['first'][0]}, place {told['first'][1]}"
                where |= {"step": told["first"][0], "place": told["first"][1]}
            yield _finding(item, Truth.PASS if rule.holds(share) else Truth.FAIL, text, share, where)


def _score(rule: Rule, transcripts: Sequence[Transcript], settings: Settings, results: _Results) -> Iterator[Finding]:
    test = rule.about["test_sha256"]
    for item in transcripts:
        for device in settings.devices:
            result = results.get((item.run.manifest.run, device), {})
            score, text = result.get("scores", {}).get(test), f"run {item.run.folder.name}"
            where = {"run": item.run.folder.name, "device": device, "test": test}
            if score is None:
                why = result.get("device_error") or result.get("evidence_error") or _NO_SCORE
                yield _finding(item, Truth.UNDECIDED, f"{text}: {why}", None, where)
                continue
            text += f": its final weights have loss {score:.6g} on test set {test[:16]}…, on {device}"
            yield _finding(item, Truth.PASS if rule.holds(score) else Truth.FAIL, text, score, where)


def _finding(item: Transcript, truth: Truth, text: str, value: float | None, where: Mapping[str, Any]) -> Finding:
    return Finding(labs=(item.run.metadata.lab,), truth=truth, text=text, value=value, where=where)


def _required(expression: Expression, found: Mapping[str, Sequence[Finding]], lab: str) -> Truth:
    """What is required, of one lab."""
    word, parts = expression
    if word == "rule":
        return Truth.all(each.truth for each in found[parts[0]] if lab in each.labs)
    values = [_required(part, found, lab) for part in parts]
    return values[0].opposite if word == "not" else Truth.all(values) if word == "all" else Truth.any(values)


def _reasons(rules: Rules, found: Mapping[str, Sequence[Finding]], lab: str) -> Iterator[Reason]:
    """Why a lab does not meet the rules: each that it breaks or that is open, and for ``not`` those that hold."""
    for name, wanted in _blamed(rules.require, found, lab, Truth.PASS):
        rule = rules.rules[name]
        for each in found[name]:
            if lab in each.labs and each.truth is not wanted:
                how = {Truth.FAIL: "is broken", Truth.UNDECIDED: "is undecided", Truth.PASS: "holds and must not"}
                text = f"rule {name!a:.82} ({rule.kind} {rule.range}) {how[each.truth]}: {each.text}"
                yield Reason(guard=Guard.RULES.value, text=text, where={"lab": lab, "rule": name, **each.where})


def _blamed(
    expression: Expression, found: Mapping[str, Sequence[Finding]], lab: str, wanted: Truth
) -> Iterator[tuple[str, Truth]]:
    """The rules because of which an expression has not the wanted value, with the value that each should have."""
    word, parts = expression
    if _required(expression, found, lab) is wanted:
        return
    if word == "rule":
        yield parts[0], wanted
        return
    for part in parts:
        yield from _blamed(part, found, lab, wanted.opposite if word == "not" else wanted)
