"""How much of what chips signed could have been anything, and how much of that an inspection lets pass.

Slack is compared with what was declared, by FLOP, by bytes and by the time that either takes the chip: by FLOP alone a
step would bind nothing that is written as sums. It has a limit for each drawn chip by itself, over all runs that the
chip served; so it has the same one for all of them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from firmware_sim import NO_WORK, TICK, Roofline, Work
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.document import Amount, ChipEvidence, ChipLedger, Counts, LabLedger, Ledger
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from monitor.declaration.statement import MOST_SLACK, Declaration
from monitor.replay.ledger import SLACK, Book, Kind, total

__all__ = ["EXCUSED_BOOTS", "judge_slack", "limit_of", "share_text", "slack_text", "untold_flop"]

EXCUSED_BOOTS = 2
"""Boots of a lab whose repeats count against no limit, over all its runs and inspections."""
_WORDS = {
    Kind.DEAD: "operators whose results are not used for anything that a step commits or reads",
    Kind.REPEATS: "steps that were repeated after boots",
    Kind.BACK: "steps that were repeated from further back than the log explains",
    Kind.OUTSIDE: "operators outside programs",
    Kind.BEHIND: "operators after the last step, which no step declares",
    Kind.CUTS: "parts of steps at power cuts",
    Kind.UNEXPLAINED: "work that nothing explains",
}
_REPORTED = (Kind.DEAD, Kind.OUTSIDE)
"""The kinds of slack of which steps tell, so that it is known already."""


@dataclass(frozen=True, slots=True)
class _Ledger:
    """What was declared, and work of each kind; of several runs also that of each, by id."""

    declared: Counts
    kinds: Mapping[Kind, Counts]
    slack: Counts
    runs: Mapping[str, _Ledger] = field(default_factory=dict)

    @classmethod
    def of(cls, ledgers: Sequence[_Ledger]) -> _Ledger:
        """Several chips' ledgers, or what they say of one run, together."""
        runs = sorted({run for each in ledgers for run in each.runs})
        return cls(
            _added([each.declared for each in ledgers]),
            {kind: _added([each.kinds[kind] for each in ledgers]) for kind in Kind},
            _added([each.slack for each in ledgers]),
            {run: cls.of([each.runs[run] for each in ledgers if run in each.runs]) for run in runs},
        )

    def to_json(self) -> Ledger:
        """JSON-able values; each kind, and the slack, has its share, the largest of three, None of nothing."""
        found: Ledger = {
            "declared": self.declared,
            "kinds": {kind.value: {**counts, "share": self._share(counts)} for kind, counts in self.kinds.items()},
            "slack": {**self.slack, "share": self._share(self.slack)},
        }
        if self.runs:
            found["runs"] = {run: each.to_json() for run, each in self.runs.items()}
        return found

    def _share(self, amount: Counts) -> float | None:
        pairs = [(amount[count], self.declared[count]) for count in ("flop", "moved", "busy_us")]
        if any(part and not whole for part, whole in pairs[:2]):
            return None
        return max((part / whole for part, whole in pairs if whole), default=0.0)


