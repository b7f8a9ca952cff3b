"""What the inspector knows from outside the run: makers, firmware, labs, chips and its own challenge.

Nothing under a run folder is ever an anchor (Shavit 2023, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firmware_sim import bounds
from firmware_sim.checks import ChipTrust
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, VerifyingKey, canonical
from monitor.declaration.statement import is_hyper_name

if TYPE_CHECKING:
    from inspector.registry.registered import RegisteredChips

__all__ = ["Trust"]

FORMAT = "chipwitness/trust/1"
_KEYS = {
    "format",
    "makers",
    "measurements",
    "minimum_security_version",
    "snapshot_rate",
    "snapshot_algorithm",
    "labs",
    "chips",
    "verifier",
    "nonce",
}
_RATE = re.compile("[0-9]{1,39}(/[0-9]{1,39})?", re.ASCII)
_AGREEMENT_KEYS = {"programs", "initial_states", "free", "data"}
_PATHS = "direct_paths"
_AGREED_PATH = re.compile(r"[0-9a-f]{64}|(weight|buffer|gradient|optimizer)/[^\x00-\x1f\x7f]{1,500}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The inspector's anchors.

    Attributes:
        chip_trust: digests of the maker CAs' certificates, firmware that may run, and the agreed snapshot schedule.
        labs: public key of each lab's transcripts.
        chips: which lab owns which chip: the registry.
        verifier: this inspector's id, nonce: its challenge; the chips' quotes answer both.
        programs: SHA-256, in hex, of each program that a run without a preset may execute.
        initial_states: digests of the states that such a run may start from.
        free: names of hyper-parameters that need not be bound to the arithmetic or stay as declared, and those among
            the programs that may change numbers outside the optimizer's updates from step to step.
        data: digests of samples and orders, other than a preset's own, that lab and inspector agreed on.
        registry: the registry's signed view, with a proof of each chip; None where the file itself is the list.
        direct_paths: SHA-256 of programs, and tensors of the state (``kind/name``), for which batches and constants
            may reach the new state without passing a loss.
    """

    chip_trust: ChipTrust
    labs: Mapping[str, VerifyingKey]
    chips: Mapping[str, str]
    verifier: str
    nonce: bytes
    programs: frozenset[str] = frozenset()
    initial_states: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    registry: RegisteredChips | None = None
    direct_paths: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not all((self.chip_trust.ca_digests, self.chip_trust.measurements, self.labs, self.chips)):
            raise CallerError("the trust file names no maker, no firmware, no lab or no chip")
        strangers = set(self.chips.values()) - set(self.labs)
        if strangers:
            raise CallerError(f"the trust file gives chips to a lab that it does not name: {sorted(strangers)[0]}")
        if self.registry is not None:
            self.registry.require(self.chips)

    @classmethod
    def load(cls, paths: Iterable[Path], runs: Iterable[Path] = ()) -> Trust:
        """Read and merge trust files.

        Raises:
            CallerError: a file is unreadable, malformed, or contradicts another.
            EvidenceError: a file lies inside a run folder, where only the lab can have put it.
        """
        merged: Trust | None = None
        for path in paths:
            for run in runs:
                if path.resolve().is_relative_to(run.resolve()):
                    raise EvidenceError(
                        f"the trust file {path} lies inside the run {run}: a lab cannot vouch for itself"
                    )
            try:
                data = canonical.parse(bounds.read_file(path, bounds.TRUST_BYTES), most=bounds.TRUST_BYTES)
            except OSError as error:
                raise CallerError(f"cannot read the trust file {path}: {error.strerror}") from None
            except EvidenceError as error:
                raise CallerError(f"the trust file {path} is not JSON that can be read: {error}") from None
            parsed = cls.from_json(data, str(path))
            merged = parsed if merged is None else merged.merge(parsed)
        if merged is None:
            raise CallerError("no trust file was given")
        return merged

    def merge(self, other: Trust) -> Trust:
        """Return both together; CallerError where they disagree about a lab, a chip or the challenge."""
        for what, ours, others in (("lab", self.labs, other.labs), ("chip", self.chips, other.chips)):
            for name in set(ours) & set(others):
                if ours[name] != others[name]:
                    raise CallerError(f"two trust files disagree about {what} {name}")
        if (self.verifier, self.nonce) != (other.verifier, other.nonce):
            raise CallerError("two trust files hold different challenges")
        mine, theirs = self.chip_trust, other.chip_trust
        if (mine.snapshot_rate, mine.snapshot_algorithm) != (theirs.snapshot_rate, theirs.snapshot_algorithm):
            raise CallerError("two trust files agree on different snapshot schedules")
        chip_trust = ChipTrust(
            ca_digests=frozenset(mine.ca_digests) | frozenset(theirs.ca_digests),
            measurements=frozenset(mine.measurements) | frozenset(theirs.measurements),
            minimum_security_version=max(mine.minimum_security_version, theirs.minimum_security_version),
            snapshot_rate=mine.snapshot_rate,
            snapshot_algorithm=mine.snapshot_algorithm,
        )
        return Trust(
            chip_trust=chip_trust,
            labs={**self.labs, **other.labs},
            chips={**self.chips, **other.chips},
            verifier=self.verifier,
            nonce=self.nonce,
            programs=self.programs | other.programs,
            initial_states=self.initial_states | other.initial_states,
            free=self.free | other.free,
            data=self.data | other.data,
            registry=_joined(self.registry, other.registry),
            direct_paths=self.direct_paths | other.direct_paths,
        )

    def key_of(self, lab: str) -> VerifyingKey:
        """Return a lab's key; EvidenceError if the registry does not know the lab."""
        if lab not in self.labs:
            raise EvidenceError(f"lab {lab!r} is not registered")
        return self.labs[lab]

    def chips_of(self, lab: str) -> list[str]:
        """Return the ids of all chips that the registry gives to a lab, sorted."""
        return sorted(chip for chip, owner in self.chips.items() if owner == lab)

    @property
    def source(self) -> str:
        """Who says which chips there are, in words."""
        if self.registry is None:
            return "chips as the trust file lists them"
        return f"chips as the registry's signed view of size {self.registry.publication.size} lists them"

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values; agreements about programs, states and data only where there are any."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "makers": sorted(str(digest) for digest in self.chip_trust.ca_digests),
            "measurements": sorted(str(digest) for digest in self.chip_trust.measurements),
            "minimum_security_version": self.chip_trust.minimum_security_version,
            "snapshot_rate": str(self.chip_trust.snapshot_rate),
            "snapshot_algorithm": self.chip_trust.snapshot_algorithm,
            "labs": {lab: key.raw.hex() for lab, key in self.labs.items()},
            "chips": dict(self.chips),
            "verifier": self.verifier,
            "nonce": self.nonce.hex(),
        }
        if self.programs or self.initial_states or self.free or self.data:
            data["programs"] = sorted(self.programs)
            data["initial_states"] = sorted(self.initial_states)
            data["free"] = sorted(self.free)
            data["data"] = sorted(self.data)
        if self.registry is not None:
            data["registry"] = self.registry.to_json()
        if self.direct_paths:
            data[_PATHS] = sorted(self.direct_paths)
        return data

    @classmethod
    def from_json(cls, data: object, source: str) -> Trust:
        """Parse; CallerError names the source on any other form."""
        registry = None
        if isinstance(data, dict):
            data = {_PATHS: [], **data}
            if "registry" in data:
                registry = _parse_registry(data.pop("registry"), source)
        if isinstance(data, dict) and set(data) == _KEYS | {_PATHS}:
            data = {**data, **{key: [] for key in _AGREEMENT_KEYS}}
        if not isinstance(data, dict) or set(data) != _KEYS | _AGREEMENT_KEYS | {_PATHS} or data["format"] != FORMAT:
            raise CallerError(f"{source} is not a trust file of the form {FORMAT}")
        try:
            texts = [*data["makers"], *data["measurements"], *data["chips"].values()]
            texts += [data[name] for name in ("verifier", "nonce", "snapshot_rate", "snapshot_algorithm")]
            if not all(isinstance(text, str) for text in texts) or type(data["minimum_security_version"]) is not int:
                raise ValueError
            for lab in data["labs"]:
                bounds.check_lab(lab)
            for chip in data["chips"]:
                bounds.check_chip_id(chip)
            if not _RATE.fullmatch(data["snapshot_rate"]):
                raise ValueError
            names = [data["nonce"], *data["programs"], *(name for name in data["free"] if not is_hyper_name(name))]
            if not all(re.fullmatch(r"[0-9a-f]{64}", name) for name in names):
                raise ValueError
            for key in _AGREEMENT_KEYS | {_PATHS}:
                if not isinstance(data[key], list):
                    raise ValueError
            if not all(_AGREED_PATH.fullmatch(name) for name in data[_PATHS]):
                raise ValueError
            return cls(
                chip_trust=ChipTrust(
                    ca_digests=frozenset(Digest.parse(text) for text in data["makers"]),
                    measurements=frozenset(Digest.parse(text) for text in data["measurements"]),
                    minimum_security_version=data["minimum_security_version"],
                    snapshot_rate=Fraction(data["snapshot_rate"]),
                    snapshot_algorithm=data["snapshot_algorithm"],
                ),
                labs={lab: VerifyingKey(bytes.fromhex(key)) for lab, key in data["labs"].items()},
                chips=data["chips"],
                verifier=data["verifier"],
                nonce=bytes.fromhex(data["nonce"]),
                programs=frozenset(data["programs"]),
                initial_states=frozenset(str(Digest.parse(text)) for text in data["initial_states"]),
                free=frozenset(data["free"]),
                data=frozenset(str(Digest.parse(text)) for text in data["data"]),
                registry=registry,
                direct_paths=frozenset(data[_PATHS]),
            )
        except (EvidenceError, ValueError, TypeError, AttributeError, ZeroDivisionError):
            raise CallerError(f"the trust file {source} is malformed") from None


def _parse_registry(data: object, source: str) -> RegisteredChips:
    from inspector.registry.registered import RegisteredChips  # brings a database library, which few trust files need

    try:
        return RegisteredChips.from_json(data)
    except (CallerError, EvidenceError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CallerError(f"the trust file {source} is malformed: {error}") from None


def _joined(mine: RegisteredChips | None, theirs: RegisteredChips | None) -> RegisteredChips | None:
    if mine is None or theirs is None:
        return mine or theirs
    return mine.joined(theirs)
