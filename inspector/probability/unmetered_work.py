"""Work that no chip meters: what a census, budgets of time and energy, and who looks for sites have a chance to see.

A chip counts what runs on its memory by the operators of a program (``firmware_sim.meter``). The host's own processors,
writes by raw pointers, other processes and chips of no registry pass it by, so the chance by chips is 0. Other means
are left: the time that meters do not account for, the energy that a site takes beyond its declared work, chips that are
asked for in a census, sites that are found. They are taken as independent of one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from inspector.probability._logspace import reals
from inspector.probability.hidden_sites import FindingRate, HiddenSites, accounting_alarm

__all__ = ["Budgets", "UnmeteredWay", "unmetered_ways"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What is known of a lab's declared chips.

    Attributes:
        chips: registered ones of the lab.
        explained: share of their time for which their meters account, by a roofline between signed beacons.
        energy_error: standard deviation of the energy that is metered, against the energy of declared work, as a share.
        false_alarm: chance of an alarm of that budget where nothing is hidden.
        host_speed: FLOP of the host's processors for each FLOP that the chips could do.
        host_energy: energy of a FLOP there, in that of a FLOP on a chip.

    Raises:
        CallerError: a number out of range.
    """

    chips: int
    explained: float = 0.7
    energy_error: float = 0.02
    false_alarm: float = 0.01
    host_speed: float = 0.005
    host_energy: float = 20.0

    def __post_init__(self) -> None:
        reals("chips", self.chips, low=1, high=1e9)
        for name in ("explained", "false_alarm"):
            reals(name.replace("_", " "), getattr(self, name), low=0, high=1)
        for name in ("energy_error", "host_speed", "host_energy"):
            reals(name.replace("_", " "), getattr(self, name), low=0, high=1e6, open_low=True)

    def energy_alarm(self, extra: float, idle: float) -> float:
        """Chance that the budget of energy shows ``extra`` energy, in that of all chips at full power all the time.

        ``idle`` is the share of its full power that an idle chip draws.
        """
        declared = self.explained + (1 - self.explained) * idle
        error = max(self.energy_error * declared, 1e-12)
        return float(accounting_alarm(missing=extra, error=error, false_alarm=self.false_alarm))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeteredWay:
    """One way past all meters.

    Attributes:
        name: where the work is done.
        needed: share of all that could be done there in that time; above 1 it cannot be done.
        seen: chance by chips, time, energy, census and sites; a means that looks elsewhere has 0.
    """

    name: str
    needed: float
    seen: Mapping[str, float]

    @property
    def any(self) -> float:
        """Chance that at least one means sees it."""
        return 1 - prod(1 - chance for chance in self.seen.values())


def unmetered_ways(
    *, flop: float, there: HiddenSites, budgets: Budgets, census: float, finding: FindingRate
) -> list[UnmeteredWay]:
    """Each way to do hidden work where no chip meters it, with the chance that other means see it.

    Args:
        flop: of the hidden work.
        there: the sites that do it where that is elsewhere; its days, utilisation and powers hold for each way.
        census: chance that the censuses of that time see as many chips missing as are held (``registry.leakage``).
        finding: how fast undeclared sites are found.

    Raises:
        CallerError: a number out of range.
    """
    reals("census", census, low=0, high=1)
    share = flop / (budgets.chips * there.days * there.flop_per_day * there.utilisation)
    idle, site = there.idle, finding.found(there)
    on_chips = {
        "time": float(share > 1 - budgets.explained),
        "energy": budgets.energy_alarm(share * (1 - idle), idle),
    }
    host = budgets.energy_alarm(share * budgets.host_energy, idle)
    # Chips at a declared site that are held and do not work draw idle power too.
    hidden = share * there.megawatts / there.megawatts_working
    return [
        _way("on the host's own processors", share / budgets.host_speed, energy=host),
        _way("on its chips, by raw pointers", share, **on_chips),
        _way("on its chips, in another process", share, **on_chips),
        _way("on chips of no registry, at a declared site", 0.0, energy=budgets.energy_alarm(hidden, idle)),
        _way("on chips of no registry, elsewhere", 0.0, sites=site),
        _way("on registered chips that left their owner", 0.0, census=census, sites=site),
    ]


def _way(name: str, needed: float, **seen: float) -> UnmeteredWay:
    means = {"chips": 0.0, "time": 0.0, "energy": 0.0, "census": 0.0, "sites": 0.0}
    return UnmeteredWay(name=name, needed=needed, seen={**means, **seen})
