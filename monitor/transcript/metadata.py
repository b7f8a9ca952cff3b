"""M: the declared metadata of a run, fixed before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical, digest_bytes
from monitor.declaration.statement import Declaration

__all__ = ["FORMAT", "Metadata", "parse_time"]

FORMAT = "chipwitness/run/2"
_LONGEST = timedelta(days=5 * 365)
_KEYS = {"format", "lab", "task", "data", "chips", "device", "versions", "settings", "started", "declared_end"}


def parse_time(text: object) -> datetime:
    """Parse ``YYYY-MM-DDTHH:MM:SSZ``; EvidenceError on any other form."""
    try:
        return datetime.strptime(text if isinstance(text, str) else "", "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise EvidenceError(f"{text!r:.100} is not a time like 2026-01-31T12:00:00Z") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """M of the transcript {M, D, W} (Shavit 2023, section 4.1).

    Attributes:
        lab: who runs it.
        task: what the run declares of its training.
        data: commitment to D; without a recipe to the salt key alone, since batches come as the run goes.
        chips: which chip holds which shard, in shard order.
        device: name and native fingerprint of the processor that trains, as the lab states them.
        settings: numerical settings of the process, read back.
        declared_end: UTC time by which the run claims to be finished.
    """

    lab: str
    task: Declaration
    data: dict[str, str]
    chips: tuple[str, ...]
    device: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, object]
    started: str
    declared_end: str

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "format": FORMAT,
            "lab": self.lab,
            "task": self.task.to_json(),
            "data": self.data,
            "chips": list(self.chips),
            "device": self.device,
            "versions": self.versions,
            "settings": self.settings,
            "started": self.started,
            "declared_end": self.declared_end,
        }

    @property
    def run_id(self) -> bytes:
        """Digest of M, 32 bytes: the name of the run in every record and signature."""
        return digest_bytes("run", canonical.encode(self.to_json())).value

    @classmethod
    def from_json(cls, data: object) -> Metadata:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or set(data) != _KEYS or data["format"] != FORMAT:
            raise EvidenceError(f"the metadata are not of the form {FORMAT}")
        for name in ("data", "device", "versions"):
            value = data[name]
            if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
                raise EvidenceError(f"the metadata's {name} is malformed")
        if set(data["device"]) != {"name", "fingerprint"}:
            raise EvidenceError("the metadata's device lacks name or fingerprint")
        limits.check_lab(data["lab"])
        chips = data["chips"]
        if not isinstance(data["settings"], dict) or not isinstance(chips, list):
            raise EvidenceError("the metadata's settings or chips are malformed")
        for chip in chips:
            limits.check_chip_id(chip)
        task = Declaration.from_json(data["task"])
        if len(chips) != task.shards or len(set(chips)) != len(chips):
            raise EvidenceError(f"the metadata do not name {task.shards} different chips")
        if parse_time(data["declared_end"]) <= parse_time(data["started"]):
            raise EvidenceError("the metadata's declared end is not after the start")
        if parse_time(data["declared_end"]) - parse_time(data["started"]) > _LONGEST:
            raise EvidenceError(f"the metadata declare a run of more than {_LONGEST.days} days")
        return cls(
            lab=data["lab"],
            task=task,
            data=data["data"],
            chips=tuple(chips),
            device=data["device"],
            versions=data["versions"],
            settings=data["settings"],
            started=data["started"],
            declared_end=data["declared_end"],
        )
