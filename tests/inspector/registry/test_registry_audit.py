"""Whatever is changed behind the registry's back, the audit says so; the twin without the change passes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from firmware_sim.evidence import SignedHead, SigningKey
from inspector.registry import (
    Claim,
    ClaimKind,
    Registry,
    Transfer,
    audit,
    draw_census,
    record_census,
    sign,
)
from inspector.registry import directory as directory_module
from inspector.registry._values import ChipState


def busy(world) -> None:
    """A history that fills every table."""
    world.import_chips(["b-1", "b-2", "b-3"], maker="rival-fab", label="second")
    world.pass_on(*world.chips[:6])
    world.now += 60
    world.pass_on("chip-0001", sender="lab-a", receiver="lab-b")
    world.registry.claim(ClaimKind.LOST, ["chip-0002"], holder="lab-a", key=world.keys["lab-a"])
    census = draw_census(world.registry, count=4, seed=bytes(32), inspector="agency", key=world.keys["agency"])
    record_census(
        world.registry,
        1,
        {chip: chip for chip in census.chips[1:]},
        inspector="agency",
        key=world.keys["agency"],
    )


def findings(world, known: bytes | None = None) -> tuple[str, ...]:
    return audit(world.registry, registrar=world.keys["registrar"].verifying, known_head=known).findings


def test_honest_history_is_clean(world) -> None:
    _, early = world.registry.head()
    busy(world)
    report = audit(world.registry, registrar=world.keys["registrar"].verifying, known_head=early)
    assert report.ok
    assert (report.chips, report.root) == (23, world.registry.head()[0].root)


TAMPERINGS = {
    "holder swapped": ("UPDATE holdings SET holder = 4 WHERE ordinal = 3", "owner table"),
    "state swapped": ("UPDATE holdings SET state = 4 WHERE ordinal = 3", "owner table"),
    "sequence set back": ("UPDATE holdings SET sequence = 0 WHERE ordinal = 1", "owner table"),
    "time moved": ("UPDATE holdings SET time = time + 1 WHERE ordinal = 7", "owner table"),
    "chip forgotten": ("DELETE FROM holdings WHERE ordinal = 22", "owner table"),
    "chip renamed": ("UPDATE genesis SET chip = 'renamed' WHERE ordinal = 5", "not those that fab signed for"),
    "model altered": ("UPDATE genesis SET model = 'A100' WHERE ordinal = 22", "not those that rival-fab signed for"),
    "malformed model": ("UPDATE genesis SET model = char(7) WHERE ordinal = 5", "malformed"),
    "genesis removed": ("DELETE FROM genesis WHERE ordinal = 22", "signed for 3"),
    "genesis added": ("INSERT INTO genesis VALUES (23, 'ghost', '', '')", "genesis records"),
    "change removed": ("DELETE FROM changes WHERE ordinal = 1 AND sequence = 2", "changes"),
    "change altered": ("UPDATE changes SET holder_before = 2 WHERE ordinal = 1 AND sequence = 2", "changes"),
    "batch altered": ("UPDATE batches SET time = time - 9", "batches"),
    "event removed from the end": (
        "DELETE FROM events WHERE event = (SELECT max(event) FROM events)",
        "its heads do not have",
    ),
    "event removed from the middle": ("DELETE FROM events WHERE event = 9", "do not match its log entry"),
    "entry altered": ("UPDATE events SET entry = replace(entry, 'transfer', 'transfeR') WHERE event = 9", "event 9"),
    "entry no bytes": ("UPDATE events SET entry = 'x' WHERE event = 9", "not a byte string"),
    "received altered": ("UPDATE events SET received = received + 1 WHERE event = 9", "do not match its log entry"),
    "kind altered": ("UPDATE events SET kind = 'claim' WHERE event = 9", "do not match its log entry"),
    "head removed": ("DELETE FROM heads WHERE size = 4", "its heads do not have exactly the sizes"),
    "head added": (
        "INSERT INTO heads SELECT 99, head FROM heads WHERE size = 4",
        "its heads do not have exactly the sizes",
    ),
    "head swapped": (
        "UPDATE heads SET head = (SELECT head FROM heads WHERE size = 4) WHERE size = 5",
        "signed head of size 5",
    ),
    "head corrupted": ("UPDATE heads SET head = x'00' WHERE size = 5", "signed head of size 5"),
    "tail altered": ("UPDATE tail SET size = size + 1", "tail"),
    "frontier altered": ("UPDATE tail SET frontier = zeroblob(length(frontier))", "tail"),
    "tail removed": ("DELETE FROM tail", "tail"),
    "party's key swapped": (
        "UPDATE parties SET key = (SELECT key FROM parties WHERE party = 1) WHERE party = 3",
        "parties",
    ),
    "party promoted": ("UPDATE parties SET role = 'inspector' WHERE name = 'lab-a'", "parties"),
    "party added": (
        "INSERT INTO parties SELECT 9, 'shell', role, 'k', key, event FROM parties WHERE party = 3",
        "parties",
    ),
    "census draw swapped": ("UPDATE census_draws SET ordinal = 22 WHERE rank = 0", "census draws"),
    "census result removed": ("UPDATE censuses SET result_event = NULL", "censuses"),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_tampering(sqlite_world, tmp_path: Path, tampering: str) -> None:
    world = sqlite_world
    busy(world)
    assert findings(world) == ()
    world.registry.engine.dispose()
    script, words = TAMPERINGS[tampering]
    with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as database:
        database.execute("PRAGMA foreign_keys = OFF")
        assert database.execute(script).rowcount > 0
    found = findings(world)
    assert any(words in finding for finding in found), found
    assert all("\n" not in finding for finding in found)


def test_findings_are_bounded(sqlite_world, tmp_path: Path) -> None:
    for number in range(60):
        sqlite_world.pass_on(
            "chip-0001", sender="lab-a" if number % 2 else "fab", receiver="fab" if number % 2 else "lab-a"
        )
    sqlite_world.registry.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as database:
        database.execute("UPDATE heads SET head = x'00'")
    assert len(findings(sqlite_world)) == 50


def test_empty_log(sqlite_world, tmp_path: Path) -> None:
    sqlite_world.registry.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as database:
        for table in ("events", "heads", "genesis", "holdings", "parties", "batches"):
            database.execute(f"DELETE FROM {table}")
        database.execute("UPDATE tail SET size = 0, frontier = x''")
    assert any("the log is empty" in finding for finding in findings(sqlite_world))


def test_another_registrars_key(world) -> None:
    """The database names its registrar; the audit does not ask it."""
    report = audit(world.registry, registrar=world.keys["outsider"].verifying)
    assert any("event 0" in finding for finding in report.findings)
    assert any("signed head of size 1" in finding for finding in report.findings)


def rewritten(world, where: str, chips: int) -> Registry:
    """A dishonest registrar's second history under the same name and key."""
    registry = Registry.create(where, name="test", registrar=world.keys["registrar"], clock=world.clock)
    for party in ("fab", "lab-a"):
        from inspector.registry import Role

        role = Role.MAKER if party == "fab" else Role.OWNER
        registry.enrol(party, role, world.keys[party].verifying)
    return registry


