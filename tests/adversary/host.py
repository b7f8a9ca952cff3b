"""The lab's host: it stands between the recorder and the chips, and speaks to them as it likes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from firmware_sim import NO_RUN, Chip, DeviceMemory
from monitor.files import Files
from monitor.lab.simulated_lab import SimulatedLab

if TYPE_CHECKING:
    from pathlib import Path

    from firmware_sim import Roofline
    from monitor.lab.simulated_lab import LabConfig
    from tests.adversary.lies import Lie
    from tests.adversary.world import World

__all__ = ["Puppet", "Stretch", "View", "lab_of", "slices"]


@dataclass(slots=True)
class Stretch:
    """Ticks of one boot of a chip in which a lie can be seen.

    Only whole ones count: in a part of a tick there may be no snapshot, whatever the rate.
    """

    lie: Lie
    tick: int = 0
    """The first one that is not counted yet, and can be."""

    def until(self, now: int, chip: int) -> None:
        """Count the ticks before the current one."""
        if now > self.tick:
            self.lie.hit(chip, now - self.tick)
            self.tick = now


@dataclass(slots=True)
class View:
    """What a host shows in place of what it trains, whenever time passes."""

    values: list[Tensor]
    stretch: Stretch


def slices(memory: DeviceMemory) -> list[Tensor]:
    """The live elements of each tensor that a region is of: a snapshot covers blocks, and so what other chips hold."""
    return [r.tensor.detach().reshape(-1) for r in memory.regions]


@contextmanager
def _by_pointer() -> Iterator[None]:
    """What a host does to its memory past PyTorch's dispatcher, where no recorder sees it."""
    with torch.no_grad(), _disable_current_modes():
        yield


class Puppet(Chip):
    """A chip whose commands pass through the host."""

    def __init__(self, world: World, chip: Any, number: int) -> None:
        self.world = world
        self.chip = chip
        self.number = number
        self.memory: DeviceMemory | None = None
        self.run_id = NO_RUN
        self.step = 0
        self.digest = bytes(32)
        self.history: dict[int, list[Tensor]] = {}
        self.view: View | None = None
        self.decoy: Lie | None = None
        self.hostile: Stretch | None = None
        self.untold: Lie | None = None
        self.other_head: Lie | None = None
        self.open: Lie | None = None
        self.watched: list[Stretch] = []

    @property
    def chip_id(self) -> str:
        return self.chip.chip_id

    def attach(self, memory: DeviceMemory, run_id: bytes, step: int) -> Any:
        self.memory, self.run_id, self.step = memory, run_id, step
        if self.hostile is not None:
            return self.chip.attach(_hostile(memory), run_id, step)
        return self.chip.attach(memory, run_id, step)

    def commit(self, run_id: bytes, step: int, digest: bytes) -> Any:
        self.run_id, self.step, self.digest = run_id, step, digest
        if self.memory is not None:
            self.history[step] = [values.clone() for values in slices(self.memory)]
        self.look()
        if step and self.decoy is not None:  # whose meter has counted nothing of the step
            self.decoy.hit(self.number)
        if self.untold is not None:
            self.untold.hit(self.number)
            self.untold = None
            return None
        if self.other_head is not None:
            digest = bytes(byte ^ 0xFF for byte in digest)
            self.other_head.hit(self.number)
            self.other_head = None
        record = self.chip.commit(run_id, step, digest)
        if self.view is not None:
            self.idle(2)
        return record

    def look(self) -> None:
        """Count the ticks that have passed in which lies about the whole chip can be seen."""
        for stretch in self.stretches:
            stretch.until(self.chip.time, self.number)

    @property
    def stretches(self) -> list[Stretch]:
        """Of lies about the whole chip."""
        return self.watched if self.hostile is None else [*self.watched, self.hostile]

    def elsewhere(self) -> None:
        """Time has passed in which nothing was shown in place of what there is."""
        if self.view is not None:
            self.view.stretch.tick = self.chip.time + 1

    @contextmanager
    def viewed(self) -> Iterator[None]:
        """Show what the host shows while some time passes, if it shows anything."""
        view = self.view
        if view is None or self.memory is None:
            yield
            return
        with self.showing(view.values) as differs:
            yield
        if differs:
            view.stretch.until(self.chip.time, self.number)
        else:
            self.elsewhere()

    @contextmanager
    def showing(self, values: list[Tensor]) -> Iterator[bool]:
        """Put other values into the chip's memory for a moment; tells whether they differ from what is there."""
        assert self.memory is not None
        with _by_pointer():
            live = slices(self.memory)
            kept = [tensor.clone() for tensor in live]
            differs = any(not torch.equal(mine, other) for mine, other in zip(live, values, strict=True))
            for tensor, other in zip(live, values, strict=True):
                tensor.copy_(other)
        try:
            yield differs
        finally:
            with _by_pointer():
                for tensor, other in zip(live, kept, strict=True):
                    tensor.copy_(other)

    def noise(self, seed: int) -> list[Tensor]:
        """Made-up values for the chip's memory."""
        assert self.memory is not None
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand(len(values), generator=generator).to(values.dtype) + 7 for values in slices(self.memory)]

    def reboot(self, *, in_order: bool = True) -> None:
        """Take the power away and give it back; memory is not attached then."""
        self.look()
        chip = self.chip
        folder, kind = chip._silicon.folder, type(chip)
        chip.power_off() if in_order else chip.cut_power()
        self.chip = kind.power_on(folder)
        for stretch in self.stretches:
            stretch.tick = 0
        self.elsewhere()

    def attach_again(self) -> None:
        """Attach the run's memory after a boot, and commit the newest step again, as an honest host does."""
        self.chip.attach(self.memory, self.run_id, self.step)
        self.chip.commit(self.run_id, self.step, self.digest)
        self.decoy = self.hostile = None
        self.elsewhere()

    def idle(self, ticks: int) -> Any:
        with self.viewed():
            return self.chip.idle(ticks)

    @property
    def position(self) -> tuple[int, int]:
        return self.chip.position

    def beacon(self, signed: bytes) -> Any:
        return self.chip.beacon(signed)

    def prune(self, signed: bytes) -> int:
        return self.chip.prune(signed)

    def close_epoch(self) -> int:
        if self.open is not None:
            return 0
        self.look()
        for stretch in self.stretches:  # of the tick in which two epochs meet, each has a part
            stretch.tick = self.chip.time + 1
        self.elsewhere()
        return self.chip.close_epoch()

    def reveal(self) -> Any:
        return self.chip.reveal()

    def quote(self, nonce: bytes, verifier_id: str) -> bytes:
        return self.chip.quote(nonce, verifier_id)

    def challenge(self, nonce: bytes, verifier_id: str) -> bytes:
        chip = self.chip
        return chip.challenge(nonce, verifier_id) if self.open is None else chip.quote(nonce, verifier_id)

    def log_bytes(self) -> bytes:
        return self.chip.log_bytes()

    def certificate_chain(self) -> bytes:
        return self.chip.certificate_chain()

    def power_off(self) -> None:
        if self.world.scene.is_honest:
            self.chip.power_off()

    def cut_power(self) -> None:
        self.chip.cut_power()

    @property
    def utilisation(self) -> Any:
        return self.chip.utilisation


