"""Programs for the explorer: which call of a recorded step reads what which other made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.text import visible
from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.review import read_programs
from monitor.programs.memory import Access, Memory
from monitor.programs.program import Program

__all__ = ["program_graphs"]

_MOST_PROGRAMS, _MOST_CALLS = 8, 2_000


def program_graphs(folder: Path) -> dict[str, object]:
    """Return the graphs of a run folder's programs, for JSON; what cannot be read is said in ``problem``.

    Each has program (its digest), calls, views and left_out (counts), nodes (kind, name, number of the call or null,
    depth: the longest way to it from what the step began with) and edges (from, to). Views are no nodes: who reads one
    reads what it is a view of.
    """
    try:
        found = read_programs(folder)
        graphs = [_graph(digest, found[digest]) for digest in sorted(found)[:_MOST_PROGRAMS]]
    except (CallerError, EvidenceError) as error:
        return {"programs": [], "left_out": 0, "problem": visible(error)}
    return {"programs": graphs, "left_out": len(found) - len(graphs), "problem": None}


def _graph(digest: str, program: Program) -> dict[str, object]:
    memory = Memory(program)
    nodes: list[list[Any]] = []
    edges: list[tuple[int, int]] = []
    writer: dict[int, int] = {}

    def reader_of(region: int) -> int:
        """Return the node that last wrote a region; one for what the region began as, if none has."""
        if region not in writer:
            kind = memory.regions[region].source.split(":", 1)[0]
            writer[region] = len(nodes)
            nodes.append([kind, visible(memory.regions[region].source), None, 0])
        return writer[region]

    shown = [access for access in memory.accesses if not access.is_view]
    for access in shown[:_MOST_CALLS]:
        sources = sorted({reader_of(spot.region) for spot in access.inputs})
        place = len(nodes)
        depth = 1 + max((nodes[source][3] for source in sources), default=0)
        nodes.append(["call", visible(access.operator), access.number, depth])
        edges += [(source, place) for source in sources]
        for region in _made(access):
            writer[region] = place
    return {
        "program": visible(digest),
        "calls": len(memory.accesses),
        "views": len(memory.accesses) - len(shown),
        "left_out": max(0, len(shown) - _MOST_CALLS),
        "nodes": nodes,
        "edges": edges,
    }


def _made(access: Access) -> list[int]:
    """Return the regions that a call writes or makes."""
    return [access.inputs[place].region for place in access.written] + [spot.region for spot in access.results]
