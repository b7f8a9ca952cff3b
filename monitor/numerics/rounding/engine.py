"""The ``rounded`` backend: compute in a wider format, round to the grid, log or obey the ambiguous decisions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError

from .. import exact
from .._backend import ConvolutionShape
from ..errors import LogContradiction
from ..statistics import Statistics
from . import codec, convolution
from ._fast import settle
from .bounds import ProductBound, RelativeBound
from .grid import decide, place, round_to_grid
from .norms import norms
from .policy import Bound, Policy
from .sums import order_free_scatter, order_free_sum

__all__ = ["RoundedBackend"]

_ROOT_HALF = math.sqrt(0.5)
_STEEP = frozenset(("gelu", "gelu_tanh"))
"""Where the argument's own rounding is magnified, by x² or by twice the exponent: 64 times the usual bound."""


def _gelu_exponent(x: Tensor) -> Tensor:
    """0.5·(1 + tanh y) = 1/(1 + exp(−2y))."""
    return (x + (x * x * x) * 0.044715) * (-2.0 * math.sqrt(2.0 / math.pi))


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
    "rsqrt": lambda x: 1.0 / torch.sqrt(x),
    "silu": lambda x: torch.where(x < -1000.0, -0.0, x / (1.0 + torch.exp(-x))),
    "gelu": lambda x: torch.where(x < -40.0, -0.0, (x * 0.5) * torch.erfc(x * -_ROOT_HALF)),
    "gelu_tanh": lambda x: torch.where(x < -40.0, -0.0, x / (1.0 + torch.exp(_gelu_exponent(x)))),
    "sin": torch.sin,
    "cos": torch.cos,
}


