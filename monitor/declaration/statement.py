"""What a run declares before it starts: numerics, optimizer, schedule, length and the layout of its state.

Every run has such a declaration. One that follows a recipe (a preset's task) says so, and then lab and inspector derive
all of it from the recipe, programs included (``monitor.replay.derivation``).

Which checkpoints of a run stay on disk: the first, the last few, and ever sparser ones before them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from firmware_sim import NO_WORK, REGION_KINDS, Work, limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from monitor.declaration.origin import Origin
from monitor.declaration.schedules import Schedule
from monitor.numerics import DECLARABLE, NUMERICS
from monitor.presets.task import Task
from monitor.sharding import Layout, ShardedMemory

__all__ = [
    "BESIDE_MODEL",
    "MOST_SLACK",
    "OUTSIDE",
    "Declaration",
    "StateEntry",
    "check_hyper",
    "check_shares",
    "class_name",
    "hyper_of",
    "is_hyper_name",
    "is_retained",
    "is_state_name",
    "members_of",
    "optimizer_name",
    "parse_share",
    "plain_number",
]


def is_retained(step: int, committed: int, *, every: int, keep: int | None) -> bool:
    """Tell whether the checkpoint of a step has to be there once so many steps are committed.

    Count checkpoints from 0. The one whose number has the largest power of two 2^v as divisor stays while fewer than
    ``keep`` · 2^v have come after it. So the last ``keep`` stay, at most ``keep`` for each v, of n checkpoints no more
    than 1 + ``keep`` · (1 + log2 n); those ``age`` old lie at most max(1, 2 · ``age`` / ``keep``) apart; and what is
    released once is never asked for again.

    Args:
        every: steps from one checkpoint to the next, of which the newest comes with the step after its own.
        keep: how many of the newest stay; None for all.
    """
    number, newest = step // every, max(committed - 1, 0) // every
    return keep is None or number == 0 or newest - number < keep * (number & -number)


_FORM = "declaration/1"
_KEYS = {
    *("form", "numerics", "seed", "checkpoint_every", "shares", "optimizer", "groups", "parameters", "state"),
    *("schedule", "length", "recipe", "origin", "keep"),
}
_OPTIONAL_KEYS = {"beside", "maximum_slack"}
OUTSIDE = 4
"""How often other operators may read or write as much as the whole state for each training step, unless declared."""
MOST_SLACK = Fraction(1, 20)
"""Work that no one can replay may have this share of the declared work, unless more or less is agreed."""
_OUTSIDE_BYTES = 1 << 20
_BYTES_PER_FLOP = 4
_MOST_GROUPS = 1 << 10
_MOST_CHIPS = 1 << 12
_MOST_OUTSIDE = 1 << 10
_STEPS = limits.STEPS.most
_WHOLE: Mapping[str, tuple[int, int, str]] = {
    "length": (1, _STEPS, f"the length of a run is 1 … {_STEPS} steps"),
    "seed": (0, (1 << 63) - 1, "seed must lie in 0 … 2^63-1"),
    "checkpoint_every": (1, _STEPS, f"checkpoint_every is 1 … {_STEPS}"),
    "keep": (1, _STEPS, f"keep is 1 … {_STEPS} checkpoints"),
    "beside": (0, _MOST_OUTSIDE, f"beside is 0 … {_MOST_OUTSIDE} times the state"),
}
"""Whole numbers of a declaration: the least, the most, and both in words."""
_NONE = frozenset({"length", "keep"})
"""Which of these may be None."""
_HYPER_NAME = re.compile(r"[a-z_][a-z0-9_]{0,31}", re.ASCII)
_STATE_NAME = re.compile(r"(weight|buffer|gradient|optimizer)/[^\x00-\x1f\x7f]{1,500}")
_SHARE = re.compile(r"[0-9]{1,9}(/[1-9][0-9]{0,8})?", re.ASCII)
_ENDLESS = frozenset({"growth_rate"})
"""Settings that may be infinite, as how fast Prodigy's rate may grow; JSON has them as text."""
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of the state: ``kind`` is weight, buffer, gradient or optimizer."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        texts = (self.kind, self.name, self.dtype)
        if not all(isinstance(text, str) and text for text in texts):
            raise EvidenceError("the declared state has a tensor whose kind, name or type is not text")
        if self.kind not in REGION_KINDS or self.dtype not in DTYPE_SIZES:
            raise EvidenceError(
                f"the declared state has an impossible tensor: {self.kind!r:.40} {self.name!r:.100} {self.dtype!r:.40}"
            )
        limits.check_shape(self.shape)

    @property
    def layout(self) -> dict[str, object]:
        """Type and shape, as a program has them."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    @property
    def byte_count(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declared part of a run, whose steps are programs (part of M in Shavit 2023, section 4.1).

    Attributes:
        seed: of the keys of random operators (dropout).
        shares: how many equal parts of the state each chip holds, in their order.
        optimizer: full name of the optimizer's class, or of each group's, joined by plus signs.
        groups: hyper-parameters of each parameter group, as they are before the first step.
        parameters: names of the weights in each parameter group, in its order.
        state: all tensors of the state, in the order of memory.
        schedule: rule of the learning rates; None where each step declares its own.
        length: steps of the whole run; None for an open end, where the signed manifest counts them and every chip has
            heard of each.
        recipe: the preset's task that decides all of this but the origin, or None.
        origin: where the initial state comes from.
        keep: how many of the newest checkpoints stay on disk, plus sparser ones before (``is_retained``); None for all.
        beside: how often operators of no program may read or write as much as the whole state for each training step.
        maximum_slack: the share of the declared work that chips may count on top for what no one can replay; None
            for ``MOST_SLACK``.
        steps: ``length``, or how far a run with an open end came; no part of the declaration.
    """

    numerics: str
    seed: int
    checkpoint_every: int
    shares: tuple[int, ...]
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]
    parameters: tuple[tuple[str, ...], ...]
    state: tuple[StateEntry, ...]
    schedule: Schedule | None = None
    length: int | None = None
    recipe: Task | None = None
    origin: Origin = field(default_factory=Origin)
    keep: int | None = None
    beside: int = OUTSIDE
    maximum_slack: Fraction | None = None
    steps: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.numerics not in (NUMERICS if self.recipe is None else DECLARABLE):
            raise CallerError(f"numerics must be exact, rounded or native, not {self.numerics!r}")
        if self.recipe is None and self.origin.state is None:
            raise CallerError("a run without a recipe must declare the digest of its initial state")
        for name, (least, most, words) in _WHOLE.items():
            value = getattr(self, name)
            if (value is not None or name not in _NONE) and (type(value) is not int or not least <= value <= most):
                raise CallerError(f"{words}, not {value!r}")
        share = self.maximum_slack
        if share is not None and not (isinstance(share, Fraction) and 0 <= share <= 1):
            raise CallerError(f"maximum_slack must be a Fraction in 0 … 1, such as Fraction(1, 20), not {share!r:.40}")
        check_shares(self.shares)
        if self.recipe is not None and self.recipe.shards != len(self.shares):
            raise CallerError(f"the recipe is for {self.recipe.shards} chips, not {len(self.shares)}")
        if not 1 <= len(self.state) <= limits.TENSORS.most:
            raise CallerError(
                f"the state has {len(self.state)} tensors, but only 1 … {limits.TENSORS.most} can be recorded"
            )
        if len({(entry.kind, entry.name) for entry in self.state}) != len(self.state):
            raise CallerError("two tensors of the state have the same name")
        weights = {entry.name for entry in self.state if entry.kind == "weight"}
        _check_groups(self.groups, self.parameters, weights)

    @classmethod
    def of_recipe(
        cls, task: Task, model: nn.Module, optimizer: Optimizer, state: tuple[StateEntry, ...]
    ) -> Declaration:
        """The declaration of a preset's task, given what it builds, with equal shares for all chips."""
        return cls(
            numerics=task.numerics,
            seed=task.seed,
            checkpoint_every=task.checkpoint_every,
            shares=(1,) * task.shards,
            optimizer=class_name(optimizer),
            groups=tuple(hyper_of(group) for group in optimizer.param_groups),
            parameters=members_of(model, optimizer),
            state=state,
            schedule=Schedule.of("warmup", steps=task.warmup) if task.warmup else Schedule.of("constant"),
            length=task.steps,
            recipe=task,
            keep=task.keep,
            steps=task.steps,
        )

    @property
    def shards(self) -> int:
        """Number of chips that hold the state."""
        return len(self.shares)

    @property
    def byte_count(self) -> int:
        """Bytes of the whole state."""
        return sum(entry.byte_count for entry in self.state)

    @property
    def allowance(self) -> Work:
        """What operators on the state that are of no program may do from one training step to the next.

        They may move ``beside`` times the bytes of the state and 1 MiB, in no more calls, with a quarter of that in
        FLOP: enough to log norms, too little for products of matrices to learn from.
        """
        if not self.beside:
            return NO_WORK
        most = self.beside * self.byte_count + _OUTSIDE_BYTES
        return Work(most, most // _BYTES_PER_FLOP, most)

    def retains(self, step: int, committed: int) -> bool:
        """Whether the checkpoint of a step has to be there once so many steps are committed."""
        return is_retained(step, committed, every=self.checkpoint_every, keep=self.keep)

    @property
    def layout(self) -> Layout:
        """Which blocks of the state lie on which chips; EvidenceError if it cannot be spread over the shards."""
        tensors = {(entry.kind, entry.name): (entry.dtype, entry.shape) for entry in self.state}
        try:
            return Layout.shared(tensors, self.shares)
        except CallerError as error:
            raise EvidenceError(f"the declared state cannot be laid out: {error}") from None

    def empty_memory(self, place: torch.device) -> ShardedMemory:
        """Memory of the declared layout, all zeros; EvidenceError if it cannot be spread over the shards."""
        tensors = {
            (entry.kind, entry.name): torch.zeros((), dtype=getattr(torch, entry.dtype), device=place).expand(
                entry.shape
            )
            for entry in self.state
        }
        return ShardedMemory(tensors, self.layout)

    def check_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a full state under ``kind/name``; EvidenceError unless it has the declared tensors and no others."""
        declared = {f"{entry.kind}/{entry.name}": (entry.dtype, entry.shape) for entry in self.state}
        found = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()}
        if found != declared:
            odd = sorted(name for name in declared.keys() | found.keys() if declared.get(name) != found.get(name))
            raise EvidenceError(f"a checkpoint does not hold exactly the declared tensors (first: {odd[0]!a})")
        return state

    def to_json(self) -> dict[str, object]:
        """Return the declaration as JSON-able values."""
        return {
            "form": _FORM,
            "numerics": self.numerics,
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
            "shares": list(self.shares),
            "optimizer": self.optimizer,
            "groups": [dict(group) for group in self.groups],
            "parameters": [list(names) for names in self.parameters],
            "state": [[entry.kind, entry.name, entry.dtype, list(entry.shape)] for entry in self.state],
            "schedule": None if self.schedule is None else self.schedule.to_json(),
            "length": self.length,
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "origin": self.origin.to_json(),
            "keep": self.keep,
            **({} if self.beside == OUTSIDE else {"beside": self.beside}),
            **({} if self.maximum_slack is None else {"maximum_slack": str(self.maximum_slack)}),
        }

    @classmethod
    def from_json(cls, data: object) -> Declaration:
        """Parse what ``to_json`` returned; EvidenceError on anything missing, extra or out of range."""
        if not isinstance(data, dict) or set(data) - _OPTIONAL_KEYS != _KEYS or data["form"] != _FORM:
            raise EvidenceError("the declaration in the metadata has missing or extra keys")
        state, groups, parameters = data["state"], data["groups"], data["parameters"]
        lists = [data["shares"], state, groups, parameters, *(parameters if isinstance(parameters, list) else ())]
        lists += [entry[-1] for entry in state if isinstance(entry, list) and entry] if isinstance(state, list) else []
        if not all(isinstance(each, list) for each in lists):
            raise EvidenceError("the declared shares, state, groups or parameters in the metadata are not lists")
        if data.get("beside") == OUTSIDE:
            raise EvidenceError("the declaration in the metadata spells out a default value, which it has to leave out")
        if not isinstance(data["optimizer"], str):
            raise EvidenceError("the declared optimizer in the metadata is not text")
        try:
            entries = [
                StateEntry(kind=kind, name=name, dtype=dtype, shape=tuple(shape)) for kind, name, dtype, shape in state
            ]
            return cls(
                numerics=data["numerics"],
                seed=data["seed"],
                checkpoint_every=data["checkpoint_every"],
                shares=tuple(data["shares"]),
                optimizer=data["optimizer"],
                groups=tuple(groups),
                parameters=tuple(tuple(names) for names in parameters),
                state=tuple(entries),
                schedule=None if data["schedule"] is None else Schedule.from_json(data["schedule"]),
                length=data["length"],
                recipe=None if data["recipe"] is None else Task.from_json(data["recipe"]),
                origin=Origin.from_json(data["origin"]),
                keep=data["keep"],
                beside=data.get("beside", OUTSIDE),
                maximum_slack=None if "maximum_slack" not in data else parse_share(data["maximum_slack"]),
            )
        except (CallerError, TypeError, ValueError) as error:
            raise EvidenceError(f"the declaration in the metadata is invalid: {error}") from None


def parse_share(text: object) -> Fraction:
    """A share in 0 … 1 that is written as it is printed, such as 1/20; ValueError on any other text."""
    if not isinstance(text, str) or _SHARE.fullmatch(text) is None or str(share := Fraction(text)) != text or share > 1:
        raise ValueError(f"{text!a:.40} is not a share such as 1/20")
    return share


def _count(value: object) -> int:
    return len(value) if isinstance(value, list | tuple) else 0


def optimizer_name(optimizer: object) -> str:
    """Class of an optimizer; of several with different classes, that of each parameter group, joined by plus signs."""
    names = getattr(optimizer, "class_names", None) or [class_name(optimizer)]
    return names[0] if len(set(names)) == 1 else "+".join(names)


def class_name(value: object) -> str:
    """Full name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


BESIDE_MODEL = "optimizer.."
"""What the names of FP32 masters begin with that an optimizer updates and no module holds."""


def members_of(model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Names of the weights in each of an optimizer's parameter groups; KeyError on one that the model does not hold."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return tuple(tuple(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups)


def is_hyper_name(text: object) -> bool:
    """Tell whether a hyper-parameter may be agreed on by this name: a short lower-case identifier."""
    return isinstance(text, str) and _HYPER_NAME.fullmatch(text) is not None


def is_state_name(text: object) -> bool:
    """Tell whether a tensor of the state may be agreed on by this name: ``kind/name``, without control characters."""
    return isinstance(text, str) and _STATE_NAME.fullmatch(text) is not None


def hyper_of(group: Mapping[str, Any]) -> dict[str, object]:
    """The hyper-parameters of an optimizer's parameter group as JSON has them; CallerError on several in one tensor."""
    found = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor) and value.numel() != 1:
            raise CallerError(
                f"the optimizer's {name} is a tensor of {value.numel()} numbers; give them as plain numbers"
            )
        found[name] = [plain_number(part) for part in value] if isinstance(value, tuple | list) else plain_number(value)
        if name in _ENDLESS and found[name] == math.inf:
            found[name] = "inf"
    return found


def plain_number(value: Any) -> Any:
    """A number of numpy's, or in a tensor, as Python's own, which JSON has."""
    if isinstance(value, Tensor):
        with _disable_current_modes():  # no operator of the loop
            value = value.item()
    value = value.item() if isinstance(value, np.generic) else value
    return value


def check_shares(shares: Sequence[object]) -> None:
    """Each of 1 … 4096 chips holds 1 … 4096 parts of the state; CallerError otherwise."""
    if not 1 <= len(shares) <= _MOST_CHIPS:
        raise CallerError(f"a state must lie on 1 … {_MOST_CHIPS} chips, not {len(shares)}")
    for share in shares:
        if type(share) is not int or not 1 <= share <= _MOST_CHIPS:
            raise CallerError(f"a chip's share of the state must be 1 … {_MOST_CHIPS} parts, not {share!r:.60}")


def _check_groups(groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[str]], weights: set[str]) -> None:
    """Parameter groups of plain numbers, each with names of weights that no other has; CallerError otherwise."""
    if not 1 <= len(groups) <= _MOST_GROUPS:
        raise CallerError(
            f"the optimizer has {len(groups)} parameter groups, but only 1 … {_MOST_GROUPS} can be recorded"
        )
    for group in groups:
        check_hyper(group)
    names = [name for group in parameters for name in group]
    if len(parameters) != len(groups) or len(set(names)) != len(names) or not set(names) <= weights:
        raise CallerError(
            "the parameter groups name something that is not a weight of the state, or name a weight twice"
        )
    values = sum(1 + _count(value) for group in groups for value in group.values())
    if values > limits.HYPER_VALUES.most:
        raise CallerError(
            f"the optimizer has {values} hyper-parameters, but at most {limits.HYPER_VALUES.most} can be recorded"
        )


def check_hyper(group: object) -> None:
    """Hyper-parameters are numbers, truth values, text, None, or lists of them; CallerError names any other."""
    if not isinstance(group, Mapping):
        raise CallerError("a parameter group is not a mapping")
    for name, value in group.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not isinstance(name, str) or not all(isinstance(part, _SCALARS) for part in parts):
            raise CallerError(f"the optimizer's {name} is {type(value).__name__}; give it as a plain number")
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            raise CallerError(f"the optimizer's {name} is not finite; give it as a finite number")
