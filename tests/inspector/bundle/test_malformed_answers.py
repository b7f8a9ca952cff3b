"""What a device or a cluster says in another form counts against neither lab nor inspector."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from inspector.bundle.builder import bundle_of
from inspector.bundle.checker import check_bundle
from inspector.bundle.replays import signing
from inspector.inspection.casefile import CaseFile
from inspector.inspection.inspection import inspect
from inspector.inspection.rounding_logs import examine
from inspector.inspection.verdict import Outcome
from inspector.replay.decisions import ClassCount, Decisions
from inspector.replay.result import Replayed
from tests.inspector.bundle.conftest import CLUSTER, INSPECTORATE, SETTINGS, known


@pytest.fixture(scope="module")
def answer(honest, devices) -> dict[str, Any]:
    """What a device says of an honest run."""
    given: list[Any] = []

    def worker(name, job):
        given.append(devices.run(name, job))
        return given[-1]

    assert inspect([honest.run], honest.trust, SETTINGS, now=honest.now, worker=worker).outcome is Outcome.ACCEPT
    assert len(given[0]["replays"]) > 1
    return dict(given[0])


def first(**changes):
    """An answer whose first segment has other values."""

    def change(answer):
        answer["replays"][0].update({key: value(answer["replays"][0]) for key, value in changes.items()})
        return answer

    return change


def stops_at(step):
    return {"contradiction": lambda _: {"step": step, "text": "no"}}


def other_step(replay):
    replay["leaves"][1]["step"] = 1
    return replay["leaves"]


MALFORMED = {
    "a list": lambda _: [],
    "no replays": lambda answer: {**answer, "replays": None},
    "no fingerprint": lambda answer: {**answer, "fingerprint": None},
    "what UTF-8 cannot hold": lambda answer: {**answer, "fingerprint": "\ud800"},
    "seconds that are text": lambda answer: {**answer, "seconds": "x"},
    "workers that are a number": lambda answer: {**answer, "dropped": 5},
    "an error that is none": lambda answer: {**answer, "evidence_error": None},
    "an error without text": lambda answer: {**answer, "evidence_error": ""},
    "an infinite segment": first(segment=lambda _: [math.inf, 0, 3]),
    "another segment": lambda answer: {**answer, "replays": answer["replays"][::-1]},
    "a first leaf too few": first(leaves=lambda replay: replay["leaves"][1:]),
    "a last leaf too few": first(leaves=lambda replay: replay["leaves"][:-1]),
    "a leaf too many": first(leaves=lambda replay: [*replay["leaves"], replay["leaves"][0]]),
    "a leaf of another step": first(leaves=other_step),
    "a state that is none": first(start_state=lambda _: "x"),
    "an initial state that is false": first(initial_state=lambda _: False),
    "it stops before the segment": first(**stops_at(0)),
    "it stops below 0": first(**stops_at(-3)),
    "it stops at a step that it took": first(**stops_at(2)),
    "it stops beyond the segment": first(leaves=lambda _: [], inside=lambda _: [], **stops_at(99)),
    "too many decisions": first(decisions=lambda _: {"classes": [["product", 64, 1 << 64, 1 << 64, 0]], "unlike": []}),
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_answer_leaves_the_verdict_open(how, honest, answer):
    given = MALFORMED[how](copy.deepcopy(answer))
    verdict = inspect([honest.run], honest.trust, SETTINGS, now=honest.now, worker=lambda *_: given)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert all(reason.text.startswith("device sse41 gave a malformed answer") for reason in verdict.reasons)


def bundled(honest, given):
    """The verdict and the bundle of an inspection whose cluster signs this answer, and what others see in it."""
    case = CaseFile()
    worker = signing(lambda *_: copy.deepcopy(given), CLUSTER)
    verdict = inspect([honest.run], honest.trust, SETTINGS, now=honest.now, worker=worker, case=case)
    data = bundle_of(case, verdict, honest.trust, SETTINGS, INSPECTORATE)
    return verdict, check_bundle(data, known(honest.trust))


@pytest.mark.parametrize(
    "how", ["a list", "a state that is none", "a last leaf too few", "it stops beyond the segment"]
)
def test_a_bundle_of_an_open_verdict_verifies_whatever_the_cluster_signed(how, honest, answer):
    verdict, checked = bundled(honest, MALFORMED[how](copy.deepcopy(answer)))
    assert (verdict.outcome, checked.outcome) == (Outcome.INCONCLUSIVE, Outcome.INCONCLUSIVE)
    assert checked.evidence["verifies"]


def test_what_departs_is_shown_next_to_what_is_not_complete(honest, answer):
    given = copy.deepcopy(answer)
    given["replays"][0]["leaves"][1]["loss"] = given["replays"][0]["leaves"][0]["loss"]
    given["replays"][1]["leaves"].pop()
    verdict, checked = bundled(honest, given)
    assert verdict.outcome is checked.outcome is Outcome.REJECT
    (ground,) = checked.evidence["grounds"]
    assert "step 2: a replay does not give what the lab signed" in ground


def test_an_acceptance_needs_the_states_inside_of_steps(honest, answer, monkeypatch):
    """An inspector that did not compare them accepts, and nobody else does."""
    assert any(replay["inside"] for replay in answer["replays"])
    given = copy.deepcopy(answer)
    for replay in given["replays"]:
        replay["inside"] = []
    monkeypatch.setattr("inspector.inspection.replays.compare_inside", lambda *_: 0)
    verdict, checked = bundled(honest, given)
    assert (verdict.outcome, checked.evidence) == (Outcome.ACCEPT, {"verifies": False})
    assert "was not compared with a snapshot inside it" in checked.reasons[0].text


def test_many_decisions_are_judged_at_once():
    """A loop over what may pass would take hours."""
    count = 1 << 50
    found = examine(Decisions(classes=(ClassCount("product", 64, count, count, 0),)), "rounded", "sse41")
    assert 0 < found.allowed < count
    assert 0 < found.bits < count


@pytest.mark.parametrize("nothing", ["", 0, False, [], {}], ids=repr)
def test_an_initial_state_that_is_nothing_is_not_none(answer, nothing):
    signed = canonical.decode(canonical.encode(Replayed.of(answer["replays"][0]).to_json()))
    assert Replayed.from_json({**signed, "initial_state": None}).initial_state is None
    with pytest.raises(EvidenceError, match="states are malformed"):
        Replayed.from_json({**signed, "initial_state": nothing})
