"""Certificates of a chip, as RFC 5280 and DICE want them: which fields each layer's has, and reading them back.

Issuing leaves no choice, so a reader rebuilds a certificate from names, keys and measurement and compares the bytes:
whatever is missing, extra, repeated or marked critical otherwise is refused. Certificates never expire (notAfter
99991231235959Z, RFC 5280, 4.1.2.5): revocation is the registry's.
"""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.envelope import VerifyingKey
from firmware_sim.evidence.tcb import TCB_INFO_OID, TcbInfo

__all__ = [
    "MAKER_NAME",
    "Certificate",
    "IdentityError",
    "alias_builder",
    "check_issued",
    "device_builder",
    "load_chain",
    "maker_builder",
    "open_certificate",
    "to_pem",
]

MAKER_NAME = "Chipwitness maker"
_CHAIN_LENGTH = 3
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


class IdentityError(EvidenceError):
    """A certificate chain is malformed or leads to no trusted maker, firmware or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a certificate says of itself, nothing of it checked yet; `tcb_info` is the extension's value."""

    common_name: str
    key: VerifyingKey
    tcb_info: bytes | None
    der: bytes

    @property
    def digest(self) -> Digest:
        return digest_bytes("x509-certificate", self.der)


def maker_builder(key: VerifyingKey) -> x509.CertificateBuilder:
    """Certificate of the maker's CA, which signs itself."""
    return _builder(_name(MAKER_NAME), _name(MAKER_NAME), key, key, ca=True, path_length=1)


def device_builder(
    chip_id: str, key: VerifyingKey, maker_key: VerifyingKey, tcb_info: TcbInfo
) -> x509.CertificateBuilder:
    """Certificate of a chip's device key; `tcb_info` is of the boot layer, which holds that key."""
    return _builder(_name(chip_id), _name(MAKER_NAME), key, maker_key, ca=True, path_length=0, tcb_info=tcb_info)


def alias_builder(
    chip_id: str, key: VerifyingKey, device_key: VerifyingKey, tcb_info: TcbInfo
) -> x509.CertificateBuilder:
    """Certificate of a firmware's alias key, which certifies no other; `tcb_info` is of that firmware."""
    return _builder(_name(chip_id, "alias"), _name(chip_id), key, device_key, ca=False, tcb_info=tcb_info)


def load_chain(chain_pem: bytes) -> list[Certificate]:
    """Return the certificates of a chain in its one encoding: alias, device, maker.

    Raises:
        IdentityError: not three certificates, another encoding, or one that can't be parsed.
    """
    most = limits.CHAIN_BYTES.most
    if len(chain_pem) > most:
        raise IdentityError(f"certificate chain has {len(chain_pem)} bytes, more than {most}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what the parser only warns of, such as negative serial numbers
            chain = x509.load_pem_x509_certificates(chain_pem)
            encoded = b"".join(to_pem(certificate) for certificate in chain)
            opened = [open_certificate(certificate) for certificate in chain]
    except (EvidenceError, MemoryError):
        raise
    except Exception as error:  # the parser's errors on hostile bytes have no common class
        raise IdentityError(f"certificate chain can't be parsed: {error}".splitlines()[0]) from None
    if len(chain) != _CHAIN_LENGTH:
        raise IdentityError(f"certificate chain holds {len(chain)} certificates, expected {_CHAIN_LENGTH}")
    if encoded != chain_pem:
        raise IdentityError("certificate chain is not byte-equal to its canonical encoding")
    return opened


def open_certificate(certificate: x509.Certificate) -> Certificate:
    """Return what a certificate says; IdentityError unless it names one subject and an Ed25519 key."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise IdentityError("certificate does not name exactly one subject")
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError("certificate's key is not Ed25519")
    tcb_info = [each.value.public_bytes() for each in certificate.extensions if each.oid == TCB_INFO_OID]
    return Certificate(
        common_name=names[0].value,
        key=VerifyingKey(key.public_bytes_raw()),
        tcb_info=tcb_info[0] if tcb_info else None,
        der=certificate.public_bytes(serialization.Encoding.DER),
    )


def check_issued(
    certificate: Certificate, builder: x509.CertificateBuilder, issuer_key: VerifyingKey, issuer: str
) -> None:
    """Check that the certificate is what the issuer issues, and that the issuer signed it.

    Raises:
        IdentityError: it is not.
    """
    rebuilt = builder.sign(Ed25519PrivateKey.from_private_bytes(bytes(_KEY_BYTES)), None)
    unsigned = rebuilt.public_bytes(serialization.Encoding.DER)[:-_SIGNATURE_BYTES]
    if certificate.der[:-_SIGNATURE_BYTES] != unsigned:
        raise IdentityError(
            f"certificate of {certificate.common_name!r:.100} does not have the form in which {issuer!r} issues "
            "certificates"
        )
    try:
        issuer_key.verify(certificate.der[-_SIGNATURE_BYTES:], rebuilt.tbs_certificate_bytes)
    except EvidenceError:
        raise IdentityError(f"certificate of {certificate.common_name!r:.100} is not signed by {issuer!r}") from None


def to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: VerifyingKey,
    issuer_key: VerifyingKey,
    *,
    ca: bool,
    path_length: int | None = None,
    tcb_info: TcbInfo | None = None,
) -> x509.CertificateBuilder:
    """Return a certificate without any choice in it: the serial number is derived from names and keys."""
    content = length_prefixed(subject.rfc4514_string(), issuer.rfc4514_string(), key.raw, issuer_key.raw)
    serial = int.from_bytes(digest_bytes("certificate-serial", content).value[:16], "big") | 1
    own, issuers = (Ed25519PublicKey.from_public_bytes(each.raw) for each in (key, issuer_key))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own)
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=path_length), critical=True)
        .add_extension(_key_usage(ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers), critical=False)
    )
    if tcb_info is None:
        return builder
    # Not critical: who does not know the extension can still check signatures, and says nothing of the firmware.
    return builder.add_extension(x509.UnrecognizedExtension(TCB_INFO_OID, tcb_info.to_der()), critical=False)


def _key_usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str, unit: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if unit is not None:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
    return x509.Name(attributes)
