"""A game's evidence shows who is wrong after both parties are gone, and no one can be framed with it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree, SigningKey, canonical, decode_base64, seal
from inspector.dispute.game import Party, check_game, is_game, play
from inspector.dispute.provider import Provider, desk_of
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.wire.desk import Desk, Local
from inspector.wire.messages import Question, Reader, Silence
from monitor import Recorder
from monitor.lab.prover import LabProver

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REFEREE = SigningKey.generate(bytes(32))
RESULT = "application/vnd.chipwitness.game.v1+json"
KINDS = ("claim", "step", "program", "batch", "trace", "node", "prefix")
"""First words of questions that both parties are asked in a game about a wrong operator."""


def record(folder: Path, name: str, *, lab: str = "", steps: int = 5, finish: bool = True, **options) -> Path:
    """A loop of so many steps in a lab of that name, or of another one."""
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings: dict[str, Any]
    settings = {"seed": 5, "chips": 2, "checkpoint_every": 2, "snapshot_rate": Fraction(1, 2), "hours": 1.0}
    out = folder / name
    recorder = Recorder(
        model, optimizer, out=out, lab=lab or name, started=NOW - timedelta(hours=1), **settings, **options
    )
    for step in range(steps):
        batch = torch.full((2, 3), 1.0 + step)
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    if finish:
        recorder.finish()
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A lab that computes what it should, another one, and one with a wrong operator in step 3."""
    folder = tmp_path_factory.mktemp("game")
    liar = record(folder, "liar", lie="wrong-operator", lie_step=3)
    return {"honest": record(folder, "honest"), "other": record(folder, "other"), "liar": liar}


@pytest.fixture(scope="module")
def trust(runs) -> Trust:
    return Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs.values()])


@pytest.fixture
def party(runs, trust, tmp_path):
    """Make a party in this process; ``change(text, answer)`` gives another body, or raises."""

    def make(name, change=None):
        prover = LabProver(runs[name])
        provider = Provider(open_run(runs[name], trust), prover)

        def answer(text):
            return provider.answer(text) if change is None else change(text, lambda: provider.answer(text))

        desk = Desk(tmp_path / name, answer, prover.key, [REFEREE.verifying], open_run(runs[name], trust).manifest.run)
        return Party(name=name, key=prover.key.verifying, transport=Local(desk))

    return make


class Gone:
    """Answers as another transport does until a question of that kind comes, and never from then on."""

    def __init__(self, transport, kind):
        self._transport, self._kind, self._is_gone = transport, kind, False

    def ask(self, envelope, reader, seconds):
        text = json.loads(decode_base64(json.loads(envelope)["payload"]))["text"]
        self._is_gone = self._is_gone or text.startswith(self._kind)
        if self._is_gone:
            raise Silence("no complete answer within 5 s")
        self._transport.ask(envelope, reader, seconds)


def played(trust, *parties, key=REFEREE):
    return play(parties, trust, key, seconds=5, now=NOW)


@pytest.fixture(scope="module")
def game(runs, trust, tmp_path_factory) -> bytes:
    """Evidence of a game that the liar has lost."""
    folder, parties = tmp_path_factory.mktemp("desks"), []
    for name in ("honest", "liar"):
        prover = LabProver(runs[name])
        desk = desk_of(open_run(runs[name], trust), prover, folder / name, [REFEREE.verifying])
        parties.append(Party(name=name, key=prover.key.verifying, transport=Local(desk)))
    verdict, data = played(trust, *parties)
    assert verdict.evidence["guilty"] == "liar"
    return data


def test_evidence_gives_the_same_verdict_without_the_parties(game, trust):
    verdict = check_game(game, trust)
    assert is_game(game)
    assert verdict.outcome is Outcome.REJECT
    evidence = verdict.evidence
    assert [evidence[key] for key in ("guilty", "step", "case", "verifies")] == ["liar", 3, "output", True]
    assert evidence["operators_executed"] == 1
    stated = json.loads(decode_base64(json.loads(game)["result"]["payload"]))["verdict"]
    assert (stated["guilty"], stated["absent"], stated["step"], stated["bytes"]) == ([1], [], 3, evidence["bytes"])


