"""The chain as other programs see it: OpenSSL, and `cryptography`'s own verifier."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cryptography import x509

from firmware_sim import CURRENT_FIRMWARE, FirmwareChip, MakerCA, issue_alias
from firmware_sim.certificates import alias_builder, load_chain, to_pem
from firmware_sim.evidence.tcb import TcbInfo
from firmware_sim.identity import BOOT_LAYER

OPENSSL = shutil.which("openssl")
MAKER = MakerCA.create(b"maker")
SECRETS = MAKER.issue_device("x" * 64, b"seed")
CHAIN = issue_alias(SECRETS, CURRENT_FIRMWARE)
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\n.*?-----END CERTIFICATE-----\n", re.DOTALL)
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")


STRICT = ("-x509_strict", "-check_ss_sig")
COMMAND = [OPENSSL or "openssl", "verify", *STRICT, "-CAfile", "maker.pem", "-untrusted", "device.pem", "alias.pem"]


def _verify(folder, chain):
    alias, device, maker = PEM.findall(chain)
    for name, content in (("alias", alias), ("device", device), ("maker", maker)):
        (folder / f"{name}.pem").write_bytes(content)
    return subprocess.run(COMMAND, cwd=folder, capture_output=True, text=True, check=False)


@needs_openssl
def test_openssl_accepts_the_chain_of_a_chip(tmp_path):
    chip = FirmwareChip.manufacture(tmp_path / "chip", maker=MAKER, chip_id="chip-1", seed=b"seed", snapshot_rate=1)
    done = _verify(tmp_path, chip.certificate_chain())
    assert (done.returncode, done.stdout, done.stderr) == (0, "alias.pem: OK\n", "")


@needs_openssl
def test_openssl_refuses_another_makers_chain(tmp_path):
    done = _verify(tmp_path, CHAIN[: -len(MAKER.certificate)] + MakerCA.create(b"other").certificate)
    assert done.returncode == 2
    assert "alias.pem: verification failed" in done.stderr


@needs_openssl
def test_openssl_refuses_what_an_alias_key_certifies(tmp_path):
    device, key = SECRETS.device_key, SECRETS.alias_key(CURRENT_FIRMWARE)
    known = load_chain(CHAIN)[0].tcb_info
    assert known is not None
    tcb_info = TcbInfo.from_der(known)
    builder = alias_builder("below", device.verifying, key.verifying, tcb_info)
    builder._issuer_name = x509.load_pem_x509_certificate(CHAIN).subject
    below = to_pem(builder.sign(key.private_key, None))
    assert _verify(tmp_path, CHAIN).returncode == 0
    (tmp_path / "device.pem").write_bytes(b"".join(PEM.findall(CHAIN)[:2]))
    (tmp_path / "alias.pem").write_bytes(below)
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid CA certificate" in done.stderr


@needs_openssl
def test_openssl_finds_the_firmware_in_the_certificates():
    """Its ASN.1 parser, which knows nothing of this project, finds name and measurement of each layer."""
    alias, device, _ = PEM.findall(CHAIN)
    for certificate, layer in ((alias, CURRENT_FIRMWARE), (device, BOOT_LAYER)):
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        extension = extensions.get_extension_for_oid(x509.ObjectIdentifier("2.23.133.5.4.1")).value
        assert isinstance(extension, x509.UnrecognizedExtension)
        done = subprocess.run(
            [COMMAND[0], "asn1parse", "-inform", "DER", "-dump"], input=extension.value, capture_output=True, check=True
        )
        text = done.stdout.decode()
        assert ":sha256" in text
        dumped = "".join(re.findall(r"- ((?:[0-9a-f]{2}[ -]){1,16})", text[text.index("OCTET STRING") :]))
        assert layer.measurement.value.hex() in re.sub(r"[ -]", "", dumped)


def test_constraints_and_usages_are_those_of_each_layer():
    found = []
    for certificate in x509.load_pem_x509_certificates(CHAIN):
        extensions = {type(each.value): (each.value, each.critical) for each in certificate.extensions}
        basic, critical = extensions[x509.BasicConstraints]
        usage, usage_critical = extensions[x509.KeyUsage]
        assert critical
        assert usage_critical
        assert not extensions[x509.SubjectKeyIdentifier][1]
        assert not extensions[x509.AuthorityKeyIdentifier][1]
        found.append((basic.ca, basic.path_length, usage.key_cert_sign, usage.digital_signature))
    assert found == [(False, None, False, True), (True, 0, True, False), (True, 1, True, False)]


def test_each_key_is_named_by_the_certificate_below_it():
    alias, device, maker = x509.load_pem_x509_certificates(CHAIN)
    for below, above in ((alias, device), (device, maker), (maker, maker)):
        authority = below.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        subject = above.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        assert authority == subject
