"""``bench equality``: the same training on devices that compute differently, and whether it ends in the same bits.

``rounded`` is recorded on one device and replayed under its log on the others; ``exact`` and ``native`` run freely on
each. Rows of a file are not run again, so that a table of hours can be made in pieces, and on several machines: each
adds its own rows to those of the others, and replays their recordings where the logs lie beside the file.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from analysis.bench._origin import DATA, commit, hardware
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import digest_bytes, digest_list
from inspector.devices import DEVICES, DevicePool, device
from monitor.numerics import NUMERICS
from monitor.presets import preset

__all__ = ["COMMITTED", "WORKS", "counts", "labelled", "load", "run", "summary", "table", "verdict"]

Row = dict[str, Any]

WORKS: dict[str, tuple[int, int | None]] = {
    "tiny-gpt": (20, None),
    "digits-cnn": (20, None),
    "llama-small": (20, None),
    "gpt2-117m": (3, 1),
    "resnet50-cifar": (3, 4),
}
"""Steps, and the batch size where it is not the preset's own: the large ones take small batches."""

COMMITTED = DATA / "equality.json"
"""The table that comes with the program."""

SEED = 1
_DIGESTS = ("weights", "optimizer", "losses")
_DIGEST = re.compile(r"sha256-[a-z0-9-]+:[0-9a-f]{64}")
_TRAINING = ("work", "mode", "steps", "batch_size", "seed")
_KEY = (*_TRAINING, "machine", "device")
_TYPES = dict.fromkeys(("work", "mode", "device", "status"), str) | dict.fromkeys(
    ("steps", "batch_size", "seed", "machine"), int
)
_TIMEOUT = 6 * 3600


def _training(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _TRAINING)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def load(path: Path) -> dict[str, Any]:
    """The document in a file: ``hardware``, a list of machines, ``rows``, and what else stands at its top.

    A row's ``machine`` counts in ``hardware``, and so does ``recorded_on`` of a ``rounded`` one: where its logs come
    from.

    Raises:
        CallerError: the file is not such a document.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CallerError(f"cannot read the table {path}: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise CallerError(f"{path} is not a table of this command")
    machines, rows = document.get("hardware"), document["rows"]
    if not isinstance(machines, list) or not machines or not all(map(_is_machine, machines)):
        raise CallerError(f"{path} does not list the machines of its rows")
    if any(entry in machines[:number] for number, entry in enumerate(machines)):
        raise CallerError(f"{path} lists a machine twice")
    if not all(_is_row(row, len(machines)) for row in rows):
        raise CallerError(f"{path} has a row that is not one of this command")
    if len(set(map(_key, rows))) != len(rows):
        raise CallerError(f"{path} has two rows of the same run")
    recordings = {(_training(row), row["machine"]): row for row in rows if row.get("role") == "recording"}
    for row in rows:
        if row["mode"] == "rounded" and row["status"] == "run":
            recording = recordings.get((_training(row), row["recorded_on"]))
            if recording is None or len({row.get("log_digest"), recording.get("log_digest")} - {None}) > 1:
                raise CallerError(f"{path} has no recording for {row['work']} on {row['device']}")
    return document


def _is_machine(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("processor"), str)


def _is_row(row: Any, machines: int) -> bool:
    if not isinstance(row, dict) or not all(type(row.get(name)) is kind for name, kind in _TYPES.items()):
        return False
    origin = row.get("recorded_on") if row["mode"] == "rounded" else row["machine"]
    return (
        row["mode"] in NUMERICS
        and all(type(number) is int and 0 <= number < machines for number in (row["machine"], origin))
        and (row.get("role") != "recording" or origin == row["machine"])
        and (row["status"] != "run" or all(_DIGEST.fullmatch(str(row.get(name))) for name in _DIGESTS))
    )


def _opened(out: Path | None) -> dict[str, Any]:
    """The document of earlier calls, or an empty one, with this machine among its hardware."""
    document = {"hardware": [], "rows": []} if out is None or not out.exists() else load(out)
    here = hardware()
    if here not in document["hardware"]:
        document["hardware"].append(here)
    return document


def _save(out: Path, document: dict[str, Any]) -> None:
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise CallerError(f"cannot write {out}: {error.strerror}") from None


def _measured(pool: DevicePool, row: Row, role: str, logs: Path) -> Row:
    """The row with what its device found; a device or a log that fails says so in ``status``."""
    missing = device(row["device"]).missing()
    if missing is not None:
        return {**row, "status": "not run", "reason": missing}
    job = {
        "action": "trial",
        "preset": row["work"],
        "steps": row["steps"],
        "seed": row["seed"],
        "batch_size": row["batch_size"],
        "numerics": row["mode"],
        "role": role,
        "logs": str(logs),
    }
    try:
        result = pool.run(row["device"], job)
    except DeviceError as error:
        return {**row, "status": f"broke: {error}"}
    if "evidence_error" in result:
        return {**row, "status": f"rejected: {result['evidence_error']}"}
    names = (*_DIGESTS, "last_loss", "step_seconds", "seconds", "log_bytes", "entries", "forced")
    return {**row, "status": "run", "role": role, **{name: result[name] for name in names}}


def _wanted(
    here: int, presets: Sequence[str], steps: int | None, devices: Sequence[str], numerics: Sequence[str]
) -> list[Row]:
    """All rows of this machine in the order in which they run."""
    rows = []
    for work in presets:
        default_steps, batch_size = WORKS.get(work, (3, None))
        for name in devices:
            rows += [
                {
                    "work": work,
                    "mode": mode,
                    "machine": here,
                    "device": name,
                    "kind": device(name).kind,
                    "steps": steps or default_steps,
                    "batch_size": batch_size or preset(work).batch_size,
                    "seed": SEED,
                }
                for mode in numerics
            ]
    return rows


def run(
    *,
    presets: Sequence[str] = tuple(WORKS),
    steps: int | None = None,
    devices: Sequence[str] = tuple(DEVICES),
    numerics: Sequence[str] = NUMERICS,
    out: Path | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run what ``out`` does not hold of this machine yet.

    Args:
        steps: instead of those of WORKS.
        devices: the first records the rounding logs, where no earlier call has left any.
        out: file that is written after each row; logs lie beside it, in ``out`` with the suffix ``.logs``.
        progress: called after each row.

    Returns:
        The rows asked for, and those of all devices of other machines in ``out`` for the same training.

    Raises:
        CallerError: an unknown name, a file that is not one of this command's, or logs that no row of it recorded.
    """
    for name in numerics:
        if name not in NUMERICS:
            raise CallerError(f"unknown numerics {name!r}; choose {', '.join(NUMERICS)}")
    if steps is not None and steps < 1:
        raise CallerError(f"--steps must be at least 1, not {steps}")
    document = _opened(out)
    here = document["hardware"].index(hardware())
    wanted = _wanted(here, presets, steps, devices, numerics)
    kept = [row for row in document["rows"] if row["machine"] != here or row["status"] in ("run", "not run")]
    done = {_key(row): row for row in kept}
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch) if out is None else out.with_suffix(".logs")
        for _, group in groupby(wanted, key=lambda row: (row["work"], row["device"])):
            made = commit()
            with DevicePool(timeout=_TIMEOUT) as pool:  # one process for each work, so that its memory is freed
                for row in group:
                    if _key(row) not in done:
                        for found in _filled(row, list(done.values()), pool, logs):
                            done[_key(found)] = {**found, **made}
                        if out is not None:
                            _save(out, {**document, "rows": list(done.values())})
                    progress(done[_key(row)])
    trainings = set(map(_training, wanted))
    others = [row for row in done.values() if row["machine"] != here and _training(row) in trainings]
    rows = sorted([*others, *(done[_key(row)] for row in wanted)], key=lambda row: row["machine"])
    return labelled({**document, "rows": rows})


