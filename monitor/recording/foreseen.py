"""What an inspection would say of the paths in a step's program, told while it is recorded, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.statement import StateEntry
from monitor.programs.capture import Capture
from monitor.programs.paths import Path, PathsSoFar, is_agreed
from monitor.programs.program import Program
from monitor.recording.options import Options
from monitor.recording.refusals import Line, caller_line

__all__ = ["Foreseen", "LinedCapture"]

_LISTED = 8


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
    """The paths of a run's programs that nobody agreed to, each tensor told of once.

    Args:
        entries: the declared state.
    """

    def __init__(self, entries: Sequence[StateEntry], options: Options) -> None:
        self._options = options
        self._paths = PathsSoFar({f"{each.kind}/{each.name}": each.shape for each in entries}, options.direct_paths)
        self._told: set[str] = set()

    def look(self, program: Program, lines: Mapping[int, Line | None]) -> tuple[CallerError, Line | None] | None:
        """What is new in another program, with the caller's line; None if nothing is.

        Args:
            lines: where the caller's code makes each call, as far as that is known.

        Raises:
            CallerError: no inspection can look at the program.
        """
        found = self._found(program)
        self._told |= {path.tensor for path in found}
        if not found:
            return None
        seedless = [path for path in found if path.tensor.startswith("gradient/")]
        first = min(seedless or found, key=lambda path: (path.program != program.digest, path.call or 0))
        line = lines.get(first.call) if first.call is not None and first.program == program.digest else None
        return CallerError(_told(first, {path.tensor for path in found})), line

    def agreement(self, program: Program) -> str:
        """What lab and inspector would have to agree to of another program, as the keyword to write; may be empty."""
        tensors = {path.tensor for path in self._found(program)}
        return f"direct_paths={_patterns(tensors)!r}" if tensors else ""

    def _found(self, program: Program) -> list[Path]:
        """Paths that nobody agreed to, nor was told of."""
        try:
            self._paths.add(program.digest, program, is_free=self._options.free_slots)
        except EvidenceError as error:
            raise CallerError(f"this step cannot be inspected: {error}") from None
        return [
            path
            for path in self._paths.paths()
            if not path.is_harmless
            and path.tensor not in self._told
            and not is_agreed(path.tensor, self._options.direct_paths)
        ]


def _told(first: Path, tensors: Collection[str]) -> str:
    more = f", and {len(tensors) - 1} tensors more" if len(tensors) > 1 else ""
    source, way = first.source, "through a gradient" if first.graded else "without passing a loss"
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
    return (
        f"{source} reaches {first.tensor}{more} by {first.operator} {way}, which leaves an inspection in doubt; "
        f"{remedy}have lab and inspector agree by direct_paths={_patterns(tensors)!r}"
    )


def _patterns(tensors: Collection[str]) -> list[str]:
    """Names or, where they are many, patterns that match them."""
    if len(tensors) <= _LISTED:
        return sorted(tensors)
    return sorted({f"{each.partition('/')[0]}/*" for each in tensors})
