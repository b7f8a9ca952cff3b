"""Law 8: a dishonest inspectorate's or cluster's server, or a dishonest referee, can make no honest party look guilty.

What a server does to an honest lab may end in a REJECT that the inspectorate signs. No one else is shown one: what
rests on its word alone is INCONCLUSIVE to those who verify the bundle.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from inspector.bundle.checker import check_bundle
from inspector.bundle.contents import Bundle
from inspector.dispute.game import Party, check_game, play
from inspector.inspection.verdict import Outcome
from inspector.rounds import steps
from inspector.rounds.exchange import Early, announced_in, openings
from inspector.rounds.receipts import take
from inspector.rounds.world import CLUSTER, INSPECTORATE, sealed
from inspector.wire.messages import Question, Silence
from monitor.files import remove
from tests.attacks.test_law_8_rounds import SETTINGS, begin, go_on, small  # noqa: F401 - a fixture
from tests.conftest import STARTED
from tests.inspector.dispute.test_game import NOW, REFEREE, game, party, runs, signed_again, trust  # noqa: F401

LATE = STARTED.replace(minute=30)


def ended(world, worker, now=STARTED, *, is_heard=True):
    """The rest of a round, each step after the deadline for which it has to wait; what the lab refuses is not done.

    Where the lab is not heard any more, what it does from then on reaches no one.
    """
    for awaited, step, given in (
        ("heads", steps.reveal, {}),
        ("", partial(steps.answer, lab="lab"), {}),
        ("answers", steps.order, {}),
        ("", partial(steps.disclose, lab="lab"), {}),
        ("openings", steps.replay, {"worker": worker}),
    ):
        if not is_heard and not awaited:
            continue
        try:
            try:
                step(world, now=now, **given)
            except Early:
                now = steps.past(world, awaited, now)
                step(world, now=now, **given)
        except (CallerError, EvidenceError):  # it was done before, or is refused
            continue
    return steps.decide(world, now=steps.past(world, "results", now))


def lose(world, kind, by=INSPECTORATE):
    for path in (world.inbox(by) / "lab").glob(f"*-{kind}.*"):
        path.unlink()


def loses_heads(world, worker):
    go_on(world, "reveal")
    lose(world, "heads")
    return ended(world, worker)


def loses_answers(world, worker):
    go_on(world, "order")
    lose(world, "answers")
    return ended(world, worker, is_heard=False)


def loses_openings(world, worker):
    go_on(world, "replay")
    lose(world, "openings", CLUSTER)
    lose(world, "openings")
    remove(openings(world, CLUSTER) / "lab.run")
    return ended(world, worker, is_heard=False)


def looks_by_an_altered_clock(world, worker):
    """It has looked after the deadline, as it says, before the heads came."""
    take(world, INSPECTORATE, LATE)
    steps.hand(world, "lab", now=STARTED)
    return ended(world, worker, LATE)


def announces_to_nobody(world, worker):
    remove(world.inbox("lab") / INSPECTORATE)
    (world.inbox("lab") / INSPECTORATE).mkdir()
    with pytest.raises(CallerError):
        steps.hand(world, "lab", now=STARTED)
    return ended(world, worker)


def announces_two_rounds_as_one(world, worker):
    """The lab gets another announcement than the verdict is about."""
    inbox = world.inbox("lab") / INSPECTORATE
    [path] = inbox.iterdir()
    announced = announced_in(world, INSPECTORATE)
    other = sealed("announcement", announced.about, {**announced.predicate, "refusals": 9}, world.key(INSPECTORATE))
    remove(path)
    world.post("lab", "announcement", INSPECTORATE, other)
    steps.hand(world, "lab", now=STARTED)
    return ended(world, worker)


def opens_another_secret(world, worker):
    """The lab does not answer a draw from another secret than the one whose hash was announced."""
    go_on(world, "answer")
    inbox = world.inbox("lab") / INSPECTORATE
    [path] = inbox.glob("*-draw.*")
    drawn = world.read("lab", "draw", INSPECTORATE, world.public(INSPECTORATE))
    remove(path)
    other = sealed("draw", drawn.about, {**drawn.predicate, "secret": "11" * 32}, world.key(INSPECTORATE))
    world.post("lab", "draw", INSPECTORATE, other)
    with pytest.raises(EvidenceError):
        steps.answer(world, "lab", now=STARTED)
    return ended(world, worker, is_heard=False)


def asks_for_what_was_not_drawn(world, worker):
    go_on(world, "disclose")
    inbox = world.inbox("lab") / INSPECTORATE
    [path] = inbox.glob("*-order.*")
    order = world.read("lab", "order", INSPECTORATE, world.public(INSPECTORATE))
    remove(path)
    asked = {name: {**each, "batches": True, "last": True} for name, each in order.predicate["open"].items()}
    more = sealed("order", order.about, {**order.predicate, "open": asked}, world.key(INSPECTORATE))
    world.post("lab", "order", INSPECTORATE, more)
    with pytest.raises(EvidenceError):
        steps.disclose(world, "lab", now=STARTED)
    return ended(world, worker, is_heard=False)  # and does not send the order that the lab would follow


def forges_the_labs_heads(world, worker):
    """In the lab's name, under the server's own key."""
    about = announced_in(world, INSPECTORATE).digest
    world.post(INSPECTORATE, "heads", "lab", sealed("heads", about, {"heads": []}, world.key(INSPECTORATE)))
    return ended(world, worker)


def alters_what_the_lab_opened(world, worker):
    """The cluster's server."""
    go_on(world, "replay")
    for path in sorted((openings(world, CLUSTER) / "lab.run").rglob("*.safetensors")):
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return ended(world, worker, is_heard=False)


