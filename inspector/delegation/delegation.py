"""Refereed delegation: the result of a task is right if one of its providers is honest (Arun et al. 2025, Verde).

Each provider gets the same task, which is signed and holds no Python. Those that finish it commit to their runs. If
their claims differ, a tournament says whose prevails, and names each other one's false step. The client then fetches
the final state of that claim, block by block with proofs. It executes one operator a game, and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from threading import Event
from typing import Any

from torch import Tensor

from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.delegation.audit import Audit, audit
from inspector.delegation.errand import Carrier, Errand, Report, checked_state, root_of
from inspector.delegation.evidence import collect
from inspector.dispute.arena import play_tournament
from inspector.dispute.claim import Claim
from inspector.dispute.game import Party, Terms
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.wire.messages import Silence
from inspector.wire.witness import ByWitness, Known
from monitor.transcript.orders import OrderFolder

__all__ = ["Delegated", "Delegation"]

_WORKERS = 32
"""Providers that are asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegated:
    """What came of a task.

    Attributes:
        verdict: ACCEPT: the result is that of a claim that another provider shares, or has lost against by its own
            signature, or of which the client ran steps again. INCONCLUSIVE: nothing checked it, or there is no result.
            REJECT: all claims are false.
        state: the result, the final state under ``kind/name``; None where no claim prevails.
        games: evidence of the tournament; empty where none was played.
        audit: evidence of a false step that the client has run again (``evidence``); empty where none was found.
    """

    verdict: Verdict
    state: dict[str, Tensor] | None
    games: bytes
    audit: bytes = b""


