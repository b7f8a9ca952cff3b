"""A client's dealings with one provider: it hands over a task, watches it, and fetches what a claim commits to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, canonical
from inspector.dispute.claim import Claim
from inspector.dispute.game import Party, run_of
from inspector.dispute.messages import Traffic
from inspector.dispute.openings import Allowance, state_tensor
from inspector.dispute.provider import Remote
from inspector.wire.desk import Transport
from inspector.wire.messages import Question, Reader, Silence
from monitor.declaration.statement import Declaration
from monitor.transcript.orders import TASK, OrderFolder

__all__ = ["Carrier", "Errand", "Refusal", "Report", "checked_state", "root_of"]

_STANDING_BYTES = 64 << 20
"""The longest answer about a task lists all of its files."""
_COUNT = limits.STEPS.most
_RESTARTS = 8
"""So often a run may begin anew before it is finished, as where its provider was killed."""
_STATES = ("receiving", "queued", "running", "finished")
_SHORTEST, _LONGEST = 0.2, 5.0
"""Seconds between two questions about a task: more and more of them while nothing moves."""
Report: TypeAlias = Callable[[str, str, int, int], None]
"""Called with a provider's name, the state of its run, the steps done and the steps in all."""


class Carrier(Transport, Protocol):
    """Brings a party files besides questions."""

    def send(self, name: str, path: Path, seconds: float) -> None:
        """Send a file that it has asked for by its SHA-256; Silence where it does not take it."""


class Refusal(EvidenceError):
    """A provider signed that it does not do what it was asked."""


class _Unbounded(Allowance):
    """Of a state that is fetched, and goes into no game's evidence."""

    def spend(self, amount: int) -> None:
        """Nothing is counted."""


@dataclass(slots=True, kw_only=True)
class Errand:
    """What one provider is asked.

    Args:
        carrier: reaches it.
        key: the client's.
        seconds: for each answer.
        idle: seconds without a new step after which it counts as absent.

    Attributes:
        witnesses: key ids of those whose word about the time of its answers it accepts, as it has signed.
    """

    party: Party
    carrier: Carrier
    order: OrderFolder
    key: SigningKey
    seconds: int
    idle: int
    witnesses: list[str] = field(default_factory=list)
    _game: str = field(default_factory=lambda: secrets.token_hex(32))
    _number: int = 0
    _run: str = ""

    def carry(self, report: Report, ended: Event) -> None:
        """Hand the task over, and wait until its run is finished, or until ``ended`` is set.

        Raises:
            Refusal: the provider signed that it does not do it, and why.
            Silence: no signed answer came in time, or no step.
        """
        moved, pause, falls = time.monotonic(), 0.0, 0
        reached, sent = (-1, 0), set[str]()
        while not ended.wait(pause):
            standing = self._standing()
            report(self.party.name, standing["state"], standing["step"], standing["of"])
            if standing["state"] == "finished":
                return
            for name in standing["needs"]:
                self._send(name)
            found = (_STATES.index(standing["state"]), standing["step"])
            falls += found < reached
            if falls > _RESTARTS:
                raise Silence(f"its run has started again {falls} times")
            if found != reached or not sent.issuperset(standing["needs"]):
                moved, reached, pause = time.monotonic(), found, _SHORTEST
            elif time.monotonic() - moved > self.idle:
                raise Silence(f"its run has made no progress for {self.idle} s")
            sent.update(standing["needs"])
            pause = min(pause * 1.5, _LONGEST)

    def claim(self) -> Claim:
        """What it claims to have come to, with its proofs still to be asked for; EvidenceError where that is none."""
        self._run = self.order.digest
        return Claim(self.party.name, Remote(self._ask), self.party.key, Traffic())

    def _send(self, name: str) -> None:
        mine = name in self.order.order.files
        if not mine and name != self.order.digest:
            raise Refusal("it asks for a file that is not a part of the task")
        path = self.order.place(name) if mine else self.order.folder / TASK
        self.carrier.send(name, path, self.seconds)

    def _standing(self) -> dict[str, Any]:
        body = self._ask(f"task {self.order.digest} {len(self.order.envelope)}", _STANDING_BYTES)
        found = canonical.decode(body)
        if not isinstance(found, dict) or set(found) != {"state", "step", "of", "needs", "witnesses"}:
            raise Refusal("its answer about the task has missing or extra keys")
        counts, needs = (found["step"], found["of"]), found["needs"]
        is_sound = found["state"] in _STATES and all(type(each) is int and 0 <= each <= _COUNT for each in counts)
        lists = all(isinstance(found[each], list) for each in ("needs", "witnesses"))
        is_list = lists and all(isinstance(x, list) and len(x) == 2 for x in needs)
        if not is_sound or not is_list or not all(isinstance(name, str) for name, _ in needs):
            raise Refusal("its answer about the task is malformed")
        self.witnesses = found["witnesses"]
        return {**found, "needs": list(dict.fromkeys(name for name, _ in needs))}

    def _ask(self, text: str, most: int) -> bytes:
        number, self._number = self._number, self._number + 1
        question = Question(
            game=self._game,
            number=number,
            to=self.party.key.key_id,
            run=self._run,
            text=text,
            most=most,
            seconds=self.seconds,
        )
        envelope = question.seal(self.key)
        reader = Reader(envelope, self.party.key, most)
        self.carrier.ask(envelope, reader, self.seconds)
        body = reader.body()
        if body is None:
            assert reader.answer is not None
            raise Refusal(f"it refuses: {reader.answer.refused or 'its answer is too long'!a:.300}")
        if text == "claim":
            self._run = run_of(body)
        return body


def checked_state(
    claim: Claim,
    step: int,
    progress: Callable[[int], None] = lambda _: None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The state after a step, under ``kind/name``, by blocks with their proofs against the claim's head.

    Args:
        names: of the tensors that are asked for; None for all.
        progress: called with the bytes of each tensor that has come.

    Raises:
        Failure: the party does not open what it committed to.
    """
    found: dict[str, Tensor] = {}
    for entry in claim.declared.state:
        name = f"{entry.kind}/{entry.name}"
        if names is not None and name not in names:
            continue
        found[name] = state_tensor([claim.party], _Unbounded(), claim.declared, step, name).whole()
        progress(entry.byte_count)
    return found


def root_of(declared: Declaration, state: Mapping[str, Tensor]) -> str:
    """Root of a full state."""
    memory = declared.empty_memory(torch.device("cpu"))
    memory.load(state)
    return str(memory.digest().root)
