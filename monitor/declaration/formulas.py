"""Updates of optimizers that packages bring, as the calls that these make: what their declared numbers are bound to.

Each is written after its paper and takes one operator after the other as the package does, on PyTorch's own tensors. A
package may take others in another version, or by a setting that is in no parameter group: then its update differs
from the one here, and its numbers are not bound.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FORMULAS", "Formula"]

Group = dict[str, Any]


class Formula(Optimizer):
    """An optimizer of a package.

    Attributes:
        NUMBERS: names of what its parameter groups hold.
        KEPT: those among them that its steps change themselves, such as a count of these.
    """

    NUMBERS: ClassVar[frozenset[str]] = frozenset()
    KEPT: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, params: Sequence[Group]) -> None:
        super().__init__(params, dict.fromkeys(self.NUMBERS))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the weights that have gradients."""
        for group in self.param_groups:
            self.update(group, [weight for weight in group["params"] if weight.grad is not None])

    @abstractmethod
    def update(self, group: Group, weights: list[Tensor]) -> None:
        """Update these weights of a group."""

    def slots(self, weight: Tensor, names: str, make: Callable[[Tensor], Tensor] = torch.zeros_like) -> list[Tensor]:
        """What is kept of a weight, made where it is not there yet."""
        state = self.state[weight]
        for name in names.split():
            if name not in state:
                state[name] = make(weight)
        return [state[name] for name in names.split()]


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, memory_format=torch.preserve_format)


def _copy(weight: Tensor) -> Tensor:
    return torch.clone(weight, memory_format=torch.preserve_format)


class Lion(Formula):
    """Lion (Chen et al. 2023, algorithm 2), as ``lion_pytorch`` 0.2 has it."""

    NUMBERS = frozenset({"lr", "betas", "weight_decay"})

    def update(self, group: Group, weights: list[Tensor]) -> None:
        (first, second), rate = group["betas"], group["lr"]
        for weight in weights:
            (average,), grad = self.slots(weight, "exp_avg"), cast(Tensor, weight.grad)
            weight.data.mul_(1.0 - rate * group["weight_decay"])
            change = average.clone().mul_(first).add(grad, alpha=1.0 - first).sgn_()
            weight.add_(change, alpha=-rate)
            average.mul_(second).add_(grad, alpha=1.0 - second)


class LionByLerp(Formula):
    """Lion as ``timm`` 1.0 has it, without ``caution`` and ``corrected_weight_decay``."""

    NUMBERS = frozenset(
        ["lr", "betas", "weight_decay", "caution", "corrected_weight_decay", "max_lr_snapshot", "foreach", "maximize"]
    )

    def update(self, group: Group, weights: list[Tensor]) -> None:
        (first, second), rate = group["betas"], group["lr"]
        factor = 1 - rate * group["weight_decay"]
        averages = [self.slots(weight, "exp_avg", _zeros)[0] for weight in weights]
        if group["caution"] or group["corrected_weight_decay"]:
            raise ValueError("caution and corrected_weight_decay are not supported here")
        if group["foreach"] and weights:
            grads: Any = [weight.grad for weight in weights]
            grads = torch._foreach_neg(grads) if group["maximize"] else grads
            torch._foreach_mul_(weights, factor)
            changes = [each.sign_() for each in torch._foreach_lerp(averages, grads, 1 - first)]
            torch._foreach_add_(weights, changes, alpha=-rate)
            torch._foreach_lerp_(averages, grads, 1 - second)
            return
        for weight, average in zip(weights, averages, strict=True):
            grad: Any = -weight.grad if group["maximize"] else weight.grad  # type: ignore[operator]
            weight.mul_(factor)
            weight.add_(average.lerp(grad, 1 - first).sign_(), alpha=-rate)
            average.lerp_(grad, 1 - second)


