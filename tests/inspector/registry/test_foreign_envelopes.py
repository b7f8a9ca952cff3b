"""securesystemslib, which knows nothing of this project, opens every DSSE envelope that it writes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from firmware_sim import Beacon, LogCheckpoint, seal_beacon, seal_log_checkpoint
from firmware_sim.beacon import BEACON_PAYLOAD_TYPE
from firmware_sim.evidence import QUOTE_PAYLOAD_TYPE, Digest, SigningKey, VerifyingKey
from firmware_sim.evidence.pruning import LOG_CHECKPOINT_TYPE
from firmware_sim.identity import read_chain
from inspector.inspection.registry_trust import trust_of
from inspector.registry import (
    ChipRecord,
    ClaimKind,
    ReferenceValues,
    draw_census,
    publish,
    read_view,
    record_census,
    revoke,
    sign,
)
from inspector.registry._values import Capacity
from inspector.registry.signing import payload_type
from monitor.declaration.countersignature import COUNTERSIGNED
from monitor.transcript.manifest import PAYLOAD_TYPE as MANIFEST

_PARTS = {"payload", "payloadType", "signatures"}
STATEMENTS = {
    "enrolment": [Capacity.REGISTRAR], "genesis": [Capacity.MAKER], "transfer": [Capacity.RELEASE, Capacity.ACCEPTANCE],
    "claim": [Capacity.HOLDER, Capacity.WITNESS], "census-draw": [Capacity.INSPECTOR],
    "census-result": [Capacity.INSPECTOR], "reference-values": [Capacity.MAKER], "revocation": [Capacity.REGISTRAR],
    "publication": [Capacity.REGISTRAR],
}  # fmt: skip


def envelopes(value: Any) -> Iterator[dict[str, Any]]:
    """Every DSSE envelope in a document, also within the text of a field."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except ValueError:
            return
        if isinstance(value, dict | list):
            yield from envelopes(value)
    elif isinstance(value, dict) and set(value) == _PARTS:
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from envelopes(each)


def in_files(*places: Path) -> list[dict[str, Any]]:
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()]
    return [found for file in files for found in envelopes(file.read_bytes())]


def foreign(key: VerifyingKey) -> SSlibKey:
    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(key.raw), keyid=key.key_id)


def kinds_opened(found: list[dict[str, Any]], keys: Mapping[str, VerifyingKey]) -> set[str]:
    """Open each envelope under the key that it names, and under no other; then an altered one."""
    other = SigningKey.generate(bytes(32)).verifying
    for envelope in found:
        [signature] = envelope["signatures"]
        key = keys[signature["keyid"]]
        opened = Envelope.from_dict(json.loads(json.dumps(envelope)))
        assert set(opened.verify([foreign(key)], 1)) == {key.key_id}
        assert isinstance(json.loads(opened.payload), dict)
        imitator = SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(other.raw), keyid=key.key_id)
        for payload, kind, by in (
            (opened.payload, opened.payload_type, imitator),
            (opened.payload + b" ", opened.payload_type, foreign(key)),
            (opened.payload, opened.payload_type + "x", foreign(key)),
        ):
            with pytest.raises(VerificationError):
                Envelope(payload, kind, opened.signatures).verify([by], 1)
    return {envelope["payloadType"] for envelope in found}


def test_run_folder_and_trust_file(honest):
    keys = [*honest.trust.labs.values(), *honest.trust.inspectorates]
    keys += [read_chain(file.read_bytes()).alias_key for file in honest.run.glob("chips/*/chain.pem")]
    found = in_files(honest.run, honest.run.with_name("run.trust.json"))
    assert kinds_opened(found, {key.key_id: key for key in keys}) == {MANIFEST, QUOTE_PAYLOAD_TYPE, COUNTERSIGNED}
    assert len(found) >= 5


def test_what_a_verifier_signs_for_a_chip():
    key = SigningKey.generate()
    signed = (
        seal_beacon(Beacon(chip_id="chip-1", boot=1, size=3, time=2), key),
        seal_log_checkpoint("chip-1", LogCheckpoint(size=1), key),
    )
    found = [envelope for each in signed for envelope in envelopes(each)]
    assert kinds_opened(found, {key.verifying.key_id: key.verifying}) == {BEACON_PAYLOAD_TYPE, LOG_CHECKPOINT_TYPE}


def test_registry_and_what_it_gives_out(sqlite_world, tmp_path):
    world, chips = sqlite_world, ["c-0", "c-1", "c-2"]
    registry, keys = world.registry, world.keys
    records = [ChipRecord(chip, "H100", f"sha256:{number:064x}") for number, chip in enumerate(chips)]
    registry.import_chips(records, maker="fab", label="certified", key=keys["fab"])
    world.pass_on(*chips)
    owner = {"holder": "lab-a", "key": keys["lab-a"]}
    registry.claim(ClaimKind.LOST, chips[:1], **owner)
    registry.claim(ClaimKind.FOUND, chips[:1], **owner, witness="agency", witness_key=keys["agency"])
    inspector = {"inspector": "agency", "key": keys["agency"]}
    census = draw_census(registry, count=2, seed=bytes(32), **inspector)
    record_census(registry, census.number, {chip: chip for chip in census.chips}, **inspector)
    values = ReferenceValues(
        registry=registry.origin,
        maker="fab",
        ca_digests=(Digest("sha256", bytes(32)),),
        measurements=(Digest("sha256", bytes(32)),),
        minimum_security_version=1,
        snapshot_rate=Fraction(1, 4),
        snapshot_algorithm="sha256-tree/1048576",
        time=world.now,
    )
    signed = sign(values, keys["fab"])
    registry.submit(signed)
    revoke(registry, chips[-1:], reason="opened")
    publish(registry)
    with closing(sqlite3.connect(world.where)) as database:
        entries = [entry for (entry,) in database.execute("SELECT entry FROM events")]
    known = {key.verifying.key_id: key.verifying for key in keys.values()}
    expected = {payload_type(kind, capacity) for kind, all_ in STATEMENTS.items() for capacity in all_}
    assert kinds_opened([found for entry in entries for found in envelopes(entry)], known) == expected
    view = read_view(registry, registrar=keys["registrar"].verifying)
    trust = trust_of(
        view, registrar=keys["registrar"].verifying, labs=["lab-a"], verifier="agency", nonce=bytes(32)
    ).to_json()
    assert kinds_opened(list(envelopes(trust)), known) == {payload_type("publication", Capacity.REGISTRAR)}
    (tmp_path / "signed.json").write_bytes(signed.to_bytes())
    assert len(in_files(tmp_path / "signed.json")) == 1
