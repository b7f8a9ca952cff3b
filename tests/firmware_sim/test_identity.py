from __future__ import annotations

import base64
import dataclasses
import datetime
import re
from fractions import Fraction
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.x509.oid import ExtensionOID, NameOID

from firmware_sim import (
    CURRENT_FIRMWARE,
    CallerError,
    ChipType,
    EvidenceError,
    Firmware,
    FirmwareChip,
    IdentityError,
    MakerCA,
    QuoteError,
    Roofline,
    check_firmware,
    check_image,
    check_maker,
    check_quote_identity,
    digest_bytes,
    issue_alias,
    open_quote,
    read_chain,
    verify_chain,
)
from firmware_sim.certificates import alias_builder, device_builder, maker_builder
from firmware_sim.evidence.tcb import TCB_INFO_OID, TcbInfo
from tests.guards import off

MAKER = MakerCA.create(b"maker")
SECRETS = MAKER.issue_device("chip-1", b"seed")
CHAIN = issue_alias(SECRETS, CURRENT_FIRMWARE)
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\n.*?-----END CERTIFICATE-----\n", re.DOTALL)


def _verify(chain, **changes):
    trust = {
        "trusted_ca_digests": [MAKER.certificate_digest],
        "allowed_measurements": [CURRENT_FIRMWARE.measurement],
        "minimum_security_version": 1,
    }
    return verify_chain(chain, **{**trust, **changes})


def test_chain_proves_the_identity():
    identity = _verify(CHAIN)
    assert identity.chip_id == "chip-1"
    assert identity.maker_digest == MAKER.certificate_digest
    assert identity.certificate_digest == SECRETS.certificate_digest
    assert identity.alias_key == SECRETS.alias_key(CURRENT_FIRMWARE).verifying
    assert identity.firmware == CURRENT_FIRMWARE.name
    assert identity.measurement == CURRENT_FIRMWARE.measurement
    assert identity.security_version == 1


def test_everything_follows_from_the_seeds():
    assert issue_alias(MakerCA.create(b"maker").issue_device("chip-1", b"seed"), CURRENT_FIRMWARE) == CHAIN
    others = [
        MakerCA.create(b"other").issue_device("chip-1", b"seed"),
        MAKER.issue_device("chip-2", b"seed"),
        MAKER.issue_device("chip-1", b"other"),
    ]
    assert len({other.certificate_digest for other in others} | {SECRETS.certificate_digest}) == 4


def test_alias_key_depends_on_the_firmware_and_the_device_key_does_not():
    update = Firmware(name="firmware 2", security_version=2)
    updated = issue_alias(SECRETS, update)
    identity = _verify(updated, allowed_measurements=[update.measurement])
    assert identity.alias_key != _verify(CHAIN).alias_key
    assert identity.certificate_digest == _verify(CHAIN).certificate_digest
    assert identity.security_version == 2


def test_certificates_never_expire_and_are_no_leaf_that_signs():
    alias, device, maker = x509.load_pem_x509_certificates(CHAIN)
    for certificate in (alias, device, maker):
        assert certificate.not_valid_after_utc == datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
    usages = [c.extensions.get_extension_for_class(x509.KeyUsage).value for c in (alias, device, maker)]
    assert [usage.key_cert_sign for usage in usages] == [False, True, True]
    assert [usage.digital_signature for usage in usages] == [True, False, False]


def test_other_verifiers_accept_the_signatures():
    alias, device, maker = x509.load_pem_x509_certificates(CHAIN)
    alias.verify_directly_issued_by(device)
    device.verify_directly_issued_by(maker)
    maker.verify_directly_issued_by(maker)


def test_untrusted_parts_are_named():
    other = MakerCA.create(b"other")
    with pytest.raises(IdentityError, match=f"chip chip-1: maker CA {MAKER.certificate_digest} is not trusted"):
        _verify(CHAIN, trusted_ca_digests=[other.certificate_digest])
    with pytest.raises(IdentityError, match=f"chip chip-1: firmware measurement {CURRENT_FIRMWARE.measurement} is not"):
        _verify(CHAIN, allowed_measurements=[digest_bytes("x", b"")])
    with pytest.raises(IdentityError, match="chip chip-1: firmware security version 1 is below 2"):
        _verify(CHAIN, minimum_security_version=2)


def test_empty_trust_is_the_callers_mistake():
    identity = read_chain(CHAIN)
    with pytest.raises(CallerError, match="no maker CA is trusted"):
        check_maker(identity, [])
    with pytest.raises(CallerError, match="no firmware measurement is allowed"):
        check_firmware(identity, [], 1)


