"""Rounds of an inspection: commitment before challenge, deadlines, and a verdict that outlives its parties."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from analysis.cli import main
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, open_acceptance
from firmware_sim.identity import read_chain
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.verdict import Outcome
from inspector.probability.odds import Violation
from inspector.registry.keyfiles import write_keys
from inspector.rounds import steps
from inspector.rounds.receipts import take
from inspector.rounds.turns import play_round
from inspector.rounds.world import CLUSTER, INSPECTORATE, World, sealed
from monitor.lab.pruning import prune_chip
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import MANIFEST
from tests.guards import off

SETTINGS = Settings(
    samples=2, seed=None, devices=("sse41",), sampling=Sampling(confidence=0.9, against=Violation.parse("swap"))
)
MINUTE = timedelta(minutes=1)
SCHEMA = json.loads((Path(steps.__file__).parent / "schemas" / "messages.json").read_text())
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    """A run of two steps on two chips; their logs go on with each challenge."""
    return record(tmp_path_factory.mktemp("rounds") / "run", steps=2, chips=2, checkpoint_every=1, rate=Fraction(1))


@pytest.fixture
def world(tmp_path):
    return World.create(tmp_path / "world", LabSide)


@pytest.fixture
def played(devices):
    """Plays a round with some of its moments put in another's hands; returns what was decided."""

    def play(
        world,
        now,
        *,
        labs=("lab",),
        refusals=0,
        hand=None,
        between=None,
        answers_at=None,
        opened_at=None,
        settings=SETTINGS,
        rules=None,
        answering=None,
    ):
        steps.announce(world, settings, minutes=10, refusals=refusals, now=now, rules=rules)
        for lab in labs:
            steps.hand(world, lab, runs=hand, now=now)
        all_in = set(labs) == set(world.trust().labs)
        steps.reveal(world, now=now if all_in else now + 11 * MINUTE)
        if between is not None:
            between()
        if answers_at is not None:
            take(world, INSPECTORATE, answers_at)  # whoever looked by then has not found them
        for lab in labs if answering is None else answering:
            steps.answer(world, lab, now=now + 12 * MINUTE)
        steps.order(world, now=now + 21 * MINUTE)
        for lab in labs if answering is None else answering:
            steps.disclose(world, lab, now=opened_at or now + 22 * MINUTE)
        steps.replay(world, now=now + 31 * MINUTE, worker=devices.run)
        return steps.decide(world, now=now + 32 * MINUTE)

    return play


def lab_key(recorded):
    """The key with which the simulated lab of a run signs."""
    return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))


def silent(trust):
    """A trust file of a lab with one chip, which has no folder anywhere."""
    key = SigningKey.generate(b"q" * 32).verifying
    return replace(trust, labs={"silent": key}, chips={"silent-chip-0000": "silent"}, countersigned=frozenset())


def test_a_round_is_accepted_and_its_bundle_outlives_the_parties(world, small, played):
    world.join(small.trust, {"run": small.run})
    first = played(world, small.now)
    assert first.verdict.outcome is Outcome.ACCEPT, first.verdict.reasons
    assert "2 drawn chips answered a challenge that was made after the draw" in first.verdict.reasons[0].text
    assert "simulated draw" not in first.verdict.reasons[0].text
    rounds = world.folder / CLUSTER / "openings"
    assert [path.name for path in rounds.iterdir()] == ["0001"]
    second = played(world, small.now + timedelta(days=1))
    assert second.verdict.outcome is Outcome.ACCEPT, second.verdict.reasons
    assert [path.name for path in rounds.iterdir()] == ["0002"], "what was opened before is deleted"
    trust, cluster = world.trust(), world.public(CLUSTER)
    for party in ("labs", "cluster"):
        shutil.rmtree(world.folder / party)
    for decided in (first, second):
        shown = check_bundle(decided.bundle.read_bytes(), trust)
        assert (shown.outcome, shown.evidence["verifies"]) == (Outcome.ACCEPT, True), shown.reasons
    for path in world.inbox(INSPECTORATE).rglob("*.json"):
        envelope, sender = json.loads(path.read_text()), path.parent.name
        key = {**trust.labs, INSPECTORATE: world.public(INSPECTORATE), CLUSTER: cluster}[sender]
        opened = Envelope.from_dict(envelope)
        foreign = SSlibKey(key.key_id, "ed25519", "ed25519", {"public": key.raw.hex()})
        assert list(opened.verify([foreign], 1)) == [key.key_id]
        jsonschema.validate(json.loads(base64.b64decode(envelope["payload"])), SCHEMA)
    assert len({first.verdict.evidence["draw"]["secret"], second.verdict.evidence["draw"]["secret"]}) == 2


