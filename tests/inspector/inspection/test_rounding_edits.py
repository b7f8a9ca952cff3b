"""Every single-entry edit of a small run's rounding logs, each with all that follows recomputed and signed.

The run is two steps of ``tiny-gpt`` on one sample, some 25 entries. A lab flips or removes each of them in turn,
adds each element next to the window (4β < |v − m| ≤ 6β) and seeded elements beyond it. The whole
inspection judges each run on a device that computes otherwise. Which verdict is due follows from |v − m|/β in the lab's
own arithmetic; devices differ there by about 0.1, so elements within ``MARGIN`` of a rule's edge may go either way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from inspector.dispute.dispute import Disputant, settle
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome, Verdict
from monitor.lab.conduct import Conduct
from monitor.lab.lies import EditRoundingLog
from monitor.lab.prover import LabProver
from monitor.lab.rounding_log_edits import EditKind, LogEdit, Rounding, Survey, apply_edit, far_additions
from monitor.numerics import Bound, Formats, replaying
from monitor.numerics.rounding import codec
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import ProgramSteps
from tests.guards import blind
from tests.guards import off as switched_off

OPTIONS = {"preset": "tiny-gpt", "batch_size": 1, "steps": 2, "checkpoint_every": 2, "chips": 1, "rate": Fraction(1)}
SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
DEVICES = ("sse41", "mkl-compatible")
MARGIN = 0.25
STEPS = (1, 2)
SEED = 11
SOME = 24
ENOUGH = 5
"""Cases that each verdict must have; which elements are ambiguous depends on the processor that trains."""
BLIND = 2
"""Rejected edits of a kind that are inspected once more without the guard."""

NO_ENTRY = "no entry, although the value lies within 2β of a midpoint"
AGAINST = "entry against a value further than 2β from its midpoint"
UNTRUE = "entry against an exact value further than β from its midpoint"
BEYOND = "entry where the value is exact or further than 6β from a midpoint"


class Watcher(Conduct):
    """The honest lab, which keeps what each step rounded and logged."""

    def __init__(self) -> None:
        self.roundings: dict[int, list[Rounding]] = {}
        self.logs: dict[int, bytes] = {}

    needs_before = True

    def record(self, moment):
        keys = moment.keys()
        survey, session = Survey.recording(keys=keys)
        elsewhere = ProgramTraining(moment.declared, device=moment.memory.place).memory  # or the chips would count it
        elsewhere.load(moment.before)
        loss = moment.take(elsewhere, moment.batch, session, keys)
        assert (session.log, loss) == (moment.log, moment.loss)
        self.roundings[moment.step], self.logs[moment.step] = survey.roundings, session.log
        return session.log, loss


@dataclass(frozen=True)
class Case:
    step: int
    edit: LogEdit
    distance: float
    operator: str

    @property
    def broken_rule(self) -> str | None:
        """The rule that this edit breaks, if any."""
        kind, d = self.edit.kind, self.distance
        if kind is EditKind.FLIP:
            return AGAINST if d > 2 else UNTRUE if d > 1 and self.is_sum else None
        if kind is EditKind.DROP:
            return NO_ENTRY if d <= 2 else None
        if d > 6:
            return BEYOND
        return AGAINST if kind is EditKind.ADD else None

    @property
    def is_clear(self) -> bool:
        edges = (1.0, 2.0, 6.0) if self.edit.kind is EditKind.FLIP and self.is_sum else (2.0, 6.0)
        return min(abs(self.distance - edge) for edge in edges) > MARGIN

    @property
    def is_sum(self) -> bool:
        """Its result has an exact value, beyond β of which no device decides."""
        return "mm" in self.operator


class SmallRun:
    """The run, all edits of it, and the inspection of an edited one."""

    def __init__(self, folder: Path, record, devices) -> None:
        self._folder, self._record, self._devices, self._runs = folder, record, devices, 0
        self.watcher = Watcher()
        self.honest = self.train(self.watcher)
        self.entries = {
            (step, group.call, group.part): set(group.positions.tolist())
            for step in STEPS
            for group in codec.decode(self.watcher.logs[step], Formats(), Bound())
        }

    def train(self, conduct: Conduct):
        self._runs += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("monitor.recording.recorder.conduct", lambda lie, step: conduct)
            return self._record(self._folder / f"run-{self._runs}", **OPTIONS)

    def edited(self, case: Case):
        return self.train(EditRoundingLog(case.step, case.edit))

    def inspect(self, recorded, *devices: str, off: frozenset[Guard] = frozenset()) -> Verdict:
        """Inspect all but the snapshots inside of steps: this lab's chips saw the step without the edit."""
        settings = replace(SETTINGS, devices=devices or SETTINGS.devices)
        with switched_off("snapshots inside steps"), blind(*off):
            return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=self._devices.run)

    def logged(self, kind: EditKind) -> list[Case]:
        """That edit of every entry."""
        return [
            case
            for step in STEPS
            for each in self.watcher.roundings[step]
            for element in sorted(self.entries.get((step, each.call, each.part), ()))
            for case in [self._case(step, each, kind, element)]
        ]

    def unlogged(self, kind: EditKind, lowest: float, highest: float, most: int | None = None) -> list[Case]:
        """That edit of every element without an entry in a range of distances, or of so many seeded ones."""
        places = [
            (step, each, int(element))
            for step in STEPS
            for each in self.watcher.roundings[step]
            for element in np.flatnonzero((each.distance > lowest) & (each.distance <= highest))
            if element not in self.entries.get((step, each.call, each.part), ())
        ]
        if most is not None:
            chosen = np.random.Generator(np.random.Philox(SEED)).permutation(len(places))[:most]
            places = [places[index] for index in sorted(chosen)]
        return [self._case(step, each, kind, element) for step, each, element in places]

    def _case(self, step: int, each: Rounding, kind: EditKind, element: int) -> Case:
        edit = LogEdit(kind=kind, call=each.call, part=each.part, element=element)
        return Case(step, edit, float(each.distance[element]), each.operator)


