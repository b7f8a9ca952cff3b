"""A tournament between n parties that say they did one task: whose claim prevails, and why each other one lost.

Law:
    opening       each party, asked alone, opens its claim: head, declaration, data, and commitment to its results.
                  Parties with equal claims are one group, and never play each other: n equal claims cost no game.
                  So are claims that differ, where each was confirmed under its rounding logs (``rounded`` numerics).
    rounds        one party of a group plays one of another (``Referee``). The games of a round are between different
                  parties, and may be played at once. A party that is guilty or absent is out, and the next of its
                  group plays for their claim. Where an unfinished claim agrees with a finished one as far as it goes,
                  all its parties are out as unfinished, without guilt.
    equivocation  a party that signed two different statements of one thing about one run (two heads of one length, two
                  leaves, traces or parts of a step, two roots of as many results) is guilty by these signatures alone.
                  A party that opens another run than at first is out as absent: only the referee says that both were
                  asked for.
    end           when no two parties of different groups are left that have not played. If one group is left, its
                  claim prevails; what several groups are left with is undecided.

A game that decides takes a party out, so there are n - 1 such games at most; parties whose game decides nothing do not
meet again. An honest party that can be reached is neither guilty nor absent. So if one party is honest, and its games
are decided, its claim prevails against any number of others, whatever they have agreed on. What is played follows from
the games before it, so that anyone who holds them plays the same tournament again (Arun et al. 2025, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any, Protocol

from firmware_sim.errors import ChipwitnessError
from firmware_sim.evidence import canonical, digest_bytes
from inspector.dispute.claim import Claim
from inspector.dispute.game import Played, head_of, run_of
from inspector.dispute.messages import Absent, Failure, Traffic, absence
from inspector.dispute.referee import PARTIES, Seat, open_claim
from inspector.dispute.ruling import Ruling
from inspector.dispute.subject import agreed_by, rule_on_tasks
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from monitor.declaration.countersignature import declaration_digest

__all__ = ["Arena", "Opening", "Tournament"]


@dataclass(slots=True)
class Opening:
    """A law for one party: it opens its claim.

    Args:
        name: of the referee, in the words about who is absent.

    Attributes:
        claim: once it has opened it.
        facts: what is compared of it.
    """

    seats: Sequence[Seat]
    traffic: Traffic
    name: str = "the referee"
    guilty: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    prevails: tuple[str, ...] = ()
    claim: Claim | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def play(self) -> Verdict:
        """ACCEPT: it has opened a claim. REJECT: it is guilty, or absent."""
        (seat,) = self.seats
        text, outcome = f"{seat.name} opens its claim", Outcome.ACCEPT
        try:
            self._open(seat)
        except Absent as absent:
            text, outcome, self.absent = absence(seat.name, absent.silence, self.name), Outcome.REJECT, (seat.name,)
        except Failure as failure:
            text, outcome, self.guilty = str(failure), Outcome.REJECT, (seat.name,)
        evidence = {kind: ", ".join(getattr(self, kind)) or None for kind in PARTIES}
        counted = {"bytes": self.traffic.bytes, "case": "claim" if outcome is Outcome.REJECT else None}
        reason = Reason(guard="dispute", text=text)
        return Verdict(outcome=outcome, reasons=(reason,), evidence={**self.facts, **evidence, **counted})

    def _open(self, seat: Seat) -> None:
        claim = open_claim(seat, self.traffic)
        root = claim.results.root()
        state = None if claim.last < 0 else str(claim.leaf(claim.last).state.root)
        self.claim = claim
        self.facts = {
            "declaration": str(declaration_digest(claim.declared)),
            "data": claim.data_digest if claim.declared.recipe is not None else "",
            "finished": claim.finished,
            "last": claim.last,
            "results": [claim.manifest.steps + 1, root.hex()],
            "state": state,
        }


class Arena(Protocol):
    """Where games are played, or played again."""

    def open(self) -> list[Played]:
        """The opening of each party, in order."""

    def play(self, pairs: Sequence[tuple[int, int]]) -> list[Played]:
        """Games between these parties, all different, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a party is out: ``guilty``, ``absent`` or ``unfinished``; where, and by which game, if by one."""

    kind: str
    text: str
    step: int | None = None
    operator: str | None = None
    case: str | None = None
    game: int | None = None


@dataclass(slots=True)
class Tournament:
    """Plays by the law of this module.

    Args:
        names: of the parties, by their numbers, no two alike.
        arena: plays the games.

    Attributes:
        losses: of each party that is out.
        games: who played, and what came of it.
    """

    names: Sequence[str]
    trust: Trust | None
    arena: Arena
    losses: dict[int, Loss] = field(default_factory=dict)
    games: list[tuple[tuple[int, int], Verdict]] = field(default_factory=list)
    _groups: list[list[int]] = field(default_factory=list)
    _claims: dict[int, Claim] = field(default_factory=dict)
    _facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _said: dict[tuple[int, str], str] = field(default_factory=dict)
    _bytes: int = 0

    def play(self) -> Verdict:
        """The verdict.

        ACCEPT: at least two finished claims are equal, and no party is guilty or absent. REJECT: a party is.
        INCONCLUSIVE: neither. The evidence holds prevails, guilty, absent, unfinished and undecided (names), steps and
        state of the claim that prevails, losses (a reason for each party that is out), games, rounds and bytes.
        """
        self._open()
        while pairs := list(self._pairs()):
            played = self.arena.play(pairs)
            changed = [self._note(pair, each) for pair, each in zip(pairs, played, strict=True)]
            for pair, each, odd in zip(pairs, played, changed, strict=True):
                self._take(pair, each, is_sound=not odd)
        return self._verdict()

    def _open(self) -> None:
        keys: dict[bytes, list[int]] = {}
        for number, played in enumerate(self.arena.open()):
            law = played.law
            assert isinstance(law, Opening)
            self._note((number,), played)
            self._bytes += played.verdict.evidence["bytes"]
            self._lose((number,), played, game=None)
            if law.claim is not None:
                self._claims[number], self._facts[number] = law.claim, law.facts
                keys.setdefault(canonical.encode(law.facts), []).append(number)
        self._groups = list(keys.values())

    def _left(self) -> list[list[int]]:
        """Parties that are not out, by their claims."""
        left = [[number for number in group if number not in self.losses] for group in self._groups]
        return [group for group in left if group]

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """The next round: of each group at most one party plays."""
        played = {pair for pair, _ in self.games}
        busy: set[int] = set()
        for (one, first), (two, second) in combinations(enumerate(self._left()), 2):
            pairs = ((min(pair), max(pair)) for pair in product(first, second))
            pair = next((pair for pair in pairs if pair not in played), None)
            if pair is not None and not {one, two} & busy:
                busy |= {one, two}
                yield pair

    def _note(self, pair: tuple[int, ...], played: Played) -> bool:
        """Compare what the parties say with what they have said before; whether one of them contradicts itself."""
        runs = {seat: run_of(body) for seat, text, body in played.said if text == "claim"}
        odd = False
        for seat, run in runs.items():
            number = pair[seat]
            if self._claims.get(number) is not None and self._claims[number].manifest.run != run:
                odd = True
                text = (
                    f"according to the referee, the run that {self.names[number]} opens is no longer the one that it "
                    "opened first"
                )
                self.losses.setdefault(number, Loss(kind="absent", text=text, case="other run"))
        for seat, text, body in played.said:
            for what, value in _statements(text, body):
                if self._said.setdefault((pair[seat], f"{runs.get(seat)} {what}"), value) != value:
                    odd = True
                    self._convict(pair[seat], what)
        return odd

    def _convict(self, number: int, what: str) -> None:
        name, before = self.names[number], self.losses.get(number)
        if before is None or before.kind != "guilty":
            words = what.split(" ")
            step = int(words[-1]) if words[-2:-1] == ["step"] else None
            text = f"{name} has signed two different statements of {what}"
            self.losses[number] = Loss(kind="guilty", text=text, step=step, case="equivocation")

    def _take(self, pair: tuple[int, int], played: Played, *, is_sound: bool) -> None:
        self.games.append((pair, played.verdict))
        game = len(self.games) - 1
        self._bytes += played.verdict.evidence["bytes"]
        self._lose(pair, played, game=game)
        if is_sound and played.verdict.outcome is Outcome.ACCEPT:
            self._join(pair)
        unfinished = [pair[self._seat(played, name)] for name in played.law.unfinished]
        if not is_sound or len(unfinished) != 1 or not played.law.prevails:
            return
        for number in next(group for group in self._groups if unfinished[0] in group):
            text = f"{self.names[number]} is unfinished at step {self._claims[number].last}, but agrees up to there"
            self.losses.setdefault(number, Loss(kind="unfinished", text=text, case="unfinished", game=game))

    def _join(self, pair: tuple[int, int]) -> None:
        """Claims that differ, each confirmed under its rounding logs, are one group, with the first one's result."""
        first, second = sorted(next(group for group in self._groups if number in group) for number in pair)
        if first is not second:
            first += second
            self._groups.remove(second)

    def _lose(self, pair: tuple[int, ...], played: Played, *, game: int | None) -> None:
        evidence = played.verdict.evidence
        for kind in ("guilty", "absent"):
            for name in getattr(played.law, kind):
                number, text = pair[self._seat(played, name)], played.verdict.reasons[0].text
                where = {key: evidence.get(key) for key in ("step", "operator", "case")} if kind == "guilty" else {}
                before = self.losses.get(number)
                if before is None or (kind == "guilty" != before.kind):
                    self.losses[number] = Loss(kind=kind, text=text, game=game, **where)

    def _seat(self, played: Played, name: str) -> int:
        return [seat.name for seat in played.law.seats].index(name)

    def _verdict(self) -> Verdict:
        left = self._left()
        lost = {kind: [n for n in sorted(self.losses) if self.losses[n].kind == kind] for kind in _LOST}
        prevails = left[0] if len(left) == 1 else []
        outcome, reasons = self._outcome(left, is_rejected=bool(lost["guilty"] or lost["absent"]))
        reasons += [Reason(guard="dispute", text=self.losses[n].text) for n in sorted(self.losses)]
        facts = self._facts[prevails[0]] if prevails else {"last": None, "state": None}
        evidence: dict[str, Any] = {
            "prevails": self._named(prevails),
            **{kind: self._named(numbers) for kind, numbers in lost.items()},
            "undecided": [] if len(left) < 2 else self._named(sorted(chain(*left))),
            "steps": facts["last"],
            "state": facts["state"],
            "losses": [self._loss_json(n) for n in sorted(self.losses)],
            "games": [self._game_json(pair, verdict) for pair, verdict in self.games],
            "rounds": sum(verdict.evidence["rounds"] for _, verdict in self.games),
            "bytes": self._bytes,
        }
        return Verdict(outcome=outcome, reasons=tuple(reasons), evidence=evidence)

    def _outcome(self, left: list[list[int]], *, is_rejected: bool) -> tuple[Outcome, list[Reason]]:
        if len(left) > 1:
            texts = [verdict.reasons[0].text for _, verdict in self.games if verdict.outcome is Outcome.INCONCLUSIVE]
            claims = ", ".join(" and ".join(self._named(group)) for group in left)
            text = f"nothing decides between these different claims: {claims}"
            outcome, texts = Outcome.INCONCLUSIVE, [text, *dict.fromkeys(texts)]
        elif not left:
            outcome, texts = Outcome.INCONCLUSIVE, ["no claim prevails"]
        else:
            outcome, texts = self._prevailing(left[0])
        return Outcome.REJECT if is_rejected else outcome, [Reason(guard="dispute", text=text) for text in texts]

    def _prevailing(self, group: list[int]) -> tuple[Outcome, list[str]]:
        claim, names = self._claims[group[0]], " and ".join(self._named(group))
        if not claim.finished:
            return Outcome.INCONCLUSIVE, [f"{names}: unfinished at step {claim.last}, so that there is no result yet"]
        text = f"the claim of {names} prevails: it ends after step {claim.last}"
        if len(group) == 1:
            return Outcome.INCONCLUSIVE, [f"{text}; no other party has confirmed all of it"]
        missing = rule_on_tasks((claim, claim), self.trust) or agreed_by(claim, self.trust)
        if isinstance(missing, Ruling):
            return Outcome.INCONCLUSIVE, [f"{names} agree on every compared state", missing.text]
        return Outcome.ACCEPT, [text]

    def _named(self, numbers: Sequence[int]) -> list[str]:
        return [self.names[number] for number in numbers]

    def _loss_json(self, number: int) -> dict[str, Any]:
        loss = self.losses[number]
        found = {key: getattr(loss, key) for key in ("kind", "step", "operator", "case", "game", "text")}
        return {"party": self.names[number], **found}

    def _game_json(self, pair: tuple[int, int], verdict: Verdict) -> dict[str, Any]:
        kept = {key: value for key, value in verdict.evidence.items() if key != "search"}
        return {"parties": self._named(pair), "outcome": verdict.outcome.value, **kept, "text": verdict.reasons[0].text}


