"""Law 2 over all runs of a chip: each interval of its meter is one run's, and what nobody can replay has a limit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import reduce
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.memory import Memory, load_memory, remember, save_memory
from inspector.inspection.sources import Past
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.rules.judgement import apply_rules
from inspector.rules.rule_files import read_rules
from monitor import Recorder
from monitor.lab.conduct import Conduct, shuffle_weights
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.programs.capture import Capture
from monitor.recording.loop_writes import Between
from monitor.replay.repetition import ProgramTraining
from monitor.transcript import RunFolder
from tests.conftest import NOW, STARTED
from tests.guards import off
from tests.measurements._ledger_lies import HiddenWork

BATCH = torch.linspace(-1, 1, 16 * 8).view(16, 8)
SETTINGS = Settings(samples=2, seed="x", devices=("sse41",))
RATE = Fraction(1, 2)


class Killed(BaseException):
    """Stands for the end of the process."""


def objects(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(recorder, model, optimizer, *, killed=False):
    with recorder.step(BATCH):
        optimizer.zero_grad()
        functional.mse_loss(model(BATCH), BATCH).backward()
        if killed:
            raise Killed
        optimizer.step()


@pytest.fixture
def lab(tmp_path, monkeypatch, devices):
    """Records runs of one lab on two chips, and inspects all of them with both."""

    class Lab:
        runs: tuple[Path, ...] = ()

        def begin(self, name="run", *, conduct=None, after=None, **options):
            if conduct is not None:
                monkeypatch.setattr("monitor.recording.recorder.conduct", lambda *_: conduct)
            model, optimizer = objects(len(self.runs))
            options = {"checkpoint_every": 4, "snapshot_rate": RATE, "chips": 2, "seed": 5, "lab": "lab", **options}
            self.runs = (*self.runs, tmp_path / name)
            recorder = Recorder(model, optimizer, out=self.runs[-1], started=STARTED, hours=1.0, after=after, **options)
            if conduct is not None:
                monkeypatch.undo()
            return recorder, model, optimizer

        def record(self, steps, name="run", **options):
            recorder, model, optimizer = self.begin(name, **options)
            for _ in range(steps):
                step(recorder, model, optimizer)
            recorder.finish()
            return self.runs[-1]

        def resume(self):
            model, optimizer = objects(len(self.runs) - 1)
            return Recorder.resume(model, optimizer, out=self.runs[-1]), model, optimizer

        @property
        def trust(self):
            files = [Trust.load([run.with_name(f"{run.name}.trust.json")], [run]) for run in self.runs]
            return reduce(Trust.merge, files)

        def judge(self, *, rules=None, memory=None, **changes):
            case, trust = CaseFile(), replace(self.trust, **changes)
            past = Past(memory=memory)
            verdict = inspect(self.runs, trust, SETTINGS, now=NOW, worker=devices.run, past=past, case=case)
            if rules is not None:
                (tmp_path / "rules.toml").write_text(rules)
                made = read_rules(tmp_path / "rules.toml")
                verdict = apply_rules(verdict, made, case, trust, SETTINGS, worker=devices.run)
            return verdict

    return Lab()


def texts(verdict):
    return " | ".join(reason.text for reason in verdict.reasons)


class Repeats(HiddenWork):
    """Boots many times behind the last step, and takes the steps since the checkpoint again."""

    def __init__(self, last, times):
        super().__init__({}, 0)
        self._last, self._times = last, times

    def after_step(self, step, host):
        for _ in range(self._times if step == self._last else 0):
            self._repeat(host, step)


def test_a22_steps_that_are_repeated_again_and_again(lab):
    """Their known states may have been put back past every operator, while the metered work trained another model."""
    conduct = Repeats(last=6, times=10)
    lab.record(6, conduct=conduct, checkpoint_every=1000)
    verdict = lab.judge()
    assert verdict.outcome is Outcome.INCONCLUSIVE, texts(verdict)
    assert "could have been anything: steps that were repeated after boots" in texts(verdict)
    for chip in verdict.evidence["chips"]:
        assert chip["ledger"]["slack"]["flop"] >= conduct.hidden[chip["chip"]].flop > 0
        assert chip["ledger"]["slack"]["share"] > 5
    with off("limited slack"):
        told = lab.judge()
    assert told.outcome is Outcome.ACCEPT, texts(told)
    assert "nothing else" not in texts(told)
    assert "snapshots fell inside repeated steps and matched" in texts(told)
    assert {"lie": "operators run on the chips' memory within their slack", "probability": 0.0} in told.evidence[
        "chances"
    ]


class Decoy(Conduct):
    """Commits steps while the chips hold another run's last state, and lets their meters count a hidden model."""

    keeps_leaves = True

    def __init__(self, finished):
        self._other = RunFolder(finished, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(finished))).verifying)
        self._hidden = None

    def rest(self, host):
        step = host.leaves[-1].step if host.leaves else 0
        host.lab.restart()
        for chip, shard in zip(host.lab.chips, host.memory.shards, strict=True):
            chip.attach(shard, host._run_id, step)
            chip.commit(host._run_id, step, host.root(step))
        last = self._other.declared.steps
        self._decoy = ProgramTraining(self._other.declared).memory
        self._decoy.restore(self._other.checkpoint(last))
        root = self._other.load_steps()[1].root(last + 1)
        for chip, shard in zip(host.lab.chips, self._decoy.shards, strict=True):
            chip.attach(shard, self._other.metadata.run_id, last)
            chip.commit(self._other.metadata.run_id, last, root)

    def before_commit(self, moment):
        if self._hidden is None:
            self._hidden = ProgramTraining(moment.declared).memory
            self._hidden.load(moment.memory.export())
            shuffle_weights(self._hidden, 9)
        self._hidden.meter = self._decoy.meter
        moment.train(self._hidden, moment.batch)


