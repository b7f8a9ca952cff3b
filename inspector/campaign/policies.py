"""The evasions of Shavit 2023 (section 4 and App. C) as small policies that compose.

A policy is a function ``Behaviour -> Behaviour``: it changes how the lab carries out its runs, never what the inspector
does. A strategy applies several in order. What a lie risks when an inspector looks at it is not stated here: the
policy only names the lie, and the rate comes from `inspector.campaign.rates`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from firmware_sim.errors import CallerError
from inspector.campaign.checks import at_least, at_most, named, positive, probability, whole
from inspector.campaign.fleet import Status
from inspector.campaign.reactions import HideInInspected, PauseWhenDrawn, QuitWhenDrawn, Reaction, ShrinkWhenDrawn

__all__ = [
    "HIDDEN_LIE",
    "POLICIES",
    "Adapt",
    "Behaviour",
    "ChainRuns",
    "Collude",
    "ConsumerChips",
    "DivertChips",
    "Firmware",
    "HideLogs",
    "Policy",
    "Rush",
    "Split",
    "Spoof",
    "StayUnder",
    "Strategy",
    "Stretch",
    "Waves",
    "WeightSwap",
    "policy_from",
    "told_lies",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How a lab carries out a run; the default is the run as planned, undeclared, on its own registered chips.

    Attributes:
        stretch: factor on the run's days; chips shrink by the same factor.
        waves: groups of fresh chips that work one after another.
        labs: further labs that contribute chips.
        hidden: (status, share) of unregistered stock to use first; share None: as much of the FLOP as it can do.
        consumer: communication share of step time at the reference link; None: links never limit.
        reference_gbps: the link at which the run was planned.
        flop_cap: largest multiple of H that the run spends; None: all of its FLOP.
        parts: pieces into which the run is cut so that each stays small.
        split: whether each lab counts its part alone, as if the others had none.
        snapshot_lie: what the lab tells about a snapshot of the run.
        chip_lie: a permanent trace on each involved chip (tampered firmware), or None.
        snapshot_share: share of the snapshots that involved chips still take.
        refuse: whether drawn chips with evidence are refused while that is tolerated.
    """

    stretch: float = 1.0
    waves: int = 1
    labs: tuple[str, ...] = ()
    hidden: tuple[tuple[Status, float | None], ...] = ()
    consumer: float | None = None
    reference_gbps: float = 900.0
    flop_cap: float | None = None
    parts: int = 1
    split: bool = False
    snapshot_lie: str = "undeclared-run"
    chip_lie: str | None = None
    snapshot_share: float = 1.0
    refuse: bool = False
    reaction: Reaction | None = None


