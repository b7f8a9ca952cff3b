"""An answer is newer than its question: a live challenge after the draw, which chips answer at once."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from functools import partial

import pytest

from analysis.cli import main
from firmware_sim.errors import EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.identities import check_clone_proof
from inspector.inspection.inspection import inspect
from inspector.inspection.memory import remember
from inspector.inspection.sources import Past, Sources
from inspector.inspection.verdict import Outcome
from monitor.lab.evidence import LiveChips
from monitor.lab.simulated_lab import lab_path
from monitor.transcript.layout import CHIP_FILES, chip_path
from tests.guards import off

ACCEPT, REJECT, INCONCLUSIVE = Outcome.ACCEPT, Outcome.REJECT, Outcome.INCONCLUSIVE
SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def judge(devices):
    """Inspects runs of one lab, whose chips are asked live."""

    def call(first, *others, ask=True, memory=None, later=0):
        run = partial(inspect, [first.run, *(each.run for each in others)], (others or (first,))[-1].trust, SETTINGS)
        live = LiveChips([lab_path(first.run)]).ask if ask is True else ask
        now = first.now + timedelta(seconds=later)
        sources, past = Sources(ask=live or None), Past(memory=memory)
        return run(now=now, worker=devices.run, sources=sources, past=past)

    return call


def put_back(recorded, name):
    chips = lab_path(recorded.run) / "chips"
    shutil.rmtree(chips)
    shutil.copytree(chips.with_name(name), chips)


def copied(recorded, name):
    chips = lab_path(recorded.run) / "chips"
    shutil.copytree(chips, chips.with_name(name))


def texts(verdict):
    return " ".join(reason.text for reason in verdict.reasons)


def test_a16_evidence_from_before_an_undeclared_run(make_run, judge):
    first = make_run("first")
    second = make_run("second", after=first.run, seed=6)  # on the same chips
    verdict = judge(first)  # and nobody is told
    assert verdict.outcome is REJECT
    assert "this record belongs to a run that was not declared" in texts(verdict)
    with off("live challenge"):
        assert judge(first).outcome is ACCEPT
    verdict = judge(first, second)
    assert verdict.outcome is ACCEPT, verdict.reasons
    assert "3 drawn chips answered a challenge that was made after the draw" in verdict.reasons[0].text
    assert "before they are challenged" not in verdict.reasons[1].text
    assert "before they are challenged" in judge(first, second, ask=None).reasons[1].text
    assert len({chip["nonce"] for chip in verdict.evidence["chips"]}) == 3


def test_a16_a_challenge_answered_with_what_was_handed_over(make_run, judge):
    first = make_run("first")
    make_run("second", after=first.run)

    def stale(chip, nonce, verifier):
        return {name: (first.run / chip_path(chip, name)).read_bytes() for name in CHIP_FILES}

    verdict = judge(first, ask=stale)
    assert verdict.outcome is REJECT
    assert "quote has nonce" in texts(verdict)
    with off("fresh answer"):
        assert judge(first, ask=stale).outcome is ACCEPT


def test_a16_chips_that_do_not_answer_refuse(make_run, judge):
    recorded = make_run()

    def silent(chip, nonce, verifier):
        raise EvidenceError("no answer")

    for ask, said in (
        (silent, "did not answer a live challenge"),
        (lambda *_: {}, "live challenge does not contain log.bin"),
    ):
        verdict = judge(recorded, ask=ask)
        assert verdict.outcome is REJECT
        assert said in texts(verdict)


def test_a17_chips_put_back_since_they_were_asked(make_run, judge):
    first = make_run("first")
    copied(first, "copy")
    make_run("hidden", after=first.run)
    memory = remember({}, judge(first, memory={}))  # which rejects, and remembers where the chips stood
    put_back(first, "copy")
    verdict = judge(first, memory=memory)
    assert verdict.outcome is REJECT
    assert "at the last inspection" in texts(verdict)
    with off("answer goes on"):
        assert judge(first, memory=memory).outcome is ACCEPT


def test_a17_two_copies_at_work_convict_each_other(make_run, judge):
    """One copy trains what is handed over, and the other one answers."""
    first = make_run("first")
    copied(first, "copy")
    second = make_run("second", after=first.run, seed=6)
    put_back(first, "copy")
    verdict = judge(first, second)
    assert verdict.outcome is REJECT
    assert "contradict each other" in texts(verdict)
    proof = verdict.evidence["clones"][0]
    assert proof["stands_alone"]
    check_clone_proof(proof, first.trust.chip_trust.ca_digests)
    with off("live challenge"):
        assert judge(first, second).outcome is ACCEPT


def test_a17_chips_put_back_where_nobody_asked_in_between(make_run, judge):
    first = make_run("first", beacon_every=1)
    seen = judge(first, memory={}, later=-1430)  # ten seconds after the run's last beacon
    assert seen.outcome is ACCEPT, seen.reasons
    memory = remember({}, seen)
    copied(first, "copy")
    make_run("hidden", after=first.run)
    put_back(first, "copy")
    verdict = judge(first, memory=memory, later=-1000)
    assert verdict.outcome is INCONCLUSIVE
    assert "for 430 seconds no challenge or beacon reached it: a copy of it may have worked meanwhile" in texts(verdict)
    with off("signs of life"):
        assert judge(first, memory=memory, later=-1000).outcome is ACCEPT
    memory = remember(memory, judge(first, memory=memory, later=-1000))
    assert judge(first, memory=memory, later=-945).outcome is ACCEPT  # asked again within the minute that is agreed


def test_the_commands_ask_chips_and_verify_what_they_say(make_run, tmp_path, capsys):
    recorded = make_run()
    lab, trust = str(lab_path(recorded.run)), str(tmp_path / "run.trust.json")
    nonce = "ab" * 32
    assert main(["chip", "challenge", lab, "--nonce", nonce, "--out", str(tmp_path / "said"), "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)
    assert [page["chip"] for page in pages] == recorded.trust.chips_of("lab")
    assert {page["nonce"] for page in pages} == {nonce}
    log = f"{pages[0]['folder']}/log.bin"
    assert main(["chip", "verify-log", log, "--trust", trust, "--nonce", nonce]) == 0
    assert main(["chip", "verify-log", log, "--trust", trust]) == 1
    assert "quote has nonce" in capsys.readouterr().out
    assert main(["chip", "challenge", lab, "--chip", "nobody"]) == 1
    assert "no lab that was named holds chip nobody" in capsys.readouterr().out
    assert main(["chip", "challenge", lab, "--nonce", "12"]) == 2
    words = ["inspect", str(recorded.run), "--trust", trust, "--samples", "1", "--device", "sse41", "--live", lab]
    assert main([*words, "--now", "2026-01-01T00:30:00Z"]) == 0
    assert "1 drawn chips answered a challenge" in capsys.readouterr().out
