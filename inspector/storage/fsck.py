"""A second opinion on a run folder: all that its files say of each other, recomputed from their raw bytes.

It shares no code with what writes and verifies run folders (``monitor.transcript``), so that a mistake there does not
hide itself. What it does not repeat: whether declared training gives the committed states, and what chips prove.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError, Unreadable, foreign
from inspector.storage._fsck_formats import (
    WIDTHS,
    Frontier,
    Problem,
    batch_root,
    chip_commits,
    constants_apart,
    labelled,
    need,
    open_envelope,
    opened_state,
    read_json,
    sample_root,
    tensors,
)

__all__ = ["Report", "fsck"]

_KIND = "application/vnd.chipwitness.manifest+json"
_KIB, _MIB = 1 << 10, 1 << 20
_LONGEST_JOURNAL = 16 << 30
_LONGEST_MANIFEST = 32 * _MIB
_LONGEST_RECORD = 8 * _MIB
_LONGEST = {
    "metadata.json": 16 * _MIB, "salt.bin": 32, "samples.safetensors": 256 * _MIB, "order.safetensors": 32 * _MIB,
    "logs": 64 * _MIB, "batches": 4096 * _MIB, "programs": 256 * _MIB, "constants": 64 * _MIB,
    "chain.pem": 16 * _KIB, "checkpoint.json": 8 * _MIB, "epochs.json": 16 * _MIB, "quote.json": 16 * _KIB,
    "log.bin": 512 * _MIB,
}  # fmt: skip
"""Bytes by name or folder; a checkpoint has as many as the declared state, and its header."""
_STATE_HEADER = 64 * _MIB
_SHOWN = 200
_NAMES = 20
_SHA256 = re.compile("[0-9a-f]{64}")
_STEP_FILE = re.compile(r"(logs/\d{8}\.rlog|batches/\d{8}\.safetensors)", re.ASCII)
_FIXED = ("metadata.json", "data/salt.bin", "data/samples.safetensors", "data/order.safetensors")
_CHIP_FILES = ("chain.pem", "checkpoint.json", "epochs.json", "log.bin", "quote.json")
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, struct.error)


@dataclass(slots=True)
class Report:
    """Findings: ``problems`` is empty for a sound folder; the rest counts what was recomputed.

    Attributes:
        ignored: the first names of files and folders that are no part of the run, and the number of the others.
    """

    problems: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    lab: str = ""
    finished: bool = False
    steps: int = -1
    files: int = 0
    bytes: int = 0
    batches: int = 0
    states: int = 0
    commits: int = 0

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """Turn whatever is wrong with a part of the run into a line; Unreadable where that is unknown here."""
        try:
            with foreign(what[:_SHOWN]):
                yield
        except Problem as problem:
            self.problems.append(f"{what[:_SHOWN]} {problem}")
        except EvidenceError as error:
            self.problems.append(str(error))
        except _MALFORMED as error:
            self.problems.append(f"{what[:_SHOWN]} is malformed or cannot be read ({type(error).__name__})")


def fsck(folder: Path, keys: Mapping[str, bytes]) -> Report:
    """Recompute a run folder.

    Args:
        keys: public key of each registered lab, 32 bytes.

    Raises:
        CallerError: there is no such folder, or no key.
        Unreadable: a file or folder may not be read here, or the run is not finished: it changed while it was read.
    """
    if not folder.is_dir() or not keys:
        raise CallerError(f"there is no run folder {folder}" if keys else "no lab is registered")
    report, signed = Report(), b""
    with report.about("manifest.json"):
        _require_plain(folder / "manifest.json", folder)
        signed = _read(folder / "manifest.json", _LONGEST_MANIFEST)
        head, report.lab = open_envelope(signed, _KIND, keys)
        _check_head(head)
        report.finished, report.steps = head["finished"], head["steps"]
        with report.about("journal.tsv"):
            _Run(folder, head, report).check()
    with Report().about("manifest.json"):
        if report.problems and signed and _read(folder / "manifest.json", _LONGEST_MANIFEST) != signed:
            raise Unreadable(f"{folder.name} is not finished: it changed while it was read; have its lab export it")
    return report


def _check_head(head: Any) -> None:
    need(set(head) == {"run", "finished", "steps", "root", "journal", "pending"}, "has missing or extra keys")
    journal, pending = head["journal"], head["pending"]
    need(set(journal) == {"records", "files", "bytes", "sha256"}, "has a malformed account of the journal")
    counts = [head["steps"], *(journal[name] for name in ("records", "files", "bytes"))]
    need(all(type(count) is int for count in counts) and min(counts[1:]) >= 0, "gives a count that is not a number")
    need(isinstance(head["run"], str) and type(head["finished"]) is bool, "has a malformed run or state")
    need(isinstance(pending, str) and not (head["finished"] and pending), "announces a record of a finished run")
    need(_SHA256.fullmatch(head["root"]) and _SHA256.fullmatch(journal["sha256"]), "has a malformed digest")
    announced = bool(pending) and not pending.startswith("\t")
    need(-1 <= head["steps"] < 10**8, "counts an impossible number of steps")
    need(
        journal["records"] == head["steps"] + 2 + head["finished"] - announced, "does not count a record for each step"
    )
    need(journal["bytes"] <= _LONGEST_JOURNAL, "has a journal that is too long")


class _Run:
    """One folder, walked through once, record by record."""

    def __init__(self, folder: Path, head: Mapping[str, Any], report: Report) -> None:
        self._folder, self._head, self._report = folder, head, report
        self._log = Frontier()
        self._roots: list[bytes] = []
        self._listed: set[str] = set()
        self._here: set[str] = set()
        self._programs: set[str] = set()
        self._named: set[str] = set()
        self._apart: dict[str, list[tuple[int, str]]] = {}
        self._task: Mapping[str, Any] = {}
        self._rows: list[list[int]] = []
        self._states: dict[int, str] = {}
        self._gone: list[str] = []
        self._is_short = False

    def check(self) -> None:
        """Check the journal, all files that it lists, and that there are no others."""
        head = self._head
        path, pending = self._folder / "journal.tsv", head["pending"].encode() + b"\n" if head["pending"] else b""
        self._check_digest(path, pending)
        hasher, files = hashlib.sha256(), 0
        with path.open("rb") as journal:
            for number in range(head["journal"]["records"]):
                line = journal.readline(_LONGEST_RECORD + 1)
                need(line.endswith(b"\n") and len(line) <= _LONGEST_RECORD, f"has no record {number}")
                hasher.update(line)
                files += self._record(number, line, announced=False)
            need(journal.tell() == head["journal"]["bytes"], "does not have the signed length")
        need(hasher.hexdigest() == head["journal"]["sha256"], "was altered while it was read")
        need(files == head["journal"]["files"], f"lists {files} files, not {head['journal']['files']} as signed")
        if pending:
            self._record(head["journal"]["records"], pending, announced=True)
        for gone in self._gone:
            with self._report.about(gone):
                need(self._is_released(int(gone[12:20])), "is missing")
        need(self._log.root().hex() == head["root"], "has leaves whose root is not the signed one")
        unused = sorted(self._programs - self._named)
        need(not unused, f"lists program {unused[:1]}, which no step runs")
        missing = sorted(self._named - self._programs)
        need(not missing, f"has a step that runs program {missing[:1]}, which is not listed")
        for digest in sorted(self._programs & self._apart.keys()):
            with self._report.about(f"constants/{digest}.bin"):
                self._check_constants(f"constants/{digest}.bin", self._apart[digest])
        self._check_walk()

    def _check_constants(self, path: str, apart: list[tuple[int, str]]) -> None:
        """The bytes of a program's constants, one after the other, have the digests that it holds of them."""
        need(
            (path in self._listed) == bool(apart), "is not listed" if apart else "holds none of its program's constants"
        )
        if path in self._here:
            data, at = _content(self._folder / path, _LONGEST["constants"]), 0
            need(len(data) == sum(length for length, _ in apart), "does not hold its program's constants")
            for length, sha256 in apart:
                need(
                    hashlib.sha256(data[at : at + length]).hexdigest() == sha256,
                    "holds constants that are not its program's",
                )
                at += length

    def _check_digest(self, path: Path, pending: bytes) -> None:
        """Before any of it is parsed: it is what was signed, and perhaps a beginning of the announced record."""
        _require_plain(path, self._folder)
        left, hasher = self._head["journal"]["bytes"], hashlib.sha256()
        with path.open("rb") as journal:
            while left:
                chunk = journal.read(min(left, 1 << 20))
                need(chunk, "is shorter than signed")
                hasher.update(chunk)
                left -= len(chunk)
            tail = journal.read(len(pending) + 1)
        need(hasher.hexdigest() == self._head["journal"]["sha256"], "does not have the signed digest")
        need(tail == pending[: len(tail)], "goes on with unsigned bytes")

    def _record(self, number: int, line: bytes, *, announced: bool) -> int:
        """Check a record, its leaf and its files; return how many it lists."""
        leaf_bytes, tab, listed = line[:-1].partition(b"\t")
        need(tab, f"has no tab in record {number}")
        step, report = number - 1, self._report
        files: dict[str, Any] = {}
        leaf: Any = None
        with report.about(f"journal.tsv: record {number}"):
            files = read_json(listed)
            need(isinstance(files, dict), "lists no files")
            if 0 <= step <= self._head["steps"]:
                leaf = read_json(leaf_bytes)
                need(leaf["step"] == step, "holds the leaf of another step")
                self._log.add(leaf_bytes)
                self._roots.append(self._log.root())
                if leaf.get("execution") is not None:
                    self._named.add(leaf["execution"]["program"])
                self._states = {step - 1: self._states.get(step - 1, ""), step: leaf["state"]}
            else:
                need(not leaf_bytes, "has a leaf, although it does not belong to a step")
        for path, entry in files.items():
            with report.about(path):
                need(path not in self._listed, "is listed twice")
                need(self._belongs(path, number, files), f"is listed in record {number}, where it does not belong")
                need(isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int, "has a malformed entry")
                self._listed.add(path)
                if entry[0] and not _is_there(self._folder / path):
                    if announced:
                        self._is_short = step <= self._head["steps"]
                        continue
                    if path.startswith("checkpoints/"):
                        self._gone.append(path)
                        continue
                self._file(path, entry, step, leaf)
        return len(files)

    def _is_released(self, at: int) -> bool:
        """Whether a checkpoint may be gone: halve its number as often as it can be, and so the number that came since.

        The declaration says how many stay; a step whose files are not all there is not committed yet.
        """
        every, keep = self._task.get("checkpoint_every"), self._task.get("keep")
        if type(every) is not int or type(keep) is not int or every < 1 or at % every:
            return False
        place, since = at // every, (self._head["steps"] - self._is_short - 1) // every - at // every
        while place and not place % 2:
            place, since = place // 2, since // 2
        return place > 0 and since >= keep

    def _belongs(self, path: str, number: int, files: Mapping[str, Any]) -> bool:
        step = number - 1
        before = f"checkpoints/{step - 1:08d}.safetensors" if step > 1 else ""
        if number == 0:
            return path in _FIXED
        if step > self._head["steps"]:
            chip, _, name = path.removeprefix("chips/").partition("/")
            plain = re.fullmatch("[a-z0-9][a-z0-9-]{0,63}", chip)
            return path == before or (path.startswith("chips/") and plain is not None and name in _CHIP_FILES)
        if path.startswith("checkpoints/"):
            return path == (before if step else "checkpoints/00000000.safetensors")
        if re.fullmatch(r"programs/[0-9a-f]{64}\.json", path):
            self._programs.add(path[9:-5])
            return True
        if re.fullmatch(r"constants/[0-9a-f]{64}\.bin", path):
            return f"programs/{path[10:-4]}.json" in files
        return _STEP_FILE.fullmatch(path) is not None and path.rpartition("/")[2].startswith(f"{step:08d}.")

    def _file(self, path: str, entry: list[Any], step: int, leaf: Any) -> None:
        length, sha256 = entry
        target = self._folder / path
        if length:
            self._here.add(path)
            _require_plain(target, self._folder)
            need(length <= self._longest(path), f"is signed as {length} bytes long, which is too long")
            size = os.stat(target).st_size
            need(size == length, f"has {size} bytes, not {length} as signed")
        data = _content(target, length)
        need(hashlib.sha256(data).hexdigest() == sha256, "does not have the signed digest")
        self._content(path, data, step, leaf)
        self._report.files += 1
        self._report.bytes += length

    def _longest(self, path: str) -> int:
        """Bytes that a file of its kind may have."""
        folder, name = path.partition("/")[0], path.rpartition("/")[2]
        if folder != "checkpoints":
            return _LONGEST.get(folder, 0) or _LONGEST[name]
        widths = (WIDTHS[dtype] * math.prod(shape) for _, _, dtype, shape in self._task.get("state") or ())
        return _STATE_HEADER + sum(widths) if "state" in self._task else _LONGEST_JOURNAL

    def _content(self, path: str, data: memoryview, step: int, leaf: Any) -> None:
        """Check what a file says against the leaf of its step and the metadata."""
        kind = path.partition("/")[0]
        if path == "metadata.json":
            self._check_metadata(data)
        elif kind == "logs":
            digest = f"sha256:{labelled('rounding-log', data).hex()}"
            need(leaf["log"] == digest, "is not the log that its leaf commits to")
            self._check_rows(leaf, step)
        elif kind == "batches":
            tensors(data)
            salt = _read(self._folder / "data/salt.bin", 32)
            need(batch_root(salt, step, data).hex() == leaf["batch"], "is not the batch that its leaf commits to")
            self._report.batches += 1
        elif kind == "programs":
            need(hashlib.sha256(data).hexdigest() == path[9:-5], "does not have the digest in its name")
            self._apart[path[9:-5]] = constants_apart(read_json(data))
        elif kind == "checkpoints":
            self._check_state(data, int(path[12:20]))
        elif path == "data/order.safetensors":
            self._read_order(data)
        elif path.endswith(".safetensors"):
            tensors(data)
        elif path.endswith("/log.bin"):
            self._check_commits(data)

    def _check_metadata(self, data: memoryview) -> None:
        need(labelled("run", data).hex() == self._head["run"], "is of a different run from the manifest")
        metadata = read_json(data)
        need(metadata["lab"] == self._report.lab, "names a lab that is not the one that signed")
        self._task = metadata["task"]
        if self._task["origin"]["initialisation"] is not None:
            self._named.add(self._task["origin"]["initialisation"]["program"])

    def _check_state(self, data: memoryview, at: int) -> None:
        found, declared = tensors(data), self._task.get("state")
        need(
            "proof" not in found or 0 < at < self._head["steps"],
            "leaves something out, although the first and the last checkpoint have to be complete",
        )
        if declared is not None:
            opened = opened_state(declared, found, self._task["shares"])
            need(opened == self._states[at], "is not the state that its leaf commits to")
            self._report.states += 1

    def _read_order(self, data: memoryview) -> None:
        order = tensors(data)["order"]
        need(order.kind == "I64" and len(order.shape) == 2, "is not a table of rows")
        width = order.shape[1]
        rows = order.data.cast("q").tolist()
        self._rows = [rows[start : start + width] for start in range(0, len(rows), max(width, 1))]

    def _check_commits(self, data: memoryview) -> None:
        for run, at, root in chip_commits(data):
            if run == self._head["run"]:
                need(at < len(self._roots) and root == self._roots[at], f"commits step {at} to a different log")
                self._report.commits += 1

    def _check_rows(self, leaf: Any, step: int) -> None:
        """A preset's batch, from the declared samples."""
        if self._rows:
            data = _content(self._folder / "data/samples.safetensors", _LONGEST["samples.safetensors"])
            salt = _read(self._folder / "data/salt.bin", 32)
            root = sample_root(salt, tensors(data), self._rows[step - 1])
            need(root.hex() == leaf["batch"], f"has a leaf whose batch is not the declared one of step {step}")
            self._report.batches += 1

    def _check_walk(self) -> None:
        """Name what is no part of the run, without looking into it."""
        known = {"manifest.json", "journal.tsv", *self._here}
        folders = {os.path.dirname(path) for path in self._listed}
        folders |= {os.path.dirname(path) for path in folders}
        more, shown = 0, self._report.ignored
        for at, inner, names in os.walk(self._folder, onerror=_refuse):
            base = Path(at).relative_to(self._folder)
            strange = [name for name in inner if (base / name).as_posix() not in folders]
            inner[:] = sorted(set(inner) - set(strange))
            for path in sorted((base / name).as_posix() for name in (*strange, *names)):
                if path not in known and len(shown) < _NAMES:
                    shown.append(path[:_SHOWN])
                else:
                    more += path not in known
        if more:
            shown.append(f"{more} more")


def _refuse(error: OSError) -> None:
    raise error


def _is_there(path: Path) -> bool:
    """Whether the name is taken, by whatever."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _require_plain(path: Path, folder: Path) -> None:
    """Problem unless a path leads to a file, and no link on the way leads out of the folder."""
    need(stat.S_ISREG(os.stat(path).st_mode), "is not a plain file")
    real = Path(os.path.realpath(path))
    need(real.is_relative_to(os.path.realpath(folder)), "is reached through a link that leads out of the run")


def _read(path: Path, most: int) -> bytes:
    found = os.stat(path)
    need(stat.S_ISREG(found.st_mode), "is not a plain file")
    with path.open("rb") as file:
        data = file.read(min(most, found.st_size) + 1)
    need(len(data) <= most, "is too long")
    return data


def _content(path: Path, most: int) -> memoryview:
    """A file's bytes, as they are now; a length of 0 means a file that is not stored."""
    return memoryview(_read(path, most) if most else b"")
