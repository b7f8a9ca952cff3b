"""A client gets the answers that its model gives, and who answers one request otherwise is named."""

from __future__ import annotations

import shutil
from copy import copy
from dataclasses import replace

import pytest
import torch

from inspector.delegation.evidence import check_audit
from inspector.dispute.arena import check_tournament
from inspector.inspection.verdict import Outcome
from monitor import numerics
from monitor.lab.lies import conduct
from monitor.presets import generate
from monitor.programs.keys import RepeatedKeys
from monitor.replay.inference import OUTPUTS, answers_of, is_inference
from monitor.replay.ordering import order_run
from monitor.replay.reexecution import HONEST, Behaviour
from monitor.transcript import encode_state
from monitor.transcript.orders import OrderFolder
from tests.inspector.delegation.test_delegation import (  # noqa: F401 - fixtures
    CLIENT,
    delegate,
    provider,
    trained,
    trust_in,
)
from tests.monitor.replay.test_inference import ASKED, PROMPTS, made, model_of


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return made(tmp_path_factory.mktemp("inference") / "task")


def answered(temperature):
    """What the model answers here, in exact numerics, without padding, program or task."""
    model, found = model_of(), []
    for step, prompt in enumerate(PROMPTS, 1):
        keys = RepeatedKeys(ASKED.seed, step)
        keys.expect([0, 1, 2])
        batch = {"tokens": torch.zeros(1, len(prompt) + 2, dtype=torch.int64), "length": torch.tensor([len(prompt)])}
        batch["tokens"][0, : len(prompt)] = torch.tensor(list(prompt))
        with torch.no_grad(), numerics.recording("exact", keys=keys):
            found.append(generate(model, batch, 3, temperature)[0].tolist())
    return found


@pytest.fixture(scope="module")
def answers():
    return answered(ASKED.temperature)


class Written(Behaviour):
    """Writes another value to a place of the state once a step is taken."""

    def __init__(self, kind, name, place, step):
        self.key, self.place, self.step = (kind, name), place, step

    def before_commit(self, moment):
        if moment.step == self.step:
            moment.memory.tensors[self.key][self.place] += 1


class Drawn(Behaviour):
    """Gives another result of the last call of an operator in a step, such as another token, or random number."""

    def __init__(self, operator, step=2):
        self.operator, self.step = operator, step

    def observer(self, step):
        return self if step == self.step else None

    def before(self, index, func, args, kwargs):
        pass

    def after(self, index, func, args, kwargs, out):
        if str(func) == self.operator:
            out.copy_(out.flip(-1) if out.numel() > 1 else out + 1)


@pytest.fixture
def against(provider, task, monkeypatch):  # noqa: F811
    """Delegate to a liar and an honest provider."""

    def play(behaviour=HONEST, change=None, share=0.0):
        with monkeypatch.context() as patch:
            patch.setattr("tests.inspector.delegation.test_delegation.conduct", lambda *_: behaviour)
            liar = provider("lab-a", change=change)
        return delegate(task, liar, *([] if share else [provider("lab-b")]), share=share)

    return play


def test_answers_are_those_of_the_model_with_the_declared_keys(against, task, answers):
    done = against()
    assert (done.verdict.outcome, done.verdict.evidence["guilty"]) == (Outcome.ACCEPT, [])
    assert done.state[OUTPUTS].tolist() == answers
    assert is_inference(task)
    assert task.changed() == {OUTPUTS}, "what the client fetches"
    given = answers_of(task, done.state)
    assert [each["prompt"] for each in given] == [prompt.decode() for prompt in PROMPTS]
    assert [each["tokens"] for each in given] == answers
    start = task.state()
    assert encode_state({**done.state, OUTPUTS: start[OUTPUTS]}) == encode_state(start)
    assert set(start[OUTPUTS].flatten().tolist()) == {-1}


def test_temperature_zero_gives_the_likeliest_tokens(provider, tmp_path):  # noqa: F811
    done = delegate(made(tmp_path / "task", replace(ASKED, temperature=0)), provider("lab-a"), share=1.0)
    assert (done.verdict.outcome, done.state[OUTPUTS].tolist()) == (Outcome.ACCEPT, answered(0))


