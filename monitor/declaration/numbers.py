"""The numbers that a declared optimizer and schedule give the steps of a program, where they were not recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from monitor.declaration.binding import ProgramWrites, bind
from monitor.declaration.reference import ReferenceOptimizer
from monitor.declaration.statement import Declaration
from monitor.programs.program import Program, parse_hex

__all__ = ["declared_numbers"]


def declared_numbers(task: Declaration, program: Program, start: Mapping[str, Tensor]) -> Iterator[list[float]]:
    """The scalars of steps 1, 2, … of a run all of whose steps run one program.

    Args:
        task: declares a schedule.
        start: the state that the run begins with, under ``kind/name``; read now, not later.

    Raises:
        NotBound: the program's updates are not those of the declared optimizer.
    """
    return _numbers(task, program, ReferenceOptimizer(task, start))


def _numbers(task: Declaration, program: Program, reference: ReferenceOptimizer) -> Iterator[list[float]]:
    assert task.schedule is not None
    writes, step, bound = ProgramWrites(program), 1, None
    while True:
        groups = [{**group, "lr": task.schedule.rate(group["lr"], step)} for group in task.groups]
        update = reference.take(writes.updates, groups, writes.present)
        bound = bound or bind(writes, update, task)
        scalars = list(program.numbers)
        for mine, theirs in bound.scalars.items():
            scalars[mine] = parse_hex(update.scalars[theirs])
        yield scalars
        step += 1
