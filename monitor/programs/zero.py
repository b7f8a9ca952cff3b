"""Which operators return zeros where a tensor that they take is zero.

Zero times anything counts as zero here, as in a gradient that vanishes; what is not listed is taken to return anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from monitor.programs.moves import LOOKUPS, MOVES, SHAPE_ONLY, ZEROS
from monitor.programs.parts import Part

__all__ = ["is_zero", "visible"]

_KEEPING = """
neg abs sqrt sgn sign relu tanh erf sin expm1 log1p trunc round floor ceil silu gelu leaky_relu elu celu mish hardswish
_prelu_kernel nan_to_num xlogy fmod remainder glu sum mean cumsum prod cumprod norm linalg_vector_norm var std amax amin
max min aminmax sort topk var_mean div native_dropout avg_pool2d avg_pool3d _adaptive_avg_pool2d adaptive_max_pool2d
max_pool2d_with_indices max_pool3d_with_indices nll_loss_forward nll_loss2d_forward _embedding_bag
_embedding_bag_forward_only _fused_rms_norm upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d conj_physical _conj_physical polar _fft_r2c _fft_c2c _fft_c2r
alias_copy as_strided_copy expand_copy narrow_copy permute_copy select_copy slice_copy split_copy split_with_sizes_copy
squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy channel_shuffle diag_embed rot90
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
grid_sampler_2d grid_sampler_3d max_unpool2d max_unpool3d adaptive_max_pool3d _upsample_bilinear2d_aa col2im
_upsample_bicubic2d_aa take masked_select trace nansum cummax cummin kthvalue median nanmedian mode renorm
asin asinh atan atanh erfinv frac hardshrink sinh softshrink special_xlog1py tan triangular_solve cholesky_solve
"""

_MERGES = frozenset({"cat", "stack", "complex", "slice_scatter", "select_scatter", "diagonal_scatter"})

_LIKE_FIRST = (MOVES - _MERGES - {"copy", "constant_pad_nd"}) | LOOKUPS | frozenset(_KEEPING.split())
"""Zero if the first tensor is, whatever the others are."""

_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "_grouped_mm", "linalg_cross"})
"""Zero if any tensor is."""

_WITH_PLACES = """
max min sort topk native_dropout adaptive_max_pool2d max_pool2d_with_indices max_pool3d_with_indices nll_loss_forward
nll_loss2d_forward _embedding_bag _embedding_bag_forward_only _fused_rms_norm adaptive_max_pool3d cummax cummin
kthvalue median nanmedian mode triangular_solve _linalg_solve_ex
"""

_FIRST_ALONE = frozenset(_WITH_PLACES.split())
"""Of these the first result alone is: the others are places, masks and counts."""

_SOLVED = frozenset({"linalg_solve_triangular", "linalg_lu_solve", "_linalg_solve_ex"})
"""Zero if the right-hand side is, ``B``."""

_SUMS = _MERGES | {"add", "sub", "rsub", "maximum", "minimum", "mse_loss", "smooth_l1_loss", "huber_loss"}
"""Zero if every tensor is, and every number that is added to them."""

_CHOICES = {
    "where": ("self", "other"),
    "scatter": ("self", "src"),
    "lerp": ("self", "end", "tensors1"),
    "index_copy": ("self", "source"),
    "masked_scatter": ("self", "source"),
    "put": ("self", "source"),
}
"""Zero if all of these are."""

_WITH_NUMBER = {"index_fill": "value", "masked_fill": "value", "constant_pad_nd": "value", "scatter": "value"}
"""Zero if the first tensor is, and this number, or the tensor in its place."""

_LIMITS = {
    "clamp": ("min", "max"),
    "clamp_min": ("min", None),
    "clamp_max": (None, "max"),
    "hardtanh": ("min_val", "max_val"),
}
"""Zero if the first tensor is, and the limits lie below and above: lower one, upper one."""

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

_ADDED_AT = {
    "index_add": "source",
    "scatter_add": "src",
    "index_put": "values",
    "_unsafe_index_put": "values",
    "_unsafe_masked_index_put_accumulate": "values",
}
"""What is added (or put) where other arguments say."""


def is_zero(part: Part, zeros: Sequence[bool]) -> Mapping[int, bool]:
    """Tell which of an operator's results are zero, given which of its tensor inputs are; -1 means all others."""
    if part.name in _FIRST_ALONE and len(part.outputs) > 1:
        return {0: _is_zero(part, zeros), -1: False}
    return {-1: _is_zero(part, zeros)}


