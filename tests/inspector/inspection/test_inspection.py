"""Each lie is rejected for the right reason, and accepted when the guard that catches it is off."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction

import pytest

from firmware_sim import CHIP_LIES, Digest, MakerCA, SigningKey
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.lies import Scenery
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.replays import replay
from inspector.inspection.sampling import draw
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.lies import LAB_LIES
from tests.guards import blind
from tests.handing import hand_over

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def inspect_run(devices):
    def run(recorded, *, off: frozenset[Guard] = frozenset(), maximum_flop: int | None = None, **changes):
        settings = replace(SETTINGS, **changes)
        trust = replace(recorded.trust, maximum_flop=maximum_flop)
        with blind(*off):
            return inspect([recorded.run], trust, settings, now=recorded.now, worker=devices.run)

    return run


def test_honest_run_is_accepted_on_two_devices_that_differ(honest, inspect_run):
    verdict = inspect_run(honest, devices=("sse41", "mkl-compatible"))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    replays = verdict.evidence["replays"]
    prints = {each["fingerprint"] for each in replays}
    prints.add(verdict.evidence["runs"][0]["training_device"]["fingerprint"])
    assert len(prints) == 3
    assert all(each["equal"] and each["steps"] == 6 for each in replays)
    assert sum(len(chip["snapshots"]) for chip in verdict.evidence["chips"]) > 0


REASONS = {
    "change-sample": r"^step 3: .*declared samples \d+, \d+",
    "reorder-data": r"^step 3: .*declared samples \d+, \d+",
    "unseen-write": r"^step 3: .*the shards of lab-chip-0000 differ",
    "tolerated-drift": r"^step 3: .*the shards of all 3 chips differ",
    "other-learning-rate": r"^step 3: ",
    "wrong-operator": r"^step 3: ",
    "edited-optimizer": r"^step 3: .*the shards of lab-chip-000\d",
    "edited-rounding-log": r"^step 3: .* at call \d+ \(aten\.convolution\.default\), element \d+: entry",
    "under-reported-flop": r"^step 3 declares \d+ FLOP; the program needs \d+",
    "extra-steps": r"^chip lab-chip-000\d, record \d+: the committed steps need .*; the meter counts another ",
    "untold-steps": r"^chip lab-chip-000\d, record \d+: .*; the meter counts another \d+ calls, \d+ FLOP, ",
    "other-memory": r"^chip lab-chip-000\d, record \d+: the snapshot claimed for step 3 ",
    "edited-chip-log": r"chip lab-chip-000\d: log ",
    "forged-initialisation": r"^step 0: the initial state is not what seed 5 gives",
    "undeclared-run": r"^chip lab-chip-000\d, record \d+: this record belongs to a run that was not declared",
    "undeclared-chips": r"lab-chip-0002",
    "two-transcripts": r"^chip lab-chip-0002, record \d+: step 3 was committed with another log",
    "fake-layers": r"^step 3: .*the shards of ",
}
"""What the reason must name."""


@pytest.mark.parametrize("lie", REASONS)
def test_lie_is_rejected_and_passes_with_its_guard_off(make_run, lie, inspect_run):
    recorded = make_run(lie=lie)
    samples = len(recorded.trust.chips_of("lab"))
    verdict = inspect_run(recorded, samples=samples)
    assert verdict.outcome is Outcome.REJECT
    assert {each.guard for each in verdict.reasons} <= LAB_LIES[lie].found_by
    assert any(re.search(REASONS[lie], each.text) for each in verdict.reasons), verdict.reasons
    blind = inspect_run(recorded, off=guards_of(LAB_LIES[lie]), samples=samples)
    assert blind.outcome is Outcome.ACCEPT, blind.reasons


def guards_of(lie):
    return frozenset(Guard(name) for name in lie.found_by)


def test_one_long_run_declared_as_two_is_rejected_and_passes_with_its_guard_off(make_run, devices):
    """Each of the two stays below a limit on one run; the second claims to start from its seed."""
    first = make_run("first")
    chained = make_run("second", lie="chained-runs", seed=6, after=first.run)

    def look(off=frozenset()):
        with blind(*off):
            return inspect([first.run, chained.run], chained.trust, SETTINGS, now=first.now, worker=devices.run)

    verdict = look()
    assert verdict.outcome is Outcome.REJECT
    assert [each.guard for each in verdict.reasons] == [Guard.INITIALISATION.value]
    assert verdict.reasons[0].text.startswith("step 0: the initial state is not what seed 6 gives")
    assert look(frozenset({Guard.INITIALISATION})).outcome is Outcome.ACCEPT


def test_run_is_chained_to_one_of_the_same_model_only(make_run):
    first = make_run("first", steps=1)
    with pytest.raises(CallerError, match="same model and optimizer, and the earlier run has others"):
        make_run("second", lie="chained-runs", after=first.run, preset="tiny-gpt", steps=1)
    assert not (first.run.parent / "second").exists()


@pytest.mark.parametrize(
    ("lie", "options", "message"),
    [
        ("chained-runs", {}, "give --after RUN"),
        ("two-transcripts", {"chips": 1}, "one chip hears of only one"),
        ("undeclared-chips", {"chips": 1}, "a registry without any chip"),
        ("white", {}, "unknown lie 'white'; there are "),
    ],
)
def test_lies_that_cannot_be_told_are_the_callers_mistake(make_run, lie, options, message):
    with pytest.raises(CallerError, match=message):
        make_run(lie=lie, **options)


def test_last_batches_are_exchanged_too(make_run, inspect_run):
    verdict = inspect_run(make_run(lie="reorder-data", lie_step=6))
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].text.startswith("step 5: ")


def test_truncated_transcript_is_open_until_its_declared_end_and_then_rejected(make_run, devices):
    """Before the end it might be a crash; with the guard off nobody ever asks."""
    recorded = make_run(lie="truncated-transcript")

    def look(now, off=frozenset()):
        with blind(*off):
            return inspect([recorded.run], recorded.trust, SETTINGS, now=now, worker=devices.run)

    assert look(recorded.now).outcome is Outcome.INCONCLUSIVE
    verdict = look(recorded.late)
    assert verdict.outcome is Outcome.REJECT
    (reason,) = verdict.reasons
    assert reason.guard == Guard.REPLAY.value
    assert reason.text.startswith("the run is unfinished: 2 of 6 steps are committed, and its declared end")
    assert look(recorded.late, off=frozenset({Guard.REPLAY})).outcome is Outcome.ACCEPT


def test_self_made_trust_is_rejected_and_convinces_an_inspector_who_believes_the_run(
    make_run, honest, inspect_run, monkeypatch
):
    """The lab has a maker, a registry and chips of its own, and says so in the run."""
    recorded = make_run(lie="self-made-trust", lab="own", seed=77)
    anchors = recorded.run / "trust.json"
    with pytest.raises(EvidenceError, match="inside the run"):
        Trust.load([anchors], [recorded.run])
    stranger = replace(recorded, trust=honest.trust)
    verdict = inspect_run(stranger)
    assert (verdict.outcome, verdict.reasons[0].guard) == (Outcome.INCONCLUSIVE, "copy")
    assert "no registered lab has signed its manifest.json" in verdict.reasons[0].text
    assert "ignored in run, unread: 'trust.json'" in inspect_run(recorded).reasons[0].text
    hand_over(recorded.run)
    verdict = inspect_run(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert "'trust.json' is not listed in the journal, although its lab has signed for it" in verdict.reasons[0].text
    monkeypatch.setattr("monitor.transcript.RunFolder.check_listing", lambda self: 0)
    naive = Trust.from_json(json.loads(anchors.read_text()), "the run itself")
    assert inspect_run(replace(recorded, trust=naive)).outcome is Outcome.ACCEPT
    assert inspect_run(stranger).outcome is Outcome.INCONCLUSIVE


SHOWN_BY_VERIFY = [
    lie
    for lie in CHIP_LIES.values()
    if lie.found_by - {"snapshot"} and lie.scenery is Scenery.RUN and lie.name != "open-epoch"
]


@pytest.mark.parametrize("lie", SHOWN_BY_VERIFY, ids=lambda lie: lie.name)
def test_lying_chip_is_named_by_verify_and_passes_with_its_guards_off(make_run, lie):
    recorded = make_run(lie=lie.name, steps=12, rate=Fraction(1))
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert {each.guard for each in verdict.reasons} <= lie.found_by
    assert all("chip-0000" in each.text or "maker CA" in each.text for each in verdict.reasons), verdict.reasons
    with blind(*guards_of(lie)):
        blinded = verify(recorded.run, recorded.trust, now=recorded.now)
    assert blinded.outcome is Outcome.ACCEPT, blinded.reasons


@pytest.mark.parametrize("lie", ["swap-weights", "replay-snapshot"])
def test_chip_that_shows_other_memory_inside_of_steps_is_named_by_replays(make_run, inspect_run, lie):
    """All snapshots lie inside of steps, so that without a replay nothing can be said of them."""
    recorded = make_run(lie=lie, rate=Fraction(1))
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    verdict = inspect_run(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert {(each.guard, each.where["chip"]) for each in verdict.reasons} == {("snapshot", "lab-chip-0000")}
    assert inspect_run(recorded, off=frozenset({Guard.SNAPSHOT})).outcome is Outcome.ACCEPT


def test_quote_by_another_key_is_rejected_whatever_guards_are_on(make_run):
    recorded = make_run(lie="sign-with-another-key")
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT


def test_lab_with_its_own_maker_is_rejected_and_passes_with_the_guard_off(honest, inspect_run):
    stranger = MakerCA.create(b"the inspector's maker").certificate_digest
    trust = replace(honest.trust, chip_trust=replace(honest.trust.chip_trust, ca_digests=frozenset({stranger})))
    recorded = replace(honest, trust=trust)
    verdict = inspect_run(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert any("maker CA" in each.text and "not trusted" in each.text for each in verdict.reasons)
    assert inspect_run(recorded, off=frozenset({Guard.IDENTITY})).outcome is Outcome.ACCEPT


def test_chip_that_the_registry_does_not_know_is_rejected_and_passes_with_the_guard_off(honest, inspect_run):
    """The lab's own list of chips, in the metadata, makes no chip a registered one."""
    known = {chip: lab for chip, lab in honest.trust.chips.items() if chip != "lab-chip-0002"}
    recorded = replace(honest, trust=replace(honest.trust, chips=known))
    verdict = inspect_run(recorded, samples=2)
    assert verdict.outcome is Outcome.REJECT
    assert [each.where["chip"] for each in verdict.reasons] == ["lab-chip-0002"]
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.REJECT
    assert inspect_run(recorded, samples=2, off=frozenset({Guard.IDENTITY})).outcome is Outcome.ACCEPT