def test_a_registrar_who_rewrites_is_caught_by_an_earlier_head(sqlite_world, tmp_path: Path) -> None:
    world = sqlite_world
    busy(world)
    _, known = world.registry.head()
    second = rewritten(world, str(tmp_path / "second.db"), 3)
    registrar = world.keys["registrar"].verifying
    assert audit(second, registrar=registrar).ok
    assert any("log was cut" in finding for finding in audit(second, registrar=registrar, known_head=known).findings)
    _, early = second.head()
    assert any("log was rewritten" in finding for finding in findings(world, early))
    forged = SignedHead("chipwitness-registry/test", 2, bytes(32)).sign(world.keys["outsider"])
    assert any("earlier head" in finding for finding in findings(world, forged))
    second.close()


def unchecked(world, monkeypatch: pytest.MonkeyPatch, statement: Transfer | Claim, *keys: str) -> None:
    """What a registrar does who skips the write path's rules: apply, log and sign anything."""
    from inspector.registry import _rules

    registry = world.registry
    with registry.writer() as writer:
        signed = sign(statement, *(world.keys[key] for key in keys))
        receipt = registry.append(writer, signed, chips=1)
        moving = [
            _rules.find_holdings(writer.connection, [ref.chip])[ref.chip]
            for ref in statement.chips
            if _rules.find_holdings(writer.connection, [ref.chip])
        ]
        if isinstance(statement, Transfer):
            holder = _rules.find_party(writer.connection, statement.receiver).number
            state = ChipState.OWNED
        else:
            holder, state = None, _rules.states_after_claim(statement.claim)[1]
        _rules.move(writer.connection, moving, holder=holder, state=state, time=statement.time, event=receipt.event)


