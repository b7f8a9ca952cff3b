"""Published views: what inspectors are shown is what the log implies, or nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, canonical, verify_inclusion
from inspector.inspection.registry_trust import trust_of
from inspector.registry import (
    ChipRecord,
    ChipState,
    ClaimKind,
    ForgedStatement,
    InvalidStatement,
    Listing,
    ReferenceValues,
    Registry,
    RegistryMisuse,
    Role,
    UnknownChip,
    UnknownParty,
    audit,
    draw_census,
    list_now,
    prove_chip,
    publish,
    read_view,
    record_census,
    revoke,
    show_chip,
    sign,
    verify_chip,
)
from inspector.registry.listing import chip_entry
from inspector.registry.registry_view import RegisteredChips
from tests.guards import off

NONCE = bytes(range(32))
CERTIFICATES = {f"c-{number}": f"sha256:{number:064x}" for number in range(4)}


def values(world, maker: str = "fab", **changes) -> ReferenceValues:
    given = {
        "registry": world.registry.origin,
        "maker": maker,
        "ca_digests": (Digest("sha256", bytes(32)),),
        "measurements": (Digest("sha256", bytes([1]) * 32),),
        "minimum_security_version": 1,
        "snapshot_rate": Fraction(1, 4),
        "snapshot_algorithm": "sha256-tree/1048576",
        "time": world.now,
    }
    return ReferenceValues(**{**given, **changes})


def stock(world) -> None:
    """Chips c-0 to c-3 with certificates, in the hands of lab-a; the maker's reference values."""
    records = [ChipRecord(chip, "H100", identity) for chip, identity in CERTIFICATES.items()]
    world.registry.import_chips(records, maker="fab", label="certified", key=world.keys["fab"])
    world.pass_on(*CERTIFICATES)
    world.registry.submit(sign(values(world), world.keys["fab"]))


def registrar(world):
    return world.keys["registrar"].verifying


def view_of(world, **changes):
    return read_view(world.registry, registrar=registrar(world), **changes)


def trust(world, labs=("lab-a",)):
    return trust_of(view_of(world), registrar=registrar(world), labs=labs, verifier="agency", nonce=NONCE)


def test_a_view_says_what_the_log_implies(world) -> None:
    stock(world)
    receipt, published = publish(world.registry)
    view = view_of(world)
    assert view.publication == published
    assert published.size == receipt.event
    assert view.listing.root == list_now(world.registry).root == published.map_root
    assert published.entries == len(world.chips) + 4 + 7 + 1  # chips, parties with the registrar, reference values
    assert view.later == 0
    with pytest.raises(InvalidStatement, match="chip c-1: its records must be distinguished from those of its next"):
        world.pass_on("c-1", sender="lab-a", receiver="lab-b")
    with off("positions of transfers"):
        world.pass_on("c-1", sender="lab-a", receiver="lab-b")
    later = view_of(world)
    assert (later.publication, later.later) == (published, 1)
    assert later.listing.chip("c-1")["holder"] == "lab-a"
    assert audit(world.registry, registrar=registrar(world)).ok


def test_the_trust_file_is_what_the_view_says(world) -> None:
    stock(world)
    world.registry.claim(ClaimKind.LOST, ["c-3"], holder="lab-a", key=world.keys["lab-a"])
    publish(world.registry)
    made = trust(world)
    assert made.chips == {"c-0": "lab-a", "c-1": "lab-a", "c-2": "lab-a"}
    assert made.labs == {"lab-a": world.keys["lab-a"].verifying}
    assert (made.verifier, made.nonce) == ("agency", NONCE)
    assert made.chip_trust.snapshot_rate == Fraction(1, 4)
    assert made.registry.publication == view_of(world).publication
    for chip, certificate in CERTIFICATES.items():
        made.registry.check_certificate(chip, Digest.parse(certificate))
        with pytest.raises(
            EvidenceError, match=rf"chip {chip}: presents the certificate .*{'ab' * 32}, but the registered one is"
        ):
            made.registry.check_certificate(chip, Digest("sha256", b"\xab" * 32))
    with pytest.raises(EvidenceError, match="chip c-3: the registry records it as lost"):
        made.registry.check_listed("c-3", "lab-a")
    with pytest.raises(
        EvidenceError, match="chip c-0: according to the registry lab-a holds it, but the trust file gives it to lab-b"
    ):
        made.registry.check_listed("c-0", "lab-b")
    assert type(made).from_json(made.to_json(), "here") == made


