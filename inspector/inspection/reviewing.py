"""Review of a run's programs: what they compute, and where their batches and constants end up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from inspector.inspection.agreement import agreement_of
from inspector.inspection.execution import NOT_REVIEWED, examine_execution
from inspector.inspection.findings import Findings
from inspector.inspection.guards import Settings
from inspector.inspection.paths import find_paths
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from monitor.declaration.binding import calls_of
from monitor.programs import Facts, Path, direct_paths, facts_of
from monitor.programs.program import Program

__all__ = ["Page", "read_programs", "review", "show"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Summary of a program for the person who agrees to it: digest, numbers, direct paths."""

    digest: str
    facts: Facts
    paths: tuple[Path, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        paths = [path.to_json() for path in self.paths]
        return {"program": self.digest, **self.facts.to_json(), "direct_paths": paths}


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
        raise CallerError(f"{path} holds no program {digest or ''}".rstrip())
    return _pages({each: programs[each] for each in chosen}, direct_paths(programs))


def read_programs(path: FilePath) -> dict[str, Program]:
    """Programs by digest: those of a file, or of a run folder's ``programs``."""
    files = sorted((path / "programs").glob("*.json")) if path.is_dir() else [path]
    try:
        found = [Program.decode(limits.read_foreign(file, limits.PROGRAM_BYTES)) for file in files]
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from None
    return {program.digest: program for program in found}


def review(folder: FilePath, trust: Trust) -> Verdict:
    """Examine the programs of a run under what was agreed; no chip is asked, and nothing is re-executed."""
    findings = Findings(Settings(samples=0, seed=None, devices=()))
    where = {"run": folder.name}
    evidence: dict[str, Any] = {"run": folder.name}
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
    pages = findings.read(lambda: _pages(programs or {}, find_paths(programs or {}, run.declared).paths()), **where)
    evidence["programs"] = [page.to_json() for page in pages or ()]
    kinds = {kind: len(paths) for kind, paths in report.paths.items()}
    text = (
        f"{len(known)} programs, {evidence['flop']} FLOP in {len(leaves) - 1} steps; direct paths: "
        f"{kinds.get('agreed', 0)} agreed, {kinds.get('running_statistics', 0)} into running statistics"
    )
    return _verdict(findings, evidence, text)


def _verdict(findings: Findings, evidence: dict[str, Any], accept: str) -> Verdict:
    if not accept and not findings.found:
        findings.doubt("no step is committed yet, so there is nothing to review")
    scope = "not covered: chips and re-execution; " + "; ".join(NOT_REVIEWED)
    return Verdict.of(findings.found, findings.doubts, evidence, accept=accept, scope=scope)


def _pages(programs: Mapping[str, Program], paths: list[Path]) -> list[Page]:
    pages = []
    for digest, program in programs.items():
        try:
            calls = calls_of(program)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise EvidenceError("a program's call has malformed arguments") from None
        mine = tuple(path for path in paths if path.program == digest)
        pages.append(Page(digest=digest, facts=facts_of(program, calls), paths=mine))
    return pages
