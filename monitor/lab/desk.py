"""Where a lab at work is asked for something: files in its private folder, looked at between two steps.

A chip at work belongs to the process that trains on it, and a run folder is whole between two steps. So a process with
a verifier's question, or with a request for the run, leaves it here, and that process answers when a step is committed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical

__all__ = ["Desk", "ask_lab", "is_at_work"]

_FOLDER, _LOCK = "desk", "at-work"
_POLL_SECONDS = 0.02
_MOST_SECONDS = 3600.0
"""A step that takes longer than this keeps its lab from answering."""


class Desk:
    """The side of the process that trains; it is open until it is closed, forgotten, or the process ends.

    Args:
        lab: the lab's private folder.
        run: what it trains.
        answer: the files with which the chip of an id answers a nonce and a verifier's name.
        prune: lets the chip of an id go by a checkpoint; the first record that it then holds, and its free bytes.
    """

    def __init__(
        self,
        lab: Path,
        run: Path,
        answer: Callable[[str, bytes, str], Mapping[str, bytes]],
        prune: Callable[[str, bytes], tuple[int, int]],
    ) -> None:
        self._folder, self._run, self._answer, self._prune = lab / _FOLDER, run, answer, prune
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.close = weakref.finalize(self, os.close, lock)
        """From then on the chips and the run folder are anybody's again."""

    def serve(self) -> None:
        """Answer everything that was asked so far; call it between two steps."""
        for path in sorted(self._folder.glob("*.ask")):
            asked = canonical.loads(path.read_text("utf-8"))
            reply: dict[str, object] = {}
            try:
                if "copy" in asked:
                    shutil.copytree(self._run, asked["copy"])
                elif "checkpoint" in asked:
                    start, free = self._prune(asked["chip"], bytes.fromhex(asked["checkpoint"]))
                    reply = {"start": start.to_bytes(8).hex(), "free": free.to_bytes(8).hex()}
                else:
                    files = self._answer(asked["chip"], bytes.fromhex(asked["nonce"]), asked["verifier"])
                    reply = {name: content.hex() for name, content in files.items()}
            except (EvidenceError, OSError) as error:
                reply = {"error": str(error)}
            _write(path.with_suffix(".answer"), reply)
            path.unlink()


def is_at_work(lab: Path) -> bool:
    """Tell whether a process trains on the chips of a lab with this private folder, and answers for it."""
    try:
        lock = os.open(lab / _FOLDER / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def ask_lab(lab: Path, question: Mapping[str, str]) -> dict[str, bytes]:
    """Ask the process that trains there, and wait for it: for a chip's answer, a copy of the run, or to prune a chip.

    Args:
        question: ``chip``, ``nonce`` (hex) and ``verifier``; ``copy``, a folder that is not there yet; or ``chip`` and
            ``checkpoint``, the file in hex, answered by ``start`` and ``free``, big-endian.

    Raises:
        EvidenceError: it does not answer: it came to its end, takes too long, or something is wrong with the chip.
    """
    name = os.urandom(8).hex()
    path = lab / _FOLDER / f"{name}.answer"
    _write(lab / _FOLDER / f"{name}.ask", question)
    deadline = time.monotonic() + _MOST_SECONDS
    while not path.exists():
        if time.monotonic() > deadline or not is_at_work(lab):
            raise EvidenceError("the lab's process ended, or took too long, before it answered")
        time.sleep(_POLL_SECONDS)
    reply = canonical.loads(path.read_text("utf-8"))
    path.unlink()
    if "error" in reply:
        raise EvidenceError(str(reply["error"]))
    return {file: bytes.fromhex(content) for file, content in reply.items()}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(data), "utf-8")
    os.replace(draft, path)