@pytest.fixture(scope="module")
def small(tmp_path_factory, record, devices) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp("edits"), record, devices)


def assert_named(verdict: Verdict, case: Case) -> None:
    """Step, operator and element stand in the reason's text and in its evidence."""
    assert verdict.outcome is Outcome.REJECT, case
    (reason,) = verdict.reasons
    assert reason.text.startswith(f"step {case.step}: "), case
    place = f"at call {case.edit.call} ({case.operator}), element {case.edit.element}: "
    assert place in reason.text, (case, reason.text)
    assert not case.is_clear or reason.text.endswith(f"{place}{case.broken_rule}"), (case, reason.text)
    found = {key: reason.where[key] for key in ("step", "operator", "operator_index", "element")}
    expected = {"step": case.step, "operator": case.operator}
    assert found == {**expected, "operator_index": case.edit.call, "element": case.edit.element}


def judge(small: SmallRun, case: Case, accepted: list[Verdict], rejected: list[Case]) -> None:
    """Train under the edit, inspect, compare with the prediction; ``BLIND`` rejected ones pass with the guard off."""
    recorded = small.edited(case)
    verdict = small.inspect(recorded)
    due = Outcome.ACCEPT if case.broken_rule is None else Outcome.REJECT
    if verdict.outcome is Outcome.ACCEPT and (due is Outcome.ACCEPT or not case.is_clear):
        accepted.append(verdict)
        return
    assert due is Outcome.REJECT or not case.is_clear, (case, verdict.reasons)
    assert_named(verdict, case)
    rejected.append(case)
    if case.edit.kind is not EditKind.DROP and len(rejected) <= BLIND:
        assert verdict.reasons[0].guard == Guard.ROUNDING.value
        blind = small.inspect(recorded, off=frozenset({Guard.ROUNDING}))
        assert blind.outcome is Outcome.ACCEPT, (case, blind.reasons)


def turned(verdict: Verdict) -> int:
    return verdict.evidence["replays"][0]["turned_decisions"]


