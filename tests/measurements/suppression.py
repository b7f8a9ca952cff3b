"""``suppression``: bare chips whose hosts avoid snapshots that they foresee, and honest ones, by the same figure.

A lab that has read its chips' private memory knows what is due. It ends the epoch or the boot before, now and then or
always. What is then missing shows in the chance of as few snapshots (``firmware_sim.audit.Draws``). Honest chips crash,
are shut down, asked and left idle; theirs has to be as rare as it says.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bench.origin import write
from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    LABORATORY,
    TICK,
    ChipOrder,
    ChipTrust,
    DeviceMemory,
    Draws,
    FirmwareChip,
    MakerCA,
    Region,
    ScheduleAudit,
    Work,
    check_chip,
    collect_evidence,
    scheduled,
)
from firmware_sim.errors import CallerError
from inspector.inspection.suppression import DOUBTED, REJECTED

__all__ = ["WAYS", "History", "run", "table", "verdict", "write"]

Row = dict[str, Any]
WAYS = ("close the epoch", "shut down and boot", "cut the power")
"""How a host ends what it foresees a snapshot in."""
_RATES = (Fraction(1, 2), Fraction(1, 5), Fraction(1, 10))
_MAKER = MakerCA.create(b"suppression")
_LEVELS = (0.1, 0.01, 0.001)
_MOST = 0.75
"""A share of the expected snapshots; who removes as much of ``_ENOUGH`` must never be accepted."""
_ENOUGH = 40


class History:
    """The life of one chip.

    Attributes:
        avoided: snapshots that its host saw coming, and that then never were due.
    """

    def __init__(self, folder: Path, number: int, rate: Fraction) -> None:
        self.folder, self.rate, self.avoided = folder / "chip", rate, 0
        self.chance = random.Random(f"chipwitness/suppression/{number}")
        order = ChipOrder(
            maker=_MAKER, chip_id="chip", seed=b"%d" % number, snapshot_rate=rate, algorithm=DEFAULT_ALGORITHM
        )
        self.chip = FirmwareChip.from_order(self.folder, order)
        self.memory = DeviceMemory([Region.of("w", np.zeros(6, np.float32))])
        self._step, self._run = 0, 1
        self._attach()

    def _attach(self) -> None:
        self.chip.attach(self.memory, self._run_id, self._step)

    @property
    def _run_id(self) -> bytes:
        return hashlib.sha256(b"run %d" % self._run).digest()

    def begin_run(self) -> None:
        """Another run has the memory."""
        self._step, self._run = 0, self._run + 1
        self._attach()

    def work(self, ticks: Fraction) -> None:
        """Operators that take the chip so many ticks."""
        self.memory.meter.charge(Work(1, 0, int(LABORATORY.moved * ticks)))

    def commit(self) -> None:
        """A step has ended."""
        self._step += 1
        self.chip.commit(self._run_id, self._step, bytes(32))

    def end(self, way: str) -> None:
        """End the epoch, in one way."""
        if way == WAYS[0]:
            self.chip.close_epoch()
            return
        if way == WAYS[1]:
            self.chip.power_off()
        else:
            self.chip.cut_power()
        self.chip = FirmwareChip.power_on(self.folder)
        self._attach()

    def honest(self) -> None:
        """Whatever may happen to an honest chip, at times that have nothing to do with its draws."""
        chance = self.chance
        for _ in range(chance.randint(2, 40)):
            event = chance.choices(("work", "idle", "commit", *WAYS, "asked", "run"), (12, 2, 4, 1, 1, 1, 1, 1))[0]
            if event == "work":
                for _ in range(chance.randint(1, 6)):
                    self.work(Fraction(chance.randrange(1, 200), 100))
            elif event == "idle":
                self.chip.idle(chance.randrange(9))
            elif event == "commit":
                self.commit()
            elif event == "run":
                self.begin_run()
            elif event == "asked":
                self.chip.challenge(chance.randbytes(16), "v")
            else:
                self.end(event)

    def suppress(self, share: float, ways: Sequence[str]) -> None:
        """Work until so many snapshots are expected, and end what holds the next one with a chance of ``share``."""
        ticks = Fraction(_ENOUGH + 4) / self.rate
        spared = -1
        for _ in range(int(4 * ticks)):
            while (moment := self._foreseen()) is not None and moment != spared:
                if self.chance.random() < share:
                    self.end(self.chance.choice(ways))
                    self.avoided += 1
                else:
                    spared = moment
            self.work(Fraction(1, 4))
            if self.chance.random() < 0.1:
                self.commit()

    def _foreseen(self) -> int | None:
        """The next moment that is due within half a tick, as only the chip knows."""
        chip = self.chip
        now = chip._time_of(chip._shared(self.memory.meter.total))
        found = scheduled(chip._epoch_key, chip._boot, now, now + TICK // 2, chip._limit)
        return next(found, None)

    def audit(self) -> ScheduleAudit:
        """What an inspector finds, who trusts the maker."""
        trust = ChipTrust(
            ca_digests=[_MAKER.certificate_digest],
            measurements=[CURRENT_FIRMWARE.measurement],
            minimum_security_version=1,
            snapshot_rate=self.rate,
            snapshot_algorithm=DEFAULT_ALGORITHM,
        )
        nonce = self.chance.randbytes(32)
        evidence = collect_evidence(self.chip, nonce, "v")
        checked = check_chip(evidence, chip_id="chip", trust=trust, nonce=nonce, verifier_id="v", last=None)
        self.chip.cut_power()
        assert checked.audit is not None
        return checked.audit


def _lived(number: int, live: Callable[[History], None], rate: Fraction) -> tuple[ScheduleAudit, float, int]:
    with tempfile.TemporaryDirectory(prefix="chipwitness-suppression-") as folder:
        history = History(Path(folder), number, rate)
        live(history)
        audit = history.audit()
        return audit, audit.draws.chance(rate), history.avoided


def run(
    *, lies: int = 200, honest: int = 10_000, seed: int = 0, progress: Callable[[int], object] = lambda done: None
) -> list[Row]:
    """Let so many lying and honest chips live.

    Rows have ``work`` (a share of the foreseen snapshots that hosts avoid, or ``honest``), ``mode`` (``bare chips``),
    ``seconds``, ``ratio`` (None), ``seed``, ``histories``, ``expected`` and ``demanded`` (snapshots, in all),
    ``rejected``, ``doubted``, ``predicted`` (how many of the lying ones are one of these on average, where as much is
    missing), ``accepted``, ``below`` (how many chances are at most .1, .01 and .001), ``least`` (the lowest chance) and
    ``problems``.

    Raises:
        CallerError: a negative number, or no history.
    """
    if min(lies, honest, seed) < 0 or not lies + honest:
        raise CallerError("give numbers of at least 0, not both of them 0")
    chance = random.Random(f"chipwitness/suppression/{seed}")
    lives: dict[str, list[tuple[float, Callable[[History], None]]]] = {}
    shares = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
    for number in range(lies):
        share, ways = shares[number % len(shares)], chance.sample(WAYS, chance.randint(1, len(WAYS)))

        def lie(history: History, share: float = share, ways: Sequence[str] = ways) -> None:
            history.suppress(share, ways)

        lives.setdefault(f"avoids {share:.0%}", []).append((share, lie))
    if honest:
        lives["honest"] = [(0.0, History.honest)] * honest
    rows, number = [], seed * 1_000_000
    for name, each in lives.items():
        begun, chances, expected, demanded, problems = time.perf_counter(), list[float](), 0.0, 0, list[str]()
        audits: list[tuple[Draws, Fraction]] = []
        for _, live in each:
            rate = chance.choice(_RATES)
            audit, found, avoided = _lived(number, live, rate)
            chances.append(found)
            expected, demanded = expected + audit.draws.expected(rate), demanded + audit.draws.demanded
            missing = 1 - audit.draws.demanded / max(audit.draws.expected(rate), 1e-9)
            if name != "honest" and missing >= _MOST and found >= DOUBTED:
                problems.append(f"history {number}: {missing:.0%} are missing, {avoided} were avoided; it is accepted")
            if name == "honest" and found < REJECTED:
                problems.append(f"history {number}: honest, and as few have a chance of {found:.2g}")
            audits.append((audit.draws, rate))
            number += 1
            progress(1)
        below = {str(level): sum(found <= level for found in chances) for level in _LEVELS}
        if name == "honest":
            most = {level: len(each) * level + 4 * (len(each) * level) ** 0.5 for level in _LEVELS}
            problems += [
                f"{below[str(level)]} of {len(each)} are at most {level}"
                for level in _LEVELS
                if below[str(level)] > most[level]
            ]
        rows.append(
            {
                "work": name,
                "mode": "bare chips",
                "seconds": time.perf_counter() - begun,
                "ratio": None,
                "seed": seed,
                "histories": len(each),
                "expected": expected,
                "demanded": demanded,
                "rejected": sum(found < REJECTED for found in chances),
                "doubted": sum(REJECTED <= found < DOUBTED for found in chances),
                "predicted": sum(_power(draws, rate, 1 - demanded / expected) for draws, rate in audits)
                if name != "honest"
                else 0.0,
                "accepted": sum(found >= DOUBTED for found in chances),
                "below": below,
                "least": min(chances),
                "problems": problems,
            }
        )
    return rows


def _power(draws: Draws, rate: Fraction, share: float) -> float:
    """The chance that as much missing as a share of what is due leaves an inspection in doubt, or is rejected.

    What is left of the draws is taken for binomial, with the rest of the rate.
    """
    from scipy.stats import binom

    ticks = draws.whole + round(sum(draws.parts))
    few = next(most for most in range(ticks + 1) if replace(draws, demanded=most).chance(rate) >= DOUBTED)
    return float(binom.cdf(few - 1, ticks, float(rate) * (1 - share)))


def verdict(rows: Sequence[Row]) -> str | None:
    """What breaks a promise, or None."""
    problems = [f"{row['work']}: {text}" for row in rows for text in row["problems"]]
    return f"{len(problems)} histories break a promise; {problems[0]}" if problems else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [
        f"{'':12} {'histories':>9} {'expected':>9} {'due':>8}  rejected doubted (predicted) accepted   least chance"
    ]
    for row in rows:
        lines.append(
            f"{row['work']:12} {row['histories']:9} {row['expected']:9.0f} {row['demanded']:8}  {row['rejected']:8} "
            f"{row['doubted']:7} {row['predicted']:11.1f} {row['accepted']:8}   {row['least']:.2g}"
        )
        lines += [f"    {text}" for text in row["problems"][:5]]
    return lines