class _ScheduleFree(Formula):
    """Schedule-free optimizers (Defazio et al. 2024, equations 2 to 4 and 23), as ``schedulefree`` 1.4 has them."""

    KEPT = frozenset({"k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"})
    BOTH = KEPT | {"lr", "r", "warmup_steps", "weight_lr_power", "weight_decay", "foreach"}

    def update(self, group: Group, weights: list[Tensor]) -> None:
        count, warmup = group["k"], group["warmup_steps"]
        rate = group["lr"] * ((count + 1) / warmup if count < warmup else 1.0)
        group["scheduled_lr"], group["lr_max"] = rate, max(rate, group["lr_max"])
        share = ((count + 1) ** group["r"]) * (group["lr_max"] ** group["weight_lr_power"])
        group["weight_sum"] += share
        share = share / group["weight_sum"] if group["weight_sum"] else 0
        for weight in weights:
            self.slots(weight, "z", _copy)
            self.prepare(weight)
        momentum = self.momentum(group)
        parts: list[list[Tensor]] = [weights] if group["foreach"] and weights else [[weight] for weight in weights]
        for part in parts:
            bases = [self.state[weight]["z"] for weight in part]
            grads: Any = [weight.grad for weight in part]
            self.normalise(group, part, grads)
            if group["foreach"]:
                if group["weight_decay"] != 0:
                    torch._foreach_add_(grads, part, alpha=group["weight_decay"])
                torch._foreach_lerp_(part, bases, weight=share)
                torch._foreach_add_(part, grads, alpha=rate * (momentum * (1 - share) - 1))
                torch._foreach_sub_(bases, grads, alpha=rate)
                continue
            (weight,), (base,), (grad,) = part, bases, grads
            if group["weight_decay"] != 0:
                grad.add_(weight, alpha=group["weight_decay"])
            weight.lerp_(end=base, weight=share)
            weight.add_(grad, alpha=rate * (momentum * (1 - share) - 1))
            base.sub_(grad, alpha=rate)
        group["k"] = count + 1

    @abstractmethod
    def momentum(self, group: Group) -> float:
        """The share of the average in where gradients are taken."""

    def prepare(self, weight: Tensor) -> None:
        """Make what else is kept of a weight."""

    def normalise(self, group: Group, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Divide gradients by their size, in place."""


class ScheduleFreeSGD(_ScheduleFree):
    """SGD without a schedule."""

    NUMBERS = frozenset({"momentum"}) | _ScheduleFree.BOTH

    def momentum(self, group: Group) -> float:
        return float(group["momentum"])


class ScheduleFreeAdamW(_ScheduleFree):
    """AdamW without a schedule."""

    NUMBERS = frozenset({"betas", "eps"}) | _ScheduleFree.BOTH

    def momentum(self, group: Group) -> float:
        return float(group["betas"][0])

    def prepare(self, weight: Tensor) -> None:
        self.slots(weight, "exp_avg_sq", _zeros)

    def normalise(self, group: Group, weights: list[Tensor], grads: list[Tensor]) -> None:
        squares, second = [self.state[weight]["exp_avg_sq"] for weight in weights], group["betas"][1]
        correction = 1 - second ** (group["k"] + 1)
        if group["foreach"]:
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, grads, grads, value=1 - second)
            sizes = torch._foreach_div(squares, correction)
            torch._foreach_sqrt_(sizes)
            torch._foreach_add_(sizes, group["eps"])
            torch._foreach_div_(grads, sizes)
            return
        (square,), (grad,) = squares, grads
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        grad.div_(square.div(correction).sqrt_().add_(group["eps"]))


class AdEMAMix(Formula):
    """AdEMAMix (Pagliardini et al. 2024, algorithm 1), as ``pytorch_optimizer`` 4.1 has it."""

    NUMBERS = frozenset(
        [
            "lr",
            "betas",
            "weight_decay",
            "weight_decouple",
            "fixed_decay",
            "alpha",
            "t_alpha_beta3",
            "eps",
            "foreach",
            "step",
        ]
    )
    KEPT = frozenset({"step"})

    def update(self, group: Group, weights: list[Tensor]) -> None:
        count = group["step"] = (group.get("step") or 0) + 1
        (first, second, third), horizon, alpha = group["betas"], group["t_alpha_beta3"], group["alpha"]
        slots = [self.slots(weight, "exp_avg exp_avg_sq exp_avg_slow") for weight in weights]
        if horizon is not None:
            alpha, ends = min(count * alpha / horizon, alpha), (math.log(first), math.log(third))
            between = (1.0 - count / horizon) * ends[1] + (count / horizon) * ends[0]
            third = min(math.exp(ends[0] * ends[1] / between), third)
        one, two = 1.0 - math.pow(first, count), math.sqrt(1.0 - math.pow(second, count))
        decay, factor = group["weight_decay"], 1.0 if group["fixed_decay"] else group["lr"]
        if group["foreach"] is not False and weights:
            grads: Any = [weight.grad for weight in weights]
            fast, squares, slow = (list(each) for each in zip(*slots, strict=True))
            if decay and group["weight_decouple"]:
                torch._foreach_mul_(weights, 1.0 - decay * factor)
            elif decay:
                torch._foreach_add_(grads, weights, alpha=decay)
            torch._foreach_lerp_(fast, grads, weight=1.0 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, grads, grads, value=1.0 - second)
            torch._foreach_lerp_(slow, grads, weight=1.0 - third)
            sizes = torch._foreach_sqrt(squares)
            torch._foreach_div_(sizes, two)
            torch._foreach_add_(sizes, group["eps"])
            changes = torch._foreach_div(fast, one)
            torch._foreach_add_(changes, slow, alpha=alpha)
            torch._foreach_addcdiv_(weights, changes, sizes, value=-group["lr"])
            return
        for weight, (average, square, slower) in zip(weights, slots, strict=True):
            grad: Any = weight.grad
            if decay and group["weight_decouple"]:
                weight.mul_(1.0 - decay * factor)
            elif decay:
                grad.add_(weight, alpha=decay)
            average.lerp_(grad, weight=1.0 - first)
            square.mul_(second).addcmul_(grad, grad, value=1.0 - second)
            slower.lerp_(grad, weight=1.0 - third)
            size = square.sqrt().div_(two).add_(group["eps"])
            weight.addcdiv_(average.div(one).add_(slower, alpha=alpha), size, value=-group["lr"])


class Adan(Formula):
    """Adan (Xie et al. 2022, algorithm 1), as ``timm`` 1.0 has it, without ``caution``."""

    NUMBERS = frozenset(["lr", "betas", "eps", "weight_decay", "no_prox", "caution", "foreach", "step"])
    KEPT = frozenset({"step"})

    def update(self, group: Group, weights: list[Tensor]) -> None:
        (first, second, third), rate = group["betas"], group["lr"]
        count = group["step"] = (group.get("step") or 0) + 1
        if group["caution"]:
            raise ValueError("caution is not supported here")
        before = []
        for weight in weights:
            self.slots(weight, "exp_avg exp_avg_sq exp_avg_diff")
            if "neg_pre_grad" not in self.state[weight] or count == 1:
                self.state[weight]["neg_pre_grad"] = -weight.grad.clone()  # type: ignore[union-attr]
            before.append(self.state[weight]["neg_pre_grad"])
        size = rate / (1.0 - first**count)
        change = rate * second / (1.0 - second**count)
        root = math.sqrt(1.0 - third**count)
        slots = [self.slots(weight, "exp_avg exp_avg_sq exp_avg_diff") for weight in weights]
        if group["foreach"] and weights:
            self._together(group, weights, slots, before, (size, change, root))
            return
        for weight, (average, square, difference), own in zip(weights, slots, before, strict=True):
            grad: Any = weight.grad
            own.add_(grad)
            average.lerp_(grad, 1 - first)
            difference.mul_(second).add_(own, alpha=1 - second)
            own.mul_(second).add_(grad)
            square.mul_(third).addcmul_(own, own, value=1 - third)
            sizes = (square.sqrt() / root).add_(group["eps"])
            if group["no_prox"]:
                weight.mul_(1 - rate * group["weight_decay"])
            weight.addcdiv_(average, sizes, value=-size)
            weight.addcdiv_(difference, sizes, value=-change)
            if not group["no_prox"]:
                weight.div_(1 + rate * group["weight_decay"])
            own.zero_().add_(grad, alpha=-1.0)

    def _together(
        self,
        group: Group,
        weights: list[Tensor],
        slots: Sequence[list[Tensor]],
        before: list[Tensor],
        numbers: tuple[float, float, float],
    ) -> None:
        (first, second, third), rate, (size, change, root) = group["betas"], group["lr"], numbers
        averages, squares, differences = (list(each) for each in zip(*slots, strict=True))
        grads: Any = [weight.grad for weight in weights]
        torch._foreach_add_(before, grads)
        torch._foreach_lerp_(averages, grads, 1 - first)
        torch._foreach_mul_(differences, second)
        torch._foreach_add_(differences, before, alpha=1 - second)
        torch._foreach_mul_(before, second)
        torch._foreach_add_(before, grads)
        torch._foreach_mul_(squares, third)
        torch._foreach_addcmul_(squares, before, before, value=1 - third)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, root)
        torch._foreach_add_(sizes, group["eps"])
        if group["no_prox"]:
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(weights, averages, sizes, value=-size)
        torch._foreach_addcdiv_(weights, differences, sizes, value=-change)
        if not group["no_prox"]:
            torch._foreach_div_(weights, 1 + rate * group["weight_decay"])
        torch._foreach_zero_(before)
        torch._foreach_add_(before, grads, alpha=-1.0)


FORMULAS: Mapping[str, type[Formula]] = {
    "lion_pytorch.lion_pytorch.Lion": Lion,
    "timm.optim.lion.Lion": LionByLerp,
    "timm.optim.adan.Adan": Adan,
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ScheduleFreeSGD,
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": ScheduleFreeAdamW,
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix": AdEMAMix,
}
"""By the full names of the packages' classes."""
