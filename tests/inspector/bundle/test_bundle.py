"""A bundle stands alone: bound to the last byte, computed again, and of no use to frame an honest lab."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Roofline, SigningKey, canonical, open_acceptance, seal, seal_acceptance
from inspector.bundle import contents
from inspector.bundle.builder import bundle_of, settings_json
from inspector.bundle.checker import check_bundle
from inspector.bundle.contents import Bundle
from inspector.bundle.evidence import CheckedBundle
from inspector.bundle.replays import SignedReplay
from inspector.inspection.casefile import CaseFile
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.pruning import prune_chip
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE, SETTINGS, made
from tests.inspector.inspection.test_document import departures

SCHEMAS = Path(contents.__file__).parent / "schemas"


def outcome(data, trust):
    """What a third party concludes, and whether the bundle verifies."""
    verdict = check_bundle(data, trust)
    return verdict.outcome, verdict.evidence["verifies"]


def signed_anew(one, change, items=lambda items: items):
    """The bundle as an inspectorate would sign it after a change of its statement or its items."""
    bundle = Bundle.open(one.data, INSPECTORATE.verifying)
    predicate = {key: value for key, value in bundle.predicate.items() if key != "items"}
    predicate = canonical.decode(canonical.encode(predicate))
    change(predicate)
    return Bundle.sign(predicate, items(dict(bundle.items)), INSPECTORATE)


def test_an_acceptance_verifies_without_any_folder(accepted):
    verdict = check_bundle(accepted.data, accepted.trust)
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.ACCEPT, True)
    assert f"replays rest on cluster key {CLUSTER.verifying.key_id}" in verdict.reasons[0].text
    assert verdict.evidence["odds"][0]["violations"][-1]["escapes"] == 0.0


def test_a_segment_that_one_device_replays_is_enough_and_none_is_not(make_run, devices):
    """Two devices, three segments, none of them on both."""
    both = replace(SETTINGS, devices=("sse41", "mkl-compatible"), shared=0.0, sampling=None, samples=3)
    one = made(make_run(checkpoint_every=2, rate=1), devices, settings=both)
    assert outcome(one.data, one.trust) == (Outcome.ACCEPT, True)
    shown = {each["device"]: each["segments"] for each in one.verdict.evidence["replays"]}
    assert sorted(index for mine in shown.values() for index in mine) == [0, 1, 2]

    def swapped(items):
        """Each result under the other device's name."""
        for path in ("replays/0.json", "replays/1.json"):
            result = SignedReplay.open(items[path], CLUSTER.verifying)
            other = next(name for name in both.devices if name != result.device)
            items[path] = replace(result, device=other).sign(CLUSTER)
        return items

    assert outcome(signed_anew(one, lambda told: None, swapped), one.trust) == (Outcome.REJECT, False)
    less = signed_anew(one, lambda told: None, lambda items: {k: v for k, v in items.items() if k != "replays/1.json"})
    assert outcome(less, one.trust) == (Outcome.REJECT, False)


def test_a_rejection_that_rests_on_the_cluster_says_so(rejected):
    verdict = check_bundle(rejected.data, rejected.trust)
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, True)
    text = "step 2: a replay does not give what the lab signed on sse41: contested, rests on cluster key "
    assert text + CLUSTER.verifying.key_id in verdict.reasons[0].text


def test_a_rejection_by_chips_needs_no_cluster(make_run, devices):
    lied = made(make_run(lie="two-transcripts", lie_step=2), devices, settings=replace(SETTINGS, samples=3))
    verdict = check_bundle(lied.data, lied.trust)
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, True), verdict.reasons
    assert any("chip lab-chip-" in each and "contested" not in each for each in verdict.evidence["grounds"])


def test_a_rejection_by_the_device_s_pace_is_shown_by_beacons_and_meters(make_run, devices):
    """Whoever knows the devices themselves finds it in an acceptance, too."""
    recorded = make_run(beacon_every=2, steps=4)
    slow = dict.fromkeys(recorded.trust.chips, Roofline(flop=1 << 60, moved=100))
    one = made(replace(recorded, trust=replace(recorded.trust, rates=slow)), devices)
    verdict = check_bundle(one.data, replace(one.trust, rates={}))
    assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, True)
    assert all("seconds between two beacons" in text for text in verdict.evidence["grounds"])
    unknown = made(recorded, devices)
    assert outcome(unknown.data, unknown.trust) == (Outcome.ACCEPT, True)
    assert outcome(unknown.data, replace(unknown.trust, rates=slow)) == (Outcome.REJECT, False)


