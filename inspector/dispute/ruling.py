"""What a referee says about one operator of a step, and the step as both parties were to take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from firmware_sim.errors import EvidenceError
from inspector.dispute.messages import CheckedProver
from monitor.declaration.statement import Declaration
from monitor.programs.constants import Constant
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.replay.tracing import specification
from monitor.sharding import Layout
from monitor.transcript import Execution

__all__ = ["INDEPENDENT", "Parties", "Ruling", "StepTask", "compare"]

Parties: TypeAlias = tuple[CheckedProver, CheckedProver]

INDEPENDENT = "both roundings are lawful"
"""Case of a ruling between parties that recorded for themselves, and may both be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Who is wrong, about which operator, and in which of the decision cases; no one where nothing decides.

    Attributes:
        tile: the elements that were computed, where not all were.
    """

    guilty: tuple[str, ...]
    operator: str | None
    text: str
    case: str
    executed: int = 0
    tile: str | None = None


def compare(right: Mapping[str, bool], operator: str, what: str, tile: str | None = None) -> Ruling:
    """Rule against each party that is not right about ``what``."""
    guilty = tuple(name for name, is_right in right.items() if not is_right)
    text = f"the {what} of {operator} that {', '.join(guilty) or 'no one'} states is not what the task gives"
    text = text if tile is None else f"{text}, in {tile}"
    return Ruling(guilty=guilty, operator=operator, text=text, case=what, tile=tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """One step as both parties were to take it.

    Attributes:
        batch: opens the step's batch; EvidenceError where no party shows it.
        constant: opens a constant of the program by its number; EvidenceError where no party shows it.
        log: the rounding log that both obeyed; None where each recorded on its own.
        recorder: the party that wrote it.
        stopped: a party that says that the step cannot be taken under the log; its trace ends with the operator at
            which it stopped.
    """

    step: int
    declared: Declaration
    layout: Layout
    program: Program
    execution: Execution
    batch: Callable[[], Mapping[str, Tensor]]
    constant: Callable[[int], Constant]
    log: bytes | None = None
    recorder: str = ""
    stopped: str = ""

    def specification(self) -> list[dict[str, Any]]:
        """Specification of the step's operators, equal for all honest provers."""
        return specification(self.program, self.declared, self.execution)

    def source(self, kind: str, name: str) -> Tensor:
        """A tensor that the step reads and no operator made: of the batch, or a constant."""
        if kind == "batch":
            return self.batch()[name]
        if kind == "constant":
            return self.constant(int(name)).tensor()
        raise EvidenceError(f"a step reads no {kind}")

    def keys(self, index: int) -> RepeatedKeys:
        """Keys for a random operator."""
        keys = RepeatedKeys(self.declared.seed, self.step)
        keys.expect(self.program.calls[index]["draws"])
        return keys