_LOST = ("guilty", "absent", "unfinished")


def _statements(question: str, body: bytes) -> list[tuple[str, str]]:
    """What an answer states once and for all about a run, and a digest of it; nothing where it is malformed."""
    kind, *words = question.split(" ")
    try:
        return [
            (what, str(digest_bytes("statement", canonical.encode(value))))
            for what, value in _READ[kind](words, canonical.decode(body))
        ]
    except (ChipwitnessError, LookupError, TypeError, ValueError):
        return []


def _of_claim(words: list[str], answer: Any) -> list[tuple[str, Any]]:
    head = head_of(answer)
    said = [("the declaration", answer["metadata"]), ("the data", answer["data"])]
    return [(f"the head after step {int(head['steps'])}", head["root"]), *said]


def _of_results(words: list[str], answer: Any) -> list[tuple[str, Any]]:
    if not words:
        return [(f"the first {int(answer[0])} results", answer[1])]
    return [(f"the first {int(size)} results", roots[0]) for size, roots in zip(words, answer, strict=True)]


_READ: Mapping[str, Callable[[list[str], Any], list[tuple[str, Any]]]] = {
    "claim": _of_claim,
    "results": _of_results,
    "step": lambda words, answer: [(f"the leaf of step {int(words[0])}", answer["leaf"])],
    "trace": lambda words, answer: [(f"the operators of step {int(words[0])}", answer)],
    "prefix": lambda words, answer: [(f"the first {int(words[1])} operators of step {int(words[0])}", answer[0])],
    "parts": lambda words, answer: [(f"the parts {' '.join(words[1:])} of step {int(words[0])}", answer)],
    "node": lambda words, answer: [(f"operator {int(words[1])} of step {int(words[0])}", answer["leaf"])],
}
"""By the first word of a question, what its answer states."""
