"""Loops of somebody's own: honest ones are accepted on other devices, each cheat is rejected for the right reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.replays import replay
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.programs.program import Constant
from monitor.recording.recipes import chip_evidence
from monitor.recording.recorder import Recorder
from monitor.recording.state_watch import HeldState
from monitor.transcript import Execution, Leaf, TranscriptWriter, encode_state
from tests.agreements import agreement, resigned
from tests.guards import blind, off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
STEPS = 5


def make_batches(steps: int = STEPS, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(12, 8, generator=generator),
            "y": torch.randint(0, 4, (12,), generator=generator),
        }
        for _ in range(steps)
    ]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


class Loop:
    """A loop with gradient accumulation, clipping and a schedule, as somebody might have written it."""

    def __init__(self, optimizer=None, *, scale: float | None = None, **hyper):
        self.model = make_model()
        self.optimizer = (optimizer or torch.optim.AdamW)(self.model.parameters(), **{"lr": 1e-2, **hyper})
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scale = scale
        self.hidden_step: int | None = None
        self.step = 0

    def body(self, model, optimizer, batch):
        self.step += 1
        optimizer.zero_grad()
        for part in range(2):
            rows = slice(part * 6, part * 6 + 6)
            loss = functional.cross_entropy(model(batch["x"][rows]), batch["y"][rows]) / 2
            if self.scale is not None:
                loss = loss * torch.tensor(self.scale)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        self.schedule.step()
        if self.step == self.hidden_step:
            model[0].weight.detach().numpy()[0, 0] += 0.125

    def record(self, record_loop, **options):
        return record_loop(self.model, self.optimizer, make_batches(), self.body, **options)


@pytest.fixture
def judge(devices):
    def run(recorded, *, off=frozenset(), **changes):
        with blind(*off):
            return inspect(
                [recorded.run],
                recorded.trust,
                replace(SETTINGS, **changes),
                now=recorded.now,
                worker=devices.run,
            )

    return run


def guards_of(verdict) -> set[str]:
    return {reason.guard for reason in verdict.reasons}


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_honest_loop_is_accepted_on_two_devices_that_differ(record_loop, judge, numerics):
    recorded = Loop().record(record_loop, numerics=numerics)
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    verdict = judge(recorded, devices=("sse41", "avx2"))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert [each["steps"] for each in verdict.evidence["replays"]] == [STEPS, STEPS]
    assert len({each["fingerprint"] for each in verdict.evidence["replays"]}) == 2
    loop = verdict.evidence["runs"][0]["execution"]
    assert sorted(loop["programs"].values()) == [1, STEPS - 1]
    assert loop["updates"] == STEPS
    assert {slot["explained_by"] for slot in loop["slots"]} == {"update"}
    assert loop["not_bound"] == {}
    assert [line["name"] for line in loop["changed_hyper_parameters"]] == ["lr"]
    assert "a model delivered through a linear loss, or number by number" in loop["not_reviewed"]
    ((low, high),) = loop["learning_rates"]
    assert high == 1e-2
    assert low < high


def test_one_segment_of_a_loop_replays(record_loop, devices):
    recorded = Loop(torch.optim.SGD, momentum=0.9, nesterov=True).record(record_loop)
    verdict = replay(recorded.run, recorded.trust, 1, "sse41", worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["replays"][0]["steps"] == 2
    with pytest.raises(CallerError, match="segments 0 … 1"):
        replay(recorded.run, recorded.trust, 2, "sse41", worker=devices.run)


def test_programs_that_nobody_countersigned_are_run_by_no_device(record_loop):
    recorded = Loop().record(record_loop)
    bare = resigned(recorded.run, recorded.trust, programs=())

    def refuse(name, job):
        raise AssertionError("a program that nobody agreed to was sent to a device")

    verdict = inspect([recorded.run], bare, SETTINGS, now=recorded.now, worker=refuse)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    texts = ["no amendment that allows it was countersigned"] * 2 + ["what its meter must count is not known"] * 3
    assert all(text in reason.text for text, reason in zip(texts, verdict.reasons, strict=True))
    assert replay(recorded.run, bare, 0, "sse41", worker=refuse).outcome is Outcome.INCONCLUSIVE
    nothing = replace(recorded.trust, countersigned=frozenset())
    verdict = verify(recorded.run, nothing, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "has countersigned a declaration of lab lab" in verdict.reasons[0].text
    declared = replace(agreement(recorded.trust).declaration, seed=6)
    verdict = verify(recorded.run, resigned(recorded.run, recorded.trust, declaration=declared), now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].text == "the declaration of loop is not the countersigned one; these parts differ: seed"


@pytest.mark.parametrize("change", ["constant", "operator", "argument"])
def test_other_program_than_the_countersigned_one_is_not_accepted_but_with_the_guard_off(record_loop, judge, change):
    honest = Loop(scale=1.0).record(record_loop, name="honest")
    cheats = {"constant": Loop(scale=1.5), "operator": Loop(), "argument": Loop(scale=1.0, eps=1e-6)}
    recorded = cheats[change].record(record_loop)
    recorded = replace(recorded, trust=honest.trust)
    expected = Outcome.REJECT if change == "argument" else Outcome.INCONCLUSIVE
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is expected
    assert judge(recorded).outcome is expected
    with off("countersigned"):
        assert judge(recorded).outcome is Outcome.ACCEPT


def test_agreed_program_named_for_another_one_is_rejected_by_replay(record_loop, judge):
    """The lab trains without the scale, and every leaf names the agreed program with it."""
    recorded = Loop(scale=1.5).record(record_loop, name="honest")
    cheat = Loop(scale=1.0)

    one, other = (Constant.of("float32", torch.tensor(scale).numpy().tobytes()) for scale in (1.0, 1.5))

    def prepare(recorder):
        true_same = recorder._run.programs.same

        def same(captured, capture):
            constants = tuple(other if constant == one else constant for constant in captured.constants)
            return true_same(replace(captured, constants=constants), capture)

        recorder._run.programs.same = same
        recorder._run.loop.held.repeat = lambda *_: None
        recorder._run.loop.held.repeat_segment = lambda *_: None

    forged = cheat.record(record_loop, prepare=prepare)
    forged = replace(forged, trust=recorded.trust)
    assert verify(forged.run, forged.trust, now=forged.now).outcome is Outcome.ACCEPT
    verdict = judge(forged)
    assert guards_of(verdict) == {"replay"}
    assert "step 1: training on the declared batch does not reach" in verdict.reasons[0].text
    assert judge(forged, off={Guard.REPLAY}).outcome is Outcome.ACCEPT


def forge_execution(change):
    """Make the lab commit to another execution of step 4 than the true one, and skip its own checks."""

    def prepare(recorder):
        true_explain = recorder._run.programs.explain

        def explain(*arguments):
            program, execution = true_explain(*arguments)
            return program, change(execution) if recorder._run.writer.steps == 3 else execution

        recorder._run.programs.explain = explain
        recorder._run.loop.held.repeat_segment = lambda *_: None

    return prepare


def test_edited_slot_is_not_what_the_declared_rates_give(record_loop, judge):
    """The numbers of step 4 are doubled and the declared learning rate is not."""

    def double(execution):
        slots = {(2 * float.fromhex(text)).hex(): numbers for text, numbers in execution.slots.items()}
        return replace(execution, slots=slots)

    recorded = Loop().record(record_loop, prepare=forge_execution(double))
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert guards_of(verdict) == {"program"}
    assert "step 4: aten." in verdict.reasons[0].text
    assert "of an update uses the number" in verdict.reasons[0].text
    assert guards_of(judge(recorded)) == {"program", "replay"}
    assert judge(recorded, off={Guard.PROGRAM, Guard.REPLAY}).outcome is Outcome.ACCEPT
    free = resigned(recorded.run, recorded.trust, free=frozenset(agreement(recorded.trust).programs))
    assert verify(recorded.run, free, now=recorded.now).outcome is Outcome.REJECT


@pytest.mark.parametrize("hyper", [({"lr": "fast"},), ({"lr": None},), ({"pace": 1.0},), (), ({}, {})], ids=str)
def test_declared_hyperparameters_of_another_form_are_rejected(record_loop, hyper):
    def lie(execution):
        return replace(execution, hyper=hyper)

    recorded = Loop(torch.optim.SGD).record(record_loop, prepare=forge_execution(lie))
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert "step 4" in verdict.reasons[0].text


def test_other_learning_rate_than_the_declared_one_is_rejected_by_replay(record_loop, judge):
    """Slots and rates of step 4 fit each other, but the lab trained with a larger rate."""
    loop = Loop(torch.optim.SGD)

    def before(recorder, step):
        if step == 4:
            loop.optimizer.param_groups[0]["lr"] *= 2

    def halve(execution):
        slots = {(float.fromhex(text) / 2).hex(): numbers for text, numbers in execution.slots.items()}
        return replace(execution, slots=slots, hyper=({"lr": execution.hyper[0]["lr"] / 2},))

    recorded = loop.record(record_loop, prepare=forge_execution(halve), before=before)
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    verdict = judge(recorded)
    assert guards_of(verdict) == {"replay"}
    assert verdict.reasons[0].text.startswith("step 4: training on the declared batch does not reach")
    assert judge(recorded, off={Guard.REPLAY}).outcome is Outcome.ACCEPT


def test_other_reads_than_the_true_ones_are_rejected_by_replay(record_loop, judge):
    def lie(execution):
        return replace(execution, reads="sha256:" + "0" * 64)

    recorded = Loop().record(record_loop, prepare=forge_execution(lie))
    verdict = judge(recorded)
    assert guards_of(verdict) == {"replay"}
    assert "step 4: training on the declared batch differs in execution" in verdict.reasons[0].text


def test_hidden_write_between_checkpoints_is_rejected_by_replay(record_loop, judge):
    """A lab that stops its recorder from watching memory and repeating the step is caught by the inspector."""
    loop = Loop()
    loop.hidden_step = 2

    def prepare(recorder):
        true_repeat = recorder._run.loop.held.repeat

        def repeat(declared, program, leaf, *rest):
            if leaf.step != 2:
                true_repeat(declared, program, leaf, *rest)

        recorder._run.loop.held.repeat = repeat

    with off("watched memory"):
        recorded = loop.record(record_loop, prepare=prepare)
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    verdict = judge(recorded)
    assert guards_of(verdict) == {"replay"}
    assert "step 2: training on the declared batch does not reach the committed state" in verdict.reasons[0].text


def test_other_batch_than_the_committed_one_is_rejected_by_replay(record_loop, judge, monkeypatch):
    recorded_batch = make_batches(seed=9)[0]
    true_record = Recorder._record

    def record(self, taken, opened):
        if self.steps == 3:
            opened.content = encode_state(recorded_batch)
        true_record(self, taken, opened)

    monkeypatch.setattr(Recorder, "_record", record)
    monkeypatch.setattr(HeldState, "repeat_segment", lambda *_: None)
    recorded = Loop().record(record_loop)
    verdict = judge(recorded)
    assert guards_of(verdict) == {"replay"}
    assert verdict.reasons[0].text.startswith("step 4: ")


def test_under_reported_flop_is_rejected(record_loop, judge):
    def prepare(recorder):
        true_commit = recorder._run.host.commit
        recorder._run.host.commit = lambda leaf, files: true_commit(replace(leaf, flop=leaf.flop // 2), files)

    recorded = Loop().record(record_loop, prepare=prepare)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert guards_of(verdict) == {"rules"}
    assert judge(recorded, off={Guard.RULES, Guard.REPLAY}).outcome is Outcome.ACCEPT


def test_step_that_only_the_chips_have_heard_of_is_rejected(record_loop):
    """How many steps a loop takes is not declared, so a truncated transcript shows on the chips."""

    def prepare(recorder):
        true_finish = recorder._run.finish

        def finish():
            for chip in recorder._run.lab.chips:
                chip.commit(recorder._run.run_id, STEPS + 1, bytes(32))
            true_finish()

        recorder._run.finish = finish

    recorded = Loop().record(record_loop, prepare=prepare)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert any("step 6 was committed with another log head" in reason.text for reason in verdict.reasons)


@pytest.mark.parametrize("finished", [True, False])
def test_loop_without_a_step_is_never_accepted(record_loop, judge, devices, tmp_path, finished):
    """A killed lab leaves such a run behind; one that declares it finished says something impossible."""
    made = []

    def stop(recorder, step):
        made.append(recorder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loop().record(record_loop, before=stop)
    if finished:
        made[0]._run.writer.finish(chip_evidence(made[0]._run.lab, lambda _, evidence: evidence))
    run = tmp_path / "loop"
    whole = Loop().record(record_loop, name="whole")
    recorded = replace(whole, run=run, trust=Trust.load([tmp_path / "loop.trust.json"], [run]))
    wanted, text = (
        (Outcome.REJECT, "has not committed any step") if finished else (Outcome.INCONCLUSIVE, "0 steps are committed")
    )
    for verdict in (verify(run, recorded.trust, now=recorded.now), judge(recorded)):
        assert verdict.outcome is wanted
        assert any(text in reason.text for reason in verdict.reasons)
    with pytest.raises(CallerError, match="no step yet"):
        replay(run, recorded.trust, 0, "sse41", worker=devices.run)


def test_free_slots_are_accepted_only_where_agreed_and_listed(record_loop, judge):
    loop = Loop()
    true_body = loop.body

    def body(model, optimizer, batch):
        optimizer.param_groups[0]["eps"] = 1e-8
        true_body(model, optimizer, batch)
        with torch.no_grad():
            model[3].bias.mul_(1.0 - 0.01 * loop.step)

    free = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
    recorded = record_loop(loop.model, loop.optimizer, make_batches(), body, free_slots=True, free=free)
    verdict = judge(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    text = verdict.reasons[0].text
    assert "; 1 numbers change from step to step without a rule, as agreed; not bound to the arithmetic, as ag" in text
    slots = verdict.evidence["runs"][0]["execution"]["slots"]
    assert {"operator": "aten.mul_.Tensor", "explained_by": "nothing", "count": 1} in slots
    programs = frozenset(agreement(recorded.trust).programs)
    strict = resigned(recorded.run, recorded.trust, free=agreement(recorded.trust).free - programs)
    assert guards_of(verify(recorded.run, strict, now=recorded.now)) == {"program"}
    bound = resigned(recorded.run, recorded.trust, free=programs | {"lr"})
    verdict = verify(recorded.run, bound, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not bound to the arithmetic: amsgrad, betas, decoupled_weight_decay" in verdict.reasons[0].text
    assert "aten.mul_.Tensor writes 'weight/3.bias' outside the optimizer's updates" in verdict.reasons[0].text


def test_amendments_add_up_and_nobody_elses_signature_counts(record_loop):
    recorded = Loop().record(record_loop)
    one = recorded.trust
    other = resigned(recorded.run, one, programs=["a" * 64], free=frozenset({"a" * 64, "lr"}))
    both = one.merge(other)
    assert set(agreement(both).programs) == {*agreement(one).programs, "a" * 64}
    assert agreement(both).free == {"a" * 64, "lr"}
    data = both.to_json()
    assert Trust.from_json(data, "here") == both
    stranger = replace(both, inspectorates=frozenset({SigningKey.generate().verifying}))
    assert stranger.agreed() == []
    assert verify(recorded.run, stranger, now=recorded.now).outcome is Outcome.INCONCLUSIVE
    for change in (
        *({"countersigned": [3]}, {"countersigned": None}, {"inspectorates": ["x"]}, {"inspectorates": "ab"}),
        *({"maximum_flop": -1}, {"maximum_flop": 1.5}, {"maximum_flop": True}),
    ):
        with pytest.raises(CallerError, match="here is malformed"):
            Trust.from_json({**data, **change}, "here")
    with pytest.raises(CallerError, match="not a trust file"):
        Trust.from_json({**data, "programs": []}, "here")


def test_preset_run_that_names_another_program_is_rejected(record, tmp_path, monkeypatch):
    execution = Execution(program="0" * 64, slots={}, hyper=(), reads="sha256:" + "0" * 64)
    true_append = TranscriptWriter.append

    def append(self, leaf: Leaf, files, **more):
        return true_append(self, replace(leaf, execution=execution) if leaf.step else leaf, files, **more)

    monkeypatch.setattr(TranscriptWriter, "append", append)
    recorded = record(tmp_path / "run", numerics="exact", steps=2)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert any("is stored, but no step runs it" in reason.text for reason in verdict.reasons)
