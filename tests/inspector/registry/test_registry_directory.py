"""Who may move a chip, when, and what an attempt to cheat leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, canonical, seal
from inspector.registry import (
    ChipRef,
    ChipState,
    Claim,
    ClaimKind,
    Enrolment,
    ForgedStatement,
    Genesis,
    InvalidStatement,
    Registry,
    RegistryMisuse,
    Role,
    SignedStatement,
    StatementOutOfOrder,
    StatementRefused,
    StatementReplayed,
    Transfer,
    UnknownChip,
    UnknownParty,
    audit,
    countersign,
    show_chip,
    sign,
    summarise,
)
from inspector.registry._schema import events, heads
from inspector.registry._values import Capacity
from inspector.registry.signing import payload_type

CHIP = "chip-0003"


def transfer_of(world, *chips: str, sender: str = "fab", receiver: str = "lab-a", **changes: object) -> Transfer:
    statement = Transfer(
        registry=world.registry.origin,
        chips=world.registry.refs(chips or (CHIP,)),
        sender=sender,
        receiver=receiver,
        time=world.now,
    )
    return replace(statement, **changes)  # type: ignore[arg-type]


def claim_of(world, kind: ClaimKind, *chips: str, holder: str = "fab", **changes: object) -> Claim:
    statement = Claim(
        registry=world.registry.origin,
        chips=world.registry.refs(chips or (CHIP,)),
        claim=kind,
        holder=holder,
        witness="" if kind is ClaimKind.LOST else "agency",
        reason="",
        time=world.now,
    )
    return replace(statement, **changes)  # type: ignore[arg-type]


def refused(world, signed: SignedStatement, error: type[StatementRefused], *words: str) -> None:
    """The statement is refused with exactly this error, names its words, and leaves log and owner table alone."""
    before = (world.registry.head(), summarise(world.registry))
    with pytest.raises(error) as caught:
        world.registry.submit(signed)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (world.registry.head(), summarise(world.registry)) == before


def test_life_of_a_chip(world) -> None:
    world.pass_on(CHIP)
    world.now += 10
    world.pass_on(CHIP, sender="lab-a", receiver="lab-b")
    world.registry.claim(ClaimKind.LOST, [CHIP], holder="lab-b", key=world.keys["lab-b"], reason="truck stolen")
    witnessed = {
        "holder": "lab-b",
        "key": world.keys["lab-b"],
        "witness": "agency",
        "witness_key": world.keys["agency"],
    }
    world.registry.claim(ClaimKind.FOUND, [CHIP], **witnessed)
    world.registry.claim(ClaimKind.DESTROYED, [CHIP], **witnessed)
    view = show_chip(world.registry, CHIP)
    assert (view.holder, view.state, view.sequence) == ("lab-b", ChipState.DESTROYED, 5)
    assert [(line.sequence, line.kind, line.holder, line.state) for line in view.history] == [
        (0, "genesis", "fab", ChipState.FABRICATED),
        (1, "transfer", "lab-a", ChipState.OWNED),
        (2, "transfer", "lab-b", ChipState.OWNED),
        (3, "claim", "lab-b", ChipState.LOST),
        (4, "claim", "lab-b", ChipState.OWNED),
        (5, "claim", "lab-b", ChipState.DESTROYED),
    ]
    assert audit(world.registry, registrar=world.keys["registrar"].verifying).ok


def test_every_event_has_a_signed_head(world) -> None:
    world.pass_on(CHIP)
    with world.registry.reader() as connection:
        logged = connection.execute(select(func.count()).select_from(events)).scalar_one()
        assert connection.execute(select(func.count()).select_from(heads)).scalar_one() == logged
    head, _ = world.registry.head()
    assert (head.size, head.origin) == (logged, "chipwitness-registry/test")


def test_replayed_transfer(world) -> None:
    signed = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    world.registry.submit(signed)
    world.pass_on(CHIP, sender="lab-a", receiver="fab")
    refused(world, signed, StatementReplayed, CHIP, "which the log already has", "record 1", "next record is 3")


def test_transfer_out_of_order(world) -> None:
    ahead = transfer_of(world)
    ahead = replace(ahead, chips=(replace(ahead.chips[0], sequence=2),))
    refused(
        world,
        sign(ahead, world.keys["fab"], world.keys["lab-a"]),
        StatementOutOfOrder,
        CHIP,
        "this statement is for record 2, but record 1 has to come first",
    )


def test_transfer_signed_before_the_last_record(world) -> None:
    world.pass_on(CHIP)
    late = transfer_of(world, sender="lab-a", receiver="lab-b", time=world.now - 1)
    refused(world, sign(late, world.keys["lab-a"], world.keys["lab-b"]), StatementOutOfOrder, CHIP, "last record")


@pytest.mark.parametrize(("offset", "words"), [(301, "which is later than"), (-30 * 86_400 - 1, "30 days")])
def test_transfer_signed_for_another_time(world, offset: int, words: str) -> None:
    world.now += 40 * 86_400
    odd = transfer_of(world, time=world.now + offset)
    refused(world, sign(odd, world.keys["fab"], world.keys["lab-a"]), StatementOutOfOrder, CHIP, words)


def test_times_at_the_edge_pass(world) -> None:
    world.now += 40 * 86_400
    for chip, offset in (("chip-0001", 300), ("chip-0002", -30 * 86_400)):
        statement = transfer_of(world, chip, time=world.now + offset)
        world.registry.submit(sign(statement, world.keys["fab"], world.keys["lab-a"]))


@pytest.mark.parametrize(
    ("release", "acceptance", "words"),
    [
        ("outsider", "lab-a", "release is signed by a key that is not enrolled"),
        ("fab", "outsider", "acceptance is signed by a key that is not enrolled"),
        ("lab-b", "lab-a", "release is signed by lab-b, not by fab"),
        ("fab", "lab-b", "acceptance is signed by lab-b, not by lab-a"),
        ("lab-a", "fab", "release is signed by lab-a, not by fab"),
        ("fab", "fab", "acceptance is signed by fab, not by lab-a"),
        ("registrar", "registrar", "release is signed by registrar, not by fab"),
    ],
)
def test_forged_transfer(world, release: str, acceptance: str, words: str) -> None:
    signed = sign(transfer_of(world), world.keys[release], world.keys[acceptance])
    refused(world, signed, ForgedStatement, CHIP, words)


def test_release_does_not_serve_as_acceptance(world) -> None:
    signed = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    twice = replace(signed, envelopes=(signed.envelopes[0], signed.envelopes[0]))
    refused(world, twice, ForgedStatement, CHIP, "signature of fab as acceptance does not verify")


def test_one_signature_is_not_enough(world) -> None:
    signed = sign(transfer_of(world), world.keys["fab"])
    refused(world, signed, ForgedStatement, CHIP, "1 signatures are given, but 2 are needed")
    refused(world, replace(signed, envelopes=()), ForgedStatement, "no signature")


def test_surplus_signature(world) -> None:
    signed = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    refused(world, replace(signed, envelopes=(*signed.envelopes, signed.envelopes[0])), ForgedStatement, "at most 2")


def test_parties_must_sign_the_same_statement(world) -> None:
    ours = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    other = sign(transfer_of(world, "chip-0004"), world.keys["fab"], world.keys["lab-a"])
    mixed = replace(ours, envelopes=(ours.envelopes[0], other.envelopes[1]))
    refused(world, mixed, ForgedStatement, CHIP, "signed a different statement")


def test_altered_payload(world) -> None:
    signed = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    other = sign(transfer_of(world, receiver="lab-b"), world.keys["fab"], world.keys["lab-b"])
    envelopes = []
    for mine, theirs in zip(signed.envelopes, other.envelopes, strict=True):
        envelope = canonical.decode(mine)
        envelope["payload"] = canonical.decode(theirs)["payload"]
        envelopes.append(canonical.encode(envelope))
    refused(world, replace(signed, envelopes=tuple(envelopes)), ForgedStatement, CHIP, "does not verify")


def test_self_made_transfer(world) -> None:
    with pytest.raises(CallerError, match="chip-0003: fab cannot transfer to itself"):
        transfer_of(world, receiver="fab")
    # Signed by hand around the class's own check.
    honest = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    import base64

    payload = canonical.decode(base64.b64decode(canonical.decode(honest.envelopes[0])["payload"]))
    payload["predicate"]["to"] = "fab"
    envelopes = tuple(
        seal(payload_type("transfer", capacity), payload, world.keys["fab"])
        for capacity in (Capacity.RELEASE, Capacity.ACCEPTANCE)
    )
    refused(world, SignedStatement(kind="transfer", envelopes=envelopes), InvalidStatement, CHIP, "itself")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: payload["predicate"].update(extra=1),
        lambda payload: payload["predicate"].pop("time"),
        lambda payload: payload["predicate"].update(sequences=[1, 1]),
        lambda payload: payload["predicate"].update(sequences=[True]),
        lambda payload: payload["predicate"].update(time=1.5),
        lambda payload: payload["predicate"].update(to=7),
        lambda payload: payload.update(subject=payload["subject"] * 2),
        lambda payload: payload.update(predicateType="https://chipwitness.org/registry/claim/v1"),
    ],
)
def test_malformed_but_signed(sqlite_world, spoil: Callable[[dict[str, object]], object]) -> None:
    import base64

    world = sqlite_world
    honest = sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"])
    payload = canonical.decode(base64.b64decode(canonical.decode(honest.envelopes[0])["payload"]))
    spoil(payload)
    envelopes = tuple(
        seal(payload_type("transfer", capacity), payload, world.keys[party])
        for capacity, party in ((Capacity.RELEASE, "fab"), (Capacity.ACCEPTANCE, "lab-a"))
    )
    before = world.registry.head()
    with pytest.raises(EvidenceError):
        world.registry.submit(SignedStatement(kind="transfer", envelopes=envelopes))
    assert world.registry.head() == before


def test_seller_must_hold_the_chip(world) -> None:
    stolen = transfer_of(world, sender="lab-b", receiver="lab-a")
    refused(world, sign(stolen, world.keys["lab-b"], world.keys["lab-a"]), InvalidStatement, CHIP, "held by fab")


def test_unknown_chip_and_other_genesis_record(world) -> None:
    [ref] = world.registry.refs([CHIP])
    ghost = transfer_of(world, chips=(ChipRef("ghost", ref.digest, 1),))
    refused(world, sign(ghost, world.keys["fab"], world.keys["lab-a"]), UnknownChip, "chip ghost")
    [other] = world.registry.refs(["chip-0004"])
    swapped = transfer_of(world, chips=(replace(ref, digest=other.digest),))
    refused(world, sign(swapped, world.keys["fab"], world.keys["lab-a"]), InvalidStatement, CHIP, "genesis record")
    with pytest.raises(UnknownChip, match="ghost"):
        world.registry.refs([CHIP, "ghost"])


def test_another_registrys_statement(world) -> None:
    foreign = transfer_of(world, registry="chipwitness-registry/elsewhere")
    refused(world, sign(foreign, world.keys["fab"], world.keys["lab-a"]), InvalidStatement, CHIP, "elsewhere")


def test_an_inspector_owns_no_chips(world) -> None:
    statement = transfer_of(world, receiver="agency")
    refused(world, sign(statement, world.keys["fab"], world.keys["agency"]), UnknownParty, "agency", "inspector")
    statement = transfer_of(world, sender="agency", receiver="lab-a")
    refused(world, sign(statement, world.keys["agency"], world.keys["lab-a"]), UnknownParty, "agency", "inspector")


def test_a_lot_moves_whole_or_not_at_all(world) -> None:
    world.pass_on("chip-0005")
    lot = transfer_of(world, "chip-0004", "chip-0005", "chip-0006")
    refused(world, sign(lot, world.keys["fab"], world.keys["lab-a"]), InvalidStatement, "chip-0005", "held by lab-a")
    event = world.pass_on("chip-0004", "chip-0006")
    assert show_chip(world.registry, "chip-0004").history[-1].event == event
    with pytest.raises(CallerError, match="names a chip twice"):
        transfer_of(world, chips=world.registry.refs(["chip-0007"]) * 2)


@pytest.mark.parametrize("kind", [ClaimKind.FOUND, ClaimKind.DESTROYED])
def test_claims_that_need_a_witness(world, kind: ClaimKind) -> None:
    if kind is ClaimKind.FOUND:
        world.registry.claim(ClaimKind.LOST, [CHIP], holder="fab", key=world.keys["fab"])
    statement = claim_of(world, kind)
    refused(
        world, sign(statement, world.keys["fab"]), ForgedStatement, CHIP, "1 signatures are given, but 2 are needed"
    )
    refused(world, sign(statement, world.keys["fab"], world.keys["fab"]), ForgedStatement, CHIP, "not by agency")
    refused(world, sign(statement, world.keys["lab-a"], world.keys["agency"]), ForgedStatement, CHIP, "not by fab")
    friend = replace(statement, witness="lab-b")
    refused(world, sign(friend, world.keys["fab"], world.keys["lab-b"]), UnknownParty, "lab-b", "not as inspector")
    with pytest.raises(CallerError, match="must name a witness"):
        claim_of(world, kind, witness="")
    world.registry.submit(sign(statement, world.keys["fab"], world.keys["agency"]))


def test_a_loss_takes_no_witness(world) -> None:
    with pytest.raises(CallerError, match="must name no witness"):
        claim_of(world, ClaimKind.LOST, witness="agency")


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (ClaimKind.LOST, "transfer", "recorded as lost, fab must have it found"),
        (ClaimKind.LOST, ClaimKind.LOST, "recorded as lost"),
        (ClaimKind.LOST, ClaimKind.DESTROYED, "recorded as lost"),
        (ClaimKind.DESTROYED, "transfer", "recorded as destroyed, which is final"),
        (ClaimKind.DESTROYED, ClaimKind.LOST, "recorded as destroyed"),
        (ClaimKind.DESTROYED, ClaimKind.FOUND, "recorded as destroyed"),
        (None, ClaimKind.FOUND, "recorded as fabricated, so there is nothing to be found"),
    ],
)
def test_states_that_forbid_a_move(world, first: ClaimKind | None, then: ClaimKind | str, words: str) -> None:
    def signed(kind: ClaimKind) -> SignedStatement:
        statement = claim_of(world, kind)
        keys = [world.keys["fab"], world.keys["agency"]][: len(statement.signatories())]
        return sign(statement, *keys)

    if first is not None:
        world.registry.submit(signed(first))
    if isinstance(then, ClaimKind):
        refused(world, signed(then), InvalidStatement, CHIP, words)
    else:
        refused(world, sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"]), InvalidStatement, CHIP, words)


def test_holder_alone_may_claim(world) -> None:
    foreign = claim_of(world, ClaimKind.LOST, holder="lab-a")
    refused(world, sign(foreign, world.keys["lab-a"]), InvalidStatement, CHIP, "held by fab")


def test_only_moves_are_submitted(world) -> None:
    enrolment = Enrolment(
        registry=world.registry.origin,
        party="shell",
        role=Role.OWNER,
        key=world.keys["outsider"].verifying,
        time=world.now,
    )
    refused(world, sign(enrolment, world.keys["registrar"]), InvalidStatement, "cannot be submitted")
    refused(world, sign(enrolment, world.keys["lab-a"]), ForgedStatement, "signed by lab-a, not by registrar")
    refused(world, SignedStatement(kind="gift", envelopes=(b"{}",)), InvalidStatement, "unknown kind")


def test_enrolment(world) -> None:
    fresh = SigningKey.generate(b"f" * 32).verifying
    with pytest.raises(InvalidStatement, match="lab-a is enrolled already"):
        world.registry.enrol("lab-a", Role.OWNER, fresh)
    with pytest.raises(InvalidStatement, match="lab-c: this key already belongs to lab-a"):
        world.registry.enrol("lab-c", Role.OWNER, world.keys["lab-a"].verifying)
    with pytest.raises(InvalidStatement, match="one registrar"):
        world.registry.enrol("lab-c", Role.REGISTRAR, fresh)
    with pytest.raises(CallerError, match="party 'lab c'"):
        world.registry.enrol("lab c", Role.OWNER, fresh)


def test_statement_in_two_hands(world) -> None:
    half = sign(transfer_of(world), world.keys["fab"])
    arrived = SignedStatement.from_bytes(half.to_bytes())
    whole = countersign(arrived, world.keys["lab-a"])
    with pytest.raises(InvalidStatement, match="all its signatures"):
        countersign(whole, world.keys["lab-a"])
    world.registry.submit(whole)
    assert show_chip(world.registry, CHIP).holder == "lab-a"
    for garbage in (
        b'{"kind":"transfer"}',
        b"[]",
        b'{"envelopes":7,"kind":"transfer"}',
        b'{"envelopes":[7],"kind":"x"}',
    ):
        with pytest.raises(InvalidStatement, match="not a signed registry statement"):
            SignedStatement.from_bytes(garbage)
    for nothing in (replace(half, kind="gift"), replace(half, envelopes=())):
        with pytest.raises(InvalidStatement, match="unknown or unsigned"):
            countersign(nothing, world.keys["lab-a"])
    for envelope in (b"{}", b"[]", b'{"signatures":[]}', b'{"signatures":[{"keyid":7}]}'):
        refused(world, replace(half, envelopes=(envelope,)), InvalidStatement, "not a DSSE envelope")


def test_clock_that_runs_back_does_not_reorder_the_log(world) -> None:
    world.now += 1000
    world.pass_on("chip-0001")
    world.now -= 200
    world.pass_on("chip-0002")
    with world.registry.reader() as connection:
        received = connection.execute(select(events.c.received).order_by(events.c.event)).scalars().all()
    assert received == sorted(received)


def test_reopened(world) -> None:
    world.pass_on(CHIP)
    with Registry.open(world.where) as reader:
        assert show_chip(reader, CHIP).holder == "lab-a"
        assert reader.head() == world.registry.head()
        with pytest.raises(RegistryMisuse, match="opened for reading"):
            reader.enrol("lab-c", Role.OWNER, world.keys["outsider"].verifying)
    with pytest.raises(RegistryMisuse, match="belongs to registrar"):
        Registry.open(world.where, registrar=world.keys["lab-a"])
    with pytest.raises(RegistryMisuse, match=r"exists already|has a table .* already"):
        Registry.create(world.where, name="again", registrar=world.keys["registrar"])


def test_places_that_are_no_registry(tmp_path: Path) -> None:
    key = SigningKey.generate(bytes(32))
    with pytest.raises(RegistryMisuse, match="no such registry"):
        Registry.open(tmp_path / "none.db")
    with pytest.raises(RegistryMisuse, match="folder does not exist"):
        Registry.create(tmp_path / "none" / "x.db", name="x", registrar=key)
    with pytest.raises(RegistryMisuse, match="not mysql"):
        Registry.open("mysql://host/x")
    with pytest.raises(RegistryMisuse, match="malformed"):
        Registry.open("://")
    with pytest.raises(CallerError, match="registry name"):
        Registry.create(tmp_path / "x.db", name="two words", registrar=key)
    import sqlite3

    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(RegistryMisuse, match="is not a registry"):
        Registry.open(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes()[18:20] == bytes([1, 1])  # Looked at, not switched to another journal.
    with pytest.raises(RegistryMisuse, match="exists already"):
        Registry.create(tmp_path / "other.db", name="x", registrar=key)
    (tmp_path / "text.db").write_text("not a database, but longer than a hundred bytes " * 5)
    with pytest.raises(Exception, match="file is not a database") as caught:
        Registry.open(tmp_path / "text.db")
    assert "\n" not in str(caught.value)


def test_password_stays_out_of_errors() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(Exception) as caught:
        Registry.open("postgresql://user:s3cret@127.0.0.1:1/none")
    assert "s3cret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_private_keys_stay_out_of_the_database(tmp_path: Path, sqlite_world) -> None:
    world = sqlite_world
    world.pass_on(CHIP)
    world.registry.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("registry.db*"))
    assert world.keys["registrar"].verifying.raw.hex().encode() in stored
    for key in world.keys.values():
        assert key.private_bytes() not in stored
        assert key.private_bytes().hex().encode() not in stored


def test_genesis_is_the_makers_alone(world) -> None:
    from inspector.registry import ChipRecord

    records = [ChipRecord("new-1"), ChipRecord("new-2")]
    with pytest.raises(ForgedStatement, match=r"signed by rival-fab, not by fab"):
        world.registry.import_chips(records, maker="fab", label="b", key=world.keys["rival-fab"])
    with pytest.raises(UnknownParty, match="lab-a is enrolled as owner, not as maker"):
        world.registry.import_chips(records, maker="lab-a", label="b", key=world.keys["lab-a"])
    honest = Genesis(registry=world.registry.origin, maker="fab", label="b", count=2, root=bytes(32), time=world.now)
    with pytest.raises(InvalidStatement, match="not the 2 chips that were signed for"):
        world.registry.import_signed(sign(honest, world.keys["fab"]), records)
    with pytest.raises(InvalidStatement, match="cannot bring chips"):
        world.registry.import_signed(sign(transfer_of(world), world.keys["fab"], world.keys["lab-a"]), records)
    assert summarise(world.registry).chips == 20
