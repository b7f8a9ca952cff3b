"""In which range each number of PyTorch's optimizers leaves a learning rate its meaning, and by what it multiplies one.

The lower ends, and those that a number may not reach, are what PyTorch's classes demand of their arguments; they do not
ask for it of parameter groups. The upper ends are where a number would do more than its rate says.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from monitor.declaration.formulas import Formula
from monitor.declaration.reference import CLASSES, IMPLEMENTATION

__all__ = ["MOST_GAIN", "RANGES", "gain_of", "least_beta", "numbers_of", "outside"]

_ANY, _SHARE, _PART, _FLAG = (0.0, math.inf, ""), (0.0, 1.0, "below"), (0.0, 1.0, ""), (0.0, 1.0, "")
RANGES: Mapping[str, tuple[float, float, str]] = {
    **dict.fromkeys(("lr", "eps", "lr_decay", "initial_accumulator_value", "momentum_decay", "t0", "ASGD.alpha"), _ANY),
    **dict.fromkeys(("momentum", "betas", "alpha", "rho"), _SHARE),
    **dict.fromkeys(("dampening", "weight_decay", "lambd"), _PART),
    **dict.fromkeys(("nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"), _FLAG),
    **dict.fromkeys(("step_sizes", "AdEMAMix.alpha", "t_alpha_beta3", "max_lr_snapshot", "step"), _ANY),
    **dict.fromkeys(("k", "r", "weight_sum", "warmup_steps", "weight_lr_power", "scheduled_lr"), _ANY),
    **dict.fromkeys(("caution", "corrected_weight_decay", "weight_decouple", "fixed_decay", "no_prox"), _FLAG),
    **dict.fromkeys(("train_mode", "use_bias_correction", "decouple", "safeguard_warmup"), _FLAG),
    "lr_max": (-1.0, math.inf, ""),
    "ns_steps": (1.0, 100.0, ""),
    "etas": (0.0, 10.0, ""),
    "beta2_decay": (-math.inf, 0.0, ""),
    "d": (1.0, math.inf, ""),
}
"""By name, or class and name: least, most, and ``below`` where the most is excluded.

