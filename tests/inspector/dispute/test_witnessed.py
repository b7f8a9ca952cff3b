"""Games whose questions go through a witness: lateness is then its word, and nothing else ever is."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace

import pytest

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey, canonical
from inspector.dispute.game import Party, check_game, play
from inspector.inspection.verdict import Outcome
from inspector.wire import witness as witness_module
from inspector.wire.desk import Local, Stranger
from inspector.wire.messages import Question, Reader, Silence, Witnessed
from inspector.wire.witness import ByWitness, Known, Witness
from tests.inspector.dispute.test_game import NOW, REFEREE, Gone, party, runs, signed_again, trust

__all__ = ["party", "runs", "trust"]

NOTARY, OTHER = SigningKey.generate(bytes([7]) * 32), SigningKey.generate(bytes([8]) * 32)
SECONDS = 1


class Late:
    """A party that answers nothing from a kind of question on, and takes its time."""

    def __init__(self, transport, kind):
        self._gone = Gone(transport, kind)

    def ask(self, envelope, reader, seconds):
        try:
            self._gone.ask(envelope, reader, seconds)
        except Silence:
            time.sleep(max(seconds, 0))
            raise


class Both:
    """An honest and a lying party behind a witness, and a trust file that names it."""

    def __init__(self, party, trust, tmp_path):
        self.parties = [party("honest"), party("liar")]
        self.folder = tmp_path / "seen"
        self.trust = replace(
            trust, inspectorates=trust.inspectorates | {REFEREE.verifying}, witnesses={"notary": NOTARY.verifying}
        )

    def witness(self, **ways):
        """The witness, with other ways to some parties."""
        parties = {each.key: ways.get(each.name, each.transport) for each in self.parties}
        return Witness(folder=self.folder, key=NOTARY, referees=[REFEREE.verifying], parties=parties, least=SECONDS)

    def play(self, witness, **direct):
        known = Known(name="notary", key=NOTARY.verifying, transport=Local(witness))
        parties = [
            replace(each, transport=ByWitness(known, direct.get(each.name, each.transport))) for each in self.parties
        ]
        return self.played(*parties)

    def played(self, *parties: Party):
        return play(parties, self.trust, REFEREE, seconds=SECONDS, now=NOW)


@pytest.fixture
def both(party, trust, tmp_path, monkeypatch):
    monkeypatch.setattr(witness_module, "_AGAIN", 0.05)
    return Both(party, trust, tmp_path)


@pytest.fixture
def late(both):
    """A game in which the liar was too late, by the word of the witness."""
    liar = both.parties[1].transport
    return both.play(both.witness(liar=Late(liar, "prefix")))


def last(game: bytes):
    """The exchange that ended in silence."""
    return next(each for each in canonical.decode(game)["exchanges"] if "silence" in each)


def changed(game: bytes, **fields) -> bytes:
    """The same, with other fields in that exchange, signed by its referee."""
    exchanges = [{**each, **fields} if "silence" in each else each for each in canonical.decode(game)["exchanges"]]
    return signed_again(game, {"exchanges": exchanges})


def said(game: bytes, key: SigningKey = NOTARY, **fields):
    """The witness's statement in that exchange, with other fields, under a key."""
    statement = Witnessed.open(canonical.encode(last(game)["witness"]), NOTARY.verifying)
    return canonical.decode(replace(statement, **fields).seal(key))


def test_who_is_late_is_absent_by_the_word_of_the_witness_and_never_guilty(both, late):
    verdict, game = late
    for found in (verdict, check_game(game, both.trust)):
        assert (found.outcome, found.evidence["absent"], found.evidence["guilty"]) == (Outcome.REJECT, "liar", None)
        assert "liar is absent, witnessed by notary: no signed answer came within 1 s" in found.reasons[0].text
    stranger = replace(both.trust, witnesses={})
    found = check_game(game, stranger)
    assert (found.outcome, found.evidence["absent"]) == (Outcome.REJECT, "liar")
    assert "liar is absent, says referee sha256:" in found.reasons[0].text
    unknown = replace(both.trust, inspectorates=both.trust.inspectorates - {REFEREE.verifying})
    assert check_game(game, unknown).outcome is Outcome.INCONCLUSIVE


def test_answers_pass_as_they_are_and_the_evidence_says_when_each_came(both):
    verdict, game = both.play(both.witness())
    assert verdict.evidence["guilty"] == "liar"
    assert verdict.evidence == both.played(*both.parties)[0].evidence
    assert all(set(each) == {"question", "answer", "body", "witness"} for each in canonical.decode(game)["exchanges"])
    again = check_game(game, both.trust)
    assert again.evidence == {**verdict.evidence, "verifies": True}
    exchanges = canonical.decode(game)["exchanges"]
    exchanges[0]["witness"], exchanges[1]["witness"] = exchanges[1]["witness"], exchanges[0]["witness"]
    mixed = check_game(signed_again(game, {"exchanges": exchanges}), both.trust)
    assert mixed.evidence == {"verifies": False}


