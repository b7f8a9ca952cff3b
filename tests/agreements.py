"""Changes what the simulated inspectorate has countersigned, for tests of what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspector.inspection.review import read_programs
from monitor.declaration.countersignature import Admitted, Countersigned
from monitor.lab.simulated_lab import SimulatedLab, lab_path

if TYPE_CHECKING:
    from inspector.inspection.trust import Trust

__all__ = ["agreement", "costs", "resigned"]


def costs(run: Path, digests: Iterable[str]) -> dict[str, Admitted]:
    """What programs cost, nothing those that the run does not hold."""
    held = read_programs(run)
    nothing = Admitted(flop=0, most_flop=0, bytes=0)
    return {digest: Admitted.of(held[digest]) if digest in held else nothing for digest in digests}


def agreement(trust: Trust) -> Countersigned:
    """The one declaration that a trust file holds, with its amendments."""
    first, *others = trust.agreed()
    return first.joined(others)


def resigned(run: Path, trust: Trust, **changes: Any) -> Trust:
    """The trust in which the run's inspectorate signs its declaration with other programs, names or data."""
    if "programs" in changes and not isinstance(changes["programs"], dict):
        changes["programs"] = costs(run, changes["programs"])
    key = SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab_path(run)))
    return replace(trust, countersigned=frozenset({replace(agreement(trust), **changes).sign(key)}))
