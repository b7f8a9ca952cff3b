"""What jobs of many processes train: the one-process program is that of the exact operators, values or none."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from analysis.examples.train_on_two_processes import judge
from firmware_sim.errors import CallerError
from inspector import Outcome, Trust
from monitor import RunFolder
from monitor.distributed import blanks
from monitor.distributed.attribution import departures
from monitor.distributed.launcher import launch
from monitor.distributed.recorder import DistributedRecorder
from monitor.distributed.shadow import Shadow
from tests.monitor.distributed.training_models import (
    MODELS,
    MODULE,
    WORDS,
    Language,
    Masked,
    batches,
    language,
    pre_norm,
    recurrent,
    train,
)

LAYOUTS = ("fsdp2", "ddp")


@pytest.fixture(scope="module")
def together(request, tmp_path_factory):
    """Where two processes, started once, have recorded in both layouts every model that a test asks for."""
    folder = tmp_path_factory.mktemp("together")
    asking = [item for item in request.session.items if item.path == request.path and "together" in item.fixturenames]
    models = sorted({item.callspec.params["model"] for item in asking})
    runs = [(model, layout, folder / model / layout) for model in models for layout in LAYOUTS]
    for model in models:
        (folder / model).mkdir()
    launch(MODULE, 2, {"runs": [(model, layout, str(run)) for model, layout, run in runs]})
    return folder


def recorded(run):
    lab = Trust.load([run.with_name(f"{run.name}.trust.json")], [run]).labs["lab-1"]
    return RunFolder(run, lab), lab


def leaves(run):
    folder, _ = recorded(run)
    return [folder.leaf(step) for step in range(folder.committed + 1)]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_process_fsdp2_and_ddp_leave_the_same_run(tmp_path, kept_devices, together, model):
    train(language(MODELS[model]), "alone", tmp_path / "alone")
    for layout in LAYOUTS:
        assert leaves(together / model / layout) == leaves(tmp_path / "alone"), layout
        assert departures(*recorded(together / model / layout)) == []
    assert judge(together / model / "fsdp2").outcome is Outcome.ACCEPT


def test_without_the_exact_operators_layouts_the_program_is_not_the_step(tmp_path, monkeypatch):
    def as_pytorch_says(func, args, kwargs):
        return func(*blanks._changed(args, blanks._form), **blanks._changed(kwargs, blanks._form))

    monkeypatch.setattr(blanks, "_tried", as_pytorch_says)
    with pytest.raises(CallerError, match="tensors whose layout is not the one in its program"):
        train(language(pre_norm), "alone", tmp_path / "run")


def test_blank_tensors_that_lie_nowhere_take_other_operators_of_recurrent_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(blanks, "_HOST", torch.device("meta"))
    with pytest.raises(CallerError, match="something other than a recorded operator wrote"):
        train(language(recurrent), "alone", tmp_path / "run")


@pytest.mark.parametrize(("model", "foreach"), [(recurrent, False), (Masked, True)])
def test_a_run_goes_on_where_it_stopped(tmp_path, model, foreach):
    job = language(model, foreach=foreach)
    train(job, "alone", tmp_path / "whole", steps=3)
    recorder = DistributedRecorder(job, layout="alone", out=tmp_path / "run", seed=1)
    for batch in batches(3)[:2]:
        recorder.step(batch)
    del recorder
    gc.collect()
    train(job, "alone", tmp_path / "run", steps=3)
    assert leaves(tmp_path / "run") == leaves(tmp_path / "whole")


class Reading(nn.Module):
    """Does what a function says with what only arithmetic gives."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def forward(self, x):
        return x * float(self.reads(x.detach()))


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: 2.0 if x.sum() > 0 else 1.0,
        lambda x: x.sum().tolist(),
        lambda x: x.sum().numpy(),
        lambda x: x[x > 0].numel(),
        lambda x: len(torch.nonzero(x)),
        lambda x: torch.tensor([1.0]).copy_(x.flatten()[:1]),
        lambda x: torch.rand(()),
    ],
)
def test_reading_what_only_arithmetic_gives_is_refused(reads):
    shadow = Shadow(language(lambda: Language(Reading(reads))), 1)
    with pytest.raises(CallerError, match=r"depends on the values|a computed result"):
        shadow.take(1, batches(1)[0], ())


def test_layouts_are_found_once_and_another_step_is_another_program(monkeypatch):
    """Whatever a step does otherwise than the ones before it is in its program."""
    tried, found = [], blanks._tried

    def noted(func, *given):
        tried.append(func)
        return found(func, *given)

    monkeypatch.setattr(blanks, "_tried", noted)
    scale = nn.Module()
    scale.forward = lambda x: x * factors.pop()
    programs: list[Any]
    shadow, programs, counts = Shadow(language(lambda: Language(scale)), 1), [], []
    factors = [2.5] * 4 + [3.5] * 2 + [2.5] * 4
    for step, batch in enumerate(batches(5), 1):
        tried.clear()
        batch = batch[:2] if step == 5 else batch
        taken = shadow.take(step, batch, programs)
        layout = {"batch": {"dtype": "int64", "shape": list(batch.shape)}}
        programs.append(taken.observed.program(taken.state, layout, taken.updates.places, taken.loss))
        taken.settle()
        counts.append(len(tried))
    structures = [program.structure() for program in programs]
    assert counts[0] > 20
    assert counts[2] == counts[3] == 0
    assert counts[4] > 0
    assert structures[1] == structures[2] == structures[3]
    assert structures[4] != structures[3] != structures[0]
    changed = [one for one, other in zip(programs[2].scalars, programs[1].scalars, strict=True) if one != other]
    assert (3.5).hex() in changed


def test_a_blank_tensor_takes_no_memory_and_says_that_it_lies_on_the_host():
    with blanks.Blanks().session():
        made = torch.zeros(1 << 20, 1 << 20)
    assert made.device == torch.device("cpu")
    assert made.t().untyped_storage()._cdata == made.untyped_storage()._cdata
    with pytest.raises(RuntimeError):
        made.tolist()


def test_blank_tensors_are_converted_where_they_lie():
    with blanks.Blanks().session():
        layer: Any = nn.Conv2d(4, 4, 3)
        layer = layer.to("cpu", torch.bfloat16, memory_format=torch.channels_last)
    assert isinstance(layer.weight, blanks.Blank)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_an_optimizer_counts_with_values():
    found = blanks.Blanks()
    with found.session():
        found.begin_update()
        count, held = torch.zeros(()), torch.zeros(3)
        count += 2
        found.end_update()
        assert count.item() == 2
        assert type(held) is blanks.Blank
        assert type(torch.zeros(())) is blanks.Blank
        with pytest.raises(CallerError, match="into a tensor that was made from plain numbers"):
            count.add_(held.sum())


def test_every_buffer_and_parameter_lies_by_itself_when_a_step_begins():
    shadow = Shadow(language(Masked), 1)
    shadow.take(1, batches(1)[0], ()).settle()
    tensors = [each for each in shadow._state().values() if isinstance(each, blanks.Blank)]
    assert len({each.untyped_storage()._cdata for each in tensors}) == len(tensors)
    assert all(each.is_contiguous() for each in tensors)
    assert WORDS in shadow._state()["weight/tokens.weight"].shape
