"""A clone is caught whatever is drawn, by a proof that stands without the inspector; so are two logs of one chip."""

from __future__ import annotations

import base64
import copy
import shutil
from dataclasses import replace

import pytest

import monitor.recording.recipes
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.identities import check_clone_proof
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import lab_path
from monitor.transcript.layout import CHIP_FILES
from tests.guards import blind, off

ONE = Settings(samples=1, seed="x", devices=("sse41",))
GUARD = "one chip, one identity"


@pytest.fixture(scope="module")
def cloned(record, tmp_path_factory):
    """A run whose first chip holds the secrets of the second."""
    return record(tmp_path_factory.mktemp("clone") / "run", lie="clone-identity")


@pytest.fixture
def judge(devices):
    def judge(recorded, *others, settings=ONE):
        runs = [recorded.run, *(other.run for other in others)]
        signed = recorded.trust.countersigned.union(*(other.trust.countersigned for other in others))
        trust = replace(recorded.trust, countersigned=signed)
        return inspect(runs, trust, settings, now=recorded.now, worker=devices.run)

    return judge


def blind_seed(recorded, judge):
    """A seed by which the impostor is not drawn."""
    for number in range(64):
        settings = replace(ONE, seed=str(number))
        if "lab-chip-0000" not in judge(recorded, settings=settings).evidence["drawn_chips"]:
            return settings
    raise AssertionError("64 draws of one of three chips took the first each time")


def test_a_clone_is_caught_although_it_is_not_drawn(cloned, judge):
    settings = blind_seed(cloned, judge)
    verdict = judge(cloned, settings=settings)
    assert verdict.outcome is Outcome.REJECT
    (reason,) = verdict.reasons
    assert reason.guard == Guard.CLONE.value
    assert reason.text == "chips lab-chip-0000 (run) and lab-chip-0001 (run) present one identity"
    assert reason.where == {"chip": "lab-chip-0000"}
    assert verdict.evidence["labs"] == {"lab": "REJECT"}
    with off(GUARD):
        assert judge(cloned, settings=settings).outcome is Outcome.ACCEPT
    with blind(Guard.CLONE):
        assert judge(cloned, settings=settings).outcome is Outcome.ACCEPT


def test_verify_names_the_clone_too(cloned):
    verdict = verify(cloned.run, cloned.trust, now=cloned.now)
    assert {each.guard for each in verdict.reasons} == {Guard.CLONE.value, Guard.IDENTITY.value}
    assert verdict.evidence["clones"][0]["stands_alone"]


def test_the_proof_stands_by_itself(cloned, honest, judge):
    (proof,) = judge(cloned).evidence["clones"]
    assert proof["stands_alone"]
    makers = cloned.trust.chip_trust.ca_digests
    check_clone_proof(proof, makers)
    with pytest.raises(EvidenceError, match="is not trusted"):
        check_clone_proof(proof, {Digest("sha256", bytes(32))})
    for change, message in (
        (lambda sides: sides.pop(), "not a proof"),
        (lambda sides: sides[0].update(log=None), "not a proof"),
        (lambda sides: sides[0].update(log="!"), "not a proof"),
        (lambda sides: sides[0].update(log=sides[1]["log"]), "log ends with head|log has|the chip's genesis"),
        (lambda sides: sides[0].update(quote=sides[1]["quote"]), "log ends with head|log has|the chip's genesis"),
        (lambda sides: sides[0].update(sides[1]), "one extends the other"),
    ):
        forged = copy.deepcopy(proof)
        change(forged["evidence"])
        with pytest.raises(EvidenceError, match=message):
            check_clone_proof(forged, makers)
    assert judge(honest).evidence["clones"] == []


def test_two_honest_chips_prove_nothing(cloned, honest, judge):
    """Evidence of two chips that are what they say, put together as if it were of one."""
    (proof,) = judge(cloned).evidence["clones"]
    sides = []
    for chip in ("lab-chip-0000", "lab-chip-0001"):
        folder = honest.run / "chips" / chip
        sides.append(copy.deepcopy(proof["evidence"][0]))
        sides[-1]["chain"] = (folder / "chain.pem").read_text()
        sides[-1]["quote"] = (folder / "quote.json").read_text()
        sides[-1]["log"] = base64.b64encode((folder / "log.bin").read_bytes()).decode()
    with pytest.raises(EvidenceError, match="chips with different identities"):
        check_clone_proof({"evidence": sides}, honest.trust.chip_trust.ca_digests)


def test_two_logs_of_one_chip_show_although_it_is_not_drawn(make_run, judge):
    """The lab copies its silicon, trains two runs from the same state, and declares all of them."""
    first = make_run("first")
    silicon = lab_path(first.run) / "chips"
    copied = silicon.with_name("copy")
    shutil.copytree(silicon, copied)
    second = make_run("second", seed=6, after=first.run)
    shutil.rmtree(silicon)
    copied.rename(silicon)
    third = make_run("third", seed=7, after=first.run)
    assert judge(first, second).outcome is Outcome.ACCEPT
    verdict = judge(first, second, third)
    assert verdict.outcome is Outcome.REJECT
    clones = [each for each in verdict.reasons if each.guard == Guard.CLONE.value]
    assert {each.where["chip"] for each in clones} == {f"lab-chip-000{number}" for number in range(3)}
    assert all("contradict each other" in each.text for each in clones)
    assert all(proof["stands_alone"] for proof in verdict.evidence["clones"])


def test_a_chip_that_answers_in_two_runs_is_no_clone(make_run, judge):
    first = make_run("first")
    second = make_run("second", seed=6, after=first.run)
    verdict = judge(first, second)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["clones"] == []


def test_stolen_evidence_convicts_the_thief_alone(make_run, devices, monkeypatch):
    """A lab shows another lab's chip as one of its own: the identity is the victim's, the place the thief's."""
    victim = make_run("victim", lab="lab-a")
    stolen = {name: (victim.run / "chips" / "lab-a-chip-0000" / name).read_bytes() for name in CHIP_FILES}
    genuine = monitor.lab.evidence._answer

    def answer(chip, *request):
        return stolen if chip.chip_id == "lab-b-chip-0000" else genuine(chip, *request)

    monkeypatch.setattr("monitor.lab.evidence._answer", answer)
    thief = make_run("thief", lab="lab-b")
    for runs in ((victim, thief), (thief, victim)):
        trust = victim.trust.merge(thief.trust)
        settings = replace(ONE, samples=6)
        verdict = inspect([each.run for each in runs], trust, settings, now=victim.now, worker=devices.run)
        assert verdict.evidence["labs"] == {"lab-a": "ACCEPT", "lab-b": "REJECT"}
        assert [each.where["chip"] for each in verdict.reasons if each.guard == "clone"] == ["lab-b-chip-0000"]
        (proof,) = verdict.evidence["clones"]
        assert not proof["stands_alone"]
        assert "one extends the other" in proof["rests_on"]


def test_a_clone_needs_another_chip(make_run):
    with pytest.raises(CallerError, match="take at least two"):
        make_run(lie="clone-identity", chips=1)
