"""A statement that cannot mean anything cannot be built."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, canonical, digest_bytes, seal, statement
from inspector.registry import (
    CensusDraw,
    CensusResult,
    ChipProof,
    ChipRecord,
    ChipRef,
    ChipState,
    Claim,
    ClaimKind,
    Genesis,
    InvalidStatement,
    MissingChip,
    Publication,
    ReferenceValues,
    Registry,
    RegistryMisuse,
    Revocation,
    Role,
    Transfer,
    UnknownChip,
    audit,
    draw_census,
    load_private,
    load_public,
    prove_chip,
    record_census,
    show_chip,
    sign,
    write_keys,
)
from inspector.registry._database import database_url
from inspector.registry._log import Frontier, LogEntry
from inspector.registry._values import Capacity
from inspector.registry.signing import SignedStatement, Statement, countersign, decode_statement, payload_type
from inspector.registry.statements import Enrolment, Position
from tests.documents import changed, places

DIGEST = digest_bytes("test", b"")
REF = ChipRef("c", DIGEST, 1)
TRANSFER = Transfer(registry="r", chips=(REF,), sender="a", receiver="b", time=0)
CLAIM = Claim(registry="r", chips=(REF,), claim=ClaimKind.LOST, holder="a", witness="", reason="", time=0)
GENESIS = Genesis(registry="r", maker="m", label="l", count=1, root=bytes(32), time=0)
DRAW = CensusDraw(
    registry="r",
    census=1,
    inspector="i",
    owner="",
    seed=bytes(32),
    size=1,
    root=bytes(32),
    population=5,
    count=5,
    drawn=DIGEST,
    time=0,
)
MISSING = MissingChip(chip="c", holder="a", observed="", sequence=0)
RESULT = CensusResult(
    registry="r",
    census=1,
    inspector="i",
    drawn=DIGEST,
    present=0,
    retired=(),
    resurfaced=(),
    missing=(MISSING,),
    time=0,
)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ChipRef("c d", DIGEST, 1), "chip id"),
        (lambda: ChipRef("c", DIGEST, 0), "sequence number 0"),
        (lambda: ChipRef("c", DIGEST, 2**31), "sequence number"),
        (lambda: ChipRef("c", DIGEST, True), "sequence number True"),
        (lambda: replace(TRANSFER, chips=()), "can cover 1 to 10000 chips, not 0"),
        (lambda: replace(TRANSFER, chips=tuple(ChipRef(f"c{n}", DIGEST, 1) for n in range(10_001))), "not 10001"),
        (lambda: replace(TRANSFER, time=-1), "time -1"),
        (lambda: replace(TRANSFER, time=0.5), "time 0.5"),  # type: ignore[arg-type]
        (lambda: replace(TRANSFER, time=True), "time True"),
        (lambda: replace(TRANSFER, sender="two words"), "sender 'two words'"),
        (lambda: replace(TRANSFER, receiver="x" * 65), "receiver"),
        (lambda: replace(CLAIM, reason="x" * 501), "500 printable"),
        (lambda: replace(CLAIM, reason="line\nbreak"), "500 printable"),
        (lambda: replace(CLAIM, holder=""), "holder"),
        (lambda: replace(CLAIM, claim=ClaimKind.FOUND, witness="-"), "witness"),
        (lambda: replace(GENESIS, count=0), "at least one chip"),
        (lambda: replace(GENESIS, count=2**62), "fewer than 2"),
        (lambda: replace(GENESIS, root=b""), "root of 32 bytes"),
        (lambda: replace(GENESIS, label="a b"), "batch label"),
        (lambda: replace(DRAW, seed=b""), "seed of 32 bytes"),
        (lambda: replace(DRAW, root=b""), "root of 32 bytes"),
        (lambda: replace(DRAW, census=0), "census number 0"),
        (lambda: replace(DRAW, count=0), "census count 0"),
        (lambda: replace(DRAW, size=0), "census log size 0"),
        (lambda: replace(DRAW, count=True), "census count True"),
        (lambda: replace(DRAW, population=4), "5 chips from a population of 4"),
        (lambda: replace(DRAW, population=5.0), "census population 5.0"),  # type: ignore[arg-type]
        (lambda: replace(DRAW, owner="a b"), "owner"),
        (lambda: replace(MISSING, sequence=-1), "sequence number -1"),
        (lambda: replace(MISSING, sequence=2**31), "sequence number"),
        (lambda: replace(MISSING, observed="a b"), "observed serial"),
        (lambda: replace(RESULT, missing=(MISSING, MISSING)), "names a chip twice"),
        (lambda: replace(RESULT, retired=("c",)), "names a chip twice"),
        (lambda: replace(RESULT, resurfaced=("d e",)), "chip id"),
        (lambda: replace(RESULT, present=-1), "count of the chips that are present"),
        (lambda: replace(RESULT, present=True), "count of the chips that are present"),
        (lambda: replace(RESULT, census="1"), "needs a number"),  # type: ignore[arg-type]
    ],
)
def test_impossible_statements(build: Callable[[], object], words: str) -> None:
    with pytest.raises(CallerError, match=words):
        build()


POSITION = Position(size=1, head=bytes(32), deposit=DIGEST)
STATEMENTS: list[Statement] = [
    Enrolment(registry="r", party="p", role=Role.MAKER, key=SigningKey.generate(bytes(32)).verifying, time=0),
    GENESIS,
    TRANSFER,
    CLAIM,
    replace(CLAIM, claim=ClaimKind.FOUND, witness="w", positions=(POSITION,)),
    DRAW,
    RESULT,
    ReferenceValues(
        registry="r", maker="m", ca_digests=(DIGEST,), measurements=(DIGEST,), minimum_security_version=0,
        snapshot_rate=Fraction(1), snapshot_algorithm="sha256", time=1,
    ),
    Revocation(registry="r", chips=(REF,), reason="x", time=1, positions=(POSITION,)),
    Publication(registry="r", size=1, root=bytes(32), entries=1, map_root=bytes(32), time=1),
]  # fmt: skip
NOTHING: list[Any] = ["", 0, 0.0, -0.0, False, None, [], {}]
"""What Python takes for nothing, and some of it for equal."""
ODD = [*NOTHING, 1, 1.0, True, 2**62, 2**64, -1, "x", [1], [[]], {"a": 1}]


@pytest.mark.parametrize("given", STATEMENTS, ids=lambda each: type(each).__name__)
def test_a_statement_has_one_encoding(given):
    """Whatever is decoded has the bytes that it came from, and no other's; anything else is refused as invalid."""
    predicate_type = f"https://chipwitness.org/registry/{given.kind}/v1"
    payload = canonical.decode(canonical.encode(statement(predicate_type, given.subjects(), given.predicate())))
    assert decode_statement(given.kind, payload) == given
    known = [(given, canonical.encode(payload))]
    for path in places(payload):
        for value in ODD:
            other = changed(payload, path, value)
            try:
                found = decode_statement(given.kind, other)
            except EvidenceError:
                continue
            again = statement(predicate_type, found.subjects(), found.predicate())
            encoded = canonical.encode(other)
            assert canonical.encode(again) == encoded, (path, value)
            assert not any(each == found and data != encoded for each, data in known), (path, value)
            known.append((found, encoded))


