"""What an inspectorate is shown of a run, and what a cluster says of the rest.

Weights, samples, large constants and rounding logs go from the lab to the replay cluster alone. Manifest, journal,
metadata and programs go to the inspectorate too, which checks chips, log, programs and declared numbers on them, and
nothing else of the run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, VerifyingKey
from inspector.inspection.guards import Guard
from monitor.declaration.statement import Declaration
from monitor.files import remove
from monitor.programs.program import Program
from monitor.transcript import RunFolder
from monitor.transcript.data import BatchOpening
from monitor.transcript.layout import CHIP_FILES, JOURNAL, MANIFEST, METADATA, chip_path

__all__ = ["Checked", "ThinRun", "copy_whole", "counter_text", "single_values", "thin_copy", "thin_paths"]

_COUNTER_BYTES = 8
_STEP = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_GUARDS = frozenset({"copy", "evidence", *(each.value for each in Guard)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a cluster says of the files that the inspectorate is not shown, in a fixed form without free text.

    Attributes:
        found: guard, and step or None, of each finding.
        open: the same of what left it in doubt.
        counters: by name, the bytes (hex) of the initial optimizer state's single values, such as numbers of steps.
        models: digests of weights and buffers alone, by step (``Transcript``).
    """

    found: tuple[tuple[str, int | None], ...] = ()
    open: tuple[tuple[str, int | None], ...] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        models = {str(step): each for step, each in self.models.items()}
        places = {"found": [list(x) for x in self.found], "open": [list(x) for x in self.open]}
        return {**places, "counters": self.counters, "models": models}

    @classmethod
    def from_json(cls, data: object) -> Checked:
        """Parse; EvidenceError on any other form. One of before knew no digests of models."""
        if not isinstance(data, dict) or set(data) | {"models"} != {"found", "open", "counters", "models"}:
            raise EvidenceError("a cluster's list of what it has checked has missing or extra keys")
        counters, models = data["counters"], data.get("models", {})
        if not isinstance(models, dict) or not all(isinstance(step, str) and _STEP.fullmatch(step) for step in models):
            raise EvidenceError("a cluster gives digests of models under keys that are not steps")
        if not isinstance(counters, dict) or not all(map(_is_counter, counters.values())):
            raise EvidenceError("a cluster gives more than single values of the initial state")
        found, open_ = _places(data["found"]), _places(data["open"])
        digests = {int(step): str(Digest.parse(each)) for step, each in models.items()}
        return cls(found=found, open=open_, counters=counters, models=digests)


def _places(entries: object) -> tuple[tuple[str, int | None], ...]:
    """Guards, each with a step or None; EvidenceError on any other form."""
    found: list[tuple[str, int | None]] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        guard, step = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(guard, str) or guard not in _GUARDS or not (step is None or type(step) is int):
            raise EvidenceError("a cluster's list of findings is malformed")
        found.append((guard, step))
    return tuple(found)


def _is_counter(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(rf"([0-9a-f]{{2}}){{1,{_COUNTER_BYTES}}}", text) is not None


class ThinRun(RunFolder):
    """A run folder that holds no states, samples, batches, rounding logs or large constants.

    Attributes:
        checked: what a cluster that holds them says; None where none has.
    """

    checked: Checked | None = None

    def __init__(self, folder: Path, key: VerifyingKey, *, manifest: str | None = None) -> None:
        """Open the folder; as ``RunFolder``, but what is withheld does not make a step one that was only announced."""
        super().__init__(folder, key, manifest=manifest)
        self._absent = frozenset(path for path in self._absent if _is_thin(path))

    def check_contents(self, unread: Collection[str] = ()) -> int:
        """Check those files that are there: journal, programs and chips' evidence by their digests."""
        there = [path for path in self.files if _is_thin(path)]
        for path in there:
            if path not in unread:
                self.read(path)
        return len(there)

    def _complete(self, program: Program) -> Program:
        """The program as it is: its large constants are known by their digests."""
        return program

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """The initial state with zeros but for the optimizer's single values; CallerError for another step's."""
        if step:
            raise CallerError(f"the state of step {step} is not shown to an inspectorate")
        counters = {} if self.checked is None else self.checked.counters
        state = {}
        for entry in self.declared.state:
            dtype = getattr(torch, entry.dtype)
            name = f"{entry.kind}/{entry.name}"
            value = torch.zeros((), dtype=dtype)
            if entry.kind == "optimizer" and name in counters:
                content = bytearray.fromhex(counters[name])
                if len(content) != entry.byte_count:
                    raise EvidenceError(
                        f"the value that a cluster gives for {name!a:.100} is not the one that the run declares"
                    )
                value = torch.frombuffer(content, dtype=dtype)
            state[name] = value.reshape(()).expand(entry.shape)
        return state


class Withheld:
    """Batches that are not shown."""

    length = None

    def batch(self, step: int) -> dict[str, Tensor]:
        """CallerError."""
        raise CallerError(f"the batch of step {step} is not shown to an inspectorate")

    def batch_root(self, step: int) -> bytes:
        """CallerError."""
        raise CallerError(f"the batch of step {step} is not shown to an inspectorate")

    def opening(self, step: int) -> BatchOpening:
        """CallerError."""
        raise CallerError(f"the batch of step {step} is not shown to an inspectorate")

    def describe(self, step: int) -> str:
        """What is trained on, in words."""
        return "batch"


def counters_of(run: RunFolder) -> dict[str, str]:
    """The single values of the optimizer's initial state, which numbers of the updates depend on."""
    state = run.checkpoint(0)
    return {name: counter_text(state[name]) for name in single_values(run.declared) if name in state}


def counter_text(value: Tensor) -> str:
    """Bytes of a single value, in hex."""
    return value.reshape(1).view(torch.uint8).numpy().tobytes().hex()


def single_values(declared: Declaration) -> list[str]:
    """Tensors of the optimizer's state that are a single value each."""
    single = [each for each in declared.state if each.kind == "optimizer" and each.byte_count <= _COUNTER_BYTES]
    return [f"{each.kind}/{each.name}" for each in single if all(size == 1 for size in each.shape)]


def thin_copy(run: Path, target: Path) -> None:
    """Copy of a run folder what an inspectorate is shown."""
    every = (str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file())
    copy_whole(run, filter(_is_thin, every), target)


def thin_paths(run: RunFolder) -> frozenset[str]:
    """The files of a run that an inspectorate is shown."""
    return frozenset({MANIFEST, JOURNAL, *filter(_is_thin, run.files)})


def copy_whole(run: Path, paths: Iterable[str], target: Path) -> None:
    """Copy files of a run next to the place of the copy, and then give it its name, in the place of an older one."""
    draft = target.parent.with_name(f"{target.parent.name}.{target.name}.new")
    remove(draft)
    try:
        draft.mkdir()
        for path in paths:
            (draft / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / path, draft / path)
        remove(target)
        draft.rename(target)
    finally:
        remove(draft)


def _is_thin(path: str) -> bool:
    chips = Path(chip_path("x", CHIP_FILES[0])).parts[0]
    return path in (MANIFEST, JOURNAL, METADATA) or path.startswith(("programs/", f"{chips}/"))
