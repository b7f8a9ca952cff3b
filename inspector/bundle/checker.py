"""Checks a bundle with a trust file alone: what follows from signatures and proofs, and on whose word the rest is.

Laws:
    1. Everything in it is bound: an item that is missing, extra or altered, or another byte anywhere, fails.
    2. The draw, the segments and the odds are computed again from the secret that the verdict opens.
    3. An ACCEPT needs every piece: of each drawn chip evidence that is sound, of each segment a replay on each device
       that a known cluster signed, that reaches the leaves under the lab's head, and that passes through what the
       chips' snapshots inside of its steps saw.
    4. A REJECT needs a ground that its inspectorate cannot make up: two heads that the lab signed and that contradict
       each other (one head twice does not), a record that a chip signed and the head contradicts, or a replay that a
       known cluster signed and that departs from the lab's leaves or shows a batch on a path without an agreement.
       Where there is none, it rests on the inspectorate's word, and is INCONCLUSIVE for everybody else. A step about
       which lab and cluster differ is contested until one opened operator decides (``contests``): a cluster that is
       wrong there counts for nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from firmware_sim.errors import CallerError, ChipwitnessError, EvidenceError
from firmware_sim.evidence import SignatureError, VerifyingKey
from inspector.bundle.checks import signed_check
from inspector.bundle.completeness import check_complete
from inspector.bundle.contents import Bundle
from inspector.bundle.contests import CLUSTER, LAB, Decision, decide, departure
from inspector.bundle.evidence import CheckedBundle
from inspector.bundle.examinations import check_rules, signed_examination
from inspector.bundle.grounds import (
    HeldChip,
    chip_grounds,
    chips_in,
    difference,
    inside_difference,
    pace_grounds,
    signed_replay,
    terms_of,
    witnessed,
)
from inspector.bundle.models import Model, check_files, digest_of_files
from inspector.bundle.redraw import accepted_up_to, covered, drawn_again, settings_from
from inspector.bundle.replays import SignedReplay
from inspector.bundle.runs import HeldRun, digest_in, forks, named, runs_in
from inspector.inspection.document import Evidence, LineageEvidence, ReplayEvidence
from inspector.inspection.guards import Settings
from inspector.inspection.lineage import kind_of, past_unknown
from inspector.inspection.rounding_logs import examine
from inspector.inspection.trust import Trust, parse_challenges, parse_rates
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.inspection.wording import ONE_PROCESS, REVEALS, caveats, scope
from inspector.replay.decisions import Decisions
from monitor.transcript import parse_time

__all__ = ["NotAbout", "check_bundle", "contested_in"]

_CONTESTED = ": contested, rests on cluster key "
_WORD = "that files, programs, numbers, data and meters are as they were declared, and which steps are evaluations"


class NotAbout(CallerError):
    """A file given with a bundle is not about it."""


def check_bundle(data: bytes, trust: Trust, *, model: Model | None = None, contests: Sequence[bytes] = ()) -> Verdict:
    """Verify a bundle, and return the verdict that it shows.

    Args:
        contests: games of lab and cluster about a step on which they differ; the wrong one of them is named.
        model: files that the bundle has to be about, under the same names.

    Returns:
        The bundle's own outcome, but INCONCLUSIVE for a REJECT that only its own word supports. A bundle that is not
        sound is a REJECT of the bundle: ``evidence["verifies"]`` is false, and nothing is said of the lab.

    Raises:
        CallerError: the trust file names no inspectorate.
        NotAbout: a contest or the model is not about this bundle, which shows what it shows without it.
    """
    if not trust.inspectorates:
        raise CallerError("the trust file names no inspectorate, so no verdict can be trusted")
    evidence = CheckedBundle(verifies=False)
    try:
        signer, bundle = _opened(data, trust)
        outcome, text, grounds = _check(bundle, trust, evidence, contests)
    except NotAbout:
        raise
    except (EvidenceError, CallerError) as error:
        return _only(Outcome.REJECT, f"the bundle does not verify: {error}", {"verifies": False})
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        text = f"the bundle does not verify: a part of it is malformed: {error!a:.200}"
        return _only(Outcome.REJECT, text, {"verifies": False})
    if model is not None:
        try:
            evidence["model"] = check_files(evidence.get("model"), model)
        except EvidenceError as error:
            raise NotAbout(str(error)) from None
    said = f"inspectorate key {signer.key_id} says {outcome.value}"
    said += f", judged at {evidence['time']}" if evidence["time"] and outcome is not Outcome.ACCEPT else ""
    evidence |= CheckedBundle(verifies=True, verdict=outcome.value, inspectorate=signer.key_id, grounds=grounds)
    if outcome is Outcome.REJECT and not grounds:
        wrong = [each["text"] for each in evidence.get("decided", []) if CLUSTER in each["guilty"]]
        text = f"{said} because of what a cluster said, and the cluster is wrong: {'; '.join(wrong)}"
        text = text if wrong else f"{said}, but nothing in the bundle shows that: it is only the inspectorate's word"
        return _only(Outcome.INCONCLUSIVE, text, evidence)
    return _only(outcome, f"{said}: {text}", evidence)


def _only(outcome: Outcome, text: str, evidence: CheckedBundle) -> Verdict:
    texts = {"bundle": text, "scope": evidence.get("scope"), "reveals": REVEALS if evidence["verifies"] else None}
    reasons = tuple(Reason(guard=guard, text=each) for guard, each in texts.items() if each)
    return Verdict(outcome=outcome, reasons=reasons, evidence=evidence)


def _opened(data: bytes, trust: Trust) -> tuple[VerifyingKey, Bundle]:
    error: EvidenceError | None = None
    for key in sorted(trust.inspectorates, key=lambda each: each.raw):
        try:
            return key, Bundle.open(data, key)
        except EvidenceError as failure:
            error = failure if error is None or not isinstance(failure, SignatureError) else error
    assert error is not None
    raise error


def contested_in(data: bytes, trust: Trust) -> list[tuple[HeldRun, VerifyingKey, SignedReplay]]:
    """Runs of a bundle, each with a cluster's replay that reaches a step otherwise than the lab signed it.

    Raises:
        EvidenceError: no inspectorate of the trust file signed the bundle, or a part of it is malformed.
    """
    _, bundle = _opened(data, trust)
    trust = replace(trust, countersigned=trust.countersigned | named(bundle, "declarations/"))
    runs = {run.head_digest: run for run in runs_in(bundle, trust)}
    results = [signed_replay(content, trust) for content in sorted(named(bundle, "replays/"))]
    found = [(runs[each.head], key, each) for key, each in results if each.head in runs]
    return [(run, key, each) for run, key, each in found if departure(each, run) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A bundle, opened: what its verdict states, and the evidence that it holds.

    Attributes:
        trust: with the challenges that the verdict names and the declarations that the bundle holds.
        replays: each with the key of the cluster that signed it.
    """

    bundle: Bundle
    trust: Trust
    outcome: Outcome
    settings: Settings
    stated: Evidence
    runs: Sequence[HeldRun]
    chips: Sequence[HeldChip]
    replays: Sequence[tuple[VerifyingKey, SignedReplay]]

    @classmethod
    def of(cls, bundle: Bundle, trust: Trust) -> _Parts:
        """Open a bundle's parts; EvidenceError where one is not signed as it must be."""
        challenge = bundle.predicate["challenge"]
        trust = replace(
            trust,
            verifier=challenge["verifier"],
            nonce=bytes.fromhex(challenge["nonce"]),
            challenges=parse_challenges(challenge.get("challenges", {})),
            countersigned=trust.countersigned | named(bundle, "declarations/"),
        )
        return cls(
            bundle=bundle,
            trust=trust,
            outcome=Outcome(bundle.predicate["outcome"]),
            settings=settings_from(bundle.predicate["settings"]),
            stated=cast(Evidence, bundle.predicate["evidence"]),
            runs=runs_in(bundle, trust),
            replays=[signed_replay(content, trust) for content in sorted(named(bundle, "replays/"))],
            chips=chips_in(bundle, trust),
        )

    @property
    def results(self) -> list[SignedReplay]:
        """The replays, whoever signed them."""
        return [result for _, result in self.replays]

    @property
    def accepts(self) -> bool:
        """Whether the verdict accepts."""
        return self.outcome is Outcome.ACCEPT