def test_a_revoked_chip_stays_where_it_is_and_counts_no_more(world) -> None:
    stock(world)
    revoke(world.registry, ["c-2", "c-0"], reason="secrets are out")
    with pytest.raises(InvalidStatement, match="chip c-2 is revoked already"):
        revoke(world.registry, ["c-1", "c-2"], reason="again")
    with pytest.raises(UnknownChip):
        revoke(world.registry, ["nobody"], reason="x")
    with pytest.raises(CallerError, match="needs a reason"):
        revoke(world.registry, ["c-1"], reason="")
    shown = show_chip(world.registry, "c-2")
    assert (shown.revoked, shown.holder, shown.state) == (True, "lab-a", ChipState.OWNED)
    assert shown.history[-1].kind == "revocation"
    assert not show_chip(world.registry, "c-1").revoked
    world.pass_on("c-2", sender="lab-a", receiver="lab-b")
    proof = prove_chip(world.registry, "c-2")
    statements = verify_chip(proof, origin=world.registry.origin, registrar=registrar(world))
    assert [statement.kind for statement in statements] == ["genesis", "transfer", "revocation", "transfer"]
    publish(world.registry)
    assert trust(world).chips == {"c-1": "lab-a", "c-3": "lab-a"}
    with pytest.raises(EvidenceError, match="chip c-0: the registry has revoked its certificate"):
        trust(world).registry.check_listed("c-0", "lab-a")
    with pytest.raises(CallerError, match="the registry gives no chip to lab-b"):
        trust(world, ["lab-b"])
    assert audit(world.registry, registrar=registrar(world)).ok


def test_a_revocation_after_the_view_asks_for_another_view(world) -> None:
    stock(world)
    publish(world.registry)
    assert len(trust(world).chips) == 4
    revoke(world.registry, ["c-1"], reason="secrets are out")
    with pytest.raises(CallerError, match="chip c-1 was revoked after the newest view was published"):
        trust(world)
    publish(world.registry)
    assert len(trust(world).chips) == 3


def test_only_a_maker_gives_reference_values_and_the_last_count(world) -> None:
    stock(world)
    with pytest.raises(ForgedStatement):
        world.registry.submit(sign(values(world, "rival-fab"), world.keys["fab"]))
    with pytest.raises(UnknownParty, match="lab-a is enrolled as owner"):
        world.registry.submit(sign(values(world, "lab-a"), world.keys["lab-a"]))
    world.registry.submit(sign(values(world, minimum_security_version=7), world.keys["fab"]))
    publish(world.registry)
    assert trust(world).chip_trust.minimum_security_version == 7
    for change in ({"ca_digests": ()}, {"measurements": ()}, {"snapshot_rate": Fraction(0)}):
        with pytest.raises(CallerError):
            values(world, **change)


def test_what_is_missing_is_named(world) -> None:
    with pytest.raises(RegistryMisuse, match="not published a view yet"):
        view_of(world)
    publish(world.registry)
    with pytest.raises(CallerError, match="no owner has a chip"):
        trust(world, [])
    with pytest.raises(CallerError, match="fab is not enrolled as an owner"):
        trust(world, ["fab"])
    world.pass_on("chip-0001")
    publish(world.registry)
    with pytest.raises(CallerError, match="fab has not published reference values"):
        trust(world, [])
    world.registry.submit(sign(values(world), world.keys["fab"]))
    publish(world.registry)
    with pytest.raises(CallerError, match="chip chip-0001 is registered without a certificate"):
        trust(world, [])


