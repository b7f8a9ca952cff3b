"""A declaration as a statement that two sides sign: what the lab proposed, and the programs that may run under it.

The lab proposes by beginning a run, whose metadata hold the declaration. The other side signs a DSSE envelope over an
in-toto statement: its subjects are the run, the declaration and each admitted program by digest, its predicate says the
rest. An amendment is another statement about the same run, with the next number: from one step on it says all that is
agreed, in the place of the one before. Nothing is agreed by two statements together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime

from firmware_sim import Digest, limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import (
    SHA256,
    SigningKey,
    VerifyingKey,
    decode_base64,
    digest_bytes,
    open_sealed,
    open_statement,
    seal,
    statement,
)
from firmware_sim.evidence.canonical import decode, encode
from monitor.declaration.statement import Declaration, is_hyper_name, is_state_name
from monitor.programs import peak_bytes
from monitor.programs.program import Program

__all__ = ["COUNTERSIGNED", "TIME", "Admitted", "Countersigned", "declaration_digest", "in_force", "is_time"]

COUNTERSIGNED = "application/vnd.chipwitness.declaration.countersigned.v3+json"
"""DSSE payload type of what an inspectorate signs."""
_PREDICATE = "https://chipwitness.org/declaration/countersigned/v3"
TIME = "%Y-%m-%dT%H:%M:%SZ"
"""How a statement writes the moment at which it was signed, in UTC."""
_SUBJECT = "declaration"
_TERMS = ("simulated", "number", "since", "signed")
_KEYS = {"lab", "run", "declaration", "programs", "free", "direct_paths", "data", *_TERMS}


def declaration_digest(declared: Declaration) -> Digest:
    """Digest of a declaration's canonical JSON: what a countersignature is about."""
    return digest_bytes("declaration", encode(declared.to_json()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What one step of an admitted program costs.

    Attributes:
        flop: in products.
        most_flop: with what elementwise work can hide.
        bytes: the most that it holds at once.
    """

    flop: int
    most_flop: int
    bytes: int

    @classmethod
    def of(cls, program: Program) -> Admitted:
        """Count it; EvidenceError on shapes or memory that fit no call."""
        compute = program.compute
        return cls(flop=compute.flop, most_flop=compute.most, bytes=peak_bytes(program))


@dataclass(frozen=True, slots=True, kw_only=True)
class Countersigned:
    """What an inspectorate agreed to.

    Attributes:
        lab: who may run it.
        run: id of the one run that it is about, in hex.
        declaration: what the lab declared.
        programs: by SHA-256, in hex, the programs that its steps may run.
        free: names of hyper-parameters that need not be bound to the arithmetic or stay as declared, tensors of the
            state (``kind/name``, or patterns) that may take gradients by numbers that nothing declares, and those among
            the programs that may change numbers outside the optimizer's updates from step to step.
        direct_paths: tensors of the state (``kind/name``), and programs, for which batches and constants may reach the
            new state without passing a loss; a program that only computes may then differentiate, too.
        data: digests of samples and orders, other than a preset's own.
        simulated: signed by the inspectorate of a simulated world, whose key everybody knows who knows its seed.
        number: 1, and of each amendment the next.
        since: the first step for which it counts, in the place of all statements with lower numbers; 1 of the first.
        signed: when, by the inspectorate's clock (``TIME``).
    """

    lab: str
    run: str
    declaration: Declaration
    programs: Mapping[str, Admitted]
    free: frozenset[str] = frozenset()
    direct_paths: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    simulated: bool = False
    number: int = 1
    since: int = 1
    signed: str

    def joined(self, others: Iterable[Countersigned]) -> Countersigned:
        """All that these and others allow, for a referee: no party is blamed for what someone agreed to."""
        found = self
        for other in others:
            found = replace(
                found,
                programs={**found.programs, **other.programs},
                free=found.free | other.free,
                direct_paths=found.direct_paths | other.direct_paths,
                data=found.data | other.data,
                simulated=found.simulated or other.simulated,
            )
        return found

    def sign(self, key: SigningKey) -> bytes:
        """The envelope that the inspectorate's key signs."""
        programs = sorted(self.programs)
        predicate = {
            "lab": self.lab,
            "run": self.run,
            "declaration": self.declaration.to_json(),
            "programs": [[digest, *astuple(self.programs[digest])] for digest in programs],
            "free": sorted(self.free),
            "direct_paths": sorted(self.direct_paths),
            "data": sorted(self.data),
            **{name: getattr(self, name) for name in _TERMS},
        }
        return seal(COUNTERSIGNED, statement(_PREDICATE, self._subjects(), predicate), key)

    def _subjects(self) -> list[tuple[str, Digest]]:
        programs = [(f"program/{digest}", Digest(SHA256, bytes.fromhex(digest))) for digest in sorted(self.programs)]
        run = ("run", Digest(SHA256, bytes.fromhex(self.run)))
        return [(_SUBJECT, declaration_digest(self.declaration)), *programs, run]

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> Countersigned:
        """Verify and parse; EvidenceError on another signature or form, or subjects that are not what it holds."""
        return cls._parse(open_sealed(envelope, COUNTERSIGNED, key, most=limits.COUNTERSIGNED_BYTES))

    @classmethod
    def read(cls, envelope: bytes) -> tuple[Countersigned, str]:
        """Parse without the key, for somebody who wants to read it; also the id of the key that is said to have signed.

        Raises:
            EvidenceError: not an envelope of this kind.
        """
        data = decode(envelope.strip(), most=limits.COUNTERSIGNED_BYTES)
        try:
            signer, payload = data["signatures"][0]["keyid"], decode_base64(data["payload"])
        except (TypeError, LookupError):
            raise EvidenceError("not a countersigned declaration") from None
        return cls._parse(decode(payload, most=limits.COUNTERSIGNED_BYTES)), str(signer)

    @classmethod
    def _parse(cls, payload: object) -> Countersigned:
        subjects, data = open_statement(payload, _PREDICATE)
        if set(data) != _KEYS or type(data["simulated"]) is not bool:
            raise EvidenceError("a countersigned declaration has missing or extra keys")
        for name in ("programs", "free", "direct_paths", "data"):
            if not isinstance(data[name], list):
                raise EvidenceError(f"the {name} of a countersigned declaration are not a list")
        limits.check_lab(data["lab"])
        if not _is_sha256(data["run"]) or not _is_numbered(data["number"], data["since"], data["signed"]):
            raise EvidenceError("a countersigned declaration does not give its run, its number or its time")
        found = cls(
            lab=data["lab"],
            run=data["run"],
            declaration=Declaration.from_json(data["declaration"]),
            programs=dict(map(_program, data["programs"])),
            free=frozenset(map(_free, data["free"])),
            direct_paths=frozenset(map(_path, data["direct_paths"])),
            data=frozenset(str(Digest.parse(text)) for text in data["data"]),
            **{name: data[name] for name in _TERMS},
        )
        if dict(subjects) != dict(found._subjects()):
            raise EvidenceError("the subjects of a countersigned statement are not those of its content")
        listed = {"programs": [entry[0] for entry in data["programs"]]}
        listed |= {name: data[name] for name in ("free", "direct_paths", "data")}
        if any(each != sorted(getattr(found, name)) for name, each in listed.items()):
            raise EvidenceError("a countersigned declaration names something twice, or in another order")
        return found


def in_force(statements: Sequence[Countersigned], steps: int) -> tuple[Countersigned, ...]:
    """Those of a run's statements that count for any of its first steps; the last one counts for the last of these.

    Args:
        statements: in the order of their numbers.
    """
    found, end = [], max(steps, 1) + 1
    for each in reversed(statements):
        if each.since < end:
            found.append(each)
            end = each.since
    return tuple(reversed(found))


def _is_numbered(number: object, since: object, signed: object) -> bool:
    if type(number) is not int or type(since) is not int or not is_time(signed):
        return False
    return min(number, since) > 0 and (since == 1 or number > 1)


def is_time(text: object) -> bool:
    """Whether it is a time in the one form of ``TIME``."""
    try:
        return isinstance(text, str) and datetime.strptime(text, TIME).strftime(TIME) == text
    except ValueError:
        return False


def _program(entry: object) -> tuple[str, Admitted]:
    if not isinstance(entry, list) or len(entry) != 4 or not _is_sha256(entry[0]):
        raise EvidenceError("a countersigned program is malformed")
    digest, flop, most, size = entry
    if not all(type(number) is int and number >= 0 for number in (flop, most, size)):
        raise EvidenceError("a countersigned program's FLOP or bytes are not counts")
    return digest, Admitted(flop=flop, most_flop=most, bytes=size)


def _free(name: object) -> str:
    if not isinstance(name, str) or not (is_hyper_name(name) or is_state_name(name) or _is_sha256(name)):
        raise EvidenceError("what a countersigned declaration leaves free is malformed")
    return name


def _path(name: object) -> str:
    if not isinstance(name, str) or not (is_state_name(name) or _is_sha256(name)):
        raise EvidenceError("a countersigned direct path is malformed")
    return name


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
