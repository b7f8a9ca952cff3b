"""The rounds of an inspection, each a function of one party: it reads its own inbox, and sends one message.

    announce   inspectorate   the hash of a secret, how the inspection is done, and until when each answer counts
    hand       lab            the signed heads of all its runs; an empty list says that there is none
    reveal     inspectorate   the secret, which draws chips, their nonces and segments
    answer     lab            what its drawn chips say to their nonces; and its runs, without states and samples
    order      inspectorate   which segments the cluster is to replay, and what labs are to open for that
    disclose   lab            what was drawn of its runs, opened to the cluster (``opening``)
    replay     cluster        signed results, and what it finds of states and samples
    decide     inspectorate   the signed verdict, as a bundle

What was not there when its time was over, as inspectorate and cluster note it (``receiving``), never came. A lab that
hands over no heads, or does not open a run that it handed over, counts as a refusal; so does each drawn chip that does
not answer, and a run that is opened damaged in two rounds, one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError, Unreadable, foreign
from firmware_sim.evidence import decode_base64
from inspector.bundle.builder import bundle_of, settings_json
from inspector.bundle.checks import SignedCheck
from inspector.bundle.contents import Bundle, accepted_in, heads_in, read_bundle
from inspector.bundle.redraw import settings_from
from inspector.bundle.replays import check_signed
from inspector.inspection.answers import Ask
from inspector.inspection.casefile import CaseFile
from inspector.inspection.checkpoints import sign_checkpoints
from inspector.inspection.disclosure import Checked, thin_paths
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.memory import load_memory, remember, save_memory
from inspector.inspection.replays import Worker
from inspector.inspection.sampling import challenge_seed, draw, nonce_of
from inspector.inspection.sources import Past, Sources
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import COPY, Outcome, Reason, Verdict
from inspector.rounds.budget import BUDGET, no_room
from inspector.rounds.cluster import replay
from inspector.rounds.exchange import Early, announced_in, asked_in, openings, past
from inspector.rounds.laboratory import answer, disclose, hand
from inspector.rounds.openings import asked_for, described, keep, soundest
from inspector.rounds.receipts import deadline, noted, receipts_of, take, twice
from inspector.rounds.world import CLUSTER, INSPECTORATE, Message, World, time_text
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import Rules, read_rules
from monitor.files import write_whole
from monitor.transcript.layout import MANIFEST

__all__ = ["announce", "answer", "decide", "disclose", "hand", "order", "past", "replay", "reveal"]


_MALFORMED = (EvidenceError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a message that its sender signed in the right form, and with senseless values in it, can end in."""


def fresh_secret() -> str:
    """A round's secret, from the system's randomness: who could guess it could choose what is drawn."""
    return os.urandom(32).hex()


def announce(
    world: World, settings: Settings, *, minutes: float, refusals: int, now: datetime, rules: Path | None = None
) -> None:
    """Begin a round: publish the hash of a secret.

    Args:
        settings: how the inspection is done; its seed is not looked at.
        minutes: between one deadline and the next: heads, answers, openings, results.
        refusals: so many that count against labs leave the verdict INCONCLUSIVE; one more, and it is a REJECT.
        rules: file of what runs have to keep to (``inspector.rules``), which are announced.
    """
    trust = world.trust()
    labs = sorted(trust.labs)
    if not 0 < minutes < 1e6 or refusals < 0:
        raise CallerError("--minutes must lie in (0, 1000000), and --refusals must be at least 0")
    required = None if rules is None else read_rules(rules).to_json()
    secret = fresh_secret()
    path = world.folder / INSPECTORATE / "secrets" / f"{world.round + 1:04d}"
    write_whole(path, secret.encode(), new=True, mode=0o600)
    deadlines = {
        name: time_text(now + timedelta(minutes=minutes * number))
        for number, name in enumerate(("heads", "answers", "openings", "results"), start=1)
    }
    try:
        settings_from(settings_json(settings))
    except EvidenceError as error:  # the others could not read it
        raise CallerError(str(error)) from None
    predicate = {"round": world.round, "time": time_text(now), "settings": settings_json(settings)}
    predicate |= {"deadlines": deadlines, "refusals": refusals, "labs": labs}
    predicate["chips"] = dict(sorted(trust.chips.items()))
    if rules is not None:
        predicate["rules"] = required
        write_whole(world.folder / INSPECTORATE / "rules" / f"{world.round:04d}", os.fsencode(rules.resolve()))
    to = [INSPECTORATE, CLUSTER, *labs]
    about = hashlib.sha256(secret.encode()).digest()
    world.send("announcement", INSPECTORATE, to, predicate, about, world.key(INSPECTORATE))