_NOTHING: Mapping[str, Any] = {"state": None, "steps": None, "guilty": [], "absent": [], "losses": []}
"""What a tournament finds that was not played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """Whose claim prevails, how it was checked and in words, what the tournament found, and its evidence."""

    prevails: list[Party] = field(default_factory=list)
    outcome: Outcome = Outcome.INCONCLUSIVE
    texts: list[str] = field(default_factory=list)
    found: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    games: bytes = b""

    def after(self, audited: Audit, party: Party) -> _Settled:
        """The same once steps of a claim that prevails were run again."""
        if audited.wrong is None:
            return replace(self, outcome=Outcome.ACCEPT, texts=[*self.texts, audited.text(party.name)])
        names, text = [each.name for each in self.prevails], audited.text(party.name)
        losses = [{"party": name, "kind": "guilty", "step": audited.wrong, "text": text} for name in names]
        found = {**self.found, "guilty": [*self.found["guilty"], *names], "losses": [*self.found["losses"], *losses]}
        return replace(self, outcome=Outcome.REJECT, texts=[*self.texts, text], found=found, prevails=[])


@dataclass(slots=True, kw_only=True)
class Delegation:
    """A task and the providers to which it goes.

    Args:
        parties: providers, each with the one who carries files to it.
        trust: names their keys; all else that is agreed is the task.
        key: the client's, which signed the task.
        idle: seconds without a new step after which a provider counts as absent.
        share: of the steps of the claim that prevails, which the client runs again; 0 for none.
        witness: carries the questions of games to the providers that accept it.
    """

    order: OrderFolder
    parties: Sequence[tuple[Party, Carrier]]
    trust: Trust
    key: SigningKey
    seconds: int
    idle: int
    share: float = 0.0
    witness: Known | None = None
    unwitnessed: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def run(self, report: Report, fetched: Callable[[int], None] = lambda _: None) -> Delegated:
        """Have the task done, settle what the providers disagree about, and fetch the result.

        Args:
            fetched: called with the bytes of each tensor of the result that has come.
        """
        ready = self._carried(report)
        settled = self._alone(ready[0]) if len(ready) == 1 else self._refereed(ready) if ready else _Settled()
        state, source = None, None
        audited: Audit | None = None
        for party in settled.prevails:
            try:
                if self.share:
                    audited = audit(self._claim(party), self.order, self.share, fetched)
                    settled = settled.after(audited, party)
                if audited is not None and audited.wrong is not None:
                    break
                state, source = self._fetched(party, settled.found["state"], fetched), party.name
                break
            except ChipwitnessError as error:
                settled.texts.append(f"{party.name} does not hand over its result: {error}")
        shown = b""
        if audited is not None and audited.wrong is not None:
            guilty = [party for party, _ in self.parties if party.name in settled.found["guilty"]]
            shown = collect(guilty, self.order.order, self.order.digest, audited.wrong, self.key, self.seconds)
        verdict = self._verdict(settled, source, audited)
        return Delegated(verdict=verdict, state=state, games=settled.games, audit=shown)

    def _verdict(self, settled: _Settled, source: str | None, audited: Audit | None) -> Verdict:
        """The verdict, where the result came from a provider of that name, or from none."""
        found, texts, outcome = settled.found, list(settled.texts), settled.outcome
        if source is None:
            outcome = outcome if outcome is Outcome.REJECT else Outcome.INCONCLUSIVE
            texts.insert(0, "there is no result")
        texts += [f"{name} did not do the task: {why}" for name, why in self.lost.items()]
        if self.unwitnessed and self.witness is not None:
            names = ", ".join(self.unwitnessed)
            texts.append(f"{names}: asked without the witness {self.witness.name}, which only the others accept")
        undone = [{"party": name, "kind": "not done", "text": why} for name, why in self.lost.items()]
        evidence: dict[str, Any] = {
            "task": self.order.digest,
            "result": source,
            "state": None if source is None else found["state"],
            "steps": None if source is None else found["steps"],
            "prevails": [party.name for party in settled.prevails],
            "guilty": found["guilty"],
            "absent": found["absent"],
            "not_done": sorted(self.lost),
            "losses": [*found["losses"], *undone],
            "audited": [] if audited is None else list(audited.steps),
            "found": None if audited is None else audited.found(1),
        }
        reasons = tuple(Reason(guard="delegation", text=text) for text in texts)
        return Verdict(outcome=outcome, reasons=reasons, evidence=evidence)

    def _errand(self, party: Party, carrier: Carrier) -> Errand:
        return Errand(
            party=party, carrier=carrier, order=self.order, key=self.key, seconds=self.seconds, idle=self.idle
        )

    def _carried(self, report: Report) -> list[Party]:
        """Providers that have finished the task, in their order."""

        def one(errand: Errand) -> str:
            try:
                errand.carry(report, ended)
            except Silence as silence:
                return f"it is absent: {silence}"
            except EvidenceError as error:
                return str(error)
            return ""

        ended, errands = Event(), [self._errand(*pair) for pair in self.parties]
        with ThreadPoolExecutor(min(len(self.parties), _WORKERS)) as pool:
            try:
                why = list(pool.map(one, errands))
            finally:
                ended.set()  # where this is interrupted, too
        self.lost |= {errand.party.name: text for errand, text in zip(errands, why, strict=True) if text}
        return [self._witnessed(errand) for errand, text in zip(errands, why, strict=True) if not text]

    def _witnessed(self, errand: Errand) -> Party:
        """A provider as games reach it: by the witness, if it accepts that one."""
        party = errand.party
        if self.witness is None:
            return party
        if self.witness.key.key_id not in errand.witnesses:
            self.unwitnessed.append(party.name)
            return party
        return replace(party, transport=ByWitness(self.witness, party.transport))

    def _refereed(self, ready: list[Party]) -> _Settled:
        """Whose claim prevails, by a tournament."""
        terms, workers = Terms(seconds=self.seconds, task=self.order.digest), min(len(ready), _WORKERS)
        verdict, games = play_tournament(ready, self.trust, self.key, terms, now=datetime.now(UTC), workers=workers)
        found = verdict.evidence
        prevails = [party for party in ready if party.name in found["prevails"]]
        outcome = Outcome.INCONCLUSIVE
        if len(prevails) > 1 or (prevails and found["guilty"]):
            outcome = Outcome.ACCEPT
        elif not prevails and not found["undecided"] and found["guilty"]:
            outcome = Outcome.REJECT
        texts = [reason.text for reason in verdict.reasons]
        return _Settled(prevails=prevails, outcome=outcome, texts=texts, found=found, games=games)

    def _alone(self, party: Party) -> _Settled:
        """One provider's claim, which nothing checks."""
        try:
            claim = self._claim(party)
            found = {**_NOTHING, "state": str(claim.leaf(claim.last).state.root), "steps": claim.last}
        except ChipwitnessError as error:
            self.lost[party.name] = str(error)
            return _Settled()
        text = f"only {party.name} did the task, so nothing checks its result"
        return _Settled(prevails=[party], texts=[text], found=found)

    def _claim(self, party: Party) -> Claim:
        """A finished claim about this task; EvidenceError where it is none."""
        carrier = next(carrier for each, carrier in self.parties if each.name == party.name)
        claim = self._errand(party, carrier).claim()
        if claim.declared != self.order.order.declaration or not claim.finished:
            raise EvidenceError("the training that it claims is not the ordered one, or is unfinished")
        return claim

    def _fetched(self, party: Party, root: str, fetched: Callable[[int], None]) -> dict[str, Tensor]:
        claim = self._claim(party)
        changed = checked_state(claim, claim.last, fetched, self.order.changed())
        state = {**self.order.state(), **changed}
        if root_of(claim.declared, state) != root:
            raise EvidenceError("its state is not that of the claim that prevails, or differs where no step may write")
        return state
