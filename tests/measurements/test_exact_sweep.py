"""The sweep command on a subset, its oracle, and the committed result of the whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import tests.measurements.sweep as sweep_module
from analysis.bench.origin import DATA
from monitor.numerics.engines.eager.exact.functions import KERNELS
from monitor.numerics.exact.unary import unary
from tests.measurements.oracle import ORACLES, expected
from tests.measurements.sweep import main, sweep, sweep_power

needs_x87 = pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="the oracle needs x87 extended precision")


@needs_x87
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_a_strided_subset_has_no_mismatch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "_CHUNK", 1 << 10)
    result = sweep(name, stride=12_345)
    assert result.mismatches == 0, result.first_mismatch
    assert result.inputs > 300_000


@needs_x87
def test_random_powers_have_no_mismatch() -> None:
    result = sweep_power(1 << 19)
    assert result.mismatches == 0, result.first_mismatch
    assert result.inputs == 1 << 19


@needs_x87
def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = unary

    def wrong(name: str, x: torch.Tensor) -> torch.Tensor:
        result = honest(name, x)
        result.view(torch.int32)[17] ^= 1
        return result

    monkeypatch.setattr(sweep_module, "_CHUNK", 1 << 10)
    monkeypatch.setattr(sweep_module, "unary", wrong)
    assert sweep("exp", stride=500_000).mismatches > 0


@needs_x87
def test_the_oracle_agrees_with_mpmath_on_hard_cases() -> None:
    x = np.array([2.0**-24, 2.0**-23, 1.5 * 2.0**-12], np.float32)
    values, asked = expected("exp", x)
    assert values.tolist() == [1 + 2.0**-23, 1 + 2.0**-23, np.float32(np.exp(1.5 * 2.0**-12))]
    assert asked <= 3


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if np.finfo(np.longdouble).nmant != 63:
        assert main(["exp"]) == 3
        return
    assert main(["zeta", "--stride", "100000"]) == 2
    assert "no exact function 'zeta'" in capsys.readouterr().err


def test_the_committed_sweep_found_no_mismatch() -> None:
    path = DATA / "sweep.json"
    document = json.loads(path.read_text())
    assert document["machine"]["processor"]
    assert {row["function"] for row in document["results"]} <= {*KERNELS, "pow"}
    assert document["results"]
    for row in document["results"]:
        assert row["mismatches"] == 0
        assert row["inputs"] == (1 << 28 if row["function"] == "pow" else (1 << 32) - 4)
