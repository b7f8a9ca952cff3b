"""The ``rounded`` backend: compute in a wider format, round to the grid, log or obey the ambiguous decisions.

A recorder logs each element that lies within 4β of a midpoint of the grid; a replayer obeys the log there. β is the
operator's error bound (``rounding.bounds``), and ``rounding.log_rules`` judges what a log says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from monitor.numerics import exact
from monitor.numerics.engines import engine_of
from monitor.numerics.engines.eager.rounded import convolution
from monitor.numerics.engines.eager.rounded.functions import FUNCTIONS, STEEP
from monitor.numerics.engines.eager.rounded.result_bounds import (
    ProductBound,
    RelativeBound,
    exact_bits_of,
    product_bound,
)
from monitor.numerics.engines.eager.rounded.rounding_rule import decide, round_to_grid
from monitor.numerics.engines.engine import Tiles
from monitor.numerics.engines.results import Near, Rounding, Settled
from monitor.numerics.errors import LogContradiction
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.kernels.arrays import array
from monitor.numerics.rounding import codec, elements
from monitor.numerics.rounding.bounds import Bound, Formats
from monitor.numerics.rounding.calibration import Operator
from monitor.numerics.rounding.log_rules import Judge, Work
from monitor.numerics.rounding.sums import order_free_scatter, order_free_sum
from monitor.numerics.statistics import Statistics

__all__ = ["RoundedBackend"]


class RoundedBackend:
    """Srivastava 2024, Alg. 4, with error bounds in place of a threshold, over order-sensitive operators only."""

    def __init__(
        self,
        formats: Formats,
        bound: Bound,
        statistics: Statistics,
        log: bytes | None,
        keys: Callable[[], int] | None = None,
    ) -> None:
        self.keys = keys
        self._formats = formats
        self._bound = bound
        self._statistics = statistics
        self._groups: list[codec.Group] = []
        self._replay = log is not None
        self._expected: dict[tuple[int, int], codec.Group] = {}
        if log is not None:
            self._expected = {(group.call, group.part): group for group in codec.decode(log, formats, bound)}
        self._part = 0
        self._judge = Judge(bound, formats.grid_bits, statistics)
        self._wide = torch.float64 if formats.compute == "float64" else torch.float32

    def begin_call(self, index: int, operator: str) -> None:
        """Entries that follow carry this call index, and those of a call of that index that failed are dropped."""
        while self._groups and self._groups[-1].call >= index:
            self._groups.pop()
        self._part = 0
        self._judge.call, self._judge.operator = index, operator

    def log(self) -> bytes:
        """The canonical log of what was recorded or obeyed."""
        return codec.encode(self._groups, self._formats, self._bound)

    def log_of(self, call: int) -> bytes:
        """The log of one ATen call alone, renumbered as call 0."""
        own = (
            codec.Group(call=0, part=g.part, size=g.size, positions=g.positions, upward=g.upward)
            for g in self._groups
            if g.call == call
        )
        return codec.encode(own, self._formats, self._bound)

    def finish(self) -> None:
        """Every entry was used.

        Raises:
            LogContradiction: an entry belongs to no rounding of this step.
        """
        for (call, part), group in self._expected.items():
            if not self._bound.check:
                break
            raise LogContradiction(
                call=call,
                operator="",
                part=part,
                element=int(group.positions[0]),
                size=group.size,
                rule=f"entry for sub-operation {part}, which rounds nothing in this step",
            )

    def _rounding(self, *, terms: int = 0, relative: float = 0.0) -> Rounding:
        """A recorder lists what lies within 4β; a replayer needs all that an entry may name."""
        return Rounding(
            multiple=6.0 if self._replay else 4.0,
            grid_bits=self._formats.grid_bits,
            exact_bits=exact_bits_of(terms, self._formats.compute) if terms else -1,
            relative=relative,
        )

    def tiles_for(self, x: Tensor, shape: ConvolutionShape | None = None) -> Tiles | None:
        """What rounds tile by tile there, and has convolutions of that shape; None where results are rounded whole."""
        tiles = engine_of(x.device).tiles if self._wide == torch.float64 else None
        return tiles if tiles is None or shape is None or tiles.has(shape) else None

    def round_whole(self, v: Tensor, error: ProductBound | RelativeBound, rounding: Rounding) -> Settled:
        """Round one result in eager PyTorch, on any device."""
        v = v.to(torch.float64).contiguous()
        out, near, up = round_to_grid(v, error.dense(v), rounding.grid_bits, rounding.multiple)
        values = v.reshape(-1)[near]
        betas = error.at(near, values)
        listed = Near(
            positions=array(near.cpu()),
            upward=array(up.cpu()),
            values=array(values.cpu()),
            betas=array(betas.cpu()),
            distances=array(decide(values, betas, rounding.grid_bits).distance.cpu()),
        )
        return Settled(out=out, near=listed)

    def _conclude(self, settled: Settled, work: Work) -> Tensor:
        """Log one rounded result's ambiguous elements, or follow the log."""
        part, self._part = self._part, self._part + 1
        near, out, size = settled.near, settled.out, settled.out.numel()
        self._judge.part, self._judge.size = part, size
        group: codec.Group | None = None
        call = self._judge.call
        if self._replay:
            group = self._expected.pop((call, part), None)
            if group is not None and group.size != size:
                rule = f"the log counts {group.size} elements of sub-operation {part}; there are {size}"
                raise LogContradiction(call=call, operator=self._judge.operator, part=part, element=None, rule=rule)
            if group is not None or len(near.positions):
                out = self._judge.obey(settled, group, work)
        elif len(near.positions):
            group = codec.Group(call=call, part=part, size=size, positions=near.positions, upward=near.upward)
        if group is not None:
            self._groups.append(group)
        self._statistics.rounded(self._judge.operator, size, 0 if group is None else len(group.positions))
        return out

    def _widen(self, x: Tensor) -> Tensor:
        return x.to(self._wide)

    def _sums(
        self,
        kind: Operator,
        terms: int,
        *,
        tiles: Callable[[float, Rounding], Settled] | None,
        whole: Callable[[], Tensor],
        bound: Callable[[float, int], ProductBound],
        value: Callable[[tuple[int, ...], int], float],
    ) -> Tensor:
        """Sums of ``terms`` products each, rounded; β = c(terms)·‖row‖·‖column‖.

        Args:
            tiles: computes and rounds tile by tile, given c and the rounding; None where ``whole`` must serve.
            whole: the result in the compute format.
            bound: β of every element, given c and the bits of sums that are exact.
            value: the element at a flat position of a result of some shape, correctly rounded to FP64.
        """
        factor = self._bound.of_products(terms, self._formats, kind)
        rounding = self._rounding(terms=max(terms, 1))
        bounds = functools.cache(lambda: bound(factor, rounding.exact_bits))
        settled = self.round_whole(whole(), bounds(), rounding) if tiles is None else tiles(factor, rounding)
        shape = tuple(settled.out.shape)
        work = Work(
            value=lambda i: value(shape, i),
            whole=whole,
            bound=bounds,
            kind=kind,
            terms=terms,
            worst=self._bound.worst_ratio(terms, self._formats, kind),
        )
        return self._conclude(settled, work)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product in the compute format."""
        tiles = self.tiles_for(a)
        return self._sums(
            "product",
            a.shape[-1],
            tiles=None if tiles is None else functools.partial(tiles.multiply, a, b),
            whole=lambda: torch.matmul(self._widen(a), self._widen(b)),
            bound=lambda *how: product_bound(a, b, *how),
            value=lambda _, i: elements.of_product(a, b, i),
        )

    def sum(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        """Exact in any order, so nothing is logged."""
        return order_free_sum(x, dims, keepdim)

    def scatter_rows(self, rows: int, index: Tensor, source: Tensor) -> Tensor:
        """Exact in any order, so nothing is logged."""
        return order_free_scatter(rows, index, source)

    def unary(self, name: str, x: Tensor) -> Tensor:
        """The device library's function in the compute format, within 8 ulp of the truth.

        What is not in ``FUNCTIONS``, such as log Γ, is correctly rounded and needs no log.
        """
        if name not in FUNCTIONS:
            return exact.unary(name, x)
        return self._function(FUNCTIONS[name], x, magnified=64.0 if name in STEEP else 1.0)

    def power(self, x: Tensor, y: Tensor | float) -> Tensor:
        """The device library's pow in the compute format."""
        if isinstance(y, Tensor):
            shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
            return self._function(torch.pow, x.expand(shape).contiguous(), y.expand(shape).contiguous())
        return self._function(lambda wide: torch.pow(wide, y), x)

    def _function(self, function: Callable[..., Tensor], *operands: Tensor, magnified: float = 1.0) -> Tensor:
        """Of operands of one shape, element by element."""
        relative = self._bound.of_functions(self._formats) * magnified
        rounding = self._rounding(relative=relative)

        def value(i: int) -> float:
            return float(function(*(self._widen(each.reshape(-1)[i : i + 1]) for each in operands)).item())

        def whole() -> Tensor:
            return function(*map(self._widen, operands))

        bound = RelativeBound(factor=relative)
        tiles = self.tiles_for(operands[0]) if len(operands) == 1 else None
        settled = tiles.apply(function, *operands, rounding) if tiles else self.round_whole(whole(), bound, rounding)
        return self._conclude(settled, Work(value=value, whole=whole, bound=lambda: bound))

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        """Cross-correlation in the compute format: patches by filters."""
        tiles = self.tiles_for(x, shape)
        return self._sums(
            "convolution",
            weight[0].numel(),
            tiles=None if tiles is None else functools.partial(tiles.forward, x, weight, shape),
            whole=lambda: convolution.forward(self._widen(x), self._widen(weight), shape),
            bound=lambda *how: convolution.forward_bound(x, weight, shape, *how),
            value=lambda size, i: elements.of_convolution(x, weight, size, shape, i),
        )

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        """Transposed cross-correlation in the compute format."""
        tiles, task = self.tiles_for(grad, shape), (grad, x_shape, weight, shape)
        return self._sums(
            "grad-input",
            weight[:, 0].numel() // shape.groups,
            tiles=None if tiles is None else functools.partial(tiles.grad_input, *task),
            whole=lambda: convolution.grad_input(self._widen(grad), x_shape, self._widen(weight), shape),
            bound=lambda *how: convolution.grad_input_bound(*task, *how),
            value=lambda _, i: elements.of_grad_input(*task, i),
        )

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        """Sum over samples and places in the compute format."""
        tiles, task = self.tiles_for(grad, shape), (grad, x, weight_shape, shape)
        return self._sums(
            "grad-weight",
            grad[:, 0].numel(),
            tiles=None if tiles is None else functools.partial(tiles.grad_weight, *task),
            whole=lambda: convolution.grad_weight(self._widen(grad), self._widen(x), weight_shape, shape),
            bound=lambda *how: convolution.grad_weight_bound(*task, *how),
            value=lambda _, i: elements.of_grad_weight(*task, i),
        )

    def random_bits(self, seed: int, count: int, like: Tensor) -> Tensor:
        """Philox4x32-10."""
        return exact.philox.bits(seed, 0, count, like.device)