def judge_slack(
    reports: Sequence[ChipReport],
    transcripts: Sequence[Transcript],
    trust: Trust,
    findings: Findings,
    excused: Mapping[str, Sequence[str]],
    *,
    blamed: Collection[str] = (),
) -> dict[str, LabLedger]:
    """Hold each drawn chip's slack against its limit, and put its ledger, for the evidence, into its report.

    Args:
        excused: by lab, ids of the runs whose boots were excused at earlier inspections, each as often as that was.
        blamed: labs that something was found against already, so that their slack leaves nothing open.

    Returns:
        The same by lab: ``declared``, ``kinds``, ``slack``, ``runs``, ``chips`` (how many were drawn), and ``excused``,
        as in the argument.
    """
    runs = {item.run.metadata.run_id: item for item in transcripts}
    labs: dict[str, list[_Sheet]] = {}
    for report in reports:
        if report.books is not None and report.rates is not None:
            sheet = _Sheet(report, report.books, report.rates, runs, trust)
            labs.setdefault(report.lab, []).append(sheet)
    by_lab: dict[str, LabLedger] = {}
    for lab, sheets in sorted(labs.items()):
        granted = _granted(sheets, excused.get(lab, ()))
        for sheet in sheets:
            sheet.report.ledger = sheet.to_json(granted)
            if lab not in blamed and not sheet.fits(granted):
                findings.doubt(sheet.complaint(granted), **sheet.report.where)
        by_lab[lab] = {
            **_Ledger.of([sheet.ledger for sheet in sheets]).to_json(),
            "chips": len(sheets),
            "excused": sorted(run.hex() for run in granted.elements()),
        }
    return by_lab


def _granted(sheets: Sequence[_Sheet], before: Sequence[str]) -> Counter[bytes]:
    """Which runs' boots are excused: those that were before, and others where that lets a chip pass."""
    granted = Counter(bytes.fromhex(run) for run in before)
    for _ in range(EXCUSED_BOOTS - granted.total()):
        short = [sheet for sheet in sheets if not sheet.fits(granted)]
        gains = Counter[bytes]()
        for sheet in short:
            for run in sheet.books:
                gains[run] += _size(sheet.excuse(granted + Counter([run]))) - _size(sheet.excuse(granted))
        if not any(gains.values()):
            break
        granted[max(sorted(gains), key=lambda run: gains[run])] += 1
    old = Counter(bytes.fromhex(run) for run in before)
    helps = any(sheet.fits(granted) and not sheet.fits(old) for sheet in sheets)
    return granted if helps else old


def _size(work: Work) -> int:
    return work.flop + work.moved


class _Sheet:
    """One chip's ledger and its limit."""

    def __init__(
        self,
        report: ChipReport,
        books: Mapping[bytes, Book],
        rates: Roofline,
        runs: Mapping[bytes, Transcript],
        trust: Trust,
    ) -> None:
        self.report, self.books, self._rates = report, books, rates
        known = {run: runs[run].needs(report.chip) for run in books if run in runs and _serves(runs[run], report.chip)}
        self._excused = {run: needs.excused(rates) for run, needs in known.items()}
        declared = {run: item.run.declared for run, item in runs.items()}
        self._limits = {run: limit_of(declared.get(run), trust) for run in books}
        self.measure = total(book.measure for book in books.values())
        self.slack = total(book.slack for book in books.values())

    def excuse(self, granted: Counter[bytes]) -> Work:
        """What of the slack counts against no limit."""
        return total(
            each
            for run, times in granted.items()
            if run in self.books
            for each in self.books[run].largest(self._excused.get(run))[:times]
        )

    def _allowed(self, count: str) -> Fraction:
        return sum(
            (self._limits[run] * getattr(book.measure, count) for run, book in self.books.items()), start=Fraction(0)
        )

    def fits(self, granted: Counter[bytes]) -> bool:
        """Whether the slack stays below its limit."""
        rest = self.slack.left(self.excuse(granted))
        return all(getattr(rest, count) <= self._allowed(count) for count in ("flop", "moved"))

    @property
    def limit(self) -> Fraction:
        """The limit as a share of what was declared."""
        shares = [
            self._allowed(count) / whole for count in ("flop", "moved") if (whole := getattr(self.measure, count))
        ]
        return min(shares, default=min(self._limits.values(), default=MOST_SLACK))

    @property
    def ledger(self) -> _Ledger:
        """What the chip says, over all its runs and by each."""
        by_run = {run.hex(): self._ledger(book.counts, book) for run, book in sorted(self.books.items())}
        counts = {kind: total(book.counts[kind] for book in self.books.values()) for kind in Kind}
        return replace(self._ledger(counts, self), runs=by_run)

    def to_json(self, granted: Counter[bytes]) -> ChipLedger:
        """JSON-able values."""
        found = self.ledger.to_json()
        found.setdefault("runs", {})
        return {**found, "limit": float(self.limit), "excused": self._counts(self.excuse(granted))}

    def _ledger(self, counts: Mapping[Kind, Work], of: Book | _Sheet) -> _Ledger:
        kinds = {kind: self._counts(work) for kind, work in counts.items()}
        return _Ledger(self._counts(of.measure), kinds, self._counts(of.slack))

    def _counts(self, work: Work) -> Counts:
        busy = self._rates.time(work) * 1_000_000 // TICK
        return {"calls": work.calls, "flop": work.flop, "moved": work.moved, "busy_us": busy}

    def complaint(self, granted: Counter[bytes]) -> str:
        """Why nothing is concluded."""
        ledger = self.report.ledger
        assert ledger is not None
        text = f"chip {self.report.chip}: {slack_text(ledger)}; at most {share_text(float(self.limit))} is allowed"
        excuse = self.excuse(granted)
        return text + (f", in addition to {excuse} of what two boots may repeat" if excuse != NO_WORK else "")


