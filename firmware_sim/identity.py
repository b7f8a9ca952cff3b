"""Who a chip is: maker CA → device key → alias key, as DICE layers them.

The device key comes from the unique device secret (UDS) alone; the compound device identifier CDI = KDF(UDS, firmware
measurement) gives the alias key, so other firmware has another alias key. The device certificate names the chip; the
alias certificate, which the device key signs at each boot, carries measurement and security version. Certificates
never expire (notAfter 99991231235959Z, RFC 5280, 4.1.2.5): revocation is the registry's.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from firmware_sim import bounds
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey

__all__ = [
    "CURRENT_FIRMWARE",
    "ChipIdentity",
    "DeviceSecrets",
    "Firmware",
    "IdentityError",
    "MakerCA",
    "check_firmware",
    "check_image",
    "check_maker",
    "derive_key",
    "issue_alias",
    "read_chain",
    "verify_chain",
]

_CHAIN_LENGTH = 3
_MAKER_NAME = "Chipwitness maker"
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
# An arc below 2.25 belongs to the UUID it is made from; no registration.
_MEASUREMENT_OID = x509.ObjectIdentifier("2.25.172069330871949837464236418034174153161")
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_SEQUENCE_HEADER = bytes.fromhex("30280420")
_VERSION_HEADER = bytes.fromhex("0404")


class IdentityError(EvidenceError):
    """A certificate chain is malformed or leads to no trusted maker, firmware or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firmware:
    """A firmware image, known by its measurement; `security_version` only rises from release to release.

    A chip boots an image only with its maker's `signature` (`MakerCA.sign_firmware`), so that nobody else can raise the
    security version below which it boots none.
    """

    name: str
    security_version: int
    signature: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        if type(self.name) is not str or type(self.signature) is not bytes:
            raise CallerError("a firmware's name is of type str, its signature of type bytes")
        if not 0 < len(self.name) <= 200 or not self.name.isprintable():
            raise CallerError("a firmware's name has 1 to 200 printable characters")
        if type(self.security_version) is not int or not 0 <= self.security_version < 1 << 32:
            raise CallerError("a firmware's security version is in [0, 2^32)")

    @property
    def measurement(self) -> Digest:
        image = length_prefixed(self.name, str(self.security_version))
        return digest_bytes("firmware-image", image)