def test_a34_a_run_whose_states_never_lay_in_a_chip(lab):
    first = lab.record(2, "first")
    lab.record(5, "second", after=first, conduct=Decoy(first))
    verdict = lab.judge()
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} <= {"commitment", "meter", "snapshot", "evidence"}
    assert "the memory of a run was attached again after the run had been closed" in texts(verdict)
    assert "was committed while another run's memory was attached" in texts(verdict)
    with off("closed runs"):
        assert lab.judge().outcome is Outcome.REJECT
    with off("closed runs", "commits of the attached run", "metered work", "snapshots inside steps"):
        told = lab.judge()
    assert told.outcome is Outcome.ACCEPT, texts(told)
    assert "none of second" in texts(told)


def test_two_honest_runs_on_the_same_chips_say_whose_snapshots_are_whose(lab):
    first = lab.record(1, "first")
    lab.record(8, "second", after=first)
    verdict = lab.judge()
    assert verdict.outcome is Outcome.ACCEPT, texts(verdict)
    counts = [
        sum(shot["run_id"] == run["run_id"] for chip in verdict.evidence["chips"] for shot in chip["snapshots"])
        for run in verdict.evidence["runs"]
    ]
    assert f"({counts[0] or 'none'} of first, {counts[1]} of second)" in texts(verdict)
    assert set(verdict.evidence["ledger"]["lab"]["runs"]) == {run["run_id"] for run in verdict.evidence["runs"]}


def beside(lab, operators, *, evaluations=6, **options):
    """Four steps, behind each of which come evaluations with operators beside them."""
    recorder, model, optimizer = lab.begin(**options)

    def train():
        for _ in range(4):
            step(recorder, model, optimizer)
            for _ in range(evaluations):
                hide(model, operators)
                look(recorder, model)
        recorder.finish()

    with (
        pytest.warns(UserWarning, match=r"move logging between steps into 'with recorder\.evaluation"),
        mock.patch.object(Between, "_exceeds_step", return_value=False),  # a lying lab's refuses nothing
    ):
        train()


def hide(model, operators):
    for _ in range(operators):
        torch.mm(model[0].weight.detach(), model[2].weight.detach())


def look(recorder, model):
    with recorder.evaluation(torch.zeros(1)), torch.no_grad():
        model[0].bias[:1] + 1


CAP = """[[rule]]
name = "cap"
kind = "flop"
per = "run"
at_most = {}
"""


def test_a35_work_beside_trivial_evaluations(lab):
    """Neither an evaluation nor a boot brings an allowance of its own; and the FLOP count under every rule."""
    beside(lab, 3)
    verdict = lab.judge()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "could have been anything: operators outside programs" in texts(verdict)
    with off("limited slack"):
        assert lab.judge().outcome is Outcome.ACCEPT
        run = verdict.evidence["runs"][0]
        cap = run["execution"]["most_flop"]
        assert lab.judge(maximum_flop=cap).outcome is Outcome.REJECT
        assert lab.judge(rules=CAP.format(cap)).outcome is Outcome.REJECT
        assert lab.judge(rules=CAP.format(cap + run["execution"]["beside_programs"]["flop"])).outcome is Outcome.ACCEPT
    assert lab.judge(maximum_slack=Fraction(0)).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("place", ["step", "evaluation", "between"])