class RoundedBackend:
    """Srivastava 2024, Alg. 4, with error bounds in place of a threshold, over order-sensitive operators only."""

    def __init__(self, policy: Policy, bound: Bound, statistics: Statistics, log: bytes | None) -> None:
        self._policy = policy
        self._bound = bound
        self._statistics = statistics
        self._groups: list[codec.Group] = []
        self._replay = log is not None
        self._expected: dict[tuple[int, int], codec.Group] = {}
        if log is not None:
            self._expected = {(group.call, group.part): group for group in codec.decode(log, policy, bound)}
        self._call = -1
        self._part = 0
        self._operator = ""
        self._wide = torch.float64 if policy.compute == "float64" else torch.float32

    def begin_call(self, index: int, operator: str) -> None:
        """Entries that follow carry this call index."""
        self._call, self._part, self._operator = index, 0, operator

    def log(self) -> bytes:
        """The canonical log of what was recorded or obeyed."""
        return codec.encode(self._groups, self._policy, self._bound)

    def log_of(self, call: int) -> bytes:
        """The log of one ATen call alone, renumbered as call 0."""
        own = (
            codec.Group(call=0, part=g.part, size=g.size, positions=g.positions, upward=g.upward)
            for g in self._groups
            if g.call == call
        )
        return codec.encode(own, self._policy, self._bound)

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
                element=int(group.positions[0]),
                rule=f"entry for sub-operation {part}, which rounds nothing in this step",
            )

    def _settle(self, v: Tensor, error: ProductBound | RelativeBound) -> Tensor:
        """Round one result, given how far from the truth its elements may lie."""
        bits = self._policy.grid_bits
        v = v.to(torch.float64).contiguous()
        part, self._part = self._part, self._part + 1
        multiple = 2.0 if self._replay else 4.0
        if v.device.type == "cpu":
            out, near, up = settle(v, error, bits, multiple)
        else:
            out, near, up = round_to_grid(v, error.dense(v), bits, multiple)
        positions, upward = near.cpu().numpy(), up.cpu().numpy()
        if self._replay:
            group = self._expected.pop((self._call, part), None)
            out = self._obey(group, part, v, error, out, positions)
        elif len(positions):
            group = codec.Group(call=self._call, part=part, size=v.numel(), positions=positions, upward=upward)
        else:
            group = None
        if group is not None:
            self._groups.append(group)
        self._statistics.rounded(self._operator, v.numel(), 0 if group is None else len(group.positions))
        return out

    def _contradiction(self, element: int, rule: str) -> None:
        """Count a broken rule or raise it, as the bound says."""
        if not self._bound.check:
            return
        if self._statistics.contradictions >= self._bound.contradictions:
            raise LogContradiction(call=self._call, operator=self._operator, element=element, rule=rule)
        self._statistics.contradictions += 1

    def _obey(
        self,
        group: codec.Group | None,
        part: int,
        v: Tensor,
        error: ProductBound | RelativeBound,
        out: Tensor,
        mandatory: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> Tensor:
        """Follow the entries of one result after checking that each had a choice (DESIGN: the 2β and 6β rules)."""
        known = np.empty(0, dtype=np.int64) if group is None else group.positions
        if group is not None and group.size != v.numel():
            raise EvidenceError(
                f"rounding log counts {group.size} elements at call {self._call} ({self._operator}), "
                f"sub-operation {part}; there are {v.numel()}"
            )
        for element in np.setdiff1d(mandatory, known, assume_unique=True):
            self._contradiction(int(element), "no entry, although the value lies within 2β of a midpoint")
        if group is None:
            return out
        at = torch.from_numpy(group.positions).to(v.device)
        chosen = torch.from_numpy(group.upward).to(v.device)
        value = v.reshape(-1)[at]
        finite = value.isfinite()
        decisions = decide(
            torch.where(finite, value, torch.zeros_like(value)),
            error.at(at, value),
            self._policy.grid_bits,
        )
        other = chosen != decisions.up
        bad = ~(decisions.within(6.0) & finite)
        for element in group.positions[bad.cpu().numpy()]:
            self._contradiction(int(element), "entry where the value is exact or further than 6β from a midpoint")
        worse = other & ~decisions.within(2.0) & ~bad
        for element in group.positions[worse.cpu().numpy()]:
            self._contradiction(int(element), "entry against a value further than 2β from its midpoint")
        self._statistics.forced += int(other.sum())
        flat = out.reshape(-1).clone()
        flat[at] = torch.where(finite, place(value, decisions, chosen), flat[at])
        return flat.reshape(out.shape)

    def _widen(self, x: Tensor) -> Tensor:
        return x.to(self._wide)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product in the compute format; β = c(K)·‖row‖·‖column‖."""
        factor = self._bound.of_products(a.shape[-1], self._policy)
        v = torch.matmul(self._widen(a), self._widen(b))
        columns = norms(b, -2)
        error = ProductBound(
            left=(norms(a, -1) * factor).reshape(-1),
            right=columns.reshape(-1, columns.shape[-1]),
            rows_per_right=max(a.shape[-2], 1),
        )
        return self._settle(v, error)

    def sum(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        """Exact in any order, so nothing is logged."""
        return order_free_sum(x, dims, keepdim)

    def scatter_rows(self, rows: int, index: Tensor, source: Tensor) -> Tensor:
        """Exact in any order, so nothing is logged."""
        return order_free_scatter(rows, index, source)

    def unary(self, name: str, x: Tensor) -> Tensor:
        """The device library's function in the compute format, within 8 ulp of the truth."""
        return self._settle_function(_FUNCTIONS[name](self._widen(x)), 64.0 if name in _STEEP else 1.0)

    def power(self, x: Tensor, y: float) -> Tensor:
        """The device library's pow in the compute format."""
        return self._settle_function(torch.pow(self._widen(x), y), 1.0)

    def _settle_function(self, v: Tensor, magnified: float) -> Tensor:
        return self._settle(v, RelativeBound(factor=self._bound.of_functions(self._policy) * magnified))

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        """Cross-correlation in the compute format; β from patch and filter norms."""
        v = convolution.forward(self._widen(x), self._widen(weight), shape)
        factor = self._bound.of_products(weight[0].numel(), self._policy)
        return self._settle(v, convolution.forward_bound(x, weight, shape, factor))

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        """Transposed cross-correlation in the compute format."""
        v = convolution.grad_input(self._widen(grad), x_shape, self._widen(weight), shape)
        terms = weight[:, 0].numel() // shape.groups
        factor = self._bound.of_products(terms, self._policy)
        return self._settle(v, convolution.grad_input_bound(grad, x_shape, weight, shape, factor))

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        """Sum over samples and places in the compute format."""
        v = convolution.grad_weight(self._widen(grad), self._widen(x), weight_shape, shape)
        factor = self._bound.of_products(grad[:, 0].numel(), self._policy)
        return self._settle(v, convolution.grad_weight_bound(grad, x, weight_shape, shape, factor))

    def random_bits(self, seed: int, count: int, like: Tensor) -> Tensor:
        """Philox4x32-10."""
        return exact.philox.bits(seed, 0, count, like.device)
