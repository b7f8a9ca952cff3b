"""Evidence beyond chips: alarms of several sources, weighed together as likelihood ratios with a stated dependence.

Each source gives an alarm or none. Sources of one group share causes, after the beta-factor model of reliability
analysis (Fleming 1975): a share of the misses of its best source is one event that silences the whole group, and the
same share of its rarest false alarms one event that sets off all of it. What is left of each source is independent, so
that every source keeps the rates that it has alone, and the probability of each pattern of alarms is exact.

Laws:
    1. An evasion never makes an alarm more likely.
    2. The rule that accuses is made against a violator who evades everything, after Neyman and Pearson: patterns by
       likelihood ratio, within a cap on false alarms. It is fixed before it is asked what others get away with.
    3. One alarm more never acquits.
    4. Sources know nothing of the chips' inspections: both together miss with the product of their misses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats, reals

__all__ = ["MOST_SOURCES", "AlarmSource", "DecisionRule", "Observed", "Sources", "best_rule"]

Alarms = NDArray[np.bool_]

MOST_SOURCES = 12
"""Sources weighed together; each doubles the number of patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSource:
    """One source of alarms.

    Attributes:
        name: unique.
        detection: chance of an alarm where there is a violation that does nothing against it.
        evaded: the same where the violator evades this source.
        false_alarm: chance of an alarm where there is no violation.
        group: sources that share causes; empty: none.
        origin: where the numbers are from.
    """

    name: str
    detection: float
    evaded: float
    false_alarm: float
    group: str = ""
    origin: str = "assumed"

    def __post_init__(self) -> None:
        for what, value in (("detection", self.detection), ("evaded", self.evaded), ("false_alarm", self.false_alarm)):
            reals(f"{what} of evidence {self.name!r}", value, low=0, high=1)
        if self.evaded > self.detection:
            raise CallerError(f"evidence {self.name!r}: evasion would raise detection to {self.evaded:g}")

    def ratio(self, alarm: bool, *, evaded: bool = False) -> float:
        """Return by what factor this source alone changes the odds of a violation.

        It is infinite where only a violator can have caused what the source says.
        """
        caught = self.evaded if evaded else self.detection
        one, other = (caught, self.false_alarm) if alarm else (1.0 - caught, 1.0 - self.false_alarm)
        return one / other if other > 0 else (float("inf") if one > 0 else float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources with the share of common causes in each group.

    Attributes:
        each: at most ``MOST_SOURCES``.
        shared: by group, the share of its least misses, and of its least false alarms, that all of it has in common.
    """

    each: tuple[AlarmSource, ...]
    shared: Mapping[str, float]

    def __post_init__(self) -> None:
        names = [source.name for source in self.each]
        if not names:
            raise CallerError("there is no evidence to weigh")
        if len(names) > MOST_SOURCES:
            raise CallerError(f"at most {MOST_SOURCES} sources of evidence are weighed together, not {len(names)}")
        if len(set(names)) < len(names):
            raise CallerError("names of evidence must be unique")
        for group, share in self.shared.items():
            reals(f"shared causes of {group!r}", share, low=0, high=1)
            if group not in {source.group for source in self.each}:
                raise CallerError(f"no evidence belongs to the group {group!r}")
        for source in self.each:
            if source.group and source.group not in self.shared:
                raise CallerError(f"evidence {source.name!r}: the shared causes of {source.group!r} are not stated")

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(source.name for source in self.each)

    @property
    def patterns(self) -> Alarms:
        """All patterns of alarms, shape (2^n, n); the first has none."""
        return np.array(list(itertools.product((False, True), repeat=len(self.each))))

    def among(self, evading: Collection[str]) -> frozenset[str]:
        """Return names of sources, all of them known; "all" means every one.

        Raises:
            CallerError: there is no such source.
        """
        found = frozenset(self.names if "all" in evading else evading)
        for name in sorted(found - set(self.names)):
            raise CallerError(f"no evidence is named {name!r}; known: {', '.join(self.names)}")
        return found

    def violation(self, evading: Collection[str] = ()) -> Floats:
        """Return the probability of each pattern where there is a violation, shape (2^n,)."""
        return self._joint(self._caught(evading), all_alarm=False)

    def honest(self) -> Floats:
        """Return the probability of each pattern where there is none, shape (2^n,)."""
        return self._joint([source.false_alarm for source in self.each], all_alarm=True)

    def draw(self, trials: int, rng: Generator, *, evading: Collection[str] | None) -> Alarms:
        """Return drawn alarms, shape (trials, n); of a world without violation where ``evading`` is None."""
        honest = evading is None
        rates = [source.false_alarm for source in self.each] if evading is None else self._caught(evading)
        found = np.zeros((trials, len(rates)), np.bool_)
        for group in self._groups():
            common, rest = self._split([rates[place] for place in group], self.each[group[0]].group, honest)
            together = rng.random(trials) < common
            for place, rate in zip(group, rest, strict=True):
                alone = rng.random(trials) < rate
                found[:, place] = np.where(together, honest, alone)
        return found

    def _caught(self, evading: Collection[str]) -> list[float]:
        hidden = self.among(evading)
        return [source.evaded if source.name in hidden else source.detection for source in self.each]

    def _groups(self) -> list[list[int]]:
        """Return places that share causes; a source without group is a group alone."""
        found: dict[str, list[int]] = {}
        for place, source in enumerate(self.each):
            found.setdefault(source.group or f"\0{place}", []).append(place)
        return list(found.values())

    def _split(self, rates: list[float], group: str, all_alarm: bool) -> tuple[float, list[float]]:
        """Return the chance of the common event, and each source's chance of an alarm where it does not happen."""
        share = self.shared.get(group, 0.0)
        own = rates if all_alarm else [1.0 - rate for rate in rates]
        common = share * min(own) if len(own) > 1 else 0.0
        left = [0.0 if common == 1 else (each - common) / (1.0 - common) for each in own]
        return common, left if all_alarm else [1.0 - each for each in left]

    def _joint(self, rates: list[float], *, all_alarm: bool) -> Floats:
        patterns = self.patterns
        total = np.ones(len(patterns))
        for group in self._groups():
            common, rest = self._split([rates[place] for place in group], self.each[group[0]].group, all_alarm)
            seen = patterns[:, group]
            alone = np.where(seen, rest, 1.0 - np.array(rest)).prod(axis=1)
            together = (seen == all_alarm).all(axis=1)
            total *= common * together + (1.0 - common) * alone
        return np.asarray(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRule:
    """Which patterns of alarms accuse.

    Attributes:
        accuses: for each pattern, 2^n in all.
        false_alarm: chance to accuse where there is no violation.
    """

    accuses: tuple[bool, ...]
    false_alarm: float

    def detection(self, sources: Sources, evading: Collection[str] = ()) -> float:
        """Return the chance to accuse a violator who evades some of the sources."""
        return float(min(1.0, sources.violation(evading)[np.array(self.accuses)].sum()))

    def worst(self, sources: Sources, evasions: int) -> tuple[float, tuple[str, ...]]:
        """Return the least detection of a violator who can afford so many evasions, and which he takes."""
        chosen = itertools.combinations(sources.names, evasions)
        return min((self.detection(sources, each), each) for each in chosen)

    def observed(self, sources: Sources, alarm: Collection[str], silent: Collection[str], prior: float) -> Observed:
        """Return what alarms of some sources, and the silence of others, say of a violation.

        Args:
            prior: chance of a violation beforehand.
        """
        fits = np.ones(len(sources.patterns), np.bool_)
        for place, name in enumerate(sources.names):
            if name in alarm or name in silent:
                fits &= sources.patterns[:, place] == (name in alarm)
        honest = float(sources.honest()[fits].sum())
        guilty = [float(sources.violation(evading)[fits].sum()) for evading in ((), ("all",))]
        weights = [prior * each + (1 - prior) * honest for each in guilty]
        ratios = [each / honest if honest > 0 and math.isfinite(each / honest) else None for each in guilty]
        after = [prior * each / weight if weight > 0 else None for each, weight in zip(guilty, weights, strict=True)]
        complete = fits.sum() == 1 and after != [None, None]
        return Observed(
            alarm=sorted(alarm),
            silent=sorted(silent),
            prior=prior,
            ratio=ratios[0],
            posterior=after[0],
            ratio_evaded=ratios[1],
            posterior_evaded=after[1],
            accused=self.accuses[int(np.flatnonzero(fits)[0])] if complete else None,
        )

    def accused(self, alarms: Alarms) -> Alarms:
        """Return whether each row of drawn alarms, shape (trials, n), accuses."""
        weights = 1 << np.arange(alarms.shape[1])[::-1]
        return np.array(self.accuses)[alarms @ weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What alarms that were seen say; sources that were not named are left out.

    Attributes:
        ratio, ratio_evaded: factors on the odds, null where unbounded.
        posterior, posterior_evaded: chance of a violation; null if neither an honest nor a violating lab causes these
            alarms.
        accused: by the rule; null unless every source is named.
    """

    alarm: Sequence[str]
    silent: Sequence[str]
    prior: float
    ratio: float | None
    posterior: float | None
    ratio_evaded: float | None
    posterior_evaded: float | None
    accused: bool | None


def best_rule(alternatives: Sequence[Sources], cap: float) -> DecisionRule:
    """Return a rule of high detection of a violator who evades everything, within a cap on false alarms.

    Patterns are taken by likelihood ratio, largest first, each with all patterns of more alarms; what would accuse the
    honest with more than ``cap`` is passed over.

    Args:
        alternatives: the same sources, with what they see of each way to violate; all ways count alike.
        cap: largest chance to accuse where there is no violation.

    Raises:
        CallerError: no alternative, or sources whose false alarms differ.
    """
    reals("cap on false alarms", cap, low=0, high=1)
    if not alternatives:
        raise CallerError("there is no violation for which evidence could be weighed")
    honest = alternatives[0].honest()
    for each in alternatives[1:]:
        if each.names != alternatives[0].names or not np.array_equal(each.honest(), honest):
            raise CallerError("all alternatives must list the same evidence with the same rates of false alarms")
    violation = np.mean([each.violation(("all",)) for each in alternatives], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(violation > 0, violation / honest, 0.0)
    order = np.argsort(-ratio, kind="stable")
    # The pattern without any alarm accuses no one, whatever the numbers say.
    order = order[(ratio[order] > 1) & (order != 0)]
    places = np.arange(len(honest))
    accuses = np.zeros(len(honest), np.bool_)
    for pattern in order:
        more = accuses | (places & pattern == pattern)
        if honest[more].sum() <= cap:
            accuses = more
    return DecisionRule(accuses=tuple(accuses.tolist()), false_alarm=float(honest[accuses].sum()))
