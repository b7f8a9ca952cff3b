"""Law 5, programs: a product counts however it is written, and no batch becomes the model past every loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from tests.adversary.world import kept_device
from tests.guards import off

PRODUCT = 2 * 2 * 4 * 3
"""FLOP of a product of 2 x 4 and 4 x 3; its backward pass here needs one more."""


def judge(recorded, maximum_flop=None):
    settings = Settings(samples=3, seed="x", devices=("sse41",))
    trust = replace(recorded.trust, maximum_flop=maximum_flop)
    return inspect([recorded.run], trust, settings, now=recorded.now, worker=kept_device)


DISGUISES = {
    "broadcast and sum": lambda x, w: (x[:, :, None] * w).sum(1),
    "mean": lambda x, w: (x[:, :, None] * w).mean(1) * 4,
    "views": lambda x, w: (x[:, :, None] * w).transpose(1, 2).reshape(6, 4).sum(1).view(2, 3),
    "running sum": lambda x, w: (x[:, :, None] * w).cumsum(1)[:, -1],
    "squares": lambda x, w: ((x[:, :, None] + w).square() - (x[:, :, None] - w).square()).sum(1) / 4,
    "copies": lambda x, w: (x[:, :, None].repeat(1, 1, 3) * w[None].repeat(2, 1, 1)).sum(1),
    "outer products": lambda x, w: sum(x[:, k, None] * w[k] for k in range(4)),
    "einsum": lambda x, w: torch.einsum("bk,kn->bn", x, w),
}


@pytest.fixture
def disguised(record_loop):
    """Record a loop of three steps whose one product is written as the named disguise."""

    def record(disguise):
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, 3))})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            DISGUISES[disguise](batch, model["w"]).square().sum().backward()
            optimizer.step()

        return record_loop(model, optimizer, [torch.ones(2, 4) for _ in range(3)], body)

    return record


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a13_a_product_in_disguise_counts_like_the_product(disguised, disguise):
    verdict = judge(disguised(disguise), maximum_flop=0)
    assert verdict.outcome is Outcome.REJECT
    declared = verdict.evidence["runs"][0]["flop"]
    assert declared >= 3 * 2 * PRODUCT
    assert f"declares {declared} FLOP, more than the 0 that the rules allow" in verdict.reasons[0].text


def test_a13_guard_off_broadcast_and_sum_count_nothing(disguised):
    with off("products counted", "past counted"):
        verdict = judge(disguised("broadcast and sum"), maximum_flop=0)
    assert verdict.outcome is Outcome.ACCEPT


def test_a13_a_lab_that_counts_less_than_the_inspector_is_rejected(disguised):
    with off("products counted"):
        recorded = disguised("broadcast and sum")
    texts = [reason.text for reason in judge(recorded).reasons]
    assert f"step 1 declares 0 FLOP; the program needs {2 * PRODUCT}" in texts


@pytest.fixture
def delivered(record_loop):
    """A loop whose batches (or a constant) carry a finished model past the loss into the named place."""

    def record(place, *, constant=False, **options):
        torch.manual_seed(0)
        model = nn.Linear(6, 3, bias=False)
        model.register_buffer("statistics", torch.zeros(3, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        finished = torch.randn(3, 6)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            model(batch["x"]).square().sum().backward()
            value = finished if constant else batch["model"]
            with torch.no_grad():
                if place == "gradient":
                    model.weight.grad.add_(value)
                optimizer.step()
                if place == "momentum":
                    optimizer.state[model.weight]["momentum_buffer"].copy_(value)
                elif place != "gradient":
                    getattr(model, place).copy_(value)

        batches = [{"x": torch.ones(2, 6), "model": torch.randn(3, 6)} for _ in range(3)]
        return record_loop(model, optimizer, batches, body, **options)

    return record


PLACES = {
    "weight": "weight/weight",
    "statistics": "buffer/statistics",
    "gradient": "weight/weight",
    "momentum": "optimizer/weight/momentum_buffer",
}


@pytest.mark.parametrize("place", PLACES)
def test_a21_a_finished_model_in_a_batch_is_rejected_by_a_witness(delivered, place):
    verdict = judge(delivered(place))
    assert verdict.outcome is Outcome.REJECT
    found = [reason for reason in verdict.reasons if reason.guard == "program"]
    assert {reason.where["tensor"] for reason in found} <= {PLACES[place], "optimizer/weight/momentum_buffer"}
    assert {reason.where["source"] for reason in found} == {"batch:model"}
    assert {reason.where["chip"] for reason in found} <= set(verdict.evidence["drawn_chips"])
    recorded, *altered = found[0].where["values"]
    assert len(altered) == 2
    assert recorded not in altered


@pytest.mark.parametrize("place", PLACES)
def test_a21_a_finished_model_in_a_constant_leaves_the_verdict_open(delivered, place):
    verdict = judge(delivered(place, constant=True))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    found = [reason for reason in verdict.reasons if "without passing a loss, which was not agreed" in reason.text]
    assert PLACES[place] in {reason.where["tensor"] for reason in found}
    assert "constant:0" in {reason.where["source"] for reason in found}
    assert all("declare countersign --direct-path" in reason.text for reason in found)


@pytest.mark.parametrize("place", ["statistics", "gradient"])
def test_a21_guard_off_it_is_accepted(delivered, place):
    with off("direct paths"):
        assert judge(delivered(place)).outcome is Outcome.ACCEPT


def test_a21_weights_that_no_update_writes_leave_the_verdict_open_too(delivered):
    recorded = delivered("weight")
    with off("direct paths"):
        assert judge(recorded).outcome is Outcome.INCONCLUSIVE
    with off("direct paths", "numbers bound"):
        verdict = judge(recorded)
        assert verdict.outcome is Outcome.INCONCLUSIVE  # the updates are computed in vain
        assert "results are not used" in verdict.reasons[0].text
    with off("direct paths", "numbers bound", "limited slack"):
        assert judge(recorded).outcome is Outcome.ACCEPT


def test_a21_a_path_that_was_agreed_is_accepted_and_listed(delivered):
    verdict = judge(delivered("statistics", direct_paths=["buffer/statistics"]))
    assert verdict.outcome is Outcome.ACCEPT
    paths = verdict.evidence["runs"][0]["execution"]["direct_paths"]
    assert [path["tensor"] for path in paths["agreed"]] == ["buffer/statistics"] * len(paths["agreed"])
    assert paths["agreed"]
    assert not paths["not_agreed"]


def test_a21_only_tensors_of_the_state_can_be_agreed_on(delivered):
    with pytest.raises(CallerError, match="names no tensor of the state"):
        delivered("statistics", direct_paths=["statistics"])


def test_a21_running_statistics_of_an_honest_net_are_accepted_and_listed_apart(record_loop):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    batches = [{"x": torch.randn(4, 4), "y": torch.tensor([0, 1, 1, 0])} for _ in range(3)]
    verdict = judge(record_loop(model, optimizer, batches, body))
    assert verdict.outcome is Outcome.ACCEPT
    assert "a model delivered through a linear loss, or number by number" in verdict.reasons[1].text
    paths = verdict.evidence["runs"][0]["execution"]["direct_paths"]
    assert not paths["not_agreed"]
    assert {path["tensor"] for path in paths["running_statistics"]} == {"buffer/1.running_mean", "buffer/1.running_var"}


def test_a21_running_statistics_that_serve_as_weights_leave_the_verdict_open(record_loop):
    model = nn.Linear(4, 3, bias=False)
    model.register_buffer("mean", torch.zeros(12))
    model.register_buffer("variance", torch.ones(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        finished = batch["model"].reshape(1, 12).repeat(2, 1)
        functional.batch_norm(finished, model.mean, model.variance, training=True, momentum=1.0)
        (model(batch["x"]) @ model.mean.clone().view(3, 4)).square().sum().backward()
        optimizer.step()

    batches = [{"x": torch.ones(2, 4), "model": torch.randn(3, 4)} for _ in range(3)]
    verdict = judge(record_loop(model, optimizer, batches, body))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert {reason.where["tensor"] for reason in verdict.reasons} == {"buffer/mean"}


MODEL = {
    "ones in the shape of a weight": lambda slope, weight, value: value * torch.ones_like(weight),
    "a quotient of gradients": lambda slope, weight, value: slope * value / (slope + 1e-30),
    "a gate on a gradient": lambda slope, weight, value: torch.where(slope.isfinite(), value, weight),
}


@pytest.fixture
def carried(record_loop):
    """A loop whose batches carry a finished model into a buffer, by something that vanishes with the gradients."""

    def record(way, **options):
        torch.manual_seed(0)
        model = nn.Linear(6, 3, bias=False)
        model.register_buffer("codes", torch.zeros(3, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            model(batch["x"]).square().sum().backward()
            with torch.no_grad():
                model.codes.copy_(MODEL[way](model.weight.grad, model.weight, batch["model"]))
            optimizer.step()

        batches = [{"x": torch.ones(2, 6), "model": torch.randn(3, 6)} for _ in range(3)]
        return record_loop(model, optimizer, batches, body, **options)

    return record


WITNESSED = {"ones in the shape of a weight": True, "a quotient of gradients": False, "a gate on a gradient": True}
"""Whether it shows with all gradients zero."""


@pytest.mark.parametrize("way", MODEL)
def test_a28_a29_what_a_gradient_carries_into_a_buffer_is_not_accepted(carried, way):
    recorded = carried(way)
    verdict = judge(recorded)
    assert verdict.outcome is (Outcome.REJECT if WITNESSED[way] else Outcome.INCONCLUSIVE)
    assert "buffer/codes" in {reason.where.get("tensor") for reason in verdict.reasons}
    assert any(reason.guard == "program" for reason in verdict.reasons) is WITNESSED[way]
    with off("witness"):
        assert judge(recorded).outcome is Outcome.INCONCLUSIVE
    with off("direct paths", "gradients bound"):
        assert judge(recorded).outcome is Outcome.ACCEPT


def test_c7_two_index_copies_and_running_losses_are_accepted(record_loop):
    """A loss of rows put together, its sum kept in a buffer, and averages of weights and running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("total", torch.zeros(2))
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch)
        first, second = torch.arange(2), torch.arange(2, 4)
        rows = torch.zeros(4).index_copy(0, first, out[:2].sum(1)).index_copy(0, second, out[2:].sum(1))
        loss = rows.index_fill(0, first, 0.0).index_fill(0, second[:1], 0.0).square().mean()
        loss.backward()
        model.total.add_(loss.detach())
        optimizer.step()
        average.update_parameters(model)

    batches = [torch.randn(4, 4) for _ in range(3)]
    verdict = judge(record_loop(model, optimizer, batches, body, state={"average": average}))
    assert verdict.outcome is Outcome.ACCEPT
    paths = verdict.evidence["runs"][0]["execution"]["direct_paths"]
    assert {path["tensor"] for path in paths["few_numbers"]} == {"buffer/total", "buffer/average.module.total"}
    assert "buffer/average.module.1.running_mean" in {path["tensor"] for path in paths["running_statistics"]}
