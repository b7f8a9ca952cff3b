"""DiceTcbInfo: what a certificate says of the code that holds its key (TCG DICE Attestation Architecture, 6.1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cryptography import x509
from cryptography.hazmat import asn1

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import SHA256, Digest

__all__ = ["TCB_INFO_OID", "TcbInfo"]

TCB_INFO_OID = x509.ObjectIdentifier("2.23.133.5.4.1")
_SHA256_OID = x509.ObjectIdentifier("2.16.840.1.101.3.4.2.1")
_FLAGS = ("notConfigured", "notSecure", "recovery", "debug")
_MAX_TEXT = 200
_MAX_NUMBER = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TcbInfo:
    """One layer: who made the code, which it is, and how it runs.

    Law: `TcbInfo.from_der(t.to_der()) == t`, and no other bytes are read as `t`. Texts have 1 to 200 printable
    characters, numbers are in [0, 2^32), `fwid` is a SHA-256 digest, `flags` are among the standard's.
    """

    vendor: str
    model: str
    version: str
    svn: int
    layer: int
    index: int
    fwid: Digest
    flags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for text in (self.vendor, self.model, self.version):
            if not 0 < len(text) <= _MAX_TEXT or not text.isprintable():
                raise CallerError(f"DiceTcbInfo: a string must have 1 to {_MAX_TEXT} printable characters")
        if not all(0 <= number < _MAX_NUMBER for number in (self.svn, self.layer, self.index)):
            raise CallerError("DiceTcbInfo: a number must be in [0, 2^32)")
        if self.fwid.algorithm != SHA256 or not self.flags <= set(_FLAGS):
            raise CallerError("DiceTcbInfo: a digest is not SHA-256, or a flag is unknown")

    def to_der(self) -> bytes:
        bits = sum(1 << 7 - _FLAGS.index(flag) for flag in self.flags)
        padding = (bits & -bits).bit_length() - 1 if bits else 0  # a list of named bits ends with its last one (X.690)
        sequence = _Sequence(
            vendor=self.vendor,
            model=self.model,
            version=self.version,
            svn=self.svn,
            layer=self.layer,
            index=self.index,
            fwids=[_Fwid(algorithm=_SHA256_OID, digest=self.fwid.value)],
            flags=asn1.BitString(bytes([bits] if bits else []), padding),
        )
        return asn1.encode_der(sequence)

    @classmethod
    def from_der(cls, data: bytes) -> TcbInfo:
        """Return what the extension's value says; EvidenceError unless it is what `to_der` writes."""
        try:
            read = asn1.decode_der(_Sequence, data)
            [fwid] = read.fwids
            bits = int.from_bytes(read.flags.as_bytes(), "big")
            info = cls(
                vendor=read.vendor,
                model=read.model,
                version=read.version,
                svn=read.svn,
                layer=read.layer,
                index=read.index,
                fwid=Digest(SHA256, fwid.digest),
                flags=frozenset(flag for place, flag in enumerate(_FLAGS) if bits & 1 << 7 - place),
            )
        except (ValueError, CallerError, EvidenceError):
            raise EvidenceError("malformed DiceTcbInfo") from None
        if info.to_der() != data:
            raise EvidenceError("DiceTcbInfo is not in the encoding that is used here, or uses another hash algorithm")
        return info


@asn1.sequence
class _Fwid:
    algorithm: x509.ObjectIdentifier
    digest: bytes


@asn1.sequence
class _Sequence:
    vendor: Annotated[str, asn1.Implicit(0)]
    model: Annotated[str, asn1.Implicit(1)]
    version: Annotated[str, asn1.Implicit(2)]
    svn: Annotated[int, asn1.Implicit(3)]
    layer: Annotated[int, asn1.Implicit(4)]
    index: Annotated[int, asn1.Implicit(5)]
    fwids: Annotated[list[_Fwid], asn1.Implicit(6)]
    flags: Annotated[asn1.BitString, asn1.Implicit(7)]
