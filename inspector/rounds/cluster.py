"""What a replay cluster does in a round: it keeps what it asked for, checks that, replays, and signs.

What it sends has a fixed form (``schemas/messages.json``). What devices say in words may quote samples and weights, so
that it stays in the cluster's own folder (``errors/ROUND.txt``), and a fixed sentence takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from firmware_sim.errors import DeviceError
from inspector.bundle.checks import SignedCheck
from inspector.bundle.replays import signing
from inspector.inspection.replays import Worker
from inspector.replay.pool import run_worker
from inspector.replay.scheduler import at_once
from inspector.rounds.checks import check_runs
from inspector.rounds.exchange import Early, announced_in, asked_in, needed, openings
from inspector.rounds.openings import sweep
from inspector.rounds.receipts import deadline, noted, take
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor.files import remove, write_whole
from monitor.transcript.export import export_path

__all__ = ["replay", "without_words"]

_NOT_OPENED = "the run was not opened"
_WORDS = {"device_error": "the device failed", "evidence_error": "what the lab opened cannot be read"}
_CONTRADICTED = "the step cannot be taken as it was recorded"
_RESULT = ("fingerprint", "seconds", "signed", "examined")
_REPLAY = ("segment", "start_state", "initial_state", "leaves", "inside", "witness", "returned", "changes", "decisions")
_PLACE = ("step", "operator", "operator_index", "element", "obeyed")


def replay(world: World, *, now: datetime, worker: Worker = run_worker) -> int:
    """The cluster replays what it was asked for, and signs what its devices return; returns the number of results.

    It deletes what labs opened to it in earlier rounds.

    Raises:
        Early: a lab may still open its runs, and has not.
    """
    announced, ordered = announced_in(world, CLUSTER), needed(world, CLUSTER, "order")
    take(world, CLUSTER, now)
    _forget(openings(world, CLUSTER))
    labs = announced.predicate["labs"]
    came = [lab for lab in labs if noted(world, CLUSTER, "openings", lab) is not None]
    asked = asked_in(world, CLUSTER)
    waiting = sorted({name.partition(".")[0] for name in asked} - set(came))
    if waiting and now <= deadline(announced, "openings"):
        raise Early(
            f"{waiting[0]} has not opened its runs yet, and has time until "
            f"{announced.predicate['deadlines']['openings']}"
        )
    mine = {name: each for name, each in asked.items() if name.partition(".")[0] in came}
    lists = {export_path(Path(name)).name for name in asked}
    folders = sorted(each for each in openings(world, CLUSTER).resolve().iterdir() if each.name not in lists)
    opened, refused = sweep(folders, mine, world.trust())
    _note_lists(world, came, {mine[folder.name].head: folder for folder in opened})
    places = {folder.name: folder for folder in opened}
    signed = signing(worker, world.key(CLUSTER))

    def work(entry: Mapping[str, Any]) -> dict[str, Any]:
        job, name = entry["job"], Path(entry["job"]["run"]).name
        common = {"device": entry["device"], "action": job["action"], "manifest": job["manifest"]}
        if name not in places:
            return {**common, "result": {"device_error": _NOT_OPENED}}
        try:
            return {**common, "result": signed(entry["device"], {**job, "run": str(places[name]), "opened": True})}
        except DeviceError as error:
            return {**common, "result": {"device_error": str(error)}}

    results = at_once(work, ordered.predicate["jobs"])
    _keep_errors(world, results)
    results = [{**each, "result": without_words(each["result"])} for each in results]
    checked = check_runs(list(opened), world.trust(), now=now, opened=opened)
    checks = [SignedCheck(head=head, checked=each).sign(world.key(CLUSTER)).decode() for head, each in checked.items()]
    body = {"results": results, "checks": checks, "refused": refused}
    world.send("results", CLUSTER, [INSPECTORATE], body, announced.digest, world.key(CLUSTER))
    return len(results)


def _forget(opened: Path) -> None:
    """Delete what labs opened in rounds before this one."""
    for earlier in opened.parent.iterdir():
        if earlier.name < opened.name:
            remove(earlier)


def _note_lists(world: World, labs: Iterable[str], opened: Mapping[str, Path]) -> None:
    """Put next to each run what its lab signed of the files that it opened: files that match are its own."""
    for lab in labs:
        said = noted(world, CLUSTER, "openings", lab)
        for run in () if said is None else said.predicate["runs"]:
            folder = opened.get(run["head"])
            if folder is not None and folder.name.partition(".")[0] == lab:  # of another's run it says nothing
                path = export_path(folder)
                remove(path)  # whatever others put there
                write_whole(path, run["listed"].encode(), new=True)


def without_words(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a device returned, without its free text; nothing of a form that is not known."""
    found = {name: result[name] for name in _RESULT if name in result}
    for kind, text in _WORDS.items():
        if kind in result:
            return {**found, kind: _NOT_OPENED if result[kind] == _NOT_OPENED else text}
    if "replays" in result:
        found["replays"] = [_replayed(each) for each in result["replays"]]
    return found


def _replayed(replay: Mapping[str, Any]) -> dict[str, Any]:
    said = replay["contradiction"]
    place = None if said is None else {name: said[name] for name in _PLACE if name in said}
    contradiction = None if place is None else {**place, "text": _CONTRADICTED}
    return {**{name: replay[name] for name in _REPLAY}, "contradiction": contradiction}


def _keep_errors(world: World, results: list[dict[str, Any]]) -> None:
    """What devices said in words, for the cluster's operator."""
    lines = []
    for each in results:
        said = [one["contradiction"] for one in each["result"].get("replays", ()) if one["contradiction"]]
        lines += [f"{each['device']} {kind} {each['result'][kind]}" for kind in _WORDS if kind in each["result"]]
        lines += [f"{each['device']} step {one['step']} {one['text']}" for one in said]
    if lines:
        path = world.home(CLUSTER) / "errors" / f"{world.round:04d}.txt"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, "".join(f"{line!a}\n" for line in lines).encode())
