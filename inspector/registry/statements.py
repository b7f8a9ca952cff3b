"""What parties sign about chips: in-toto statements whose subjects are chips (id, digest of the genesis record).

Every statement names its registry and its time. A statement that moves chips also carries each chip's next sequence
number, so that it can be applied once and in one order only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, VerifyingKey, digest_bytes
from inspector.registry._values import Capacity, ChipRef, ClaimKind, Role, check_lot, check_name, check_text, check_time

__all__ = [
    "Claim",
    "Enrolment",
    "Genesis",
    "Position",
    "Transfer",
    "check_positions",
    "parse_positions",
    "positions_wire",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a chip's log, behind record ``size`` - 1 whose hash is ``head``, and the digest of what shows it."""

    size: int
    head: bytes
    deposit: Digest

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size < 1 << 63 or len(self.head) != 32:
            raise CallerError("a position follows at least one record, and gives its hash of 32 bytes")

    def to_wire(self) -> list[Any]:
        """What ``parse`` reads."""
        return [self.size, self.head.hex(), str(self.deposit)]

    @classmethod
    def parse(cls, value: Sequence[Any]) -> Position:
        """Read what ``to_wire`` returns; ValueError, TypeError, CallerError or EvidenceError on any other form."""
        size, head, deposit = value
        return cls(size=size, head=bytes.fromhex(head), deposit=Digest.parse(deposit))


def positions_wire(positions: Sequence[Position]) -> dict[str, object]:
    """The positions in a predicate; statements from before there were any have no such key."""
    return {"positions": [each.to_wire() for each in positions]} if positions else {}


def parse_positions(predicate: Mapping[str, Any]) -> tuple[Position, ...]:
    """What ``positions_wire`` wrote."""
    return tuple(map(Position.parse, predicate.get("positions", ())))


def check_positions(chips: Sequence[ChipRef], positions: Sequence[Position]) -> None:
    """CallerError unless there is a position for each chip, or none."""
    if len(positions) not in (0, len(chips)):
        raise CallerError(f"a statement gives the positions of all its {len(chips)} chips, or of none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """The registrar admits a party under a name, a role and a key."""

    kind: ClassVar[str] = "enrolment"
    registry: str
    party: str
    role: Role
    key: VerifyingKey
    time: int

    def __post_init__(self) -> None:
        check_name("party", self.party)
        check_time(self.time)

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.REGISTRAR, None),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(self.party, Digest.parse(self.key.key_id))]

    def predicate(self) -> dict[str, object]:
        return {"key": self.key.raw.hex(), "registry": self.registry, "role": self.role.value, "time": self.time}

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Enrolment:
        return cls(
            registry=predicate["registry"],
            party=subjects[0][0],
            role=Role(predicate["role"]),
            key=VerifyingKey(bytes.fromhex(predicate["key"])),
            time=predicate["time"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Genesis:
    """A maker brings ``count`` chips into the world: the genesis records under ``root`` (RFC 9162), in its hands."""

    kind: ClassVar[str] = "genesis"
    registry: str
    maker: str
    label: str
    count: int
    root: bytes
    time: int

    def __post_init__(self) -> None:
        check_name("maker", self.maker)
        check_name("batch label", self.label)
        check_time(self.time)
        if type(self.count) is not int or self.count < 1 or len(self.root) != 32:
            raise CallerError("a batch must have at least one chip and a root of 32 bytes")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.MAKER, self.maker),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(self.label, digest_bytes("chipwitness/registry-batch/1", self.count.to_bytes(8, "big") + self.root))]

    def predicate(self) -> dict[str, object]:
        return {
            "count": self.count,
            "maker": self.maker,
            "registry": self.registry,
            "root": self.root.hex(),
            "time": self.time,
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Genesis:
        return cls(
            registry=predicate["registry"],
            maker=predicate["maker"],
            label=subjects[0][0],
            count=predicate["count"],
            root=bytes.fromhex(predicate["root"]),
            time=predicate["time"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Chips pass from ``sender`` to ``receiver`` where their logs are at ``positions``; both sign."""

    kind: ClassVar[str] = "transfer"
    registry: str
    chips: tuple[ChipRef, ...]
    sender: str
    receiver: str
    time: int
    positions: tuple[Position, ...] = ()

    def __post_init__(self) -> None:
        check_lot(self.chips)
        check_positions(self.chips, self.positions)
        check_name("sender", self.sender)
        check_name("receiver", self.receiver)
        check_time(self.time)
        if self.sender == self.receiver:
            raise CallerError(f"chip {self.chips[0].chip}: {self.sender} cannot transfer to itself")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.RELEASE, self.sender), (Capacity.ACCEPTANCE, self.receiver))

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(ref.chip, ref.digest) for ref in self.chips]

    def predicate(self) -> dict[str, object]:
        return {
            "from": self.sender,
            "registry": self.registry,
            "sequences": [ref.sequence for ref in self.chips],
            "time": self.time,
            "to": self.receiver,
            **positions_wire(self.positions),
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Transfer:
        return cls(
            registry=predicate["registry"],
            chips=_refs(subjects, predicate["sequences"]),
            sender=predicate["from"],
            receiver=predicate["to"],
            time=predicate["time"],
            positions=parse_positions(predicate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The holder says that chips are lost, found again or destroyed; an inspector witnesses the latter two."""

    kind: ClassVar[str] = "claim"
    registry: str
    chips: tuple[ChipRef, ...]
    claim: ClaimKind
    holder: str
    witness: str
    reason: str
    time: int
    positions: tuple[Position, ...] = ()

    def __post_init__(self) -> None:
        check_lot(self.chips)
        check_positions(self.chips, self.positions)
        check_name("holder", self.holder)
        check_time(self.time)
        check_text("reason", self.reason)
        if (self.claim is ClaimKind.LOST) != (self.witness == ""):
            needed = "must name no witness" if self.claim is ClaimKind.LOST else "must name a witness"
            raise CallerError(f"chip {self.chips[0].chip}: a claim that chips are {self.claim.value} {needed}")
        if self.witness:
            check_name("witness", self.witness)

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        holder = (Capacity.HOLDER, self.holder)
        return (holder, (Capacity.WITNESS, self.witness)) if self.witness else (holder,)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(ref.chip, ref.digest) for ref in self.chips]

    def predicate(self) -> dict[str, object]:
        return {
            "claim": self.claim.value,
            "holder": self.holder,
            "reason": self.reason,
            "registry": self.registry,
            "sequences": [ref.sequence for ref in self.chips],
            "time": self.time,
            "witness": self.witness,
            **positions_wire(self.positions),
        }

    @classmethod
    def parse(cls, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, Any]) -> Claim:
        return cls(
            registry=predicate["registry"],
            chips=_refs(subjects, predicate["sequences"]),
            claim=ClaimKind(predicate["claim"]),
            holder=predicate["holder"],
            witness=predicate["witness"],
            reason=predicate["reason"],
            time=predicate["time"],
            positions=parse_positions(predicate),
        )


def _refs(subjects: Sequence[tuple[str, Digest]], sequences: Sequence[int]) -> tuple[ChipRef, ...]:
    return tuple(ChipRef(chip, digest, sequence) for (chip, digest), sequence in zip(subjects, sequences, strict=True))
