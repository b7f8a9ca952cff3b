"""``equality``: the same training on devices that compute differently, and whether it ends in the same bits.

``rounded`` is recorded on one device and replayed under its log on the others; ``exact`` and ``native`` run freely on
each. Rows of a file are not run again, so that a table of hours can be made in pieces, and on several machines: each
adds its own rows to those of the others, and replays their recordings where the logs lie beside the file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from analysis.bench.origin import commit, hardware
from analysis.report.equality import (
    COMMITTED,
    DIGESTS,
    Row,
    counts,
    ending_of,
    key_of,
    labelled,
    load,
    summary,
    table,
    training_of,
    verdict,
)
from firmware_sim.errors import CallerError, DeviceError, file_error
from firmware_sim.evidence import digest_bytes, digest_list
from inspector.devices import DEVICES, device
from inspector.replay.pool import DevicePool
from monitor.numerics import NUMERICS
from monitor.presets import preset

__all__ = ["COMMITTED", "WORKS", "counts", "labelled", "load", "run", "summary", "table", "verdict"]

WORKS: dict[str, tuple[int, int | None]] = {
    "tiny-gpt": (20, None),
    "digits-cnn": (20, None),
    "llama-small": (20, None),
    "gpt2-117m": (3, 1),
    "resnet50-cifar": (3, 4),
}
"""Steps, and the batch size where it is not the preset's own: the large ones take small batches."""

SEED = 1
_TIMEOUT = 6 * 3600


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
        raise file_error(f"cannot write {out}", error) from None


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
    names = (*DIGESTS, "last_loss", "step_seconds", "seconds", "log_bytes", "entries", "forced")
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
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Run what ``out`` does not hold of this machine yet.

    Args:
        steps: instead of those of WORKS.
        devices: the first records the rounding logs, where no earlier call has left any.
        out: file that is written after each row; logs lie beside it, in ``out`` with the suffix ``.logs``.
        progress: called with 1 after each row.

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
    done = {key_of(row): row for row in kept}
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch) if out is None else out.with_suffix(".logs")
        for _, group in groupby(wanted, key=lambda row: (row["work"], row["device"])):
            made = commit()
            with DevicePool(timeout=_TIMEOUT) as pool:  # one process for each work, so that its memory is freed
                for row in group:
                    if key_of(row) not in done:
                        for found in _filled(row, list(done.values()), pool, logs):
                            done[key_of(found)] = {**found, **made}
                        if out is not None:
                            _save(out, {**document, "rows": list(done.values())})
                    progress(1)
    trainings = set(map(training_of, wanted))
    others = [row for row in done.values() if row["machine"] != here and training_of(row) in trainings]
    rows = sorted([*others, *(done[key_of(row)] for row in wanted)], key=lambda row: row["machine"])
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

    recordings = [
        other for other in done if training_of(other) == training_of(row) and other.get("role") == "recording"
    ]
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
        if (ending_of(again), again["log_digest"]) != (ending_of(lost), lost.get("log_digest", again["log_digest"])):
            raise CallerError(f"the lost logs of {row['work']} cannot be made again: this program records other ones")
        yield again
        yield measured(row, "replaying", here)


def _log_digest(paths: Sequence[Path]) -> str:
    try:
        return str(digest_list("logs", [(path.name, digest_bytes("log", path.read_bytes())) for path in paths]))
    except OSError as error:
        raise file_error(f"cannot read the rounding log {error.filename}", error) from None