A ``weight_decay`` of more than 1 would move a weight by more than the rate's share of itself.
"""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "ns_coefficients": (inspect.signature(torch.optim.Muon).parameters["ns_coefficients"].default,),
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
}
"""Numbers and names that a class may have and that a rate is to keep its meaning by."""
_NONE = frozenset(
    {"Adafactor.eps", "AdEMAMix.t_alpha_beta3", "AdEMAMix.step", "Adan.step", "LionByLerp.max_lr_snapshot"}
)
"""What may be None: then a class takes its own default, or none."""
_Gain = Callable[[Mapping[str, Any]], float]


def _gain_of_average(hyper: Mapping[str, Any]) -> float:
    alpha = hyper.get("alpha", 0.0)
    spread = (1.0 - alpha) * (alpha if hyper.get("centered") else 1.0)
    return float(1.0 / ((1.0 - hyper["momentum"]) * math.sqrt(spread)))


_GAINS: Mapping[str, _Gain] = {
    **dict.fromkeys(("AdEMAMix", "Adan"), lambda _: math.inf),
    **dict.fromkeys(("Lion", "LionByLerp", "ScheduleFreeSGD"), lambda _: 1.0),
    **dict.fromkeys(("SGD", "RMSprop"), _gain_of_average),
    "Muon": lambda _: 1.3,
    "ScheduleFreeAdamW": lambda hyper: 1.0 / math.sqrt(1.0 - hyper["betas"][1]),
    "Adafactor": lambda hyper: hyper["d"] * max(1.0, hyper["eps"][1]),
    "Rprop": lambda hyper: max(1.0, hyper["step_sizes"][1] / hyper["lr"]),
    "Adadelta": lambda hyper: max(1.0, math.sqrt(hyper["eps"] / (1.0 - hyper["rho"]))),
}
"""``gain_of`` of the classes that have a formula of their numbers but Adam and its kin."""
MOST_GAIN = 1000.0
"""A gain from here on makes a rate say nothing."""


def numbers_of(kind: type[Optimizer]) -> frozenset[str]:
    """Names of what a class takes in addition to weights."""
    return kind.NUMBERS if issubclass(kind, Formula) else frozenset(inspect.signature(kind).parameters) - {"params"}


def least_beta(groups: Iterable[Mapping[str, Any]]) -> float | None:
    """The least first beta that a parameter group has in any step; None where it has none."""
    betas = (each.get("betas") for each in groups)
    found = [each[0] for each in betas if isinstance(each, list | tuple) and each]
    return min((each for each in found if isinstance(each, float | int)), default=None)


def gain_of(optimizer: str, hyper: Mapping[str, Any], least: float | None = None) -> float | None:
    """By what the other numbers multiply a group's rate at most; None for a class that is not known.

    Of plain classes it is the change of a weight by gradients of size 1, over the rate: 1 / (1 - momentum) of SGD. Of
    those that divide by the size of the gradients it is the change by any gradients, over the rate: that of Adam by
    Cauchy and Schwarz, finite where beta1^2 < beta2 (Reddi et al. 2018, Zhang et al. 2022), and that of RMSprop by one
    gradient after none. What Adadelta adds up from its own changes is left out, and so are RAdam's first steps, which
    are plain. Muon changes a weight by a nearly orthogonal matrix, whose elements are below 1.3 with its own
    coefficients; the factor that it takes from the weight's shape is left out. Adafactor changes a weight, as its root
    mean square has it, by ``d`` times the weight's own, or times its second ``eps`` where that is more. Rprop's step
    grows up to its largest step size from wherever it begins. Of packages, Lion takes a gradient's sign, and
    schedule-free AdamW divides one by no less than what that adds; AdEMAMix and Adan have no such bound.

    Adam and its kin divide their average by what one beta1 would have added up, 1 - beta1^t. Where others were taken
    before, a gradient's share in it is up to (1 - ``least``) / (1 - beta1) times as much, and so is the change.

    Args:
        least: the least first beta that the group has in any step.
    """
    if optimizer not in CLASSES:
        return None
    name = CLASSES[optimizer].__name__
    try:
        if name in _GAINS:
            return float(_GAINS[name](hyper))
        if "betas" not in hyper:
            return 1.0
        first, second = hyper["betas"]
        ratio, more = first / second if first else 0.0, 1.0 if least is None else (1.0 - least) / (1.0 - first)
        if name == "Adamax":
            return float(more * (1.0 - first) / (1.0 - ratio)) if ratio < 1.0 else math.inf
        most = (1.0 - first) / math.sqrt((1.0 - second) * (1.0 - first * ratio))
        return float(more * max(1.0, most + (1.0 / math.sqrt(1.0 - second) if name == "NAdam" else 0.0)))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return math.inf


def outside(optimizer: str, hyper: Mapping[str, Any], beta: float | None = None) -> dict[str, str]:
    """The numbers of a group, and their ``gain``, that lie outside of their ranges, each with that in words.

    Of a class that is not known, and of numbers that a class does not take, nothing is said.

    Args:
        beta: the least first one that the group has in any step, as for ``gain_of``.
    """
    found: dict[str, str] = {}
    kind = CLASSES.get(optimizer)
    if kind is None:
        return found
    for name in sorted((hyper.keys() - IMPLEMENTATION) & numbers_of(kind)):
        value = hyper[name]
        if name in _FIXED:
            given = tuple(value) if isinstance(value, list | tuple) else value
            if given not in _FIXED[name]:
                found[name] = f"is {ascii(value)[:60]}, which is none of PyTorch's own"
            continue
        least, most, end = RANGES.get(f"{kind.__name__}.{name}") or RANGES.get(name, (1.0, 0.0, ""))
        for part in value if isinstance(value, list | tuple) else [value]:
            if part is None and f"{kind.__name__}.{name}" in _NONE:
                continue
            if not isinstance(part, float | int) or not least <= part <= most or (end and part == most):
                found[name] = f"is {ascii(value)[:60]}, outside of {least:g} … {f'{end} ' * bool(end)}{most:g}"
    gain = gain_of(optimizer, hyper, beta)
    if not found and gain is not None and not gain < MOST_GAIN:
        found["gain"] = f"is {gain:.4g}, not below {MOST_GAIN:g}"
    return found
