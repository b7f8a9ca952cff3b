"""Runs that are not alike: unfinished ones, ones of other data; each is decided where the evidence allows it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firmware_sim.evidence import canonical
from inspector.dispute.dispute import Disputant, settle, settle_all
from inspector.dispute.game import Party, play
from inspector.dispute.provider import Provider
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.wire.desk import Desk, Local
from monitor.lab.prover import LabProver
from tests.inspector.dispute.test_game import NOW, REFEREE
from tests.inspector.dispute.test_game import record as record_steps

OPTIONS = {"steps": 3, "chips": 2, "checkpoint_every": 2, "batch_size": 8, "numerics": "exact"}


class Loops:
    """Runs of one loop in labs, finished or not, and what is known of all."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str]
        self.folder, self.names = folder, []

    def record(self, name, **options) -> str:
        record_steps(self.folder, name, **options)
        self.names.append(name)
        return name

    @property
    def trust(self) -> Trust:
        return Trust.load([self.folder / f"{name}.trust.json" for name in self.names])

    def claim(self, name) -> Disputant:
        run = self.folder / name
        return Disputant(run=open_run(run, self.trust), prover=LabProver(run))

    def settle(self, first, second):
        """The verdict, which is the same whichever comes first."""
        verdict, turned = (
            settle(self.claim(one), self.claim(other), self.trust) for one, other in ((first, second), (second, first))
        )
        same = ("step", "guilty", "case", "prevails")
        assert [verdict.evidence[key] for key in same] == [turned.evidence[key] for key in same]
        assert verdict.outcome is turned.outcome
        return verdict


@pytest.fixture(scope="module")
def loops(tmp_path_factory) -> Loops:
    loops = Loops(tmp_path_factory.mktemp("loops"))
    for name in ("whole", "same"):
        loops.record(name)
    loops.record("begun", steps=3, finish=False)
    loops.record("less", steps=2, finish=False)
    loops.record("none", steps=0, finish=False)
    loops.record("early", finish=False, steps=4, lie="wrong-operator", lie_step=2)
    loops.record("wide", beside=3)
    loops.record("late", lie="wrong-operator", lie_step=5)
    return loops


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("begun", "the labs agree up to step 2 (whole is finished at 5, begun is unfinished at 2)"),
        ("less", "the labs agree up to step 1 (whole is finished at 5, less is unfinished at 1)"),
        ("none", "none has committed to no whole step"),
    ],
)
def test_a_finished_claim_prevails_over_an_unfinished_one_that_agrees_so_far(loops, name, text):
    """The step that an unfinished run has announced last is not compared: its files may not be there."""
    verdict = loops.settle("whole", name)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    evidence = verdict.evidence
    assert [evidence[key] for key in ("guilty", "absent", "unfinished", "prevails")] == [None, None, name, "whole"]
    assert verdict.reasons[0].text == f"{text}: the claim of whole prevails, but nothing checks its later steps"


def test_of_two_unfinished_claims_none_prevails(loops):
    verdict = loops.settle("begun", "less")
    assert (verdict.outcome, verdict.evidence["prevails"]) == (Outcome.INCONCLUSIVE, None)
    assert "neither has a result yet" in verdict.reasons[0].text


def test_a_run_whose_announced_step_is_not_there_yet_can_be_disputed(loops):
    """As after a power cut: the head commits to a step of which no file was written."""
    for end in ("", ".lab", ".trust.json"):
        source, target = (loops.folder / f"{name}{end}" for name in ("begun", "cut"))
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    announced = open_run(loops.folder / "cut", loops.trust).manifest.next
    assert announced is not None
    for path in announced.files:
        (loops.folder / "cut" / path).unlink(missing_ok=True)  # an empty log has no file
    run = open_run(loops.folder / "cut", loops.trust)
    assert (run.manifest.steps, run.committed) == (3, 2)
    assert loops.settle("whole", "cut").evidence["unfinished"] == "cut"
    assert loops.settle("early", "cut").evidence["guilty"] == "early"