def _is_zero(part: Part, zeros: Sequence[bool]) -> bool:
    name = part.name
    if name in _FILLED_WITH:
        return part.others.get(_FILLED_WITH[name]) == 0
    if name in ZEROS or name in SHAPE_ONLY or not part.read:
        return name in ZEROS
    if "_backward" in name or name in _LIKE_FIRST:
        return zeros[part.read[0]]  # what every backward operator takes first is a gradient, in which it is linear
    rule = _RULES.get(name)
    return rule is not None and rule(part, zeros)


def _is_zero_fill(part: Part, zeros: Sequence[bool]) -> bool:
    return _vanishes(part, "value", zeros) or part.others.get("value") == 0


def _is_zero_choice(part: Part, zeros: Sequence[bool]) -> bool:
    given = _WITH_NUMBER.get(part.name)
    if given is not None and (given in part.others or given in part.slots):
        return _vanishes(part, "self", zeros) and (_vanishes(part, given, zeros) or part.others.get(given) == 0)
    chosen = _CHOICES.get(part.name, ())
    return bool(chosen) and all(_vanishes(part, each, zeros) for each in chosen if each in part.slots)


def _is_zero_product(part: Part, zeros: Sequence[bool]) -> bool:
    summand = _WITH_PRODUCT[part.name][0]
    return _loses_product(part, zeros) and (summand not in part.slots or _vanishes(part, summand, zeros))


def _is_zero_clamp(part: Part, zeros: Sequence[bool]) -> bool:
    return zeros[part.read[0]] and all(
        _keeps_zero(part, limit, zeros, is_lower=place == 0) for place, limit in enumerate(_LIMITS[part.name]) if limit
    )


def _is_zero_sum(part: Part, zeros: Sequence[bool]) -> bool:
    added = [part.others[each] for each in ("other", "scalar", "scalars") if each in part.others]
    return all(number == 0 for number in added) and all(zeros[slot] for slot in part.read)


def _is_zero_power(part: Part, zeros: Sequence[bool]) -> bool:
    return zeros[part.read[0]] and "self" in part.slots and _is_positive(part.others.get("exponent"))


_RULES: Mapping[str, Callable[[Part, Sequence[bool]], bool]] = {
    **dict.fromkeys(_SUMS, _is_zero_sum),
    **dict.fromkeys(_LIMITS, _is_zero_clamp),
    **dict.fromkeys(_WITH_PRODUCT, _is_zero_product),
    **dict.fromkeys((*_WITH_NUMBER, *_CHOICES), _is_zero_choice),
    **dict.fromkeys(
        _ADDED_AT, lambda part, zeros: all(_vanishes(part, each, zeros) for each in ("self", _ADDED_AT[part.name]))
    ),
    **dict.fromkeys(_PRODUCTS, lambda part, zeros: any(zeros[slot] for slot in part.read)),
    **dict.fromkeys(_SOLVED, lambda part, zeros: _vanishes(part, "B", zeros)),
    "pow": _is_zero_power,
    "copy": lambda part, zeros: _vanishes(part, "src", zeros),
    "fill": _is_zero_fill,
}
"""How the operators are judged that are zero otherwise than by their first tensor."""


def _keeps_zero(part: Part, limit: str, zeros: Sequence[bool], *, is_lower: bool) -> bool:
    """Whether zero lies within a limit, which may be a tensor."""
    if limit in part.slots:
        return _vanishes(part, limit, zeros)
    number = part.others.get(limit)
    return number is None or (isinstance(number, int | float) and (number <= 0 if is_lower else number >= 0))


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and number > 0


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