def test_who_reads_brings_the_key_and_what_was_seen_before(world) -> None:
    publish(world.registry)
    with pytest.raises(EvidenceError):
        read_view(world.registry, registrar=world.keys["outsider"].verifying)
    _, seen = world.registry.head()
    assert view_of(world, known_head=seen).later == 0
    other = world.registry.head()[0].__class__(world.registry.origin, 3, bytes(32)).sign(world.keys["registrar"])
    with pytest.raises(EvidenceError, match="does not extend the head of 3 events"):
        view_of(world, known_head=other)
    with Registry.open(world.where) as reading, pytest.raises(RegistryMisuse, match="opened for reading"):
        publish(reading)


def test_a_view_of_altered_tables_is_found_by_audit_and_by_its_readers(sqlite_world) -> None:
    """A registrar's database that gives a chip to another lab, and publishes that."""
    stock(sqlite_world)
    with closing(sqlite3.connect(sqlite_world.where)) as connection, connection:
        connection.execute(
            "UPDATE holdings SET holder = (SELECT party FROM parties WHERE name = 'lab-b') WHERE ordinal = 21"
        )
    publish(sqlite_world.registry)
    with pytest.raises(EvidenceError, match="the published list is not the one that follows from the registry's log"):
        view_of(sqlite_world)
    findings = audit(sqlite_world.registry, registrar=registrar(sqlite_world)).findings
    assert any("the published list is not the one that follows" in finding for finding in findings)


def test_of_a_chip_and_its_clone_a_census_counts_one(world) -> None:
    stock(world)
    shown = list(CERTIFICATES)
    census = draw_census(
        world.registry, count=4, seed=bytes(32), inspector="agency", key=world.keys["agency"], owner="lab-a"
    )
    assert sorted(census.chips) == shown
    presented = {**CERTIFICATES, "c-3": CERTIFICATES["c-1"]}
    outcome = record_census(
        world.registry,
        census.number,
        {chip: chip for chip in shown},
        inspector="agency",
        key=world.keys["agency"],
        identities=presented,
    )
    assert [(gone.chip, gone.observed, gone.holder) for gone in outcome.missing] == [("c-3", "c-1", "lab-a")]
    assert outcome.present == 3
    assert audit(world.registry, registrar=registrar(world)).ok


NAMES = st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(numbers=NAMES, pick=st.integers(0), altered=st.sampled_from(["holder", "identity", "sequence", "revoked"]))
def test_each_entry_is_proven_and_no_other(numbers: list[int], pick: int, altered: str) -> None:
    listing = Listing(
        chip_entry(
            ChipRecord(f"c-{number}", "", f"sha256:{number:064x}"),
            maker="fab",
            holder="lab",
            state=ChipState.OWNED,
            sequence=1,
            revoked=False,
        )
        for number in numbers
    )
    proven = listing.chips_of(["lab"])
    assert set(proven) == {f"c-{number}" for number in numbers}
    one = proven[f"c-{numbers[pick % len(numbers)]}"]
    shared: dict[str, Any] = {"index": one.index, "size": len(listing), "proof": one.path, "root": listing.root}
    verify_inclusion(leaf=canonical.encode(one.entry), **shared)
    other = {"holder": "lab-b", "identity": "sha256:" + "ff" * 32, "sequence": 2, "revoked": True}[altered]
    with pytest.raises(EvidenceError):
        verify_inclusion(leaf=canonical.encode({**one.entry, altered: other}), **shared)


def test_a_view_of_another_registry_is_none(world) -> None:
    publish(world.registry)
    view = view_of(world)
    with pytest.raises(EvidenceError, match="not a published view of chipwitness-registry/other"):
        RegisteredChips.open(view.signed, {}, key=registrar(world), origin="chipwitness-registry/other")
    enrolment = world.registry.enrol("new", Role.OWNER, world.keys["outsider"].verifying)
    assert enrolment.event > 0