@pytest.mark.parametrize("other", ["whole", "begun"])
def test_an_unfinished_run_that_differs_is_decided(loops, other):
    verdict = loops.settle(other, "early")
    assert verdict.outcome is Outcome.REJECT
    assert [verdict.evidence[key] for key in ("guilty", "step", "unfinished", "prevails")] == ["early", 2, None, other]


def test_declarations_of_which_one_has_a_key_alone_are_not_decided_where_both_were_countersigned(loops):
    verdict = loops.settle("whole", "wide")
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the labs declare different trainings (beside), and both were countersigned" in verdict.reasons[0].text


def test_an_unfinished_party_is_out_of_a_tournament_without_guilt(loops):
    verdict, _ = settle_all([*map(loops.claim, ("less", "whole", "begun", "same"))], loops.trust)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert (verdict.evidence["prevails"], verdict.evidence["unfinished"]) == (["whole", "same"], ["less", "begun"])
    verdict, _ = settle_all([*map(loops.claim, ("late", "less", "whole"))], loops.trust)
    assert (verdict.evidence["prevails"], verdict.evidence["guilty"]) == (["whole"], ["late"])
    verdict, _ = settle_all([*map(loops.claim, ("whole", "less", "none"))], loops.trust)
    assert (verdict.outcome, verdict.evidence["prevails"]) == (Outcome.INCONCLUSIVE, ["whole"])
    assert "no other party has confirmed all of it" in verdict.reasons[0].text


@pytest.fixture(scope="module")
def presets(tmp_path_factory, record):
    """A run of a preset's own data, and one of other data that it calls the preset's."""
    folder = tmp_path_factory.mktemp("presets")
    return record(folder / "own", lab="own", **OPTIONS), record(folder / "odd", lab="odd", lie="other-data", **OPTIONS)


def both_orders(runs, trust):
    first, second = (Disputant(run=open_run(each.run, each.trust), prover=LabProver(each.run)) for each in runs)
    return settle(first, second, trust), settle(second, first, trust)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_data_that_are_not_the_presets_lose(presets, is_trusted):
    for verdict in both_orders(presets, presets[0].trust if is_trusted else None):
        assert [verdict.evidence[key] for key in ("guilty", "case", "prevails")] == ["odd", "data", "own"]
        assert "the data of the task that odd states is not what the task gives" in verdict.reasons[0].text


def test_data_that_a_lab_openly_declares_lose_against_a_countersigned_declaration_alone(presets, monkeypatch):
    """Without one no lab is wrong, and the verdict says what is missing."""
    monkeypatch.setattr("inspector.dispute.claim.Claim.data_set", "another set", raising=False)
    for verdict in both_orders(presets, None):
        assert (verdict.outcome, verdict.evidence["case"]) == (Outcome.INCONCLUSIVE, "data")
        assert "give a trust file in which only those that were ordered are agreed (sha256:" in verdict.reasons[0].text
    for verdict in both_orders(presets, presets[0].trust):
        assert (verdict.evidence["guilty"], verdict.evidence["case"]) == ("odd", "data")


def test_batches_of_other_data_than_a_party_commits_to_lose(presets, tmp_path):
    """It claims the digests of the preset's data, and has trained on others."""
    own, odd = presets
    parties = []
    for each in (odd, own):
        run, prover = open_run(each.run, each.trust), LabProver(each.run)
        provider = Provider(run, prover)
        honest = canonical.decode(Provider(open_run(own.run, own.trust), LabProver(own.run)).answer("claim"))["data"]

        def answer(text, provider=provider, honest=honest):
            body = provider.answer(text)
            return canonical.encode({**canonical.decode(body), "data": honest}) if text == "claim" else body

        desk = Desk(tmp_path / each.run.name, answer, prover.key, [REFEREE.verifying], run.manifest.run)
        parties.append(Party(name=each.run.name, key=prover.key.verifying, transport=Local(desk)))
    verdict, _ = play(parties, None, REFEREE, seconds=5, now=NOW)
    assert [verdict.evidence[key] for key in ("guilty", "step", "case")] == ["odd", 1, "batch"]
