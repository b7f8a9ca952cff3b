"""Thresholds of calibrated bounds: the search over real kernel families, the committed data, and their use."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch

from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from inspector.devices import device
from monitor.numerics import DECLARABLE, Bound, Formats, recording, replaying
from monitor.numerics.rounding.bounds import BOUNDS, bound_named
from monitor.numerics.rounding.calibration import OPERATORS, Calibration, committed
from monitor.presets.task import Task
from tests.measurements import _threshold_search
from tests.measurements._threshold_search import DEVICES, INPUTS, UNCOVERED, SampleSizes, measure, search

SMALL = SampleSizes(terms=(16, 1024), products=1 << 17, results=1 << 10)


def test_thresholds_cover_every_error_of_two_kernel_families() -> None:
    """These two add FP64 products in different orders on Intel's and on AMD's processors alike."""
    found: Any = search(SMALL, ("native-1", "mkl-compatible"))
    assert "MKL_CBWR" in found["devices"]["mkl-compatible"]["settings"]["environment"]
    for operator in OPERATORS:
        rows = found["thresholds"][operator]
        assert [terms for terms, _ in rows] == [16, 1024]
        for place, (_, threshold) in enumerate(rows):
            errors = [
                result["errors"][operator][inputs][place] for result in found["devices"].values() for inputs in INPUTS
            ]
            assert 0 < SMALL.safety * max(errors) <= threshold + 1e-3
        assert rows[0][1] <= rows[1][1]
    assert UNCOVERED in found["devices"]["mkl-compatible"]["errors"]["product"]


def test_errors_stay_below_the_worst_case() -> None:
    """γ_16 = 16 units; an error of 0 everywhere would mean that nothing was measured."""
    errors: Any = measure(SampleSizes(terms=(16,), products=1 << 12, results=1 << 8))
    for operator in OPERATORS:
        for inputs in INPUTS:
            assert 0 < errors[operator][inputs][0] < 16.1


def test_devices_that_compute_alike_calibrate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    same: dict[str, Any] = {"errors": {name: {inputs: [1.0, 1.0] for inputs in INPUTS} for name in OPERATORS}}
    monkeypatch.setattr(_threshold_search, "_on", lambda *_: json.loads(json.dumps(same)))
    with pytest.raises(DeviceError, match="same errors"):
        search(SMALL, ("native-1", "sse41"))
    with pytest.raises(CallerError, match="at least two"):
        search(SMALL, ("native-1", "native-1"))


@pytest.mark.parametrize(
    "changes", [{"terms": ()}, {"terms": (8,)}, {"products": 8}, {"safety": 0.5}, {"safety": math.nan}]
)
def test_plans_that_measure_nothing_are_the_callers_mistake(changes: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        SampleSizes(**changes)


def test_committed_thresholds_are_what_their_errors_give() -> None:
    text = resources.files("monitor.numerics.rounding").joinpath("data/calibration.json").read_text()
    data = json.loads(text)
    assert data["hardware"]["processor"]
    assert set(data["devices"]) == set(DEVICES)
    assert len({found["fingerprint"] for found in data["devices"].values()}) >= 3
    for name in DEVICES:
        assert device(name).kind == "cpu"
    for operator in OPERATORS:
        highest = 0.0
        for place, (terms, threshold) in enumerate(data["thresholds"][operator]):
            errors = [
                found["errors"][operator][inputs][place] for found in data["devices"].values() for inputs in INPUTS
            ]
            highest = max(highest, *errors)
            assert threshold == pytest.approx(data["plan"]["safety"] * highest, abs=1e-3)
            assert committed().threshold(operator, terms) == threshold
    assert committed().threshold("product", 10**9) == math.inf


def test_a_calibrated_bound_never_exceeds_the_worst_case() -> None:
    bound, worst = bound_named("calibrated"), Bound()
    for terms in (2, 5, 64, 1000, 16384, 10**6):
        for operator in OPERATORS:
            found = bound.of_products(terms, Formats(), operator)
            assert 0 < found <= worst.of_products(terms, Formats())
            ratio = bound.worst_ratio(terms, Formats(), operator)
            assert ratio * found == pytest.approx(worst.of_products(terms, Formats()), rel=1e-5)
    assert bound.of_products(10**6, Formats()) == worst.of_products(10**6, Formats())
    with pytest.raises(CallerError, match="measured in FP64"):
        bound.of_products(64, Formats(compute="float32", grid="bfloat16"))


def test_malformed_calibrations_are_refused() -> None:
    with pytest.raises(CallerError, match="product"):
        Calibration(thresholds=(((16, 1.0),),))
    for steps in ((), ((16, 1.0), (16, 2.0)), ((16, 0.0),), ((16, math.nan),)):
        with pytest.raises(CallerError, match="positive"):
            Calibration(thresholds=(steps,) * 4)
    with pytest.raises(CallerError, match="takes no calibration"):
        Bound(calibration=committed())
    with pytest.raises(CallerError, match="'loose'"):
        bound_named("loose")


def test_declared_numerics_name_the_bound_and_logs_of_another_kind_are_refused() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(96, 512, generator=generator), torch.randn(512, 256, generator=generator)
    sizes, logs = {}, {}
    for numerics in ("rounded", "rounded-probabilistic", "rounded-calibrated"):
        assert numerics in DECLARABLE
        with recording(numerics) as session:
            out = torch.mm(a, b)
        with replaying(numerics, session.log) as again:
            same = torch.mm(a, b)
        assert torch.equal(same, out)
        assert again.log == session.log
        sizes[numerics], logs[numerics] = session.statistics.entries, session.log
    assert sizes["rounded"] > sizes["rounded-probabilistic"] > sizes["rounded-calibrated"]
    with pytest.raises(EvidenceError, match="worst-case"):
        replaying("rounded", logs["rounded-calibrated"])
    with pytest.raises(CallerError, match="'rounded-loose'"):
        recording("rounded-loose")
    task = Task.for_preset("digits-cnn", seed=1, steps=1, numerics="rounded-calibrated")
    assert Task.from_json(task.to_json()) == task
    assert BOUNDS == ("worst-case", "probabilistic", "calibrated")
