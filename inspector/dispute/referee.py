"""The referee between two parties that ran one task and disagree about the result (Arun et al. 2025, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import VerifyingKey
from inspector.dispute.claim import Claim
from inspector.dispute.messages import Absent, CheckedProver, Failure, Traffic
from inspector.dispute.operators import Ruling, compare, settle_operators
from inspector.dispute.provider import Remote
from inspector.dispute.subject import Disputed, rule_on_declarations
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.wire.messages import Silence
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["Referee", "Seat"]

_State: TypeAlias = "Callable[[], _State | Ruling]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A party of the game.

    Attributes:
        key: under which it signs its run and its answers.
        ask: brings back the body of its answer to a question, within so many bytes; Silence where it signs none in
            time, EvidenceError where it signs that it gives none.
    """

    name: str
    key: VerifyingKey
    ask: Callable[[str, int], bytes]


@dataclass(slots=True)
class Referee:
    """Asks two parties, and rules. It holds no model, and executes one operator at most.

    Law:
        claims        each party opens the head that it signed, and its declaration. Of two declarations of which one
                      alone was countersigned, the other loses. Otherwise they must be of one task.
        starts        step 0: whose initial state is not what the seed gives, or what was agreed, loses.
        results       equal last claims: the first step that both take from equal states with other results, if any.
                      Else the first difference is bisected, by states alone where the last states differ.
        step          program, batch, FLOP and numbers that a party declares, against what was agreed.
        operators     the first operator about which the parties differ, bisected, opened and decided: its
                      specification by the program, an input by what both agreed on before, an output by executing it.

    Guilt rests on a party's own signature: a signed answer that contradicts what it signed before, or what was agreed,
    and a signed refusal of a question that this law asks. Who lets no signed answer come in time loses as absent, which
    is the referee's word and no guilt. Where both are absent, or both acted within the rules (``rounded`` numerics,
    what no agreement names), nothing is decided. What the law asks follows from the answers, so anyone who holds
    them plays the same game again.

    Attributes:
        traffic: rounds, bytes and places of the search.
        name: of the referee, in the words about who is absent.
        guilty, absent: names of the parties that have lost, once it has ruled.
    """

    seats: Sequence[Seat]
    trust: Trust | None
    traffic: Traffic = field(default_factory=Traffic)
    name: str = "the referee"
    guilty: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    _claims: list[Claim] = field(default_factory=list)
    _task: Disputed | None = None
    _step: int | None = None

    def play(self) -> Verdict:
        """The verdict; its evidence holds step, operator, guilty, absent, rounds, bytes, operators_executed, search.

        ACCEPT: they agree. REJECT: at least one has lost, and is named. INCONCLUSIVE: nothing is decided.

        Raises:
            CallerError: the runs are not of one task, or not both finished.
        """
        state: _State | Ruling = self._open
        try:
            while not isinstance(state, Ruling):
                state = state()
        except Absent as absent:
            return self._lost_by_absence(absent)
        except Failure as failure:
            state = Ruling(guilty=(failure.party,), operator=None, text=str(failure), case="no valid answer")
        outcome = Outcome.REJECT if state.guilty else Outcome.INCONCLUSIVE
        return self._verdict(Outcome.ACCEPT if state.case == _AGREED else outcome, state)

    def _open(self) -> _State | Ruling:
        for seat in self.seats:
            try:
                self._claims.append(Claim(seat.name, Remote(seat.ask), seat.key, self.traffic))
            except Silence as silence:
                raise Absent(seat.name, str(silence)) from None
            except (ChipwitnessError, LookupError, TypeError, ValueError) as error:
                raise Failure(seat.name, str(error)) from None
        outside = rule_on_declarations([claim.name for claim in self._claims], self._claims, self.trust)
        if outside is not None:
            self._step = 0
            return outside
        self._task = Disputed(self._claims[0], self._claims[1], self.trust)
        return self._start

    def _start(self) -> _State | Ruling:
        if self._asked(0, self._same_claim):
            return self._results
        self._step = 0
        right = {claim.name: self._disputed.starts_right(claim.leaf(0)) for claim in self._claims}
        return compare(right, "initialisation", "initial state")

    def _results(self) -> _State | Ruling:
        last = self._disputed.steps
        if not self._asked(last, self._same_claim):
            return self._search
        self._step = self._first_result()
        if self._step is None:
            text = "the two labs agree on every compared state"
            return Ruling(guilty=(), operator=None, text=text, case=_AGREED)
        return self._declared

    def _search(self) -> _State | Ruling:
        """An agreed step followed by a disputed one.

        Where the last states differ, states alone are compared: a lab that also states another loss somewhere before
        would otherwise lead the search to a step in which both compute the same.
        """
        agreed, different = 0, self._disputed.steps
        first, second = self._leaves(different)
        same = self._same_claim if first.state == second.state else _same_state
        while different - agreed > 1:
            middle = (agreed + different) // 2
            if self._asked(middle, same):
                agreed = middle
            else:
                different = middle
        self._step = different
        return self._declared

    def _declared(self) -> _State | Ruling:
        leaves = {claim.name: claim.leaf(self._at) for claim in self._claims}
        return self._disputed.examine(self._at, leaves) or self._operators

    def _operators(self) -> _State | Ruling:
        parties = cast(tuple[CheckedProver, CheckedProver], tuple(claim.party for claim in self._claims))
        try:
            return settle_operators(parties, self._disputed.at(self._at), self.traffic)
        except Failure:
            raise
        except EvidenceError as error:
            return Ruling(guilty=(), operator=None, text=str(error), case="not opened")

    @property
    def _disputed(self) -> Disputed:
        assert self._task is not None
        return self._task

    @property
    def _at(self) -> int:
        assert self._step is not None
        return self._step

    def _leaves(self, step: int) -> list[Leaf]:
        return [claim.leaf(step) for claim in self._claims]

    def _same_claim(self, first: Leaf, second: Leaf) -> bool:
        return self._disputed.claim_of(first) == self._disputed.claim_of(second)

    def _asked(self, step: int, same: Callable[[Leaf, Leaf], bool]) -> bool:
        self.traffic.rounds += 1
        agree = same(*self._leaves(step))
        self.traffic.search.append(("step", step, self._disputed.steps, agree))
        return agree

    def _first_result(self) -> int | None:
        """The first step that both take from equal states, and of which they say otherwise what it computed."""
        one, other = (claim.load_steps()[0][1:] for claim in self._claims)
        for pair in zip(one, other, strict=True):
            results = [(leaf.state, leaf.loss, execution_of(leaf).reads) for leaf in pair]
            if results[0] != results[1]:
                return pair[0].step
        return None

    def _lost_by_absence(self, absent: Absent) -> Verdict:
        """The party has lost, unless the other one is absent too."""
        lost = {absent.party: absent.why}
        for seat in self.seats:
            if seat.name != absent.party:
                try:
                    Remote(seat.ask).claim()
                except Silence as silence:
                    lost[seat.name] = str(silence)
                except (EvidenceError, LookupError, TypeError, ValueError):
                    pass  # it answers, whatever that is worth
        text = "; ".join(f"{name} is absent, says {self.name}: {why}" for name, why in lost.items())
        outcome = Outcome.REJECT if len(lost) == 1 else Outcome.INCONCLUSIVE
        self.absent = tuple(lost)
        return self._verdict(outcome, Ruling(guilty=(), operator=None, text=text, case="absent"))

    def _verdict(self, outcome: Outcome, ruling: Ruling) -> Verdict:
        agreed = ruling.case == _AGREED
        self.guilty = ruling.guilty
        evidence: dict[str, Any] = {
            "step": self._step,
            "operator": ruling.operator,
            "guilty": ", ".join(ruling.guilty) or None,
            "absent": ", ".join(self.absent) or None,
            "case": None if agreed else ruling.case,
            "rounds": self.traffic.rounds,
            "bytes": self.traffic.bytes,
            "search": [list(each) for each in self.traffic.search],
            "operators_executed": ruling.executed,
        }
        where = {key: evidence[key] for key in ("step", "operator", "guilty") if evidence[key] is not None}
        prefix = "" if self._step is None else f"step {self._step}: "
        reason = Reason(guard="dispute", text=prefix + ruling.text, where=where)
        return Verdict(outcome=outcome, reasons=(reason,), evidence=evidence)


_AGREED = "agreed"


def _same_state(first: Leaf, second: Leaf) -> bool:
    return first.state == second.state
