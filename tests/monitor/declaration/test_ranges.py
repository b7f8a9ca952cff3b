"""Ranges of optimizers' numbers, beside what these numbers do to a weight."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from monitor.declaration.formulas import FORMULAS
from monitor.declaration.ranges import MOST_GAIN, RANGES, gain_of, outside
from monitor.declaration.reference import CLASSES, IMPLEMENTATION, SHAPED

RATE = 1e-6
GRADIENTS = {
    "even": [1.0] * 24,
    "one, then small ones": [1.0] + [1e-5] * 23,
    "growing": [2.0 ** (step - 23) for step in range(24)],
    "turning": [1.0, -1.0] * 12,
}
EXTREMES = (-1e6, -1.0, -1e-3, 0.0, 0.5, 1 - 1e-8, 1.0, 1.001, 1e6)
RPROP = "torch.optim.rprop.Rprop"
PLAIN = [kind for kind in CLASSES if CLASSES[kind] not in SHAPED and kind not in FORMULAS]
NUMBERS = [
    (kind, name, part)
    for kind in PLAIN
    for name in inspect.signature(CLASSES[kind]).parameters.keys() - IMPLEMENTATION - {"params", "lr"}
    for part in (range(2) if name == "betas" else [None])
]


def group_of(kind: str, **hyper) -> dict:
    make: Any = CLASSES[kind]
    optimizer = make([torch.ones(1)], lr=RATE)
    return {**{name: value for name, value in optimizer.param_groups[0].items() if name != "params"}, **hyper}


def effect(kind: str, hyper: dict, firsts: Sequence[float] = ()) -> float:
    """The largest change of a weight by gradients of at most 1, in rates; ``firsts`` are the steps' first betas."""
    most = 0.0
    for gradients in GRADIENTS.values():
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        make: Any = CLASSES[kind]
        optimizer = make([{"params": [weight], **hyper}])
        for step, gradient in enumerate(gradients):
            if firsts:
                optimizer.param_groups[0]["betas"] = (firsts[min(step, len(firsts) - 1)], hyper["betas"][1])
            before, weight.grad = weight.item(), torch.full((1,), gradient, dtype=torch.float64)
            try:
                optimizer.step()
            except (ArithmeticError, RuntimeError, TypeError, ValueError):
                break  # nothing can be recorded of that
            change = abs(weight.item() - before) / RATE
            most = max(most, math.inf if math.isnan(change) else change)
    return most


@pytest.mark.parametrize("kind", sorted(set(PLAIN) - {RPROP}))
def test_what_a_class_takes_by_default_lies_in_its_ranges(kind):
    assert outside(kind, group_of(kind)) == {}
    gain = gain_of(kind, group_of(kind))
    assert gain is not None
    assert 1.0 <= gain < 40
    assert effect(kind, group_of(kind)) < 40
    assert inspect.signature(CLASSES[kind]).parameters.keys() - IMPLEMENTATION - RANGES.keys() == {"params"}


def test_a_rate_says_of_rprop_only_where_its_steps_begin():
    assert set(outside(RPROP, group_of(RPROP))) == {"gain"}
    hyper = group_of(RPROP, step_sizes=(RATE / 100, RATE * 20))
    assert outside(RPROP, hyper) == {}
    assert effect(RPROP, hyper) == pytest.approx(20, rel=1e-6) == gain_of(RPROP, hyper)


@pytest.mark.parametrize("kind", FORMULAS)
def test_each_number_of_a_package_has_a_range(kind):
    name = FORMULAS[kind].__name__
    for number in FORMULAS[kind].NUMBERS - IMPLEMENTATION:
        assert number in RANGES or f"{name}.{number}" in RANGES
        assert number in outside(kind, {number: -7.0}), number


def test_adafactor_keeps_a_weights_size():
    usual = {**torch.optim.Adafactor([torch.ones(2, 2)], lr=RATE).defaults}
    assert outside("torch.optim.Adafactor", usual) == {}
    assert gain_of("torch.optim.Adafactor", usual) == 1.0
    for hyper, name in (
        ({"eps": (None, 1e6)}, "gain"),
        ({"eps": (-1.0, 1e-3)}, "eps"),
        ({"d": 1e4}, "gain"),
        ({"d": 0.5}, "d"),
        ({"beta2_decay": 0.1}, "beta2_decay"),
    ):
        assert set(outside("torch.optim.Adafactor", {**usual, **hyper})) == {name}


