"""Review of a run's programs: what they compute, and where their batches and constants end up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

import torch

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from inspector.inspection.agreement import agreement_of
from inspector.inspection.execution import NOT_REVIEWED, examine_execution
from inspector.inspection.paths import find_paths
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Verdict
from monitor.declaration.binding import calls_of
from monitor.declaration.statement import Declaration
from monitor.programs import Facts, Path, direct_paths, facts_of
from monitor.programs.constants import Constant
from monitor.programs.paths import differentiates
from monitor.programs.program import Program
from monitor.replay.steps import execution_of
from monitor.transcript import STEP, WRITE, Leaf
from monitor.transcript.layout import constants_path

__all__ = ["Page", "kinds_of", "pages_of", "read_programs", "review", "show"]


_LARGE = 64
"""Elements above which a constant is shown by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Summary of a program for the person who agrees to it.

    Attributes:
        kind: training, write, read, evaluation, initialisation; as far as the program alone tells which.
        reads, writes: tensors of the state, ``kind/name``, that it takes, and those that may get another value.
        differentiates: it only computes, and takes a derivative (``monitor.programs.paths.differentiates``).
        constants: of more than 64 elements that differ: number, dtype, elements, SHA-256, and of the values, where the
            bytes are there and numbers, lowest, highest, mean and how many distinct ones.
    """

    digest: str
    kind: str
    facts: Facts
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    constants: tuple[Mapping[str, Any], ...]
    paths: tuple[Path, ...]
    differentiates: bool

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "program": self.digest,
            "kind": self.kind,
            **self.facts.to_json(),
            "reads": list(self.reads),
            "writes": list(self.writes),
            "differentiates": self.differentiates,
            "large_constants": [dict(each) for each in self.constants],
            "direct_paths": [path.to_json() for path in self.paths],
        }


def show(path: FilePath, digest: str | None = None) -> list[Page]:
    """Pages of a program file, or of the programs of a run folder; nothing of the run is verified here.

    Args:
        digest: one program of the run, by the beginning of its digest.

    Raises:
        CallerError: there is no such file or program.
        EvidenceError: a program is malformed.
    """
    programs = read_programs(path)
    chosen = [each for each in sorted(programs) if each.startswith(digest or "")]
    if not chosen:
        raise CallerError(f"{path} does not contain program {digest or ''}".rstrip())
    return pages_of({each: programs[each] for each in chosen}, direct_paths(programs))


def read_programs(path: FilePath) -> dict[str, Program]:
    """Programs by digest: of a file, or of a run folder's ``programs``, with their constants where these are there."""
    files = sorted((path / "programs").glob("*.json")) if path.is_dir() else [path]
    try:
        found = [Program.decode(limits.read_file(file, limits.PROGRAM_BYTES)) for file in files]
        for number, program in enumerate(found):
            apart = path / constants_path(program.digest)
            if program.apart_bytes and apart.is_file():
                found[number] = program.complete(limits.read_file(apart, limits.CONSTANTS_BYTES))
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
    return {program.digest: program for program in found}


def review(folder: FilePath, trust: Trust) -> Verdict:
    """Examine the programs of a run under what was agreed; no chip is asked, and nothing is re-executed."""
    findings = Findings()
    where = {"run": folder.name}
    evidence: dict[str, object] = {"run": folder.name}
    run = findings.read(lambda: open_run(folder, trust), **where)
    leaves = None if run is None else findings.read(lambda: run.load_steps()[0], **where)
    agreed = None if run is None else findings.read(lambda: agreement_of(run, trust), **where)
    if run is None or not leaves or agreed is None:
        return _verdict(findings, evidence, "")
    report = examine_execution(run, leaves, agreed, findings)
    evidence["execution"] = report.to_json()
    evidence["flop"] = sum(leaf.flop for leaf in leaves)
    known = [digest for digest in sorted(report.programs) if digest in agreed.programs]
    programs = findings.read(lambda: {digest: run.program(digest) for digest in known}, **where)
    used_kinds = kinds_of(run.declared, leaves)
    pages = findings.read(
        lambda: pages_of(programs or {}, find_paths(programs or {}, run.declared).paths(), used_kinds), **where
    )
    evidence["declaration"] = run.declared.to_json()
    evidence["programs"] = [page.to_json() for page in pages or ()]
    text = (
        f"{len(known)} programs, {evidence['flop']} FLOP in {len(leaves) - 1} steps; direct paths: "
        f"{len(report.paths.agreed)} agreed, {len(report.paths.running_statistics)} into running statistics"
    )
    return _verdict(findings, evidence, text)


def _verdict(findings: Findings, evidence: dict[str, object], accept: str) -> Verdict:
    if not accept and not findings.found:
        findings.doubt("no step is committed yet, so there is nothing to review")
    scope = "not covered: chips and re-execution; " + "; ".join(NOT_REVIEWED)
    return Verdict.of(findings.found, findings.doubts, evidence, accept=accept, scope=scope)


def kinds_of(declared: Declaration, leaves: Sequence[Leaf] = ()) -> dict[str, set[str]]:
    """What a declaration and the steps say that run each program, of those of which they say something."""
    begun = declared.origin.initialisation
    found = {} if begun is None else {begun.program: {"initialisation"}}
    for leaf in leaves[1:]:
        found.setdefault(execution_of(leaf).program, set()).add(leaf.kind)
    return found


def _kind(program: Program, kinds: Collection[str]) -> str:
    """What a program is for: what steps say that run it, or else as much as it tells by itself."""
    alone = "training" if program.updates else "write" if program.written else "evaluation or read"
    names = {STEP: "training" if program.updates else "step without an optimizer", WRITE: alone.split()[-1]}
    return " and ".join(sorted(names.get(each, each) for each in kinds)) or alone


def pages_of(
    programs: Mapping[str, Program], paths: Sequence[Path], kinds: Mapping[str, Collection[str]] = MappingProxyType({})
) -> list[Page]:
    """Pages of programs, with those of the paths that are theirs; EvidenceError on a malformed one.

    Args:
        kinds: what each is for, where steps say so.
    """
    pages = []
    for digest, program in programs.items():
        try:
            calls, derives = calls_of(program), differentiates(program)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise EvidenceError("a program's call has malformed arguments") from None
        taken = {place["source"].removeprefix("state:") for call in program.calls for place in call["sources"]}
        pages.append(
            Page(
                digest=digest,
                kind=_kind(program, kinds.get(digest, ())),
                facts=facts_of(program, calls),
                reads=tuple(sorted(taken & set(program.commit) - program.unread)),
                writes=tuple(sorted(program.written)),
                differentiates=derives,
                constants=tuple(_large(program.constants)),
                paths=tuple(path for path in paths if path.program == digest),
            )
        )
    return pages


def _large(constants: Sequence[Constant]) -> Iterator[dict[str, object]]:
    for number, each in enumerate(constants):
        if each.elements <= _LARGE or each.is_uniform:
            continue
        row = {"number": number, "dtype": each.dtype, "elements": each.elements, "sha256": each.sha256}
        if each.held is not None and not (values := each.tensor()).is_complex():
            values = values.double()
            numbers = {"min": values.min(), "max": values.max(), "mean": values.mean()}
            row |= {name: float(x) if x.isfinite() else str(float(x)) for name, x in numbers.items()}
            row["distinct"] = len(torch.unique(values))
        yield row
