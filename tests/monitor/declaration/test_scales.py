"""Powers of a gradient scaler's scale: products add them, sums keep both, and an older scale never goes out again."""

from __future__ import annotations

import pytest

from monitor.declaration.values import FREE, ZERO, combined, later, names_in, scale
from monitor.programs.parts import Part

S, NEXT = scale("s", 0), scale("s", 7)


def of(name, *inputs, **others):
    slots = {f"input{slot}": (slot,) for slot in range(len(inputs))}
    return combined(Part(name, slots, others, (0,)), inputs, range(len(inputs)))


def test_what_is_multiplied_and_divided_by_one_scale_is_free_of_it():
    assert of("div", of("mul", S, FREE), S) == FREE
    assert of("mul", S, of("reciprocal", S)) == FREE
    assert of("neg", of("sum", S)) == S


@pytest.mark.parametrize(
    "value",
    [
        of("div", S, NEXT),
        of("div", of("mul", S, S), S),
        of("div", of("mm", S, of("mm", FREE, S)), S),
        of("div", of("add", S, FREE), S),
        of("div", of("pow", S), S),
        of("div", of("var", S), S),
        of("div", of("convolution", S, S), S),
        of("div", of("masked_fill", S, FREE), S),
        of("div", of("masked_fill", FREE, S), S),
        of("mul", S, of("clamp", of("reciprocal", S))),
        of("div", later(S, {"s": 7}), S),
        of("div", later(S, {"s": 7}), later(S, {"s": 7})),
    ],
)
def test_anything_else_is_not(value):
    assert names_in(value) == {"s"}


def test_a_zero_takes_no_part_in_a_sum_and_is_none_once_a_function_made_something_of_it():
    assert of("add", S, ZERO) == S
    assert of("mul", ZERO, S) == of("clone", ZERO) == ZERO
    assert of("cos", ZERO) == of("div", FREE, ZERO) == FREE


def test_the_scale_that_a_step_leaves_is_the_next_ones():
    assert later(NEXT, {"s": 7}) == S == later(S, {})


def test_of_many_products_something_stays():
    many = FREE
    for _ in range(12):
        many = of("add", of("mul", many, S), FREE)
    assert len(many) <= 9
    assert names_in(of("div", many, S)) == {"s"}
