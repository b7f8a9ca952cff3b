"""What an inspection would say of the paths in a step's program, while it is recorded, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.slots import numbered
from monitor.declaration.statement import Declaration
from monitor.programs.capture import Capture
from monitor.programs.paths import Path, PathsSoFar, is_agreed
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers
from monitor.recording.options import EVALUATIONS, RunConfig
from monitor.recording.refusals import Line, caller_line

__all__ = ["Foreseen", "LinedCapture"]

_LISTED = 8
_DOUBT = "which leaves an inspection in doubt; "


class LinedCapture(Capture):
    """A capture that notes where the caller's code makes each call that no known program makes in its place."""

    lines: dict[int, Line | None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines = {}

    def _put_down(self, *args: Any, **kwargs: Any) -> Program | None:
        self.lines[self.taken] = caller_line()
        return super()._put_down(*args, **kwargs)


class Foreseen:
    """The paths and gradients of a run's programs without an agreement, each tensor reported once."""

    def __init__(self, declared: Declaration, options: RunConfig) -> None:
        self._options = options
        shapes = {f"{each.kind}/{each.name}": in_numbers(each.layout)["shape"] for each in declared.state}
        self._paths = PathsSoFar(shapes, options.direct_paths)
        self._governed = {f"weight/{name}" for name in numbered(declared)}
        self._reported: set[str] = set()

    def look(self, program: Program, lines: Mapping[int, Line | None]) -> tuple[CallerError, Line | None] | None:
        """What is new in another program, with the caller's line; None if nothing is.

        Args:
            lines: where the caller's code makes each call, as far as that is known.

        Raises:
            CallerError: no inspection can look at the program.
        """
        found, loose = self._found(program), self._loose()
        direct = {path.tensor for path in found if not (path.graded and path.tensor in loose)}
        self._reported |= direct | loose
        if found:
            seedless = [path for path in found if path.tensor.startswith("gradient/")]
            first = min(seedless or found, key=lambda path: (path.program != program.digest, path.call or 0))
            line = lines.get(first.call) if first.call is not None and first.program == program.digest else None
            return CallerError(_reported(first, direct, loose)), line
        if loose:
            return CallerError(
                f"{_listed(loose)} receives a gradient outside all updates, by numbers that nothing declares, "
                f"{_DOUBT}make it a parameter of the optimizer, or {_agreed(direct, loose)}"
            ), None
        if program.digest in self._paths.differentiating() and EVALUATIONS not in self._options.direct_paths:
            return CallerError(
                f"this step's program computes a derivative but stores it in no tensor of the state, {_DOUBT}compute "
                f"under torch.no_grad(), or {_agreed({EVALUATIONS}, ())}"
            ), None
        return None

    def agreement(self, program: Program) -> str:
        """What lab and inspector would have to agree to of another program, as the keyword to write; may be empty."""
        tensors = {path.tensor for path in self._found(program)}
        return f"direct_paths={_patterns(tensors)!r}" if tensors else ""

    def _found(self, program: Program) -> list[Path]:
        """Paths without an agreement that were not reported yet."""
        try:
            self._paths.add(program.digest, program, is_free=self._options.free_slots)
        except EvidenceError as error:
            raise CallerError(f"this step cannot be inspected: {error}") from None
        return [
            path
            for path in self._paths.paths()
            if not path.is_harmless
            and path.tensor not in self._reported
            and not is_agreed(path.tensor, self._options.direct_paths)
            and not (path.graded and is_agreed(path.tensor, self._options.free))
        ]

    def _loose(self) -> set[str]:
        """Tensors that take a gradient by undeclared numbers, without an agreement, not reported yet."""
        found = self._paths.slopes().keys() - self._governed - self._reported
        return {name for name in found if not is_agreed(name, self._options.free)}


def _reported(first: Path, direct: Collection[str], loose: Collection[str]) -> str:
    source, way = first.source, "through a gradient" if first.graded else "without passing a loss"
    tensors = {*direct, *loose}
    kind = first.tensor.partition("/")[0]
    if kind == "gradient":
        remedy = (
            "begin the backward pass at a loss, as (outputs * weights).sum().backward() does, or with "
            "torch.ones_like(losses), or "
        )
    elif kind == "weight":
        remedy = "write weights in the optimizer's step() alone, or "
    else:
        remedy = ""
    name = _listed(tensors, first.tensor)
    doubt = "which leaves an inspection in doubt, or has it rejected by a witness; "
    return f"{source} reaches {name} by {first.operator} {way}, {doubt}{remedy}{_agreed(direct, loose)}"


def _listed(tensors: Collection[str], first: str = "") -> str:
    more = f", and {len(tensors) - 1} tensors more" if len(tensors) > 1 else ""
    return f"{first or min(tensors)}{more}"


def _agreed(direct: Collection[str], loose: Collection[str]) -> str:
    """What lab and inspector would have to agree to, as the keywords to write."""
    keywords = {"free": loose, "direct_paths": direct}
    said = [f"{keyword}={_patterns(names)!r}" for keyword, names in keywords.items() if names]
    return f"have lab and inspector agree by {' and '.join(said)}"


def _patterns(tensors: Collection[str]) -> list[str]:
    """Names or, where they are many, patterns that match them."""
    if len(tensors) <= _LISTED:
        return sorted(tensors)
    return sorted({f"{each.partition('/')[0]}/*" for each in tensors})
