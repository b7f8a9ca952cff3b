"""What a lab proposes to run, for the person who is asked to countersign it, and the countersignature itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import canonical, digest_bytes
from inspector.inspection.paths import find_paths
from inspector.inspection.review import Page, kinds_of, pages_of, read_programs
from monitor.declaration.countersignature import TIME, Admitted, Countersigned, declaration_digest
from monitor.transcript import Metadata
from monitor.transcript.data import agreement_digest
from monitor.transcript.layout import METADATA, ORDER, SAMPLES
from monitor.transcript.manifest import Entry

__all__ = ["Proposal", "countersign", "read_proposal", "read_statement"]


_CONSENTS = ("free", "direct_paths", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A declaration with the programs that its run holds so far; nothing of it is verified.

    Attributes:
        terms: as a statement; of a run folder one that agrees to nothing but programs.
        pages: of each program, what it reads, writes and brings; none of a statement.
        data: what the metadata commit to; empty of a statement.
        samples: digest of samples and order that ``declare countersign --data`` agrees to; None where it holds none.
        signer: id of the key that is said to have signed it; None where there is no signature.
    """

    terms: Countersigned
    pages: Sequence[Page] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    samples: str | None = None
    signer: str | None = None

    @property
    def shown(self) -> str:
        """Digest of all that can be agreed to: run, declaration, programs and their costs, and samples."""
        programs = [[digest, *astuple(cost)] for digest, cost in sorted(self.terms.programs.items())]
        parts = [self.terms.run, str(declaration_digest(self.terms.declaration)), programs, self.samples]
        return str(digest_bytes("proposal", canonical.encode(parts)))

    def to_json(self, before: Countersigned | None = None) -> dict[str, object]:
        """Return JSON-able values; of an amendment with what it changes of the statement before."""
        terms = self.terms
        agreed = {name: sorted(getattr(terms, name)) for name in _CONSENTS}
        turn = {"number": terms.number, "since": terms.since, "signed": terms.signed}
        return {
            "shown": self.shown if self.signer is None else None,
            "run_id": terms.run,
            "digest": str(declaration_digest(terms.declaration)),
            "lab": terms.lab,
            "declaration": terms.declaration.to_json(),
            "state_bytes": terms.declaration.byte_count,
            "programs": [{"program": digest, **asdict(cost)} for digest, cost in terms.programs.items()],
            "pages": [page.to_json() for page in self.pages],
            "data": dict(self.data),
            "agreed": None if self.signer is None else {**agreed, **turn},
            "changes": None if before is None else self.changes(before),
            "signer": self.signer,
        }

    def changes(self, before: Countersigned) -> list[str]:
        """What this adds to a statement that was signed before (``+``), and what it takes away (``-``).

        Raises:
            CallerError: that is about another run.
        """
        if before.run != self.terms.run:
            raise CallerError(f"statement {before.number} is about a different run, {before.run[:16]}…")
        names = ("programs", *(_CONSENTS if self.signer is not None else ()))
        pairs = [(name, {*getattr(before, name)}, {*getattr(self.terms, name)}) for name in names]
        added = [f"+ {name} {each}" for name, old, new in pairs for each in sorted(new - old)]
        return added + [f"- {name} {each}" for name, old, new in pairs for each in sorted(old - new)]


def read_proposal(path: Path) -> Proposal:
    """Read the declaration of a run folder, or a countersigned one from a file.

    Raises:
        CallerError: it cannot be read.
        EvidenceError: it is malformed.
    """
    if not path.is_dir():
        signed, signer = read_statement(path)
        return Proposal(terms=signed, signer=signer)
    content = _content(path / METADATA, limits.METADATA_BYTES)
    metadata = Metadata.from_json(canonical.decode(content, most=limits.METADATA_BYTES))
    held, samples = read_programs(path), None
    if metadata.task.recipe is not None:
        files = {name: Entry.of(_content(path / name, limits.SAMPLES_BYTES)).sha256 for name in (SAMPLES, ORDER)}
        samples = agreement_digest(files)
    terms = Countersigned(
        lab=metadata.lab,
        run=metadata.run_id.hex(),
        declaration=metadata.task,
        programs={digest: Admitted.of(program) for digest, program in sorted(held.items())},
        signed=metadata.started,
    )
    pages = pages_of(held, find_paths(held, metadata.task).paths(), kinds_of(metadata.task))
    return Proposal(terms=terms, pages=pages, data=metadata.data, samples=samples)


def read_statement(path: Path) -> tuple[Countersigned, str]:
    """A countersigned statement, and the id of the key that is said to have signed it; as ``read_proposal``."""
    return Countersigned.read(_content(path, limits.COUNTERSIGNED_BYTES))


def countersign(
    run: Path,
    *,
    shown: str,
    now: datetime,
    amends: Countersigned | None = None,
    since: int = 1,
    free: Sequence[str] = (),
    direct_paths: Sequence[str] = (),
    with_data: bool = False,
) -> Countersigned:
    """What an inspectorate signs that agrees to a run's declaration and to every program that it was shown.

    Args:
        shown: digest of what it was shown (``Proposal.shown``).
        now: the inspectorate's clock.
        amends: the statement before, in whose place this one counts from step ``since`` on.
        free, direct_paths: as in ``Countersigned``.
        with_data: it agrees to the run's own samples and their order.

    Raises:
        CallerError: it is no run folder, holds something else by now, or nothing of the kind can be agreed to.
    """
    if not run.is_dir():
        raise CallerError(f"there is no run folder {run}")
    proposal = read_proposal(run)
    if not is_shown(proposal, shown):
        raise CallerError(
            f"the declaration of {run} no longer has the digest {shown!a:.100} that `declare show` printed: run "
            "`declare show` again"
        )
    if with_data and proposal.samples is None:
        raise CallerError(f"{run} declares no samples: each step commits its batch when it is taken")
    if since < 1 or (amends is None and since > 1):
        raise CallerError("a first statement applies from step 1 on, and an amendment from step 1 or a later step on")
    if amends is not None:
        proposal.changes(amends)
    return replace(
        proposal.terms,
        free=frozenset(free),
        direct_paths=frozenset(direct_paths),
        data=frozenset({proposal.samples} if with_data and proposal.samples is not None else ()),
        number=1 if amends is None else amends.number + 1,
        since=since,
        signed=now.strftime(TIME),
    )


def is_shown(proposal: Proposal, shown: str) -> bool:
    """Whether a proposal is what somebody was shown."""
    return proposal.shown == shown


def _content(path: Path, most: limits.Limit) -> bytes:
    try:
        return limits.read_file(path, most)
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
