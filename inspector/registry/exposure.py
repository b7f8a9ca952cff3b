"""What the log says about losses in a window: chips answered for, for how long, and how many of them were lost."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import ColumnElement, Connection, Integer, and_, case, cast, func, or_, select

from firmware_sim.errors import CallerError
from inspector.registry._schema import batches, changes, parties
from inspector.registry._values import ChipState
from inspector.registry.directory import Registry
from inspector.registry.losses import LossRecord

__all__ = ["SECONDS_PER_YEAR", "loss_records"]

SECONDS_PER_YEAR = 365 * 86_400

_LOST, _DESTROYED = int(ChipState.LOST), int(ChipState.DESTROYED)


def loss_records(registry: Registry, *, start: int, end: int) -> list[LossRecord]:
    """One record for each party that answers for a chip in the window from ``start`` to ``end`` (seconds since 1970).

    A holder answers for a chip from the record that gave it to the holder until it passes on or is destroyed: the time
    after a loss counts too, which is the potential exposure that the tests in ``losses`` are stated for. A chip found
    again and lost again by one holder counts once.
    """
    if not 0 <= start < end:
        raise CallerError(f"the window from {start} to {end} is empty")
    with registry.reader() as connection:
        seconds: defaultdict[int, int] = defaultdict(int)
        chips: defaultdict[int, int] = defaultdict(int)
        _count_batches(connection, start, end, seconds, chips)
        _count_changes(connection, start, end, seconds, chips)
        losses = connection.execute(
            select(changes.c.holder, func.count(changes.c.ordinal.distinct()))
            .where(changes.c.state == _LOST, changes.c.time > start, changes.c.time <= end)
            .group_by(changes.c.holder)
        )
        lost = {row[0]: row[1] for row in losses}
        names = {row.party: row.name for row in connection.execute(select(parties.c.party, parties.c.name))}
    return [
        LossRecord(
            owner=names[holder],
            chips=chips[holder],
            chip_years=seconds[holder] / SECONDS_PER_YEAR,
            lost=lost.get(holder, 0),
        )
        for holder in sorted(chips)
        if chips[holder] > 0
    ]


def _count_batches(
    connection: Connection, start: int, end: int, seconds: defaultdict[int, int], chips: defaultdict[int, int]
) -> None:
    """As if every chip had stayed with its maker; the changes correct that."""
    for maker, time, count in connection.execute(select(batches.c.maker, batches.c.time, batches.c.count)):
        if time <= end:
            seconds[maker] += count * (end - max(start, time))
            chips[maker] += count


def _count_changes(
    connection: Connection, start: int, end: int, seconds: defaultdict[int, int], chips: defaultdict[int, int]
) -> None:
    remaining = end - case((changes.c.time > start, changes.c.time), else_=start)
    leaves = or_(changes.c.holder != changes.c.holder_before, changes.c.state == _DESTROYED)
    arrives = and_(changes.c.holder != changes.c.holder_before, changes.c.state != _DESTROYED)
    before_window: ColumnElement[int] = cast(case((changes.c.time <= start, 1), else_=0), Integer)
    in_time = changes.c.time <= end
    left = select(changes.c.holder_before, func.sum(remaining), func.sum(before_window)).where(leaves, in_time)
    for holder, time, gone_before in connection.execute(left.group_by(changes.c.holder_before)):
        seconds[holder] -= int(time)
        chips[holder] -= int(gone_before)
    arrived = select(changes.c.holder, func.sum(remaining), func.count()).where(arrives, in_time)
    for holder, time, count in connection.execute(arrived.group_by(changes.c.holder)):
        seconds[holder] += int(time)
        chips[holder] += int(count)
