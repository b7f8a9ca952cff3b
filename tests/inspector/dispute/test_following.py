"""Under ``rounded`` numerics two honest runs may differ; each party follows the other's rounding logs.

The run of lab b rounds one element of step 1 to the other neighbour, which its bound allows, and says so in its log.
"""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.cli import main
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import digest_bytes
from inspector.dispute.dispute import Disputant, play_here, settle, settle_all
from inspector.dispute.following import Follower, Recorded, rule_on_step
from inspector.dispute.game import check_game
from inspector.dispute.messages import CheckedProver, Traffic
from inspector.dispute.provider import Provider
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome
from monitor.lab.conduct import Conduct
from monitor.lab.lies import EditRoundingLog
from monitor.lab.prover import LabProver
from monitor.lab.rounding_log_edits import EditKind, LogEdit
from monitor.numerics import Bound, Formats
from monitor.numerics.rounding import codec
from monitor.programs.capture import digest_reads
from monitor.replay.prover import RunProver
from monitor.replay.steps import execution_of
from tests.inspector.inspection.test_rounding_edits import OPTIONS as SMALL
from tests.inspector.inspection.test_rounding_edits import Case, Watcher
from tests.lying import tell_with

OPTIONS = {**SMALL, "batch_size": 8}


class Neighbour(EditRoundingLog):
    """Takes the other lawful neighbour in step 1; in step 2 it may lie, too."""

    def __init__(self, edit, lie):
        super().__init__(1, edit)
        self._lie = lie

    def observer(self, step):
        return self if self._lie and step == 2 else None

    def before(self, index, func, args, kwargs):
        """Nothing."""

    def after(self, index, func, args, kwargs, out):
        if "addmm" in str(func) or "bmm" in str(func):
            with torch.no_grad():
                out.view(-1)[0] += 1


class Forger(EditRoundingLog):
    """Takes the other lawful neighbour in step 1, and forges an entry about another operator of step 2."""

    def __init__(self, edit, place):
        super().__init__(1, edit)
        self._lawful, self._first = edit, place

    def record(self, moment):
        self._step = moment.step
        self._edit, self._place = (self._lawful, 0) if moment.step == 1 else (None, self._first)
        return super().record(moment)


class Adder(Forger):
    """As that one, but in step 2 its log says something of a sub-operation that an operator does not have."""

    def __init__(self, edit):
        super().__init__(edit, 0)

    def record(self, moment):
        if moment.step == 1:
            return super().record(moment)
        log, loss = Conduct.record(self, moment)
        call, size = next(
            (number, math.prod(each["results"][0]["shape"]))
            for number, each in enumerate(moment.program.calls)
            if each["operator"] == "aten.gelu.default"
        )
        group = codec.Group(call=call, part=9, size=size, positions=np.array([3]), upward=np.array([True]))
        groups = [*codec.decode(log, Formats(), Bound()), group]
        return codec.encode(sorted(groups, key=lambda each: (each.call, each.part)), Formats(), Bound()), loss