def test_firmware_that_is_not_allowed_is_rejected(honest, inspect_run):
    other = Digest("sha256", bytes(32))
    trust = replace(honest.trust, chip_trust=replace(honest.trust.chip_trust, measurements=frozenset({other})))
    verdict = inspect_run(replace(honest, trust=trust))
    assert verdict.outcome is Outcome.REJECT
    assert any("not allowed" in each.text for each in verdict.reasons)


def test_chip_of_the_registry_without_evidence_is_a_refusal(honest, inspect_run):
    trust = replace(honest.trust, chips={**honest.trust.chips, "lab-chip-0009": "lab"})
    verdict = inspect_run(replace(honest, trust=trust), samples=4)
    assert verdict.outcome is Outcome.REJECT
    assert any("lab-chip-0009 was drawn, but no evidence" in each.text for each in verdict.reasons)


def test_quote_for_another_challenge_is_rejected(honest, inspect_run):
    trust = replace(honest.trust, nonce=bytes(32))
    verdict = inspect_run(replace(honest, trust=trust))
    assert verdict.outcome is Outcome.REJECT
    assert any("nonce" in each.text for each in verdict.reasons)


def test_run_signed_by_an_unregistered_lab_is_rejected_where_a_registered_one_signed_for_it(make_run):
    recorded = make_run()
    key = SigningKey.generate(bytes(32))
    trust = replace(recorded.trust, labs={"lab": key.verifying})
    verdict = verify(recorded.run, trust, now=recorded.now)
    assert (verdict.outcome, verdict.reasons[0].guard) == (Outcome.INCONCLUSIVE, "copy")
    hand_over(recorded.run, key, run_id="00" * 32)
    verdict = verify(recorded.run, trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].where["lab"] == "lab"