def reveal(world: World, *, now: datetime) -> list[str]:
    """Open the secret, and draw; returns the drawn chips.

    Raises:
        Early: a lab may still hand over its heads, and has not.
    """
    take(world, INSPECTORATE, now)
    announced = announced_in(world, INSPECTORATE)
    heads, silent = _heads(world, announced)
    if silent and now <= deadline(announced, "heads"):
        raise Early(
            f"{silent[0]} has not handed over its heads yet, and has time until "
            f"{announced.predicate['deadlines']['heads']}"
        )
    settings, trust = _settings(world, announced), _trust(world, announced)
    seed = _seed(settings, heads)
    pool = [chip for lab in sorted(trust.labs) for chip in trust.chips_of(lab)]
    if not 1 <= settings.samples <= len(pool):
        raise CallerError(f"cannot draw {settings.samples} of {len(pool)} registered chips")
    drawn = sorted(draw(pool, settings.samples, seed))
    predicate = {
        "time": time_text(now),
        "secret": settings.seed,
        "heads": sorted(_digest(head) for head in heads),
        "silent": silent,
        "receipts": receipts_of(world, "heads"),
        "chips": {chip: nonce_of(seed, chip).hex() for chip in drawn},
    }
    to = [INSPECTORATE, CLUSTER, *sorted(trust.labs)]
    world.send("draw", INSPECTORATE, to, predicate, announced.digest, world.key(INSPECTORATE))
    return drawn


