"""A party on its own machine: it serves its door, acts when a step is due, and brings what it made to the others.

All that it knows lies in its folder, so that it can be stopped at any moment, and goes on when it is started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from firmware_sim.errors import DeviceError
from firmware_sim.evidence import SigningKey
from inspector.inspection.replays import Worker
from inspector.replay.pool import run_worker
from inspector.rounds.budget import Budget
from inspector.rounds.courier import Courier
from inspector.rounds.door import application
from inspector.rounds.exchange import Early
from inspector.rounds.mail import Held, held_in, release
from inspector.rounds.receipts import deadline
from inspector.rounds.steps import Decided
from inspector.rounds.turns import act, due
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from inspector.wire.server import door, signalled
from inspector.wire.telemetry import Telemetry

__all__ = ["Place", "play_party", "serve_party"]

_LOOK, _IDLE = 0.1, 2.0
"""Seconds after which what came is looked at together, and between two looks where nothing comes."""
_WELL = 120
"""Seconds within which a party that is well has looked, or is in a step."""
_LONGEST = 60.0
"""Seconds after which a step that failed is tried again, at most; before that they double."""


class _Stopped(Exception):
    """A device failed since this process ends, which no party signs anything about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a party is, and where the others are.

    Attributes:
        peers: addresses of the others, by name.
        tls: whether its server speaks TLS.
        metrics: port of counters and health on the loopback address; None for none.
        budget: of each lab in a round.
    """

    host: str
    port: int
    peers: Mapping[str, str]
    tls: bool = False
    metrics: int | None = None
    budget: Budget = field(default_factory=Budget)


def serve_party(
    world: World, party: str, key: SigningKey, place: Place, *, worker: Worker = run_worker, until_decided: bool = False
) -> Decided | None:
    """Play a party until SIGINT or SIGTERM; the verdict, where this is the inspectorate and it has decided.

    Args:
        world: its own folder.
        until_decided: end once the newest round has its verdict.

    Raises:
        DeviceError: a port cannot be had.
    """

    async def served() -> Decided | None:
        return await play_party(world, party, key, place, signalled(), worker=worker, until_decided=until_decided)

    return asyncio.run(served())


async def play_party(
    world: World,
    party: str,
    key: SigningKey,
    place: Place,
    stop: asyncio.Event,
    *,
    worker: Worker = run_worker,
    until_decided: bool = False,
) -> Decided | None:
    """As ``serve_party``, until an event is set."""
    return await _Party(world, party, key, place, worker).run(stop, until_decided)


class _Party:
    def __init__(self, world: World, party: str, key: SigningKey, place: Place, worker: Worker) -> None:
        self._world, self._party, self._place, self._worker = world, party, place, worker
        self._telemetry = Telemetry(party)
        self._courier = Courier(world, party, key, place.peers, self._telemetry, place.budget)
        self._key = key
        self._came = asyncio.Event()
        self._beat = time.monotonic()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._in_step = self._is_stopping = False
        self._idle = _IDLE if party in (INSPECTORATE, CLUSTER) else 2 * _IDLE  # no deadline makes a lab's step due
        self._pause, self._resumes = 1.0, 0.0

    async def run(self, stop: asyncio.Event, until_decided: bool) -> Decided | None:
        """Serve and act until it is over."""
        await asyncio.to_thread(self._world.send_again, self._party, self._key.verifying)
        here = application(self._world, self._party, self._telemetry, self._came.set, budget=self._place.budget)
        served = [(here, self._place.host, self._place.port, self._key if self._place.tls else None)]
        if self._place.metrics is not None:
            seen = self._telemetry.application(lambda: time.monotonic() if self._in_step else self._beat, _WELL)
            served.append((seen, "127.0.0.1", self._place.metrics, None))
        async with door(served):
            self._telemetry.log("serving", port=self._place.port, round=self._world.round)
            couriers = [asyncio.create_task(self._courier.deliver(each)) for each in self._place.peers]
            acting = asyncio.create_task(self._acts(until_decided))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({acting, stopping, *couriers}, return_when=asyncio.FIRST_COMPLETED)
                for courier in couriers:
                    if courier.done():
                        courier.result()  # an error of this program ends the party
                return acting.result() if acting.done() else None
            finally:
                self._is_stopping = True
                tasks = [acting, stopping, *couriers, *self._fetching.values()]
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._thread.shutdown(wait=False)
                self._telemetry.log("stopped", round=self._world.round)

    def _replay(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._worker(name, job)
        except DeviceError:
            if self._is_stopping:
                raise _Stopped from None
            raise

    async def _acts(self, until_decided: bool) -> Decided | None:
        """Look what is due, do it, and look again."""
        while True:
            self._came.clear()
            self._beat = time.monotonic()
            done = await self._act()
            took = time.monotonic() - self._beat
            if isinstance(done, Decided) and until_decided:
                return done
            if done is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._idle):
                        await self._came.wait()
                        await asyncio.sleep(max(_LOOK, 2 * took))  # looks take a third of the time at most

    async def _act(self) -> object:
        """Take the step that is due; None where none is, or it failed and has to wait."""
        step: str | None = None
        begun, now = time.monotonic(), datetime.now(UTC)
        if begun < self._resumes:
            return None
        try:
            for held in await asyncio.to_thread(held_in, self._world, self._party, but=set(self._fetching)):
                if held.sender not in self._fetching:
                    self._fetching[held.sender] = asyncio.create_task(self._fetched(held))
            step = await asyncio.to_thread(due, self._world, self._party, now)
            if step is None:
                return None
            self._in_step = True
            taken = partial(act, self._world, self._party, step, now, worker=self._replay)
            done: object = await asyncio.get_running_loop().run_in_executor(self._thread, taken)
        except (Early, _Stopped):
            return None
        except Exception as error:  # of any kind: who can end another party's process makes it silent
            self._resumes, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LONGEST)
            self._telemetry.count("failures", step or "look")
            self._telemetry.log("failed", step=step or "look", why=f"{type(error).__name__}: {error}")
            return None
        finally:
            self._in_step = False
        self._pause = 1.0
        self._telemetry.count("steps", step)
        took = round(1e3 * (time.monotonic() - begun))
        self._telemetry.log("step", step=step, round=self._world.round, milliseconds=took)
        self._courier.wake()
        return done

    async def _fetched(self, held: Held) -> None:
        """Fetch what a message opens, as long as its deadline lasts, and then file it."""
        try:
            announced = await asyncio.to_thread(self._world.announcement, self._party)
            assert announced is not None
            left = (deadline(announced, held.kind) - datetime.now(UTC)).total_seconds()
            async with asyncio.timeout(max(0, left)):
                while not await self._courier.fetch(held):
                    await asyncio.sleep(_IDLE)
            await asyncio.to_thread(release, self._world, self._party, held)
            self._telemetry.log("opened", lab=held.sender, kind=held.kind)
            self._came.set()
        except TimeoutError:
            await asyncio.to_thread(release, self._world, self._party, held)
            self._telemetry.log("too late", lab=held.sender, kind=held.kind)
        except Exception as error:
            self._telemetry.log("failed", step="fetch", lab=held.sender, why=f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)
        finally:
            del self._fetching[held.sender]
