"""Where the games of a tournament are played: with parties that answer, or again from the tournament's evidence.

    {"format": "chipwitness/tournament/1", "games": [...], "openings": [...], "result": envelope of the referee}

Openings and games are evidence of games each (``game``), of one party and of two. The result binds all of them, the
parties' keys and what the tournament has come to, with numbers in place of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, seal
from inspector.dispute.game import (
    MakeLaw,
    Party,
    Played,
    Terms,
    digest_of,
    known_for,
    names_of,
    opened_by_referee,
    opened_result,
    record,
    refereed,
    replay,
    time_text,
    verified,
    worth,
)
from inspector.dispute.tournament import Opening, Tournament
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict

__all__ = ["FORMAT", "check_tournament", "is_tournament", "play_tournament"]

FORMAT = "chipwitness/tournament/1"
_RESULT = "application/vnd.chipwitness.tournament.v1+json"
_KEYS = {"format", "openings", "games", "result"}
_RESULT_KEYS = {"referee", "parties", "played", "verdict", "time"}
_MOST_PARTIES = 256
_LISTS = ("prevails", "guilty", "absent", "unfinished", "undecided")


def _opened(seats: Any, traffic: Any, name: str, branching: int) -> Opening:
    return Opening(seats, traffic, name)


@dataclass(slots=True, kw_only=True)
class _Live:
    """Asks the parties, in threads of which one computes at a time."""

    parties: Sequence[Party]
    trust: Trust | None
    key: SigningKey
    terms: Terms
    now: datetime
    workers: int
    openings: list[Any] = field(default_factory=list)
    games: list[Any] = field(default_factory=list)

    def open(self) -> list[Played]:
        played = self._all([(party,) for party in self.parties], _opened)
        self.openings += [each.evidence for each in played]
        return played

    def play(self, pairs: Sequence[tuple[int, int]]) -> list[Played]:
        played = self._all([(self.parties[a], self.parties[b]) for a, b in pairs], refereed(self.trust, self.terms))
        self.games += [each.evidence for each in played]
        return played

    def _all(self, seats: Sequence[tuple[Party, ...]], make: MakeLaw) -> list[Played]:
        turn = Lock()

        def one(parties: tuple[Party, ...]) -> Played:
            return record(parties, make, self.key, self.terms, self.now, turn)

        if self.workers < 2:
            return [one(each) for each in seats]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(one, seats))


@dataclass(slots=True, kw_only=True)
class _Again:
    """Plays the same games again."""

    parties: Sequence[tuple[str, VerifyingKey]]
    trust: Trust
    referee: VerifyingKey
    terms: Terms
    openings: list[Any]
    games: list[Any]
    taken: int = 0

    def open(self) -> list[Played]:
        return [self._one(each, [party], _opened) for each, party in zip(self.openings, self.parties, strict=True)]

    def play(self, pairs: Sequence[tuple[int, int]]) -> list[Played]:
        start, self.taken = self.taken, self.taken + len(pairs)
        found = self.games[start : self.taken]
        make = refereed(self.trust, self.terms)
        seats = [[self.parties[a], self.parties[b]] for a, b in pairs]
        return [self._one(each, pair, make) for each, pair in zip(found, seats, strict=True)]

    def _one(self, game: Any, parties: list[tuple[str, VerifyingKey]], make: MakeLaw) -> Played:
        _, _, referee, terms = opened_result(game)
        if referee != self.referee or terms != self.terms:
            raise EvidenceError("a game was played by a different referee, or on different terms")
        return replay(game, parties, make, self.trust.witnesses)


def play_tournament(
    parties: Sequence[Party], trust: Trust | None, key: SigningKey, terms: Terms, *, now: datetime, workers: int = 1
) -> tuple[Verdict, bytes]:
    """Play a tournament; returns the verdict (``Tournament.play``) and the evidence.

    Args:
        key: the referee's.
        workers: parties that are asked at once at most; 1 where they compute in this process.

    Raises:
        CallerError: fewer than two parties, too many, or two of one name.
    """
    names = [party.name for party in parties]
    if not 2 <= len(names) <= _MOST_PARTIES or len(set(names)) != len(names):
        raise CallerError(f"a tournament needs 2 to {_MOST_PARTIES} parties with different names")
    arena = _Live(parties=parties, trust=trust, key=key, terms=terms, now=now, workers=workers)
    verdict = Tournament(names, known_for(trust, terms), arena).play()
    result = {
        "referee": key.verifying.raw.hex(),
        "parties": [party.key.raw.hex() for party in parties],
        **terms.to_json(),
        "played": digest_of([arena.openings, arena.games]),
        "verdict": _facts(verdict, names),
        "time": time_text(now),
    }
    signed = canonical.decode(seal(_RESULT, result, key), most=limits.BUNDLE_BYTES)
    evidence = {"format": FORMAT, "openings": arena.openings, "games": arena.games, "result": signed}
    return verdict, canonical.encode(evidence)


def is_tournament(data: bytes) -> bool:
    """Whether a file begins as a tournament's evidence does, whatever it is worth."""
    return data.startswith(b'{"format":"chipwitness/tournament/')


def check_tournament(data: bytes, trust: Trust) -> Verdict:
    """Play a tournament again from its evidence alone; the verdict that this gives, as ``check_game`` does."""
    return verified("tournament", lambda: _checked(data, trust))


def _checked(data: bytes, trust: Trust) -> Verdict:
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    if not isinstance(parsed, dict) or set(parsed) != _KEYS or parsed["format"] != FORMAT:
        raise EvidenceError(f"not a tournament of the form {FORMAT}")
    result, referee = opened_by_referee(parsed["result"], _RESULT)
    openings, games = parsed["openings"], parsed["games"]
    terms = Terms.of(result, _RESULT_KEYS)
    if digest_of([openings, games]) != result["played"]:
        raise EvidenceError("its games are not those that the referee signed")
    keys = [VerifyingKey(bytes.fromhex(raw)) for raw in result["parties"]]
    if not 2 <= len(keys) <= _MOST_PARTIES:
        raise EvidenceError(f"a tournament needs 2 to {_MOST_PARTIES} parties")
    names = names_of(keys, trust)
    arena = _Again(
        parties=list(zip(names, keys, strict=True)),
        trust=trust,
        referee=referee,
        terms=terms,
        openings=openings,
        games=games,
    )
    verdict = Tournament(names, known_for(trust, terms), arena).play()
    if arena.taken != len(games):
        raise EvidenceError("the record holds more games than the tournament needs")
    if canonical.encode(_facts(verdict, names)) != canonical.encode(result["verdict"]):
        raise EvidenceError("the recorded games lead to a verdict other than the one that the referee signed")
    return worth(verdict, is_known=referee in trust.inspectorates)


def _facts(verdict: Verdict, names: Sequence[str]) -> dict[str, Any]:
    """The verdict with numbers in place of names, and without texts, which hold names."""
    found = verdict.evidence
    losses = [
        {**{key: value for key, value in loss.items() if key != "text"}, "party": names.index(loss["party"])}
        for loss in found["losses"]
    ]
    counted = {key: found[key] for key in ("steps", "state", "rounds", "bytes")}
    lists = {kind: sorted(map(names.index, found[kind])) for kind in _LISTS}
    return {"outcome": verdict.outcome.value, **counted, **lists, "losses": losses, "games": len(found["games"])}
