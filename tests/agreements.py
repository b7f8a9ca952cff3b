"""Changes what the simulated inspectorate has countersigned, for tests of what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitor.declaration.countersigning import Admitted, Countersigned
from monitor.lab.site import Site, site_path

if TYPE_CHECKING:
    from inspector.inspection.trust import Trust

__all__ = ["UNKNOWN", "agreement", "resigned"]

UNKNOWN = Admitted(flop=0, bytes=0)
"""What a program costs that nobody has looked at."""


def agreement(trust: Trust) -> Countersigned:
    """The one declaration that a trust file holds, with its amendments."""
    first, *others = trust.agreed()
    return first.joined(others)


def resigned(run: Path, trust: Trust, **changes: Any) -> Trust:
    """The trust in which the run's inspectorate signs its declaration with other programs, names or data."""
    if "programs" in changes:
        changes["programs"] = dict.fromkeys(changes["programs"], UNKNOWN)
    key = Site.inspectorate_key(Site.read_config(site_path(run)))
    return replace(trust, countersigned=frozenset({replace(agreement(trust), **changes).sign(key)}))