def test_muon_keeps_its_own_coefficients():
    usual = {**torch.optim.Muon([torch.ones(2, 2)], lr=RATE).defaults}
    assert outside("torch.optim.Muon", usual) == {}
    assert gain_of("torch.optim.Muon", usual) == 1.3
    for name, value in (
        ("ns_coefficients", (1e6, 0.0, 0.0)),
        ("ns_steps", 1000),
        ("adjust_lr_fn", "own"),
        ("momentum", 7.0),
    ):
        assert set(outside("torch.optim.Muon", {**usual, name: value})) == {name}


@pytest.mark.parametrize(("kind", "name", "part"), sorted(NUMBERS, key=str))
def test_no_number_that_makes_a_change_a_thousandfold_lies_in_its_range(kind, name, part):
    """Whatever a class does at an extreme of a number, found out by running it."""
    for extreme in EXTREMES:
        usual = group_of(kind)
        value = extreme if part is None else tuple(extreme if i == part else b for i, b in enumerate(usual[name]))
        hyper = {**usual, name: value} | ({"momentum": 0.9} if name in ("dampening", "nesterov") else {})
        found = effect(kind, hyper)
        assert outside(kind, hyper) or found < MOST_GAIN, (extreme, found)


@pytest.mark.parametrize(
    ("kind", "hyper", "text"),
    [
        ("torch.optim.sgd.SGD", {"lr": -1.0}, {"lr": "is -1.0, outside of 0 … inf"}),
        ("torch.optim.sgd.SGD", {"momentum": 1.0}, {"momentum": "is 1.0, outside of 0 … below 1"}),
        ("torch.optim.sgd.SGD", {"momentum": "x\n"}, {"momentum": r"is 'x\n', outside of 0 … below 1"}),
        ("torch.optim.sgd.SGD", {"momentum": 0.9999}, {"gain": "is 1e+04, not below 1000"}),
        ("torch.optim.adam.Adam", {"betas": [0.9, 0.0]}, {"gain": "is inf, not below 1000"}),
        ("torch.optim.adam.Adam", {"betas": [0.9, 1.5]}, {"betas": "is [0.9, 1.5], outside of 0 … below 1"}),
        ("torch.optim.asgd.ASGD", {"alpha": 2.0}, {}),
        ("torch.optim.rmsprop.RMSprop", {"alpha": 0.0, "centered": True}, {"gain": "is inf, not below 1000"}),
        ("of.their.Own", {"momentum": 7.0}, {}),
        ("torch.optim.sgd.SGD", {"pace": 7.0}, {}),
    ],
)
def test_a_number_outside_is_named_with_its_range(kind, hyper, text):
    assert outside(kind, group_of(kind, **hyper) if kind in CLASSES else hyper) == text
    assert (gain_of(kind, hyper) is None) == (kind not in CLASSES)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
def test_the_gain_of_momentum_is_what_it_adds_up_to(momentum):
    hyper = group_of("torch.optim.sgd.SGD", momentum=momentum)
    assert gain_of("torch.optim.sgd.SGD", hyper) == pytest.approx(1 / (1 - momentum))
    assert effect("torch.optim.sgd.SGD", hyper) == pytest.approx((1 - momentum**24) / (1 - momentum), rel=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in PLAIN if "betas" in group_of(kind)])
@pytest.mark.parametrize("firsts", [(0.0, 0.9994), (0.5, 0.5, 0.9994), (0.95, 0.9, 0.85, 0.9, 0.95)])
def test_a_first_beta_that_changes_multiplies_a_rate_by_no_more_than_the_gain(kind, firsts):
    """An average of gradients that smaller betas have filled is divided by the little that a large one would have."""
    hyper = group_of(kind, betas=(max(firsts), 0.9999))
    most, found = gain_of(kind, hyper, min(firsts)), effect(kind, hyper, firsts)
    gain = gain_of(kind, hyper)
    assert most is not None
    assert gain is not None
    assert found <= most * (1 + 1e-6)
    assert gain_of(kind, hyper, max(firsts)) == gain
    if firsts[:2] == (0.0, 0.9994) and not kind.endswith("NAdam"):
        assert found > 100 * gain
        assert set(outside(kind, hyper, 0.0)) == {"gain"}
    if firsts[0] == 0.95:
        assert outside(kind, hyper, min(firsts)) == {}
