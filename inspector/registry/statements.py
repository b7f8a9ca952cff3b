"""What parties sign about chips: in-toto statements whose subjects are chips (id, digest of the genesis record).

Every statement names its registry and its time. A statement that moves chips also carries each chip's next sequence
number, so that it can be applied once and in one order only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, VerifyingKey, digest_bytes
from inspector.registry._form import Form, OfChips, Position
from inspector.registry._values import Capacity, ChipRef, ClaimKind, Role, check_name, check_text, check_time

__all__ = [
    "Claim",
    "Enrolment",
    "Genesis",
    "Position",
    "Transfer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment(Form):
    """The registrar admits a party under a name, a role and a key."""

    kind: ClassVar[str] = "enrolment"
    in_subject: ClassVar[Mapping[str, int]] = {"party": 0}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Genesis(Form):
    """A maker brings ``count`` chips into the world: the genesis records under ``root`` (RFC 9162), in its hands."""

    kind: ClassVar[str] = "genesis"
    in_subject: ClassVar[Mapping[str, int]] = {"label": 0}
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
        if type(self.count) is not int or not 1 <= self.count < 1 << 62 or len(self.root) != 32:
            raise CallerError("a batch must have at least one chip, fewer than 2^62, and a root of 32 bytes")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.MAKER, self.maker),)

    def subjects(self) -> list[tuple[str, Digest]]:
        return [(self.label, digest_bytes("chipwitness/registry-batch/1", self.count.to_bytes(8, "big") + self.root))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(OfChips):
    """Chips pass from ``sender`` to ``receiver`` where their logs are at ``positions``; both sign."""

    kind: ClassVar[str] = "transfer"
    keys: ClassVar[Mapping[str, str]] = {**OfChips.keys, "sender": "from", "receiver": "to"}
    registry: str
    chips: tuple[ChipRef, ...]
    sender: str
    receiver: str
    time: int
    positions: tuple[Position, ...] = ()

    def __post_init__(self) -> None:
        self.check_chips()
        check_name("sender", self.sender)
        check_name("receiver", self.receiver)
        check_time(self.time)
        if self.sender == self.receiver:
            raise CallerError(f"chip {self.chips[0].chip}: {self.sender} cannot transfer to itself")

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        return ((Capacity.RELEASE, self.sender), (Capacity.ACCEPTANCE, self.receiver))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(OfChips):
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
        self.check_chips()
        check_name("holder", self.holder)
        check_time(self.time)
        check_text("reason", self.reason)
        if (self.claim is ClaimKind.LOST) != (self.witness == ""):
            needed = "must name no witness" if self.claim is ClaimKind.LOST else "must name a witness"
            raise CallerError(f"chip {self.chips[0].chip}: a claim that chips are {self.claim.value} {needed}")
        if self.witness != "":
            check_name("witness", self.witness)

    def signatories(self) -> tuple[tuple[Capacity, str | None], ...]:
        holder = (Capacity.HOLDER, self.holder)
        return (holder, (Capacity.WITNESS, self.witness)) if self.witness != "" else (holder,)
