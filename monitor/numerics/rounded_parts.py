"""One element under ``rounded`` numerics, from equal parts of what it is summed over.

A sum adds multiples of a quantum that the largest addend and their number give (``rounding.sums``), and rounds nothing
else. A product of two FP32 numbers is a whole number times a power of two, so the parties sum these exactly, whatever
their devices do: no part needs a share of the error bound. The combined numbers give the element's true value, its
bound β and with the log's entry its bits. Maxima: magnitudes and lowest bits of row and column, and whether a product
is NaN or infinite. Sums: the product, and the squares that bound the norms (``norms.quantised_squares``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.declared import bound_of, groups_in, written
from monitor.numerics.engines.eager.rounded.norms import root_above
from monitor.numerics.engines.eager.rounded.result_bounds import ProductBound
from monitor.numerics.errors import LogContradiction
from monitor.numerics.operators import partial_sums
from monitor.numerics.operators.partial_sums import Part, Parted, Values, exact_sum, magnitudes, split
from monitor.numerics.operators.reductions import norm_scale
from monitor.numerics.operators.tiles import TileCall, Untiled
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.rounding.bounds import Formats
from monitor.numerics.statistics import Statistics

__all__ = ["parted_product", "parted_sum"]

_UNIT = 172
_FORMATS = Formats()
_LOWEST, _SMALLEST = 512, -160
"""What a lowest bit is subtracted from; the exponent below which a norm's scale does not go."""


def parted_product(call: TileCall, slot: int, place: int, declared: str, entries: bytes) -> Parted:
    """As ``partial_sums.product``, whose value follows the entry of the element, if there is one.

    Args:
        entries: what a log says of the call, as of call 0.
    """
    exact = partial_sums.product(call, slot, place)
    size = math.prod(call.shapes[slot])
    said = [each for each in groups_in(declared, entries, 0) if each.part == 0]
    if any(each.size != size for each in said):
        raise Untiled("the log counts other elements")
    own = [
        replace(each, size=1, positions=np.array([0]), upward=each.upward[each.positions == place])
        for each in said
        if place in each.positions
    ]
    log = written(declared, own)

    def settled(whole: Part, *, is_checked: bool) -> tuple[Tensor, int]:
        bound, statistics = replace(bound_of(declared), check=is_checked, is_referee=is_checked), Statistics()
        backend = _Summed(_FORMATS, bound, statistics, log)
        backend.take(whole, exact.terms)
        backend.begin_call(0, str(call.func))
        return partial_sums.product_of(backend, call, slot, place), statistics.open

    def is_lawful(whole: Part) -> bool | None:
        try:
            return None if settled(whole, is_checked=True)[1] else True
        except LogContradiction:
            return False

    return replace(
        exact,
        most=_most,
        sums=_sums,
        value=lambda whole: settled(whole, is_checked=False)[0],
        is_lawful=is_lawful,
        widths=(7, 3),
    )


def parted_sum(exact: Parted, *, is_norm: bool) -> Parted:
    """A reduction under ``exact`` numerics as one of multiples of quanta.

    Args:
        is_norm: it adds squares, of which the largest follows from the largest element.
    """
    flags, count = exact.widths

    def squares(x: Tensor, most: tuple[int, ...]) -> Tensor:
        small = torch.div(x, norm_scale(partial_sums.number_of(most[0])))
        return small * small

    def quanta(most: tuple[int, ...]) -> list[int]:
        """Exponents of the quanta."""
        tops = [partial_sums.number_of(bits) for bits in most[-count:]]
        largest = [float(squares(each, most) if is_norm else each) for each in tops]
        width = max((exact.terms - 1).bit_length(), 2)
        return [math.frexp(each)[1] - 1 + width - 52 if 0 < each < math.inf else 0 for each in largest]

    def sums(values: Values, most: tuple[int, ...]) -> tuple[int, ...]:
        found = []
        for x, quantum, top in zip(values, quanta(most), most[-count:], strict=True):
            if top >= partial_sums.INFINITE:  # flags say what that adds up to
                found.append(0)
                continue
            addends = (squares(x, most) if is_norm else x).numpy().astype(np.float64)
            found.append(int(np.rint(np.ldexp(addends, -quantum)).astype(np.int64).sum()))
        return tuple(found)

    def value(whole: Part) -> Tensor:
        shifts = [quantum + _UNIT for quantum in quanta(whole.most)]
        totals = [each << at if at >= 0 else each >> -at for each, at in zip(whole.sums, shifts, strict=True)]
        return exact.value(Part(whole.most[:flags], tuple(totals)))

    def most(values: Values) -> tuple[int, ...]:
        return exact.most(values) if is_norm else (*exact.most(values), *magnitudes(values))

    return replace(exact, most=most, sums=sums, value=value, widths=(flags if is_norm else flags + count, count))


