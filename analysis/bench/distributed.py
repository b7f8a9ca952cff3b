"""``bench distributed``: one training on one process, FSDP2 and DDP, and whether it reaches the same bits.

The unit of rounding is the micro-batch: under ``exact`` numerics the state root of every step is the same whatever the
number of processes, their kernels and the optimizer's ``foreach``, and where processes come and go in mid-run. With
PyTorch's own arithmetic each number of processes ends elsewhere. What four processes record is inspected by one; where
the last of them lies, the run is rejected and that rank named. Sharing costs a step of two processes against one
process's at half the batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from analysis.bench.origin import Row
from analysis.bench.origin import write_among as write
from analysis.examples.train_on_two_processes import MODULE, judge
from firmware_sim.errors import CallerError
from inspector import Outcome, Trust
from inspector.devices import device
from inspector.inspection.transcripts import open_run
from monitor.distributed.attribution import departures
from monitor.distributed.launcher import launch
from monitor.distributed.lies import RANK_LIES

__all__ = ["CASES", "run", "table", "verdict", "write"]


CASES = ("equality", "elastic", "memory", "lie", "speed")
_CHILD = "analysis.bench._distributed_child"
_SPEED = "analysis.bench._distributed_speed"
_MICRO_BATCHES = 12
_MANY = 48
_REPEATS = 3
_MOST_MEMORY = 1.1
_MOST_TIME = 1.3
_HALF, _TURNS = 2, 8
"""Micro-batches of the single process, and steps that are timed."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_RETURNING = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has glibc give memory back that is let go, which is not what a rank needs."""
_FAMILIES = ("mkl-compatible", "sse41")
_LAYOUTS = (("alone", 1), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4), ("ddp", 2))
_LIAR, _LIE_STEP = 3, 3
"""Rank, of four, that lies, and when: in a step that the recorder does not repeat, which would refuse it."""
_STOPPED = "STOPPED"
"""Instead of an outcome, of a run that a rank stops as it gets other bytes than were signed."""
_ELASTIC = (("fsdp2", 4), ("fsdp2", 2), ("alone", 1))