def _check(
    bundle: Bundle, trust: Trust, evidence: CheckedBundle, contests: Sequence[bytes]
) -> tuple[Outcome, str, list[str]]:
    """The outcome, what it says and its grounds; what the verdict states goes to ``evidence``."""
    parts = _Parts.of(bundle, trust)
    evidence |= _stated(parts)
    runs, chips, stated = parts.runs, parts.chips, parts.stated
    rates = {**parse_rates(stated.get("rates", {})), **trust.rates}
    grounds = [*forks(bundle, runs, parts.trust), *chip_grounds(chips, runs), *pace_grounds(chips, rates)]
    chosen = drawn_again(stated, runs, chips, parts.trust, parts.settings)
    decisions = [_decision(each, runs, parts.replays, parts.trust) for each in contests]
    evidence["decided"] = [
        {"run": each.head, "step": each.step, "guilty": list(each.guilty), "text": each.text} for each in decisions
    ]
    grounds += [*_replay_grounds(parts, decisions), *_cluster_grounds(parts), *_rule_grounds(parts)]
    wrong = [each.key.key_id for each in decisions if CLUSTER in each.guilty]
    grounds = [each for each in grounds if not any(each.endswith(f"{_CONTESTED}{key}") for key in wrong)]
    if parts.outcome is Outcome.REJECT:
        return parts.outcome, "; ".join(grounds), grounds
    if grounds:
        raise EvidenceError(f"its verdict is {parts.outcome.value}, but it contains a reason to reject: {grounds[0]}")
    if parts.outcome is Outcome.INCONCLUSIVE:
        return parts.outcome, "for the reasons that it gives", grounds
    check_complete(runs, chips, parts.results, chosen, stated, parts.trust)
    text = _accepted(parts)
    if "model" in evidence:
        text += f", and that {evidence['model']['name']!a:.100} holds the weights with which a run of these ended"
    return parts.outcome, text + _worth(runs, parts.results, stated, parts.trust, evidence), grounds


