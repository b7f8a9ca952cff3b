"""TLS without certificate authorities: the party's own key, which clients know, signs its server's certificate.

A server makes a new TLS key when it starts, and again before the certificate of the last one ends. A client makes the
root of trust from the party's public key alone, and hands it to the TLS library, which then takes that party's
certificates and no others. Host names count for nothing.
"""

from __future__ import annotations

import contextlib
import os
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

__all__ = ["Certificate", "certificate", "context_for", "reason"]

_DAYS = 90
"""For which a certificate is valid; a server makes another one when a third of them is left."""
_SKEW = timedelta(days=1)
"""Clocks of parties may differ by as much."""
_FOREVER = datetime(9999, 12, 31, tzinfo=UTC)


class Certificate:
    """PEM files of a certificate that a party's key has signed, and of its private key.

    Attributes:
        files: certificate and key.
        lasts: seconds after which to make the next one, at least one.
    """

    def __init__(self, key: SigningKey, folder: Path) -> None:
        """Make the first one, in a folder that its owner alone can enter."""
        self._key = key
        self.files = folder / "certificate.pem", folder / "key.pem"
        self.lasts = max(1.0, timedelta(days=_DAYS).total_seconds() * 2 / 3)
        self.renew(datetime.now(UTC))

    def renew(self, now: datetime) -> None:
        """Put another certificate and key in the place of the last ones."""
        own = SigningKey.generate()
        ends = now + timedelta(days=_DAYS)
        built = _builder(own.verifying, self._key.verifying, "server", now - _SKEW, ends)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        signed = built.add_extension(usage, critical=False).sign(self._key.private_key, None)
        private = own.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for path, content in zip(self.files, (signed.public_bytes(Encoding.PEM), private), strict=True):
            draft = path.with_suffix(".new")
            draft.write_bytes(content)
            os.replace(draft, path)


@contextlib.contextmanager
def certificate(key: SigningKey) -> Iterator[Certificate]:
    """A certificate of a server of this party, whose files are deleted in the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Certificate(key, Path(folder))


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
