"""What of a loop cannot be recorded: each refusal with shapes, the caller's source line, and what to write instead."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics import UnsupportedOperator

__all__ = ["Line", "Refusal", "Refusals", "caller_line", "locate", "shapes_of"]

_OWN = tuple(str(Path(__file__).resolve().parents[2] / name) + "/" for name in ("monitor", "firmware_sim"))
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_IN_STEP = re.compile(r" (in|of) step \d+")
_FORWARD = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source."""

    file: str
    number: int

    @property
    def code(self) -> str:
        """Its text; empty where the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One reason why a loop cannot be recorded.

    Attributes:
        step: in which it was seen first; 0 for what is refused before the first one.
        line: of the caller's; for a call of the backward pass, the line of the forward pass that it belongs to. None
            where no line of the caller's was running.
        operator: the ATen overload that cannot be recorded; empty where it is none.
        shapes: of that operator's tensors, in order, with their types.
        cause: what is wrong.
        remedy: what to write instead.
    """

    step: int
    line: Line | None
    operator: str
    shapes: tuple[str, ...]
    cause: str
    remedy: str

    def __str__(self) -> str:
        where = "" if self.line is None else f"{self.line}: "
        return f"{where}{self.cause}; {self.remedy}" if self.remedy else where + self.cause

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        line = self.line
        return {
            "step": self.step,
            "file": None if line is None else line.file,
            "line": None if line is None else line.number,
            "code": None if line is None else line.code,
            "operator": self.operator or None,
            "shapes": list(self.shapes),
            "cause": self.cause,
            "remedy": self.remedy,
        }


class Refusals(Sequence[Refusal]):
    """All refusals of a loop in the order in which they were seen, each once: one for a line and a cause."""

    def __init__(self) -> None:
        self._found: dict[tuple[Line | None, str], Refusal] = {}

    def add(
        self,
        error: CallerError,
        *,
        step: int,
        line: Line | None,
        operator: str = "",
        shapes: tuple[str, ...] = (),
    ) -> None:
        """Note an error that the recorder would have raised: its text is a cause, and after a semicolon the remedy."""
        if isinstance(error, UnsupportedOperator):
            operator, remedy = error.operator, error.remedy
            cause = str(error).removesuffix(f": {remedy}")
        else:
            cause, _, remedy = str(error).partition("; ")
        found = Refusal(step=step, line=line, operator=operator, shapes=shapes, cause=cause, remedy=remedy)
        self._found.setdefault((line, operator or _IN_STEP.sub("", cause)), found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        return list(self._found.values())[index]


def shapes_of(*values: object) -> tuple[str, ...]:
    """Type and shape of each tensor among a call's arguments, such as ``float32[2, 3]``."""
    tensors = (tensor for value in values for tensor in _tensors(value))
    return tuple(
        f"{str(each.dtype).removeprefix('torch.')}{'[nested]' if each.is_nested else list(each.shape)}"
        for each in tensors
    )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def caller_line() -> Line | None:
    """The innermost running line of code that is the caller's own: of no library, and not the recorder's.

    In a backward pass under anomaly detection it is the line of the forward pass that the gradient belongs to.
    """
    node = torch._C._current_autograd_node()
    if node is not None:
        metadata: Any = node.metadata
        for text in reversed(metadata.get("traceback_") or []):
            found = _FORWARD.search(text)
            if found is not None and _is_callers(found[1]):
                return Line(found[1], int(found[2]))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_callers(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def locate(error: CallerError) -> None:
    """Put the caller's line that led to an error in front of its text; for a backward pass, where it was called."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if _is_callers(trace.tb_frame.f_code.co_filename):
            found = Line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    text = str(error)
    if found is not None and not text.startswith(f"{found.file}:"):
        error.args = (f"{found}: {text}",)


def _is_callers(file: str) -> bool:
    return not file.startswith(("<", *_OWN, *_LIBRARIES)) and "/site-packages/" not in file