@pytest.mark.parametrize("witness", NOTHING[1:], ids=repr)
@pytest.mark.parametrize("claim", [ClaimKind.FOUND, ClaimKind.DESTROYED])
def test_a57_a_holder_claims_with_a_witness_that_is_nothing(sqlite_world, claim, witness):
    """The holder's signature alone, under a statement whose witness Python takes for none: it changes nothing."""
    world, chip = sqlite_world, "chip-0003"
    world.pass_on(chip)
    if claim is ClaimKind.FOUND:
        world.registry.claim(ClaimKind.LOST, [chip], holder="lab-a", key=world.keys["lab-a"], reason="stolen")
    before = show_chip(world.registry, chip).state
    honest = Claim(
        registry=world.registry.origin, chips=world.registry.refs((chip,)), claim=claim, holder="lab-a",
        witness="agency", reason="", time=world.now,
    )  # fmt: skip
    predicate = {**honest.predicate(), "witness": witness}
    payload = statement("https://chipwitness.org/registry/claim/v1", honest.subjects(), predicate)
    envelope = seal(payload_type("claim", Capacity.HOLDER), payload, world.keys["lab-a"])
    with pytest.raises(InvalidStatement, match="not of type str"):
        world.registry.submit(SignedStatement(kind="claim", envelopes=(envelope,)))
    assert show_chip(world.registry, chip).state is before
    assert audit(world.registry, registrar=world.keys["registrar"].verifying).ok
    world.registry.submit(countersign(sign(honest, world.keys["lab-a"]), world.keys["agency"]))
    assert show_chip(world.registry, chip).state is not before


@pytest.mark.parametrize("count", [2**62, 2**64])
def test_b23_a_batch_of_more_chips_than_a_number_holds(sqlite_world, count):
    world = sqlite_world
    honest = replace(GENESIS, registry=world.registry.origin, maker="fab", time=world.now)
    payload = statement(
        "https://chipwitness.org/registry/genesis/v1", honest.subjects(), {**honest.predicate(), "count": count}
    )
    envelope = seal(payload_type("genesis", Capacity.MAKER), payload, world.keys["fab"])
    with pytest.raises(InvalidStatement, match="at least one chip, fewer than 2"):
        world.registry.submit(SignedStatement(kind="genesis", envelopes=(envelope,)))