def _most(values: Values) -> tuple[int, ...]:
    products = values[0].to(torch.float64) * values[1].to(torch.float64)
    lows = [_LOWEST - _lowest_bit(each) if bool((each[each.isfinite()] != 0).any()) else 0 for each in values]
    return *magnitudes(values), *lows, *partial_sums.flags((products,))


def _lowest_bit(x: Tensor) -> int:
    """Exponent of the lowest bit that is set in any element."""
    numbers, exponents = split(x[x.isfinite() & (x != 0)])
    isolated = numbers & -numbers
    return int((exponents - 24 + np.frexp(isolated.astype(np.float64))[1] - 1).min())


def _sums(values: Values, most: tuple[int, ...]) -> tuple[int, ...]:
    if any(most[4:]):
        return (0,) * 3
    (a, e), (b, f) = (split(torch.where(each.isfinite(), each, 0.0)) for each in values)
    squares = []
    for x, top in zip(values, most[:2], strict=True):
        units = np.ceil(np.ldexp(np.abs(x.numpy().astype(np.float64)), 14 - _exponent(top)))
        squares.append(int(np.where(np.isfinite(units), units * units, 0).astype(np.int64).sum()))
    return exact_sum(a * b, e + f + 2 * (_UNIT - 24)), *squares


def _exponent(top: int) -> int:
    """⌊log2⌋ of the magnitude with these bits, from the smallest that counts."""
    magnitude = float(partial_sums.number_of(top))
    finite = math.isfinite(magnitude) and magnitude > 0
    return max(math.frexp(magnitude)[1] - 1, _SMALLEST) if finite else _SMALLEST


class _Summed(RoundedBackend):
    """Has the sum of the only element of a product."""

    def take(self, whole: Part, terms: int) -> None:
        """Use these combined numbers."""
        self._whole, self._terms = whole, terms

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """The element, (1, 1), rounded as its log says."""
        value = self._value()
        found = torch.tensor([[value]], dtype=torch.float64)
        return self._sums(
            "product", self._terms, tiles=None, whole=lambda: found, bound=self._bounds, value=lambda *_: value
        )

    def _value(self) -> float:
        nan, high, low = self._whole.most[4:]
        if nan or high or low:
            return math.nan if nan or (high and low) else math.inf if high else -math.inf
        try:
            return float(Fraction(self._whole.sums[0], 1 << 2 * _UNIT))
        except OverflowError:  # what no product is
            return math.nan

    def _bounds(self, factor: float, exact_bits: int) -> ProductBound:
        def norm(number: int) -> Tensor:
            total = torch.tensor(float(min(max(self._whole.sums[1 + number], 0), 1 << 54)), dtype=torch.float64)
            return root_above(total) * 2.0 ** (_exponent(self._whole.most[number]) - 14)

        def span(number: int) -> Tensor:
            top, low = self._whole.most[number], self._whole.most[2 + number]
            return torch.tensor(_exponent(top) - (_LOWEST - low) + 1 if low else 0)

        return ProductBound(
            left=(norm(0) * factor).reshape(1),
            right=norm(1).reshape(1, 1),
            left_spans=span(0).reshape(1),
            right_spans=span(1).reshape(1, 1),
            rows_per_right=1,
            exact_bits=exact_bits,
        )
