"""``crashes``: a recorded loop whose machine stops, and what resuming makes of the files as that may leave them.

A run is recorded once, and every operation on its files noted. From then on each crash is a folder: the run resumed in
it must end as the undisturbed one did, or be refused with one line. It must not be refused, nor have lost a step that
was taken, where that was promised: after the end of the process, and with ``sync`` after a power loss. The third kind
puts everything back to an earlier state but the chips, which keep what they hold.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import write
from firmware_sim.errors import CallerError, ChipwitnessError
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from tests.measurements._disk import KINDS, Disk, Kind, noted

__all__ = ["STEPS", "Crash", "Crashes", "Loop", "run", "verdict", "write"]

Row = dict[str, Any]

STEPS = 7
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_RUN = "run"
_SLACK = "could have been anything"
"""Why a verdict is left open where a short run repeats or loses more than inspections let pass."""
_IN_A_SNAPSHOT = "in the middle of a snapshot"
"""An inspection cannot tell such a crash from a lab that cuts the power in order to escape a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How a crash ended.

    Attributes:
        after: operations on files before it.
        taken: steps that the loop had taken by then; -1 while the recorder was being made.
        resumed: steps from which the run went on; -1 where it was refused.
        refusal: the line that says why.
        problem: what must not be; empty where all is well.
    """

    after: int
    taken: int
    resumed: int
    refusal: str
    problem: str


class _Source:
    """Batches in an order that is part of the loop's state."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def next(self) -> Tensor:
        return torch.randn(4, 6, generator=self._generator)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


class Loop:
    """A loop that draws its batches, trains with dropout and momentum, and can be resumed."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.25))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.source = _Source()
        self.stateful = {"source": self.source}

    def train(self, recorder: Recorder, tell: Callable[[int], object] = lambda _: None) -> str:
        tell(recorder.steps)
        while recorder.steps < STEPS:
            batch = self.source.next()
            with recorder.step(batch):
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(batch), batch[:, :3]).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
            tell(recorder.steps)
        return recorder.finish()


class Crashes:
    """A run whose files' operations were noted, and what its crashes lead to.

    Args:
        home: folder that does not exist yet; each crash has one below it, for as long as it is looked at.
        sync: as in ``Recorder``.

    Attributes:
        disk: the operations.
        taken: pairs of how many there were, and how many steps had been taken by then.
    """

    def __init__(self, home: Path, *, sync: bool) -> None:
        home.mkdir()
        self._home, self._sync = home.absolute(), sync
        self.taken: list[tuple[int, int]] = [(0, -1)]
        with noted(self._home / "whole") as disk:
            loop = Loop()
            recorder = Recorder(
                loop.model,
                loop.optimizer,
                out=disk.root / _RUN,
                seed=5,
                chips=2,
                beacon_every=3,
                checkpoint_every=2,
                keep=1,
                snapshot_rate=Fraction(1, 2),
                sync=sync,
                stateful=loop.stateful,
                started=_STARTED,
                hours=1.0,
            )
            self._digest = loop.train(recorder, lambda steps: self.taken.append((len(disk), steps)))
        self.disk: Disk = disk
        self._leaves = _leaves(disk.root / _RUN)

    def all(self, kind: Kind, *, count: int, seed: int) -> Iterator[Crash]:
        """So many crashes of one kind, after seeded numbers of operations."""
        rng = random.Random(f"{kind} {seed}")
        for number in range(count):
            yield self.crash(rng.randrange(1, len(self.disk) + 1), kind, seed=seed * count + number)

    def crash(self, after: int, kind: Kind, *, seed: int) -> Crash:
        """What one crash leads to."""
        home = self._home / f"{kind} {seed}"
        self.disk.image(home, after=after, kind=kind, seed=seed, apart=f"{_RUN}.lab/chips")
        taken = max(steps for at, steps in self.taken if at <= after)
        resumed, refusal, problem = -1, "", ""
        try:
            with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):  # the true disk is of no interest
                resumed, problem = self.resumed(home / _RUN)
        except ChipwitnessError as error:
            refusal = str(error)
            problem = "" if refusal and "\n" not in refusal else f"refused by no single line: {refusal!r}"
        finally:
            shutil.rmtree(home)
        if taken >= 0 and (kind == "kill" or (kind == "power" and self._sync)) and not problem:
            problem = f"refused: {refusal}" if refusal else ""
            if 0 <= resumed < taken:
                problem = f"went on from step {resumed} of {taken} that were taken"
        return Crash(after=after, taken=taken, resumed=resumed, refusal=refusal, problem=problem)

    def resumed(self, run: Path) -> tuple[int, str]:
        """From which step the run goes on, and what is wrong with its end."""
        loop = Loop()
        try:
            recorder = Recorder.resume(loop.model, loop.optimizer, out=run, sync=self._sync, stateful=loop.stateful)
        except CallerError:
            if not run.is_dir() or not _open(run).finished:
                raise
            _open(run).check_contents()  # what there is no more to resume
            begun = STEPS
        else:
            begun = recorder.steps
            if loop.train(recorder) != self._digest:
                return begun, "ends in another state"
        if _leaves(run) != self._leaves:
            return begun, "has another history"
        verdict = verify(run, Trust.load([run.with_name(f"{_RUN}.trust.json")], [run]), now=_STARTED)
        doubts = [] if verdict.outcome is Outcome.ACCEPT else [reason.text for reason in verdict.reasons]
        if verdict.outcome is Outcome.REJECT or not all(_IN_A_SNAPSHOT in text or _SLACK in text for text in doubts):
            return begun, f"is judged {verdict.outcome.value}: {' | '.join(doubts)}"
        return begun, ""


def _open(run: Path) -> RunFolder:
    return RunFolder(run, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run))).verifying)


def _leaves(run: Path) -> Sequence[Any]:
    return list(_open(run).load_steps()[0])


def run(*, trials: int = 200, seed: int = 0, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Crash so often in each way.

    Rows hold ``work`` (``kill``, ``power`` or ``put back``), ``mode`` (``sync`` or ``plain``), ``seconds`` (of all),
    ``ratio`` (None), ``crashes``, ``resumed``, ``refused``, ``lost`` (how many ended as none may) and ``problems``
    (their texts).

    Args:
        trials: crashes of each kind and mode.
        seed: of all that is drawn.
        progress: called with 1 after each crash.

    Raises:
        CallerError: less than one crash.
    """
    if trials < 1:
        raise CallerError("a crash at least")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as name:
        for mode in ("plain", "sync"):
            crashes = Crashes(Path(name) / mode, sync=mode == "sync")
            for kind in KINDS:
                start, found = time.perf_counter(), []
                for crash in crashes.all(kind, count=trials, seed=seed):
                    found.append(crash)
                    if progress:
                        progress(1)
                problems = [f"after {crash.after} operations: {crash.problem}" for crash in found if crash.problem]
                rows.append(
                    {
                        "work": kind,
                        "mode": mode,
                        "seconds": time.perf_counter() - start,
                        "ratio": None,
                        "crashes": trials,
                        "resumed": sum(not crash.refusal for crash in found),
                        "refused": sum(bool(crash.refusal) for crash in found),
                        "lost": len(problems),
                        "problems": problems,
                    }
                )
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """What ended as it may not, or None."""
    lost = sum(row["lost"] for row in rows)
    return f"{lost} of {sum(row['crashes'] for row in rows)} crashes did not end as they must" if lost else None