def test_a_referee_that_withholds_a_question_has_only_its_own_word(both):
    withheld = [both.parties[0], replace(both.parties[1], transport=Gone(both.parties[1].transport, "prefix"))]
    _, game = both.played(*withheld)
    assert "liar is absent, says referee" in check_game(game, both.trust).reasons[0].text
    witness, envelope = both.witness(), canonical.encode(last(game)["question"])
    statement = canonical.decode(next(iter(witness.take(envelope))).strip())
    found = check_game(changed(game, witness=statement), both.trust)
    assert found.evidence == {"verifies": False}
    assert "the witness's statement is about a different question or answer" in found.reasons[0].text


def test_a_statement_of_anyone_else_or_about_anything_else_shows_nothing(both, late):
    game = late[1]
    other = canonical.decode(game)["exchanges"][0]["witness"]
    forged, notary = said(game, OTHER), NOTARY.verifying.key_id
    cases = {
        "about a different question or answer": (other, said(game, question="ab" * 32), said(game, answer="ab" * 32)),
        "the time for the answer was not over": (said(game, ended=0),),
        "signature does not verify": ({**forged, "signatures": [{**forged["signatures"][0], "keyid": notary}]},),
        "malformed": ({}, [], {"signatures": []}),
    }
    for why, statements in cases.items():
        for statement in statements:
            found = check_game(changed(game, witness=statement), both.trust)
            assert found.evidence == {"verifies": False}, why
            assert why in found.reasons[0].text or why == "malformed"
    unknown = check_game(changed(game, witness=said(game, OTHER)), both.trust)
    assert unknown.evidence["absent"] == "liar"
    assert "says referee" in unknown.reasons[0].text


def test_a_question_that_a_party_need_not_answer_makes_no_one_late(both):
    """Law 8: honest parties do not answer strangers, or about other tasks, and sign nothing about that."""

    class Declines:
        def take(self, envelope):
            raise Stranger("this is not a question about the run or the task for which this party answers")

    verdict, game = both.play(both.witness(honest=Local(Declines())), honest=Local(Declines()))
    assert verdict.evidence["absent"] == "honest"
    for found in (verdict, check_game(game, both.trust)):
        assert "honest is absent, says referee" in found.reasons[0].text
        assert "witnessed" not in found.reasons[0].text


class Lying:
    """A witness that says something about a question."""

    def __init__(self, inner, change):
        self._inner, self._change = inner, change

    def take(self, envelope):
        return iter([self._change(b"".join(self._inner.take(envelope)), envelope)])


@pytest.mark.parametrize(
    "change",
    [
        lambda content, envelope: b"",
        lambda content, envelope: content[:-1],
        lambda content, envelope: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content, envelope: content.partition(b"\n")[2],
        lambda content, envelope: bytes(1 << 15),
        lambda content, envelope: Witnessed.over(envelope, None, received=0, ended=0).seal(NOTARY) + b"\n",
        lambda content, envelope: Witnessed.over(envelope, None, received=0, ended=9).seal(OTHER) + b"\n",
    ],
    ids=["nothing", "cut", "flipped", "no statement", "zeros", "too early", "other key"],
)
def test_a_witness_that_fails_or_alters_an_answer_harms_no_one(both, change):
    """The party is asked without it."""
    verdict, game = both.play(Lying(both.witness(), change))
    assert (verdict.evidence["guilty"], verdict.evidence["absent"]) == ("liar", None)
    assert check_game(game, both.trust).evidence == {**verdict.evidence, "verifies": True}


def question(to, key=REFEREE, **fields):
    given = {"number": 0, "to": to.key_id, "run": "", "text": "claim", "most": 1 << 20, "seconds": SECONDS, **fields}
    return Question(game="00" * 32, **given).seal(key)


def test_a_witness_says_one_thing_about_a_question_and_serves_no_strangers(both):
    class Dead:
        def ask(self, envelope, reader, seconds):
            raise Silence("no complete answer")

    honest = both.parties[0].key
    envelope = question(honest)
    silent = list(both.witness(honest=Dead()).take(envelope))
    assert list(both.witness().take(envelope)) == silent, "although the party would answer by now"
    statement = Witnessed.open(silent[0].strip(), NOTARY.verifying)
    assert (statement.answer, len(silent)) == ("", 1)
    assert statement.ended - statement.received >= SECONDS
    for odd in (
        question(honest, OTHER),
        question(OTHER.verifying),
        question(honest, seconds=0),
        question(honest, seconds=86_401),
        question(honest, most=1 << 40),
        b"{}",
    ):
        with pytest.raises(Stranger):
            both.witness().take(odd)
    with pytest.raises(Silence):
        Local(both.witness()).ask(question(honest, OTHER), Reader(envelope, honest, 1), 1)


def test_a_witness_deletes_what_is_old(both, monkeypatch):
    one, other, third = (question(both.parties[0].key, number=number) for number in range(3))
    for each in (one, other):
        list(both.witness().take(each))
    names = {path.name.partition(".")[0] for path in both.folder.iterdir()}
    assert len(names) == 2
    old = hashlib.sha256(one).hexdigest()
    for path in both.folder.glob(f"{old}.*"):
        os.utime(path, (0, 0))
    list(both.witness().take(third))
    left = {path.name.partition(".")[0] for path in both.folder.iterdir()}
    assert left == names - {old} | {hashlib.sha256(third).hexdigest()}


def test_a_party_is_no_witness_in_its_own_case(both):
    for key in (REFEREE.verifying, both.parties[1].key):
        with pytest.raises(CallerError, match="names a key as a witness's that is also a party's"):
            replace(both.trust, witnesses={"notary": key})