@pytest.mark.parametrize(
    ("behaviour", "step", "operator"),
    [
        (Drawn("aten.argmax.default"), 2, "aten.argmax.default"),
        (Drawn("aten.exponential_.default"), 2, "aten.exponential_.default"),
        (conduct("reorder-data", 2), 2, None),
        (Drawn("aten.index_copy_.default"), 2, "aten.index_copy_.default"),
        (Written("buffer", "outputs", (1, 0), 2), 2, "chipwitness.commit_state"),
        (Written("buffer", "outputs", (0, 0), 3), 3, "chipwitness.commit_state"),
        (Written("weight", "head.weight", (0, 0), 1), 1, "chipwitness.commit_state"),
    ],
    ids=["token", "random numbers", "prompts swapped", "write", "answer", "earlier answer", "weight"],
)
def test_who_answers_one_request_otherwise_is_named_with_request_and_operator(
    against, task, answers, behaviour, step, operator
):
    done = against(behaviour)
    found = done.verdict.evidence
    assert (done.verdict.outcome, found["result"], found["guilty"]) == (Outcome.ACCEPT, "lab-b", ["lab-a"])
    (loss,) = found["losses"]
    assert (loss["step"], loss["operator"]) == (step, operator)
    assert done.state[OUTPUTS].tolist() == answers
    assert check_tournament(done.games, trust_in(task)).evidence["guilty"] == ["lab-a"]


SWAPPED = replace(ASKED, prompts=(PROMPTS[1], PROMPTS[0], PROMPTS[2]))


@pytest.mark.parametrize(
    ("asked", "seed", "step"),
    [
        (replace(ASKED, temperature=0.1), 3, 1),
        (replace(ASKED, temperature=0), 3, 1),
        (SWAPPED, 3, 1),
        (replace(ASKED, seed=8), 3, 0),
        (replace(ASKED, prompts=PROMPTS[:2]), 3, 0),
        (replace(ASKED, tokens=2), 3, 0),
        (ASKED, 4, 0),
    ],
    ids=["temperature", "greedy", "prompts swapped", "seed", "fewer prompts", "fewer tokens", "weights"],
)
def test_who_does_another_inference_than_was_ordered_is_named(against, task, answers, tmp_path, asked, seed, step):
    other = made(tmp_path / "other", asked, seed)

    def change(_):
        shutil.copytree(other.folder / "files", tmp_path / "lab-a" / task.digest / "files", dirs_exist_ok=True)
        return other.order

    done = against(change=change)
    found = done.verdict.evidence
    assert (found["result"], found["guilty"], done.state[OUTPUTS].tolist()) == ("lab-b", ["lab-a"], answers)
    assert [(each["step"], each["case"]) for each in found["losses"]] == [(step, "order" if step else "declaration")]


def test_who_ends_before_the_last_request_is_named(against, task, answers):
    def change(order):
        shorter = copy(order)
        object.__setattr__(shorter, "steps", order.steps[:2])
        return shorter

    done = against(change=change)
    found = done.verdict.evidence
    assert (found["result"], found["guilty"], done.state[OUTPUTS].tolist()) == ("lab-b", ["lab-a"], answers)
    assert "commits to 2 steps, but 3 are declared" in found["losses"][0]["text"]


@pytest.mark.parametrize(("kind", "name"), [("buffer", "outputs"), ("weight", "head.weight")])
def test_a_client_that_answers_requests_again_names_the_liar_and_anybody_can_repeat_that(against, task, kind, name):
    done = against(Written(kind, name, (0, 0), 2), share=1.0)
    assert (done.verdict.outcome, done.state, done.verdict.evidence["guilty"]) == (Outcome.REJECT, None, ["lab-a"])
    assert done.verdict.evidence["losses"][0]["step"] == 2
    assert check_audit(done.audit, trust_in(task)).evidence["guilty"] == ["lab-a"]


def test_no_answers_come_from_a_model_that_a_provider_has_changed_even_where_nothing_is_compared(provider, task):  # noqa: F811
    party = provider("lab-a")
    party[1].reception.workshop.behaviour = Written("weight", "head.weight", (0, 0), 3)
    done = delegate(task, party)
    assert (done.verdict.outcome, done.state, done.verdict.evidence["guilty"]) == (Outcome.INCONCLUSIVE, None, [])
    assert "differs where no step may write" in done.verdict.reasons[2].text


def test_a_run_that_is_no_inference_has_no_answers(trained, tmp_path):  # noqa: F811
    order_run(trained, tmp_path / "task", CLIENT)
    assert not is_inference(OrderFolder(tmp_path / "task", CLIENT.verifying))