CURRENT_FIRMWARE = Firmware(name="chipwitness-firmware 1.0", security_version=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipIdentity:
    """Content of a verified chain. `certificate_digest` is of the device certificate: it outlives firmware updates."""

    chip_id: str
    maker_digest: Digest
    certificate_digest: Digest
    alias_key: VerifyingKey
    measurement: Digest
    security_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSecrets:
    """Fuses of one chip: its UDS and the certificates that vouch for its device key."""

    chip_id: str
    uds: bytes
    device_certificate: bytes
    maker_certificate: bytes

    @property
    def device_key(self) -> SigningKey:
        return SigningKey.from_private_bytes(derive_key(self.uds, "device-key"))

    def alias_key(self, firmware: Firmware) -> SigningKey:
        cdi = derive_key(self.uds, "compound-device-identifier", str(firmware.measurement))
        return SigningKey.from_private_bytes(derive_key(cdi, "alias-key"))

    @property
    def certificate_digest(self) -> Digest:
        return _pem_digest(self.device_certificate)

    @property
    def maker_key(self) -> VerifyingKey:
        """The key that firmware images for this chip are signed with."""
        return _open(x509.load_pem_x509_certificate(self.maker_certificate)).key


def derive_key(secret: bytes, *labels: str) -> bytes:
    """Return 32 bytes that only `secret` gives; other labels give unrelated ones."""
    return hmac.digest(secret, length_prefixed("chipwitness/derive/1", *labels), "sha256")


class MakerCA:
    """The chip maker's certificate authority. Its key stays with the maker: it is in no run folder and no chip."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self.certificate = _pem(_maker_builder(key.verifying).sign(key.private_key, None))

    @classmethod
    def create(cls, seed: bytes) -> MakerCA:
        """Return the CA whose key and certificate `seed` (any length, secret) determines."""
        return cls(SigningKey.from_private_bytes(derive_key(hashlib.sha256(seed).digest(), "maker-ca")))

    @property
    def certificate_digest(self) -> Digest:
        """The reference value by which an inspector trusts this maker."""
        return _pem_digest(self.certificate)

    def sign_firmware(self, firmware: Firmware) -> Firmware:
        """Return the image with the signature without which this maker's chips do not boot it."""
        return replace(firmware, signature=self._key.sign(_image_message(firmware)))

    def issue_device(self, chip_id: str, seed: bytes) -> DeviceSecrets:
        """Return a chip's secrets and certificate; the UDS depends on `seed` and `chip_id`.

        Raises:
            CallerError: the chip id is not 1 to 64 letters, digits, ".", "_" or "-".
        """
        if not _is_chip_id(chip_id):
            raise CallerError(f"chip id {chip_id!r} is not 1 to 64 letters, digits, '.', '_' or '-'")
        uds = derive_key(hashlib.sha256(seed).digest(), "unique-device-secret", chip_id)
        device_key = SigningKey.from_private_bytes(derive_key(uds, "device-key")).verifying
        builder = _device_builder(chip_id, device_key, self._key.verifying)
        return DeviceSecrets(
            chip_id=chip_id,
            uds=uds,
            device_certificate=_pem(builder.sign(self._key.private_key, None)),
            maker_certificate=self.certificate,
        )


def check_image(firmware: Firmware, secrets: DeviceSecrets) -> None:
    """Check that the chip's maker signed the image.

    Raises:
        IdentityError: it did not.
    """
    try:
        secrets.maker_key.verify(firmware.signature, _image_message(firmware))
    except EvidenceError:
        raise IdentityError(
            f"firmware {firmware.name!r:.100} of security version {firmware.security_version} is not signed by the "
            f"maker of chip {secrets.chip_id}"
        ) from None


def issue_alias(secrets: DeviceSecrets, firmware: Firmware) -> bytes:
    """Return the chain (alias, device, maker; PEM) that the boot layer presents for this firmware."""
    device, alias = secrets.device_key, secrets.alias_key(firmware)
    builder = _alias_builder(
        secrets.chip_id, alias.verifying, device.verifying, firmware.measurement, firmware.security_version
    )
    return _pem(builder.sign(device.private_key, None)) + secrets.device_certificate + secrets.maker_certificate


def verify_chain(
    chain_pem: bytes,
    *,
    trusted_ca_digests: Collection[Digest],
    allowed_measurements: Collection[Digest],
    minimum_security_version: int,
) -> ChipIdentity:
    """Return the identity that a chain (alias, device, maker) proves to those who trust these anchors.

    Raises:
        CallerError: no trusted CA or no allowed measurement is given, so nothing could be trusted.
        IdentityError: otherwise, naming what failed.
    """
    identity = read_chain(chain_pem)
    check_maker(identity, trusted_ca_digests)
    check_firmware(identity, allowed_measurements, minimum_security_version)
    return identity


def check_maker(identity: ChipIdentity, trusted_ca_digests: Collection[Digest]) -> None:
    """Check that a trusted maker vouches for the chip."""
    if not trusted_ca_digests:
        raise CallerError("no trusted maker CA: nothing can be verified")
    if identity.maker_digest not in trusted_ca_digests:
        raise IdentityError(f"chip {identity.chip_id}: maker CA {identity.maker_digest} is not trusted")


def check_firmware(
    identity: ChipIdentity, allowed_measurements: Collection[Digest], minimum_security_version: int
) -> None:
    """Check that the chip runs firmware that is allowed and not withdrawn."""
    if not allowed_measurements:
        raise CallerError("no allowed firmware measurement: nothing can be verified")
    if identity.measurement not in allowed_measurements:
        raise IdentityError(f"chip {identity.chip_id}: firmware measurement {identity.measurement} is not allowed")
    if identity.security_version < minimum_security_version:
        raise IdentityError(
            f"chip {identity.chip_id}: firmware security version {identity.security_version} "
            f"is below {minimum_security_version}"
        )


def read_chain(chain_pem: bytes) -> ChipIdentity:
    """Return the identity a chain claims under its own maker certificate; whom to trust is for the caller to check.

    Issuing leaves no choice, so each certificate is rebuilt from its subject, keys and measurement and must come out
    byte for byte; only then is its signature looked at.

    Raises:
        IdentityError: names the certificate that is malformed or not signed by the next one.
    """
    alias, device, maker = _load_chain(chain_pem)
    chip_id = device.common_name
    if not _is_chip_id(chip_id):
        raise IdentityError(f"device certificate names the malformed chip id {chip_id!r:.100}")
    measurement, security_version = _decode_measurement(alias.measurement)
    _check_issued(maker, _maker_builder(maker.key), maker.key, _MAKER_NAME)
    _check_issued(device, _device_builder(chip_id, device.key, maker.key), maker.key, _MAKER_NAME)
    _check_issued(
        alias, _alias_builder(chip_id, alias.key, device.key, measurement, security_version), device.key, chip_id
    )
    return ChipIdentity(
        chip_id=chip_id,
        maker_digest=_certificate_digest(maker.der),
        certificate_digest=_certificate_digest(device.der),
        alias_key=alias.key,
        measurement=measurement,
        security_version=security_version,
    )


def _image_message(firmware: Firmware) -> bytes:
    return length_prefixed("chipwitness/firmware-image/1", firmware.measurement.value)


def _maker_builder(key: VerifyingKey) -> x509.CertificateBuilder:
    return _builder(_MAKER_NAME, _MAKER_NAME, key, key, ca=True, path_length=1)


def _device_builder(chip_id: str, key: VerifyingKey, maker_key: VerifyingKey) -> x509.CertificateBuilder:
    return _builder(chip_id, _MAKER_NAME, key, maker_key, ca=True, path_length=0)


def _alias_builder(
    chip_id: str, key: VerifyingKey, device_key: VerifyingKey, measurement: Digest, security_version: int
) -> x509.CertificateBuilder:
    extension = x509.UnrecognizedExtension(_MEASUREMENT_OID, _encode_measurement(measurement, security_version))
    builder = _builder(f"{chip_id} alias", chip_id, key, device_key, ca=False)
    return builder.add_extension(extension, critical=True)


def _builder(
    subject: str,
    issuer: str,
    key: VerifyingKey,
    issuer_key: VerifyingKey,
    *,
    ca: bool,
    path_length: int | None = None,
) -> x509.CertificateBuilder:
    """Return a certificate without any choice in it: the serial number is derived from names and keys."""
    content = length_prefixed(subject, issuer, key.raw, issuer_key.raw)
    serial = int.from_bytes(digest_bytes("certificate-serial", content).value[:16], "big") | 1
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(Ed25519PublicKey.from_public_bytes(key.raw))
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=path_length), critical=True)
        .add_extension(_key_usage(ca), critical=True)
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Certificate:
    """What a certificate says of itself, nothing of it checked yet."""

    common_name: str
    key: VerifyingKey
    measurement: bytes | None
    der: bytes


