"""TLS without certificate authorities: the party's own key, which clients know, signs its server's certificate.

A server makes a new TLS key each time it starts. A client makes the root of trust from the party's public key alone,
and hands it to the TLS library, which then takes that party's certificates and no others. Host names count for nothing.
"""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from firmware_sim.evidence import SigningKey, VerifyingKey

__all__ = ["certificate_files", "context_for", "reason"]

_DAYS = 90
"""For which a certificate is valid: a server that runs for longer has to be started anew."""
_SKEW = timedelta(days=1)
"""Clocks of parties may differ by as much."""
_FOREVER = datetime(9999, 12, 31, tzinfo=UTC)


@contextlib.contextmanager
def certificate_files(key: SigningKey, now: datetime) -> Iterator[tuple[Path, Path]]:
    """PEM files of a new certificate that the party's key signs, and of its private key; deleted in the end."""
    own = SigningKey.generate()
    built = _builder(own.verifying, key.verifying, "server", now - _SKEW, now + timedelta(days=_DAYS))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = built.add_extension(usage, critical=False).sign(key.private_key, None)
    with tempfile.TemporaryDirectory() as folder:  # which its owner alone can enter
        files = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        files[1].write_bytes(own.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        yield files


@cache
def context_for(key: VerifyingKey) -> ssl.SSLContext:
    """What takes no certificate but a valid one that this party's key has signed."""
    root = _builder(key, key, key.raw.hex(), datetime(2020, 1, 1, tzinfo=UTC), _FOREVER)
    anchor = root.sign(SigningKey.generate().private_key, None)  # no one looks at a root's signature
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=anchor.public_bytes(Encoding.DER))
    return context


def reason(error: BaseException | None) -> str:
    """Why a server does not show that it is the party; empty where a connection failed for another reason."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        dates = {9: "is not valid yet: compare the clocks", 10: "has expired: start its server anew"}
        other = "was not signed by its key: something else answers at this address, or listens in on the way"
        return f"the server's certificate {dates.get(error.verify_code, other)}"
    if error is not None and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        return "the server does not speak TLS: start it with --tls, or write http:// in its address"
    return ""


def _builder(
    key: VerifyingKey, issuer: VerifyingKey, name: str, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    """A certificate of ``key``; that of the issuer itself is a root."""
    public, above = (Ed25519PublicKey.from_public_bytes(each.raw) for each in (key, issuer))
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer.raw.hex())]
    is_root = key == issuer
    return (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(above), critical=False)
    )
