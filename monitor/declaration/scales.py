"""How often a gradient scaler's scale is in a value: what an update takes must not be multiplied by one.

A value is a sum of products. Of each product the power of each scale is kept, and of nothing else: ``{}`` for what has
no scale in it. A value without any product is zero. A scale that was written since is another one: dividing by the next
one does not take it out again, for the quotient of the two would be a rate that nothing declares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from monitor.programs.parts import Part

__all__ = ["FREE", "ZERO", "Scales", "combined", "later", "names_in", "scale"]

Power = tuple[str, int, int]
"""A scale by its name, the call that wrote it (0: a step before), and its exponent."""
Scales = frozenset[frozenset[Power]]
"""The products that a value is a sum of."""

ZERO: Scales = frozenset()
FREE: Scales = frozenset({frozenset()})
"""What no scale is in."""

_GONE = -1
"""In place of a call: the scale was written since, or the value is no product of it. Nothing takes it off again."""
_MOST = 8
_SUMS = """
add sub rsub lerp cat stack where index_put index_copy index_add scatter scatter_add masked_fill masked_scatter
index_fill put slice_scatter select_scatter
"""
_ADDING = frozenset(_SUMS.split())
_TIMES = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "outer", "matmul"})
_OTHERS = """
pow float_power square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sigmoid tanh erf sin cos sign sgn clamp clamp_min
clamp_max hardtanh minimum maximum softmax remainder fmod atan2 addcdiv round floor ceil trunc tan asin acos atan sinh
cosh asinh acosh atanh erfc erfinv logit gelu silu mish softplus elu glu hardswish hardsigmoid hardshrink softshrink
threshold log_sigmoid_forward log_softmax logsumexp logcumsumexp logaddexp logaddexp2 xlogy floor_divide prod cumprod
var std var_mean std_mean native_layer_norm native_group_norm native_batch_norm native_dropout det inverse matrix_exp
scatter_reduce index_reduce
"""
_BENDING = frozenset(_OTHERS.split())
"""Made of a value that has a scale in it, these are no product of the scale."""
_KEEPING = frozenset({"clone", "_to_copy", "contiguous", "detach", "neg", "sum", "mean"})
"""These leave zeros zero, as adding and multiplying do."""
_FACTORS: Mapping[str, tuple[str, str]] = {
    "addmm": ("mat1", "mat2"),
    "addmv": ("mat", "vec"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "addcmul": ("tensor1", "tensor2"),
    "addr": ("vec1", "vec2"),
}


def scale(name: str, written: int) -> Scales:
    """A scale itself, as the call left it."""
    return frozenset({frozenset({(name, written, 1)})})


def combined(part: Part, inputs: Sequence[Scales], numbers: Collection[int]) -> Scales:
    """The scales in what an operator makes.

    Args:
        inputs: those in each input of its call.
        numbers: the inputs that hold numbers with a fraction; others are places and masks.
    """
    read = [inputs[slot] for slot in part.read]
    if part.name in _FACTORS:
        pair = [_sum(inputs[slot] for slot in part.slots.get(each, ())) for each in _FACTORS[part.name]]
        return _few(_sum([*(inputs[slot] for slot in part.slots.get("self", ())), _product(pair)]))
    if part.name in _ADDING:
        return _few(_sum(inputs[slot] for slot in part.read if slot in numbers))
    if part.name == "reciprocal":
        return _sum(map(_inverse, read))
    if part.name == "div" and len(read) == 2:
        return _few(_product([read[0], _inverse(read[1])]))
    if part.name in _TIMES:
        return _few(_product(read))
    found = _sum(each for each in read if each != FREE)
    if not found:
        return ZERO if part.name in _KEEPING and FREE not in read else FREE
    is_product = sum(slot in numbers and inputs[slot] not in (FREE, ZERO) for slot in part.read) > 1
    return _bent(found) if is_product or part.name.lstrip("_") in _BENDING else _few(found)


def later(found: Scales, written: Mapping[str, int]) -> Scales:
    """The same once the step has ended, in which calls have written scales."""
    return frozenset(
        frozenset((name, 0, power) if call == written.get(name, 0) else (name, _GONE, 1) for name, call, power in each)
        for each in found
    )


def names_in(found: Scales) -> frozenset[str]:
    """The scales that are in a value."""
    return frozenset(name for each in found for name, _, _ in each)


def _sum(values: Iterable[Scales]) -> Scales:
    return ZERO.union(*values)


def _product(factors: Sequence[Scales]) -> Scales:
    found = FREE
    for factor in factors:
        found = frozenset(_times(one, other) for one in found for other in factor)
    return found


def _times(one: frozenset[Power], other: frozenset[Power]) -> frozenset[Power]:
    powers: dict[tuple[str, int], int] = {}
    for name, call, power in (*one, *other):
        powers[name, call] = 1 if call == _GONE else powers.get((name, call), 0) + power
    return frozenset((*key, power) for key, power in powers.items() if power)


def _inverse(value: Scales) -> Scales:
    inverse = (
        frozenset((name, call, 1 if call == _GONE else -power) for name, call, power in each) for each in value or FREE
    )
    return frozenset(inverse)


def _bent(value: Scales) -> Scales:
    gone = frozenset((name, _GONE, 1) for name in names_in(value))
    return frozenset({gone})


def _few(value: Scales) -> Scales:
    """Few products as they are; of many that something is in which nothing takes off again."""
    return value if len(value) <= _MOST else _bent(value)
