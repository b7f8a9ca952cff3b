"""Which operators return zeros where a tensor that they take is zero.

Zero times anything counts as zero here, as in a gradient that vanishes; what is not listed is taken to return anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from monitor.programs.moves import LOOKUPS, MOVES, SHAPE_ONLY, ZEROS
from monitor.programs.parts import Part

__all__ = ["is_zero", "visible"]

_KEEPING = """
neg abs sqrt sgn sign relu tanh erf sin expm1 log1p trunc round floor ceil silu gelu leaky_relu
sum mean cumsum prod cumprod norm linalg_vector_norm amax amin div native_dropout avg_pool2d _adaptive_avg_pool2d
"""

_MERGES = frozenset({"cat", "stack", "slice_scatter", "select_scatter"})

_LIKE_FIRST = (MOVES - _MERGES - {"copy", "constant_pad_nd"}) | LOOKUPS | frozenset(_KEEPING.split())
"""Zero if the first tensor is, whatever the others are."""

_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "_grouped_mm"})
"""Zero if any tensor is."""

_SUMS = _MERGES | {"add", "sub", "maximum", "minimum"}
"""Zero if every tensor is, and no number is added to them."""

_CHOICES = {"where": ("self", "other"), "scatter": ("self", "src"), "lerp": ("self", "end", "tensors1")}
"""Zero if all of these are."""

_WITH_PRODUCT = {
    "addmm": ("self", "mat1", "mat2"),
    "baddbmm": ("self", "batch1", "batch2"),
    "addmv": ("self", "mat", "vec"),
    "addr": ("self", "vec1", "vec2"),
    "addcmul": ("self", "tensor1", "tensor2"),
    "addcdiv": ("self", "tensor1", "tensor1"),
    "convolution": ("bias", "input", "weight"),
}
"""A summand, and two factors of which one must vanish for their product to vanish."""

_FILLED_WITH = {"scalar_tensor": "s", "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value"}
"""What holds one number, and the argument that gives it."""

_ADDED_AT = {"index_add": "source", "scatter_add": "src", "index_put": "values", "_unsafe_index_put": "values"}
"""What is added (or put) where other arguments say."""


def is_zero(part: Part, zeros: Sequence[bool]) -> bool:
    """Tell whether all that an operator makes is zero, given which of its tensor inputs are."""
    name = part.name
    if name in _FILLED_WITH:
        return part.others.get(_FILLED_WITH[name]) == 0
    if name in ZEROS or name in SHAPE_ONLY or not part.read:
        return name in ZEROS
    if name == "copy":
        return _vanishes(part, "src", zeros)
    if name == "fill":
        return _vanishes(part, "value", zeros)
    if "_backward" in name or name in _LIKE_FIRST:
        return zeros[part.read[0]]  # what every backward operator takes first is a gradient, in which it is linear
    if name in _PRODUCTS:
        return any(zeros[slot] for slot in part.read)
    if name in _CHOICES:
        return all(_vanishes(part, each, zeros) for each in _CHOICES[name] if each in part.slots)
    if name in _WITH_PRODUCT:
        summand = _WITH_PRODUCT[name][0]
        return _loses_product(part, zeros) and (summand not in part.slots or _vanishes(part, summand, zeros))
    if name in _ADDED_AT:
        return _vanishes(part, "self", zeros) and _vanishes(part, _ADDED_AT[name], zeros)
    if name == "masked_fill":
        return (
            _vanishes(part, "self", zeros)
            and ("value" not in part.slots or _vanishes(part, "value", zeros))
            and (part.others.get("value", 0) == 0)
        )
    if name == "constant_pad_nd":
        return _vanishes(part, "self", zeros) and part.others.get("value", 0) == 0
    if name in _SUMS:
        added = [part.others[each] for each in ("other", "scalar", "scalars") if each in part.others]
        return not added and all(zeros[slot] for slot in part.read)
    return False


def visible(part: Part, zeros: Sequence[bool]) -> tuple[int, ...]:
    """Tensor inputs whose values can show in what an operator makes, given which of its inputs are zero."""
    name = part.name
    if name in SHAPE_ONLY:
        return ()
    if name in {"copy", "fill"}:
        return part.slots.get("src" if name == "copy" else "value", ())
    if name in _WITH_PRODUCT and _loses_product(part, zeros):
        return part.slots.get(_WITH_PRODUCT[name][0], ())
    if name in _ADDED_AT and _vanishes(part, _ADDED_AT[name], zeros) and part.others.get("accumulate", True) is True:
        return part.slots["self"]
    return part.read


def _loses_product(part: Part, zeros: Sequence[bool]) -> bool:
    return any(_vanishes(part, each, zeros) for each in _WITH_PRODUCT[part.name][1:])


def _vanishes(part: Part, name: str, zeros: Sequence[bool]) -> bool:
    slots = part.slots.get(name, ())
    return bool(slots) and all(zeros[slot] for slot in slots)