def test_a19_a_silent_lab_is_waited_for_and_then_counts_as_a_refusal(world, small, played):
    world.join(small.trust, {"run": small.run})
    world.join(silent(small.trust), {})
    every = replace(SETTINGS, samples=3)
    steps.announce(world, every, minutes=10, refusals=0, now=small.now)
    steps.hand(world, "lab", now=small.now)
    with pytest.raises(CallerError, match="silent has not handed over its heads yet"):
        steps.reveal(world, now=small.now)
    decided = played(world, small.now, settings=every)
    assert decided.verdict.outcome is Outcome.REJECT
    assert decided.verdict.evidence["labs"] == {"lab": "ACCEPT", "silent": "REJECT"}
    assert decided.verdict.reasons[0].text == "silent handed over no heads by the deadline"
    shown = check_bundle(decided.bundle.read_bytes(), world.trust())
    assert shown.outcome is Outcome.INCONCLUSIVE  # that nobody answered is the inspectorate's word


def test_a_lab_that_reveals_only_some_of_its_runs(world, record, tmp_path, played):
    one = record(tmp_path / "one", steps=2, chips=2, checkpoint_every=1, rate=1)
    two = record(tmp_path / "two", steps=2, chips=2, checkpoint_every=1, rate=1, after=one.run, seed=6)
    world.join(two.trust, {"one": one.run, "two": two.run})
    decided = played(world, one.now, hand=["one"])
    assert decided.verdict.outcome is Outcome.REJECT
    assert any("this record belongs to a run that was not declared" in each.text for each in decided.verdict.reasons)
    with off("undeclared runs", "heads handed over again"):
        hidden = played(world, one.now, hand=["one"])
        assert hidden.verdict.outcome is Outcome.ACCEPT, hidden.verdict.reasons
    assert played(world, one.now).verdict.outcome is Outcome.ACCEPT


def test_late_answers_never_came(world, small, played):
    world.join(small.trust, {"run": small.run})
    decided = played(world, small.now, answers_at=small.now + 21 * MINUTE)
    assert decided.verdict.outcome is Outcome.REJECT
    assert "no answer came by the deadline" in decided.verdict.reasons[0].text
    with off("deadlines"):
        assert played(world, small.now, answers_at=small.now + 21 * MINUTE).verdict.outcome is Outcome.ACCEPT


def test_a_run_that_is_not_opened_is_a_refusal_within_the_budget(world, small, played, tmp_path):
    shutil.copytree(small.run, tmp_path / "run")
    lab_path(tmp_path / "run").symlink_to(lab_path(small.run))
    world.join(small.trust, {"run": tmp_path / "run"})

    def swap():
        (tmp_path / "run" / MANIFEST).write_bytes(b"{}")

    def put_back():
        shutil.copy(small.run / MANIFEST, tmp_path / "run" / MANIFEST)

    decided = played(world, small.now, between=swap)
    assert decided.verdict.outcome is Outcome.REJECT
    assert "lab did not open run" in decided.verdict.reasons[0].text
    put_back()
    texts = [each.text for each in played(world, small.now, between=swap, refusals=1).verdict.reasons]
    assert any("lab did not open run" in text for text in texts)


def test_a_round_with_rules(world, small, played, tmp_path):
    """They are announced; the cluster counts samples; the bundle shows it when the parties are gone."""
    world.join(small.trust, {"run": small.run})
    text = '[[rule]]\nname = "clean"\nkind = "data"\nat_most = 0\ndigests = ["{}"]\n'
    (tmp_path / "rules.toml").write_text(text.format("0" * 64))
    decided = played(world, small.now, rules=tmp_path / "rules.toml")
    assert decided.verdict.outcome is Outcome.ACCEPT, decided.verdict.reasons
    assert "what the rules require holds: clean pass" in decided.verdict.reasons[0].text
    shown = check_bundle(decided.bundle.read_bytes(), world.trust())
    assert shown.outcome is Outcome.ACCEPT, shown.reasons
    assert shown.evidence["rules"]["results"] == {"clean": "pass"}
    kinds = envelopes_open(decided.bundle.read_bytes(), world)
    assert kinds == {"verdict", "head", "declarations", "quote", "replays", "checks", "examinations"}
    for path in world.inbox(INSPECTORATE).rglob("*.json"):
        jsonschema.validate(json.loads(base64.b64decode(json.loads(path.read_text())["payload"])), SCHEMA)

    def change():
        (tmp_path / "rules.toml").write_text(text.format("1" * 64))

    with pytest.raises(CallerError, match="are not those that were announced"):
        played(world, small.now, rules=tmp_path / "rules.toml", between=change)