def order(world: World, *, now: datetime) -> int:
    """Say which segments the cluster is to replay, given the chips' answers; returns the number of jobs.

    Raises:
        Early: a lab may still answer, and has not.
    """
    take(world, INSPECTORATE, now)
    announced = announced_in(world, INSPECTORATE)
    missing = [lab for lab in announced.predicate["labs"] if noted(world, INSPECTORATE, "answers", lab) is None]
    if missing and now <= deadline(announced, "answers"):
        raise Early(
            f"{missing[0]} has not answered yet, and has time until {announced.predicate['deadlines']['answers']}"
        )
    jobs: list[dict[str, Any]] = []

    def ask_for(name: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append({"device": name, "job": {**job, "run": Path(job["run"]).name}})
        raise DeviceError("the cluster has not been asked yet")

    case = CaseFile()
    verdict = _inspect(world, announced, worker=ask_for, case=case, now=now, checks=None)
    jobs.sort(key=lambda entry: (entry["job"]["run"], entry["device"], entry["job"]["action"]))
    asked = asked_for(case, verdict, [entry["job"] for entry in jobs])
    body = {"time": time_text(now), "jobs": jobs, "open": {name: each.to_json() for name, each in asked.items()}}
    to = [INSPECTORATE, CLUSTER, *announced.predicate["labs"]]
    world.send("order", INSPECTORATE, to, body, announced.digest, world.key(INSPECTORATE))
    return len(jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A round's verdict, and where its bundle lies."""

    verdict: Verdict
    bundle: Path


def decide(world: World, *, now: datetime) -> Decided:
    """Judge what came in time, sign verdict and, on ACCEPT, log checkpoints; remember heads and chips' positions."""
    take(world, INSPECTORATE, now)
    announced = announced_in(world, INSPECTORATE)
    path = world.folder / INSPECTORATE / "verdicts" / f"{world.round:04d}.json"
    if path.exists():
        raise CallerError(f"round {world.round} has already been decided: {path}")
    came = noted(world, INSPECTORATE, "results", CLUSTER)
    if came is None and now <= deadline(announced, "results"):
        raise Early(
            f"the cluster has not answered yet, and has time until {announced.predicate['deadlines']['results']}"
        )
    try:
        case, verdict, refused = _decided(world, announced, came, now=now)
    except _MALFORMED as error:
        if came is None:
            raise
        case, verdict, refused = _decided(world, announced, None, now=now)
        text = f"what it signed is malformed ({type(error).__name__}) and is ignored"
        verdict = _by_cluster(world, announced, verdict, text)
    rows = described(case, asked_in(world, INSPECTORATE))
    note = "of {files} files ({bytes} bytes) labs opened {opened} ({shown} bytes) to the cluster".format(
        **{name: sum(row[f"of_{name}"] for row in rows) for name in ("files", "bytes")},
        opened=sum(row["files"] for row in rows),
        shown=sum(row["bytes"] for row in rows),
    )
    note += f", which refused {refused} that it had not asked for" if refused else ""
    verdict = verdict.joined((), {}, {"opened": rows, "refused_files": refused}, note=note if rows else "")
    home = world.folder / INSPECTORATE
    data = bundle_of(case, verdict, _trust(world, announced), _settings(world, announced), world.key(INSPECTORATE))
    sign_checkpoints(home / "checkpoints", verdict, case.prunable, world.key(INSPECTORATE))
    memory = home / "memory.json"
    save_memory(memory, remember(load_memory(memory), verdict))
    write_whole(path, data, new=True)  # last: until it is there, all of this can be done again
    return Decided(verdict=verdict, bundle=path)


def _decided(world: World, announced: Message, came: Message | None, *, now: datetime) -> tuple[CaseFile, Verdict, int]:
    """The verdict that follows from what came in time, with its case and the number of files that the cluster refused.

    Args:
        came: the cluster's results.
    """
    case = CaseFile()
    results: dict[tuple[str, ...], dict[str, Any]] = {}
    checks: dict[str, Checked] | None = None
    if came is not None:
        results = {
            (each["device"], each["action"], each["manifest"]): each["result"] for each in came.predicate["results"]
        }
        case.checks = [each.encode() for each in came.predicate["checks"]]
        signed = [SignedCheck.open(each, world.public(CLUSTER)) for each in case.checks]
        checks = {each.head: each.checked for each in signed}

    def look_up(name: str, job: dict[str, Any]) -> dict[str, Any]:
        missing = {"device_error": f"device {name}: no result came in time"}
        result = results.get((name, job["action"], job["manifest"]), missing)
        if "device_error" in result:
            raise DeviceError(str(result["device_error"]))
        check_signed(name, job, result, world.public(CLUSTER))
        return result

    verdict = _inspect(world, announced, worker=look_up, case=case, now=now, checks=checks)
    for sender, kind, digests in twice(world):
        text = f"signed two different messages of kind {kind} for one round: {digests[0]} and {digests[1]}"
        if sender == CLUSTER:
            verdict = _by_cluster(world, announced, verdict, f"{sender} {text}")
        else:
            verdict = verdict.joined([_refusal(sender, text)], {sender: Outcome.REJECT}, {})
    return case, verdict, 0 if came is None else max(0, came.predicate["refused"])


def _by_cluster(world: World, announced: Message, verdict: Verdict, text: str) -> Verdict:
    """What is the cluster's leaves each lab no better than INCONCLUSIVE, and is no lab's blame."""
    text = f"the cluster (key {world.public(CLUSTER).raw.hex()[:16]}…): {text}"
    labs = announced.predicate["labs"]
    reasons = [Reason(guard="cluster", text=text, where={"lab": lab}) for lab in labs]
    return verdict.joined(reasons, dict.fromkeys(labs, Outcome.INCONCLUSIVE), {})


def _inspect(
    world: World,
    announced: Message,
    *,
    worker: Worker,
    case: CaseFile,
    now: datetime,
    checks: Mapping[str, Checked] | None,
) -> Verdict:
    """Judge what labs and chips have handed over in time.

    Args:
        checks: what the cluster says of the runs that were opened to it; None where it has said nothing yet.
    """
    trust, settings = _trust(world, announced), _settings(world, announced)
    heads, silent = _heads(world, announced)
    found = _opened(world)
    opened = {digest: folder for digest, folder in found.items() if isinstance(folder, Path)}
    missing, undecided = _unopened(world, announced, trust, heads, set(opened), checks)
    undecided += no_room(world, INSPECTORATE, heads, trust)
    memory = load_memory(world.folder / INSPECTORATE / "memory.json")
    bundles = [read_bundle(path) for path in sorted((world.folder / INSPECTORATE / "verdicts").glob("*.json"))]
    earlier = [head for data in bundles for head in heads_in(data)]
    refusals = _refusals(silent, missing, dropped(earlier, heads, trust), found, trust)
    folders = [opened[_digest(head)] for head in heads if _digest(head) in opened]
    verdict = inspect(
        folders,
        trust,
        settings,
        now=now,
        worker=worker,
        sources=Sources(
            answers=world.deposits(),
            ask=_answered(world, announced, trust),
            heads=[_digest(head) for head in heads],
            checks=checks or {},
        ),
        past=Past(
            memory=memory,
            heads=earlier,
            accepted=accepted_in(bundles, [world.public(INSPECTORATE)], settings_json(settings)),
        ),
        case=case,
    )
    if "rules" in announced.predicate:
        verdict = apply_rules(verdict, _rules(world, announced), case, trust, settings, worker=worker)
    verdict = verdict.joined(undecided, {each.where["lab"]: Outcome.INCONCLUSIVE for each in undecided}, {})
    refusals += _damaged_again(world, verdict, bundles[-1:])
    return _with_refusals(verdict, refusals, announced)


def _refusals(
    silent: Sequence[str],
    missing: Sequence[bytes],
    gone: Sequence[tuple[str, str]],
    found: Mapping[str, Path | EvidenceError],
    trust: Trust,
) -> list[Reason]:
    """What labs did not hand over.

    Args:
        silent: labs without heads.
        missing: heads whose runs were not opened.
        gone: labs and runs of which earlier rounds have a head.
        found: what is wrong with a run, by the digest of its head.
    """
    refusals = [_refusal(lab, "handed over no heads by the deadline") for lab in silent]
    for head in missing:
        lab, manifest = signer_of(head, trust)
        text, wrong = f"did not open run {manifest.run[:16]}…, whose head it handed over", found.get(_digest(head))
        refusals.append(_refusal(lab, f"{text}: {wrong}" if isinstance(wrong, EvidenceError) else text))
    return refusals + [
        _refusal(lab, f"does not hand over run {run[:16]}…, whose head it signed for an earlier round")
        for lab, run in gone
        if lab not in silent
    ]


def _unopened(
    world: World,
    announced: Message,
    trust: Trust,
    heads: Sequence[bytes],
    opened: Set[str],
    checks: Mapping[str, Checked] | None,
) -> tuple[list[bytes], list[Reason]]:
    """Heads whose runs no one opened, and where a lab says that it opened one of which the cluster says nothing.

    Args:
        opened: digests of the heads whose runs were opened to the inspectorate.
    """
    missing = [head for head in heads if _digest(head) not in opened]
    if checks is None:
        return missing, []
    # The cluster has answered, and checked all that was opened to it.
    wanted = {each.head for each in asked_in(world, INSPECTORATE).values()} & opened
    unsaid = [head for head in heads if _digest(head) in wanted - set(checks)]
    reported = _reported_open(world, announced)
    missing += [head for head in unsaid if _digest(head) not in reported]
    return missing, [_unsaid(world, head, trust) for head in unsaid if _digest(head) in reported]


def _answered(world: World, announced: Message, trust: Trust) -> Ask:
    """Challenges a chip by what its lab has handed over in time; no lab answers for another one's chip."""
    answers: dict[str, dict[str, str]] = {}
    for lab in announced.predicate["labs"]:
        said, mine = noted(world, INSPECTORATE, "answers", lab), set(trust.chips_of(lab))
        if said is not None:
            answers |= {chip: each for chip, each in said.predicate["chips"].items() if chip in mine}

    def ask(chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
        if chip not in answers:
            raise EvidenceError("no answer came by the deadline")
        return {name: decode_base64(text) for name, text in answers[chip].items()}

    return ask


def _refusal(lab: str, text: str) -> Reason:
    """What a lab refused, which begins with its name."""
    return Reason(guard="refusal", text=f"{lab} {text}", where={"lab": lab})


def _damaged_again(world: World, verdict: Verdict, before: Sequence[bytes]) -> list[Reason]:
    """Runs that were opened damaged in the round before too: who is asked anew, and opens that, does not open it.

    A run for which there was no room here in one of the rounds is not among them.
    """
    now = [{"guard": each.guard, **each.where} for each in verdict.reasons]
    rounds = [*(Bundle.open(data, world.public(INSPECTORATE)).predicate["reasons"] for data in before), now]

    def runs(reasons: Sequence[Mapping[str, Any]], guard: str) -> set[tuple[str, str]]:
        found = [each for each in reasons if each["guard"] == guard and each.get("lab") is not None]
        return {(str(each["lab"]), str(each.get("run_id"))) for each in found}

    again = set.intersection(*(runs(each, COPY) - runs(each, BUDGET) for each in rounds)) if before else set()
    return [
        _refusal(lab, f"opened run {run:.16}… damaged again, after it was asked for a second time")
        for lab, run in sorted(again)
    ]


def _reported_open(world: World, announced: Message) -> set[str]:
    """The heads of which their labs say that they opened the run to the cluster."""
    said = (noted(world, INSPECTORATE, "openings", lab) for lab in announced.predicate["labs"])
    return {run["head"] for message in said if message is not None for run in message.predicate["runs"]}


def _unsaid(world: World, head: bytes, trust: Trust) -> Reason:
    """The cluster is silent on a run that its lab says it opened: one of them is wrong, and it is unknown which."""
    lab, manifest = signer_of(head, trust)
    text = (
        f"the cluster (key {world.public(CLUSTER).raw.hex()[:16]}…) says nothing about run {manifest.run[:16]}…, which "
    )
    return Reason(guard="cluster", text=f"{text}{lab} says that it opened", where={"lab": lab})


def dropped(earlier: Sequence[bytes], heads: Sequence[bytes], trust: Trust) -> list[tuple[str, str]]:
    """Lab and id of each run whose head was handed over once, and now none is."""
    known = {(lab, head.run) for lab, head in (signer_of(each, trust) for each in earlier)}
    return sorted(known - {(lab, head.run) for lab, head in (signer_of(each, trust) for each in heads)})


def _rules(world: World, announced: Message) -> Rules:
    """The rules that were announced; CallerError if their file holds others by now."""
    path = Path(os.fsdecode((world.folder / INSPECTORATE / "rules" / f"{world.round:04d}").read_bytes()))
    found = read_rules(path)
    if found.to_json() != announced.predicate["rules"]:
        raise CallerError(f"the rules in {path} are not those that were announced")
    return found


def _with_refusals(verdict: Verdict, refusals: Sequence[Reason], announced: Message) -> Verdict:
    """Count refusals against their labs, within the budget that was announced."""
    worse = Outcome.INCONCLUSIVE if len(refusals) <= announced.predicate["refusals"] else Outcome.REJECT
    evidence = {"round": {**announced.predicate, "announcement": announced.digest.hex()}}
    return verdict.joined(refusals, {each.where["lab"]: worse for each in refusals}, evidence)


def _heads(world: World, announced: Message) -> tuple[list[bytes], list[str]]:
    """All heads that labs handed over before the draw, and the labs that did not."""
    heads: list[bytes] = []
    silent = []
    trust = _trust(world, announced)
    for lab in announced.predicate["labs"]:
        found = noted(world, INSPECTORATE, "heads", lab)
        if found is None:
            silent.append(lab)
            continue
        try:
            handed = [text.encode() for text in dict.fromkeys(found.predicate["heads"])]  # a run is no two
            heads += [head for head in handed if signer_of(head, trust)[0] == lab]
        except (EvidenceError, UnicodeEncodeError):
            silent.append(lab)  # a head that is none hides a run as well as silence does
    return heads, silent


def _opened(world: World) -> dict[str, Path | EvidenceError]:
    """Runs that labs have opened to the inspectorate, by the digest of their heads; what holds no head is none.

    Another folder with a run's head next to it, or a file put into it, changes nothing: of several, one that is
    sound counts, and what is not listed is deleted. A folder whose name does not begin with its lab's is no one's. One
    that is damaged leaves its lab open, and is its refusal the second time; it touches no other lab.
    """
    trust = world.trust()
    found: dict[str, list[Path]] = {}
    for path in _named(openings(world, INSPECTORATE)):
        with contextlib.suppress(EvidenceError, Unreadable), foreign(path / MANIFEST):
            head = limits.read_file(path / MANIFEST, limits.MANIFEST_BYTES)
            if path.name.startswith(f"{signer_of(head, trust)[0]}."):
                found.setdefault(_digest(head), []).append(path)
    for digest, folders in found.items():
        for folder in folders:
            keep(folder, trust, digest, thin_paths)
    return {digest: soundest(folders, trust) for digest, folders in found.items()}


def _named(folder: Path) -> list[Path]:
    """What lies in a folder under a name that can be printed: one that is no UTF-8 is not."""
    return sorted(path for path in folder.iterdir() if path.name.isprintable())


def _trust(world: World, announced: Message) -> Trust:
    """What the registry says of the labs and chips of the round; who joins later takes part in the next."""
    trust, chips = world.trust(), announced.predicate["chips"]
    labs = {lab: trust.labs[lab] for lab in announced.predicate["labs"]}
    return replace(trust, labs=labs, chips=chips)


def _settings(world: World, announced: Message) -> Settings:
    """The round's settings, with the secret, which the inspectorate alone knows until it is opened."""
    secret = (world.folder / INSPECTORATE / "secrets" / f"{world.round:04d}").read_text(encoding="ascii")
    labs = tuple(announced.predicate["labs"])
    return replace(settings_from(announced.predicate["settings"]), seed=secret, committed=True, labs=labs)


def _seed(settings: Settings, heads: Sequence[bytes]) -> bytes:
    assert settings.seed is not None
    return challenge_seed(settings.seed, map(_digest, heads))


def _digest(head: bytes) -> str:
    return hashlib.sha256(head).hexdigest()