def test_forged_signatures_are_refused():
    for which, named in [
        (0, "'chip-1' is not signed by 'chip-1'"),
        (1, "'chip-1' is not signed by 'Chipwitness"),
    ]:
        ders = [c.public_bytes(serialization.Encoding.DER) for c in x509.load_pem_x509_certificates(CHAIN)]
        ders[which] = ders[which][:-64] + bytes(64)
        with pytest.raises(IdentityError, match=named):
            read_chain(b"".join(map(_pem, ders)))


def test_every_flipped_byte_is_refused():
    for index in range(len(CHAIN)):
        altered = bytearray(CHAIN)
        altered[index] ^= 1 << index % 7
        with pytest.raises(EvidenceError):
            read_chain(bytes(altered))


def test_every_flipped_bit_of_the_certificates_is_refused():
    """Below the PEM: each byte of each certificate's DER, re-encoded cleanly."""
    ders = [c.public_bytes(serialization.Encoding.DER) for c in x509.load_pem_x509_certificates(CHAIN)]
    for which, der in enumerate(ders):
        for index in range(len(der)):
            altered = bytearray(der)
            altered[index] ^= 1 << index % 8
            chain = b"".join(_pem(bytes(altered) if i == which else other) for i, other in enumerate(ders))
            with pytest.raises(EvidenceError):
                _verify(chain)


def _pem(der):
    text = base64.b64encode(der).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return f"-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n".encode()


def _parts(chain=CHAIN):
    return PEM.findall(chain)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda: b"", "can't be parsed"),
        (lambda: b"x" * 20000, "has 20000 bytes, more than 16384"),
        (lambda: b"".join(_parts()[:2]), "holds 2 certificates, expected 3"),
        (lambda: CHAIN + _parts()[2], "holds 4 certificates, expected 3"),
        (lambda: CHAIN + b"\n", "not byte-equal"),
        (lambda: b"comment\n" + CHAIN, "not byte-equal"),
        (lambda: CHAIN.replace(b"\n", b"\r\n"), "not byte-equal"),
        (lambda: b"".join(reversed(_parts())), "does not say which firmware runs"),
        (
            lambda: _mixed(maker=MakerCA.create(b"other")),
            "'chip-1' does not have the form in which 'Chipwitness maker' issues certificates",
        ),
        (
            lambda: _mixed(device=MAKER.issue_device("chip-1", b"other")),
            "'chip-1' does not have the form in which 'chip-1' issues certificates",
        ),
        (
            lambda: _mixed(device=MAKER.issue_device("chip-2", b"seed")),
            "'chip-1' does not have the form in which 'chip-2' issues certificates",
        ),
    ],
)
def test_chain_that_does_not_hang_together_is_refused(chain, message):
    with pytest.raises(IdentityError, match=message):
        read_chain(chain())


def _mixed(maker=MAKER, device=SECRETS):
    return _parts()[0] + device.device_certificate + maker.certificate


def _tcb_info(certificate):
    extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_oid(TCB_INFO_OID).value
    assert isinstance(extension, x509.UnrecognizedExtension)
    return TcbInfo.from_der(extension.value)


TCB_INFO = _tcb_info(CHAIN)


def _alias(change=lambda builder: builder, *, name="chip-1", tcb_info=TCB_INFO, without=None, extra=()):
    """A chain whose alias certificate a device key holder signed freely."""
    device, alias = SECRETS.device_key, SECRETS.alias_key(CURRENT_FIRMWARE)
    builder = alias_builder(name, alias.verifying, device.verifying, tcb_info)
    builder._issuer_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "chip-1")])
    builder._extensions = [each for each in builder._extensions if each.oid != without] + list(extra)
    certificate = change(builder).sign(device.private_key, None)
    return certificate.public_bytes(serialization.Encoding.PEM) + SECRETS.device_certificate + MAKER.certificate


def _extension(oid, critical=False, value=None):
    """An extension of the alias certificate, altered; one of another OID holds whatever is given."""
    own = {each.oid: each.value for each in x509.load_pem_x509_certificate(CHAIN).extensions}
    return x509.Extension(oid, critical, own.get(oid) if value is None else x509.UnrecognizedExtension(oid, value))


def test_freely_signed_alias_can_be_the_real_one():
    assert _alias() == CHAIN


def _with(**changes):
    def change(builder):
        for name, value in changes.items():
            setattr(builder, name, value)
        return builder

    return change


NOT_AS_ISSUED = "does not have the form in which 'chip-1' issues certificates"
UNKNOWN = x509.ObjectIdentifier("2.23.133.5.4.4")