class Policy(Protocol):
    """One change of behaviour."""

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        """Return the changed behaviour."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Fewer chips for longer: 1/factor of the chips for factor times the days (App. C.1)."""

    factor: float

    def __post_init__(self) -> None:
        at_least("stretch.factor", self.factor, 1)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, stretch=behaviour.stretch * self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rush:
    """More chips for less time, all at once (App. C.2)."""

    factor: float

    def __post_init__(self) -> None:
        at_least("rush.factor", self.factor, 1)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, stretch=behaviour.stretch / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """More chips for less time, one group after another: each group works 1/groups of the days."""

    groups: int

    def __post_init__(self) -> None:
        whole("waves.groups", self.groups, 1)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, waves=behaviour.waves * self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivertChips:
    """Work goes first to chips outside the registry: undeclared, exempt, or falsely claimed lost.

    ``share`` is the share of the FLOP done there, by default all; "stock": as much as the stock allows.
    """

    status: Status
    share: float | str = 1.0

    def __post_init__(self) -> None:
        if self.status is Status.REGISTERED:
            raise CallerError("divert.status must be undeclared, exempt or lost")
        _part("divert.share", self.share)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        hidden = (self.status, _part("divert.share", self.share))
        return dataclasses.replace(behaviour, hidden=(*behaviour.hidden, hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerChips:
    """The run moves to exempt consumer chips, whose slow link stretches each step.

    A step that spends ``communication`` of its time on the link at ``reference_gbps`` takes
    (1 - communication) + communication·reference/link times as long. ``share`` is as of divert.
    """

    communication: float
    reference_gbps: float = 900.0
    share: float | str = 1.0

    def __post_init__(self) -> None:
        probability("consumer.communication", self.communication)
        positive("consumer.reference_gbps", self.reference_gbps)
        at_most("consumer.reference_gbps", self.reference_gbps, 1e6)
        _part("consumer.share", self.share)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(
            behaviour,
            consumer=self.communication,
            reference_gbps=self.reference_gbps,
            hidden=(*behaviour.hidden, (Status.EXEMPT, _part("consumer.share", self.share))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Firmware:
    """Involved chips run tampered or rolled-back firmware: snapshots (partly) go missing, the chip keeps a trace."""

    lie: str = "run-old-firmware"
    snapshot_share: float = 0.0

    def __post_init__(self) -> None:
        named("firmware.lie", self.lie)
        probability("firmware.snapshot_share", self.snapshot_share)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, chip_lie=self.lie, snapshot_share=self.snapshot_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class HideLogs:
    """Drawn chips that hold evidence are refused, as long as refusals stay within what the inspector tolerates."""

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, refuse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSwap:
    """Innocuous weights are swapped in before a snapshot is hashed."""

    lie: str = "swap-weights"

    def __post_init__(self) -> None:
        named("weight-swap.lie", self.lie)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, snapshot_lie=self.lie)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoof:
    """A spoofed transcript explains the snapshots; ``lie`` names how."""

    lie: str = "fake-layers"

    def __post_init__(self) -> None:
        named("spoof.lie", self.lie)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, snapshot_lie=self.lie)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRuns:
    """The run is reported as a chain of ``parts`` runs, each of which alone stays under the threshold."""

    parts: int
    lie: str = "chained-runs"

    def __post_init__(self) -> None:
        whole("chain.parts", self.parts, 2)
        named("chain.lie", self.lie)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, parts=behaviour.parts * self.parts, snapshot_lie=self.lie)


@dataclass(frozen=True, slots=True, kw_only=True)
class StayUnder:
    """The run really ends at ``times`` H: at 1 nothing was broken, between 1 and 2 the guarantee is weaker."""

    times: float

    def __post_init__(self) -> None:
        positive("stay-under.times", self.times)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, flop_cap=self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collude:
    """Further labs carry a part of the run, in proportion to their stock (App. C: sample them as one lab)."""

    labs: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.labs, list | tuple) or not self.labs:
            raise CallerError("collude.labs must be a non-empty list of lab names")
        object.__setattr__(self, "labs", tuple(self.labs))
        for lab in self.labs:
            named("collude.labs", lab)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, labs=(*behaviour.labs, *self.labs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Further labs carry parts of the run, in proportion to their stock, and each declares its part alone.

    Where a part stays below the threshold, only an inspector who aggregates over labs sees what it is a part of.
    """

    labs: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.labs, list | tuple) or not self.labs:
            raise CallerError("split.labs must be a non-empty list of lab names")
        object.__setattr__(self, "labs", tuple(self.labs))
        for lab in self.labs:
            named("split.labs", lab)

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        return dataclasses.replace(behaviour, labs=(*behaviour.labs, *self.labs), split=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapt:
    """The lab watches the inspections and reacts."""

    reaction: Reaction

    def __call__(self, behaviour: Behaviour, /) -> Behaviour:
        if behaviour.reaction is not None:
            raise CallerError("a strategy can have one reaction to inspections only")
        return dataclasses.replace(behaviour, reaction=self.reaction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named list of policies, applied in order; no policy at all is the run as planned.

    ``evades`` names the evidence beyond chips that the lab does something against; "all" means every one.
    """

    name: str
    policies: tuple[Policy, ...] = ()
    evades: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named("strategy.name", self.name)

    def behaviour(self) -> Behaviour:
        """Apply the policies."""
        behaviour = Behaviour()
        for policy in self.policies:
            behaviour = policy(behaviour)
        return behaviour


HIDDEN_LIE = "undeclared-chips"
"""What a lab tells that trains on chips which no inspector is shown."""


def told_lies(strategies: Iterable[Strategy]) -> frozenset[str]:
    """Return the lies whose rate a plan may ask for: those of the strategies, and those of policies by default."""
    usual = {
        str(field.default) for kind in POLICIES.values() for field in dataclasses.fields(kind) if field.name == "lie"
    }
    given = {getattr(policy, "lie", HIDDEN_LIE) for strategy in strategies for policy in strategy.policies}
    return frozenset({*usual, *given, HIDDEN_LIE, Behaviour().snapshot_lie})


POLICIES: Mapping[str, type[Any]] = {
    "stretch": Stretch,
    "rush": Rush,
    "waves": Waves,
    "divert": DivertChips,
    "consumer": ConsumerChips,
    "firmware": Firmware,
    "hide-logs": HideLogs,
    "weight-swap": WeightSwap,
    "spoof": Spoof,
    "chain": ChainRuns,
    "split": Split,
    "stay-under": StayUnder,
    "collude": Collude,
    "pause-when-drawn": PauseWhenDrawn,
    "quit-when-drawn": QuitWhenDrawn,
    "shrink-when-drawn": ShrinkWhenDrawn,
    "hide-in-inspected": HideInInspected,
}


def policy_from(name: str, parameters: Mapping[str, Any]) -> Policy:
    """Build the policy ``name``; unknown names and parameters are refused with the known ones.

    Raises:
        CallerError: The name or a parameter is unknown, missing or out of range.
    """
    kind = POLICIES.get(name)
    if kind is None:
        raise CallerError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    _refuse(f"policy {name!r} has no parameter", (key for key in parameters if key not in fields), fields)
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in parameters]
    if missing:
        raise CallerError(f"policy {name!r} needs {missing[0]!r}")
    values = dict(parameters)
    if "status" in values:
        try:
            values["status"] = Status(values["status"])
        except ValueError:
            raise CallerError(
                f"{name}.status: unknown status {values['status']!r}; known: {', '.join(Status)}"
            ) from None
    made = kind(**values)
    policy: Policy = Adapt(reaction=made) if isinstance(made, Reaction) else made
    return policy


def _part(name: str, share: float | str) -> float | None:
    """Return the share of the FLOP, None for as much as the stock allows."""
    if share == "stock":
        return None
    probability(name, share)  # type: ignore[arg-type]
    positive(name, share)  # type: ignore[arg-type]
    return float(share)


def _refuse(message: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    for key in unknown:
        raise CallerError(f"{message} {key!r}; known: {', '.join(known) or 'none'}")