def test_products_of_which_nothing_comes_could_have_been_any(lab, place, monkeypatch):
    """Whoever repeats them compares nothing of theirs, so that the chips may have done as much of anything else."""

    def waste(model):
        with torch.no_grad():
            torch.mm(model[0].weight, model[2].weight) @ model[0].weight

    def record(name):
        recorder, model, optimizer = lab.begin(name)
        for _ in range(4):
            with recorder.step(BATCH):
                optimizer.zero_grad()
                functional.mse_loss(model(BATCH), BATCH).backward()
                optimizer.step()
                if place == "step":
                    waste(model)
            if place == "evaluation":
                with recorder.evaluation(torch.zeros(1)):
                    waste(model)
            if place == "between":
                waste(model)
        recorder.finish()

    record("honest")
    verdict = lab.judge()
    assert verdict.outcome is Outcome.ACCEPT, texts(verdict)
    slack = verdict.evidence["ledger"]["lab"]["slack"]
    assert (slack["flop"], slack["moved"]) == (0, 0)
    lab.runs = ()
    with monkeypatch.context() as patched:
        patched.setattr(Capture, "read_ends", lambda *_: None)  # an honest recorder reads a number of what they give
        with pytest.warns(UserWarning, match=r"does not use, or read it inside the step with \.item\(\)"):
            record("lying")
    verdict = lab.judge()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "operators whose results are not used for anything that a step commits or reads" in texts(verdict)
    with off("limited slack"):
        assert lab.judge().outcome is Outcome.ACCEPT


def test_more_than_a_step_that_only_reads_is_no_program_between_steps(lab, monkeypatch):
    """Else a lab's other training would pass as what its loop looks at: 163 steps beside 4, all of them repeated."""

    def record(name, products):
        recorder, model, optimizer = lab.begin(name)
        for _ in range(4):
            step(recorder, model, optimizer)
            with torch.no_grad():
                for _ in range(products):
                    model(BATCH)
        recorder.finish()

    record("honest", 1)
    assert lab.judge().outcome is Outcome.ACCEPT
    lab.runs = ()
    monkeypatch.setattr(Between, "is_much", lambda *_: True)  # a lying lab's recorder records all of it
    record("lying", 8)
    verdict = lab.judge()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "only read the state, more than any training step takes" in texts(verdict)
    with off("bounded reads"):
        assert lab.judge().outcome is Outcome.ACCEPT


def test_the_allowance_is_for_a_training_step_whatever_lies_between(lab):
    recorder, model, optimizer = lab.begin(beside=1)
    step(recorder, model, optimizer)
    told = []

    def train():
        for _ in range(40):
            look(recorder, model)
            told.append(recorder.evaluations)
            hide(model, 60)

    with (
        mock.patch.object(Between, "is_much", return_value=False),  # a lying lab's records none of it
        pytest.raises(CallerError, match="exceeds the work allowed on the state between two training steps"),
    ):
        train()
    assert 1 < len(told) < 40


def test_more_slack_takes_a_declaration_and_the_trust_file_may_lower_it(lab):
    beside(lab, 1, evaluations=3, maximum_slack=Fraction(1))
    verdict = lab.judge()
    assert verdict.outcome is Outcome.ACCEPT, texts(verdict)
    assert "up to 100 % of the declared work" in verdict.reasons[1].text
    assert lab.judge(maximum_slack=Fraction(1, 10)).outcome is Outcome.INCONCLUSIVE


def test_who_shuts_down_repeats_nothing(lab):
    recorder, model, optimizer = lab.begin(checkpoint_every=1000)
    for _ in range(5):
        step(recorder, model, optimizer)
        recorder.shutdown()
        with pytest.raises(CallerError, match=r"the run was shut down; use Recorder\.resume"):
            step(recorder, model, optimizer)
        recorder, model, optimizer = lab.resume()
    recorder.finish()
    verdict = lab.judge()
    assert verdict.outcome is Outcome.ACCEPT, texts(verdict)
    assert "count the committed steps and nothing else" in texts(verdict)
    assert verdict.evidence["chips"][0]["boots"] == 6


def crashed(lab, name, times, **options):
    recorder, model, optimizer = lab.begin(name, snapshot_rate=Fraction(1, 1 << 16), **options)
    for _ in range(times):
        step(recorder, model, optimizer)
        step(recorder, model, optimizer)
        with pytest.raises(Killed):
            step(recorder, model, optimizer, killed=True)
        recorder, model, optimizer = lab.resume()
    recorder.finish()
    return lab.runs[-1]


def test_two_boots_of_a_lab_are_excused_over_all_its_runs_and_inspections(lab, tmp_path):
    first = crashed(lab, "first", 2)
    seen = lab.judge(memory=Memory({}))
    assert not [reason for reason in seen.reasons if "could have been anything" in reason.text]
    ids = [run["run_id"] for run in seen.evidence["runs"]]
    assert seen.evidence["ledger"]["lab"]["excused"] == 2 * ids
    save_memory(tmp_path / "memory", remember({}, seen))
    memory = load_memory(tmp_path / "memory")
    assert memory.excused == {"lab": 2 * ids}
    assert lab.judge(memory=memory).evidence["ledger"]["lab"]["excused"] == 2 * ids
    crashed(lab, "second", 2, after=first)
    verdict = lab.judge(memory=memory)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "parts of steps at power cuts" in texts(verdict)


def test_a_recorder_tells_an_honest_lab_before_it_repeats_too_much(lab):
    with pytest.warns(UserWarning, match=r"once 1 steps are repeated.*Recorder\.shutdown"):
        crashed(lab, "run", 3)