def _tcb(**changes):
    return _alias(tcb_info=dataclasses.replace(TCB_INFO, **changes))


def _replaced(oid, **changes):
    return _alias(without=oid, extra=[_extension(oid, **changes)])


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda: _alias(without=TCB_INFO_OID), "does not say which firmware runs: malformed DiceTcbInfo"),
        (lambda: _replaced(TCB_INFO_OID, value=b""), "does not say which firmware runs: malformed DiceTcbInfo"),
        (lambda: _replaced(TCB_INFO_OID, value=bytes(42)), "does not say which firmware runs: malformed DiceTcbInfo"),
        (lambda: _replaced(TCB_INFO_OID, critical=True), NOT_AS_ISSUED),
        (
            lambda: _tcb(flags=frozenset({"debug", "notSecure"})),
            "firmware in the alias certificate runs with the flags debug, notSecure",
        ),
        (
            lambda: _tcb(layer=0),
            "is not for firmware of this maker: it names layer 0, index 0, 'Chipwitness' 'simulated chip'",
        ),
        (lambda: _tcb(index=1), "it names layer 1, index 1"),
        (lambda: _tcb(vendor="another"), "index 0, 'another' 'simulated chip'"),
        (lambda: _tcb(model="another"), "index 0, 'Chipwitness' 'another'"),
        (lambda: _alias(name="chip-2"), NOT_AS_ISSUED),
        (lambda: _alias(extra=[_extension(UNKNOWN, value=b"x")]), NOT_AS_ISSUED),
        (lambda: _alias(extra=[_extension(UNKNOWN, value=b"x", critical=True)]), NOT_AS_ISSUED),
        (lambda: _alias(extra=[_extension(TCB_INFO_OID)]), "Duplicate 2.23.133.5.4.1 extension found"),
        (lambda: _alias(without=ExtensionOID.SUBJECT_KEY_IDENTIFIER), NOT_AS_ISSUED),
        (lambda: _alias(without=ExtensionOID.AUTHORITY_KEY_IDENTIFIER), NOT_AS_ISSUED),
        (lambda: _alias(without=ExtensionOID.KEY_USAGE), NOT_AS_ISSUED),
        (lambda: _alias(without=ExtensionOID.BASIC_CONSTRAINTS), NOT_AS_ISSUED),
        (lambda: _replaced(ExtensionOID.BASIC_CONSTRAINTS, critical=False), NOT_AS_ISSUED),
        (
            lambda: _replaced(ExtensionOID.BASIC_CONSTRAINTS, critical=True, value=b"\x30\x03\x01\x01\xff"),
            NOT_AS_ISSUED,
        ),
        (lambda: _alias(_with(_not_valid_after=datetime.datetime(2030, 1, 1))), NOT_AS_ISSUED),
        (lambda: _alias(_with(_serial_number=7)), NOT_AS_ISSUED),
        (lambda: _alias(_with(_public_key=generate_private_key(SECP256R1()).public_key())), "key is not Ed25519"),
    ],
)
def test_alias_that_the_boot_layer_would_not_issue_is_refused(chain, message):
    with pytest.raises(IdentityError, match=message):
        read_chain(chain())


def test_without_its_guard_an_unknown_critical_extension_passes():
    odd = _alias(extra=[_extension(UNKNOWN, value=b"x", critical=True)])
    with off("certificate as issued"):
        assert _verify(odd).chip_id == "chip-1"
    with pytest.raises(IdentityError, match=NOT_AS_ISSUED):
        _verify(odd)


def test_without_its_guard_firmware_under_a_debugger_passes():
    debugged = _tcb(flags=frozenset({"debug"}))
    with off("layer in normal operation"):
        assert _verify(debugged).chip_id == "chip-1"
    with pytest.raises(IdentityError, match="runs with the flags debug"):
        _verify(debugged)


BOOT = _tcb_info(SECRETS.device_certificate)


def _maker_signed(builder):
    return builder.sign(MAKER._key.private_key, None).public_bytes(serialization.Encoding.PEM)


