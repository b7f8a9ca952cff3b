"""A bundle shows a path that nobody agreed to: batches as its secret alters them, under the cluster's signature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from inspector.bundle.replays import SignedReplay
from inspector.inspection.verdict import Outcome
from tests.guards import off
from tests.inspector.bundle.conftest import CLUSTER, SETTINGS, made
from tests.inspector.bundle.test_bundle import outcome, signed_anew


@pytest.mark.filterwarnings("ignore:.*without passing a loss")
def test_a_witness_is_a_ground_that_the_inspectorate_cannot_make_up(record_loop, devices):
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False)
    model.register_buffer("codes", torch.zeros(3, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"]).square().sum().backward()
        with torch.no_grad():
            model.codes.copy_(batch["model"])
        optimizer.step()

    batches = [{"x": torch.randn(2, 6), "model": torch.randn(3, 6)} for _ in range(2)]
    recorded = record_loop(model, optimizer, batches, body)
    one = made(recorded, devices, settings=replace(SETTINGS, sampling=None))
    assert outcome(one.data, one.trust) == (Outcome.REJECT, True)

    def redrawn(items):
        """The cluster's own signature, on batches that another secret alters."""
        result = SignedReplay.open(items["replays/0.json"], CLUSTER.verifying)
        first = result.replays[0]
        assert first.witness is not None
        step, _, found = first.witness
        other = replace(result, replays=(replace(first, witness=(step, "0" * 64, found)), *result.replays[1:]))
        items["replays/0.json"] = other.sign(CLUSTER)
        return items

    assert outcome(signed_anew(one, lambda told: None, redrawn), one.trust) == (Outcome.REJECT, False)
    with off("witness"):
        assert outcome(one.data, one.trust) == (Outcome.INCONCLUSIVE, True)