def test_parties_that_agree_are_accepted(party, trust):
    verdict, data = played(trust, party("honest"), party("other"))
    assert verdict.outcome is check_game(data, trust).outcome is Outcome.ACCEPT
    assert (verdict.evidence["guilty"], verdict.evidence["absent"]) == (None, None)


def test_each_changed_byte_makes_verification_fail(game, trust):
    """120 places all over the evidence, and each of the last 40, in one flipped bit."""
    rng = random.Random("bytes")
    for place in [*rng.sample(range(len(game)), 120), *range(len(game) - 40, len(game))]:
        changed = bytearray(game)
        changed[place] ^= 1 << rng.randrange(7)
        assert check_game(bytes(changed), trust).evidence == {"verifies": False}, place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_whoever_refuses_a_question_loses_by_its_own_signature(party, trust, kind, first):
    """The other one never does, though it is asked the same."""

    def refuse(text, answer):
        if text.startswith(kind):
            raise EvidenceError("I would rather not")
        return answer()

    parties = [party("liar", refuse), party("honest")]
    verdict, data = played(trust, *(parties if first else reversed(parties)))
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, "liar")
    assert check_game(data, trust).evidence["guilty"] == "liar"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [b"", b"[" * 60, b"[]", b"null", b'{"leaf":"AA==","proof":[]}', b'[1,"00"]'], ids=str)
def test_nonsense_loses_for_the_party_that_signed_it(party, trust, kind, body):
    junk = party("liar", lambda text, answer: body if text.startswith(kind) else answer())
    verdict, data = played(trust, party("honest"), junk)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, "liar")
    assert check_game(data, trust).evidence["guilty"] == "liar"


@pytest.mark.parametrize("kind", ["chunk", "block"])
def test_what_the_other_one_can_open_is_not_missed(party, trust, kind):
    def refuse(text, answer):
        if text.startswith(kind):
            raise EvidenceError("I would rather not")
        return answer()

    verdict, _ = played(trust, party("liar", refuse), party("honest"))
    assert (verdict.evidence["guilty"], verdict.evidence["case"]) == ("liar", "output")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["liar", "honest"])
def test_who_is_gone_is_absent_and_not_guilty(party, trust, kind, name):
    parties = [party("honest"), party("liar")]
    there = [Party(name=x.name, key=x.key, transport=Gone(x.transport, kind)) if x.name == name else x for x in parties]
    verdict, data = played(trust, *there)
    assert verdict.outcome is Outcome.REJECT
    assert (verdict.evidence["absent"], verdict.evidence["guilty"]) == (name, None)
    offline = check_game(data, trust)
    assert offline.outcome is Outcome.INCONCLUSIVE, "on the word of an unknown referee"
    assert f"{name} is absent, says referee sha256:" in offline.reasons[0].text
    known = replace(trust, inspectorates=trust.inspectorates | {REFEREE.verifying})
    assert check_game(data, known).outcome is Outcome.REJECT


def test_where_both_are_gone_nothing_is_decided(party, trust):
    parties = [party("honest"), party("liar")]
    gone = [Party(name=x.name, key=x.key, transport=Gone(x.transport, "claim")) for x in parties]
    verdict, data = played(trust, *gone)
    assert (verdict.outcome, verdict.evidence["absent"]) == (Outcome.INCONCLUSIVE, "honest, liar")
    assert check_game(data, trust).outcome is Outcome.INCONCLUSIVE


def signed_again(game: bytes, changes, referee=REFEREE) -> bytes:
    """The evidence with other exchanges or another result, under the referee's key."""
    parsed = canonical.decode(game)
    result = json.loads(decode_base64(parsed["result"]["payload"]))
    if "exchanges" in changes:
        parsed["exchanges"] = changes["exchanges"]
        changes = {"exchanges": hashlib.sha256(canonical.encode(changes["exchanges"])).hexdigest()}
    parsed["result"] = canonical.decode(seal(RESULT, {**result, **changes}, referee))
    return canonical.encode(parsed)


def other_verdict(parsed, result, parties):
    return {"verdict": {**result["verdict"], "guilty": [0]}}


