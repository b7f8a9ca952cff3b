"""What an operator sees of a server: logs, a JSON object a line, and counters in Prometheus' text format.

Neither holds a message, a key or a file's content. Text of others is cut, and never printed raw.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock
from typing import TextIO

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from firmware_sim.evidence import canonical

__all__ = ["Telemetry"]

_CHARACTERS = 300


class Telemetry:
    """Logs and counters of one party.

    Args:
        party: its name.
        stream: where log lines go; standard error by default.
    """

    def __init__(self, party: str, stream: TextIO | None = None) -> None:
        self._party, self._stream = party, stream or sys.stderr
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = Lock()

    def count(self, name: str, kind: str = "", by: int = 1) -> None:
        """Add to a counter ``chipwitness_NAME_total{kind=KIND}``; both words are this program's own."""
        with self._lock:
            self._counts[name, kind] = self._counts.get((name, kind), 0) + by

    def log(self, event: str, **fields: str | int) -> None:
        """Write a line about an event; texts are cut and made ASCII."""
        shown = {
            name: each if isinstance(each, int) else ascii(each)[1:-1][:_CHARACTERS] for name, each in fields.items()
        }
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = canonical.encode({"time": time, "party": self._party, "event": event, **shown}).decode()
        with self._lock:
            print(line, file=self._stream, flush=True)

    def text(self) -> str:
        """All counters, in Prometheus' text exposition format 0.0.4."""
        with self._lock:
            counts = sorted(self._counts.items())
        lines, seen = [], set[str]()
        for (name, kind), value in counts:
            full = f"chipwitness_{name}_total"
            lines += [] if full in seen else [f"# TYPE {full} counter"]
            seen.add(full)
            lines.append(f'{full}{{party="{self._party}",kind="{kind}"}} {value}')
        return "\n".join(lines) + "\n"

    def application(self, beat: Callable[[], float], seconds: float) -> Starlette:
        """Serves ``/metrics`` and ``/health``: well is who has beaten within these seconds.

        Args:
            beat: when that was last, on the monotonic clock.
        """

        async def metrics(_: Request) -> Response:
            return PlainTextResponse(self.text(), media_type="text/plain; version=0.0.4")

        async def health(_: Request) -> Response:
            is_well = time.monotonic() - beat() <= seconds
            return PlainTextResponse("well\n" if is_well else "stuck\n", 200 if is_well else 503)

        return Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])
