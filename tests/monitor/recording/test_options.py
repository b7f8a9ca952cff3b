"""What is chosen of a run and of its lab: one value each, or the same by keywords."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest

from firmware_sim.errors import CallerError
from monitor import LabConfig, Recorder, RunConfig
from tests.monitor.recording.test_recorder import mlp, pairs, plain, sgd

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
RUN: dict[str, Any]
RUN = {"numerics": "rounded", "seed": 3, "shares": (2, 1), "checkpoint_every": 2, "keep": 1, "free": ["momentum"]}
LAB: dict[str, Any] = {"idle_chips": 1, "keep_snapshots": 1, "snapshot_rate": Fraction(1, 2), "started": STARTED}


def begun(out, **options):
    """A recorder with two steps taken, and its model and optimizer."""
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(model, optimizer, out=out, **options)
    for batch in pairs(2):
        with recorder.step(batch):
            plain(model, optimizer, batch)
    return recorder


def files(out):
    """All files of a run, of its lab and its trust file, by name."""
    found = [path for place in out.parent.glob("run*") for path in (place.rglob("*") if place.is_dir() else [place])]
    return {path.relative_to(out.parent): path.read_bytes() for path in found if path.is_file()}


def test_values_record_what_their_keywords_do(tmp_path):
    begun(tmp_path / "keywords" / "run", **RUN, **LAB, lab="lab-7", hours=2).finish()
    lab = LabConfig(lab="lab-7", seed=3, chips=2, duration=timedelta(hours=2), **LAB)
    begun(tmp_path / "values" / "run", run=RunConfig(**RUN), lab=lab).finish()
    assert files(tmp_path / "values" / "run") == files(tmp_path / "keywords" / "run")


def test_a_keyword_goes_before_a_value(tmp_path):
    recorder = begun(tmp_path / "run", run=RunConfig(seed=3), lab=LabConfig(started=STARTED), seed=4, chips=2)
    assert (recorder._run.declared.seed, len(recorder._run.declared.shares)) == (4, 2)


def test_no_other_keyword_is_taken(tmp_path):
    with pytest.raises(TypeError, match="chip"):
        begun(tmp_path / "run", chip=2)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def cut(tmp_path):
    """A run whose process died."""
    begun(tmp_path / "run", **RUN, **LAB).shutdown()
    return tmp_path / "run"


def resumed(out, **options):
    model = mlp()
    return Recorder.resume(model, sgd(model), out=out, **options)


@pytest.mark.parametrize("other", [{"seed": 4}, {"numerics": "exact"}, {"keep": None}, {"shares": (1, 2)}])
def test_a_run_goes_on_as_it_was_declared(cut, other):
    (name,) = other
    with pytest.raises(CallerError, match=f"the run declares {name} .*; leave it out to go on as it began"):
        resumed(cut, **other)
    with pytest.raises(CallerError, match=f"the run declares {name} "):
        resumed(cut, run=RunConfig(**{**RUN, **other}))
    assert resumed(cut, run=RunConfig(**RUN), check_writes="every").steps == 2


def test_a_run_goes_on_without_what_it_has_declared(cut):
    assert resumed(cut, free=["momentum"]).steps == 2


@pytest.mark.parametrize(
    "wrong", [{"sync": 1}, {"free": "lr"}, {"free": ["a b"]}, {"direct_paths": "x"}, {"check_writes": 0}]
)
def test_a_value_of_another_form_is_refused(wrong):
    with pytest.raises(CallerError, match=next(iter(wrong))):
        RunConfig(**wrong)


def test_tensors_of_the_state_can_be_listed_in_any_collection():
    found = RunConfig(direct_paths=["buffer/codes"], check_writes=7)
    found.require_named({"buffer/codes"})
    assert (found.one_in, RunConfig().one_in, RunConfig(check_writes="every").one_in) == (7, 16, 1)
    with pytest.raises(CallerError, match="names no tensor"):
        found.require_named({"weight/codes"})
