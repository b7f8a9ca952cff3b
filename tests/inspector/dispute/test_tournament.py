"""Among n parties of which one is honest, its claim prevails, whatever the others have agreed on."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.cli import main
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical, decode_base64
from inspector.dispute.arena import check_tournament, is_tournament, play_tournament
from inspector.dispute.game import Party, Terms
from inspector.dispute.provider import Provider
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.wire.desk import Desk, Local
from monitor.lab.prover import LabProver
from monitor.transcript import Manifest
from tests.inspector.dispute.test_game import NOW, REFEREE, Gone, record

TERMS = Terms(seconds=5)
HONEST = ("honest", "other", "third")
LIARS = ("early", "early-too", "late", "later")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Labs that compute what they should, and others with a wrong operator, two of them in the same step."""
    folder = tmp_path_factory.mktemp("tournament")
    steps = dict(zip(LIARS, (2, 2, 3, 4), strict=True))
    found = {name: record(folder, name) for name in HONEST}
    found["again"] = record(folder, "again", lab="honest", beside=3)
    return found | {name: record(folder, name, lie="wrong-operator", lie_step=steps[name]) for name in LIARS}


@pytest.fixture(scope="module")
def trust(runs) -> Trust:
    return Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs.values()])


@pytest.fixture(scope="module")
def provers(runs) -> dict[str, LabProver]:
    return {name: LabProver(run) for name, run in runs.items()}


@pytest.fixture
def party(runs, trust, provers, tmp_path) -> Callable[..., Party]:
    """Make a party in this process; ``change(text, answer)`` gives another body, or raises."""

    def make(name, change=None, transport=Local):
        provider = Provider(open_run(runs[name], trust), provers[name])

        def answer(text):
            return provider.answer(text) if change is None else change(text, lambda: provider.answer(text))

        key, run = provers[name].key, open_run(runs[name], trust).manifest.run
        desk = Desk(tmp_path / name, answer, key, [REFEREE.verifying], run)
        return Party(name=name, key=key.verifying, transport=transport(desk))

    return make


def played(trust, *parties):
    """The verdict, which its evidence alone gives again."""
    verdict, data = play_tournament(parties, trust, REFEREE, TERMS, now=NOW)
    again = check_tournament(data, replace(trust, inspectorates=trust.inspectorates | {REFEREE.verifying}))
    assert is_tournament(data)
    assert again.evidence == {**verdict.evidence, "verifies": True}, again.reasons
    assert again.outcome is verdict.outcome
    assert len(verdict.evidence["games"]) <= len(parties) - 1
    return verdict, data


@pytest.mark.parametrize("place", range(5))
def test_one_honest_party_among_five_prevails_at_every_place(party, trust, place):
    """Two of the four liars have the same claim; each is named with its step."""
    parties = [party(name) for name in LIARS]
    parties.insert(place, party("honest"))
    verdict, _ = played(trust, *parties)
    evidence = verdict.evidence
    assert (verdict.outcome, evidence["prevails"]) == (Outcome.REJECT, ["honest"])
    assert (sorted(evidence["guilty"]), evidence["absent"]) == (sorted(LIARS), [])
    assert {loss["party"]: loss["step"] for loss in evidence["losses"]} == dict(zip(LIARS, (2, 2, 3, 4), strict=True))
    assert all(loss["operator"].startswith("aten.") for loss in evidence["losses"])
    assert len(evidence["games"]) == 4


def test_four_liars_with_one_claim_lose_one_after_the_other(party, trust, runs, tmp_path):
    """They have all agreed on the wrong operator of step 2; the honest party refutes each by its own signature."""
    early = party("early")
    same = [Party(name=name, key=early.key, transport=early.transport) for name in ("early", "b", "c", "d")]
    verdict, _ = play_tournament([*same[:2], party("honest"), *same[2:]], trust, REFEREE, TERMS, now=NOW)
    assert (verdict.evidence["prevails"], verdict.evidence["guilty"]) == (["honest"], ["early", "b", "c", "d"])
    assert len(verdict.evidence["games"]) == 4


def test_equal_claims_cost_no_game(party, trust):
    verdict, _ = played(trust, *map(party, HONEST))
    assert (verdict.outcome, verdict.evidence["prevails"]) == (Outcome.ACCEPT, list(HONEST))
    assert (verdict.evidence["games"], verdict.evidence["rounds"], verdict.evidence["steps"]) == ([], 0, 5)


def test_of_liars_alone_the_last_one_prevails_and_has_been_confirmed_by_none(party, trust):
    verdict, _ = played(trust, *map(party, ("early", "late", "later")))
    assert (verdict.outcome, verdict.evidence["prevails"]) == (Outcome.REJECT, ["later"])
    assert verdict.evidence["guilty"] == ["early", "late"]
    assert "no other party has confirmed all of it" in verdict.reasons[0].text


@pytest.mark.parametrize("kind", ["claim", "results", "step", "trace"])
def test_who_is_gone_is_absent_and_the_next_of_its_claim_plays(party, trust, kind):
    one = party("honest")
    gone = Party(name=one.name, key=one.key, transport=Gone(one.transport, kind))
    verdict, data = played(trust, gone, party("early"), party("other"))
    assert (verdict.evidence["prevails"], verdict.evidence["guilty"]) == (["other"], ["early"])
    assert verdict.evidence["absent"] == ["honest"]
    assert check_tournament(data, trust).outcome is Outcome.REJECT, "the guilt of another does not rest on the referee"


