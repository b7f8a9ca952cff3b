"""What ``evidence`` answers: sources weighed together, hidden sites found, a job in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspector.probability.evidence import Observed

__all__ = [
    "Evasion",
    "ExactRate",
    "Rate",
    "Simulated",
    "SiteRow",
    "SitesAnswer",
    "SourceRow",
    "SplitAnswer",
    "Way",
    "WeighAnswer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One source by itself.

    Attributes:
        detection, evaded, false_alarm: chances of an alarm.
        alarm_ratio, alarm_ratio_evaded, silence_ratio: factors on the odds of a violation, null if unbounded.
        found: chance to find a hidden site; false alarms do not count; null for a source that does not search.
    """

    name: str
    detection: float
    evaded: float
    false_alarm: float
    alarm_ratio: float | None
    alarm_ratio_evaded: float | None
    silence_ratio: float | None
    group: str
    origin: str
    found: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A strategy: chance of an accusation without evasions, and with all of them."""

    strategy: str
    detection: float
    evaded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evasion:
    """What a violator gets away with.

    Attributes:
        evades: the sources whose evasion does the most harm, among sets of this size.
    """

    detection: float
    evades: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A simulated chance with its interval."""

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRate(Rate):
    """The same with the closed form."""

    exact: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How often drawn alarms accuse a violator, and honest labs."""

    detection: ExactRate
    false_alarm: ExactRate


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighAnswer:
    """What alarms and silence say together.

    Attributes:
        hidden: hidden sites of the strategy, each with lab, site and the description.
        dependence: for each group the share of alarms that have a common cause.
        cap: of the rule.
        false_alarm: of the rule.
        evasions: of the chosen strategy, by their number.
        observed: with --alarm or --silent.
    """

    scenario: str
    strategy: str
    hidden: Sequence[Mapping[str, object]]
    sources: Sequence[SourceRow]
    dependence: Mapping[str, float]
    cap: float
    false_alarm: float
    strategies: Sequence[Way]
    evasions: Sequence[Evasion]
    simulated: Simulated
    trials: int
    seed: int
    confidence: float
    observed: Observed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """Sites with so many chips; all but chips are null if these cannot do the run.

    Attributes:
        megawatts: power of the chips while the run lasts.
        found: chance by source, without false alarms.
        any: chance that at least one source finds them, by `rule`.
        hidden: the description.
    """

    chips: float
    megawatts: float | None = None
    found: Mapping[str, float] | None = None
    any: float | None = None
    hidden: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesAnswer:
    """When hidden sites are found.

    Attributes:
        rule: for any.
        false_alarm: 0, by construction.
        origins: of each source.
    """

    scenario: str | None
    watts: float
    days: float
    age: float
    sites: int
    evaded: bool
    rows: Sequence[SiteRow]
    rule: str = "by one source at least, taken as independent"
    false_alarm: float = 0.0
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAnswer:
    """A job in parts.

    Attributes:
        nodes: needed.
        chips: of all nodes.
        hidden: the nodes as hidden sites.
        found: chance that a source which looks for hidden sites finds a node.
        visits, draws: over the job.
        hit: chance that a draw takes evidence of one given node.
        alone: chance of detection if each node is judged alone, 0 below the threshold.
        linked: if nodes are compared.
        rule: for linked.
        false_alarm: 0, by construction.
    """

    flop: float
    node_chips: int
    nodes: int
    chips: int
    megawatts: float
    days: float
    hidden: Mapping[str, float]
    found: float
    visits: int
    draws: int
    hit: float
    alone: float = 0.0
    linked: float
    rule: str = "evidence of two nodes is drawn, and known for one job's"
    false_alarm: float = 0.0
    simulated: Rate
    trials: int
    seed: int
    confidence: float
