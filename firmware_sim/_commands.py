"""How a command enters the chip: one at a time, from the process that powered it on, with arguments of exact types.

Exact types (`type(x) is int`, not a subclass, no `bool`, no NumPy integer) keep code of the host out of the firmware,
and what can't be recorded out of the log.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from firmware_sim.errors import ChipwitnessError
from firmware_sim.mailbox import ChipFailure, ErrorCode, MailboxError

__all__ = ["Gate", "check_coordinate", "check_digest", "check_request", "check_sealed", "check_ticks", "command"]

MAX_IDLE_TICKS = 1 << 24
"""Ticks of one `idle`: about half a minute of simulation."""

_MAX_SEALED_BYTES = 1 << 12
_MAX_VERIFIER_ID = 200
_NONCE_BYTES = range(16, 65)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Gate:
    """Lets one command at a time into a chip."""

    def __init__(self, chip_id: str) -> None:
        self._chip_id = chip_id
        self._lock = threading.RLock()
        self._busy = False
        self._process = os.getpid()

    def check_process(self) -> None:
        """Refuse a child process, which holds a copy of what the host knows of the chip and no chip."""
        if os.getpid() != self._process:
            _refuse(self._chip_id, ErrorCode.FOREIGN_PROCESS, f"is powered by process {self._process}, not by this one")

    def enter(self) -> None:
        """Wait until no other thread's command is under way; refuse a command from within a command."""
        self._lock.acquire()
        if self._busy:  # a signal's handler or a finalizer, run by the thread that holds the lock
            self._lock.release()
            _refuse(self._chip_id, ErrorCode.BUSY, "another command of this thread is under way")
        self._busy = True

    @contextmanager
    def passed(self, seconds: float) -> Iterator[bool]:
        """Enter if the gate becomes free in time, and say whether; for a thread of the chip's own."""
        inside = self._lock.acquire(timeout=seconds)
        self._busy |= inside  # a finalizer may run in this thread too
        try:
            yield inside
        finally:
            if inside:
                self.leave()

    def leave(self) -> None:
        """Let the next command in."""
        self._busy = False
        self._lock.release()


class _Commanded(Protocol):
    _gate: Gate

    @property
    def _changes(self) -> int: ...

    def _settle(self) -> None: ...

    def _lose_power(self) -> None: ...

    def _brown_out(self) -> None: ...


_Chip = TypeVar("_Chip", bound=_Commanded)


def command(
    method: Callable[Concatenate[_Chip, _Arguments], _Result],
) -> Callable[Concatenate[_Chip, _Arguments], _Result]:
    """Make a method a command: it goes through the chip's gate, and is done, refused or the end of this boot.

    It starts when a snapshot that is under way has been recorded.

    A refusal has changed nothing. Whatever else stops a command, an interrupt too, may have come between two changes
    that belong together, so the chip loses its power: the next boot finds out from the storage what was done.
    """

    @functools.wraps(method)
    def through_gate(self: _Chip, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        gate = self._gate
        gate.check_process()
        gate.enter()
        before = -1
        try:
            self._settle()
            before = self._changes
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, (ChipwitnessError, OSError)):
                self._brown_out()
            elif not isinstance(error, (MailboxError, ChipFailure)) or self._changes != before:
                self._lose_power()
            raise
        finally:
            gate.leave()

    return through_gate


def check_coordinate(chip_id: str, run_id: object, step: object) -> None:
    """Refuse what is no coordinate: 32 bytes and an integer in [0, 2^64)."""
    if type(run_id) is not bytes or len(run_id) != 32:
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, f"a run id has 32 bytes, not {_length(run_id)}")
    if type(step) is not int or not 0 <= step < 1 << 64:
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, "a step is of type int, in [0, 2^64)")


def check_digest(chip_id: str, digest: object) -> None:
    """Refuse what is no commitment: 32 bytes."""
    if type(digest) is not bytes or len(digest) != 32:
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, f"a commitment has 32 bytes, not {_length(digest)}")


def check_ticks(chip_id: str, ticks: object) -> None:
    """Refuse what is no number of ticks to idle."""
    if type(ticks) is not int or not 0 <= ticks <= MAX_IDLE_TICKS:
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, f"a chip can idle for 0 to {MAX_IDLE_TICKS} ticks, of type int")


def check_sealed(chip_id: str, signed: object) -> None:
    """Refuse what is too long for a beacon."""
    if type(signed) is not bytes or len(signed) > _MAX_SEALED_BYTES:
        _refuse(
            chip_id, ErrorCode.BAD_ARGUMENT, f"a beacon has at most {_MAX_SEALED_BYTES} bytes, not {_length(signed)}"
        )


def check_request(chip_id: str, nonce: object, verifier_id: object) -> None:
    """Refuse what no quote can answer."""
    if type(nonce) is not bytes or len(nonce) not in _NONCE_BYTES:
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, f"a quote needs a nonce of 16 to 64 bytes, not {_length(nonce)}")
    if type(verifier_id) is not str or not 0 < len(verifier_id) <= _MAX_VERIFIER_ID or not verifier_id.isprintable():
        _refuse(chip_id, ErrorCode.BAD_ARGUMENT, "a quote needs a verifier id of 1 to 200 printable characters")


def _length(value: object) -> str:
    return str(len(value)) if type(value) is bytes else f"a {type(value).__name__!r:.100}"


def _refuse(chip_id: str, code: ErrorCode, message: str) -> NoReturn:
    raise MailboxError(code, f"chip {chip_id}: {message}")
