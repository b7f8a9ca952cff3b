"""A lab that works for itself on its chips, in ways that a log of its chips can hold, and tells how much it did."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from firmware_sim import NO_WORK, DeviceMemory, Meter, Work
from firmware_sim.dishonest_chips import power_on_chip
from monitor.lab.conduct import Conduct
from monitor.lab.simulated_lab import SimulatedLab
from monitor.replay.ledger import attached_from
from monitor.replay.reexecution import OwnSteps
from monitor.transcript import RunFolder

if TYPE_CHECKING:
    from monitor.lab.host import Host
    from monitor.replay.moment import Moment
    from monitor.transcript import Leaf

__all__ = ["LIES", "HiddenWork"]


class HiddenWork(Conduct):
    """Hides work by the lies of ``plan``: by step, which are told once it is committed.

    Repeated steps are simply taken again: a lab that puts their known states back past every operator, and works for
    itself meanwhile, shows its chips the same.

    Attributes:
        hidden: by chip, what it counted that no declared step needs.
        finished: a finished run of the lab, as a decoy.
    """

    keeps_leaves = True

    def __init__(self, plan: Mapping[int, str], seed: int, finished: RunFolder | None = None) -> None:
        self._plan, self._random = plan, random.Random(f"ledger {seed}")
        self.hidden: dict[str, Work] = {}
        self.finished = finished
        self._told = NO_WORK
        self._usual = NO_WORK

    def before_commit(self, moment: Moment) -> None:
        self._usual = moment.program.work

    def declare(self, leaf: Leaf) -> Leaf:
        told, self._told = self._told, NO_WORK
        if leaf.execution is None or told == NO_WORK:
            return leaf
        return replace(leaf, execution=replace(leaf.execution, outside=leaf.execution.outside + told))

    def after_step(self, step: int, host: Host) -> None:
        lie = self._plan.get(step)
        if lie is not None and len(host.leaves) > 1:
            LIES[lie](self, host, step)

    def some(self, most: Work, *, flop: bool = True) -> Work:
        """From a hundredth of a step to three of them, at most so much."""
        part = 10 ** self._random.uniform(-2, 0.5)
        usual = self._usual
        return Work(
            max(min(int(usual.calls * part), most.calls), 1),
            min(int(usual.flop * part), most.flop) if flop else 0,
            min(int(usual.moved * part), most.moved),
        )

    def work(self, host: Host, done: Work) -> Work:
        """Work for oneself on the chips."""
        host.memory.meter.charge(done)
        self.note(host, done)
        return done

    def note(self, host: Host, done: Work) -> None:
        for chip, shard in zip(host.lab.chips, host.memory.shards, strict=True):
            self.hidden[chip.chip_id] = self.hidden.get(chip.chip_id, NO_WORK) + done.share(*shard.share)

    def _repeat(self, host: Host, step: int, *, back: bool = False, gap: bool = False) -> None:
        """Boot, and take the steps since a checkpoint once more, or since the start."""
        restart(host.lab, gap=gap)
        run = RunFolder(host.writer.folder, host.lab.key.verifying)
        first = 0 if back else attached_from(step, host.declared.checkpoint_every)
        steps = OwnSteps(run, run.checkpoint_before(first), Conduct(), memory=host.memory)
        while steps.step < first:
            steps.take()
        host.attach_memory(first)
        self._announce(host, first)
        for number in range(first + 1, step + 1):
            outside = host.leaves[number].execution.outside  # type: ignore[union-attr]
            before = host.memory.meter.total
            host.memory.meter.charge(outside)
            steps.take()
            self.note(host, host.memory.meter.total - before)
            self._announce(host, number)

    def _announce(self, host: Host, step: int) -> None:
        for chip in host.lab.chips:
            chip.commit(host._run_id, step, host.root(step))

    def repeats(self, host: Host, step: int) -> None:
        for _ in range(self._random.choice((1, 1, 2, 4))):
            self._repeat(host, step, gap=self._random.random() < 0.3)

    def back(self, host: Host, step: int) -> None:
        self._repeat(host, step, back=True)

    def cut(self, host: Host, step: int) -> None:
        self.work(host, self.some(self._usual))
        self._repeat(host, step, gap=True)

    def behind(self, host: Host, step: int) -> None:
        self.work(host, self.some(host.declared.allowance))
        restart(host.lab)
        host.attach_memory(step)
        self._announce(host, step)

    def beside(self, host: Host, step: int) -> None:
        self._told += self.work(host, self.some(host.declared.allowance))

    def sums(self, host: Host, step: int) -> None:
        """Products that are written as sums, which count no FLOP."""
        self._told += self.work(host, self.some(host.declared.allowance, flop=False))

    def untold(self, host: Host, step: int) -> None:
        """Whole steps that nobody is told of."""
        self.work(host, self._usual)

    def decoy(self, host: Host, step: int) -> None:
        """Say the head of a finished run again, and work behind its last step."""
        if self.finished is None:
            self.behind(host, step)
            return
        restart(host.lab)
        other = self.finished
        memory = other.declared.empty_memory(host.memory.place)
        last = other.declared.steps
        memory.restore(other.checkpoint(last))
        root = other.load_steps()[1].root(last + 1)
        for chip, shard in zip(host.lab.chips, memory.shards, strict=True):
            chip.attach(shard, other.metadata.run_id, last)
            chip.commit(other.metadata.run_id, last, root)
        done = Work(8, 64, 4096)
        memory.meter.charge(done)
        for chip, shard in zip(host.lab.chips, memory.shards, strict=True):
            self.hidden[chip.chip_id] = self.hidden.get(chip.chip_id, NO_WORK) + done.share(*shard.share)
        restart(host.lab)
        host.attach_memory(step)
        self._announce(host, step)

    def one_chip(self, host: Host, step: int) -> None:
        """Only the first chip works for itself, behind the step, again and again."""
        lab, shard = host.lab, host.memory.shards[0]
        name = lab.chips[0].chip_id
        for _ in range(self._random.choice((1, 3, 8))):
            lab.chips[0].power_off()
            lab.chips[0] = power_on_chip(None, SimulatedLab.home_of(lab.folder) / "chips" / name)
            meter = Meter()
            lab.chips[0].attach(DeviceMemory(shard.regions, meter=meter, share=shard.share), host._run_id, step)
            lab.chips[0].commit(host._run_id, step, host.root(step))
            done = self.some(host.declared.allowance)
            meter.charge(done)
            self.hidden[name] = self.hidden.get(name, NO_WORK) + done.share(*shard.share)
        lab.chips[0].power_off()
        lab.chips[0] = power_on_chip(None, SimulatedLab.home_of(lab.folder) / "chips" / name)
        lab.chips[0].attach(shard, host._run_id, step)
        lab.chips[0].commit(host._run_id, step, host.root(step))


def restart(lab: SimulatedLab, *, gap: bool = False) -> None:
    """Boot all chips, in order or after a power cut."""
    if gap:
        lab.cut_power()
        for chips in (lab.chips, lab.idle):
            names = [chip.chip_id for chip in chips]
            chips[:] = [power_on_chip(None, SimulatedLab.home_of(lab.folder) / "chips" / name) for name in names]
    else:
        lab.restart()


LIES: Mapping[str, Callable[[HiddenWork, Host, int], None]] = {
    "repeats": HiddenWork.repeats,
    "back": HiddenWork.back,
    "cut": HiddenWork.cut,
    "behind": HiddenWork.behind,
    "beside": HiddenWork.beside,
    "sums": HiddenWork.sums,
    "untold": HiddenWork.untold,
    "decoy": HiddenWork.decoy,
    "one chip": HiddenWork.one_chip,
}
"""Each lie by its name."""