def test_trust_file_inside_the_run_is_refused(honest, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(honest.run, run)
    own = run / "trust.json"
    own.write_text(json.dumps(honest.trust.to_json()))
    with pytest.raises(EvidenceError, match="inside the run"):
        Trust.load([own], [run])
    outside = tmp_path / "trust.json"
    outside.write_text(json.dumps(honest.trust.to_json()))
    verdict = verify(run, Trust.load([outside], [run]), now=honest.now)
    assert verdict.outcome is Outcome.ACCEPT
    assert "ignored in run, unread: 'trust.json'" in verdict.reasons[0].text


def test_native_run_is_rejected_because_no_device_can_reproduce_it(make_run, inspect_run):
    verdict = inspect_run(make_run(numerics="native"))
    assert verdict.outcome is Outcome.REJECT
    assert "native numerics" in verdict.reasons[0].text


def test_replay_on_the_training_device_alone_is_inconclusive(make_run):
    def echo(name, job):
        from inspector.replay._worker import _ACTIONS
        from monitor.environment import fingerprint

        return {"device": name, "fingerprint": str(fingerprint()), "seconds": 0.0, **_ACTIONS[job["action"]](job)}

    recorded = make_run()
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=echo)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "computes like the training device" in verdict.reasons[0].text


def test_broken_device_is_inconclusive(honest):
    def broken(name, job):
        raise DeviceError(f"device {name} broke")

    verdict = inspect([honest.run], honest.trust, SETTINGS, now=honest.now, worker=broken)
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_short_answer_of_a_device_is_inconclusive(honest, devices):
    def short(name, job):
        result = devices.run(name, job)
        for each in result["replays"]:
            each["leaves"] = each["leaves"][:-1]
        return result

    verdict = inspect([honest.run], honest.trust, SETTINGS, now=honest.now, worker=short)
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_no_snapshot_is_not_acceptance(make_run, inspect_run):

    verdict = inspect_run(make_run(rate=Fraction(1, 10**9)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "no snapshot" in verdict.reasons[0].text


@pytest.mark.parametrize("samples", [0, -1, 4])
def test_impossible_number_of_samples_is_the_callers_mistake(honest, samples, inspect_run):
    with pytest.raises(CallerError, match="cannot draw"):
        inspect_run(honest, samples=samples)


def test_no_device_and_no_run_are_the_callers_mistakes(honest, inspect_run):
    with pytest.raises(CallerError):
        inspect_run(honest, devices=())
    with pytest.raises(CallerError):
        inspect([], honest.trust, SETTINGS, now=honest.now)


def test_rule_on_total_compute(honest, inspect_run):
    total = inspect_run(honest).evidence["runs"][0]["flop"]
    assert total > 0
    most = inspect_run(honest).evidence["runs"][0]["execution"]["most_flop"]
    assert inspect_run(honest, maximum_flop=most).outcome is Outcome.ACCEPT
    verdict = inspect_run(honest, maximum_flop=most - 1)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"with what elementwise work can hide it is {most}" in verdict.reasons[0].text
    verdict = inspect_run(honest, maximum_flop=total - 1)
    assert verdict.outcome is Outcome.REJECT
    assert f"declares {total} FLOP" in verdict.reasons[0].text


def test_segments_limit_is_honoured(honest, inspect_run):
    verdict = inspect_run(honest, segments=1)
    assert [len(each["segments"]) for each in verdict.evidence["replays"]] == [1]


def test_replay_of_one_segment(honest, devices):
    verdict = replay(honest.run, honest.trust, 1, "sse41", worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT
    with pytest.raises(CallerError, match="no segment 2"):
        replay(honest.run, honest.trust, 2, "sse41")


def test_draw_depends_on_the_seed_and_is_a_sample():
    items = [f"chip-{index}" for index in range(50)]
    first, second = draw(items, 10, b"a"), draw(items, 10, b"b")
    assert len(set(first)) == 10
    assert set(first) <= set(items)
    assert first != second
    assert draw(reversed(items), 10, b"a") == first


def test_two_runs_of_two_labs_are_inspected_together(make_run, devices):
    first, second = make_run("a", lab="lab-a"), make_run("b", lab="lab-b")
    trust = first.trust.merge(second.trust)
    settings = replace(SETTINGS, samples=6)
    verdict = inspect([first.run, second.run], trust, settings, now=first.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert {chip["run"] for chip in verdict.evidence["chips"]} == {"a", "b"}


def test_two_runs_on_the_same_chips_are_explained_together_and_not_apart(make_run, devices):
    first = make_run("first")
    second = make_run("second", after=first.run, steps=3, learning_rate=0.01)
    settings = replace(SETTINGS, samples=3)

    def look(*runs):
        return inspect(list(runs), second.trust, settings, now=first.now, worker=devices.run)

    both = look(first.run, second.run)
    assert both.outcome is Outcome.ACCEPT, both.reasons
    assert {chip["run"] for chip in both.evidence["chips"]} == {"second"}
    undeclared = look(second.run)
    assert undeclared.outcome is Outcome.REJECT
    texts = ("this record belongs to a run that was not declared", "explained by no committed step", "the meter counts")
    assert all(any(text in each.text for text in texts) for each in undeclared.reasons)
    with blind(Guard.SNAPSHOT, Guard.METER):
        verdict = look(second.run)
    assert verdict.outcome is Outcome.ACCEPT


def test_two_logs_of_one_chip_that_contradict_each_other_are_a_rejection(make_run, devices):
    """The same silicon made twice from one seed: each log is good alone, together they prove a rollback."""
    first, second = make_run("first"), make_run("second", learning_rate=0.01)
    assert verify(second.run, second.trust, now=second.now).outcome is Outcome.ACCEPT
    trust = first.trust.merge(second.trust)
    verdict = inspect([first.run, second.run], trust, SETTINGS, now=first.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert any("contradict each other" in each.text for each in verdict.reasons)