def envelopes_open(data, world):
    """A foreign library opens every envelope in a bundle under the key of who signed it; returns what they are."""
    bundle, trust = json.loads(data), world.trust()
    items = {path: base64.b64decode(text) for path, text in bundle["items"].items()}
    chains = [read_chain(content) for path, content in items.items() if path.endswith("chain.pem")]
    keys = {*trust.labs.values(), *trust.inspectorates, *trust.clusters, *(each.alias_key for each in chains)}
    by_id = {key.key_id: key for key in keys}
    found = {"verdict": json.dumps(bundle["verdict"]).encode(), **items}
    opened = set()
    for path, content in found.items():
        if b'"payloadType"' not in content:
            continue
        envelope = json.loads(content)
        key = by_id[envelope["signatures"][0]["keyid"]]
        foreign = SSlibKey(key.key_id, "ed25519", "ed25519", {"public": key.raw.hex()})
        assert list(Envelope.from_dict(envelope).verify([foreign], 1)) == [key.key_id], path
        first, last = path.split("/")[0], path.split("/")[-1].removesuffix(".json")
        opened.add(last if first in ("runs", "chips") else first)
    return opened


def test_an_inspectorate_cannot_open_another_secret(world, small):
    """Grinding the draw against what labs handed over is seen by every lab."""
    world.join(small.trust, {"run": small.run})
    steps.announce(world, SETTINGS, minutes=10, refusals=0, now=small.now)
    steps.hand(world, "lab", now=small.now)
    (world.folder / INSPECTORATE / "secrets" / "0001").write_text("another")
    steps.reveal(world, now=small.now)
    with pytest.raises(EvidenceError, match="is not the one that it announced"):
        steps.answer(world, "lab", now=small.now)


def test_a_message_that_its_sender_did_not_sign_never_came(world, small):
    world.join(small.trust, {"run": small.run})
    steps.announce(world, SETTINGS, minutes=10, refusals=0, now=small.now)
    world.send("heads", "lab", [INSPECTORATE], {"heads": []}, bytes(32), SigningKey.generate())
    assert world.read(INSPECTORATE, "heads", "lab", small.trust.labs["lab"]) is None
    steps.hand(world, "lab", now=small.now)
    assert world.read(INSPECTORATE, "heads", "lab", small.trust.labs["lab"]).predicate["heads"]
    with pytest.raises(CallerError, match="has already sent heads of round 1"):
        steps.hand(world, "lab", now=small.now)


@pytest.mark.parametrize(
    "said", [{}, {"heads": 5}, {"heads": [7]}, {"heads": ["{}"]}, {"heads": ["\ud7ff\u0000"]}, {"heads": [], "more": 1}]
)
def test_heads_of_another_form_hide_a_run_as_silence_does(world, small, said):
    world.join(small.trust, {"run": small.run})
    steps.announce(world, SETTINGS, minutes=10, refusals=0, now=small.now)
    about = world.read(INSPECTORATE, "announcement", INSPECTORATE, world.public(INSPECTORATE)).digest
    world.send("heads", "lab", [INSPECTORATE], said, about, lab_key(small))
    with pytest.raises(CallerError, match="lab has not handed over its heads yet"):
        steps.reveal(world, now=small.now)
    steps.reveal(world, now=small.now + 11 * MINUTE)
    drawn = world.read("lab", "draw", INSPECTORATE, world.public(INSPECTORATE))
    assert drawn.predicate["silent"] == ["lab"]


