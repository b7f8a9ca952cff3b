"""What a lab proposes to run, for the person who is asked to countersign it, and the countersignature itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import canonical
from inspector.inspection.reviewing import read_programs
from monitor.declaration.countersigning import Admitted, Countersigned, declaration_digest
from monitor.declaration.statement import Declaration
from monitor.transcript import Metadata
from monitor.transcript.declared_data import agreement_digest
from monitor.transcript.layout import METADATA, ORDER, SAMPLES
from monitor.transcript.record import Entry

__all__ = ["Proposal", "countersign", "read_proposal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A declaration with the programs that its run holds so far; nothing of it is verified.

    Attributes:
        data: what the metadata commit to; empty where a countersigned statement is shown.
        signer: id of the key that is said to have signed it; None where nobody has.
    """

    lab: str
    declaration: Declaration
    programs: Mapping[str, Admitted]
    data: Mapping[str, str]
    signer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "digest": str(declaration_digest(self.declaration)),
            "lab": self.lab,
            "declaration": self.declaration.to_json(),
            "state_bytes": self.declaration.byte_count,
            "programs": [{"program": digest, **asdict(cost)} for digest, cost in self.programs.items()],
            "data": dict(self.data),
            "signer": self.signer,
        }


def read_proposal(path: Path) -> Proposal:
    """Read the declaration of a run folder, or a countersigned one from a file.

    Raises:
        CallerError: it cannot be read.
        EvidenceError: it is malformed.
    """
    if not path.is_dir():
        signed, signer = Countersigned.read(_content(path, limits.COUNTERSIGNED_BYTES))
        return Proposal(
            lab=signed.lab, declaration=signed.declaration, programs=signed.programs, data={}, signer=signer
        )
    content = _content(path / METADATA, limits.METADATA_BYTES)
    metadata = Metadata.from_json(canonical.decode(content, most=limits.METADATA_BYTES))
    programs = {digest: Admitted.of(program) for digest, program in sorted(read_programs(path).items())}
    return Proposal(lab=metadata.lab, declaration=metadata.task, programs=programs, data=metadata.data)


def countersign(
    run: Path, *, free: Sequence[str] = (), direct_paths: Sequence[str] = (), with_data: bool = False
) -> Countersigned:
    """What an inspectorate signs that agrees to a run's declaration and to every program that it holds so far.

    Args:
        free, direct_paths: as in ``Countersigned``.
        with_data: it agrees to the run's own samples and their order.

    Raises:
        CallerError: it is no run folder, or nothing of the kind can be agreed to.
    """
    if not run.is_dir():
        raise CallerError(f"there is no run folder {run}")
    proposal = read_proposal(run)
    data: set[str] = set()
    if with_data:
        files = {path: Entry.of(_content(run / path, limits.SAMPLES_BYTES)).sha256 for path in (SAMPLES, ORDER)}
        data.add(agreement_digest(files))
    return Countersigned(
        lab=proposal.lab,
        declaration=proposal.declaration,
        programs=proposal.programs,
        free=frozenset(free),
        direct_paths=frozenset(direct_paths),
        data=frozenset(data),
    )


def _content(path: Path, most: limits.Limit) -> bytes:
    try:
        return limits.read_foreign(path, most)
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
