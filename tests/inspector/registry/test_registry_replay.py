"""The audit's own rules, fed with logs that no honest registrar writes: each is refused, its honest twin taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, digest_bytes, leaf_hash, root_of_hashes
from inspector.registry import (
    CensusDraw,
    CensusResult,
    ChipRecord,
    ChipRef,
    ChipState,
    Claim,
    ClaimKind,
    Enrolment,
    Genesis,
    MissingChip,
    Role,
    draw_without_replacement,
    sign,
)
from inspector.registry._log import Frontier, LogEntry
from inspector.registry._replay import Replay
from inspector.registry.census import drawn_digest
from inspector.registry.signing import Statement

ORIGIN = "chipwitness-registry/test"
NOW = 1_700_000_000
SEED = bytes(32)
CHIPS = [ChipRecord(f"c-{number}", "", "sha256:" + f"{number:064x}") for number in range(6)]


def key(name: str) -> SigningKey:
    return SigningKey.generate(name.encode().ljust(32, b"."))


class Story:
    """A log in the making: six chips of fab, an inspector, and a census of three that nobody has answered yet."""

    def __init__(self) -> None:
        self.stored = list(CHIPS)
        self.replay = Replay(
            origin=ORIGIN,
            registrar=key("registrar").verifying,
            records=lambda first, count: self.stored[first : first + count],
        )
        self.frontier = Frontier()

    def tell(self, statement: Statement, *signers: str, received: int = NOW) -> None:
        signed = sign(statement, *(key(name) for name in signers))
        entry = LogEntry(event=self.frontier.size, received=received, signed=signed)
        before = (self.frontier.size, self.frontier.root())
        self.frontier = self.frontier.extended(entry.to_bytes())
        self.replay.take(entry, after_root=before)

    def tell_all(self, statements: Iterable[Statement], signer: str) -> None:
        for each in statements:
            self.tell(each, signer)

    def enrol(self, party: str, role: Role, of: str | None = None) -> None:
        statement = Enrolment(registry=ORIGIN, party=party, role=role, key=key(of or party).verifying, time=NOW)
        self.tell(statement, "registrar")

    def genesis(self, chips: list[ChipRecord], **changes: object) -> Genesis:
        root = root_of_hashes([leaf_hash(chip.leaf()) for chip in chips])
        statement = Genesis(registry=ORIGIN, maker="fab", label="b", count=len(chips), root=root, time=NOW)
        return replace(statement, **changes)  # type: ignore[arg-type]

    def make(self, chips: list[ChipRecord]) -> None:
        """Store the chips' records, and publish their genesis."""
        self.stored.extend(chips)
        self.tell(self.genesis(chips), "fab")

    def draw(self, number: int = 1, **changes: object) -> CensusDraw:
        drawn = [CHIPS[position].chip for position in draw_without_replacement(SEED, 6, 3)]
        statement = CensusDraw(
            registry=ORIGIN,
            census=number,
            inspector="eye",
            owner="",
            seed=SEED,
            size=self.frontier.size,
            root=self.frontier.root(),
            population=6,
            count=3,
            drawn=drawn_digest(drawn),
            time=NOW,
        )
        return replace(statement, **changes)  # type: ignore[arg-type]

    def result(self, **changes: object) -> CensusResult:
        statement = CensusResult(
            registry=ORIGIN,
            census=1,
            inspector="eye",
            drawn=self.draw().drawn,
            present=2,
            retired=(),
            resurfaced=(),
            missing=(self.missing(0),),
            time=NOW,
        )
        return replace(statement, **changes)  # type: ignore[arg-type]

    def missing(self, rank: int, **changes: object) -> MissingChip:
        honest = MissingChip(chip=self.drawn(rank), holder="fab", observed="", sequence=1)
        return replace(honest, **changes)  # type: ignore[arg-type]

    def drawn(self, rank: int) -> str:
        return CHIPS[draw_without_replacement(SEED, 6, 6)[rank]].chip

    def claim(self, kind: ClaimKind, rank: int) -> None:
        record = next(chip for chip in CHIPS if chip.chip == self.drawn(rank))
        witness = "" if kind is ClaimKind.LOST else "eye"
        statement = Claim(
            registry=ORIGIN,
            chips=(ChipRef(record.chip, record.digest(), 1),),
            claim=kind,
            holder="fab",
            witness=witness,
            reason="",
            time=NOW,
        )
        self.tell(statement, *(["fab", "eye"] if witness else ["fab"]))


@pytest.fixture
def story() -> Story:
    told = Story()
    told.enrol("registrar", Role.REGISTRAR)
    told.enrol("fab", Role.MAKER)
    told.enrol("eye", Role.INSPECTOR)
    told.enrol("eye-2", Role.INSPECTOR)
    told.tell(told.genesis(CHIPS), "fab")
    told.tell(told.draw(), "eye")
    return told


def test_honest_result_is_taken(story: Story) -> None:
    story.tell(story.result(), "eye")
    ordinal = story.replay.ordinals[story.drawn(0)]
    assert story.replay.state[ordinal] is ChipState.LOST
    assert [change.ordinal for change in story.replay.changes] == [ordinal]


def test_honest_excuses_are_taken(story: Story) -> None:
    story.claim(ClaimKind.DESTROYED, 0)
    story.claim(ClaimKind.LOST, 1)
    story.claim(ClaimKind.LOST, 2)
    story.tell(
        story.result(
            present=1, retired=(story.drawn(0),), missing=(story.missing(1, sequence=0),), resurfaced=(story.drawn(2),)
        ),
        "eye",
    )


