"""The registry's signed view as an inspector holds it: who answers for each chip, under which certificate.

A view lists everything that the directory says at one size of its log; the registrar signs its root. A trust file that
names a registry carries the entry of each chip with its audit path, so that what it says can be checked without the
registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, VerifyingKey, canonical, verify_inclusion
from inspector.registry.listing import Proven, read_chip_entry
from inspector.registry.publications import Publication
from inspector.registry.signing import SignedStatement, open_signed

__all__ = ["RegisteredChips"]

_KEYS = {"origin", "key", "size", "root", "map_root", "publication", "chips"}
_CHIP_KEYS = {"entry", "index", "path"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredChips:
    """A published view, and the entries that an inspector needs of it.

    Attributes:
        key: the registrar's.
        signed: the publication as the registrar signed it.
        publication: what it says, verified.
        chips: each chip for which a lab under inspection answers, lost and revoked ones too.
    """

    key: VerifyingKey
    signed: SignedStatement
    publication: Publication
    chips: Mapping[str, Proven]

    @classmethod
    def open(
        cls, signed: SignedStatement, chips: Mapping[str, Proven], *, key: VerifyingKey, origin: str
    ) -> RegisteredChips:
        """Verify the publication under the registrar's key; EvidenceError if it is not the registry's.

        The chips' proofs are verified when the chips are looked at.
        """
        statement = open_signed(signed, {key.key_id: ("registrar", key)}.get)
        if not isinstance(statement, Publication) or statement.registry != origin:
            raise EvidenceError(f"not a published view of {origin}")
        return cls(key=key, signed=signed, publication=statement, chips=chips)

    def check_listed(self, chip: str, lab: str) -> None:
        """Check that the view gives the chip to the lab, which has it, and that its certificate counts.

        Raises:
            EvidenceError: names the chip and what the view says instead.
        """
        entry = self.entry(chip)
        if entry["holder"] != lab:
            raise EvidenceError(
                f"chip {chip}: according to the registry {entry['holder']} holds it, but the trust file gives it to "
                f"{lab}"
            )
        said = _withdrawn(chip, entry)
        if said:
            raise EvidenceError(f"chip {chip}: {said}")

    def check_certificate(self, chip: str, certificate: Digest) -> None:
        """Check that the chip presents the device certificate that its maker registered; EvidenceError if not."""
        registered = self.entry(chip)["identity"]
        if registered != str(certificate):
            raise EvidenceError(
                f"chip {chip}: presents the certificate {certificate}, but the registered one is {registered or 'none'}"
            )

    def why_not(self, chip: str, lab: str) -> str:
        """Why a chip for which a lab answers may not be used, or "" if the view does not say so."""
        if chip not in self.chips:
            return ""
        try:
            entry = self.entry(chip)
            return _withdrawn(chip, entry) if entry["holder"] == lab else ""
        except EvidenceError:
            return ""

    def joined(self, other: RegisteredChips) -> RegisteredChips:
        """Both together; CallerError if they are not of one view."""
        if (self.key, self.signed) != (other.key, other.signed):
            raise CallerError("two trust files hold different views of a registry: make one trust file for all labs")
        return RegisteredChips(
            key=self.key, signed=self.signed, publication=self.publication, chips={**self.chips, **other.chips}
        )

    def require(self, chips: Iterable[str]) -> None:
        """CallerError unless there is an entry of each of these chips, with a certificate."""
        for chip in chips:
            if chip not in self.chips:
                raise CallerError(f"the trust file names a registry but holds no proof of chip {chip}")
            if not self.chips[chip].entry["identity"]:
                raise CallerError(
                    f"chip {chip} is registered without a certificate, so nothing ties evidence to this chip"
                )

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "origin": self.publication.registry,
            "key": self.key.raw.hex(),
            "size": self.publication.size,
            "root": self.publication.root.hex(),
            "map_root": self.publication.map_root.hex(),
            "publication": self.signed.to_bytes().decode(),
            "chips": {
                chip: {"entry": proven.entry, "index": proven.index, "path": [value.hex() for value in proven.path]}
                for chip, proven in sorted(self.chips.items())
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> RegisteredChips:
        """Parse what ``to_json`` returns.

        Raises:
            CallerError: another form.
            EvidenceError: the publication is not the registrar's.
            ValueError, TypeError, AttributeError, KeyError: malformed.
        """
        if not isinstance(data, dict) or set(data) != _KEYS:
            raise CallerError("its registry is malformed")
        view = cls.open(
            SignedStatement.from_bytes(data["publication"].encode()),
            {chip: _parse_proven(chip, value) for chip, value in data["chips"].items()},
            key=VerifyingKey(bytes.fromhex(data["key"])),
            origin=data["origin"],
        )
        signed = view.publication
        said = (signed.size, signed.root.hex(), signed.map_root.hex())
        if (data["size"], data["root"], data["map_root"]) != said:
            raise CallerError("its registry's head is not the one that the registrar signed")
        return view

    def entry(self, chip: str) -> dict[str, object]:
        """The chip's entry, once its proof is verified against the signed root; EvidenceError if it is not."""
        proven = self.chips.get(chip)
        if proven is None:
            raise EvidenceError(f"chip {chip}: there is no proof that the registry lists it")
        try:
            verify_inclusion(
                leaf=canonical.encode(proven.entry),
                index=proven.index,
                size=self.publication.entries,
                proof=proven.path,
                root=self.publication.map_root,
            )
        except EvidenceError as error:
            raise EvidenceError(
                f"chip {chip}: the registry's signed view does not list it like this: {error}"
            ) from None
        return proven.entry


def _withdrawn(chip: str, entry: Mapping[str, Any]) -> str:
    """What the view says against using a chip."""
    if entry["revoked"]:
        return "the registry has revoked its certificate"
    if not read_chip_entry(entry, chip).present:
        return f"the registry records it as {entry['state']}"
    return ""


def _parse_proven(chip: str, data: Any) -> Proven:
    if not isinstance(data, dict) or set(data) != _CHIP_KEYS or type(data["index"]) is not int:
        raise CallerError(f"the proof of chip {chip} is malformed")
    read_chip_entry(data["entry"], chip)
    return Proven(entry=data["entry"], index=data["index"], path=tuple(bytes.fromhex(value) for value in data["path"]))
