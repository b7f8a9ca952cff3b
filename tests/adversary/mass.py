"""Plays thousands of sequences in several processes and judges them together."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np

from inspector.replay.pool import DevicePool
from tests.adversary.lies import BESIDE, DEFERRED, GUARD_ROWS
from tests.adversary.play import Played, honest_sequence, lying_sequence, play, shorten
from tests.adversary.world import Worker, kept_device
from tests.guards import GUARDS, off

__all__ = ["DOUBT", "run", "search", "tail"]

DOUBT = 1e-3
"""Chance that a right inspector is called wrong by the sampled worlds, all tests together."""

_CHUNK = 50
_REAL = 100
"""One sequence of so many goes to a replay device in a process of its own."""
_MOST_KEPT = 20

Row = dict[str, Any]


def run(
    *,
    sequences: int,
    honest: int,
    seed: int = 0,
    jobs: int = 1,
    guards_off: bool = False,
    limit: int = 2000,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Play so many sequences of the lying and of the honest lab, then search with each guard off.

    Args:
        limit: sequences within which a guard that is off must show.
        progress: called with the number of sequences that have ended since the last call.
    """
    tasks = [(kind, at, min(at + _CHUNK, seed + count)) for kind, count in (("lying", sequences), ("honest", honest))
             for at in range(seed, seed + count, _CHUNK)]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    played: dict[str, list[Row]] = {"lying": [], "honest": []}
    seconds = {"lying": 0.0, "honest": 0.0}
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_quiet) as pool:
        waiting = {pool.submit(_chunk, *task): task for task in tasks}
        for future in as_completed(waiting):
            kind = waiting[future][0]
            found, spent = future.result()
            played[kind] += found
            for world in found:
                if "violation" in world:
                    print(f"the {kind} lab's sequence {world['seed']} breaks a law", file=sys.stderr, flush=True)
            seconds[kind] += spent
            progress(len(found))
        rows = []
        if sequences:
            lying = sorted(played["lying"], key=lambda each: each["seed"])
            rows += [_full_row(lying, seconds["lying"]), _sampled_row(lying)]
        if honest:
            rows.append(_honest_row(sorted(played["honest"], key=lambda each: each["seed"]), seconds["honest"]))
        if guards_off:
            names = [name for name in GUARD_ROWS if name in GUARDS]
            searches = [pool.submit(search, name, seed, limit) for name in names]
            for row in searches:
                rows.append(row.result())
                progress(0)
    return rows


def search(guard: str, seed: int, limit: int) -> Row:
    """With a guard off, play the lying lab's sequences until one of the guard's rows is accepted."""
    started = time.perf_counter()
    wanted = set(GUARD_ROWS[guard])
    ground: list[tuple[float, bool]] = []
    row: Row = {"work": "guard off", "mode": guard, "ratio": None, "rows": sorted(wanted), "found_after": None}
    with off(guard, *BESIDE.get(guard, ())):
        for number in range(limit):
            played = play(*lying_sequence(seed + number))
            if played.problem is not None and wanted & set(played.rows):
                row |= {"found_after": number + 1, "violation": shorten(played).to_json()}
                break
            if "A4" in wanted and played.ground and played.escape is not None:
                ground.append((played.escape, played.outcome == "ACCEPT"))
                if tail(ground) < DOUBT:
                    row |= {"found_after": number + 1, "accepted": sum(hit for _, hit in ground)}
                    row |= {"escapes": sum(chance for chance, _ in ground), "tail": tail(ground)}
                    break
    row["seconds"] = time.perf_counter() - started
    return row


def tail(worlds: Sequence[tuple[float, bool]]) -> float:
    """Chance of at least as many accepted worlds as there are, where each escapes with its own probability."""
    counts = np.ones(1)
    for chance, _ in worlds:
        counts = np.convolve(counts, [1 - chance, chance])
    return float(min(1.0, counts[sum(accepted for _, accepted in worlds) :].sum()))


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the replay devices that this process starts


_pool: DevicePool | None = None


def _device(seed: int) -> Worker:
    """Mostly the kept device in this process, now and then one in a process of its own."""
    global _pool
    if seed % _REAL:
        return kept_device
    if _pool is None:
        _pool = DevicePool()
        atexit.register(_pool.__exit__)
    return _pool.run


