"""Law 5, rounding logs: a log says how a device rounded; it does not choose the weights."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.numerics.engines.eager.rounded.rounding_rule import decide, place
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.rounding.bounds import Bound, Formats
from tests.adversary.world import kept_device
from tests.guards import off
from tests.inspector.bundle.conftest import made

WEIGHTS, STEPS = 100, 3
SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@contextmanager
def choosing(wanted):
    """A lab's process whose log rounds elements of the gradient, by step, up where ``wanted`` says so."""
    conclude = RoundedBackend._conclude
    step = iter(wanted)

    def steered(self, settled, work):
        near = settled.near
        if not self._replay and work.kind == "product" and settled.out.numel() == WEIGHTS == len(near.positions):
            up = np.array(next(step))
            values, betas = torch.from_numpy(np.array(near.values)), torch.from_numpy(np.array(near.betas))
            at = torch.from_numpy(np.array(near.positions))
            settled.out.reshape(-1)[at] = place(values, decide(values, betas, 24), torch.from_numpy(up))
            near.upward[:] = up
        return conclude(self, settled, work)

    with mock.patch.object(RoundedBackend, "_conclude", steered):
        yield


def ties(step, height):
    """A batch whose gradient lies on a midpoint of a coarse grid in each weight, ``height`` grid steps from zero.

    Two huge opposite factors make the error bound, and with it the grid, and cancel.
    """
    spacing, factor = 2.0**-step, Bound().of_products(4, Formats())
    some = torch.from_numpy(np.random.default_rng(step).uniform(1, 1.01, WEIGHTS).astype(np.float32))
    rows = torch.stack([some, some, torch.full((WEIGHTS,), (height + 0.5) * spacing), torch.zeros(WEIGHTS)])
    size = np.float32(spacing / (32 * factor * 1.03 * 2**0.5 * rows.double().norm(dim=0).max()))
    return rows, torch.tensor([size, -size, 1.0, 0.0])


@pytest.fixture
def steer(record_loop):
    """Record the run with its log's choices, by step and weight; None leaves them to the device."""

    def record(wanted, height=0):
        model = nn.Linear(WEIGHTS, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            rows, factors = batch
            (model(rows)[:, 0] * factors).sum().backward()
            optimizer.step()

        batches = [ties(step, height) for step in range(1, STEPS + 1)]
        if wanted is None:
            return record_loop(model, optimizer, batches, body, numerics="rounded")
        with choosing(wanted):
            return record_loop(model, optimizer, batches, body, numerics="rounded")

    return record


def judge(recorded):
    return inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=kept_device)


def some(share, *, of=STEPS):
    """That share of the weights is rounded up, in each of the first steps."""
    chosen = np.arange(WEIGHTS) < share * WEIGHTS
    return [chosen if step < of else np.zeros(WEIGHTS, np.bool_) for step in range(STEPS)]


@pytest.mark.parametrize("height", [0, 5000])
def test_a36_a_log_that_only_lists_is_accepted_and_its_freedom_is_not_covered(steer, height):
    verdict = judge(steer(None, height))
    assert verdict.outcome is Outcome.ACCEPT
    said, scope = (reason.text for reason in verdict.reasons)
    assert (
        f"the rounding logs decided {WEIGHTS * STEPS} results where devices may differ, 0 of them differently" in said
    )
    allowed = verdict.evidence["replays"][0]["allowed_decisions"]
    assert f"of {WEIGHTS * STEPS} free results unlike it" in scope
    assert f"{allowed} such choices, which can write" in scope
    assert allowed < 0.05 * WEIGHTS * STEPS


def test_a36_one_bit_in_a_hundred_weights_is_in_doubt_where_the_bound_reaches_the_result(steer):
    verdict = judge(steer(some(0.01, of=1)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    (text,) = (reason.text for reason in verdict.reasons)
    assert text.startswith("from step 1, call ")
    assert (
        "(aten.mm.default) on, the rounding log decides 1 results differently from sse41, so that it can write up "
        "to 1 bits" in text
    )
    assert "their error bound takes half of their bits or more; not calibrated: product sums of 4 terms" in text


def test_a36_many_bits_are_in_doubt_wherever_they_lie(steer):
    verdict = judge(steer(some(0.1), height=5000))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    (text,) = (reason.text for reason in verdict.reasons)
    most = verdict.evidence["replays"][0]["allowed_decisions"]
    assert (
        f"decides 30 results differently from sse41, so that it can write up to 30 bits; of {WEIGHTS * STEPS} " in text
    )
    assert f"honest logs decide at most {most} so" in text


@pytest.mark.parametrize("height", [0, 5000])
def test_a36_guard_off_the_log_writes_weights(steer, height, devices):
    recorded = steer(some(0.5), height)
    with off("what logs decide"):
        verdict = judge(recorded)
        bundle = made(recorded, devices, settings=SETTINGS)
    assert (verdict.outcome, bundle.verdict.outcome) == (Outcome.ACCEPT, Outcome.ACCEPT)
    assert verdict.evidence["replays"][0]["turned_decisions"] == WEIGHTS * STEPS // 2
    checked = check_bundle(bundle.data, bundle.trust)
    assert checked.evidence["verifies"] is False
    assert "the verdict is ACCEPT although from step 1, call " in checked.reasons[0].text
    with off("what logs decide"):
        assert check_bundle(bundle.data, bundle.trust).evidence["verifies"] is True
