"""Who a chip is: maker CA → device key → alias key, as DICE layers them.

The device key comes from the unique device secret (UDS) alone; the compound device identifier CDI = KDF(UDS, firmware
measurement) gives the alias key, so other firmware has another alias key. The device certificate names the chip, its
type and its boot layer; the alias certificate, which the device key signs at each boot, names the firmware.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction

from cryptography import x509

from firmware_sim.certificates import (
    MAKER_NAME,
    Certificate,
    IdentityError,
    alias_builder,
    check_issued,
    device_builder,
    load_chain,
    maker_builder,
    open_certificate,
    to_pem,
)
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey
from firmware_sim.evidence.tcb import TcbInfo
from firmware_sim.evidence.work import Roofline

__all__ = [
    "BOOT_LAYER",
    "CURRENT_FIRMWARE",
    "ChipIdentity",
    "ChipType",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Firmware:
    """A firmware image, known by its measurement; `security_version` only rises from release to release.

    A chip boots an image only with its maker's `signature` (`MakerCA.sign_firmware`), so that no one else can raise the
    security version below which it boots none.
    """

    name: str
    security_version: int
    signature: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        if type(self.name) is not str or type(self.signature) is not bytes:
            raise CallerError("a firmware's name must be of type str, and its signature of type bytes")
        if not 0 < len(self.name) <= 200 or not self.name.isprintable():
            raise CallerError("a firmware's name must have 1 to 200 printable characters")
        if type(self.security_version) is not int or not 0 <= self.security_version < 1 << 32:
            raise CallerError("a firmware's security version must be in [0, 2^32)")

    @property
    def measurement(self) -> Digest:
        image = length_prefixed(self.name, str(self.security_version))
        return digest_bytes("firmware-image", image)


CURRENT_FIRMWARE = Firmware(name="chipwitness-firmware 1.0", security_version=1)
BOOT_LAYER = Firmware(name="chipwitness-boot 1.0", security_version=1)
"""The code in read-only memory that holds the device key, measures the firmware and signs its alias certificate."""


@dataclass(frozen=True, slots=True)
class ChipType:
    """What a maker certifies of a chip: snapshots a tick, and what its device does in a tick at most.

    Law: `ChipType.of_model(t.model) == t`.
    """

    snapshot_rate: Fraction
    roofline: Roofline

    @property
    def model(self) -> str:
        """As the device certificate's DiceTcbInfo names it."""
        tick = f"{self.roofline.flop} FLOP, {self.roofline.moved} bytes"
        return f"{_MODEL}, {self.snapshot_rate} snapshots a tick of {tick}"

    @classmethod
    def of_model(cls, text: str) -> ChipType | None:
        """Parse `model`; None for anything else."""
        found = _TYPE.fullmatch(text)
        if found is None:
            return None
        try:
            kind = cls(Fraction(found[1]), Roofline(flop=int(found[2]), moved=int(found[3])))
        except (CallerError, ValueError, ZeroDivisionError):
            return None
        return kind if kind.model == text else None