@pytest.fixture(scope="module")
def runs(tmp_path_factory, record):
    """The honest run a, b that rounds otherwise, and others that lie after they have rounded as b did.

    c returns a wrong result; d, e, f and g forge an entry.
    """
    folder, watcher = tmp_path_factory.mktemp("following"), Watcher()
    options = {**OPTIONS, "lie": "wrong-operator"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monitor.recording.recorder.conduct", lambda lie, step: watcher)
        made = {"a": record(folder / "a", lab="lab-a", **OPTIONS)}
        late = _lawful(watcher)[::-1]  # an early one alters what later entries are about
        cases = sorted(late, key=lambda case: "bmm" not in case.operator)
        for name, lie in (("b", False), ("c", True)):
            for number, case in enumerate(cases):
                conduct = Neighbour(case.edit, lie)
                patch.setattr("monitor.recording.recorder.conduct", lambda lie, step, conduct=conduct: conduct)
                made[name] = record(folder / f"{name}-{number}", lab=f"lab-{name}", **options)
                if state_after(made[name], 1) != state_after(made["a"], 1):
                    break
            cases = [case]
        for name, place in (("d", 0), ("e", 7), ("f", 20)):
            patch.setattr("monitor.recording.recorder.conduct", lambda lie, step, at=place: Forger(cases[0].edit, at))
            made[name] = record(folder / name, lab=f"lab-{name}", **options)
        patch.setattr("monitor.recording.state_watch.HeldState.repeat_segment", lambda *_: None)
        patch.setattr("monitor.recording.recorder.conduct", lambda lie, step: Adder(cases[0].edit))
        made["g"] = record(folder / "g", lab="lab-g", **options)
    return made


def _lawful(watcher):
    entries = {
        (group.call, group.part): group.positions.tolist()
        for group in codec.decode(watcher.logs[1], Formats(), Bound())
    }
    edits = [
        (LogEdit(kind=EditKind.FLIP, call=each.call, part=each.part, element=element), each)
        for each in watcher.roundings[1]
        for element in entries.get((each.call, each.part), ())
    ]
    found = [Case(1, edit, float(each.distance[edit.element]), each.operator) for edit, each in edits]
    return [case for case in found if case.is_clear and case.broken_rule is None]


def state_after(recorded, step):
    return open_run(recorded.run, recorded.trust).leaf(step).state


def claim(recorded, lie=None):
    with pytest.MonkeyPatch.context() as patch:
        tell_with(patch, "wrong-operator", lambda step: EditRoundingLog(9) if lie is None else lie)
        return Disputant(run=open_run(recorded.run, recorded.trust), prover=LabProver(recorded.run))


@pytest.fixture(params=["tile", "parts"])
def size(request, monkeypatch):
    """Whether an element of a product is small enough to be computed, or is divided."""
    if request.param == "parts":
        for name, value in {"OF_A_TILE": 0, "OF_A_PART": 0, "MOST_PARTS": 4}.items():
            monkeypatch.setattr(f"inspector.dispute.reduction.{name}", value)
    return request.param


@pytest.fixture(scope="module")
def trust(runs):
    found = runs["a"].trust
    for each in runs.values():
        found = replace(found, labs={**found.labs, **each.trust.labs}, chips={**found.chips, **each.trust.chips})
    return found


def test_two_lawful_roundings_are_both_confirmed(runs, trust):
    assert state_after(runs["a"], 2) != state_after(runs["b"], 2)
    verdict, game = play_here(claim(runs["a"]), claim(runs["b"]), trust)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["guilty"] is None
    assert check_game(game, trust).outcome is Outcome.ACCEPT
    verdict, _ = settle_all([claim(runs["a"]), claim(runs["b"])], trust)
    assert verdict.outcome is Outcome.ACCEPT
    assert len(verdict.evidence["prevails"]) == 2


def test_a_lie_after_a_lawful_difference_is_named(runs, trust):
    conduct = Neighbour(None, lie=True)
    verdict, game = play_here(claim(runs["a"]), claim(runs["c"], conduct), trust)
    assert verdict.outcome is Outcome.REJECT, verdict.reasons
    assert (verdict.evidence["guilty"], verdict.evidence["step"]) == (runs["c"].run.name, 2)
    assert "mm" in verdict.evidence["operator"]
    assert check_game(game, trust).evidence["step"] == 2


def objecting(patch, name, objection):
    """Lets the party whose run has that name answer so when it has followed another's."""
    honest = Provider._objection

    def answer(self, run, prover):
        return (
            objection(self, honest(self, run, prover)) if self._run.folder.name == name else honest(self, run, prover)
        )

    patch.setattr(Provider, "_objection", answer)


def false_leaf(provider, found):
    """States that step 2 leads where its own run went."""
    return [2, "result", base64.b64encode(provider._run.leaf(2).encoded()).decode()]


def same_leaf(provider, found):
    followed = next(iter(provider._followed.values()))
    return [2, "result", base64.b64encode(followed.leaf(2).encoded()).decode()]


@pytest.mark.parametrize(
    "objection", [false_leaf, same_leaf, lambda *_: [2, "result", ""], lambda *_: [3, "result", ""]]
)
def test_who_objects_falsely_is_guilty(runs, trust, objection):
    liar = runs["b"].run.name
    with pytest.MonkeyPatch.context() as patch:
        objecting(patch, liar, objection)
        verdict = settle(claim(runs["a"]), claim(runs["b"]), trust)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, liar), verdict.reasons