@pytest.mark.parametrize("which", ["accepted", "rejected"])
def test_what_a_check_states_has_the_documented_keys(which, request):
    bundle = request.getfixturevalue(which)
    evidence = check_bundle(bundle.data, bundle.trust).evidence
    assert departures(evidence, CheckedBundle) == []
    assert {"verdict", "grounds", "runs", "odds"} <= set(evidence)


@pytest.mark.parametrize("which", ["accepted", "rejected"])
def test_no_byte_can_be_changed(which, request):
    """150 places, seeded; another bit in each."""
    one = request.getfixturevalue(which)
    rng = random.Random(which)
    for place in rng.sample(range(len(one.data)), 150):
        data = bytearray(one.data)
        data[place] ^= 1 << rng.randrange(8)
        assert outcome(bytes(data), one.trust) == (Outcome.REJECT, False), place


def test_no_byte_of_a_minimal_bundle_can_be_changed(make_run, devices):
    """One chip, one step; every sixteenth byte, another bit in each."""
    recorded = make_run(steps=1, chips=1, checkpoint_every=1, batch_size=2, rate=1)
    one = made(recorded, devices, settings=replace(SETTINGS, samples=1))
    assert outcome(one.data, one.trust) == (Outcome.ACCEPT, True)
    for place in range(random.Random(1).randrange(16), len(one.data), 16):
        data = bytearray(one.data)
        data[place] ^= 1 << place // 16 % 8
        assert outcome(bytes(data), one.trust) == (Outcome.REJECT, False), place


def test_no_item_can_be_left_out_or_added(accepted):
    data = canonical.decode(accepted.data)
    for path in data["items"]:
        less = {name: text for name, text in data["items"].items() if name != path}
        assert outcome(canonical.encode({**data, "items": less}), accepted.trust) == (Outcome.REJECT, False)
    more = {**data["items"], "replays/99.json": data["items"]["replays/0.json"]}
    assert outcome(canonical.encode({**data, "items": more}), accepted.trust) == (Outcome.REJECT, False)


def test_a_foreign_library_opens_each_envelope(accepted):
    data = canonical.decode(accepted.data)
    keys = {"verdict": INSPECTORATE.verifying, "replays/0.json": CLUSTER.verifying}
    run = accepted.case.transcripts[0].run
    keys[f"runs/{run.manifest.run}/head.json"] = accepted.trust.key_of(run.metadata.lab)
    declared = next(path for path in data["items"] if path.startswith("declarations/"))
    signer = canonical.decode(base64.b64decode(data["items"][declared]))["signatures"][0]["keyid"]
    keys[declared] = next(key for key in accepted.trust.inspectorates if key.key_id == signer)
    for name, key in keys.items():
        envelope = data["verdict"] if name == "verdict" else canonical.decode(base64.b64decode(data["items"][name]))
        opened = Envelope.from_dict(envelope)
        foreign = SSlibKey(key.key_id, "ed25519", "ed25519", {"public": key.raw.hex()})
        assert list(opened.verify([foreign], 1)) == [key.key_id]


def test_what_is_signed_has_the_documented_form(accepted, rejected):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {name: json.loads((SCHEMAS / f"{name}.json").read_text()) for name in ("bundle", "verdict", "replay")}
    for one in (accepted, rejected):
        data = canonical.decode(one.data)
        signed = {"verdict": data["verdict"], "replay": json.loads(base64.b64decode(data["items"]["replays/0.json"]))}
        jsonschema.validate(data, schemas["bundle"])
        for name, envelope in signed.items():
            payload = json.loads(base64.b64decode(envelope["payload"]))
            jsonschema.validate(payload, schemas[name])
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**payload, "predicateType": "another"}, schemas[name])


def lie_of(guard, text):
    def change(told):
        told["outcome"] = "REJECT"
        told["reasons"] = [{"guard": guard, "text": text}]

    return change