def _filled(row: Row, done: list[Row], pool: DevicePool, logs: Path) -> Iterator[Row]:
    """Run one row: replay a recording if there is one, and if this machine's was lost, make it again before."""
    folder = logs / "-".join(str(row[name]) for name in ("work", "steps", "batch_size", "seed"))
    if row["mode"] != "rounded":
        yield _measured(pool, row, "recording", folder)
        return
    here, paths = row["machine"], [folder / f"step-{step:04d}.log" for step in range(1, row["steps"] + 1)]

    def measured(row: Row, role: str, origin: int) -> Row:
        found = _measured(pool, {**row, "recorded_on": origin}, role, folder)
        if found["status"] == "run":
            return {**found, "log_digest": _log_digest(paths)}
        if role == "recording":  # no row will tell who made them
            for path in paths:
                path.unlink(missing_ok=True)
        return found

    recordings = [other for other in done if _training(other) == _training(row) and other.get("role") == "recording"]
    if all(path.exists() for path in paths):
        digest = _log_digest(paths)
        origins = [other["machine"] for other in recordings if other.get("log_digest") == digest]
        if not origins:
            raise CallerError(f"no row tells which machine recorded the logs in {folder}; remove them to record others")
        yield measured(row, "replaying", here if here in origins else origins[0])
        return
    lost = next((other for other in recordings if other["machine"] == here), None)
    if lost is None:
        yield measured(row, "recording", here)
    else:
        again = measured({name: lost[name] for name in row}, "recording", here)
        if again["status"] != "run":  # the row of the recording that was lost stays
            yield {**again, **row}
            return
        if (_whole(again), again["log_digest"]) != (_whole(lost), lost.get("log_digest", again["log_digest"])):
            raise CallerError(f"the lost logs of {row['work']} cannot be made again: this program records other ones")
        yield again
        yield measured(row, "replaying", here)


