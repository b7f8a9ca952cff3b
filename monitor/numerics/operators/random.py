"""Random operators: a 63-bit key from torch's CPU generator, then a counter-based generator equal on every device.

The key advances torch's own generator state, so that saving and restoring that state (activation checkpointing)
reproduces the numbers. A session may take a step's keys from its own source, which a replay can repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.arguments import Keywords
from monitor.numerics.backend import Backend, draw_key
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.elementwise import quotient, square_root

__all__ = [
    "bernoulli",
    "bernoulli_p",
    "cauchy",
    "dirichlet",
    "dropout",
    "dropout_backward",
    "exponential",
    "gamma",
    "geometric",
    "leaky_noise",
    "log_normal",
    "multinomial",
    "normal",
    "normal_of",
    "normal_sized",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randint_like_low",
    "randint_low",
    "randn",
    "randn_like",
    "random_between",
    "random_to",
    "randperm",
    "uniform",
]

_UNIFORM_STEP = 2.0**-24


def _bits(backend: Backend, like: Tensor, generator: torch.Generator | None) -> Tensor:
    return backend.random_bits(draw_key(backend, generator), like.numel(), like).reshape(like.shape)


def uniform(
    backend: Backend, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    unit = (_bits(backend, x, generator) >> 8).to(torch.float32) * _UNIFORM_STEP
    return (unit * (high - low) + low).to(x.dtype)


def normal(
    backend: Backend, x: Tensor, centre: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    words = backend.random_bits(draw_key(backend, generator), 2 * x.numel(), x)
    radius_bits, angle_bits = (words[0::2] >> 8).to(torch.float32), (words[1::2] >> 8).to(torch.float32)
    log = backend.unary("log", (radius_bits + 1.0) * _UNIFORM_STEP)
    value = square_root(log * -2.0) * backend.unary("cos", angle_bits * (_UNIFORM_STEP * 2.0 * math.pi))
    return (value.reshape(x.shape) * std + centre).to(x.dtype)


def normal_of(
    backend: Backend, centre: Tensor | float, std: Tensor | float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    """Normal numbers, of which at least one parameter is a tensor."""
    shape = np.broadcast_shapes(*(tuple(each.shape) for each in (centre, std) if isinstance(each, Tensor)))
    (like,) = [each for each in (centre, std) if isinstance(each, Tensor)][:1]
    unit = normal(backend, torch.empty(shape, dtype=torch.float32, device=like.device), generator=generator)
    return unit * std + centre


def normal_sized(backend: Backend, centre: float, std: float, size: Sequence[int], **options: Any) -> Tensor:
    like = _empty(size, options, torch.get_default_dtype())
    return normal(backend, like, centre, std, generator=_generator(options))


_STEP_INSIDE = 2.0**-23


def _inside(backend: Backend, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in (0, 1): odd multiples of 2^-24, which FP32 holds without error."""
    return ((_bits(backend, x, generator) >> 9).to(torch.float32) + 0.5) * _STEP_INSIDE


