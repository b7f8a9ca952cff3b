"""A client gets the right result where one provider is honest, and no one can make that provider look guilty."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey, canonical, open_sealed, seal
from inspector.delegation.delegation import Delegation
from inspector.delegation.errand import Errand, Refusal
from inspector.delegation.evidence import check_audit, collect, is_audit
from inspector.delegation.reception import Bounds, Reception
from inspector.dispute.arena import check_tournament, play_tournament
from inspector.dispute.game import Party, Terms
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.wire.desk import Local
from inspector.wire.messages import Answer, Silence
from inspector.wire.witness import Known, Witness
from monitor.lab.lies import conduct
from monitor.lab.prover import OwnProver
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording.ordered_run import run_order
from monitor.replay.ordering import order_run
from monitor.replay.reexecution import Behaviour
from monitor.transcript import RunFolder, encode_state
from monitor.transcript.orders import ORDER, TASK, Order, OrderFolder
from tests.inspector.dispute.test_game import record

CLIENT = SigningKey.generate(bytes(32))
NAMES = ("lab-a", "lab-b", "lab-c")
KEYS = {name: SigningKey.generate(bytes([number]) * 32) for number, name in enumerate(NAMES, 1)}
PARTIES = Trust.of_parties({name: key.verifying for name, key in KEYS.items()}, CLIENT.verifying)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A loop that was trained here."""
    run = record(tmp_path_factory.mktemp("trained"), "own")
    return RunFolder(run, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run))).verifying)


@pytest.fixture(scope="module")
def task(trained, tmp_path_factory):
    """The same training as a task."""
    folder = tmp_path_factory.mktemp("task") / "task"
    order_run(trained, folder, CLIENT)
    return OrderFolder(folder, CLIENT.verifying)


def ordered(task: OrderFolder, folder: Path, change) -> OrderFolder:
    """Another task that the client signs, with the same files and what ``change`` makes of the order."""
    shutil.copytree(task.folder, folder)
    (folder / TASK).write_bytes(change(task.order).sign(CLIENT))
    return OrderFolder(folder, CLIENT.verifying)


ODD_ORDERS = {
    "a file twice": lambda held: held["files"].append(held["files"][-1]),
    "files in another order": lambda held: held["files"].reverse(),
    "a program twice": lambda held: held["programs"].append(held["programs"][-1]),
    "no time": lambda held: held.update(signed=""),
    "a list for the time": lambda held: held.update(signed=[]),
}


@pytest.mark.parametrize("change", ODD_ORDERS.values(), ids=ODD_ORDERS)
def test_a_task_has_one_form(task, change):
    payload = open_sealed(task.envelope, ORDER, CLIENT.verifying, most=limits.TRUST_BYTES)
    change(payload["predicate"])
    with pytest.raises(EvidenceError, match=r"twice, or in another order|its time is not"):
        Order.open(seal(ORDER, payload, CLIENT), CLIENT.verifying)


def swapped(order: Order) -> Order:
    """The same declaration, with the batches of steps 2 and 3 in the other order."""
    first, second, third, *rest = order.steps
    steps = (first, replace(second, batch=third.batch), replace(third, batch=second.batch), *rest)
    return replace(order, steps=steps)


class Faithless(OrderFolder):
    """A provider that commits to another step than was ordered, and takes it as it says."""

    def __init__(self, folder, change):
        super().__init__(folder, CLIENT.verifying)
        self.order = change(self.order)


class Bench:
    """Runs tasks in this process."""

    def __init__(self, name: str, behaviour: Behaviour, change=None, failure=None):
        self.name, self.behaviour, self.change, self.failure = name, behaviour, change, failure

    def carry_out(self, folder):
        if self.failure is not None:
            raise self.failure
        order = OrderFolder(folder, CLIENT.verifying) if self.change is None else Faithless(folder, self.change)
        shutil.rmtree(folder / "run", ignore_errors=True)
        run_order(order, folder / "run", KEYS[self.name], self.name, behaviour=self.behaviour)

    def prover(self, folder):
        run = RunFolder(folder / "run", KEYS[self.name].verifying)
        return run, OwnProver(run, KEYS[self.name], self.behaviour)