def _serves(item: Transcript, chip: str) -> bool:
    return chip in item.run.metadata.chips and item.execution.works is not None


def limit_of(run: Declaration | None, trust: Trust) -> Fraction:
    """The share of a run's declared work that its slack may have: what is agreed, or else 5 %.

    A declaration counts once an inspectorate that the trust file lists has countersigned it, so that it may say more.
    """
    declared = None if run is None else run.maximum_slack
    agreed = MOST_SLACK if declared is None else declared
    return agreed if trust.maximum_slack is None else min(agreed, trust.maximum_slack)


def _added(amounts: Sequence[Counts]) -> Counts:
    return {
        "calls": sum(each["calls"] for each in amounts),
        "flop": sum(each["flop"] for each in amounts),
        "moved": sum(each["moved"] for each in amounts),
        "busy_us": sum(each["busy_us"] for each in amounts),
    }


def share_text(share: float | None) -> str:
    """A share of what was declared, in words."""
    return "any share" if share is None else f"{share:.3g}" if share < 1e-4 else f"{100 * share:.3g} %"


def amount_text(amount: Amount) -> str:
    """An amount of one kind in words."""
    counts = f"{amount['flop']} FLOP, {amount['moved']} bytes, {amount['busy_us'] / 1e6:.3g} ticks"
    return f"{counts}, {share_text(amount['share'])}"


def slack_text(ledger: Ledger) -> str:
    """What a ledger's slack is, kind by kind, the largest first."""
    kinds = {kind: ledger["kinds"][kind.value] for kind in SLACK if ledger["kinds"][kind.value]["calls"]}
    order = sorted(kinds, key=lambda kind: kinds[kind]["share"] or (kinds[kind]["share"] is None), reverse=True)
    parts = [f"{_WORDS[kind]} ({amount_text(kinds[kind])})" for kind in order]
    whole = amount_text(ledger["slack"])
    return f"{whole} of what was declared, could have been anything: {'; '.join(parts)}"


def untold_flop(item: Transcript, reports: Sequence[ChipEvidence]) -> int:
    """FLOP of a run's slack of which no step tells, by what its drawn chips signed; the others signed as much."""
    whole = found = 0
    parts: dict[str, int] = {}
    layout, chips = item.run.declared.layout, item.run.metadata.chips
    for report in reports:
        if report["ledger"] and report["chip"] in chips:
            parts[report["chip"]], whole = layout.share(chips.index(report["chip"]))
            mine = report["ledger"].get("runs", {}).get(item.run.manifest.run)
            if mine is not None:
                found += sum(mine["kinds"][kind.value]["flop"] for kind in SLACK if kind not in _REPORTED)
    return -(-found * whole // sum(parts.values())) if parts else 0