class _Trick(np.ndarray):
    """Shows what the lab declares whenever the chip looks at it, whatever it holds."""

    shown: Tensor

    def reshape(self, *shape: Any, **options: Any) -> Any:
        return self.shown.detach().numpy().reshape(*shape, **options)


def _hostile(memory: DeviceMemory) -> DeviceMemory:
    """Regions over zeros that look like those of the declared training."""
    regions = []
    for region in memory.regions:
        trick = np.zeros(region.shape, dtype=region.dtype).view(_Trick)
        trick.shown = region.tensor
        regions.append(replace(region, tensor=trick))
    return DeviceMemory(regions, meter=memory.meter, share=memory.share)


def lab_of(world: World) -> type[SimulatedLab]:
    """The lab's lab with all chips behind the host."""

    class LabSite(SimulatedLab):
        @classmethod
        def create(
            cls, folder: Path, config: LabConfig, clocks: Sequence[Roofline], files: Files | None = None
        ) -> SimulatedLab:
            if world.chips and not world.scene.is_honest:  # a later run, on the chips that are at work
                folder.mkdir(parents=True)
                (folder / "lab.json").write_bytes(config.encoded())
                lab: SimulatedLab = cls(folder, config, list(world.chips), files or Files())
            else:
                lab = super().create(folder, world.crooked(config), clocks, files)
                lab.chips = world.adopt(lab.chips, lab.idle)
            world.before_run()
            return lab

        @classmethod
        def reopen(cls, folder: Path, files: Files | None = None) -> SimulatedLab:
            config, files = SimulatedLab.read_config(folder), files or Files()
            lab = cls(folder, config, cls._power_on(folder, config, files), files)
            lab.chips = world.adopt(lab.chips, lab.idle)
            return lab

        def restart(self) -> None:
            for chip in world.chips:
                chip.reboot()

        @staticmethod
        def read_config(folder: Path) -> LabConfig:
            return world.honest_looking(SimulatedLab.read_config(folder))

    return LabSite
