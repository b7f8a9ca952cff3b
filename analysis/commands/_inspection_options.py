"""Options of every command that inspects: what is drawn, and which devices replay it."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from analysis.commands._common import count, progress
from analysis.commands.odds import add_sampling, violation

if TYPE_CHECKING:
    from tqdm import tqdm

    from inspector.inspection.guards import Settings
    from inspector.replay.pool import Executor

__all__ = ["DEFAULT_REPLAY_DEVICES", "add_executor", "add_settings", "executor", "settings_of"]

DEFAULT_REPLAY_DEVICES = ("sse41", "mkl-compatible")


def add_settings(parser: ArgumentParser) -> None:
    """Add ``--samples``, ``--device``, ``--shared``, ``--segments`` and what says how many segments are drawn."""
    parser.add_argument("--samples", type=count, required=True, metavar="S", help="chips to draw from the registry")
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="replay device, repeatable (default: sse41 and mkl-compatible)",
    )
    parser.add_argument(
        "--shared",
        type=float,
        default=1.0,
        metavar="X",
        help=(
            "share of the drawn segments that all devices replay; each of the remaining segments is replayed by one "
            "device, chosen at random (default 1)"
        ),
    )
    parser.add_argument("--segments", type=count, metavar="N", help="replay at most N segments of a run")
    add_sampling(parser)


def settings_of(arguments: argparse.Namespace, *, seed: str | None) -> Settings:
    """The inspection that these options ask for."""
    from inspector.inspection.guards import Sampling, Settings

    return Settings(
        samples=arguments.samples,
        seed=seed,
        devices=tuple(arguments.device or DEFAULT_REPLAY_DEVICES),
        segments=arguments.segments,
        shared=arguments.shared,
        sampling=Sampling(confidence=arguments.confidence, against=violation(arguments.against)),
    )


def add_executor(parser: ArgumentParser) -> None:
    """Add ``--workers`` and ``--ray``: what replays."""
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes that replay in parallel; they share the cores (default: one for each device)",
    )
    parser.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help="address of a Ray cluster's head: each segment is replayed as one task. Needs `pip install "
        "'chipwitness[ray]'`. Several machines need RAY_AUTH_MODE=token",
    )


@contextmanager
def executor(arguments: argparse.Namespace) -> Iterator[Executor]:
    """What replays, as these options say; on a terminal a bar shows how many segments are replayed."""
    from inspector.replay.pool import DevicePool

    if getattr(arguments, "ray", None) is not None:
        from inspector.replay.ray_pool import RayPool

        pool: RayPool | DevicePool = RayPool(arguments.ray, workers=arguments.workers)
    else:
        pool = DevicePool(workers=getattr(arguments, "workers", None))
    with pool, progress(arguments, 0, "job") as bar:
        yield _Counted(pool, bar)


class _Counted:
    """What replays, with a bar over the segments that it was asked for."""

    def __init__(self, devices: Executor, bar: tqdm[Any]) -> None:
        self._devices, self._bar, self._lock = devices, bar, Lock()
        self.prepare = devices.prepare

    def run(self, name: str, job: Mapping[str, Any]) -> dict[str, object]:
        """Run one job, as the executor does."""
        size = len(job.get("segments", ())) or 1
        with self._lock:
            self._bar.total += size
            self._bar.set_postfix_str(name)
        try:
            return self._devices.run(name, job)
        finally:
            with self._lock:
                self._bar.update(size)