def _chunk(kind: str, start: int, stop: int) -> tuple[list[Row], float]:
    """Play the sequences of some seeds; how each ended, and the seconds of all."""
    started = time.perf_counter()
    sequence = {"lying": lying_sequence, "honest": honest_sequence}[kind]
    found = []
    for seed in range(start, stop):
        worker = _device(seed)
        played = play(*sequence(seed), worker=worker)
        found.append(_summary(seed, played))
        if played.problem is not None:
            found[-1]["violation"] = {"seed": seed, **shorten(played, worker=worker).to_json()}
    return found, time.perf_counter() - started


def _summary(seed: int, played: Played) -> Row:
    return {
        "seed": seed,
        "kind": played.scene.kind,
        "full": played.scene.is_full,
        "outcome": played.outcome,
        "lies": played.rows,
        "deferred": played.deferred,
        "escape": played.escape,
        "ground": played.ground,
        "reason": played.reasons[0].split(":")[0][:80] if played.outcome == "INCONCLUSIVE" else "",
    }


def _violations(worlds: Iterable[Row]) -> Row:
    broken = [world["violation"] for world in worlds if "violation" in world]
    return {"violations": len(broken), "kept": broken[:_MOST_KEPT]}


def _by_row(worlds: Iterable[Row], what: str) -> dict[str, dict[str, int]]:
    """Worlds in which lies of each row were told, and those among them that were accepted."""
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for world in worlds:
        for row in world[what]:
            told[row]["told"] += 1
            told[row]["accepted"] += world["outcome"] == "ACCEPT"
    return {row: dict(told[row]) for row in sorted(told)}


def _base(mode: str, worlds: Sequence[Row], seconds: float) -> Row:
    return {
        "work": "honest lab" if mode == "honest" else "lying lab",
        "mode": mode,
        "seed": min((world["seed"] for world in worlds), default=None),
        "seconds": seconds,
        "ratio": None,
        "sequences": len(worlds),
        "presets": sum(world["kind"] == "preset" for world in worlds),
        "on_other_processes": sum(world["seed"] % _REAL == 0 for world in worlds),
        "outcomes": dict(Counter(world["outcome"] for world in worlds)),
    }


def _full_row(lying: Sequence[Row], seconds: float) -> Row:
    worlds = [world for world in lying if world["full"]]
    with_lies = [world for world in worlds if world["lies"]]
    only_deferred = [world for world in worlds if world["deferred"] and not world["lies"]]
    return {
        **_base("all drawn", worlds, seconds),
        "with_lies": len(with_lies),
        "lies": _by_row(with_lies, "lies"),
        "deferred": _by_row(only_deferred, "deferred"),
        "deferred_until": DEFERRED,
        **_violations(worlds),
    }


def _sampled_row(lying: Sequence[Row]) -> Row:
    worlds = [world for world in lying if not world["full"]]
    counted = [world for world in worlds if world["lies"] and world["escape"] is not None]
    groups: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for world in counted:
        entry = (world["escape"], world["outcome"] == "ACCEPT")
        groups["all"].append(entry)
        if world["ground"]:
            groups["A4"].append(entry)
        elif len(world["lies"]) == 1:
            groups[world["lies"][0]].append(entry)
    tests = {
        name: {
            "worlds": len(entries),
            "accepted": sum(hit for _, hit in entries),
            "escapes": sum(chance for chance, _ in entries),
            "tail": tail(entries),
        }
        for name, entries in sorted(groups.items())
    }
    too_often = [name for name, test in tests.items() if test["tail"] < DOUBT / len(tests)]
    return {
        **_base("sampled", worlds, 0.0),
        "with_lies": len(counted),
        "lies": tests,
        "accepted_too_often": too_often,
        **_violations(worlds),
    }


def _honest_row(worlds: Sequence[Row], seconds: float) -> Row:
    reasons = Counter(world["reason"] for world in worlds if world["outcome"] == "INCONCLUSIVE")
    return {**_base("honest", worlds, seconds), "inconclusive_because": dict(reasons), **_violations(worlds)}