def test_leaves_of_different_records_differ() -> None:
    records = [ChipRecord("a", "b"), ChipRecord("ab"), ChipRecord("a", "", "sha256:" + "0" * 64), ChipRecord("a")]
    assert len({record.leaf() for record in records}) == len(records)


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b'{"envelopes":[],"event":0,"kind":"x","received":0,"z":0}',
        b'{"envelopes":[1],"event":0,"kind":"x","received":0}',
        b'{"envelopes":0,"event":0,"kind":"x","received":0}',
        b'{"envelopes":[],"event":true,"kind":"x","received":0}',
        b'{"envelopes":[],"event":0,"kind":1,"received":0}',
        b'{"envelopes":[],"event":0,"kind":"x","received":0} ',
    ],
)
def test_malformed_log_entries(data: bytes) -> None:
    with pytest.raises(EvidenceError):
        LogEntry.from_bytes(data)


def test_frontier_needs_one_hash_for_each_subtree() -> None:
    with pytest.raises(EvidenceError, match="2 subtrees, but 1"):
        Frontier(3, (bytes(32),))


def test_proof_with_an_extra_field() -> None:
    with pytest.raises(EvidenceError, match="extra or altered"):
        ChipProof.from_bytes(b'{"batch_path":[],"entries":[],"head":"","more":0,"position":0,"record":["c","",""]}')


def test_claims_with_the_wrong_number_of_keys(world) -> None:
    fab = {"holder": "fab", "key": world.keys["fab"]}
    with pytest.raises(CallerError, match="needs 2 keys, not 1"):
        world.registry.claim(ClaimKind.DESTROYED, ["chip-0001"], witness="agency", **fab)
    with pytest.raises(CallerError, match="needs 1 keys, not 2"):
        world.registry.claim(ClaimKind.LOST, ["chip-0001"], witness_key=world.keys["agency"], **fab)
    assert show_chip(world.registry, "chip-0001").state is ChipState.FABRICATED
    with pytest.raises(UnknownChip, match="ghost"):
        show_chip(world.registry, "ghost")


def tamper(world, tmp_path: Path, script: str) -> None:
    world.registry.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as database:
        assert database.execute(script).rowcount > 0


def test_a_database_that_lost_a_head(sqlite_world, tmp_path: Path) -> None:
    tamper(sqlite_world, tmp_path, "DELETE FROM heads WHERE size = (SELECT max(size) FROM heads)")
    with pytest.raises(EvidenceError, match="no head of that size"):
        prove_chip(sqlite_world.registry, "chip-0001")


def test_a_truncated_frontier_stops_the_writer(sqlite_world, tmp_path: Path) -> None:
    tamper(sqlite_world, tmp_path, "UPDATE tail SET frontier = substr(frontier, 1, length(frontier) - 1)")
    with pytest.raises(EvidenceError, match="frontier is truncated"):
        sqlite_world.pass_on("chip-0001")


def test_a_census_that_points_elsewhere(sqlite_world, tmp_path: Path) -> None:
    world = sqlite_world
    options = {"inspector": "agency", "key": world.keys["agency"]}
    draw_census(world.registry, count=2, seed=bytes(32), **options)
    tamper(world, tmp_path, "UPDATE censuses SET drawn_event = 1")
    with pytest.raises(EvidenceError, match="event 1 is not the draw of census 1"):
        record_census(world.registry, 1, {}, **options)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("UPDATE properties SET value = '2' WHERE name = 'schema'", "has schema 2, but this program reads schema 1"),
        ("UPDATE properties SET value = 'xx' WHERE name = 'registrar'", "does not name its registrar"),
        ("DELETE FROM properties WHERE name = 'origin'", "does not name its registrar"),
    ],
)
def test_a_database_of_another_kind(sqlite_world, tmp_path: Path, script: str, words: str) -> None:
    tamper(sqlite_world, tmp_path, script)
    with pytest.raises(RegistryMisuse, match=words):
        Registry.open(tmp_path / "registry.db")


def test_database_urls() -> None:
    assert database_url("a/b.db").database == "a/b.db"
    assert database_url("postgresql://h/x").drivername == "postgresql+psycopg"
    for nonsense in ("", "sqlite://", "sqlite:///:memory:", "oracle://h/x"):
        with pytest.raises(RegistryMisuse):
            database_url(nonsense)


def test_key_files(tmp_path: Path, sqlite_world) -> None:
    key = sqlite_world.keys["fab"]
    public = write_keys(tmp_path / "k", key)
    assert load_private(tmp_path / "k").verifying == load_public(public) == key.verifying
    for garbage in ("", "chipwitness-private-key ed25519 00", "chipwitness-private-key ed25519 zz", "é"):
        (tmp_path / "bad").write_text(garbage, encoding="utf-8")
        with pytest.raises(CallerError, match="not a private key file"):
            load_private(tmp_path / "bad")
    with pytest.raises(CallerError, match="not a private key file"):
        load_private(public)
    with pytest.raises(CallerError, match="exists already"):
        write_keys(tmp_path / "k", key)
