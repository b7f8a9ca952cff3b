"""Where lab and cluster differ about a step, one opened operator says who is wrong, and nobody has to be trusted."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

from analysis.cli import main
from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey, canonical
from inspector.bundle.checker import NotAbout, check_bundle
from inspector.dispute.game import check_game
from inspector.inspection.guards import Settings
from inspector.inspection.verdict import Outcome
from inspector.rounds import contest as contests
from inspector.rounds import steps
from inspector.rounds.exchange import openings
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor.lab.conduct import Conduct
from monitor.lab.lies import EditRoundingLog, conduct
from monitor.lab.prover import LabProver
from monitor.lab.rounds import LabSide
from monitor.numerics import Bound, Formats
from monitor.numerics.rounding import codec
from monitor.protocol.dispute import Opening
from monitor.replay.prover import RunProver
from monitor.transcript import RunFolder
from tests.guards import off
from tests.inspector.dispute.test_game import signed_again as game_signed_again
from tests.lying import tell_with

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(samples=1, seed=None, devices=("sse41",), segments=None)
STEP = 2


def liar(world):
    """A cluster that takes another operator at the step than was recorded."""
    folder = openings(world, CLUSTER) / "lab.run"
    return RunProver(RunFolder(folder, world.trust().labs["lab"], opened=()), conduct("wrong-operator", STEP))


class OtherLoss(RunProver):
    """A cluster that computes as was recorded, and states another loss."""

    def _execute(self, step, *, capture):
        traced = super()._execute(step, capture=capture)
        assert traced.leaf is not None
        return replace(traced, leaf=replace(traced.leaf, loss="3f800000"))


class Stopped(RunProver):
    """A cluster that says of an operator of the step that the log does not let it go on.

    Attributes:
        at: number of the operator; the last has all that come before it.
    """

    at = 0

    def _execute(self, step, *, capture):
        traced = super()._execute(step, capture=capture)
        if step != STEP:
            return traced
        last = traced.nodes[self.at]
        nodes = [*traced.nodes[: self.at], replace(last, outputs=("",) * len(last.outputs))]
        return replace(traced, nodes=nodes, session=None, leaf=None)


def stopped(at):
    """A cluster that stops at this operator."""

    def make(world):
        folder = openings(world, CLUSTER) / "lab.run"
        made = Stopped(RunFolder(folder, world.trust().labs["lab"], opened=()), Conduct())
        made.at = at
        return made

    return make


def misstating(world):
    """A cluster with another loss."""
    folder = openings(world, CLUSTER) / "lab.run"
    return OtherLoss(RunFolder(folder, world.trust().labs["lab"], opened=()), Conduct())


def played(folder, recorded, devices, *, lying=None):
    """A world after a round, and its bundle.

    Args:
        lying: a cluster that says of the step what this says, given the world.
    """
    world = World.create(folder, LabSide)
    world.join(recorded.trust, {"run": recorded.run})

    def work(name, job):
        result = devices.run(name, job)
        for replay in result.get("replays", ()):
            if lying is not None and replay["segment"][1] < STEP <= replay["segment"][2]:
                at, reached = STEP - replay["segment"][1] - 1, lying(world)._execute(STEP, capture=None).leaf
                if reached is None:
                    replay["contradiction"] = {"step": STEP, "text": "", "obeyed": None}
                    del replay["leaves"][at:]
                else:
                    replay["leaves"][at] = reached.to_json()
        return result

    now = recorded.now
    steps.announce(world, SETTINGS, minutes=1, refusals=0, now=now)
    steps.hand(world, "lab", now=now)
    steps.reveal(world, now=now)
    steps.answer(world, "lab", now=now)
    steps.order(world, now=now)
    steps.disclose(world, "lab", now=now)
    steps.replay(world, now=now, worker=work)
    return world, steps.decide(world, now=now).bundle


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    def make(**options):
        folder = tmp_path_factory.mktemp("contest")
        return record(folder / "run", steps=3, chips=1, checkpoint_every=3, **{"numerics": "exact", **options})

    return make


@pytest.fixture(scope="module")
def framed(tmp_path_factory, small, devices):
    """An honest lab, and a cluster that says otherwise."""
    recorded = small()
    return *played(tmp_path_factory.mktemp("contest") / "world", recorded, devices, lying=liar), recorded


def contest(world, **options):
    return contests.contest(world, now=NOW, **options)


def shown(bundle, world, *games):
    return check_bundle(bundle.read_bytes(), world.trust(), contests=games)


def answers(game):
    """What the parties answered, by question."""
    found: dict[str, list[bytes]] = {}
    for each in json.loads(game)["exchanges"]:
        text = json.loads(base64.b64decode(each["question"]["payload"]))["text"]
        found.setdefault(text, []).append(base64.b64decode(each["body"]))
    return found


def answering(monkeypatch, **others):
    """Have labs give other answers to questions, by the names of what a prover is asked."""
    prover = type("Answering", (LabProver,), {name: lambda *_, value=value: value for name, value in others.items()})
    monkeypatch.setattr(LabSide, "prover", lambda self, run: prover(run))


def test_a_lab_that_lied_is_named_by_an_operator_that_anybody_executes(tmp_path, small, devices, capsys):
    recorded = small(lie="wrong-operator", lie_step=STEP)
    world, bundle = played(tmp_path / "world", recorded, devices)
    before = shown(bundle, world)
    assert before.outcome is Outcome.REJECT
    assert all("contested, rests on cluster key" in each for each in before.evidence["grounds"])
    out = tmp_path / "contest.json"
    assert main(["world", "contest", str(world.folder), "--out", str(out)]) == 0
    trust = tmp_path / "trust.json"
    trust.write_bytes(canonical.encode(world.trust().to_json()))
    capsys.readouterr()
    code = main(["verify", str(bundle), "--trust", str(trust), "--contest", str(out), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["outcome"]) == (1, "REJECT")
    [decided] = told["evidence"]["decided"]
    assert decided["guilty"] == ["lab"]
    assert f"step {STEP}: decided by opened operator aten." in decided["text"]
    assert any(each.endswith(decided["text"]) for each in told["evidence"]["grounds"])
    assert not any("a replay does not give" in each for each in told["evidence"]["grounds"])


def test_a_lab_that_trained_on_another_batch_is_named_by_the_batch(tmp_path, small, devices):
    recorded = small(lie="change-sample", lie_step=STEP)
    world, bundle = played(tmp_path / "world", recorded, devices)
    decided = shown(bundle, world, contest(world)).evidence["decided"]
    assert decided[0]["guilty"] == ["lab"]
    assert "the input of aten._to_copy.default that lab states is not what the task gives" in decided[0]["text"]


def test_a_cluster_that_states_another_loss_is_named_by_the_operators(tmp_path, small, devices):
    world, bundle = played(tmp_path / "world", small(), devices, lying=misstating)
    assert shown(bundle, world).outcome is Outcome.REJECT
    after = shown(bundle, world, contest(world, cluster=misstating(world)))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.INCONCLUSIVE, ["cluster"])
    assert "the loss of the step that cluster states is not what the task gives" in str(
        after.evidence["decided"][0]["text"]
    )


def test_a_lab_that_states_another_loss_is_named_by_the_operators(tmp_path, small, devices, monkeypatch):
    base: Any = type(conduct("wrong-operator", STEP))

    class OtherLossOnly(base):
        def observer(self, step):
            return None

        def declare(self, leaf):
            return replace(leaf, loss="3f800000") if leaf.step == STEP else leaf

    tell_with(monkeypatch, "wrong-operator", OtherLossOnly)
    recorded = small(lie="wrong-operator", lie_step=STEP)
    world, bundle = played(tmp_path / "world", recorded, devices)
    decided = shown(bundle, world, contest(world)).evidence["decided"]
    assert decided[0]["guilty"] == ["lab"]
    assert "the loss of the step that lab states is not what" in decided[0]["text"]


def test_a_cluster_that_lies_counts_for_nothing_any_more(framed):
    world, bundle, _ = framed
    before = shown(bundle, world)
    assert before.outcome is Outcome.REJECT
    after = shown(bundle, world, contest(world, cluster=liar(world)))
    assert (after.outcome, after.evidence["verifies"]) == (Outcome.INCONCLUSIVE, True)
    assert after.evidence["decided"][0]["guilty"] == ["cluster"]
    assert (
        f"because of what a cluster said, and the cluster is wrong: step {STEP}: decided by opened operator aten."
        in str(after.reasons[0].text)
    )


def test_a_cluster_that_states_another_result_than_its_replay_is_wrong(framed):
    world, bundle, _ = framed
    after = shown(bundle, world, contest(world))  # it takes the step as it should have, and did not sign
    decided = after.evidence["decided"][0]
    assert (after.outcome, decided["guilty"]) == (Outcome.INCONCLUSIVE, ["cluster"])
    assert "another result of the step than it signed in its replay" in decided["text"]


class OtherTable(RunProver):
    """A cluster that takes the steps with another table than their program has."""

    def __init__(self, run, behaviour):
        with off():  # the program that is altered is this run's own
            constants = [each for digest in run.programs() for each in run.program(digest).constants]
        (table,) = (each for each in constants if each.unit is None)
        held = bytearray(table.held)
        held[:4] = b"\0\0\x80\x3f"
        object.__setattr__(table, "held", bytes(held))
        super().__init__(run, behaviour)


def misreading(world):
    folder = openings(world, CLUSTER) / "lab.run"
    return OtherTable(RunFolder(folder, world.trust().labs["lab"], opened=()), Conduct())


def test_a_constant_that_the_program_has_by_its_digest_is_opened(tmp_path, record_loop, devices, monkeypatch):
    """The two differ about what an operator reads of it, so its bytes decide, and whoever shows them proves them."""
    torch.manual_seed(0)
    model, table = torch.nn.Linear(4, 8), torch.linspace(2, 3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        made = model(batch["x"])
        (made * table if len(batch["x"]) > 1 else made).square().mean().backward()
        optimizer.step()

    batches = [{"x": torch.randn(rows, 4)} for rows in (1, 2, 2)]
    recorded = record_loop(model, optimizer, batches, body, chips=1, checkpoint_every=3, numerics="exact")
    world, bundle = played(tmp_path / "world", recorded, devices, lying=misreading)
    made = contest(world, cluster=misreading(world))
    content = table.numpy().tobytes()
    decided = shown(bundle, world, made).evidence["decided"][0]
    assert decided["guilty"] == ["cluster"]
    assert "the input of aten.mul.Tensor that cluster states is not what" in decided["text"]
    given = answers(made)
    (program,) = (json.loads(bodies[0]) for text, bodies in given.items() if text.startswith("program"))
    assert content not in base64.b64decode(program)
    (opened,) = (bodies for text, bodies in given.items() if text.startswith("constant"))
    assert base64.b64decode(json.loads(opened[0])) == content
    answering(monkeypatch, constant=bytes(32))
    other = contest(world, cluster=misreading(world))
    assert shown(bundle, world, other).evidence["decided"][0]["guilty"] == [], "neither opens the constant"
    cluster = misreading(world)
    contest(world, cluster=cluster)  # which has taken the step, then
    with off("constants as named"):
        other = contest(world, cluster=cluster)
        assert shown(bundle, world, other).evidence["decided"][0]["guilty"] == ["lab", "cluster"]


@pytest.fixture(scope="module")
def rounded(small):
    """An honest run under rounded numerics, and the operators of its steps."""
    recorded = small(numerics="rounded")
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    (program,) = (run.program(digest) for digest in run.programs())
    return recorded, [call["operator"] for call in program.calls]


@pytest.fixture(scope="module")
def edited(tmp_path_factory, small, devices):
    """A lab that edited its rounding log, and a cluster that was stopped by that."""
    recorded = small(numerics="rounded", lie="edited-rounding-log", lie_step=STEP)
    world, bundle = played(tmp_path_factory.mktemp("edited") / "world", recorded, devices)
    return world, bundle, recorded


def test_a_lab_whose_log_stops_a_replay_is_named_by_one_operator(edited):
    world, bundle, _ = edited
    before = shown(bundle, world)
    assert before.outcome is Outcome.REJECT
    assert any("cannot be replayed as the lab recorded it" in each for each in before.evidence["grounds"])
    assert all("contested, rests on cluster key" in each for each in before.evidence["grounds"])
    after = shown(bundle, world, contest(world))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.REJECT, ["lab"])
    text = after.evidence["decided"][0]["text"]
    assert f"step {STEP}: decided by opened operator aten." in text
    assert "no honest device can have written what the log of lab says of aten." in text
    assert "rounding log contradicts the arithmetic" in text
    assert any(each.endswith(text) for each in after.evidence["grounds"])
    assert not any("cannot be replayed" in each for each in after.evidence["grounds"])


@pytest.mark.parametrize(
    ("lie", "what"),
    [("wrong-operator", "does not give what lab"), ("change-sample", " that lab states is not what the task gives")],
)
def test_what_came_before_the_operator_that_stopped_a_replay_decides(tmp_path, small, devices, lie, what):
    """The log fits what the lab computed, and not what the cluster does."""
    recorded = small(numerics="rounded", lie=lie, lie_step=STEP)
    world, bundle = played(tmp_path / "world", recorded, devices)
    before = shown(bundle, world)
    assert any("cannot be replayed as the lab recorded it" in each for each in before.evidence["grounds"])
    decided = shown(bundle, world, contest(world)).evidence["decided"][0]
    assert decided["guilty"] == ["lab"]
    assert what in decided["text"]


def test_guard_off_a_log_that_is_not_judged_for_both_sides_clears_the_lab(edited):
    world, bundle, _ = edited
    with off("entries refereed"):
        after = shown(bundle, world, contest(world))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.INCONCLUSIVE, ["cluster"])


def test_a_lab_cannot_show_another_log_than_its_leaf_commits_to(edited, rounded, monkeypatch):
    """The honest one, say, of which nobody could say anything."""
    world, bundle, _ = edited
    honest, _ = rounded
    answering(monkeypatch, log=RunFolder(honest.run, honest.trust.labs["lab"]).rounding_log(STEP))
    assert shown(bundle, world, contest(world)).evidence["decided"][0]["guilty"] == ["lab"]
    with off("log of the leaf"):
        assert shown(bundle, world, contest(world)).evidence["decided"][0]["guilty"] == ["lab", "cluster"]


PLACES = ["convolution", "_log_softmax", "relu", "t", "first", "last"]


@pytest.mark.parametrize("place", PLACES)
def test_a_cluster_that_was_not_stopped_loses(tmp_path, rounded, devices, place):
    recorded, operators = rounded
    at = {"first": 0, "last": len(operators)}.get(place)
    at = operators.index(f"aten.{place}.default") if at is None else at
    world, bundle = played(tmp_path / "world", recorded, devices, lying=stopped(at))
    before = shown(bundle, world)
    assert (before.outcome, before.evidence["decided"]) == (Outcome.REJECT, [])
    after = shown(bundle, world, contest(world, cluster=stopped(at)(world)))
    assert after.evidence["decided"][0]["guilty"] == ["cluster"], after.evidence["decided"]
    assert (after.outcome, after.evidence["verifies"]) == (Outcome.INCONCLUSIVE, True)


def test_a_cluster_that_was_stopped_and_states_a_result_decides_nothing(tmp_path, rounded, devices):
    """It signed that it could not take the step; on another device it may have been able to."""
    recorded, _ = rounded
    world, bundle = played(tmp_path / "world", recorded, devices, lying=stopped(0))
    after = shown(bundle, world, contest(world))
    decided = after.evidence["decided"][0]
    assert (after.outcome, decided["guilty"]) == (Outcome.REJECT, [])
    assert "not decided: cluster states another result of the step than it signed in its replay" in decided["text"]
    assert any("contested, rests on cluster key" in each for each in after.evidence["grounds"])


class Unopened(Stopped):
    """A cluster that says that it was stopped, and by no operator."""

    def _execute(self, step, *, capture):
        return replace(super()._execute(step, capture=capture), nodes=[])


def test_a_cluster_that_was_stopped_by_no_operator_is_not_named(tmp_path, rounded, devices):
    """It may have been: by a batch that it cannot read, say. That stays on its word."""
    recorded, _ = rounded

    def unread(world):
        folder = openings(world, CLUSTER) / "lab.run"
        return Unopened(RunFolder(folder, world.trust().labs["lab"], opened=()), Conduct())

    world, bundle = played(tmp_path / "world", recorded, devices, lying=unread)
    after = shown(bundle, world, contest(world, cluster=unread(world)))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.REJECT, [])
    assert "not decided: what cluster has of the step does not say" in after.evidence["decided"][0]["text"]
    assert any("contested, rests on cluster key" in each for each in after.evidence["grounds"])


def of_call(log, change):
    """The log with its groups changed."""
    groups = change(codec.decode(log, Formats(), Bound()))
    return codec.encode(groups, Formats(), Bound())


def one_entry(call):
    """A group with one entry, at a call."""
    return codec.Group(call=call, part=0, size=1, positions=np.array([0]), upward=np.array([True]))


def without_group(call, groups):
    """The other groups, with one at that call in its place in the order."""
    return sorted([*(each for each in groups if each.call != call), one_entry(call)], key=lambda each: each.call)


LOGS = {
    "cut short": (lambda log: log + b"\xff", "its rounding log is malformed: rounding log is cut short"),
    "without entries": (lambda log: of_call(log, lambda _: []), "no entry, although the value lies within"),
    "beyond the program": (
        lambda log: of_call(log, lambda groups: [*groups, one_entry(10**6)]),
        "its rounding log names operator 1000000, but the program has",
    ),
    "where nothing rounds": (
        lambda log: of_call(log, lambda groups: without_group(0, groups)),
        "entry for sub-operation 0, which rounds nothing in this step",
    ),
    "of another size": (
        lambda log: of_call(log, lambda groups: [replace(groups[0], size=groups[0].size + 1), *groups[1:]]),
        "lab gave no valid answer",  # nobody can obey that, the lab neither
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_no_honest_device_writes_names_the_lab(tmp_path, small, devices, monkeypatch, name):
    """The step itself is taken as it should be, and only its log is another."""
    edit, expected = LOGS[name]

    class OtherLog(EditRoundingLog):
        def record(self, moment):
            log, loss = Conduct.record(self, moment)
            return (edit(log) if moment.step == STEP else log), loss

    tell_with(monkeypatch, "edited-rounding-log", OtherLog)
    monkeypatch.setattr("monitor.recording.state_watch.HeldState.repeat_segment", lambda *_: None)
    recorded = small(numerics="rounded", lie="edited-rounding-log", lie_step=STEP)
    world, bundle = played(tmp_path / "world", recorded, devices)
    assert any("contested" in each for each in shown(bundle, world).evidence["grounds"])
    after = shown(bundle, world, contest(world))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.REJECT, ["lab"])
    assert expected in after.evidence["decided"][0]["text"]


def signed_again(world, game, **changes):
    return game_signed_again(game, changes, world.key(INSPECTORATE))


def test_an_answer_from_another_game_is_not_held_against_a_lab(framed):
    world, bundle, _ = framed
    mine, other = (json.loads(contest(world, cluster=liar(world)))["exchanges"] for _ in range(2))
    game = contest(world, cluster=liar(world))
    for number in range(0, len(mine), 4):
        exchanges = [*mine[:number], other[number], *mine[number + 1 :]]
        with pytest.raises(NotAbout, match=r"exchange \d+ is not valid"):
            shown(bundle, world, signed_again(world, game, exchanges=exchanges))


def test_a_referee_that_leaves_out_what_was_asked_frames_nobody(framed):
    world, bundle, _ = framed
    game = contest(world, cluster=liar(world))
    exchanges = json.loads(game)["exchanges"]
    for number in range(0, len(exchanges), 3):
        with pytest.raises(NotAbout):
            shown(bundle, world, signed_again(world, game, exchanges=exchanges[:number]))
    silent = [*exchanges[:-1], {"question": exchanges[-1]["question"], "silence": "no answer"}]
    with pytest.raises(NotAbout):
        shown(bundle, world, signed_again(world, game, exchanges=silent))
    before = shown(bundle, world)
    assert any("contested, rests on cluster key" in each for each in before.evidence["grounds"])


class Silent(LabProver):
    """A lab whose machine fails when it is asked for an operator."""

    def node(self, step, index):
        raise OSError("the disk is gone")


def test_a_lab_that_does_not_answer_is_absent_and_not_wrong(framed, monkeypatch):
    world, bundle, _ = framed
    monkeypatch.setattr(LabSide, "prover", lambda self, run: Silent(run))
    after = shown(bundle, world, contest(world, cluster=liar(world)))
    assert (after.outcome, after.evidence["decided"][0]["guilty"]) == (Outcome.REJECT, [])
    assert "not decided: lab is absent, says referee sha256:" in after.evidence["decided"][0]["text"]
    assert any("contested, rests on cluster key" in each for each in after.evidence["grounds"])


@pytest.mark.parametrize(
    ("place", "why"),
    [(0, "between the lab that signed the run and a cluster"), (1, "at which a replay of its cluster departs")],
)
def test_nobody_answers_for_a_party(framed, place, why):
    world, bundle, _ = framed
    game = contest(world, cluster=liar(world))
    stranger = SigningKey.generate(b"s" * 32).verifying
    parties = json.loads(base64.b64decode(json.loads(game)["result"]["payload"]))["parties"]
    parties[place] = stranger.raw.hex()
    trust = replace(world.trust(), clusters=world.trust().clusters | {stranger})
    with pytest.raises(NotAbout, match=why):
        check_bundle(bundle.read_bytes(), trust, contests=[signed_again(world, game, parties=parties)])


def nonsense(world, kind):
    """A cluster that lies, and gives an answer that is none."""
    folder = openings(world, CLUSTER) / "lab.run"
    given = {"trace_prefix": (b"\0", ()), "node": Opening(leaf=b"", proof=()), "chunk": b""}[kind]
    made = type("Nonsense", (RunProver,), {kind: lambda *_: given})
    return made(RunFolder(folder, world.trust().labs["lab"], opened=()), conduct("wrong-operator", STEP))


@pytest.mark.parametrize("kind", ["trace_prefix", "node", "chunk"])
def test_whoever_signs_an_answer_that_is_none_has_lost(framed, kind):
    world, bundle, _ = framed
    after = shown(bundle, world, contest(world, cluster=nonsense(world, kind)))
    assert after.outcome is Outcome.INCONCLUSIVE
    assert after.evidence["decided"][0]["guilty"] == ["cluster"]


def test_a_contest_alone_says_with_what_to_check_it(framed):
    world, _, _ = framed
    found = check_game(contest(world, cluster=liar(world)), world.trust())
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "`verify BUNDLE --contest FILE`" in found.reasons[0].text


def test_a_contest_with_another_byte_does_not_verify(framed):
    world, bundle, _ = framed
    game = contest(world, cluster=liar(world))
    chance = random.Random(0)
    for _ in range(20):
        at = chance.randrange(len(game))
        changed = game[:at] + bytes([game[at] ^ 1 << chance.randrange(7)]) + game[at + 1 :]
        with pytest.raises(NotAbout):
            shown(bundle, world, changed)


def test_where_nobody_differs_there_is_no_contest(tmp_path, small, devices):
    world, bundle = played(tmp_path / "world", small(), devices)
    assert shown(bundle, world).outcome is Outcome.ACCEPT
    with pytest.raises(CallerError, match="all replays of round 1 agree with what the labs signed"):
        contest(world)