class Here(Local):
    """Reaches a provider in this process."""

    def __init__(self, reception: Reception) -> None:
        super().__init__(reception)
        self.reception = reception

    def send(self, name, path, seconds):
        wanted = self.reception.wanted(name)
        assert wanted is not None
        place, length = wanted
        content = path.read_bytes()
        assert len(content) == length
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


class Gone:
    """A provider that cannot be reached."""

    def ask(self, envelope, reader, seconds):
        raise Silence("no complete answer within 5 s")


@pytest.fixture
def provider(tmp_path):
    """Make a provider: its party, and what reaches it."""

    def make(name, lie=None, *, bounds=Bounds(), witnesses=(), **options):  # noqa: B008
        bench = Bench(name, conduct(lie, 3), **options)
        folder, store = tmp_path / name, tmp_path / f"{name}.store"
        reception = Reception(folder, store, KEYS[name], [CLIENT.verifying], bounds, bench, witnesses)
        here = Here(reception)
        return Party(name=name, key=KEYS[name].verifying, transport=here), here

    return make


def trust_in(*tasks: OrderFolder) -> Trust:
    return replace(PARTIES, orders=frozenset(task.envelope for task in tasks))


def delegate(task, *parties, share=0.0):
    delegation = Delegation(
        order=task, parties=parties, trust=trust_in(task), key=CLIENT, seconds=60, idle=60, share=share
    )
    return delegation.run(lambda *_: None)


