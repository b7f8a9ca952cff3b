"""What the inspector knows from outside the run: makers, firmware, labs, chips and its own challenge.

Nothing under a run folder is ever an anchor (Shavit 2023, section 3).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from firmware_sim import DEFAULT_ALGORITHM, limits
from firmware_sim.checks import ChipTrust
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import Digest, SignatureError, VerifyingKey, canonical
from firmware_sim.evidence.work import Roofline
from monitor.declaration.countersignature import COUNTERSIGNED, Countersigned
from monitor.declaration.statement import parse_share
from monitor.transcript.manifest import Manifest
from monitor.transcript.orders import ORDER, Order

if TYPE_CHECKING:
    from inspector.registry.registry_view import RegisteredChips

__all__ = ["NotCountersigned", "Trust", "parse_challenges", "parse_rates", "rates_json", "signer_of"]

FORMAT = "chipwitness/trust/1"
_KEYS = {
    "format",
    "makers",
    "measurements",
    "minimum_security_version",
    "snapshot_rate",
    "snapshot_algorithm",
    "labs",
    "chips",
    "verifier",
    "nonce",
}
_RATE = re.compile("[0-9]{1,39}(/[0-9]{1,39})?", re.ASCII)
_NONCE = re.compile("[0-9a-f]{64}")
_OPTIONAL: Mapping[str, Any] = {
    "inspectorates": [],
    "clusters": [],
    "witnesses": {},
    "countersigned": [],
    "maximum_flop": None,
    "maximum_slack": None,
    "beacon_seconds": None,
    "rates": {},
    "clocks": {},
    "challenges": {},
}


Limit = TypeVar("Limit", int, Fraction)


@lru_cache(1 << 14)
def _named(key: VerifyingKey) -> bytes:
    """How an envelope names a key."""
    return key.key_id.encode()


class NotCountersigned(CallerError):
    """The trust files name no party that signed a run's declaration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The inspector's anchors.

    Attributes:
        chip_trust: digests of the maker CAs' certificates, firmware that may run, the agreed snapshot schedule, and how
            long a tick of each chip is.
        labs: public key of each lab's transcripts.
        chips: which lab owns which chip: the registry.
        verifier: this inspector's id, nonce: its challenge; the chips' quotes answer both.
        challenges: the same of labs whose trust files hold others: verifier and nonce by lab.
        inspectorates: keys of those whose signature under a declaration, a verdict or a log checkpoint counts.
        clusters: keys of those whose signature under the result of a replay counts.
        witnesses: keys of those whose word about the time of questions and answers counts, by name.
        countersigned: declarations that they are said to have signed, as envelopes.
        orders: tasks that they are said to have ordered (``monitor.transcript.orders``), as envelopes.
        order: the one task that a game is about (``about``); None elsewhere.
        maximum_flop: most FLOP that a lab's runs, or a run and those that it continues, may take together; None for no
            such rule.
        maximum_slack: the share of what a run declares that its chips may count on top; None for what is agreed.
        beacon_seconds: a chip works no longer than this from one beacon to the next; None where none are agreed.
        rates: by chip what its device does in a second at most, of the chips of which that is known.
        registry: the registry's signed view, with a proof of each chip; None where the file itself is the list.
    """

    chip_trust: ChipTrust
    labs: Mapping[str, VerifyingKey]
    chips: Mapping[str, str]
    verifier: str
    nonce: bytes
    inspectorates: frozenset[VerifyingKey] = frozenset()
    clusters: frozenset[VerifyingKey] = frozenset()
    witnesses: Mapping[str, VerifyingKey] = field(default_factory=dict)
    countersigned: frozenset[bytes] = frozenset()
    orders: frozenset[bytes] = frozenset()
    order: Order | None = None
    maximum_flop: int | None = None
    maximum_slack: Fraction | None = None
    beacon_seconds: int | None = None
    rates: Mapping[str, Roofline] = field(default_factory=dict)
    registry: RegisteredChips | None = None
    challenges: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.labs or self.witnesses) or len({bool(each) for each in self._about_chips}) > 1:
            raise CallerError(_NO_CHIPS)
        strangers = set(self.chips.values()) - set(self.labs)
        if strangers:
            raise CallerError(f"the trust file lists chips of a lab that it does not name: {sorted(strangers)[0]}")
        if not set(self.rates) <= set(self.chips):
            raise CallerError(f"the trust file gives rates for a chip that it does not list: {min(self.rates)}")
        if self.inspectorates.union(self.labs.values()).intersection(self.witnesses.values()):
            raise CallerError("the trust file names a key as a witness's that is also a party's")
        if self.registry is not None:
            self.registry.require(self.chips)

    @property
    def _about_chips(self) -> tuple[object, ...]:
        """What an inspection needs, and a game between parties without chips does not."""
        return self.chip_trust.ca_digests, self.chip_trust.measurements, self.chips or self.registry

    @classmethod
    def load(cls, paths: Iterable[Path], runs: Iterable[Path] = (), *, chips: bool = True) -> Trust:
        """Read and merge trust files; countersigned declarations and orders in separate files may be among them.

        Args:
            chips: whether makers, firmware and chips are needed, as they are but for games between parties.

        Raises:
            CallerError: a file is unreadable, malformed, or contradicts another.
            EvidenceError: a file lies inside a run folder, where only the lab can have put it.
        """
        merged: Trust | None = None
        signed: dict[str, set[bytes]] = {COUNTERSIGNED: set(), ORDER: set()}
        for path in paths:
            for run in runs:
                if path.resolve().is_relative_to(run.resolve()):
                    raise EvidenceError(
                        f"the trust file {path} is inside the run {run}, but a lab cannot vouch for itself"
                    )
            try:
                content = limits.read_file(path, limits.TRUST_BYTES)
                data = canonical.parse(content, most=limits.TRUST_BYTES)
            except OSError as error:
                raise file_error(f"cannot read the trust file {path}", error) from None
            except EvidenceError as error:
                raise CallerError(f"the trust file {path} is not JSON that can be read: {error}") from None
            if isinstance(data, dict) and str(data.get("payloadType")) in signed:
                signed[data["payloadType"]].add(content.strip())
                continue
            parsed = cls.from_json(data, str(path))
            merged = parsed if merged is None else merged.merge(parsed)
        if merged is None:
            raise CallerError("no trust file was given")
        if chips and not all(merged._about_chips):
            raise CallerError(_NO_CHIPS)
        countersigned = merged.countersigned | signed[COUNTERSIGNED]
        return replace(merged, countersigned=countersigned, orders=frozenset(signed[ORDER]))

    @classmethod
    def of_parties(
        cls,
        labs: Mapping[str, VerifyingKey],
        client: VerifyingKey,
        witnesses: Mapping[str, VerifyingKey] | None = None,
    ) -> Trust:
        """Anchors of a delegation: the parties' keys and the client's, who counts as an inspectorate, and no chips."""
        for name in (*labs, *(witnesses or {})):
            limits.check_lab(name)
        nothing = ChipTrust(
            ca_digests=frozenset(),
            measurements=frozenset(),
            minimum_security_version=0,
            snapshot_rate=Fraction(1),
            snapshot_algorithm=DEFAULT_ALGORITHM,
        )
        return cls(
            chip_trust=nothing,
            labs=labs,
            chips={},
            verifier=client.key_id,
            nonce=bytes(32),
            inspectorates=frozenset({client}),
            witnesses=witnesses or {},
        )

    def merge(self, other: Trust) -> Trust:
        """Return both together; CallerError where they disagree about a lab, its challenge, or a chip.

        One without chips states neither a challenge nor a schedule of snapshots.
        """
        check_agree("lab", self.labs, other.labs)
        check_agree("witness", self.witnesses, other.witnesses)
        check_agree("chip", self.chips, other.chips)
        check_agree("the rates of chip", self.rates, other.rates)
        check_agree("the clock of chip", self.chip_trust.clocks, other.chip_trust.clocks)
        about_chips = [each for each in (self, other) if any(each._about_chips)] or [self]
        first, last = about_chips[0], about_chips[-1]
        asked, others = ({lab: each.challenge_of(lab) for lab in each.labs} for each in (first, last))
        check_agree("the challenge of lab", asked, others)
        schedule, another = first.chip_trust, last.chip_trust
        rate, algorithm = schedule.snapshot_rate, schedule.snapshot_algorithm
        if (rate, algorithm) != (another.snapshot_rate, another.snapshot_algorithm):
            raise CallerError("two trust files state different snapshot schedules")
        mine, theirs = self.chip_trust, other.chip_trust
        chip_trust = ChipTrust(
            ca_digests=frozenset(mine.ca_digests) | frozenset(theirs.ca_digests),
            measurements=frozenset(mine.measurements) | frozenset(theirs.measurements),
            minimum_security_version=max(mine.minimum_security_version, theirs.minimum_security_version),
            snapshot_rate=rate,
            snapshot_algorithm=algorithm,
            clocks={**mine.clocks, **theirs.clocks},
        )
        return Trust(
            chip_trust=chip_trust,
            labs={**self.labs, **other.labs},
            chips={**self.chips, **other.chips},
            verifier=first.verifier,
            nonce=first.nonce,
            inspectorates=self.inspectorates | other.inspectorates,
            clusters=self.clusters | other.clusters,
            witnesses={**self.witnesses, **other.witnesses},
            countersigned=self.countersigned | other.countersigned,
            maximum_flop=_lower(self.maximum_flop, other.maximum_flop),
            maximum_slack=_lower(self.maximum_slack, other.maximum_slack),
            beacon_seconds=_lower(self.beacon_seconds, other.beacon_seconds),
            rates={**self.rates, **other.rates},
            registry=_joined(self.registry, other.registry),
            challenges={lab: x for lab, x in (asked | others).items() if x != (first.verifier, first.nonce)},
        )

    def challenge_of(self, lab: str | None) -> tuple[str, bytes]:
        """Verifier and nonce that the quotes of a lab's chips answer, unless they are asked live."""
        return self.challenges.get(lab or "", (self.verifier, self.nonce))

    def challenge_json(self) -> dict[str, object]:
        """The challenge as JSON; those of single labs only where there are any."""
        single = {lab: {"verifier": who, "nonce": nonce.hex()} for lab, (who, nonce) in sorted(self.challenges.items())}
        every: dict[str, object] = {"verifier": self.verifier, "nonce": self.nonce.hex()}
        return {**every, "challenges": single} if single else every

    def agreed(self) -> list[Countersigned]:
        """The declarations that the named inspectorates signed; what another key signed counts for nothing.

        Raises:
            CallerError: one of them is malformed.
        """
        ordered = [order.agreed(digest) for digest, order in _ordered(self.orders, self.inspectorates).items()]
        return [*_opened(self.countersigned, self.inspectorates), *ordered]

    def about(self, task: str) -> Trust:
        """The same, where nothing counts as agreed but the order with this SHA-256; NotCountersigned without it."""
        order = _ordered(self.orders, self.inspectorates).get(task)
        if order is None:
            raise NotCountersigned(
                f"no order of task {task[:16]}… was given that is signed by an inspectorate in the trust files: add "
                "the task's task.json as one more --trust FILE"
            )
        mine = frozenset(each for each in self.orders if hashlib.sha256(each).hexdigest() == task)
        return replace(self, countersigned=frozenset(), orders=mine, order=order)

    def key_of(self, lab: str) -> VerifyingKey:
        """Return a lab's key; EvidenceError if the registry does not know the lab."""
        if lab not in self.labs:
            raise EvidenceError(f"lab {lab!r} is not registered")
        return self.labs[lab]

    def signers(self, envelope: bytes) -> list[tuple[str, VerifyingKey]]:
        """All labs with their keys, and first the one that an envelope names: of many, few are tried on it then."""
        return sorted(self.labs.items(), key=lambda each: _named(each[1]) not in envelope)

    def chips_of(self, lab: str) -> list[str]:
        """Return the ids of all chips that the registry gives to a lab, sorted."""
        return sorted(chip for chip, owner in self.chips.items() if owner == lab)

    @property
    def source(self) -> str:
        """Who says which chips there are, in words."""
        if self.registry is None:
            return "chips as the trust file lists them"
        return f"chips as the registry's signed view of size {self.registry.publication.size} lists them"

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values; declarations, rules and a registry only where there are any."""
        data: dict[str, object] = {
            "format": FORMAT,
            "makers": sorted(str(digest) for digest in self.chip_trust.ca_digests),
            "measurements": sorted(str(digest) for digest in self.chip_trust.measurements),
            "minimum_security_version": self.chip_trust.minimum_security_version,
            "snapshot_rate": str(self.chip_trust.snapshot_rate),
            "snapshot_algorithm": self.chip_trust.snapshot_algorithm,
            "labs": {lab: key.raw.hex() for lab, key in self.labs.items()},
            "chips": dict(self.chips),
            **self.challenge_json(),
        }
        optional = {
            "inspectorates": sorted(key.raw.hex() for key in self.inspectorates),
            "clusters": sorted(key.raw.hex() for key in self.clusters),
            "witnesses": {name: key.raw.hex() for name, key in self.witnesses.items()},
            "countersigned": sorted(envelope.decode() for envelope in self.countersigned),
            "maximum_flop": self.maximum_flop,
            "maximum_slack": None if self.maximum_slack is None else str(self.maximum_slack),
            "beacon_seconds": self.beacon_seconds,
            "rates": rates_json(self.rates),
            "clocks": rates_json(self.chip_trust.clocks),
            "registry": None if self.registry is None else self.registry.to_json(),
        }
        return data | {name: value for name, value in optional.items() if value not in ([], {}, None)}

    @classmethod
    def from_json(cls, data: object, source: str) -> Trust:
        """Parse; CallerError names the source on any other form."""
        registry = None
        if isinstance(data, dict):
            data = {**_OPTIONAL, **data}
            if "registry" in data:
                registry = _parse_registry(data.pop("registry"), source)
        if not isinstance(data, dict) or set(data) != _KEYS | set(_OPTIONAL) or data["format"] != FORMAT:
            raise CallerError(f"{source} is not a trust file of the form {FORMAT}")
        try:
            _check_form(data)
            return cls(
                chip_trust=ChipTrust(
                    ca_digests=frozenset(Digest.parse(text) for text in data["makers"]),
                    measurements=frozenset(Digest.parse(text) for text in data["measurements"]),
                    minimum_security_version=data["minimum_security_version"],
                    snapshot_rate=Fraction(data["snapshot_rate"]),
                    snapshot_algorithm=data["snapshot_algorithm"],
                    clocks=parse_rates(data["clocks"]),
                ),
                labs={lab: VerifyingKey(bytes.fromhex(key)) for lab, key in data["labs"].items()},
                chips=data["chips"],
                verifier=data["verifier"],
                nonce=bytes.fromhex(data["nonce"]),
                inspectorates=frozenset(VerifyingKey(bytes.fromhex(key)) for key in data["inspectorates"]),
                clusters=frozenset(VerifyingKey(bytes.fromhex(key)) for key in data["clusters"]),
                witnesses={name: VerifyingKey(bytes.fromhex(key)) for name, key in data["witnesses"].items()},
                countersigned=frozenset(envelope.encode() for envelope in data["countersigned"]),
                maximum_flop=data["maximum_flop"],
                maximum_slack=None if data["maximum_slack"] is None else parse_share(data["maximum_slack"]),
                beacon_seconds=data["beacon_seconds"],
                rates=parse_rates(data["rates"]),
                registry=registry,
                challenges=parse_challenges(data["challenges"]),
            )
        except (EvidenceError, ValueError, TypeError, AttributeError, ZeroDivisionError):
            raise CallerError(f"the trust file {source} is malformed") from None


_NO_CHIPS = "the trust file names no maker, no firmware, no lab or no chip"


def _check_form(data: Mapping[str, Any]) -> None:
    """ValueError, TypeError or EvidenceError where a value of a trust file has another type or form."""
    texts = [*data["makers"], *data["measurements"], *data["chips"].values()]
    texts += [data[name] for name in ("verifier", "nonce", "snapshot_rate", "snapshot_algorithm")]
    for name in (*data["labs"], *data["witnesses"]):
        limits.check_lab(name)
    for chip in data["chips"]:
        limits.check_chip_id(chip)
    caps = (data["maximum_flop"], data["beacon_seconds"])
    sound = (
        all(isinstance(text, str) for text in texts),
        type(data["minimum_security_version"]) is int,
        _RATE.fullmatch(str(data["snapshot_rate"])),
        _NONCE.fullmatch(str(data["nonce"])),
        all(cap is None or (type(cap) is int and cap >= 0) for cap in caps),
        all(isinstance(data[key], list) for key in ("inspectorates", "clusters", "countersigned")),
    )
    if not all(sound):
        raise ValueError


@lru_cache(maxsize=8)
def _opened(envelopes: frozenset[bytes], keys: frozenset[VerifyingKey]) -> tuple[Countersigned, ...]:
    """Each declaration that one of the keys signed; opened once, since each run of many labs asks for all of them."""
    opened = []
    for envelope in sorted(envelopes):
        for key in keys:
            try:
                opened.append(Countersigned.open(envelope, key))
            except SignatureError:
                continue
            except EvidenceError as error:
                raise CallerError(f"a countersigned declaration is malformed: {error}") from None
    return tuple(opened)


@lru_cache(maxsize=8)
def _ordered(envelopes: frozenset[bytes], keys: frozenset[VerifyingKey]) -> Mapping[str, Order]:
    """Each order that one of the keys signed, by its SHA-256; what another key signed counts for nothing."""
    opened = {}
    for envelope in envelopes:
        for key in keys:
            try:
                opened[hashlib.sha256(envelope).hexdigest()] = Order.open(envelope, key)
            except SignatureError:
                continue
            except EvidenceError as error:
                raise CallerError(f"an order is malformed: {error}") from None
    return opened


def check_agree(what: str, ours: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """CallerError if one lab has two keys, or one chip two owners."""
    for name in sorted(set(ours) & set(others)):
        if ours[name] != others[name]:
            raise CallerError(f"two trust files disagree about {what} {name}")


def _parse_registry(data: object, source: str) -> RegisteredChips:
    from inspector.registry.registry_view import (
        RegisteredChips,  # brings a database library, which few trust files need
    )

    try:
        return RegisteredChips.from_json(data)
    except (CallerError, EvidenceError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CallerError(f"the trust file {source} is malformed: {error}") from None


def parse_challenges(data: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
    """Challenges by lab; ValueError, TypeError or AttributeError on any other form."""
    for lab, x in data.items():
        limits.check_lab(lab)
        if set(x) != {"verifier", "nonce"} or type(x["verifier"]) is not str or not _NONCE.fullmatch(x["nonce"]):
            raise ValueError
    return {lab: (x["verifier"], bytes.fromhex(x["nonce"])) for lab, x in data.items()}


def rates_json(rates: Mapping[str, Roofline]) -> dict[str, object]:
    """The same as JSON."""
    return {chip: asdict(each) for chip, each in rates.items()}


def parse_rates(data: Mapping[str, Any]) -> dict[str, Roofline]:
    """What devices do in a second at most, by chip; ValueError, TypeError or AttributeError on any other form."""
    return {chip: _rates(found) for chip, found in data.items()}


def _rates(found: Mapping[str, Any]) -> Roofline:
    """A device's rates; ValueError on any other form."""
    if set(found) != {"flop", "moved"} or not all(type(rate) is int and rate > 0 for rate in found.values()):
        raise ValueError
    return Roofline(flop=found["flop"], moved=found["moved"])


def _lower(one: Limit | None, other: Limit | None) -> Limit | None:
    """The stricter of two limits."""
    return min((cap for cap in (one, other) if cap is not None), default=None)


def _joined(mine: RegisteredChips | None, theirs: RegisteredChips | None) -> RegisteredChips | None:
    if mine is None or theirs is None:
        return mine or theirs
    return mine.joined(theirs)


def signer_of(head: bytes, trust: Trust) -> tuple[str, Manifest]:
    """The lab that signed a run's head, and the head opened; EvidenceError if no registered lab did."""
    for lab, key in trust.signers(head):
        try:
            return lab, Manifest.open(head, key)
        except EvidenceError:
            continue
    raise EvidenceError("one of the given heads is not signed by a registered lab")