def test_eleven_ways_to_frame_an_honest_lab(accepted, rejected):
    """Whoever has the inspectorate's key, and not the cluster's, shows nobody else a rejection of an honest lab."""
    own = SigningKey.generate(b"o" * 32)
    before = Bundle.open(accepted.data, INSPECTORATE.verifying).items
    liars = Bundle.open(rejected.data, INSPECTORATE.verifying).items
    run = f"runs/{accepted.case.transcripts[0].run.manifest.run}"
    head, steps, declared = (before[f"{run}/{name}.json"] for name in ("head", "steps", "metadata"))
    replay = before["replays/0.json"]
    log = min(path for path in before if path.endswith("log.bin"))
    honest = SignedReplay.open(replay, CLUSTER.verifying)
    wrong = tuple(replace(each, leaves=tuple(reversed(each.leaves))) for each in honest.replays)
    forged = replace(honest, replays=wrong)
    ways = {
        "says so": {},
        "signs a replay with a key of its own": {"replays/0.json": forged.sign(own)},
        "signs a replay with the inspectorate's key": {"replays/0.json": forged.sign(INSPECTORATE)},
        "takes the replay of a liar's run": {"replays/0.json": liars["replays/0.json"]},
        "alters a signed replay": {"replays/0.json": replay.replace(b"replay", b"rePlay", 1)},
        "alters a chip's log": {log: before[log][:-1] + bytes([before[log][-1] ^ 1])},
        "shortens a chip's log": {log: before[log][: len(before[log]) // 2]},
        "opens a step in place of another": {f"{run}/steps.json": steps.replace(b'"1":', b'"9":')},
        "alters the declaration": {f"{run}/metadata.json": declared.replace(b":5", b":6", 1)},
        "signs a head for the lab": {"heads/1.json": other_head(head, own)},
        "takes the lab's last head for another": {"heads/1.json": head},
    }
    reject = lie_of("replay", "step 2 is false")
    for name, changed in ways.items():
        assert all(before.get(path) != content for path, content in changed.items()), name
        data = signed_anew(accepted, reject, lambda found, changed=changed: {**found, **changed})
        found, verifies = outcome(data, accepted.trust)
        assert found is not Outcome.REJECT or not verifies, name
    with off("signed replays"):
        data = signed_anew(accepted, reject, lambda found: {**found, "replays/0.json": forged.sign(own)})
        assert outcome(data, accepted.trust) == (Outcome.REJECT, True)


def other_head(head, key):
    """Another head of the same run, signed by whoever is not the lab."""
    envelope = canonical.decode(head)
    payload = canonical.decode(base64.b64decode(envelope["payload"]))
    return seal(envelope["payloadType"], {**payload, "steps": 1}, key)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["evidence"]["draw"].update(heads=[]),
        lambda told: told["evidence"].update(drawn_chips=["lab-chip-0000"]),
        lambda told: told["evidence"]["odds"][0]["violations"][0].update(escapes=0.0, needed_draws=0),
        lambda told: told["evidence"].update(odds=[]),
        lambda told: told["settings"].update(samples=1),
        lambda told: told["settings"].update(devices=["sse41", "mkl-compatible"]),
        lambda told: told["challenge"].update(nonce="00" * 32),
        lambda told: told["evidence"].pop("draw"),
        lambda told: told.update(outcome="MAYBE"),
        lambda told: told["settings"].update(samples="2"),
    ],
)
def test_an_acceptance_that_was_not_earned_does_not_verify(accepted, change):
    assert outcome(signed_anew(accepted, change), accepted.trust) == (Outcome.REJECT, False)


def test_another_secret_draws_other_chips(accepted):
    def of(secret):
        return outcome(
            signed_anew(accepted, lambda told: told["evidence"]["draw"].update(secret=secret)), accepted.trust
        )

    found = {of(str(number)) for number in range(16)}  # of which a third draw the same two of three chips
    assert (Outcome.REJECT, False) in found


def test_a_rejection_cannot_be_turned_into_an_acceptance(rejected):
    data = signed_anew(rejected, lambda told: told.update(outcome="ACCEPT"))
    assert outcome(data, rejected.trust) == (Outcome.REJECT, False)