def _load_chain(chain_pem: bytes) -> list[_Certificate]:
    most = bounds.CHAIN_BYTES.most
    if len(chain_pem) > most:
        raise IdentityError(f"certificate chain has {len(chain_pem)} bytes, more than {most}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what the parser only warns of, such as negative serial numbers
            chain = x509.load_pem_x509_certificates(chain_pem)
            encoded = b"".join(_pem(certificate) for certificate in chain)
            opened = [_open(certificate) for certificate in chain]
    except (EvidenceError, MemoryError):
        raise
    except Exception as error:  # the parser's errors on hostile bytes have no common class
        raise IdentityError(f"certificate chain can't be parsed: {error}".splitlines()[0]) from None
    if len(chain) != _CHAIN_LENGTH:
        raise IdentityError(f"certificate chain holds {len(chain)} certificates, expected {_CHAIN_LENGTH}")
    if encoded != chain_pem:
        raise IdentityError("certificate chain is not byte-equal to its canonical encoding")
    return opened


def _open(certificate: x509.Certificate) -> _Certificate:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise IdentityError("certificate does not name one subject")
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError("certificate's key is not Ed25519")
    measured = [e.value for e in certificate.extensions if isinstance(e.value, x509.UnrecognizedExtension)]
    return _Certificate(
        common_name=names[0].value,
        key=VerifyingKey(key.public_bytes_raw()),
        measurement=measured[0].value if len(measured) == 1 else None,
        der=certificate.public_bytes(serialization.Encoding.DER),
    )


def _check_issued(
    certificate: _Certificate, builder: x509.CertificateBuilder, issuer_key: VerifyingKey, issuer: str
) -> None:
    """Check that the certificate is what the issuer issues, and that the issuer signed it."""
    rebuilt = builder.sign(Ed25519PrivateKey.from_private_bytes(bytes(_KEY_BYTES)), None)
    unsigned = rebuilt.public_bytes(serialization.Encoding.DER)[:-_SIGNATURE_BYTES]
    if certificate.der[:-_SIGNATURE_BYTES] != unsigned:
        raise IdentityError(f"certificate of {certificate.common_name!r:.100} is not as {issuer!r} issues it")
    try:
        issuer_key.verify(certificate.der[-_SIGNATURE_BYTES:], rebuilt.tbs_certificate_bytes)
    except EvidenceError:
        raise IdentityError(f"certificate of {certificate.common_name!r} is not signed by {issuer!r}") from None


def _encode_measurement(measurement: Digest, security_version: int) -> bytes:
    """Return DER SEQUENCE { OCTET STRING (32) measurement, OCTET STRING (4) security version }."""
    return _SEQUENCE_HEADER + measurement.value + _VERSION_HEADER + security_version.to_bytes(4, "big")


def _decode_measurement(data: bytes | None) -> tuple[Digest, int]:
    if data is None or len(data) != 42 or data[:4] != _SEQUENCE_HEADER or data[36:38] != _VERSION_HEADER:
        raise IdentityError("alias certificate carries no well-formed firmware measurement")
    return Digest("sha256", data[4:36]), int.from_bytes(data[38:], "big")


def _is_chip_id(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is not None


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certificate_digest(der: bytes) -> Digest:
    return digest_bytes("x509-certificate", der)


def _pem_digest(pem: bytes) -> Digest:
    return _certificate_digest(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER))