def corrupt(kind: str) -> Callable[..., None]:
    def act(world, monkeypatch: pytest.MonkeyPatch) -> None:
        from dataclasses import replace

        def transfer(sender: str, receiver: str, **changes: object) -> Transfer:
            statement = Transfer(
                registry=world.registry.origin,
                chips=world.registry.refs(["chip-0008"]),
                sender=sender,
                receiver=receiver,
                time=world.now,
            )
            return replace(statement, **changes)  # type: ignore[arg-type]

        def claim(claim: ClaimKind, witness: str = "", holder: str = "fab") -> Claim:
            return Claim(
                registry=world.registry.origin,
                chips=world.registry.refs(["chip-0008"]),
                claim=claim,
                holder=holder,
                witness=witness,
                reason="",
                time=world.now,
            )

        [ref] = world.registry.refs(["chip-0008"])
        [other] = world.registry.refs(["chip-0009"])
        match kind:
            case "stolen":
                unchecked(world, monkeypatch, transfer("lab-b", "lab-a"), "lab-b", "lab-a")
            case "forged":
                unchecked(world, monkeypatch, transfer("fab", "lab-a"), "outsider", "lab-a")
            case "one signature":
                unchecked(world, monkeypatch, transfer("fab", "lab-a"), "fab")
            case "replayed":
                statement = transfer("fab", "lab-a", chips=(replace(ref, sequence=2),))
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "other record":
                statement = transfer("fab", "lab-a", chips=(replace(ref, digest=other.digest),))
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "ghost":
                statement = transfer("fab", "lab-a", chips=(replace(ref, chip="ghost"),))
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "foreign":
                statement = transfer("fab", "lab-a", registry="chipwitness-registry/other")
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "ahead of its time":
                statement = transfer("fab", "lab-a", time=world.now + 301)
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "stale":
                statement = transfer("fab", "lab-a", time=world.now - directory_module.VALIDITY_S - 1)
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "before its last record":
                statement = transfer("fab", "lab-a", time=world.now - 1)
                unchecked(world, monkeypatch, statement, "fab", "lab-a")
            case "to an inspector":
                unchecked(world, monkeypatch, transfer("fab", "agency"), "fab", "agency")
            case "found without loss":
                unchecked(world, monkeypatch, claim(ClaimKind.FOUND, "agency"), "fab", "agency")
            case "friendly witness":
                unchecked(world, monkeypatch, claim(ClaimKind.DESTROYED, "lab-a"), "fab", "lab-a")
            case "after destruction":
                unchecked(world, monkeypatch, claim(ClaimKind.DESTROYED, "agency"), "fab", "agency")
                unchecked(world, monkeypatch, transfer("fab", "lab-a"), "fab", "lab-a")

    return act


COLLUSIONS = {
    "stolen": "not held by lab-b",
    "forged": "not enrolled",
    "one signature": "2 are needed",
    "replayed": "gets record 2 directly after record 0",
    "other record": "is not the one in the log",
    "ghost": "no genesis record",
    "foreign": "another registry",
    "ahead of its time": "that is later than its receipt",
    "stale": "30 days",
    "before its last record": "before its last record",
    "to an inspector": "not enrolled as maker or owner",
    "found without loss": "fabricated, which forbids",
    "friendly witness": "not enrolled as inspector",
    "after destruction": "destroyed, which forbids",
}


@pytest.mark.parametrize("kind", COLLUSIONS)
def test_a_registrar_who_skips_the_rules(sqlite_world, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Log, heads and tables all agree; only the statement itself was never allowed."""
    world = sqlite_world
    corrupt(kind)(world, monkeypatch)
    found = findings(world)
    assert any(COLLUSIONS[kind] in finding for finding in found), found


def test_a_registrar_who_steers_the_census(sqlite_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw leaves out a friend's chip: seed, log and draw no longer fit."""
    from inspector.registry import census as census_module

    world = sqlite_world
    monkeypatch.setattr(census_module, "draw_without_replacement", lambda _seed, _n, count: list(range(count)))
    draw_census(world.registry, count=4, seed=bytes(32), inspector="agency", key=world.keys["agency"])
    assert any("was not drawn by its seed" in finding for finding in findings(world))


def test_keys_are_not_interchangeable(sqlite_world) -> None:
    """An auditor with a fresh key trusts nothing in the database."""
    stranger = SigningKey.generate(b"s" * 32).verifying
    assert not audit(sqlite_world.registry, registrar=stranger).ok