def exponential(backend: Backend, x: Tensor, rate: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    return quotient(-backend.unary("log", _inside(backend, x, generator)), rate).to(x.dtype)


def geometric(backend: Backend, x: Tensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    """⌈log u / log(1 − p)⌉, at least 1: how many trials of probability p until the first success."""
    if not 0.0 < p < 1.0:
        raise UnsupportedOperator("aten.geometric", f"{p} is not a probability between 0 and 1")
    logs = backend.unary("log", _inside(backend, x, generator))
    below = backend.unary("log1p", torch.full((), -p, dtype=torch.float32, device=x.device))
    return torch.ceil(torch.div(logs, below)).clamp(min=1.0).to(x.dtype)


def cauchy(
    backend: Backend, x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    angle = (_inside(backend, x, generator) - 0.5) * math.pi
    return (backend.unary("tan", angle) * sigma + median).to(x.dtype)


def log_normal(
    backend: Backend, x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: torch.Generator | None = None
) -> Tensor:
    wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return backend.unary("exp", normal(backend, wide, mean, std, generator=generator)).to(x.dtype)


_MOST_TRIES = 16
"""A try of a gamma number fails with less than 0.05, so that all fail with less than 1e-20."""


def _log_gamma(backend: Backend, shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Logarithms of gamma numbers (Marsaglia and Tsang 2000): d·v with v = (1 + c·x)³, x normal, tried until one holds.

    A shape a < 1 takes a number of shape a + 1 times u^(1/a). Where all tries fail, the last one counts.
    """
    wide = torch.where(shape < 1.0, shape + 1.0, shape)
    d = wide - 1.0 / 3.0
    c = torch.div(torch.full_like(d, 1.0 / 3.0), square_root(d))
    cube, is_found = torch.ones_like(wide), torch.zeros_like(wide, dtype=torch.bool)
    for _ in range(_MOST_TRIES):
        x, u = normal(backend, wide, generator=generator), _inside(backend, wide, generator)
        root = c * x + 1.0
        v = torch.where(root > 0.0, root * root * root, torch.ones_like(root))
        most = x * x * 0.5 + (d - d * v) + d * backend.unary("log", v)
        holds = (root > 0.0) & (backend.unary("log", u) < most) & ~is_found
        cube, is_found = torch.where(holds, v, cube), is_found | holds
    power = torch.div(backend.unary("log", _inside(backend, wide, generator)), shape)
    logs = backend.unary("log", d) + backend.unary("log", cube)
    return torch.where(shape < 1.0, logs + power, logs)


def gamma(backend: Backend, shape: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Gamma numbers of these shapes and of scale 1, as ``_log_gamma`` draws them."""
    return backend.unary("exp", _log_gamma(backend, shape, generator))


def dirichlet(backend: Backend, shape: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Gamma numbers divided by their sum along the last dimension; the largest is taken out first, as in a softmax."""
    logs = _log_gamma(backend, shape, generator)
    parts = backend.unary("exp", logs - logs.amax(-1, keepdim=True))
    return torch.div(parts, backend.sum(parts, [parts.dim() - 1], True))


def leaky_noise(
    backend: Backend,
    x: Tensor,
    noise: Tensor,
    low: float = 0.125,
    high: float = 1.0 / 3.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``rrelu``: x times a number from [low, high) where x ≤ 0, kept in ``noise``; outside of training their middle."""
    if not training:
        return torch.where(x <= 0, x * torch.full_like(x, (low + high) / 2), x)
    noise.copy_(torch.where(x <= 0, uniform(backend, x, low, high, generator=generator), torch.ones_like(x)))
    return x * noise


def multinomial(
    backend: Backend, p: Tensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Places of the largest p / e with e exponential (a race, Efraimidis and Spirakis 2006), of equal ones the first.

    With replacement each draw has its own race.
    """
    p = p.to(torch.float32)
    if not bool((p.isfinite() & (p >= 0)).all()) or not bool((p.sum(-1) > 0).all()):
        raise CallerError("multinomial needs probabilities that are finite, not negative, and not all zero")
    if not replacement:
        if not bool(((p > 0).sum(-1) >= count).all()):
            raise CallerError(
                f"multinomial cannot draw {count} without replacement: fewer probabilities are above zero"
            )
        races = torch.div(p, exponential(backend, p, generator=generator))
        return torch.sort(races, dim=-1, descending=True, stable=True).indices.narrow(-1, 0, count).contiguous()
    wide = p.unsqueeze(-2).expand(*p.shape[:-1], count, p.shape[-1])
    races = torch.div(wide, exponential(backend, torch.empty_like(wide).contiguous(), generator=generator))
    return torch.sort(races, dim=-1, descending=True, stable=True).indices.select(-1, 0).contiguous()


def _below(backend: Backend, like: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    if not 0.0 <= p <= 1.0:
        raise UnsupportedOperator("aten.bernoulli", f"{p} is not a probability")
    return _bits(backend, like, generator) < math.floor(p * 2.0**32)


def bernoulli_p(backend: Backend, x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    return _below(backend, x, p, generator).to(x.dtype)


def bernoulli(backend: Backend, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return (_bits(backend, x, generator).to(torch.float64) < x.to(torch.float64) * 2.0**32).to(x.dtype)


def dropout(backend: Backend, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _below(backend, x, 1.0 - p, None)
    return _thinned(x, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0), mask


def dropout_backward(_: Backend, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _thinned(grad, mask, scale)


def _thinned(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """x times 1/(1-p) where the mask is true, else times 0, with the roundings of the operators that a CPU takes.

    Those divide 1 by 1-p in FP32 and round to x's format. A backward pass receives ``scale``, the FP64 of 1/(1-p),
    alone; its inverse can miss 1-p by one unit in the last place of FP64, which FP32 shows for one p in 2^29. A scale
    of 0 means that nothing is kept.
    """
    noise = quotient(mask.to(torch.float32), 1.0 / scale if scale else 1.0).to(x.dtype)
    return (x.to(torch.float32) * noise.to(torch.float32)).to(x.dtype)


def _integers(backend: Backend, x: Tensor, low: int, high: int, generator: torch.Generator | None) -> Tensor:
    if not 0 < high - low <= 2**31:
        raise UnsupportedOperator("aten.randint", f"{high - low} values; between 1 and 2^31 are built")
    return (((_bits(backend, x, generator) * (high - low)) >> 32) + low).to(x.dtype)


def _empty(size: Sequence[int], options: Keywords, default: torch.dtype) -> Tensor:
    return torch.empty(tuple(size), dtype=options.get("dtype") or default, device=options.get("device") or "cpu")


def _generator(options: Keywords) -> torch.Generator | None:
    return options.get("generator")


def randint(backend: Backend, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(backend, _empty(size, options, torch.int64), 0, high, _generator(options))


def randint_low(backend: Backend, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(backend, _empty(size, options, torch.int64), low, high, _generator(options))


def randint_like(backend: Backend, x: Tensor, high: int, **options: Any) -> Tensor:
    return randint_like_low(backend, x, 0, high, **options)


def randint_like_low(backend: Backend, x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    return _integers(backend, torch.empty_like(x, dtype=options.get("dtype")), low, high, None)


def random_between(
    backend: Backend, x: Tensor, low: int, high: int | None, *, generator: torch.Generator | None = None
) -> Tensor:
    if high is None:
        raise UnsupportedOperator("aten.random.from", "give both limits")
    return _integers(backend, x, low, high, generator)


def random_to(backend: Backend, x: Tensor, high: int, *, generator: torch.Generator | None = None) -> Tensor:
    return _integers(backend, x, 0, high, generator)


def rand(backend: Backend, size: Sequence[int], **options: Any) -> Tensor:
    return uniform(backend, _empty(size, options, torch.get_default_dtype()), generator=_generator(options))


def randn(backend: Backend, size: Sequence[int], **options: Any) -> Tensor:
    return normal(backend, _empty(size, options, torch.get_default_dtype()), generator=_generator(options))


def rand_like(backend: Backend, x: Tensor, **options: Any) -> Tensor:
    return uniform(backend, x.to(options.get("dtype") or x.dtype))


def randn_like(backend: Backend, x: Tensor, **options: Any) -> Tensor:
    return normal(backend, x.to(options.get("dtype") or x.dtype))


def randperm(backend: Backend, count: int, **options: Any) -> Tensor:
    like = _empty((2 * count,), options, torch.int64)
    words = backend.random_bits(draw_key(backend, _generator(options)), 2 * count, like)
    keys = ((words[0::2] >> 1) << 32) | words[1::2]
    return torch.sort(keys, stable=True).indices.to(like.dtype)
