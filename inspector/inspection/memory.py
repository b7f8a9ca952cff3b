"""What an inspector keeps between inspections: where chips' logs ended, and which boots of a lab were excused.

A log that was restored to an earlier state hangs together in itself. Only who has seen more of it can
tell (Shavit 2023, section 3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from firmware_sim import LogPosition, limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import canonical
from inspector.inspection.slack import EXCUSED_BOOTS
from inspector.inspection.verdict import Verdict
from monitor.files import locked, write_whole

__all__ = ["Memory", "hold_memory", "load_memory", "remember", "save_memory"]

_FORMAT = "chipwitness/memory/3"
_BEFORE = "chipwitness/memory/2"
"""What had excused nothing."""
_COUNTS = ("counter", "size", "time")


class Memory(dict[str, LogPosition]):
    """The last position of each chip's log, by chip.

    Attributes:
        excused: by lab, the runs whose boots' repeats counted against no limit (``slack``), each as often as that was.
    """

    def __init__(self, chips: Mapping[str, LogPosition], excused: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(chips)
        self.excused = dict(excused or {})


@contextmanager
def hold_memory(path: Path | None, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let no other inspection use a memory meanwhile, so that none forgets what another has seen; None is no memory.

    Args:
        waits: is called before waiting for another inspection.

    Raises:
        CallerError: the file lies in no folder.
        DeviceError: nothing can be written there.
    """
    with ExitStack() as stack:
        if path is not None:
            _check_folder(path)
            try:
                stack.enter_context(locked(path, waits))
            except OSError as error:
                raise file_error(f"cannot lock the inspector's memory {path}", error) from None
        yield


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise CallerError(f"cannot read the inspector's memory {path}: there is no folder {path.parent}")


def load_memory(path: Path) -> Memory:
    """What ``save_memory`` wrote; nothing where there is no such file: nothing was inspected yet.

    Raises:
        CallerError: the file is another one, or lies in no folder.
        DeviceError: it cannot be read.
    """
    _check_folder(path)
    try:
        if not path.exists():
            return Memory({})
        data: Any = canonical.parse(limits.read_file(path, limits.MEMORY_BYTES), most=limits.MEMORY_BYTES)
        if not isinstance(data, dict):
            raise ValueError("it has an unknown format")
        if data.get("format") == _BEFORE:
            data = {**data, "format": _FORMAT, "excused": {}}
        if set(data) != {"format", "chips", "excused"} or data["format"] != _FORMAT:
            raise ValueError("it has an unknown format")
        chips = {str(chip): _position(entry) for chip, entry in data["chips"].items()}
        return Memory(chips, {str(lab): _runs(runs) for lab, runs in data["excused"].items()})
    except OSError as error:
        raise file_error(f"cannot read the inspector's memory {path}", error) from None
    except (EvidenceError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CallerError(f"cannot read the inspector's memory {path}: {error}") from None


def _position(entry: Any) -> LogPosition:
    if set(entry) != {"head", *_COUNTS} or not all(type(entry[key]) is int and entry[key] >= 0 for key in _COUNTS):
        raise ValueError("a chip's position is malformed")
    head = bytes.fromhex(entry["head"])
    if len(head) != 32:
        raise ValueError("a head is not 32 bytes long")
    return LogPosition(**{**entry, "head": head})


def _runs(runs: Any) -> list[str]:
    if not isinstance(runs, list) or len(runs) > EXCUSED_BOOTS or any(len(bytes.fromhex(run)) != 32 for run in runs):
        raise ValueError("an excused run is malformed")
    return runs


def remember(memory: Mapping[str, LogPosition], verdict: Verdict) -> Memory:
    """The memory after an inspection, whatever its outcome: a chip may be sound that shows its lab to be a liar.

    The log of a chip that is not sound itself, or did not go on from where it ended, changes nothing.
    """
    known = dict(memory)
    for chip in verdict.evidence.get("chips", []):
        if chip["sound"]:
            known[chip["chip"]] = LogPosition(
                counter=chip["log_counter"],
                size=chip["log_size"],
                head=bytes.fromhex(chip["log_head"]),
                time=max(chip["time"], known[chip["chip"]].time if chip["chip"] in known else 0),
            )
    excused = memory.excused if isinstance(memory, Memory) else {}
    newly = {lab: ledger["excused"] for lab, ledger in verdict.evidence.get("ledger", {}).items() if ledger["excused"]}
    return Memory(known, {**excused, **newly})


def save_memory(path: Path, memory: Mapping[str, LogPosition]) -> None:
    """Write what ``load_memory`` reads, as a whole or not at all; CallerError or DeviceError if that fails."""
    chips = {
        chip: {**{name: getattr(position, name) for name in _COUNTS}, "head": position.head.hex()}
        for chip, position in sorted(memory.items())
    }
    excused = dict(sorted(memory.excused.items())) if isinstance(memory, Memory) else {}
    data = {"format": _FORMAT, "chips": chips, "excused": excused}
    try:
        write_whole(path, json.dumps(data, indent=1).encode() + b"\n")
    except OSError as error:
        raise file_error(f"cannot write the inspector's memory {path}", error) from None