_MODEL = "simulated chip"
_TYPE = re.compile(_MODEL + r", ([0-9/]{1,42}) snapshots a tick of ([0-9]{1,20}) FLOP, ([0-9]{1,20}) bytes", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipIdentity:
    """Content of a verified chain. `certificate_digest` is of the device certificate: it outlives firmware updates.

    `firmware` is the name under which the boot layer started the image; what counts is its `measurement`. `type` is
    None where the certificate does not say it.
    """

    chip_id: str
    maker_digest: Digest
    certificate_digest: Digest
    alias_key: VerifyingKey
    firmware: str
    measurement: Digest
    security_version: int
    type: ChipType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSecrets:
    """Fuses of one chip: its UDS and the certificates that vouch for its device key."""

    chip_id: str
    uds: bytes
    device_certificate: bytes
    maker_certificate: bytes

    def __post_init__(self) -> None:
        if not _is_chip_id(self.chip_id):
            raise IdentityError("a device's own chip id is malformed")

    @property
    def device_key(self) -> SigningKey:
        return SigningKey.from_private_bytes(derive_key(self.uds, "device-key"))

    def alias_key(self, firmware: Firmware) -> SigningKey:
        cdi = derive_key(self.uds, "compound-device-identifier", str(firmware.measurement))
        return SigningKey.from_private_bytes(derive_key(cdi, "alias-key"))

    @property
    def certificate_digest(self) -> Digest:
        return _read(self.device_certificate).digest

    @property
    def maker_key(self) -> VerifyingKey:
        """The key that firmware images for this chip are signed with."""
        return _read(self.maker_certificate).key


def derive_key(secret: bytes, *labels: str) -> bytes:
    """Return 32 bytes that only `secret` gives; other labels give unrelated ones."""
    return hmac.digest(secret, length_prefixed("chipwitness/derive/1", *labels), "sha256")


class MakerCA:
    """The chip maker's certificate authority. Its key stays with the maker: it is in no run folder and no chip."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self.certificate = to_pem(maker_builder(key.verifying).sign(key.private_key, None))

    @classmethod
    def create(cls, seed: bytes) -> MakerCA:
        """Return the CA whose key and certificate `seed` (any length, secret) determines."""
        return cls(SigningKey.from_private_bytes(derive_key(hashlib.sha256(seed).digest(), "maker-ca")))

    @property
    def certificate_digest(self) -> Digest:
        """The reference value by which an inspector trusts this maker."""
        return _read(self.certificate).digest

    def sign_firmware(self, firmware: Firmware) -> Firmware:
        """Return the image with the signature without which this maker's chips do not boot it."""
        return replace(firmware, signature=self._key.sign(_image_message(firmware)))

    def issue_device(self, chip_id: str, seed: bytes, kind: ChipType | None = None) -> DeviceSecrets:
        """Return a chip's secrets and certificate, which certifies its type; the UDS depends on `seed` and `chip_id`.

        Raises:
            CallerError: the chip id is not 1 to 64 letters, digits, ".", "_" or "-".
        """
        if not _is_chip_id(chip_id):
            raise CallerError(f"chip id {chip_id!r} is not 1 to 64 letters, digits, '.', '_' or '-'")
        uds = derive_key(hashlib.sha256(seed).digest(), "unique-device-secret", chip_id)
        device_key = SigningKey.from_private_bytes(derive_key(uds, "device-key")).verifying
        builder = device_builder(chip_id, device_key, self._key.verifying, _boot_layer(kind))
        return DeviceSecrets(
            chip_id=chip_id,
            uds=uds,
            device_certificate=to_pem(builder.sign(self._key.private_key, None)),
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
    tcb_info = _tcb_info(firmware.name, firmware.measurement, firmware.security_version, layer=1)
    builder = alias_builder(secrets.chip_id, alias.verifying, device.verifying, tcb_info)
    return to_pem(builder.sign(device.private_key, None)) + secrets.device_certificate + secrets.maker_certificate


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
        raise CallerError("no maker CA is trusted, so nothing can be verified")
    if identity.maker_digest not in trusted_ca_digests:
        raise IdentityError(f"chip {identity.chip_id}: maker CA {identity.maker_digest} is not trusted")


def check_firmware(
    identity: ChipIdentity, allowed_measurements: Collection[Digest], minimum_security_version: int
) -> None:
    """Check that the chip runs firmware that is allowed and not withdrawn."""
    if not allowed_measurements:
        raise CallerError("no firmware measurement is allowed, so nothing can be verified")
    if identity.measurement not in allowed_measurements:
        raise IdentityError(f"chip {identity.chip_id}: firmware measurement {identity.measurement} is not allowed")
    if identity.security_version < minimum_security_version:
        raise IdentityError(
            f"chip {identity.chip_id}: firmware security version {identity.security_version} "
            f"is below {minimum_security_version}"
        )


def read_chain(chain_pem: bytes) -> ChipIdentity:
    """Return the identity a chain claims under its own maker certificate; whom to trust is for the caller to check.

    Raises:
        IdentityError: names the certificate that is malformed or not signed by the next one.
    """
    alias, device, maker = load_chain(chain_pem)
    chip_id = device.common_name
    if not _is_chip_id(chip_id):
        raise IdentityError(f"device certificate names the malformed chip id {chip_id!r:.100}")
    firmware = _read_layer(alias)
    _check_layer(firmware)
    check_issued(maker, maker_builder(maker.key), maker.key, MAKER_NAME)
    kind = ChipType.of_model(_read_model(device))
    check_issued(device, device_builder(chip_id, device.key, maker.key, _boot_layer(kind)), maker.key, MAKER_NAME)
    check_issued(alias, alias_builder(chip_id, alias.key, device.key, firmware), device.key, chip_id)
    return ChipIdentity(
        chip_id=chip_id,
        maker_digest=maker.digest,
        certificate_digest=device.digest,
        alias_key=alias.key,
        firmware=firmware.version,
        measurement=firmware.fwid,
        security_version=firmware.svn,
        type=kind,
    )


def _image_message(firmware: Firmware) -> bytes:
    return length_prefixed("chipwitness/firmware-image/1", firmware.measurement.value)


def _tcb_info(name: str, measurement: Digest, security_version: int, *, layer: int) -> TcbInfo:
    return TcbInfo(
        vendor="Chipwitness",
        model=_MODEL,
        version=name,
        svn=security_version,
        layer=layer,
        index=0,
        fwid=measurement,
    )


def _boot_layer(kind: ChipType | None) -> TcbInfo:
    info = _tcb_info(BOOT_LAYER.name, BOOT_LAYER.measurement, BOOT_LAYER.security_version, layer=0)
    return info if kind is None else replace(info, model=kind.model)


def _read_model(device: Certificate) -> str:
    """The model that a device certificate names, of whatever form; "" where it names none."""
    try:
        return TcbInfo.from_der(device.tcb_info or b"").model
    except EvidenceError:
        return ""


def _read_layer(alias: Certificate) -> TcbInfo:
    """What the alias certificate says of the firmware; IdentityError if that is missing or malformed."""
    try:
        return TcbInfo.from_der(alias.tcb_info or b"")
    except EvidenceError as error:
        raise IdentityError(f"alias certificate does not say which firmware runs: {error}") from None


def _check_layer(found: TcbInfo) -> None:
    """Check that this is firmware right above the boot layer, in normal operation."""
    if found.flags:
        raise IdentityError(
            f"the firmware in the alias certificate runs with the flags {', '.join(sorted(found.flags))}"
        )
    if found != _tcb_info(found.version, found.fwid, found.svn, layer=1):
        raise IdentityError(
            f"alias certificate is not for firmware of this maker: it names layer {found.layer}, index {found.index}, "
            f"{found.vendor!r:.100} {found.model!r:.100}"
        )


def _is_chip_id(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is not None


def _read(pem: bytes) -> Certificate:
    try:
        return open_certificate(x509.load_pem_x509_certificate(pem))
    except ValueError:
        raise IdentityError("a device's own certificate can't be parsed") from None