def _stated(parts: _Parts) -> CheckedBundle:
    """What the verdict states, for the evidence of the check."""
    stated = parts.stated
    if stated.get("time") is not None:
        parse_time(stated["time"])
    found: CheckedBundle = {
        "runs": [{"run_id": run.run_id, "lab": run.lab, "head": run.head_digest} for run in parts.runs],
        "drawn_chips": stated.get("drawn_chips"),
        "odds": stated.get("odds"),
        "reasons": parts.bundle.predicate["reasons"],
        "time": stated.get("time"),
        "simulated_draw": stated.get("draw", {}).get("simulated"),
        "one_process": "one_process" in stated,
    }
    if "model" in stated:
        found["model"] = _model(stated["model"], parts.runs)
    if "rules" in stated:
        found["rules"] = stated["rules"]
    return found


def _replay_grounds(parts: _Parts, decisions: Sequence[Decision]) -> Iterator[str]:
    """What the cluster's replays show against labs; what is contested says on whose key it rests."""
    runs = {run.head_digest: run for run in parts.runs}
    for key, result in parts.replays:
        run = runs.get(result.head)
        if run is None:
            raise EvidenceError("a replay is about a run that the bundle does not hold")
        found = difference(result, run) or inside_difference(result, run, parts.chips)
        found = found or witnessed(result, run, parts.trust, parts.stated)
        if found:
            text = _decided(decisions, run, departure(result, run))
            text = text or f"{found} on {result.device}{_CONTESTED}{key.key_id}"
            yield f"{run.lab}, run {run.run_id[:16]}…: {text}"


def _cluster_grounds(parts: _Parts) -> Iterator[str]:
    """What the cluster says of files that the inspectorate was not shown."""
    bundle, trust = parts.bundle, parts.trust
    heads = {digest_in(bundle, path) for path in bundle.items if path.endswith("/head.json")}
    for key, check in (signed_check(content, trust) for content in sorted(named(bundle, "checks/"))):
        if check.head not in heads:
            raise EvidenceError("a check is about a run that the bundle does not hold")
        if parts.accepts and check.checked.open:
            raise EvidenceError("the verdict is ACCEPT, although the cluster could not decide everything")
        if check.text:
            yield f"{check.text}{_CONTESTED}{key.key_id}"


def _rule_grounds(parts: _Parts) -> list[str]:
    """What the inspectorate's rules show, by what the cluster answered for their sake."""
    examined = [signed_examination(each, parts.trust) for each in sorted(named(parts.bundle, "examinations/"))]
    if not {each.head for _, each in examined} <= {run.head_digest for run in parts.runs}:
        raise EvidenceError("an examination is about a run that the bundle does not hold")
    if "rules" not in parts.stated:
        return []
    mine = [(run.run_id, run.lab, run.head_digest) for run in parts.runs]
    return check_rules(parts.stated["rules"], mine, examined, parts.settings, accepts=parts.accepts)


def _accepted(parts: _Parts) -> str:
    """What an acceptance shows, and what it takes from the inspectorate."""
    runs, replays = parts.runs, [each for result in parts.results for each in result.replays]
    text = f"{len(parts.chips)} drawn chips and {sum(len(each.leaves) for each in replays)} replayed steps of "
    text += f"{len(runs)} runs are as their labs signed them; "
    for run in runs:
        last, since = covered(run, parts.stated), accepted_up_to(run, parts.stated)
        text += "" if run.head.finished else f"run {run.run_id[:16]}… is unfinished, and is judged up to step {last}; "
        text += f"up to step {since} it rests on an earlier verdict; " if since else ""
    text += f"replays rest on cluster key {parts.replays[-1][0].key_id}; " if parts.replays else ""
    every = Decisions.joined(each.decisions for each in replays)
    if every.free:
        text += f"of {every.free} results that rounding logs chose {every.turned} are unlike the device; "
    return f"{text}only the inspectorate's word shows {_WORD}"


