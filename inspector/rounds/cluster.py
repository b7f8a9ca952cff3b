"""What a replay cluster does in a round: it keeps what it asked for, checks that, replays, and signs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError, DeviceError
from inspector.bundle.checks import SignedCheck
from inspector.bundle.replays import signing
from inspector.inspection.judging import Worker
from inspector.replay.pool import run_worker
from inspector.rounds.checks import check_runs
from inspector.rounds.exchange import announced_in, asked_in, deadline, from_lab, needed, openings
from inspector.rounds.opening import sweep
from inspector.rounds.world import CLUSTER, INSPECTORATE, World

__all__ = ["replay"]


def replay(world: World, *, now: datetime, worker: Worker = run_worker) -> int:
    """The cluster replays what it was asked for, and signs what its devices return; returns the number of results.

    Raises:
        CallerError: a lab may still open its runs, and has not.
    """
    announced, ordered = announced_in(world, CLUSTER), needed(world, CLUSTER, "order")
    labs = announced.predicate["labs"]
    came = [lab for lab in labs if from_lab(world, announced, "openings", lab, to=CLUSTER) is not None]
    asked = asked_in(world, CLUSTER)
    waiting = sorted({name.partition(".")[0] for name in asked} - set(came))
    if waiting and now <= deadline(announced, "openings"):
        raise CallerError(f"{waiting[0]} has until {announced.predicate['deadlines']['openings']} to open its runs")
    mine = {name: each for name, each in asked.items() if name.partition(".")[0] in came}
    folders = sorted(openings(world, CLUSTER).resolve().iterdir())
    opened, refused = sweep(folders, mine, world.trust())
    places = {folder.name: folder for folder in opened}
    signed = signing(worker, world.key(CLUSTER))

    def work(entry: Mapping[str, Any]) -> dict[str, Any]:
        job, name = entry["job"], Path(entry["job"]["run"]).name
        told = {"device": entry["device"], "action": job["action"], "manifest": job["manifest"]}
        if name not in places:
            return {**told, "result": {"device_error": "the run was not opened"}}
        try:
            result = signed(entry["device"], {**job, "run": str(places[name]), "opened": True})
        except DeviceError as error:
            result = {"device_error": str(error)}
        return {**told, "result": result}

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        results = list(threads.map(work, ordered.predicate["jobs"]))
    checked = check_runs(list(opened), world.trust(), now=now, opened=opened)
    checks = [SignedCheck(head=head, checked=each).sign(world.key(CLUSTER)).decode() for head, each in checked.items()]
    told = {"results": results, "checks": checks, "refused": refused}
    world.send("results", CLUSTER, [INSPECTORATE], told, announced.digest, world.key(CLUSTER), now)
    return len(results)