@pytest.mark.parametrize("name", ["d", "e", "f", "g"])
def test_a_forged_entry_convicts_its_recorder(runs, trust, name, size):
    verdict, game = play_here(claim(runs["a"]), claim(runs[name], Forger(None, 0)), trust)
    assert verdict.outcome is Outcome.REJECT, verdict.reasons
    found = verdict.evidence
    assert (found["guilty"], found["step"], found["case"]) == (runs[name].run.name, 2, "log"), verdict.reasons
    assert {"d": "softmax", "g": "gelu"}.get(name, "mm") in found["operator"]
    assert found["tile"].startswith("element ")
    assert check_game(game, trust).evidence["guilty"] == f"lab-{name}"


def refusing(patch, followed, at):
    """Has whoever follows that run say of its step 2 that the log stops it at the first product of matrices."""
    honest = RunProver._execute

    def execute(self, step, *, capture):
        found = honest(self, step, capture=capture)
        if type(self) is not RunProver or self._run.folder.name != followed or step != 2:
            return found
        index = next(node.index for node in found.nodes if "mm" in node.operator)
        outputs = tuple(f"{at}" for _ in found.nodes[index].results)
        nodes = [*found.nodes[:index], replace(found.nodes[index], outputs=outputs)]
        return replace(found, nodes=nodes, leaf=None)

    patch.setattr(RunProver, "_execute", execute)


@pytest.mark.parametrize("at", ["", "refused at element 3", "refused at element 999999", "refused at element x"])
def test_who_says_falsely_that_a_log_stops_it_is_guilty(runs, trust, at, size):
    liar = runs["b"].run.name
    with pytest.MonkeyPatch.context() as patch:
        objecting(patch, liar, lambda *_: [2, "result", ""])
        refusing(patch, runs["a"].run.name, at)
        verdict = settle(claim(runs["a"]), claim(runs["b"]), trust)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, liar), verdict.reasons
    assert "mm" in verdict.evidence["operator"]


def test_who_names_no_operator_that_stops_it_is_guilty(runs, trust):
    """What it has of the step is as it was recorded, and ends before the step does."""
    honest, liar, followed = RunProver._execute, runs["b"].run.name, runs["a"].run.name

    def execute(self, step, *, capture):
        found = honest(self, step, capture=capture)
        if type(self) is not RunProver or self._run.folder.name != followed or step != 2:
            return found
        return replace(found, nodes=found.nodes[:5], leaf=None)

    with pytest.MonkeyPatch.context() as patch:
        objecting(patch, liar, lambda *_: [2, "result", ""])
        patch.setattr(RunProver, "_execute", execute)
        verdict = settle(claim(runs["a"]), claim(runs["b"]), trust)
    assert (verdict.outcome, verdict.evidence["guilty"]) == (Outcome.REJECT, liar), verdict.reasons
    assert verdict.evidence["case"] == "objection"


def test_a_recorder_that_states_what_its_follower_states_of_a_false_entry_is_guilty(runs, trust):
    """It says itself that its log stops it, so that both agree on each operator that the follower has."""
    honest, liar = RunProver._execute, runs["f"]
    stopped = honest(RunProver(open_run(liar.run, liar.trust)), 2, capture=None).nodes[-1]
    assert stopped.outputs[0].startswith("refused at element")

    def execute(self, step, *, capture):
        found = honest(self, step, capture=capture)
        if type(self) is RunProver or self._run.folder.name != liar.run.name or step != 2:
            return found
        nodes = list(found.nodes)
        nodes[stopped.index] = replace(nodes[stopped.index], outputs=stopped.outputs)
        return replace(found, nodes=nodes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunProver, "_execute", execute)
        verdict = settle(claim(runs["a"]), claim(liar, Forger(None, 0)), trust)
    assert verdict.evidence["guilty"] == liar.run.name, verdict.reasons