def test_who_trusts_other_keys_is_shown_nothing(accepted):
    stranger = SigningKey.generate(b"s" * 32).verifying
    for trust in (
        replace(accepted.trust, inspectorates=frozenset({stranger})),
        replace(accepted.trust, clusters=frozenset({stranger})),
        replace(accepted.trust, labs=dict.fromkeys(accepted.trust.labs, stranger)),
        replace(accepted.trust, chips=dict.fromkeys(map("other-{}".format, accepted.trust.chips), "lab")),
    ):
        assert outcome(accepted.data, trust) == (Outcome.REJECT, False)
    with pytest.raises(CallerError, match="names no inspectorate"):
        check_bundle(accepted.data, replace(accepted.trust, inspectorates=frozenset()))


def test_a_bundle_needs_a_cluster(accepted):
    case = CaseFile(heads=accepted.case.heads, replays=[{"fingerprint": "x"}])
    with pytest.raises(CallerError, match="no cluster has signed"):
        bundle_of(case, accepted.verdict, accepted.trust, SETTINGS, INSPECTORATE)


def test_an_acceptance_of_pruned_chips_is_of_the_transcript_that_was_accepted_before(
    make_run, record, devices, tmp_path
):
    """Its inspectorate overlooks that an earlier one had accepted another."""
    case = CaseFile()
    first = make_run()
    inspect([first.run], first.trust, SETTINGS, now=first.now, worker=devices.run, case=case)
    lab = lab_path(first.run)
    key = SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab))
    for chip, (since, standing) in case.prunable.items():
        prune_chip(lab, chip, seal_acceptance(chip, since, standing, key))
    second = record(tmp_path / "second", after=first.run, seed=6)
    one = made(second, devices, runs=[first.run, second.run])
    assert outcome(one.data, one.trust) == (Outcome.ACCEPT, True)

    def of_another(items):
        for path in [path for path in items if path.endswith("/checkpoint.json")]:
            chip = path.split("/")[1]
            since, standing = open_acceptance(items[path], chip, [key.verifying])
            other = {run: heard._replace(head=b"x" * 32) for run, heard in standing.runs.items()}
            items[path] = seal_acceptance(chip, since, replace(standing, runs=other), key)
        return items

    assert outcome(signed_anew(one, lambda told: None, of_another), one.trust) == (Outcome.REJECT, False)


def test_a_verdict_about_no_run_or_no_segment_is_a_line(accepted):
    def of_no_run(told):
        told["evidence"]["odds"][0]["run_id"] = "00" * 32

    def of_no_segment(told):
        [run] = told["evidence"]["runs"]
        told["evidence"]["accepted_before"] = {run["run_id"]: run["steps"]}

    for change in (of_no_run, of_no_segment):
        assert outcome(signed_anew(accepted, change), accepted.trust) == (Outcome.REJECT, False)


def test_a_bundle_of_settings_that_nobody_knows_spares_no_replay(accepted):
    """Such as one from before a setting existed."""
    wanted = settings_json(SETTINGS)
    assert contents.accepted_in([accepted.data], [INSPECTORATE.verifying], wanted)
    older = signed_anew(accepted, lambda told: told["settings"].pop("shared"))
    assert contents.accepted_in([older], [INSPECTORATE.verifying], wanted) == {}


def test_a61_how_each_drawn_chip_was_asked_is_stated_once(accepted):
    """A chip that it leaves out, names twice, or asked by a nonce that is none would count as challenged live."""
    first, second = check_bundle(accepted.data, accepted.trust).evidence["drawn_chips"]

    def twice(stated):
        [entry] = [each for each in stated["chips"] if each["chip"] == second]
        stated["chips"] = [{**entry, "nonce": "00" * 32}, *stated["chips"]]

    def without(*names):
        return lambda stated: stated.update(chips=[each for each in stated["chips"] if each["chip"] not in names])

    def asked(nonce):
        return lambda stated: [each.update(nonce=nonce) for each in stated["chips"]]

    agreed = Bundle.open(accepted.data, INSPECTORATE.verifying).predicate["challenge"]["nonce"]
    for change, text in (
        (without(first), "how each drawn chip was asked"),
        (without(first, second), "how each drawn chip was asked"),
        (twice, "states one chip twice"),
        *((asked(nonce), "a nonce that the verdict states") for nonce in (" ", "00", "AB" * 32, "ab" * 33, agreed)),
    ):
        verdict = check_bundle(
            signed_anew(accepted, lambda told, change=change: change(told["evidence"])), accepted.trust
        )
        assert (verdict.outcome, verdict.evidence["verifies"]) == (Outcome.REJECT, False)
        assert text in verdict.reasons[0].text