def test_answers_and_openings_of_another_form_never_came(world, small, played):
    world.join(small.trust, {"run": small.run})

    def misplace():
        about = world.read(INSPECTORATE, "announcement", INSPECTORATE, world.public(INSPECTORATE)).digest
        said = {"chips": {"lab-chip-0000": ["log.bin"]}}
        world.send("answers", "lab", [INSPECTORATE], said, about, lab_key(small))
        (world.folder / CLUSTER / "openings" / "0001" / "lab.empty").mkdir(parents=True)

    decided = played(world, small.now, between=misplace, answering=())
    assert decided.verdict.outcome is Outcome.REJECT
    texts = [each.text for each in decided.verdict.reasons]
    assert any("no answer came by the deadline" in text for text in texts)
    assert any("lab did not open run" in text for text in texts)


def test_the_command_line_plays_a_round(small, tmp_path, capsys):
    folder = tmp_path / "world"
    assert main(["world", "init", str(folder)]) == 0
    (small.run.with_name("run.trust.json")).write_text(json.dumps(small.trust.to_json()))
    assert main(["world", "join", str(folder), str(small.run)]) == 0
    words = ["--samples", "2", "--device", "sse41", "--now", "2026-01-01T00:30:00Z"]
    assert main(["world", "round", str(folder), *words]) == 0
    capsys.readouterr()
    assert main(["world", "show", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["announcement", "heads", "draw", "answers", "order", "openings", "results"]
    bundle = folder / "inspectorate" / "verdicts" / "0001.json"
    assert main(["verify", str(bundle), "--trust", str(folder / "registry" / "trust.json")]) == 0
    assert main(["world", "init", str(folder)]) == 2
    assert main(["world", "round", str(tmp_path / "nowhere"), *words]) == 2


def test_one_line_inspects_in_a_default_world(small, tmp_path, capsys, kept_devices):
    (small.run.with_name("run.trust.json")).write_text(json.dumps(small.trust.to_json()))
    words = ["inspect", str(small.run), "--samples", "2", "--device", "sse41", "--now", "2026-01-01T00:30:00Z"]
    assert main(words) == 0
    folder = small.run.with_name("run.world")
    bundle = folder / "inspectorate" / "verdicts" / "0001.json"
    assert f"its bundle is {bundle}" in capsys.readouterr().out
    assert main(["verify", str(bundle), "--trust", str(folder / "registry" / "trust.json")]) == 0
    assert main([*words, "--world", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    trust = ["--trust", str(small.run.with_name("run.trust.json"))]
    assert main([*words, *trust]) == 0
    assert "[parties] one process played inspectorate and cluster" in capsys.readouterr().out
    for more, text in (
        ([*trust, "--world", str(folder)], "leave out --trust"),
        (["--seed", "x"], "--seed can only be used in an inspection with --trust"),
        (["--cluster-key", "x"], "--cluster-key can only be used in an inspection with --trust"),
        (["--world", str(small.run)], "there is no world"),
    ):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err


def test_a_round_does_not_wait_for_ever(world, small, devices, tmp_path):
    """One lab has no folder here, and one cannot read what it would open."""
    shutil.copytree(small.run, tmp_path / "run")
    lab_path(tmp_path / "run").symlink_to(lab_path(small.run))
    (tmp_path / "run" / "metadata.json").write_bytes(b"{}")
    world.join(small.trust, {"run": tmp_path / "run"})
    world.join(silent(small.trust), {})
    every = replace(SETTINGS, samples=3)
    verdict = play_round(world, every, now=small.now, worker=devices.run).verdict
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["labs"]["silent"] == "REJECT"
    assert any("metadata.json" in each.text for each in verdict.reasons)


def test_a_round_signs_checkpoints_by_which_chips_that_obey_it_are_pruned(world, record, tmp_path, played, monkeypatch):
    made = record(tmp_path / "run", steps=2, chips=2, checkpoint_every=1, rate=1)
    world.join(made.trust, {"run": made.run})
    checkpoints = world.folder / INSPECTORATE / "checkpoints"
    refused = played(world, made.now, answering=())
    assert refused.verdict.outcome is not Outcome.ACCEPT
    assert not checkpoints.exists()
    foreign = played(world, made.now + timedelta(days=1))
    assert foreign.verdict.outcome is Outcome.ACCEPT, foreign.verdict.reasons
    chips = sorted(made.trust.chips)
    signed = {chip: (checkpoints / chip / "checkpoint.json").read_bytes() for chip in chips}
    for chip, content in signed.items():
        assert open_acceptance(content, chip, [world.public(INSPECTORATE)])[0].size
        with pytest.raises(EvidenceError, match="not signed by the inspectorate that it obeys"):
            prune_chip(lab_path(made.run), chip, content)

    place = World.create(tmp_path / "obeyed", LabSide)
    for path in (place.folder / INSPECTORATE).glob("key*"):
        path.unlink()
    obeyed = SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab_path(made.run)))
    write_keys(place.folder / INSPECTORATE / "key", obeyed)
    place.join(made.trust, {"run": made.run})
    assert played(place, made.now).verdict.outcome is Outcome.ACCEPT
    for chip in chips:
        prune_chip(
            lab_path(made.run),
            chip,
            (place.folder / INSPECTORATE / "checkpoints" / chip / "checkpoint.json").read_bytes(),
        )
    later = played(place, made.now + timedelta(days=1)).verdict
    assert later.outcome is Outcome.ACCEPT, later.reasons  # nothing is new since what this inspectorate accepted
    assert all(chip["log_start"] for chip in later.evidence["chips"])
    assert "an earlier inspection accepted lab.run up to step 2" in later.reasons[0].text
    monkeypatch.setattr(steps, "accepted_in", lambda *_: {})
    unknown = played(place, made.now + timedelta(days=2)).verdict
    assert unknown.outcome is Outcome.INCONCLUSIVE
    assert "there is nothing to match" in unknown.reasons[0].text


def replaced(world, kind, sender, key, receivers, change):
    """Put a message in the place of one that was sent: as its sender would sign it after a change of what it says."""
    sent = world.sent(sender, kind, key.verifying)
    predicate = json.loads(json.dumps(dict(sent.predicate)))
    change(predicate)
    for receiver in receivers:
        [path] = (world.inbox(receiver) / sender).glob(f"*-{kind}.*")
        path.unlink()
        world.post(receiver, kind, sender, sealed(kind, sent.about, predicate, key))


def test_a63_a_lab_that_leaves_out_a_log_keeps_no_round_from_its_verdict(world, small, devices):
    """Evidence without a log looked like a clone's, and was read again as its proof."""
    now = small.now
    world.join(small.trust, {"run": small.run})
    steps.announce(world, SETTINGS, minutes=10, refusals=0, now=now)
    steps.hand(world, "lab", now=now)
    [first, *_] = steps.reveal(world, now=now)
    steps.answer(world, "lab", now=now)
    replaced(world, "answers", "lab", lab_key(small), [INSPECTORATE], lambda said: said["chips"][first].pop("log.bin"))
    steps.order(world, now=now)
    steps.disclose(world, "lab", now=now)
    steps.replay(world, now=now, worker=devices.run)
    decided = steps.decide(world, now=now)
    assert decided.verdict.evidence["labs"] == {"lab": "REJECT"}
    assert any("cannot be compared" in each.text and "log.bin" in each.text for each in decided.verdict.reasons)
    assert not any("contradict" in each.text for each in decided.verdict.reasons)


@pytest.mark.parametrize("change", ["nonce", "fewer", "heads", "more"])
def test_a64_a_lab_answers_and_opens_what_the_announced_secret_draws(world, small, change):
    now = small.now
    world.join(small.trust, {"run": small.run})
    steps.announce(world, replace(SETTINGS, samples=1), minutes=10, refusals=0, now=now)
    steps.hand(world, "lab", now=now)
    [drawn] = steps.reveal(world, now=now)
    [other] = set(small.trust.chips) - {drawn}

    def altered(said):
        if change == "nonce":
            said["chips"][drawn] = "00" * 32
        elif change == "more":
            said["chips"][other] = "00" * 32
        elif change == "fewer":
            said["chips"] = {}
        else:
            said["heads"] = ["00" * 32]

    replaced(world, "draw", INSPECTORATE, world.key(INSPECTORATE), ["lab"], altered)
    with pytest.raises(EvidenceError, match="does not draw these chips and nonces"):
        steps.answer(world, "lab", now=now)
    with off("chips of the draw"):
        assert steps.answer(world, "lab", now=now) == {"fewer": [], "more": sorted((drawn, other))}.get(change, [drawn])


def test_an_announcement_that_the_others_could_not_read_is_not_made(world, small):
    world.join(small.trust, {"run": small.run})
    with pytest.raises(CallerError, match="out of range"):
        steps.announce(world, replace(SETTINGS, segments=0), minutes=10, refusals=0, now=small.now)