def test_the_result_is_that_of_training_here_and_the_liar_and_the_absent_one_are_named(
    provider, task, trained, tmp_path
):
    gone = (Party(name="lab-c", key=KEYS["lab-c"].verifying, transport=Gone()), Gone())
    done = delegate(task, provider("lab-a", "wrong-operator"), provider("lab-b"), gone)
    found = done.verdict.evidence
    assert (done.verdict.outcome, found["result"], found["guilty"]) == (Outcome.ACCEPT, "lab-b", ["lab-a"])
    loss, other = found["losses"]
    assert (loss["step"], loss["operator"].split(".")[0], loss["case"]) == (3, "aten", "output")
    assert (other["party"], other["text"]) == ("lab-c", "it is absent: no complete answer within 5 s")
    assert encode_state(done.state) == encode_state(trained.checkpoint(5))
    again = check_tournament(done.games, trust_in(task))
    assert (again.outcome, again.evidence["guilty"], again.evidence["verifies"]) == (Outcome.REJECT, ["lab-a"], True)
    other_task = ordered(task, tmp_path / "other", swapped)
    assert check_tournament(done.games, trust_in(other_task)).outcome is Outcome.INCONCLUSIVE
    for place in range(len(done.games) // 2, len(done.games), len(done.games) // 7):
        flipped = bytearray(done.games)
        flipped[place] ^= 1
        assert check_tournament(bytes(flipped), trust_in(task)).evidence["verifies"] is False


class FallsSilent(Here):
    """A provider that does its task, and answers no referee's question about operators."""

    def ask(self, envelope, reader, seconds):
        if b'"text":"prefix' in base64.b64decode(json.loads(envelope)["payload"]):
            time.sleep(max(seconds, 0))
            raise Silence("no complete answer in time")
        super().ask(envelope, reader, seconds)


@pytest.mark.parametrize("accepts", [True, False], ids=["accepted", "not accepted"])
def test_a_provider_that_falls_silent_is_late_by_the_word_of_a_witness_that_it_accepts(
    provider, task, tmp_path, accepts
):
    notary = SigningKey.generate(bytes([7]) * 32)
    silent = provider("lab-a", "wrong-operator", witnesses=[notary.verifying] if accepts else [])
    other = provider("lab-b", witnesses=[notary.verifying])
    here = FallsSilent(silent[1].reception)
    silent = replace(silent[0], transport=here), here
    ways = {party.key: carrier for party, carrier in (silent, other)}
    witness = Witness(folder=tmp_path / "seen", key=notary, referees=[CLIENT.verifying], parties=ways, least=1)
    known = Known(name="notary", key=notary.verifying, transport=Local(witness))
    delegation = Delegation(
        order=task, parties=[silent, other], trust=trust_in(task), key=CLIENT, seconds=2, idle=60, witness=known
    )
    done = delegation.run(lambda *_: None)
    texts = [reason.text for reason in done.verdict.reasons]
    assert (done.verdict.evidence["absent"], done.verdict.evidence["guilty"]) == (["lab-a"], [])
    without = "lab-a: asked without the witness notary, which only the others accept"
    assert (without in texts) is not accepts
    trust = replace(trust_in(task), witnesses={"notary": notary.verifying})
    again = check_tournament(done.games, trust)
    assert again.evidence["absent"] == ["lab-a"]
    who = "witnessed by notary: no signed answer came within 2 s" if accepts else "says referee sha256:"
    assert any(f"lab-a is absent, {who}" in reason.text for reason in again.reasons)


def cheaper(order: Order) -> Order:
    """Step 4 with another number, such as the learning rate."""
    steps = list(order.steps)
    execution = replace(steps[3].execution, slots={(0.5).hex(): (0,)})
    return replace(order, steps=(*steps[:3], replace(steps[3], execution=execution), *steps[4:]))


@pytest.mark.parametrize(("change", "step"), [(swapped, 2), (cheaper, 4)], ids=["batch", "number"])
def test_who_takes_another_step_than_was_ordered_is_guilty(provider, task, trained, change, step):
    done = delegate(task, provider("lab-a", change=change), provider("lab-b"))
    assert [(each["party"], each["step"], each["case"]) for each in done.verdict.evidence["losses"]] == [
        ("lab-a", step, "order")
    ]
    assert encode_state(done.state) == encode_state(trained.checkpoint(5))
    assert check_tournament(done.games, trust_in(task)).evidence["guilty"] == ["lab-a"]


def test_a_client_cannot_frame_a_provider_with_a_task_that_it_did_not_do(provider, task, tmp_path):
    """The client has two tasks of one declaration, and holds a provider's run of one against the other."""
    honest, other = provider("lab-a"), provider("lab-b")
    second = ordered(task, tmp_path / "second", swapped)
    assert delegate(task, honest).verdict.outcome is Outcome.INCONCLUSIVE
    assert delegate(second, other).state is not None
    terms, now = Terms(seconds=60, task=second.digest), datetime.now(UTC)
    verdict, games = play_tournament([honest[0], other[0]], trust_in(second), CLIENT, terms, now=now)
    assert (verdict.evidence["guilty"], verdict.evidence["absent"]) == ([], ["lab-a"])
    stranger = replace(trust_in(second), inspectorates=frozenset({KEYS["lab-c"].verifying, CLIENT.verifying}))
    assert check_tournament(games, stranger).evidence["guilty"] == []
    parsed = json.loads(games)
    parsed["result"]["payload"] = parsed["result"]["payload"].replace("A", "B", 1)
    assert check_tournament(canonical.encode(parsed), trust_in(second)).evidence["verifies"] is False


def test_a_provider_does_no_task_whose_batch_no_referee_would_let_it_open(provider, task, tmp_path):
    """The client could call the provider's answer too long."""
    content = encode_state({**task.batch(2), "more": torch.zeros(1 << 19)})
    name = hashlib.sha256(content).hexdigest()

    def change(order):
        steps = (order.steps[0], replace(order.steps[1], batch=name), *order.steps[2:])
        return replace(order, steps=steps, files={**order.files, name: len(content)})

    bloated = ordered(task, tmp_path / "bloated", change)
    bloated.place(name).write_bytes(content)
    done = delegate(bloated, provider("lab-a"))
    assert "the batch of step 2 is longer than its program reads" in done.verdict.reasons[1].text


def test_one_provider_alone_is_checked_by_no_one_and_its_run_outlives_it(provider, task, trained):
    party, here = provider("lab-a")
    done = delegate(task, (party, here))
    assert done.verdict.outcome is Outcome.INCONCLUSIVE
    assert "nothing checks its result" in done.verdict.reasons[0].text
    assert encode_state(done.state) == encode_state(trained.checkpoint(5))
    again = delegate(task, provider("lab-a", failure=DeviceError("it would run again")))
    assert encode_state(again.state) == encode_state(done.state)


def test_a_client_that_runs_steps_again_needs_no_second_provider(provider, task, trained):
    done = delegate(task, provider("lab-a"), share=0.3)
    found = done.verdict.evidence
    assert (done.verdict.outcome, len(found["audited"]), found["found"]) == (Outcome.ACCEPT, 2, 0.4)
    assert "2 of 5 steps of lab-a were run again here, and are right" in done.verdict.reasons[-1].text
    assert encode_state(done.state) == encode_state(trained.checkpoint(5))
    for lie, change, step in (("wrong-operator", None, 3), (None, swapped, 2)):
        name = "lab-b" if change is None else "lab-c"
        done = delegate(task, provider(name, lie, change=change), share=1.0)
        assert (done.verdict.outcome, done.state, done.verdict.evidence["guilty"]) == (Outcome.REJECT, None, [name])
        assert done.verdict.evidence["losses"][0]["step"] == step
        shown = check_audit(done.audit, trust_in(task))
        assert is_audit(done.audit)
        assert (shown.outcome, shown.evidence["guilty"], shown.evidence["step"]) == (Outcome.REJECT, [name], step)
        assert shown.evidence["case"] == ("result" if change is None else "order")
        assert check_audit(done.audit, PARTIES).outcome is Outcome.INCONCLUSIVE  # without the task
        for place in range(9, len(done.audit), len(done.audit) // 9):
            flipped = bytearray(done.audit)
            flipped[place] ^= 1
            assert check_audit(bytes(flipped), trust_in(task)).evidence["verifies"] is False


def test_no_client_convicts_an_honest_provider_by_an_audit(provider, task, tmp_path):
    """It asks for each step, says that another one was meant, and withholds or exchanges what was answered."""
    party, here = provider("lab-a")
    assert delegate(task, (party, here)).state is not None
    for step in (0, 1, 4):
        assert collect([party], task.order, task.digest, step, CLIENT, 60) == b""
    liar, other = provider("lab-b", "wrong-operator")
    delegate(task, (liar, other))
    shown = canonical.decode(collect([liar], task.order, task.digest, 3, CLIENT, 60))
    [game] = shown["audits"]
    for changed in (
        {**shown, "step": 2},
        {**shown, "audits": [game, {**game, "exchanges": game["exchanges"][:-1]}]},
        {**shown, "audits": [{**game, "exchanges": game["exchanges"][::-1]}]},
        {**shown, "audits": []},
        {**shown, "step": 99},
    ):
        assert check_audit(canonical.encode(changed), trust_in(task)).evidence == {"verifies": False}
    second = ordered(task, tmp_path / "second", swapped)
    assert check_audit(canonical.encode(shown), trust_in(second)).outcome is Outcome.INCONCLUSIVE


def test_who_refuses_says_why_under_its_signature_and_there_is_no_result(provider, task):
    done = delegate(
        task,
        provider("lab-a", bounds=Bounds(flop=1)),
        provider("lab-b", bounds=Bounds(tasks=0)),
        provider("lab-c", failure=OSError(28, "No space left on device")),
    )
    assert (done.verdict.outcome, done.state, done.games) == (Outcome.INCONCLUSIVE, None, b"")
    texts = [reason.text for reason in done.verdict.reasons]
    assert texts[0] == "there is no result"
    for text, why in zip(
        texts[1:],
        ("FLOP, but this provider accepts at most 1", "has 0 tasks to do", "No space left on device"),
        strict=True,
    ):
        assert "did not do the task: it refuses: " in text
        assert why in text
    small = delegate(task, provider("lab-a", bounds=Bounds(bytes=1000)))
    assert "bytes, but this provider has room for 1000" in small.verdict.reasons[1].text


def test_a_task_that_no_one_asks_about_is_deleted_and_what_was_signed_is_kept(provider, task, tmp_path):
    party, here = provider("lab-a")
    assert delegate(task, (party, here)).state is not None
    folder = tmp_path / "lab-a"
    head = (folder / task.digest / "run" / "manifest.json").read_bytes()
    (folder / "mine.txt").write_bytes(b"no task")
    for place in (folder / task.digest / TASK, folder / "mine.txt"):
        os.utime(place, (1, 1))
    second = ordered(task, tmp_path / "second", swapped)
    assert delegate(second, (party, here)).state is not None  # which orders anew, and so looks for old ones
    done = folder / "done" / task.digest
    assert {path.name: path.read_bytes() for path in done.iterdir()} == {TASK: task.envelope, "manifest.json": head}
    assert sorted(path.name for path in folder.iterdir()) == sorted(["done", "mine.txt", second.digest])
    assert not (tmp_path / "lab-a.store" / task.digest).exists()
    terms, now = Terms(seconds=5, task=task.digest), datetime.now(UTC)
    verdict, _ = play_tournament([party, provider("lab-b")[0]], trust_in(task), CLIENT, terms, now=now)
    assert verdict.evidence["guilty"] == []
    assert "lab-a" in verdict.evidence["absent"]
    assert delegate(task, (party, here)).state is not None  # ordered again, it runs again


def test_tasks_together_take_no_more_than_the_disk_has(provider, task, tmp_path, monkeypatch):
    free = int(1.5 * task.order.size)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    ended = Event()
    monkeypatch.setattr(Bench, "carry_out", lambda *_: ended.wait(20))
    party, here = provider("lab-a")

    def hand_over(order):
        begun = Event()
        errand = Errand(party=party, carrier=here, order=order, key=CLIENT, seconds=5, idle=5)
        errand.carry(lambda _, state, *more: begun.set() if state == "running" else None, begun)

    hand_over(task)
    with pytest.raises(Refusal, match="bytes, but this provider has room for"):
        hand_over(ordered(task, tmp_path / "second", swapped))
    ended.set()


class Odd:
    """A provider that says these things about a task, one after another, and the last one again and again."""

    def __init__(self, *said):
        self.said, self.sent = list(said), []

    def ask(self, envelope, reader, seconds):
        body = canonical.encode(self.said.pop(0) if len(self.said) > 1 else self.said[0])
        reader.feed(Answer.over(envelope, body).seal(KEYS["lab-a"]) + b"\n" + body)

    def send(self, name, path, seconds):
        self.sent.append(name)


def standing(state="running", step=1, needs=()):
    needs = [list(each) for each in needs]
    return {"state": state, "step": step, "of": 5, "needs": needs, "witnesses": []}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([standing(needs=[[[], 1]])], "malformed"),
        ([{**standing(), "needs": 0.5}], "malformed"),
        ([standing(step=10**30)], "malformed"),
        ([standing(step=-1)], "malformed"),
        ([standing("receiving", needs=[["ab" * 32, 1]])], "not a part of the task"),
        ([standing(step=step) for step in (4, 3) * 20], "has started again 9 times"),
        ([standing("receiving", 0)], "has made no progress for 1 s"),
    ],
    ids=range(7),
)
def test_whatever_a_provider_says_about_a_task_ends_in_a_line_about_it_alone(task, provider, monkeypatch, said, why):
    monkeypatch.setattr("inspector.delegation.errand._SHORTEST", 0.01)
    odd = Odd(*said)
    delegation = Delegation(
        order=task, parties=[(Party(name="lab-a", key=KEYS["lab-a"].verifying, transport=odd), odd)],
        trust=trust_in(task), key=CLIENT, seconds=5, idle=1,
    )  # fmt: skip
    done = delegation.run(lambda *_: None)
    assert (done.verdict.outcome, done.verdict.evidence["guilty"]) == (Outcome.INCONCLUSIVE, [])
    assert why in done.verdict.reasons[1].text


def test_a_file_that_is_asked_for_again_and_again_is_sent_once_for_each_answer(task):
    name = next(iter(task.order.files))
    odd = Odd(standing("receiving", 0, [[name, 1]] * 100_000), standing("finished", 5))
    party = Party(name="lab-a", key=KEYS["lab-a"].verifying, transport=odd)
    Errand(party=party, carrier=odd, order=task, key=CLIENT, seconds=5, idle=1).carry(lambda *_: None, Event())
    assert odd.sent == [name]


def test_two_tasks_at_once_are_done_one_after_the_other_and_a_stranger_orders_nothing(provider, task, tmp_path):
    party, here = provider("lab-a")
    second = ordered(task, tmp_path / "second", swapped)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda each: delegate(each, (party, here)), (task, second)))
    assert encode_state(done[0].state) != encode_state(done[1].state)
    stranger = SigningKey.generate(bytes([9]) * 32)
    with pytest.raises(CallerError, match="is not a task"):
        OrderFolder(task.folder, stranger.verifying)
    delegation = Delegation(order=task, parties=[(party, here)], trust=trust_in(task), key=stranger, seconds=5, idle=5)
    refused = delegation.run(lambda *_: None)
    assert "this question is not signed for this party" in refused.verdict.reasons[1].text