def test_the_run_is_small_and_holds_every_kind_of_element(small):
    flips = small.logged(EditKind.FLIP)
    assert 15 <= len(flips) <= 300
    assert {case.step for case in flips} == set(STEPS)
    assert all(case.distance <= 4 for case in flips)
    assert sum(case.distance <= 2 for case in flips) >= ENOUGH
    assert sum(case.distance > 2 for case in flips) >= ENOUGH
    assert len(small.unlogged(EditKind.ADD, 4, 6)) >= ENOUGH
    verdict = small.inspect(small.honest)
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["replays"][0]["logged_decisions"] == len(flips)


def some(cases: list[Case]) -> list[Case]:
    """Of the cases, some ``SOME`` that lie equally far from one another: each is a training and an inspection."""
    return cases[:: max(1, len(cases) // SOME)]


def test_flips_are_rejected_outside_the_window_and_counted_within(small):
    cases = some(small.logged(EditKind.FLIP))
    honest = turned(small.inspect(small.honest))
    accepted: list[Verdict] = []
    rejected: list[Case] = []
    for case in cases:
        judge(small, case, accepted, rejected)
    assert len(accepted) + len(rejected) == len(cases)
    assert len(rejected) >= ENOUGH
    assert len(accepted) >= ENOUGH
    # The other device's own choices may turn where the edit changed what follows, but hardly ever.
    assert all(turned(verdict) >= 1 for verdict in accepted)
    assert sum(turned(verdict) == honest + 1 for verdict in accepted) >= 0.8 * len(accepted)
    assert all("of them differently from the device" in verdict.reasons[0].text for verdict in accepted)


def test_removals_of_mandatory_entries_are_rejected_on_every_device(small):
    """``ENOUGH`` of them on all devices each, the others on each device in its turn."""
    accepted: list[Verdict] = []
    rejected: list[Case] = []
    for case in some(small.logged(EditKind.DROP)):
        if case.broken_rule is None or not case.is_clear:
            judge(small, case, accepted, rejected)
            continue
        turn = len(rejected)
        devices = DEVICES if turn < ENOUGH else (DEVICES[turn % len(DEVICES)],)
        verdict = small.inspect(small.edited(case), *devices)
        rejected.append(case)
        found = [reason for reason in verdict.reasons if reason.guard != "evidence"]
        assert [reason.where["device"] for reason in found] == list(devices)
        for reason in found:
            assert_named(replace(verdict, reasons=(reason,)), case)
    assert len(rejected) >= ENOUGH
    assert len(accepted) >= ENOUGH


def test_additions_between_4_and_6_beta_are_rejected_if_they_steer_and_idle_otherwise(small):
    accepted: list[Verdict] = []
    rejected: list[Case] = []
    for case in [*some(small.unlogged(EditKind.ADD, 4, 6)), *small.unlogged(EditKind.PAD, 4, 6, 6)]:
        judge(small, case, accepted, rejected)
    assert len(rejected) >= ENOUGH
    assert len(accepted) >= ENOUGH
    honest = turned(small.inspect(small.honest))
    assert all(turned(verdict) == honest for verdict in accepted)


@pytest.mark.parametrize("kind", [EditKind.ADD, EditKind.PAD])
def test_seeded_additions_beyond_6_beta_are_rejected(small, kind):
    rejected: list[Case] = []
    cases = [
        *small.unlogged(kind, 6 + MARGIN, 100, 2),
        *small.unlogged(kind, 100, 1e300, 2),
        *small.unlogged(kind, 1e300, np.inf, 1),
    ]
    for case in cases:
        judge(small, case, [], rejected)
    assert len(rejected) == 5


def test_many_paddings_are_judged_in_one_pass(small):
    """Elements of every sub-operation of step 1 at once, those near a midpoint and 32 seeded ones; none steers.

    Exactly those beyond 6β break a rule. A calibrated bound with an immense factor is the worst-case bound
    (min(γ_K, λ√K·u) = γ_K), but may count.
    """
    run = open_run(small.honest.run, small.honest.trust)
    bound = Bound(kind="calibrated", factor=1e12, contradictions=1 << 40)
    generator = np.random.Generator(np.random.Philox(SEED))
    groups, distances = [], []
    for each in small.watcher.roundings[1]:
        size = len(each.distance)
        seeded = generator.choice(size, min(size, 32), replace=False)
        at = np.union1d(np.flatnonzero(each.distance <= 10.0), seeded)
        groups.append(
            codec.Group(call=each.call, part=each.part, size=size, positions=at, upward=each.upward[at]),
        )
        distances.append(each.distance[at])
    steps = ProgramSteps(run, 0)
    session, _ = steps.take_under(partial(replaying, "rounded", codec.encode(groups, Formats(), bound), bound=bound))
    beyond = int((np.concatenate(distances) > 6.0).sum())
    assert beyond > 1000
    assert session.statistics.forced == 0
    assert session.statistics.contradictions == beyond
    assert steps.training.memory.digest() == run.leaf(1).state


def test_edited_state_differs_and_the_next_step_follows_from_it(small):
    """The adversary is adaptive: its second step is what training from the edited first one gives."""
    case = next(case for case in small.logged(EditKind.FLIP) if case.step == 1 and case.distance <= 1)
    recorded = small.edited(case)
    honest, edited = (open_run(each.run, each.trust) for each in (small.honest, recorded))
    assert honest.leaf(0).state == edited.leaf(0).state
    assert all(honest.leaf(step).state != edited.leaf(step).state for step in STEPS)
    verdict = small.inspect(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert turned(verdict) >= 1
    assert verdict.evidence["replays"][0]["first_turned_step"] == 1


def test_edited_log_loses_a_dispute(record, tmp_path):
    """The referee executes the operator at which the labs part, and its entries contradict it."""
    options = {**OPTIONS, "steps": 4}
    right = record(tmp_path / "right", lab="lab-a", **options)
    wrong = record(tmp_path / "wrong", lab="lab-b", lie="edited-rounding-log", lie_step=3, **options)
    first, second = (
        Disputant(run=open_run(each.run, each.trust), prover=LabProver(each.run)) for each in (right, wrong)
    )
    verdict = settle(first, second)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["guilty"] == "wrong"
    assert (verdict.evidence["step"], verdict.evidence["operator"]) == (3, "aten.addmm.default")


def test_edits_that_do_not_exist_are_the_callers_mistake(small):
    roundings, log = small.watcher.roundings[1], small.watcher.logs[1]
    flip = small.logged(EditKind.FLIP)[0].edit
    far = far_additions(roundings)[0]
    for edit, text in (
        (replace(flip, kind=EditKind.ADD), "has an entry"),
        (replace(far, kind=EditKind.DROP), "has no entry"),
        (replace(far, kind=EditKind.FLIP), "has no entry"),
        (replace(far, call=99999), "rounds no element"),
        (replace(far, element=1 << 40), "rounds no element"),
    ):
        with pytest.raises(CallerError, match=re.escape(text)):
            apply_edit(log, edit, roundings)
    twice = apply_edit(apply_edit(log, flip, roundings), flip, roundings)
    assert twice == log
    assert apply_edit(apply_edit(log, far, roundings), replace(far, kind=EditKind.DROP), roundings) == log


def test_numerics_without_logs_cannot_tell_this_lie(make_run, tmp_path):
    with pytest.raises(CallerError, match="rounded numerics with worst-case bounds, but the run declares exact"):
        make_run(lie="edited-rounding-log", numerics="exact")
    assert not (tmp_path / "run").exists()


def test_survey_records_the_honest_log(small):
    """Watching changes nothing: the entries are the elements within 4β, and the state is the ordinary lab's."""
    for step in STEPS:
        for each in small.watcher.roundings[step]:
            near = set(np.flatnonzero(each.distance <= 4.0).tolist())
            assert near == small.entries.get((step, each.call, each.part), set())
    ordinary = small.train(Conduct())
    first, second = (open_run(each.run, each.trust) for each in (small.honest, ordinary))
    assert [first.leaf(step) for step in STEPS] == [second.leaf(step) for step in STEPS]
