"""What the ranks of a job are about to do, said by each before any of them begins.

Each rank posts its next act in the store of the process group, with what has to be alike on all ranks, and reads the
others'. So no rank waits in a collective for one that does something else: all of them end with one line. A rank that
fails or leaves posts that as its next act.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from firmware_sim.errors import CallerError, ChipwitnessError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject

__all__ = ["DEADLINE", "RollCall"]

DEADLINE = 600.0
"""Seconds for which a rank waits for others, unless the caller says otherwise."""
_LONGEST, _MOST_TEXT = 1e6, 500
_REMEDY = (
    "every rank has to create the same job, get the same whole batches, take the same steps and evaluations, and then "
    "call finish()"
)


class RollCall:
    """One rank's voice in the calls of a job.

    Args:
        store: that of the process group; None for a single rank, which waits for none.
        deadline: seconds for which it waits for the other ranks.

    Raises:
        CallerError: a deadline that is none.
    """

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float) -> None:
        if not 0 < deadline <= _LONGEST:
            raise CallerError(
                f"a deadline must be a number of seconds above 0 and up to {_LONGEST:.0f}, not {deadline!r}"
            )
        self._store, self._rank, self._ranks, self._deadline = store, rank, ranks, deadline
        self._number, self._act, self._ended = 0, "", ""
        self._made = 0 if store is None else store.add(f"chipwitness/jobs/{rank}", 1)

    @contextmanager
    def together(self, act: str, say: Callable[[], Mapping[str, str]] = dict) -> Iterator[None]:
        """An act of all ranks: none begins it unless all do, and one that fails in it says so to the others.

        Args:
            act: what this rank does, such as ``takes step 3``.
            say: gives what has to be alike on all ranks, by name.

        Raises:
            CallerError: another rank does something else, with something else, has failed, or has not come before the
                deadline; or the exchange broke off, or has before.
        """
        if self._ended:
            raise CallerError(f"this job has ended: {self._ended}")
        try:
            self._require_same(act, say())
            yield
        except BaseException as error:
            broke_off = isinstance(error, RuntimeError) and "gloo" in str(error)
            is_ours = isinstance(error, dist.DistError) or broke_off
            line = self._failure() or f"{self._act}, but the exchange broke off: {_line(error)}" if is_ours else ""
            self.leave(line or _line(error))
            if line:
                raise CallerError(line) from error
            raise

    def part(self) -> None:
        """The last act has ended; rank 0, which may hold the store, waits until every rank knows."""
        if self._store is not None:
            self._post({"parts": True})
            if self._rank == 0:
                with suppress(dist.DistError):
                    self._store.wait(self._keys(), timedelta(seconds=self._deadline))
            self._store, self._ended = None, "it is finished"

    def leave(self, reason: str = "it left the job without finish()") -> None:
        """Say to ranks that wait for this one that it does nothing more."""
        if self._store is not None:
            with suppress(RuntimeError):  # of a store that is gone
                self._post({"failed": reason})
            self._store, self._ended = None, reason

    def _require_same(self, act: str, said: Mapping[str, str]) -> None:
        self._act = f"rank {self._rank} {act}"
        if self._store is None:
            return
        self._post({"act": act, "said": dict(said)})
        every = self._every()
        for rank, other in enumerate(every):
            if "failed" in other:
                raise CallerError(f"rank {rank} failed: {other['failed']}; {self._act}")
        first = every[0]
        for rank, other in enumerate(every):
            if other["act"] != first["act"]:
                raise CallerError(f"rank {rank} {other['act']}, but rank 0 {first['act']}; {_REMEDY}")
            for name in sorted(first["said"].keys() | other["said"].keys()):
                theirs, ours = (each["said"].get(name, "nothing") for each in (other, first))
                if theirs != ours:
                    raise CallerError(f"rank {rank} {act} with {name} {theirs}, but rank 0 with {ours}; {_REMEDY}")

    def _post(self, message: Mapping[str, Any]) -> None:
        self._number += 1
        self._store.set(self._keys()[self._rank], json.dumps(message))
        if self._number > 2:  # all ranks have read what they came past
            self._store.delete_key(self._keys(self._number - 2)[self._rank])

    def _keys(self, number: int | None = None) -> list[str]:
        prefix = f"chipwitness/{self._made}/{self._number if number is None else number}"
        return [f"{prefix}/{rank}" for rank in range(self._ranks)]

    def _every(self) -> list[JsonObject]:
        """What all ranks say; CallerError names the first that says nothing before the deadline."""
        keys = self._keys()
        try:
            self._store.wait(keys, timedelta(seconds=self._deadline))
        except dist.DistError:
            absent = next((rank for rank, key in enumerate(keys) if not self._store.check([key])), self._rank)
            raise CallerError(
                f"rank {absent} did not respond within {self._deadline:g} seconds, while {self._act}; {_REMEDY}"
            ) from None
        return [canonical.loads(self._store.get(key)) for key in keys]

    def _failure(self) -> str:
        """What the first other rank that failed has said, where one has."""
        with suppress(RuntimeError):
            for rank, key in enumerate(self._keys(self._number + 1)):
                if rank != self._rank and self._store.check([key]):
                    return f"rank {rank} failed: {canonical.loads(self._store.get(key)).get('failed')}; {self._act}"
        return ""


def _line(error: BaseException) -> str:
    """What an error says, in one line of no endless length."""
    text = (str(error).strip().splitlines() or [""])[0][:_MOST_TEXT]
    return text if isinstance(error, ChipwitnessError) else f"{type(error).__name__}: {text}"