def never_replays(world, worker):
    go_on(world, "replay")
    return steps.decide(world, now=LATE)


WAYS = (
    loses_heads,
    loses_answers,
    loses_openings,
    looks_by_an_altered_clock,
    announces_to_nobody,
    announces_two_rounds_as_one,
    opens_another_secret,
    asks_for_what_was_not_drawn,
    forges_the_labs_heads,
    alters_what_the_lab_opened,
    never_replays,
)


@pytest.mark.parametrize("way", WAYS)
def test_a_dishonest_server_shows_nobody_that_an_honest_lab_is_guilty(small, devices, tmp_path, way):  # noqa: F811
    world = begin(tmp_path / "world", small)
    decided = way(world, devices.run)
    data, key = decided.bundle.read_bytes(), world.key(INSPECTORATE)
    assert decided.verdict.outcome is not Outcome.ACCEPT
    shown = check_bundle(data, world.trust())
    assert shown.outcome is Outcome.INCONCLUSIVE, shown.reasons
    opened = Bundle.open(data, key.verifying)
    worse = Bundle.sign({**opened.predicate, "outcome": "REJECT"}, opened.items, key)
    again = check_bundle(worse, world.trust())
    assert again.outcome is Outcome.INCONCLUSIVE or not again.evidence["verifies"], again.reasons


class Referee:
    """Carries a dishonest referee's questions to a party, or does not."""

    def __init__(self, transport, change):
        self._transport, self._change, self.asked = transport, change, 0

    def ask(self, envelope, reader, seconds):
        self.asked += 1
        self._change(self._transport, envelope, reader, self.asked)


def withholds(transport, envelope, reader, asked):
    """An answer that has come is thrown away."""
    transport.ask(envelope, reader, 5)
    if asked > 2:
        raise Silence("no complete answer within 5 s")


def ends_early(transport, envelope, reader, asked):
    if asked > 2:
        raise Silence("no complete answer within 0 s")
    transport.ask(envelope, reader, 5)


def asks_nobody(transport, envelope, reader, asked):
    raise Silence("no complete answer within 5 s")


def gives_up_at_the_first_byte(transport, envelope, reader, asked):
    """The party has the question, and its answer is under way."""

    class Cut:
        def feed(self, piece):
            raise Silence("no complete answer within 5 s")

    transport.ask(envelope, Cut(), 5)


def asks_otherwise(**other):
    """Another question than the one that the evidence holds."""

    def change(transport, envelope, reader, asked):
        question = Question.open(envelope, REFEREE.verifying)
        transport.ask(replace(question, **other).seal(REFEREE), reader, 5)

    return change


REFEREES = (
    withholds,
    ends_early,
    asks_nobody,
    gives_up_at_the_first_byte,
    asks_otherwise(text="step 99999"),
    asks_otherwise(most=1),
    asks_otherwise(to=REFEREE.verifying.key_id),
    asks_otherwise(run="ab" * 32),
    asks_otherwise(game="ab" * 32),
    asks_otherwise(seconds=0),
)


@pytest.mark.parametrize("change", REFEREES, ids=range(len(REFEREES)))
def test_a_referee_that_asks_dishonestly_makes_nobody_guilty(party, trust, change):  # noqa: F811
    honest, liar = party("honest"), party("liar")
    asked = Party(name="honest", key=honest.key, transport=Referee(honest.transport, change))
    verdict, data = play([asked, liar], trust, REFEREE, seconds=5, now=NOW)
    assert verdict.evidence["guilty"] is None
    shown = check_game(data, trust)
    assert (shown.outcome, shown.evidence["guilty"]) == (Outcome.INCONCLUSIVE, None)


@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "2999-01-01T00:00:00Z"])
def test_a_referees_altered_clock_changes_no_verdict(game, trust, time):  # noqa: F811
    shown = check_game(signed_again(game, {"time": time}), trust)
    assert (shown.outcome, shown.evidence["guilty"]) == (Outcome.REJECT, "liar")
