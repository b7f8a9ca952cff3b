"""Judges the rules of an inspectorate on what an inspection has found, lab by lab, and joins them to its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firmware_sim.errors import DeviceError, EvidenceError
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.replays import Worker, verified_manifest
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.rules.observations import Examined, examined_finding
from inspector.rules.quantities import QUANTITIES, Basis, Finding
from inspector.rules.rule_files import Expression, Rule, Rules, test_name
from inspector.rules.truth import Truth
from monitor.replay.steps import execution_of

__all__ = ["apply_rules", "required_of"]

_OUTCOMES = {Truth.FAIL: Outcome.REJECT, Truth.UNDECIDED: Outcome.INCONCLUSIVE}


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
    required = {lab: required_of(rules.require, found, lab) for lab in labs}
    evidence = {
        "digest": rules.digest,
        **rules.to_json(),
        "found": {name: [each.to_json() for each in findings] for name, findings in found.items()},
        "results": {name: Truth.all(each.truth for each in findings).value for name, findings in found.items()},
        "labs": {lab: truth.value for lab, truth in required.items()},
    }
    outcomes = {lab: _OUTCOMES[truth] for lab, truth in required.items() if truth in _OUTCOMES}
    reasons = [reason for lab in outcomes for reason in _reasons(rules, found, lab)]
    note = "what the rules require holds: " + ", ".join(_words(rules.rules[name], found[name]) for name in rules.rules)
    return verdict.joined(reasons, outcomes, {"rules": evidence}, note=note)


def _words(rule: Rule, found: Sequence[Finding], most: int = 4) -> str:
    """The result of a rule, and of samples and weights what was found."""
    text = f"{rule.name} {Truth.all(each.truth for each in found).value}"
    if rule.kind in ("data", "score"):
        more = [f"and {len(found) - most} more"] if len(found) > most else []
        text += f" ({'; '.join([*(each.text for each in found[:most]), *more])})"
    return text


def _examine(
    rules: Rules, case: CaseFile, trust: Trust, settings: Settings, worker: Worker
) -> dict[tuple[str, str], Examined | str]:
    """Have samples and weights looked at, samples on one device, weights on each; or why that was not done."""
    sets = {each.about["set"]: list(each.about["digests"]) for each in rules.of_kind("data")}
    results: dict[tuple[str, str], Examined | str] = {}
    for item in case.transcripts:
        tests = {
            test_name(each): {"path": str(each.about["test"].resolve()), "programs": scoring(each, item)}
            for each in rules.of_kind("score")
        }
        for number, device in enumerate(settings.devices):
            wanted = {"sets": {} if number else sets, "tests": tests if item.execution.executable else {}}
            if not any(wanted.values()):
                continue
            job = {
                "action": "examine",
                "run": str(item.run.folder.resolve()),
                "manifest": verified_manifest(item.run),
                "lab_key": trust.key_of(item.run.metadata.lab).raw.hex(),
                "programs": sorted(item.agreed.programs),
                **wanted,
            }
            try:
                result = worker(device, job)
                results[item.run.manifest.run, device] = _found(result)
                case.examinations += [result]
            except DeviceError as error:
                results[item.run.manifest.run, device] = str(error)
            except EvidenceError as error:
                results[item.run.manifest.run, device] = f"device {device} gave a malformed answer: {error}"
    return results


def _found(result: Mapping[str, Any]) -> Examined | str:
    """What a device found, or its error if it has one: a cluster then signs that it could read nothing."""
    if "evidence_error" not in result:
        return Examined.from_json(result.get("examined"))
    error = result["evidence_error"]
    if not isinstance(error, str) or not error:
        raise EvidenceError("its error has no text")
    return error


def scoring(rule: Rule, item: Transcript) -> list[str]:
    """The countersigned programs that score a run: the one that the rule names, or each that a step of training runs.

    So the lab has no say in it: where these do not all read the test set, or do not agree, nothing is decided.
    """
    named = rule.about.get("program")
    ran = {execution_of(leaf).program for leaf in item.leaves[1:] if leaf.trains or named is not None}
    return sorted(each for each in ran.intersection(item.agreed.programs) if named in (None, each))


def _find(
    rule: Rule,
    case: CaseFile,
    verdict: Verdict,
    trust: Trust,
    settings: Settings,
    results: Mapping[tuple[str, str], Examined | str],
) -> Iterator[Finding]:
    if rule.kind in QUANTITIES:
        evidence = verdict.evidence
        basis = Basis(
            transcripts=case.transcripts,
            lineages=evidence["lineages"],
            replays=evidence.get("replays", []),
            reports=[*evidence.get("chips", []), *evidence.get("past_spans", [])],
            owners=trust.chips,
            unseen=case.unseen,
        )
        yield from QUANTITIES[rule.kind](rule, basis)
    else:
        for item in case.transcripts:
            for device in settings.devices if rule.kind == "score" else settings.devices[:1]:
                found = results.get((item.run.manifest.run, device), "its programs are not agreed, so that none runs")
                yield examined_finding(rule, item.run.where, device, found)


def required_of(
    expression: Expression, found: Mapping[str, Sequence[Finding]], lab: str, wanted: Truth = Truth.PASS
) -> Truth:
    """What is required, of one lab.

    Args:
        wanted: FAIL inside of ``not``, where what has nothing to bound is undecided; elsewhere it holds.
    """
    word, parts = expression
    if word == "rule":
        return Truth.all(each.truth for each in _of_lab(found[parts[0]], lab, wanted))
    inside = wanted.opposite if word == "not" else wanted
    values = [required_of(part, found, lab, inside) for part in parts]
    return values[0].opposite if word == "not" else Truth.all(values) if word == "all" else Truth.any(values)


def _of_lab(found: Sequence[Finding], lab: str, wanted: Truth) -> list[Finding]:
    """What a rule found of a lab."""
    mine = [each for each in found if lab in each.labs]
    text = f"nothing of lab {lab} was found that it bounds"
    nothing = Finding(labs=(lab,), truth=Truth.UNDECIDED, text=text, value=None, where={})
    return mine if mine or wanted is Truth.PASS else [nothing]


def _reasons(rules: Rules, found: Mapping[str, Sequence[Finding]], lab: str) -> Iterator[Reason]:
    """Why a lab does not meet the rules: each that it breaks or that is open, and for ``not`` those that hold."""
    for name, wanted in _blamed(rules.require, found, lab, Truth.PASS):
        rule = rules.rules[name]
        for each in _of_lab(found[name], lab, wanted):
            if each.truth is not wanted:
                how = {Truth.FAIL: "is broken", Truth.UNDECIDED: "is undecided", Truth.PASS: "holds and must not"}
                text = f"rule {name!a:.82} ({rule.kind} {rule.range}) {how[each.truth]}: {each.text}"
                yield Reason(guard=Guard.RULES.value, text=text, where={"lab": lab, "rule": name, **each.where})


def _blamed(
    expression: Expression, found: Mapping[str, Sequence[Finding]], lab: str, wanted: Truth
) -> Iterator[tuple[str, Truth]]:
    """The rules because of which an expression has not the wanted value, with the value that each should have."""
    word, parts = expression
    if required_of(expression, found, lab, wanted) is wanted:
        return
    if word == "rule":
        yield parts[0], wanted
        return
    for part in parts:
        yield from _blamed(part, found, lab, wanted.opposite if word == "not" else wanted)