def other_answers(parsed, result, parties):
    """The honest party's answer to one question under another."""
    mine = [each for each in parsed["exchanges"] if each["answer"]["signatures"][0]["keyid"] == parties["honest"]]
    mine[-2]["answer"], mine[-2]["body"] = mine[-1]["answer"], mine[-1]["body"]
    return {"exchanges": parsed["exchanges"]}


def other_body(parsed, result, parties):
    parsed["exchanges"][5]["body"] = parsed["exchanges"][4]["body"]
    return {"exchanges": parsed["exchanges"]}


def left_out(parsed, result, parties):
    return {"exchanges": parsed["exchanges"][:4] + parsed["exchanges"][6:]}


def other_order(parsed, result, parties):
    first, second, *others = parsed["exchanges"]
    return {"exchanges": [second, first, *others]}


def one_more(parsed, result, parties):
    return {"exchanges": [*parsed["exchanges"], parsed["exchanges"][-1]]}


def withheld(parsed, result, parties):
    """An answer that came is said to be none, under the same verdict."""
    one = parsed["exchanges"][-1]
    return {"exchanges": [*parsed["exchanges"][:-1], {"question": one["question"], "silence": "no answer"}]}


def exchanged_parties(parsed, result, parties):
    return {"parties": result["parties"][::-1]}


def own_parties(parsed, result, parties):
    return {"parties": [REFEREE.verifying.raw.hex(), result["parties"][1]]}


def other_game(parsed, result, parties):
    return {"game": "11" * 32}


def other_deadline(parsed, result, parties):
    return {"seconds": 6}


def other_referee(parsed, result, parties):
    return {"referee": SigningKey.generate(bytes([7]) * 32).verifying.raw.hex()}


@pytest.mark.parametrize(
    "change",
    [
        other_verdict,
        other_answers,
        other_body,
        left_out,
        other_order,
        one_more,
        withheld,
        own_parties,
        exchanged_parties,
        other_game,
        other_deadline,
        other_referee,
    ],
)
def test_a_dishonest_referee_frames_nobody(game, trust, change):
    parsed = canonical.decode(game)
    result = json.loads(decode_base64(parsed["result"]["payload"]))
    changed = signed_again(game, change(parsed, result, {name: key.key_id for name, key in trust.labs.items()}))
    assert check_game(changed, trust).evidence == {"verifies": False}


def test_a_refusal_to_another_question_is_no_refusal(party, runs, trust, game):
    """The referee asks for what does not exist, and puts the signed refusal in the place of an answer."""
    seat = party("honest")
    parsed = canonical.decode(game)
    result = json.loads(decode_base64(parsed["result"]["payload"]))
    terms = {"game": result["game"], "run": open_run(runs["honest"], trust).manifest.run, "most": 100, "seconds": 5}
    for text in ("step 99999", "trace 3"):
        asked = Question(number=8, to=seat.key.key_id, text=text, **terms)
        envelope = asked.seal(REFEREE)
        reader = Reader(envelope, seat.key, 100)
        seat.transport.ask(envelope, reader, 5)
        if text.startswith("step"):
            assert reader.body() is None
        parts = {"question": envelope, "answer": reader.envelope}
        forged = {**{name: canonical.decode(part) for name, part in parts.items()}, "body": ""}
        changed = signed_again(game, {"exchanges": [*parsed["exchanges"][:8], forged]})
        assert check_game(changed, trust).evidence == {"verifies": False}


def test_a_head_before_the_start_makes_nobody_else_guilty(party, runs, trust):
    """Its signer announces a step where there is none, so that the law once asked the other one for results -1."""
    prover = LabProver(runs["liar"])
    held = open_run(runs["liar"], trust).manifest
    root, journal = MerkleTree([]).root(), replace(held.journal, records=0)
    head = replace(held, steps=-1, finished=False, pending=b"x\n", root=root, journal=journal)

    def change(text, answer):
        if text == "claim":
            manifest = base64.b64encode(head.seal(prover.key)).decode()
            return canonical.encode({**canonical.decode(answer()), "manifest": manifest})
        return canonical.encode([0, root.hex()]) if text == "results" else answer()

    for parties in ((party("honest"), party("liar", change)), (party("liar", change), party("honest"))):
        verdict, data = played(trust, *parties)
        assert verdict.evidence["guilty"] in (None, "liar")
        assert check_game(data, trust).evidence["guilty"] in (None, "liar")
