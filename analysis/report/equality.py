"""The table of equal bits: its file, and what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError, DeviceError, file_error
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from monitor.numerics import NUMERICS

__all__ = [
    "COMMITTED",
    "DIGESTS",
    "Row",
    "counts",
    "ending_of",
    "key_of",
    "labelled",
    "load",
    "summary",
    "table",
    "training_of",
    "verdict",
]

Row = dict[str, Any]

COMMITTED = Path(str(resources.files("analysis"))) / "data" / "equality.json"
"""The table that comes with the program."""

DIGESTS = ("weights", "optimizer", "losses")
_DIGEST = re.compile(r"sha256-[a-z0-9-]+:[0-9a-f]{64}")
_TRAINING = ("work", "mode", "steps", "batch_size", "seed")
_KEY = (*_TRAINING, "machine", "device")
_TYPES = dict.fromkeys(("work", "mode", "device", "status"), str) | dict.fromkeys(
    ("steps", "batch_size", "seed", "machine"), int
)


def training_of(row: Row) -> tuple[Any, ...]:
    """Key under which rows are compared."""
    return tuple(row[name] for name in _TRAINING)


def key_of(row: Row) -> tuple[Any, ...]:
    """Unique key of a row."""
    return tuple(row[name] for name in _KEY)


def load(path: Path) -> JsonObject:
    """The document in a file: ``hardware``, a list of machines, ``rows``, and what else is at its top.

    A row's ``machine`` counts in ``hardware``, and so does ``recorded_on`` of a ``rounded`` one: where its logs come
    from.

    Raises:
        CallerError: the file is not such a document.
    """
    try:
        document: Any = canonical.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise file_error(f"cannot read the table {path}", error) from None
    except (ValueError, RecursionError) as error:
        raise CallerError(f"cannot read the table {path}: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise CallerError(f"{path} was not written by this command")
    machines, rows = document.get("hardware"), document["rows"]
    _check_rows(path, machines, rows)
    return document


def _check_rows(path: Path, machines: object, rows: list[Any]) -> None:
    """CallerError unless each row is one of this command, on a machine that is listed, and each once."""
    if not isinstance(machines, list) or not machines or not all(map(_is_machine, machines)):
        raise CallerError(f"{path} does not list the machines of its rows")
    if any(entry in machines[:number] for number, entry in enumerate(machines)):
        raise CallerError(f"{path} lists a machine twice")
    if not all(_is_row(row, len(machines)) for row in rows):
        raise CallerError(f"{path} has a row that this command does not write")
    if len(set(map(key_of, rows))) != len(rows):
        raise CallerError(f"{path} has two rows of the same run")
    recordings = {(training_of(row), row["machine"]): row for row in rows if row.get("role") == "recording"}
    for row in rows:
        if row["mode"] == "rounded" and row["status"] == "run":
            recording = recordings.get((training_of(row), row["recorded_on"]))
            if recording is None or len({row.get("log_digest"), recording.get("log_digest")} - {None}) > 1:
                raise CallerError(f"{path} has no recording for {row['work']} on {row['device']}")


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
        and (row["status"] != "run" or all(_DIGEST.fullmatch(str(row.get(name))) for name in DIGESTS))
    )


def labelled(document: JsonObject) -> list[Row]:
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


def ending_of(row: Row) -> tuple[str, ...]:
    """The digests of weights, optimizer state and losses."""
    return tuple(row[name] for name in DIGESTS)


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
            groups.setdefault((*training_of(row), recording), []).append(row)
    return groups


def counts(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """(devices that ran, different endings among them) by (work, mode).

    An ending is the digests of weights, optimizer state and losses together. Only rows of the same training are
    compared, and ``rounded`` ones of the same recording: the largest number counts.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for (work, mode, *_), group in _comparable(rows).items():
        ran, distinct = found.get((work, mode), (0, 0))
        found[work, mode] = ran + len(group), max(distinct, len(set(map(ending_of, group))))
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
            endings.setdefault(ending_of(row), []).append(_name(row, rows))
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
    return "/".join(row[name].partition(":")[2][:8] for name in DIGESTS)
