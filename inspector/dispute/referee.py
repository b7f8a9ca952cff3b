"""The referee between two parties that ran one task and disagree about the result (Arun et al. 2025, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import VerifyingKey
from inspector.dispute.claim import Claim, batch_most
from inspector.dispute.following import Follower, Recorded, rule_on_step
from inspector.dispute.messages import Absent, CheckedProver, Failure, Traffic, absence
from inspector.dispute.operators import settle_operators
from inspector.dispute.provider import Remote
from inspector.dispute.ruling import INDEPENDENT, Ruling, compare
from inspector.dispute.subject import Disputed, agreed_by, rule_on_tasks, undecided
from inspector.inspection.agreement import Agreement
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.wire.messages import Silence
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["PARTIES", "Referee", "Seat", "open_claim"]

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
                      alone was countersigned, the other loses; so do data that were not agreed, where the other's were.
        results       each party commits to what all its steps led to (``results``). The first result about which the
                      parties differ is searched for, up to the last step of the shorter run. If they agree so far, a
                      finished claim prevails over an unfinished one.
        starts        a difference in step 0: whose initial state is not what the seed gives, or was agreed, loses.
        step          program, batch, FLOP and numbers that a party declares, against what was agreed.
        operators     the first operator about which the parties differ, bisected, opened and decided: its
                      specification by the program, an input by what both agreed on before, an output by executing it:
                      the first tile that differs, where the operator has tiles.
        following     under ``rounded`` numerics both results of that operator may be lawful. Each party then takes the
                      other's steps under the other's rounding logs, and names the first that leads elsewhere, or of
                      which program, batch or numbers are not those of its own run. That step is decided
                      (``following``). A party that holds no copy of the other's run names none, and confirms none. Who
                      objects is held to the objection.

    Guilt rests on a party's own signature: a signed answer that contradicts what it signed before, or what was agreed,
    and a signed refusal of a question that this law asks; whether it follows another's run is a party's own choice. Who
    lets no signed answer come in time loses as absent, which is the word of the referee or a witness, and no guilt.
    Where both are absent, or both acted within the rules (what no agreement names), nothing is decided. What the law
    asks follows from the answers, so anyone who holds them plays the same game again. A head whose log holds other
    results than its party committed to, at a step that the referee does not open, is no part of the game; head and
    commitment are then two signed statements that contradict each other, for everyone who holds the run.

    Attributes:
        branching: into how many parts each round of the search divides the steps.
        traffic: rounds, bytes and places of the search.
        name: of the referee, in the words about who is absent.
        guilty, absent, unfinished, prevails: names of the parties that have lost, or are unfinished, and of those whose
            claim prevails, once it has ruled.
    """

    seats: Sequence[Seat]
    trust: Trust | None
    traffic: Traffic = field(default_factory=Traffic)
    name: str = "the referee"
    branching: int = 2
    guilty: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    prevails: tuple[str, ...] = ()
    _claims: list[Claim] = field(default_factory=list)
    _task: Disputed | None = None
    _step: int | None = None

    def play(self) -> Verdict:
        """The verdict; its evidence holds step, operator, guilty, absent, rounds, bytes, operators_executed, search.

        ACCEPT: they agree. REJECT: at least one has lost, and is named. INCONCLUSIVE: nothing is decided.
        """
        state: _State | Ruling = self.begin
        try:
            while not isinstance(state, Ruling):
                state = state()
        except Absent as absent:
            return self._lost_by_absence(absent)
        except Failure as failure:
            state = Ruling(guilty=(failure.party,), operator=None, text=str(failure), case="no valid answer")
        outcome = Outcome.REJECT if state.guilty else Outcome.INCONCLUSIVE
        return self._verdict(Outcome.ACCEPT if state.case == _AGREED else outcome, state)

    def begin(self) -> _State | Ruling:
        """What the law asks first; a law about less than whole runs begins otherwise."""
        self._claims = [open_claim(seat, self.traffic) for seat in self.seats]
        first, second = self._claims
        ruling = rule_on_tasks((first, second), self.trust)
        agreed = None if ruling is not None else agreed_by(first, self.trust)
        if ruling is not None or isinstance(agreed, Ruling):
            ruling = cast(Ruling, ruling or agreed)
            self._step = 0 if ruling.guilty else None
            return ruling
        order = None if self.trust is None else self.trust.order
        self._task = Disputed(first, second, cast(Agreement, agreed), order)
        return self._results

    def _results(self) -> _State | Ruling:
        shared = min(claim.last for claim in self._claims) + 1
        if shared > 0 and not self._asked([shared])[0]:
            return lambda: self._search(shared)
        if shared > 0:
            self._leaves(shared - 1)
        return self._agree(shared - 1)

    def _agree(self, last: int) -> Ruling:
        """Both have the same results so far: of runs that end there, or of one that goes on."""
        longest = max(claim.last for claim in self._claims)
        ended = [claim.name for claim in self._claims if claim.finished]
        self.unfinished = tuple(claim.name for claim in self._claims if not claim.finished)
        if not self.unfinished and longest == last:
            self.prevails = tuple(ended)
            text = "the two labs agree on every compared state"
            return Ruling(guilty=(), operator=None, text=text, case=_AGREED)
        goes = {claim.name: claim.last for claim in self._claims}
        ends = [f"{name} {'is finished' if name in ended else 'is unfinished'} at {at}" for name, at in goes.items()]
        text = f"the labs agree up to step {last} ({', '.join(ends)})"
        if last < 0:
            text = f"{' and '.join(name for name, at in goes.items() if at < 0)} has committed to no whole step"
        if len(ended) == 1 and goes[ended[0]] == longest:
            self.prevails = tuple(ended)
            return undecided(
                f"{text}: the claim of {ended[0]} prevails, but nothing checks its later steps", "unfinished"
            )
        if ended:
            return undecided(
                f"{text}: no declaration says how many steps were ordered, so compare that with the order", "length"
            )
        return undecided(f"{text}: neither has a result yet", "unfinished")

    def _search(self, size: int) -> _State | Ruling:
        """The first result about which they differ, among so many."""
        same, different = 0, size
        while different - same > 1:
            width = different - same
            places = sorted({same + width * part // self.branching for part in range(1, self.branching)} - {same})
            agree = self._asked(places)
            count = agree.index(False) if False in agree else len(places)
            same, different = [same, *places][count], [*places, different][count]
        self._step = same
        leaves = self._leaves(same)
        if same:
            self._leaves(same - 1)
            return self._declared
        right = {
            claim.name: self._disputed.starts_right(leaf) for claim, leaf in zip(self._claims, leaves, strict=True)
        }
        return compare(right, "initialisation", "initial state")

    def _declared(self) -> _State | Ruling:
        leaves = {claim.name: claim.leaf(self._at) for claim in self._claims}
        return self._disputed.examine(self._at, leaves) or self._operators

    def _operators(self) -> _State | Ruling:
        parties = cast(tuple[CheckedProver, CheckedProver], tuple(claim.party for claim in self._claims))
        try:
            ruling = settle_operators(parties, self._disputed.at(self._at), self.traffic)
        except Failure:
            raise
        except EvidenceError as error:
            return Ruling(guilty=(), operator=None, text=str(error), case="not opened")
        return self._follow if ruling.case == INDEPENDENT else ruling

    def _follow(self) -> Ruling:
        """Each party's claim under its own rounding logs, as the other one follows it."""
        confirmed: list[Claim] = []
        rulings: list[Ruling] = []
        texts, steps = [], []
        for recorder, follower in (self._claims, self._claims[::-1]):
            try:
                found = self._objected(recorder, follower)
            except _Unfollowed as error:
                texts.append(str(error))
                continue
            if found is None:
                confirmed.append(recorder)
                texts.append(f"{follower.name} confirms all steps of {recorder.name} under its rounding logs")
            else:
                steps.append(found[0])
                rulings.append(found[1])
        guilty = {name for ruling in rulings for name in ruling.guilty}
        if rulings:
            first = next((n for n, ruling in enumerate(rulings) if ruling.guilty), 0)
            self._step = steps[first]
            texts = [ruling.text for ruling in rulings]
            names = tuple(claim.name for claim in self._claims if claim.name in guilty)
            return replace(rulings[first], guilty=names, text="; ".join(texts))
        self.prevails = tuple(claim.name for claim in confirmed if claim.finished)
        is_agreed = len(self.prevails) == len(self._claims)
        text = f"the labs recorded independently from step {self._step} on: {'; '.join(texts)}"
        self._step = None
        return Ruling(guilty=(), operator=None, text=text, case=_AGREED if is_agreed else INDEPENDENT)

    def _objected(self, recorder: Claim, follower: Claim) -> tuple[int, Ruling] | None:
        """The step of a claim to which its follower objects, and what decides it; None where it confirms the claim."""
        self.traffic.rounds += 1
        remote = follower.following(recorder)
        try:
            objection = remote.objection()
        except (EvidenceError, LookupError, TypeError, ValueError) as error:
            text = (
                f"{follower.name} does not say where the run of {recorder.name} leads under its rounding logs: {error}"
            )
            raise _Unfollowed(text) from None
        if objection is None:
            return None
        step, what, stated = objection
        if not 0 < step <= recorder.last or (what == "task" and step > follower.last):
            raise Failure(
                follower.name,
                f"it objects to step {step} of {recorder.last}, which is not a step that it can object to",
            )
        if what == "task":
            ruling = self._disputed.examine(step, {claim.name: claim.leaf(step) for claim in self._claims})
            return step, ruling or undecided("its program, batch and numbers are in order", "objection")
        before, leaf = recorder.leaf(step - 1), recorder.leaf(step)
        program = recorder.program(execution_of(leaf).program)
        remote.most["batch"] = batch_most(program)
        known = {step - 1: before}
        with suppress(EvidenceError):  # on which ``rule_on_step`` rules
            known[step] = Leaf.decode(stated, recorder.layout) if stated else leaf
        party = Follower(follower.name, remote, known, recorder.layout, self.traffic)
        recorded = Recorded(declared=recorder.declared, leaf=leaf, program=program)
        return step, rule_on_step(recorder.party, party, recorded, stated, self.traffic)

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

    def _asked(self, sizes: Sequence[int]) -> list[bool]:
        """Whether they have the same results so far, for so many first ones each."""
        self.traffic.rounds += 1
        one, other = (claim.results.roots(sizes) for claim in self._claims)
        agree = [mine == theirs for mine, theirs in zip(one, other, strict=True)]
        last = max(claim.last for claim in self._claims)
        self.traffic.search += [("step", size - 1, last, same) for size, same in zip(sizes, agree, strict=True)]
        return agree

    def _lost_by_absence(self, absent: Absent) -> Verdict:
        """The party has lost, unless the other one is absent too."""
        lost = {absent.party: absent.silence}
        for seat in self.seats:
            if seat.name != absent.party:
                try:
                    Remote(seat.ask).claim()
                except Silence as silence:
                    lost[seat.name] = silence
                except (EvidenceError, LookupError, TypeError, ValueError):
                    pass  # it answers, whatever that is worth
        text = "; ".join(absence(name, silence, self.name) for name, silence in lost.items())
        outcome = Outcome.REJECT if len(lost) == 1 else Outcome.INCONCLUSIVE
        self.absent = tuple(lost)
        return self._verdict(outcome, Ruling(guilty=(), operator=None, text=text, case="absent"))

    def _verdict(self, outcome: Outcome, ruling: Ruling) -> Verdict:
        self.guilty = ruling.guilty
        lost = {*self.guilty, *self.absent}
        if lost:
            self.unfinished = ()
            self.prevails = tuple(seat.name for seat in self.seats if seat.name not in lost)
        evidence: dict[str, Any] = {
            "step": self._step,
            "operator": ruling.operator,
            "tile": ruling.tile,
            **{name: ", ".join(getattr(self, name)) or None for name in PARTIES},
            "case": None if ruling.case == _AGREED else ruling.case,
            "rounds": self.traffic.rounds,
            "bytes": self.traffic.bytes,
            "search": [list(each) for each in self.traffic.search],
            "operators_executed": ruling.executed,
        }
        where = {key: evidence[key] for key in ("step", "operator", "tile", "guilty") if evidence[key] is not None}
        prefix = "" if self._step is None else f"step {self._step}: "
        reason = Reason(guard="dispute", text=prefix + ruling.text, where=where)
        return Verdict(outcome=outcome, reasons=(reason,), evidence=evidence)


class _Unfollowed(EvidenceError):
    """A party does not say whether it confirms another's run."""


_AGREED = "agreed"
PARTIES = ("guilty", "absent", "unfinished", "prevails")
"""What a verdict says of parties."""


def open_claim(seat: Seat, traffic: Traffic) -> Claim:
    """What a party claims; Absent or Failure where it does not say so."""
    try:
        return Claim(seat.name, Remote(seat.ask), seat.key, traffic)
    except Silence as silence:
        raise Absent(seat.name, silence) from None
    except (ChipwitnessError, LookupError, TypeError, ValueError) as error:
        raise Failure(seat.name, str(error)) from None