def test_absence_alone_is_the_word_of_the_referee(party, trust):
    one = party("early")
    gone = Party(name=one.name, key=one.key, transport=Gone(one.transport, "claim"))
    verdict, data = played(trust, party("honest"), gone, party("other"))
    assert (verdict.outcome, verdict.evidence["prevails"]) == (Outcome.REJECT, ["honest", "other"])
    offline = check_tournament(data, trust)
    assert (offline.outcome, offline.evidence["guilty"]) == (Outcome.INCONCLUSIVE, [])
    assert any(
        "early is absent, says referee" in reason.text or "early is absent" in reason.text for reason in offline.reasons
    )


def test_a_colluder_that_has_joined_the_honest_claim_loses_alone(party, trust):
    """It has an honest run, and refuses to show its operators, so that the claim of both would be refuted."""

    def refuse(text, answer):
        if text.startswith("trace"):
            raise EvidenceError("I would rather not")
        return answer()

    verdict, _ = played(trust, party("other", refuse), party("early"), party("honest"))
    assert (verdict.evidence["prevails"], sorted(verdict.evidence["guilty"])) == (["honest"], ["early", "other"])


class Turncoat:
    """Answers a question of some kind otherwise when it comes again."""

    def __init__(self, kind, other):
        self._kind, self._other, self._asked = kind, other, set()

    def __call__(self, text, answer):
        if text.partition(" ")[0] != self._kind:
            return answer()
        is_new = text not in self._asked
        self._asked.add(text)
        return answer() if is_new else self._other(answer())


def other_root(body):
    return canonical.encode([canonical.decode(body)[0], "00" * 32])


def other_leaf(body):
    return canonical.encode({**canonical.decode(body), "leaf": "AAAA"})


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("claim", "the head after step 5"),
        ("results", "the first 6 results"),
        ("step", "the leaf of step 2"),
        ("trace", "the operators of step 2"),
    ],
)
def test_a_party_that_signs_two_statements_of_one_thing_is_guilty(party, trust, provers, kind, what):
    """It joins the honest claim, and says something else in a game that it then plays for it."""

    def other_head(body):
        claim, key = canonical.decode(body), provers["other"].key
        head = replace(Manifest.open(decode_base64(claim["manifest"]), key.verifying), root=bytes(32))
        return canonical.encode({**claim, "manifest": base64.b64encode(head.seal(key)).decode()})

    change = {"claim": other_head, "step": other_leaf}.get(kind, other_root)
    parties = [party("other", Turncoat(kind, change)), party("early"), party("honest"), party("early-too")]
    verdict, data = play_tournament(parties, trust, REFEREE, TERMS, now=NOW)
    loss = next(loss for loss in verdict.evidence["losses"] if loss["party"] == "other")
    assert verdict.evidence["prevails"] == ["honest"]
    assert (loss["kind"], loss["case"]) == ("guilty", "equivocation")
    assert loss["text"] == f"other has signed two different statements of {what}"
    assert check_tournament(data, trust).evidence == {**verdict.evidence, "verifies": True}


def test_the_command_plays_a_tournament_between_folders(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    names = ("late", "honest", "early")
    words = [word for name in runs for word in ("--trust", str(runs[name].with_name(f"{name}.trust.json")))]
    games = tmp_path / "games.json"
    assert main(["dispute", *(str(runs[name]) for name in names), *words, "--out", str(games)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("REJECT\n  the claim of honest prevails: it ends after step 5; no other party has confirmed")
    assert "\n  prevails             honest\n" in text
    assert "\n  game late against honest: REJECT\n" in text
    assert main(["verify", str(games), *words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["evidence"]
    assert (found["verifies"], found["prevails"], found["guilty"]) == (True, ["honest"], ["late", "early"])


def test_two_runs_of_one_lab_do_not_make_it_guilty(party, trust, runs, provers):
    """A referee that has games about both can't frame it: that they are of one tournament is its word alone."""
    assert provers["again"].key.verifying == provers["honest"].key.verifying
    second = Provider(open_run(runs["again"], trust), provers["again"])
    asked = []

    def switch(text, answer):
        asked.append(text)
        return second.answer(text) if asked.count("claim") > 1 else answer()

    verdict, data = played(trust, party("honest", switch), party("early"), party("other"))
    assert (verdict.evidence["absent"], verdict.evidence["prevails"]) == (["honest"], ["other"])
    assert "honest" not in verdict.evidence["guilty"]
    losses = {loss["party"]: loss["case"] for loss in check_tournament(data, trust).evidence["losses"]}
    assert losses["honest"] == "other run"


class Crossed:
    """Takes the question for the claim to one address of a lab, and all others to another."""

    def __init__(self, claim, others):
        self._claim, self._others = claim, others

    def ask(self, envelope, reader, seconds):
        text = json.loads(decode_base64(json.loads(envelope)["payload"]))["text"]
        (self._claim if text == "claim" else self._others).ask(envelope, reader, seconds)


def test_a_lab_is_not_held_to_one_run_by_what_it_says_of_another(party, trust):
    """Both run under one key: a referee that crosses their addresses finds silence, which is its word alone."""
    crossed = Crossed(party("honest").transport, party("again").transport)
    verdict, data = played(trust, replace(party("honest"), transport=crossed), party("late"), party("other"))
    assert verdict.evidence["absent"] == ["honest"]
    assert "honest" not in check_tournament(data, trust).evidence["guilty"]


def test_each_changed_byte_makes_verification_fail(party, trust):
    _, data = played(trust, party("honest"), party("late"), party("early"))
    rng = random.Random("tournament")
    for place in [*rng.sample(range(len(data)), 60), *range(len(data) - 20, len(data))]:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(7)
        assert check_tournament(bytes(changed), trust).evidence == {"verifies": False}, place