def test_certificates_that_no_maker_issues_are_refused():
    key, maker_key = SECRETS.device_key.verifying, MAKER._key.verifying
    odd = _maker_signed(device_builder("chip 1", key, maker_key, BOOT))
    with pytest.raises(IdentityError, match="device certificate names the malformed chip id 'chip 1'"):
        read_chain(_parts()[0] + odd + MAKER.certificate)
    flagged = dataclasses.replace(BOOT, flags=frozenset({"debug"}))
    debugged = _maker_signed(device_builder("chip-1", key, maker_key, flagged))
    with pytest.raises(
        IdentityError, match="'chip-1' does not have the form in which 'Chipwitness maker' issues certificates"
    ):
        read_chain(_parts()[0] + debugged + MAKER.certificate)
    other_serial = _maker_signed(_with(_serial_number=7)(maker_builder(maker_key)))
    with pytest.raises(
        IdentityError,
        match="'Chipwitness maker' does not have the form in which 'Chipwitness maker' issues certificates",
    ):
        read_chain(_parts()[0] + _parts()[1] + other_serial)
    name = x509.NameAttribute(NameOID.COMMON_NAME, "chip-1")
    two_names = x509.Name([name, x509.NameAttribute(NameOID.COMMON_NAME, "chip-2")])
    for subject in (two_names, x509.Name([])):
        nameless = _maker_signed(_with(_subject_name=subject)(device_builder("chip-1", key, maker_key, BOOT)))
        with pytest.raises(IdentityError, match="certificate does not name exactly one subject"):
            read_chain(_parts()[0] + nameless + MAKER.certificate)


def test_the_longest_chip_id_has_certificates_too():
    secrets = MAKER.issue_device("x" * 64, b"seed")
    assert read_chain(issue_alias(secrets, CURRENT_FIRMWARE)).chip_id == "x" * 64


@pytest.mark.parametrize("chip_id", ["", "a b", "x" * 65, "chip/1", "é", "a\n"])
def test_malformed_chip_ids_are_refused(chip_id):
    with pytest.raises(CallerError, match="is not 1 to 64 letters"):
        MAKER.issue_device(chip_id, b"seed")


def test_security_version_is_bounded():
    for version in (-1, 2**32):
        with pytest.raises(CallerError, match="security version"):
            Firmware(name="x", security_version=version)


def test_firmware_is_signed_by_the_maker_of_the_chip():
    maker, secrets = MakerCA.create(b"maker"), MakerCA.create(b"maker").issue_device("chip-1", b"s")
    signed = maker.sign_firmware(CURRENT_FIRMWARE)
    assert signed == CURRENT_FIRMWARE
    assert signed.measurement == CURRENT_FIRMWARE.measurement
    check_image(signed, secrets)
    other = dataclasses.replace(signed, security_version=2)
    for image in (CURRENT_FIRMWARE, other, MakerCA.create(b"other").sign_firmware(CURRENT_FIRMWARE)):
        with pytest.raises(IdentityError, match="is not signed by the maker of chip chip-1"):
            check_image(image, secrets)


@pytest.mark.parametrize("change", [{"name": ""}, {"name": "a\nb"}, {"name": b"x"}, {"signature": "x"}])
def test_firmware_cannot_be_built_invalid(change):
    with pytest.raises(CallerError, match="a firmware's name"):
        Firmware(**{"name": "x", "security_version": 1, **change})


def test_the_maker_certifies_the_type_of_a_chip():
    """Snapshots a tick, and how long a tick is (row A50 of the attacks)."""
    kind = ChipType(Fraction(1, 8), Roofline(flop=10**15, moved=3 * 10**12))
    chain = issue_alias(MAKER.issue_device("chip-1", b"seed", kind), CURRENT_FIRMWARE)
    assert _verify(chain).type == kind
    assert _verify(CHAIN).type is None
    assert ChipType.of_model(kind.model) == kind
    odd = (kind.model + " ", kind.model.replace("1/8", "2/16"), kind.model.replace("8", "0"))
    for text in ("", "simulated chip", *odd):
        assert ChipType.of_model(text) is None


def test_a_quote_is_of_the_certified_type(tmp_path):
    order: dict[str, Any] = {"maker": MAKER, "seed": b"seed", "snapshot_rate": Fraction(1, 8)}
    chip = FirmwareChip.manufacture(tmp_path / "chip", chip_id="chip-1", **order)
    quote = open_quote(chip.challenge(b"n" * 16, "v"), read_chain(chip.certificate_chain()).alias_key)
    identity = read_chain(chip.certificate_chain())
    check_quote_identity(quote, identity)
    for odd in (
        dataclasses.replace(quote, flop_rate=quote.flop_rate * 20),
        dataclasses.replace(quote, moved_rate=quote.moved_rate + 1),
        dataclasses.replace(quote, snapshot_rate=Fraction(1, 9)),
    ):
        with pytest.raises(QuoteError, match=r"chip chip-1: quote is of a simulated chip, .* its certificate of a"):
            check_quote_identity(odd, identity)
