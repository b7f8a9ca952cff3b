"""What the directory says at one moment, as a sorted list under one root: chips, parties, reference values.

An entry's leaf is its canonical encoding. Sorted by name, each name once, entries are the leaves of an RFC 9162 tree
whose root the registrar publishes, so that one entry can be shown without the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, VerifyingKey, canonical
from firmware_sim.evidence.canonical import JsonObject
from inspector.registry._values import ChipRecord, ChipState, Role, check_name
from inspector.registry.positions import read_spans
from inspector.registry.publications import ReferenceValues

__all__ = ["Listing", "Proven", "chip_entry", "party_entry", "read_chip_entry", "values_entry"]

_CHIP, _PARTY, _VALUES = "chip/", "party/", "values/"
_CHIP_KEYS = {"holder", "identity", "maker", "model", "name", "revoked", "sequence", "state"}


def chip_entry(
    record: ChipRecord,
    *,
    maker: str,
    holder: str,
    state: ChipState,
    sequence: int,
    revoked: bool,
    spans: Sequence[Mapping[str, Any]] = (),
) -> JsonObject:
    """List entry of a chip; ``sequence`` is the number of its last record, ``spans`` those that have ended, if any."""
    return {
        **({"spans": list(spans)} if spans else {}),
        "holder": holder,
        "identity": record.identity,
        "maker": maker,
        "model": record.model,
        "name": _CHIP + record.chip,
        "revoked": revoked,
        "sequence": sequence,
        "state": state.name.lower(),
    }


def party_entry(name: str, role: Role, key: VerifyingKey) -> JsonObject:
    """List entry of an enrolled party."""
    return {"key": key.raw.hex(), "name": _PARTY + name, "role": role.value}


def values_entry(values: ReferenceValues) -> JsonObject:
    """List entry of a maker's reference values."""
    return {**values.content(), "name": _VALUES + values.maker}


def read_chip_entry(entry: object, chip: str) -> ChipState:
    """Return the state in a chip's entry that comes from a file.

    Raises:
        CallerError: it is no entry of this chip.
    """
    if not isinstance(entry, dict) or set(entry) - {"spans"} != _CHIP_KEYS or entry["name"] != _CHIP + chip:
        raise CallerError(f"not an entry of chip {chip}")
    check_name("holder", entry["holder"])
    check_name("maker", entry["maker"])
    texts = [entry["identity"], entry["model"], entry["state"]]
    if not all(isinstance(text, str) for text in texts) or type(entry["revoked"]) is not bool:
        raise CallerError(f"the entry of chip {chip} is malformed")
    ChipRecord(chip, entry["model"], entry["identity"])
    read_spans(entry)
    if type(entry["sequence"]) is not int or entry["sequence"] < 0:
        raise CallerError(f"the entry of chip {chip} is malformed")
    try:
        return ChipState[entry["state"].upper()]
    except KeyError:
        raise CallerError(f"the entry of chip {chip} has an unknown state") from None


def _former(entry: Mapping[str, Any]) -> list[str]:
    return [span["holder"] for span in entry.get("spans", ())]


@dataclass(frozen=True, slots=True)
class Proven:
    """An entry, its place in the list, and the audit path from it to the root."""

    entry: JsonObject
    index: int
    path: tuple[bytes, ...]


class Listing:
    """All entries of one view, sorted by name; building it hashes each once."""

    def __init__(self, entries: Iterable[JsonObject]) -> None:
        self.entries = sorted(entries, key=lambda entry: str(entry["name"]))
        self._places = {entry["name"]: index for index, entry in enumerate(self.entries)}
        if len(self._places) != len(self.entries):
            raise EvidenceError("the published list of the registry has two entries of one name")
        self._tree = MerkleTree(canonical.encode(entry) for entry in self.entries)
        self.root = self._tree.root()

    def __len__(self) -> int:
        return len(self.entries)

    def chip(self, name: str) -> JsonObject | None:
        """The entry of a chip, or None."""
        return self._get(_CHIP + name)

    def party(self, name: str) -> JsonObject | None:
        """The entry of a party, or None."""
        return self._get(_PARTY + name)

    def owners(self) -> list[str]:
        """Names of all parties enrolled as owners, sorted."""
        parties = (entry for entry in self.entries if entry["name"].startswith(_PARTY))
        return [entry["name"].removeprefix(_PARTY) for entry in parties if entry["role"] == Role.OWNER.value]

    def values(self, maker: str) -> JsonObject | None:
        """The entry of a maker's reference values, or None."""
        return self._get(_VALUES + maker)

    def chips_of(self, holders: Iterable[str]) -> dict[str, Proven]:
        """Every chip for which one of these parties answers or has answered, whatever its state, with its proof."""
        wanted = set(holders)
        found = {}
        for index, entry in enumerate(self.entries):
            if entry["name"].startswith(_CHIP) and wanted & {entry["holder"], *_former(entry)}:
                path = tuple(self._tree.inclusion_proof(index))
                found[entry["name"].removeprefix(_CHIP)] = Proven(entry=entry, index=index, path=path)
        return found

    def _get(self, name: str) -> JsonObject | None:
        place = self._places.get(name)
        return None if place is None else self.entries[place]