def _log_digest(paths: Sequence[Path]) -> str:
    try:
        return str(digest_list("logs", [(path.name, digest_bytes("log", path.read_bytes())) for path in paths]))
    except OSError as error:
        raise CallerError(f"cannot read the rounding log {error.filename}: {error.strerror}") from None


def labelled(document: dict[str, Any]) -> list[Row]:
    """The rows of a document with ``processor``, a short name of their machine, different for each."""
    names = [_short(entry["processor"]) for entry in document["hardware"]]
    labels = [name if names.count(name) == 1 else f"{name} #{number}" for number, name in enumerate(names)]
    return [{**row, "processor": labels[row["machine"]]} for row in document["rows"]]


def _short(processor: str) -> str:
    """``Intel Xeon`` for ``Intel(R) Xeon(R) CPU @ 2.20GHz``."""
    return " ".join(re.sub(r"\((R|TM)\)|\b(CPU|Processor|\d+-Core)\b|@.*", " ", processor).split()) or processor


def _name(row: Row, rows: Iterable[Row]) -> str:
    """A row's device, and its machine before it where ``rows`` are of more than one."""
    if all(other["machine"] == row["machine"] for other in rows):
        return str(row["device"])
    label = row.get("processor", f"machine {row['machine']}")
    return f"{label} {row['device']}"


def _whole(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _DIGESTS)


def _groups(rows: Iterable[Row]) -> dict[tuple[str, int, int], list[Row]]:
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["work"], row["steps"], row["batch_size"]), []).append(row)
    return groups


def _comparable(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that ran, by work, mode, the rest of the training, and for ``rounded`` the machine that recorded."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "run":
            recording = row["recorded_on"] if row["mode"] == "rounded" else None
            groups.setdefault((*_training(row), recording), []).append(row)
    return groups


def counts(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """(devices that ran, different endings among them) by (work, mode).

    An ending is the digests of weights, optimizer state and losses together. Only rows of the same training are
    compared, and ``rounded`` ones of the same recording: the largest number counts.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for (work, mode, *_), group in _comparable(rows).items():
        ran, distinct = found.get((work, mode), (0, 0))
        found[work, mode] = ran + len(group), max(distinct, len(set(map(_whole, group))))
    return found


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each work its steps, batch size, number of machines and of devices on them, and different endings by mode."""
    found = []
    for (work, steps, batch_size), group in _groups(rows).items():
        ends = counts(group)
        modes: dict[str, int] = {str(mode): ends.get((work, mode), (0, 0))[1] for mode in NUMERICS}
        devices = {(row["machine"], row["device"]) for row in group if row["status"] == "run"}
        size = {"machines": len({number for number, _ in devices}), "devices": len(devices)}
        found.append({"work": work, "steps": steps, "batch_size": batch_size, **size, **modes})
    return found


def verdict(rows: Sequence[Row]) -> str | None:
    """Why the controlled rows do not all end in the same bits, or None where they do.

    Raises:
        DeviceError: a device broke.
    """
    for row in rows:
        if row["status"] not in ("run", "not run"):
            problem = f"{row['work']}, {row['mode']}, {_name(row, rows)}: {row['status']}"
            if row["status"].startswith("broke"):
                raise DeviceError(problem)
            return problem
    if not any(row["status"] == "run" for row in rows):
        return "nothing ran"
    for (work, mode, *_), group in _comparable(rows).items():
        endings: dict[tuple[str, ...], list[str]] = {}
        for row in group:
            endings.setdefault(_whole(row), []).append(_name(row, rows))
        if mode != "native" and len(endings) != 1:
            _, *odd = sorted(endings.values(), key=len, reverse=True)
            names = ", ".join(name for some in odd for name in some)
            return f"{work}, {mode}: {len(endings)} endings on {len(group)} devices; unlike most: {names}"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person: for each work a row a device and a column a mode, with eight digits of the ending."""
    lines: list[str] = []
    for (work, steps, batch_size), group in _groups(rows).items():
        modes = list(dict.fromkeys(row["mode"] for row in group))
        cells = {(_name(row, rows), row["mode"]): _cell(row) for row in group}
        width = max(20, *(len(name) for name, _ in cells)) + 2
        lines += ["", f"{work}, {steps} steps, batches of {batch_size}: weights/optimizer/losses"]
        lines.append(f"  {'device':{width}}" + "".join(f"{mode:30}" for mode in modes))
        for name in dict.fromkeys(name for name, _ in cells):
            lines.append(f"  {name:{width}}" + "".join(f"{cells.get((name, mode), ''):30}" for mode in modes))
        found = counts(group)
        ends = (found.get((work, mode), (0, 0)) for mode in modes)
        ends_text = "".join(f"{f'{distinct} on {ran}':30}" for ran, distinct in ends)
        lines.append(f"  {'different endings':{width}}{ends_text}")
    return lines[1:]


def _cell(row: Row) -> str:
    if row["status"] != "run":
        return str(row["status"])[:28]
    return "/".join(row[name].partition(":")[2][:8] for name in _DIGESTS)