def run(*, steps: int = 3, cases: Sequence[str] = CASES, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Train on every layout; ``cases`` names the works to do.

    Rows hold ``work``, ``mode`` (layout and number of processes), ``numerics``, ``device``, ``foreach``,
    ``micro_batches``, ``seconds`` of the job, ``step_mib`` (the most that a rank's memory grows by in a step after the
    first; None where there is none, and for native), ``ratio`` (in one row: of that at 48 micro-batches to that at 12,
    each the median of three), ``freed`` (storages of whole parameters that FSDP2 let go on rank 0), ``uneven`` (tensors
    of which ranks hold pieces of different lengths; None for native), ``norms`` (of all gradients, in each step),
    ``clip`` (the most that is left of them) and ``roots`` (the state root after each step; of weights alone for
    native). Those of the work ``lie`` hold ``lie`` (what the last of four ranks alters; None for an honest run), the
    inspection's ``outcome``, and as ``named`` step, rank and kind of each departure. Those of the work ``speed`` hold
    ``recorded`` (by a recorder, or by ranks that sign alone), and of FSDP2 on two processes of one thread each, against
    one such process at half the batch, in the median of steps taken in turns: ``seconds`` of a step, ``ratio`` and
    ``cpu_ratio`` (of wall and of processor time) and ``steps``. Of a recorder, rank 0 finds the whole program too.
    """
    rows: list[Row] = []
    for name, case in _CASES.items():
        for row in case(steps) if name in cases else ():
            rows.append(row)
            if progress is not None:
                progress(1)
    return rows


def _equality(steps: int) -> Iterator[Row]:
    """Every layout, under exact numerics and natively."""
    whole = (0, steps)
    for number, (layout, processes) in enumerate(_LAYOUTS):
        yield _trained(layout, processes, steps=whole, family=_FAMILIES[number % 2])
    for layout, processes in (("alone", 1), ("fsdp2", 2)):
        yield _trained(layout, processes, steps=whole, family=_FAMILIES[1], foreach=True)
    for layout, processes in (("alone", 1), ("fsdp2", 2), ("fsdp2", 4), ("ddp", 2)):
        yield _trained(layout, processes, steps=whole, numerics="native")


def _elastic(steps: int) -> Iterator[Row]:
    """One training that goes on with fewer processes."""
    with tempfile.TemporaryDirectory() as folder:
        start = ""
        for number, (layout, processes) in enumerate(_ELASTIC):
            end = str(Path(folder) / f"{number}.safetensors")
            part = (steps * number // len(_ELASTIC), steps * (number + 1) // len(_ELASTIC))
            family = _FAMILIES[number % 2]
            yield _trained(layout, processes, steps=part, start=start, end=end, family=family, work="elastic")
            start = end


def _memory(steps: int) -> Iterator[Row]:
    """Steps of few and of many micro-batches; the last row has the ratio of what they take."""
    grown: dict[int, list[float]] = {_MICRO_BATCHES: [], _MANY: []}
    for count, found in grown.items():
        for _ in range(_REPEATS):
            row = _trained("fsdp2", 2, sizes={"width": 120}, steps=(0, 2), work="memory", micro_batches=count)
            found.append(row["step_mib"])
            if len(grown[_MANY]) == _REPEATS:
                row["ratio"] = median(grown[_MANY]) / median(grown[_MICRO_BATCHES])
            yield row


def _timed(is_recorded: bool) -> Row:
    """A step on two processes against one of one process."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"out": folder, "recorded": is_recorded, "micro_batches": _HALF, "steps": _TURNS}
        found = launch(_SPEED, 2, given, environment=_ONE_THREAD, timeout=7200.0)
    wall, cpu = (
        median(shared[part] / alone[part] for alone, shared in zip(found["alone"], found["fsdp2"], strict=True))
        for part in (0, 1)
    )
    return {
        "work": "speed",
        "mode": "fsdp2-2",
        "recorded": is_recorded,
        "seconds": median(wall for wall, _ in found["fsdp2"]),
        "ratio": wall,
        "cpu_ratio": cpu,
        "micro_batches": 2 * _HALF,
        "steps": _TURNS,
    }


def _lied(lie: str | None) -> Row:
    """A recorded run of four processes, as an inspection and the ranks' statements show it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            launch(MODULE, _LIAR + 1, {"run": str(run), "lie": lie and [lie, _LIAR, _LIE_STEP]})
            stopped = None
        except CallerError:
            stopped = _STOPPED
        trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
        opened = open_run(run, trust)
        found = departures(opened, trust.labs[opened.metadata.lab])
        outcome = stopped or judge(run).outcome.value
    named = sorted({(each.step, each.rank, each.kind) for each in found})
    mode = f"fsdp2-{_LIAR + 1}"
    return {"work": "lie", "mode": mode, "lie": lie, "outcome": outcome, "named": [list(each) for each in named]}


def _trained(
    layout: str,
    processes: int,
    *,
    steps: tuple[int, int],
    numerics: str = "exact",
    family: str = _FAMILIES[0],
    foreach: bool = False,
    micro_batches: int = _MICRO_BATCHES,
    sizes: dict[str, int] | None = None,
    start: str = "",
    end: str = "",
    work: str = "equality",
) -> Row:
    given = {
        "layout": layout,
        "processes": processes,
        "steps": list(steps),
        "numerics": numerics,
        "foreach": foreach,
        "micro_batches": micro_batches,
        "sizes": sizes or {},
        "start": start,
        "end": end,
    }
    environment = {**device(family).variables, **(_RETURNING if work == "memory" else {})}
    found = launch(_CHILD, processes, given, environment=environment)
    return {
        "work": work,
        "mode": f"{layout}-{processes}",
        "numerics": numerics,
        "device": family,
        "foreach": foreach,
        "micro_batches": micro_batches,
        "ratio": None,
        **found,
    }


_CASES: Mapping[str, Callable[[int], Iterable[Row]]] = {
    "equality": _equality,
    "elastic": _elastic,
    "memory": _memory,
    "speed": lambda _: map(_timed, (False, True)),
    "lie": lambda _: map(_lied, (None, *RANK_LIES)),
}
"""What each case measures, for a number of steps."""


def verdict(rows: Sequence[Row]) -> str | None:
    """Which layout ended in other bits than one process, or None; that native ends in one is also said."""
    trained = [row for row in rows if row["work"] not in ("lie", "speed")]
    exact = [row for row in trained if row["work"] == "equality" and row["numerics"] == "exact"]
    native = [row for row in trained if row["numerics"] == "native"]
    return (
        _other_bits(trained, exact)
        or _shown_too_little(trained)
        or _storages(exact, native)
        or _alike(exact, native)
        or _too_dear(rows)
        or _lies_missed(rows)
    )


def _other_bits(trained: Sequence[Row], exact: Sequence[Row]) -> str | None:
    expected = exact[0]["roots"] if exact else []
    for row in exact:
        if row["roots"] != expected:
            return f"{row['mode']} on {row['device']} ends in other bits than {exact[0]['mode']}"
    elastic = [root for row in trained if row["work"] == "elastic" for root in row["roots"]]
    if elastic and not exact:
        return "a run whose number of processes changes is compared with the others; measure equality too"
    if elastic and elastic != expected:
        return "a run whose number of processes changes ends in other bits"
    return None


def _shown_too_little(trained: Sequence[Row]) -> str | None:
    for row in trained:
        if row["clip"] is None or min(row["norms"]) <= row["clip"]:
            return f"{row['mode']} has a step without clipping, so that this table does not show it"
        if row["work"] == "equality" and row["mode"].startswith("fsdp2") and row["uneven"] == 0:
            return f"{row['mode']} has even shards alone, so that this table does not show others"
    return None


def _storages(exact: Sequence[Row], native: Sequence[Row]) -> str | None:
    counts = {row["mode"]: row["freed"] for row in native}
    for row in exact:
        if row["freed"] != counts.get(row["mode"], row["freed"]):
            return f"{row['mode']} lets {row['freed']} storages go, and native FSDP2 {counts[row['mode']]}"
    return None


def _alike(exact: Sequence[Row], native: Sequence[Row]) -> str | None:
    if exact and len({row["roots"][-1] for row in native}) == 1:
        return "native arithmetic ends in one state on every layout, so that this table shows nothing"
    return None


def _too_dear(rows: Sequence[Row]) -> str | None:
    for row in rows:
        if row["work"] not in ("lie", "speed") and row["ratio"] is not None and row["ratio"] > _MOST_MEMORY:
            return f"{row['micro_batches']} micro-batches take {row['ratio']:.2f} times the memory of {_MICRO_BATCHES}"
    for row in rows:
        if row["work"] == "speed" and not row["recorded"] and row["cpu_ratio"] > _MOST_TIME:
            return f"a step of {row['mode']} takes {row['cpu_ratio']:.2f} times one process's at half the batch"
    return None


def _lies_missed(rows: Sequence[Row]) -> str | None:
    for row in rows:
        if row["work"] != "lie":
            continue
        outcome, named = Outcome.REJECT.value, [[_LIE_STEP, _LIAR, row["lie"]]]
        if row["lie"] is None:
            outcome, named = Outcome.ACCEPT.value, []
        elif row["lie"] == "bytes":  # what this one sends differs from what it signed, says the one that got it
            outcome, named = _STOPPED, [[_LIE_STEP, _LIAR - 1, "complaint"]]
        if row["outcome"] != outcome or row["named"] != named:
            return f"a rank that alters {row['lie']} ends in {row['outcome']}, and named is {row['named']}"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    names = f"{'work':9} {'layout':8} {'numerics':8} {'device':15} {'foreach':7} {'parts':>5}"
    lines = [f"{names} {'MiB':>6} {'freed':>5}  roots"]
    for row in rows:
        if row["work"] == "lie":
            named = ", ".join(f"step {step}, rank {rank}, {kind}" for step, rank, kind in row["named"])
            lines.append(
                f"{'lie':9} {row['mode']:8} {row['lie'] or 'none':8} {row['outcome']}; {named or 'none named'}"
            )
            continue
        if row["work"] == "speed":
            kind = "recorded" if row["recorded"] else "signed alone"
            lines.append(
                f"{'speed':9} {row['mode']:8} {kind}: a step takes {row['ratio']:.2f} times one process's at half the "
                f"batch ({row['cpu_ratio']:.2f} of processor time)"
            )
            continue
        roots = " ".join(root[:8] for root in row["roots"])
        step = "" if row["step_mib"] is None else f"{row['step_mib']:.1f}"
        lines.append(
            f"{row['work']:9} {row['mode']:8} {row['numerics']:8} {row['device']:15} {row['foreach']!s:7} "
            f"{row['micro_batches']:5} {step:>6} {row['freed']:5}  {roots}"
        )
    return lines