def _worth(
    runs: Sequence[HeldRun],
    replays: Iterable[SignedReplay],
    stated: Evidence,
    trust: Trust,
    evidence: CheckedBundle,
) -> str:
    """What the acceptance is worth, as an inspection says it, of what the bundle holds; fills ``evidence``, too.

    What it does not show, as signs of life or a lower limit of slack, is not covered, whatever was inspected.
    """
    known, said = {run.head_digest: run for run in runs}, {each["run_id"]: each for each in stated["lineages"]}
    evidence["lineages"] = [_lineage(run, runs, said, stated) for run in runs]
    evidence["countersigned_by_simulation"] = any(each.simulated for run in runs for each in terms_of(run, trust))
    decided = [
        examine(Decisions.joined(each.decisions for each in x.replays), known[x.head].declared.numerics, x.device)
        for x in replays
    ]
    evidence["scope"] = scope(
        [run.declared for run in runs],
        replace(trust, maximum_slack=None),
        live=all(each["nonce"] for each in stated["chips"]),
        every=stated["draw"].get("every_lab") is True and set(trust.labs) <= set(stated["labs"]),
        replays=[
            cast(ReplayEvidence, {**each.to_json(), "device": x.device})
            for each, x in zip(decided, replays, strict=True)
        ],
    )
    document = cast(Evidence, {**stated, "lineages": evidence["lineages"]})
    text = caveats(document, [(run.name, terms_of(run, trust)) for run in runs])
    return f"{text}; {ONE_PROCESS}" if evidence["one_process"] else text


def _lineage(
    run: HeldRun, runs: Iterable[HeldRun], said: Mapping[str, LineageEvidence], stated: Evidence
) -> LineageEvidence:
    """Where a run comes from, as its declaration says; that it took over what it declares to is the verdict's word."""
    known, chain = {each.run_id: each for each in runs}, [run]
    while (parent := chain[0].declared.origin.parent) is not None and said[chain[0].run_id]["parent"] == parent.run:
        if parent.run not in known:
            break
        chain.insert(0, known[parent.run])
    [ran] = [each["execution"] for each in stated["runs"] if each["run_id"] == chain[0].run_id]
    past = past_unknown(chain[0].declared.origin, chain[0].name, ran["initialisation_brings"], replayed=True)
    return {
        **said[run.run_id],
        "run": run.name,
        "origin": kind_of(run.declared.origin),
        "chain": [each.name for each in chain],
        "past_unknown": past,
    }


def _decision(
    contest: bytes, runs: Sequence[HeldRun], replays: Sequence[tuple[VerifyingKey, SignedReplay]], trust: Trust
) -> Decision:
    try:
        return decide(contest, runs, replays, trust)
    except (ChipwitnessError, LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise NotAbout(f"the contest cannot be used with this bundle: {error!s:.300}") from None


def _decided(decisions: Iterable[Decision], run: HeldRun, place: tuple[int, bytes | None] | None) -> str:
    """The decision against the lab about the step at which a replay departs, in words; empty where there is none."""
    about = [each for each in decisions if place is not None and (each.head, each.step) == (run.head_digest, place[0])]
    return next((each.text for each in about if LAB in each.guilty), "")


def _model(subject: Mapping[str, Any], runs: Sequence[HeldRun]) -> dict[str, object]:
    """What a verdict says of a model; EvidenceError if that is not about the end of a run of the bundle."""
    if set(subject) != {"name", "sha256", "files", "ignored", "not_compared", "buffers", "run_id"}:
        raise EvidenceError("a model has missing or extra keys")
    lists = [subject[key] for key in ("ignored", "not_compared", "buffers")]
    if not all(isinstance(each, list) for each in lists) or not set(subject["not_compared"]) <= set(subject["files"]):
        raise EvidenceError("the lists of a model's files and buffers are malformed")
    if not any(run.run_id == subject["run_id"] and run.head.finished for run in runs):
        raise EvidenceError("a model belongs to a run that the bundle does not hold, or that is not finished")
    if subject["sha256"] != digest_of_files(subject["files"]):
        raise EvidenceError("a model's digest is not that of its files")
    return dict(subject)