def ruled(recorded, stated, **changes):
    """The ruling about step 2 of a run whose leaf, and log, may be other ones."""
    run = open_run(recorded.run, recorded.trust)
    prover, log = RunProver(run), changes.pop("log", run.rounding_log(2))
    leaf = replace(run.leaf(2), log=str(digest_bytes("rounding-log", log)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prover, "log", lambda step: log)
        patch.setattr(CheckedProver, "leaf", lambda *_: leaf)
        size, root = run.manifest.steps + 1, run.manifest.root
        recorder = CheckedProver("recorder", prover, size=size, root=root, layout=run.layout, traffic=Traffic())
        follower = Follower("follower", prover, {1: run.leaf(1), 2: leaf}, run.layout, Traffic())
        program = run.program(execution_of(leaf).program)
        step = Recorded(declared=run.declared, leaf=leaf, program=program)
        return rule_on_step(recorder, follower, step, stated(leaf) if stated else b"", Traffic())


def test_an_entry_about_an_operator_without_results_convicts_its_recorder(runs):
    run = open_run(runs["a"].run, runs["a"].trust)
    calls = run.program(execution_of(run.leaf(2)).program).calls
    call = next(number for number, each in enumerate(calls) if not each["results"])
    entry = codec.Group(call=call, part=0, size=1, positions=np.array([0]), upward=np.array([True]))
    groups = [*codec.decode(run.rounding_log(2), Formats(), Bound()), entry]
    log = codec.encode(sorted(groups, key=lambda each: (each.call, each.part)), Formats(), Bound())
    found = ruled(runs["a"], None, log=log)
    assert (found.guilty, found.case) == (("recorder",), "log")
    assert f"names operator {call}, which has no results" in found.text


def test_who_states_values_that_the_recorded_step_does_not_state_is_guilty(runs):
    values = ["1", "2"]

    def stated(leaf):
        execution = replace(execution_of(leaf), values=tuple(values), reads=digest_reads(values))
        return replace(leaf, execution=execution).encoded()

    found = ruled(runs["a"], stated)
    assert (found.guilty, found.case) == (("follower",), "numbers")


@pytest.mark.parametrize("text", ["", "refused at element 3"])
@pytest.mark.parametrize("name", ["c", "f"])
def test_who_states_no_result_though_nothing_stops_it_is_guilty(runs, trust, name, text):
    """A recorder that says so frames nobody, not even a follower that an entry of a later operator stops."""
    honest, liar = RunProver._execute, runs[name].run.name

    def execute(self, step, *, capture):
        found = honest(self, step, capture=capture)
        if type(self) is RunProver or self._run.folder.name != liar or step != 2:
            return found
        index = next(node.index for node in found.nodes if "mm" in node.operator)
        nodes = list(found.nodes)
        nodes[index] = replace(nodes[index], outputs=(text,) * len(nodes[index].results))
        return replace(found, nodes=nodes)

    lie = Neighbour(None, lie=True) if name == "c" else Forger(None, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunProver, "_execute", execute)
        verdict = settle(claim(runs["a"]), claim(runs[name], lie), trust)
    assert verdict.evidence["guilty"] == liar, verdict.reasons


def refuses(provider, found):
    raise EvidenceError("it does not follow")


@pytest.mark.parametrize("objection", [refuses, lambda *_: [1, "task", ""], lambda *_: {"step": 1}])
def test_who_confirms_nothing_convicts_no_one(runs, trust, objection):
    """Nor does one that finds fault with a task that is in order; malformed words are no confirmation."""
    with pytest.MonkeyPatch.context() as patch:
        objecting(patch, runs["b"].run.name, objection)
        verdict = settle(claim(runs["a"]), claim(runs["b"]), trust)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.reasons
    assert verdict.evidence["guilty"] is None


def test_the_command_says_what_was_confirmed(runs, monkeypatch, capsys):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    words = [str(runs[name].run) for name in "ab"]
    trusts = [word for name in "ab" for word in ("--trust", f"{runs[name].run}.trust.json")]
    assert main(["dispute", *words, *trusts]) == 0
    assert "confirms all steps" in capsys.readouterr().out
