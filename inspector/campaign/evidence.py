"""Evidence beyond chips in a campaign: what each source can see of a plan, and the rule that weighs the alarms.

Alarms are weighed once, at the end of the horizon, and know nothing of the chips' inspections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from firmware_sim.errors import CallerError
from inspector.campaign.checks import at_least, named, probability
from inspector.probability.evidence import AlarmSource, DecisionRule, Sources, best_rule
from inspector.probability.hidden_sites import FindingRate, HiddenSites, accounting_alarm

__all__ = ["Books", "Monitor", "Observation", "Observations", "Sightings", "Target", "Weighing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a violation shows to others than chips.

    Attributes:
        declared: whether work goes on at declared sites.
        sites: undeclared ones at work, by the lab and site of the file.
        missing: undeclared chips, at work or not, that the makers' books have no holder for.
    """

    declared: bool = False
    sites: Mapping[tuple[str, str], HiddenSites] = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(ABC):
    """One source of alarms, before it is known what there is to see: its name, false alarms, group and origin."""

    name: str
    false_alarm: float = 0.0
    group: str = ""
    origin: str = "assumed"

    def __post_init__(self) -> None:
        named("evidence.name", self.name)
        probability("evidence.false_alarm", self.false_alarm)

    @abstractmethod
    def of(self, target: Target) -> AlarmSource:
        """Return its rates where the target is there to be seen."""

    def _source(self, detection: float, evaded: float) -> AlarmSource:
        """Return the source, which is never less likely to give an alarm where there is something to see."""
        return AlarmSource(
            name=self.name,
            detection=max(detection, self.false_alarm),
            evaded=min(evaded, max(detection, self.false_alarm)),
            false_alarm=self.false_alarm,
            group=self.group,
            origin=self.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor(Observation):
    """Watches declared sites, as meters of power, taps of networks and telemetry of work do."""

    detection: float
    evaded: float

    def __post_init__(self) -> None:
        Observation.__post_init__(self)
        probability("evidence.detection", self.detection)
        probability("evidence.evaded", self.evaded)
        if self.evaded > self.detection:
            raise CallerError(
                f"evidence.evaded must not be above the detection of {self.detection:g}, but is {self.evaded:g}"
            )
        if self.detection < self.false_alarm:
            raise CallerError(
                f"evidence.detection of {self.detection:g} is below the rate of false alarms about honest labs"
            )

    def of(self, target: Target) -> AlarmSource:
        """Return its rates; a false alarm's where no declared site works on the run."""
        seen = (self.detection, self.evaded) if target.declared else (self.false_alarm, self.false_alarm)
        return self._source(*seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings(Observation):
    """Looks for undeclared sites, as satellites, tips and spot visits do.

    Attributes:
        finding: how fast.
        concealed: share of a site's power that an evasion hides.
    """

    finding: FindingRate
    concealed: float = 0.0

    def __post_init__(self) -> None:
        Observation.__post_init__(self)
        probability("evidence.concealed", self.concealed)

    def of(self, target: Target) -> AlarmSource:
        """Return how likely one of the sites is found, or there is a false alarm."""
        clear = 1.0 - self.false_alarm
        return self._source(*(1.0 - clear * (1.0 - self.found(target, evading=each)) for each in (False, True)))

    def found(self, target: Target, *, evading: bool = False) -> float:
        """Return how likely one of the sites is found, false alarms aside."""
        concealed = self.concealed if evading else 0.0
        return 1.0 - prod(1.0 - self.finding.found(each, concealed=concealed) for each in target.sites.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Books(Observation):
    """Accounts of chips made and sold.

    Attributes:
        error: standard deviation, in chips.
        explained: share of the missing chips that an evasion explains away.
    """

    error: float
    explained: float = 0.0

    def __post_init__(self) -> None:
        Observation.__post_init__(self)
        at_least("evidence.error_chips", self.error, 1)
        probability("evidence.explained", self.explained)

    def of(self, target: Target) -> AlarmSource:
        """Return how likely the books show what is missing."""
        alarms = accounting_alarm(
            missing=[target.missing, target.missing * (1.0 - self.explained)],
            error=self.error,
            false_alarm=self.false_alarm,
        )
        return self._source(*map(float, alarms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All evidence beyond chips that a regime has.

    Attributes:
        each: sources.
        shared: (group, share of causes in common) for each group.
        cap: largest chance that they accuse where there is no violation.
    """

    each: tuple[Observation, ...] = ()
    shared: tuple[tuple[str, float], ...] = ()
    cap: float = 0.0

    def found(self, target: Target) -> dict[str, float]:
        """Return how likely each source that looks for undeclared sites finds one, false alarms aside."""
        return {each.name: each.found(target) for each in self.each if isinstance(each, Sightings)}

    def of(self, target: Target) -> Sources:
        """Return the sources' rates where the target is there to be seen."""
        found = tuple(observation.of(target) for observation in self.each)
        groups = {source.group for source in found}
        return Sources(each=found, shared={name: share for name, share in self.shared if name in groups})

    def among(self, names: Collection[str]) -> Observations:
        """Return these with only the named sources.

        Raises:
            CallerError: there is no source of that name.
        """
        chosen = self.of(Target()).among(names)
        return Observations(
            each=tuple(each for each in self.each if each.name in chosen), shared=self.shared, cap=self.cap
        )

    def rule(self, targets: Sequence[Target]) -> DecisionRule:
        """Return the rule that weighs alarms, made for these ways to violate."""
        return best_rule([self.of(target) for target in targets], self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """A rule, and its input: of a violation that evades some sources, or (None) of a world without any."""

    rule: DecisionRule
    sources: Sources
    evading: frozenset[str] | None = field(default_factory=frozenset)

    def probability(self) -> float:
        """Return the exact chance to accuse."""
        if self.evading is None:
            return self.rule.false_alarm
        return self.rule.detection(self.sources, self.evading)

    def accused(self, trials: int, rng: Generator) -> NDArray[np.bool_]:
        """Draw alarms of so many worlds, and say who is accused."""
        return self.rule.accused(self.sources.draw(trials, rng, evading=self.evading))
