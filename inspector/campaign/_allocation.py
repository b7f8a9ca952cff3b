"""Which chips a run uses: hidden stock first where the behaviour says so, then registered chips in proportion."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firmware_sim.errors import CallerError
from inspector.campaign.fleet import Fleet, Kind, Lab, Pool, Run, Site, Status
from inspector.campaign.policies import Behaviour

__all__ = ["Share", "allocate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """``count`` chips of one pool at work at the same time (registered ones: in each wave).

    ``work`` is the FLOP that they do in a day.
    """

    lab: Lab
    site: Site
    pool: Pool
    count: int
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stock:
    lab: Lab
    site: Site
    index: int
    pool: Pool
    free: int
    flop_per_day: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.lab.name, self.site.name, self.index


def allocate(
    fleet: Fleet, run: Run, behaviour: Behaviour, flop_per_day: float, free: dict[tuple[str, str, int], int]
) -> list[Share]:
    """Return the chips that do ``flop_per_day``; ``free`` (pool → chips left) is updated.

    Raises:
        CallerError: A lab is unknown, or its chips are too few.
    """
    stock = _stock(fleet, run, behaviour, free)
    shares: list[Share] = []
    left = flop_per_day
    for status, part in behaviour.hidden:
        group = [entry for entry in stock if entry.pool.status is status and entry.free > 0]
        available = sum(entry.free * entry.flop_per_day for entry in group)
        wanted = left if part is None else min(left, part * flop_per_day)
        policy = "divert" if behaviour.consumer is None or status is not Status.EXEMPT else "consumer"
        if not any(entry.pool.status is status for entry in stock):
            raise CallerError(f"{policy}.status: {run.lab!r} has no {status} chips")
        if part is not None and wanted > available * (1 + 1e-9):
            raise CallerError(
                f"{'chips.count: ' if part == 1 else ''}{policy}.share of {part:g}: the {status} chips of {run.lab!r} "
                f"do at most {available:.4g} FLOP a day, {available / flop_per_day:.3g} of the run's; give the lab "
                'more of them, or write share = "stock" for as much as they can do'
            )
        if wanted > 0 and available > 0:
            done = min(wanted, available)
            shares.extend(_take(group, done / available, 1, free))
            left -= done
    # Rounding of the floating-point shares, not real work.
    if left <= flop_per_day * 1e-12:
        return shares
    group = [entry for entry in stock if entry.pool.status is Status.REGISTERED and entry.free > 0]
    available = sum(entry.free * entry.flop_per_day for entry in group)
    need = left * behaviour.waves
    if need > available * (1 + 1e-9):
        key = "rush.factor" if behaviour.stretch < 1 else "waves.groups" if behaviour.waves > 1 else "run.flop"
        raise CallerError(
            f"{key}: needs {need:.4g} FLOP a day of registered chips ({behaviour.waves} group(s)), but the labs own "
            f"only {available:.4g} ({sum(entry.free for entry in group)} chips)"
        )
    shares.extend(_take(group, left / available, behaviour.waves, free))
    return shares


def _take(group: list[_Stock], part: float, waves: int, free: dict[tuple[str, str, int], int]) -> list[Share]:
    shares = []
    for entry in group:
        exact = entry.free * part
        # A chip more only for real work, not for the last bit of the division above.
        count = min(entry.site.sites * math.ceil(exact / entry.site.sites * (1 - 1e-12)), entry.free // waves)
        if count == 0:
            continue
        free[entry.key] = entry.free - count * waves
        shares.append(
            Share(lab=entry.lab, site=entry.site, pool=entry.pool, count=count, work=exact * entry.flop_per_day)
        )
    return shares


def _stock(fleet: Fleet, run: Run, behaviour: Behaviour, free: dict[tuple[str, str, int], int]) -> list[_Stock]:
    names = (run.lab, *behaviour.labs)
    if run.lab in behaviour.labs:
        raise CallerError(
            f"{'split' if behaviour.split else 'collude'}.labs: {run.lab!r} is the lab of the run itself; name other "
            "labs"
        )
    known = {lab.name: lab for lab in fleet.labs}
    for name in names:
        if name not in known:
            key = "run.lab" if name == run.lab else "split.labs" if behaviour.split else "collude.labs"
            raise CallerError(f"{key}: unknown lab {name!r}; known: {', '.join(known)}")
    stock: list[_Stock] = []
    for name in dict.fromkeys(names):
        for site in known[name].sites:
            for index, pool in enumerate(site.pools):
                stock.append(
                    _Stock(
                        lab=known[name],
                        site=site,
                        index=index,
                        pool=pool,
                        free=free.get((name, site.name, index), pool.count),
                        flop_per_day=pool.kind.flop_per_day * run.utilisation / _slowdown(pool.kind, behaviour),
                    )
                )
    return stock


def _slowdown(kind: Kind, behaviour: Behaviour) -> float:
    """Return how many times longer a step takes on this kind's link (S4: 64 GB/s against 900)."""
    if behaviour.consumer is None or kind.link_gbps is None:
        return 1.0
    return 1 - behaviour.consumer + behaviour.consumer * max(1.0, behaviour.reference_gbps / kind.link_gbps)