def test_honest_narrow_draw_is_taken(story: Story) -> None:
    story.tell(story.draw(2, owner="fab"), "eye")


LIES: dict[str, tuple[Callable[[Story], object], str]] = {
    "time runs back": (lambda s: s.tell(s.result(), "eye", received=NOW - 1), "has an earlier time of receipt"),
    "name taken": (lambda s: s.enrol("fab", Role.MAKER, of="new"), "a second time"),
    "key taken": (lambda s: s.enrol("shell", Role.OWNER, of="fab"), "a second time"),
    "second registrar": (lambda s: s.enrol("other", Role.REGISTRAR), "second registrar"),
    "no maker": (lambda s: s.tell(s.genesis([ChipRecord("x")], maker="eye"), "eye"), "not enrolled as maker"),
    "records held back": (lambda s: s.tell(s.genesis([ChipRecord("x")]), "fab"), "0 genesis records"),
    "chip again": (
        lambda s: s.make([ChipRecord("c-1")]),
        "two genesis records",
    ),
    "chip twice": (
        lambda s: s.make([ChipRecord("x")] * 2),
        "two genesis records",
    ),
    "identity again": (
        lambda s: s.make([ChipRecord("x", "", CHIPS[0].identity)]),
        "one identity",
    ),
    "census number skipped": (lambda s: s.tell(s.draw(3), "eye"), "census 3 comes after 1 censuses"),
    "draw by a maker": (lambda s: s.tell(s.draw(2, inspector="fab"), "fab"), "not enrolled as inspector"),
    "draw from another log": (lambda s: s.tell(s.draw(2, root=bytes(32)), "eye"), "not drawn from the log"),
    "draw from an older log": (lambda s: s.tell(s.draw(2, size=4), "eye"), "not drawn from the log"),
    "population understated": (lambda s: s.tell(s.draw(2, population=5), "eye"), "says 5 chips are held"),
    "population of no owner": (lambda s: s.tell(s.draw(2, owner="eye"), "eye"), "not enrolled as maker or owner"),
    "draw not by its seed": (lambda s: s.tell(s.draw(2, seed=b"x" * 32), "eye"), "not drawn by its seed"),
    "result of no census": (lambda s: s.tell(s.result(census=2), "eye"), "not drawn"),
    "second result": (
        lambda s: s.tell_all([s.result(present=3, missing=()), s.result()], "eye"),
        "has a result already",
    ),
    "another inspector's result": (lambda s: s.tell(s.result(inspector="eye-2"), "eye-2"), "not of the census"),
    "result of another draw": (
        lambda s: s.tell(s.result(drawn=digest_bytes("other", b"")), "eye"),
        "not of the census",
    ),
    "chip passed over": (lambda s: s.tell(s.result(present=1), "eye"), "account for every chip"),
    "chip too many": (lambda s: s.tell(s.result(present=3), "eye"), "account for every chip"),
    "missing though not drawn": (
        lambda s: s.tell(s.result(missing=(s.missing(4),)), "eye"),
        "was not drawn in census 1",
    ),
    "excused though alive": (
        lambda s: s.tell(s.result(missing=(), retired=(s.drawn(0),)), "eye"),
        "excused as destroyed",
    ),
    "resurfaced though never gone": (
        lambda s: s.tell(s.result(resurfaced=(s.drawn(1),)), "eye"),
        "neither lost nor destroyed",
    ),
    "wrong record number": (
        lambda s: s.tell(s.result(missing=(s.missing(0, sequence=2),)), "eye"),
        "wrong record number",
    ),
    "no record though held": (
        lambda s: s.tell(s.result(missing=(s.missing(0, sequence=0),)), "eye"),
        "wrong record number",
    ),
    "somebody else answers": (
        lambda s: s.tell(s.result(missing=(s.missing(0, holder="eye"),)), "eye"),
        "eye does not answer",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(story: Story, lie: str) -> None:
    act, words = LIES[lie]
    with pytest.raises(EvidenceError, match=words):
        act(story)


@pytest.mark.parametrize(
    ("statement", "signer", "words"),
    [
        (
            Genesis(registry=ORIGIN, maker="registrar", label="b", count=1, root=bytes(32), time=NOW),
            "registrar",
            "not enrol",
        ),
        (
            Enrolment(registry=ORIGIN, party="fab", role=Role.MAKER, key=key("fab").verifying, time=NOW),
            "registrar",
            "does not enrol the registrar",
        ),
        (
            Enrolment(registry=ORIGIN, party="chief", role=Role.REGISTRAR, key=key("registrar").verifying, time=NOW),
            "registrar",
            "is not the trusted one",
        ),
        (
            Enrolment(registry=ORIGIN, party="registrar", role=Role.REGISTRAR, key=key("other").verifying, time=NOW),
            "registrar",
            "is not the trusted one",
        ),
        (
            Enrolment(registry=ORIGIN, party="registrar", role=Role.REGISTRAR, key=key("other").verifying, time=NOW),
            "other",
            "not enrolled",
        ),
        (
            Enrolment(registry="x", party="registrar", role=Role.REGISTRAR, key=key("registrar").verifying, time=NOW),
            "registrar",
            "another registry",
        ),
    ],
)
def test_event_zero_is_the_trusted_registrars(statement: Statement, signer: str, words: str) -> None:
    with pytest.raises(EvidenceError, match=words):
        Story().tell(statement, signer)
