"""What the lab does before and while it trains."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from firmware_sim import CHIP_LIES, NO_RUN, DeviceMemory, Region, Work
from firmware_sim.lies import Chance, Scenery
from monitor.declaration.statement import OUTSIDE
from monitor.lab.lies import LAB_LIES
from monitor.transcript import encode_arrays
from monitor.transcript.data import DeclaredData
from monitor.transcript.layout import ORDER, SAMPLES
from tests.adversary.actions import action
from tests.adversary.host import Puppet, Stretch, View
from tests.adversary.lies import Lie
from tests.adversary.world import World

LOOP = ("loop",)
PRESET = ("preset",)


def _some(world: World, rng: random.Random) -> list[Puppet]:
    """One chip, or more of them."""
    count = rng.randint(min(1, len(world.chips)), len(world.chips))
    return sorted(rng.sample(world.chips, count), key=lambda chip: chip.number)


# Honest work


@action("training", honest=True)
def step(world: World, pick: int) -> None:
    """Train a step."""
    if world.step < 5:
        world.train()


@action("training", honest=True)
def idle(world: World, pick: int) -> None:
    """Let chips idle."""

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.idle(1 + pick % 3)

    world.schedule(act)


@action("training", honest=True, kinds=LOOP)
def crash(world: World, pick: int) -> None:
    """Lose power, come back."""
    world.crash()


@action("finished", honest=True)
def next_run(world: World, pick: int) -> None:
    """Begin another run on the same chips; a recorder's loop can't say that of itself, so an honest one does not."""
    may = world.scene.kind == "preset" or not world.scene.is_honest
    if may and len(world.runs) < 2 and world.run.is_dir():
        world.begin()


# Odd, but no lie


@action("training")
def close_early(world: World, pick: int) -> None:
    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.close_epoch()

    world.schedule(act)


@action("training")
def quote_early(world: World, pick: int) -> None:
    """Answer a challenge that nobody gave."""

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.quote(bytes(32), "nobody")

    world.schedule(act)


@action("training")
def attach_again(world: World, pick: int) -> None:
    """Attach the same memory once more in the same boot."""

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            if chip.memory is not None:
                chip.chip.attach(chip.memory, chip.run_id, chip.step)

    world.schedule(act)


@action("training")
def commit_again(world: World, pick: int) -> None:
    """Tell a chip bytes for a step of a run that it may or may not know."""

    def act() -> None:
        rng = world.random(pick)
        for chip in _some(world, rng):
            chip.chip.commit(rng.choice([chip.run_id, NO_RUN]), rng.choice([0, chip.step, chip.step + 1]), bytes(32))

    world.schedule(act)


@action("training")
def reboot(world: World, pick: int) -> None:
    """Power off in order, boot, attach again."""

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.reboot(in_order=pick % 2 == 0)
            if chip.memory is not None:
                chip.attach_again()

    world.schedule(act)


@action("training")
def nonsense(world: World, pick: int) -> None:
    """Commands that no chip may obey; each must be a numbered refusal."""
    calls: list[Callable[[Any], object]] = [
        lambda c: c.commit(bytes(32), -1, bytes(32)),
        lambda c: c.commit(bytes(31), 0, bytes(32)),
        lambda c: c.commit(bytes(32), 1 << 64, bytes(32)),
        lambda c: c.idle(1 << 25),
        lambda c: c.commit(bytes(32), 0, b""),
        lambda c: c.commit(bytes(32), 1.5, bytes(32)),
        lambda c: c.commit(bytes(32), 0, None),
        lambda c: c.idle(-1),
        lambda c: c.idle(1.5),
        lambda c: c.idle("x"),
        lambda c: c.quote(b"", ""),
        lambda c: c.quote(None, 1),
        lambda c: c.beacon(b"{}"),
        lambda c: c.attach(None, bytes(32), 0),
        lambda c: c.attach(c, bytes(32), "0"),
    ]

    def act() -> None:
        if world.chips:
            calls[pick % len(calls)](world.random(pick).choice(world.chips).chip)

    world.schedule(act)


@action("training", kinds=LOOP)
def within_command(world: World, pick: int) -> None:
    """Take the next step within a command of a chip, which cannot look at its memory then: its power fails."""
    world.interrupting = pick


@action("finished")
def abandon(world: World, pick: int) -> None:
    """Hand an unfinished run over, as it is after some step."""
    world.said["abandoned"] += 1


# Lies about time, which work takes: law 2


def _at_work(world: World) -> list[Puppet]:
    """The chips that hold the run's memory."""
    return [chip for chip in world.chips if chip.memory is not None]


def _hidden_step(chip: Puppet) -> None:
    """One product, more than what a run declares that it does beside its programs; all chips of the run count it."""
    assert chip.memory is not None
    held = chip.memory.share[1]
    chip.memory.meter.charge(Work(1, OUTSIDE * held + (1 << 20), 2 * held))


def _for_no_run(chip: Puppet, rng: random.Random, run: bytes = NO_RUN) -> None:
    """Let a chip work on memory of its own, which is of no declared run."""
    held = torch.ones(8)
    memory = DeviceMemory([Region.of("unknown", held)])
    chip.chip.attach(memory, run, 0)
    for _ in range(rng.randint(1, 3)):
        memory.meter.charge(Work(1, 1 << 17, 2 * held.nbytes))


@action("training", "A5")
def extra_work(world: World, pick: int) -> None:
    """Work on memory beside the declared one, which no step explains."""
    lie = world.tell("A5", on_chips=True, certain=True)

    def act() -> None:
        chips = _at_work(world)
        for chip in chips[:1] * (1 + pick % 3):
            _hidden_step(chip)
        for chip in chips:
            lie.hit(chip.number)
            chip.elsewhere()

    world.schedule(act)


def _in_mid_run(world: World, row: str, pick: int, chips: Callable[[random.Random], list[Puppet]]) -> None:
    """Boot, work for no run, attach the run's memory again."""
    lie = world.tell(row, on_chips=True, certain=True)

    def act() -> None:
        rng = world.random(pick)
        for chip in chips(rng):
            if chip.memory is None:
                continue
            chip.reboot(in_order=rng.random() < 0.8)
            _for_no_run(chip, rng)
            lie.hit(chip.number)
            chip.attach_again()

    world.schedule(act)


@action("training", "A7")
def work_between_boots(world: World, pick: int) -> None:
    """Power off in order, boot, work for no run, attach again."""
    _in_mid_run(world, "A7", pick, lambda rng: _some(world, rng))


@action("training", "A7")
def one_works(world: World, pick: int) -> None:
    """The same with one chip only."""
    _in_mid_run(world, "A7", pick, lambda rng: world.chips[:1])


@action("training", "A6")
def work_for_no_run(world: World, pick: int) -> None:
    """Work in the middle of the run on memory of no run, in place of the run's or for a while."""
    lie = world.tell("A6", on_chips=True, certain=True)

    def act() -> None:
        rng = world.random(pick)
        for chip in _some(world, rng):
            _for_no_run(chip, rng)
            lie.hit(chip.number)
            if chip.memory is not None and pick % 2:
                chip.chip.attach(chip.memory, chip.run_id, chip.step)
            chip.elsewhere()

    world.schedule(act)


@action("before", "A6")
def work_before(world: World, pick: int) -> None:
    """Work before the run, on memory of no run."""
    lie = world.tell("A6", on_chips=True, certain=True)

    def act() -> None:
        rng = world.random(pick)
        for chip in _some(world, rng):
            _for_no_run(chip, rng)
            lie.hit(chip.number)

    world.prelude.append(act)


@action("training", "A5", kinds=LOOP)
def step_elsewhere(world: World, pick: int) -> None:
    """Take the next step where no meter counts it."""
    world.elsewhere = (world.tell("A5", on_chips=True, certain=True), 0)


@action("training", "A5", kinds=LOOP)
def idle_instead(world: World, pick: int) -> None:
    """The same, and chips idle meanwhile."""
    world.elsewhere = (world.tell("A5", on_chips=True, certain=True), 1 + pick % 3)


def _hidden(world: World, row: str, pick: int, *, idle: int) -> None:
    lie = world.tell(row, on_chips=True, certain=True)

    def act() -> None:
        chips = _at_work(world)
        for number in range(1 + pick % 3):
            with ExitStack() as stack:
                for chip in chips:
                    stack.enter_context(chip.showing(chip.noise(pick + number)))
                for chip in chips[:1]:
                    _hidden_step(chip)
                for chip in chips:
                    chip.chip.idle(idle)
                    lie.hit(chip.number)
                    chip.elsewhere()

    world.schedule(act)


@action("training", "A8")
def hidden_steps(world: World, pick: int) -> None:
    """Train hidden steps in the chips' memory, between two declared ones."""
    _hidden(world, "A8", pick, idle=0)


@action("training", "hidden while idle")
def hidden_idle(world: World, pick: int) -> None:
    """The same, and call it idle time."""
    _hidden(world, "hidden while idle", pick, idle=1)


# Lies about memory: laws 1 and 7


@action("training", "A1", "A2")
def show_old(world: World, pick: int) -> None:
    """Boot, show an older state, say that it is one, and let chips idle meanwhile."""
    lie = world.tell("A1" if world.scene.kind == "preset" else "A2", on_chips=True)

    def act() -> None:
        rng = world.random(pick)
        for chip in world.chips if rng.random() < 0.7 else _some(world, rng):
            at = 0 if rng.random() < 0.7 else rng.choice(sorted(chip.history) or [0])
            if chip.memory is None or at not in chip.history:
                continue
            chip.reboot()
            with chip.showing(chip.history[at]) as differs:
                chip.chip.attach(chip.memory, chip.run_id, at)
                chip.chip.idle(2)
                if differs:
                    lie.hit(chip.number, 2)
            chip.chip.commit(chip.run_id, chip.step, chip.digest)
            chip.elsewhere()

    world.schedule(act)


def _show(world: World, pick: int, values: Callable[[Puppet], list[torch.Tensor]]) -> None:
    """From now on show other values whenever chips idle, and between the operators of steps."""
    lie = world.tell("other memory", on_chips=True)

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            if chip.memory is not None and chip.step in chip.history:
                chip.view = View(values(chip), Stretch(lie))
                chip.elsewhere()

    world.schedule(act)


@action("training", "other memory")
def show_other(world: World, pick: int) -> None:
    """From now on show made-up values."""
    _show(world, pick, lambda chip: chip.noise(pick))


@action("training", "other memory")
def show_next(world: World, pick: int) -> None:
    """From now on show the state of now, which the host cannot but call the newest."""
    _show(world, pick, lambda chip: chip.history[chip.step])


@action("training")
def show_true(world: World, pick: int) -> None:
    """Show again what there is."""

    def act() -> None:
        for chip in world.chips:
            chip.view = None

    world.schedule(act)


@action("training", "other memory")
def attach_decoy(world: World, pick: int) -> None:
    """Boot, and attach tensors of the same layout that nobody trains, on which no operator runs."""
    lie = world.tell("other memory", on_chips=True, certain=True)

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            if chip.memory is None:
                continue
            if pick % 2:
                chip.reboot()
            regions = [
                Region(
                    name=r.name,
                    kind=r.kind,
                    dtype=r.dtype,
                    shape=r.shape,
                    offset=r.offset,
                    elements=r.elements,
                    tensor=torch.full_like(r.tensor.detach(), 3),
                    place=r.place,
                )
                for r in chip.memory.regions
            ]
            chip.chip.attach(DeviceMemory(regions), chip.run_id, chip.step)
            chip.decoy = lie

    world.schedule(act)


@action("before", "A9")
def hostile_memory(world: World, pick: int) -> None:
    """Attach objects whose methods run the lab's code inside the chip."""
    lie = world.tell("A9", on_chips=True)

    def act() -> None:
        for chip in world.chips if pick % 2 else _some(world, world.random(pick)):
            chip.hostile = Stretch(lie)

    world.prelude.append(act)


# Lies about the run: law 5 and the transcript


def _forge_from_now(world: World, what: str, pick: int) -> None:
    if world.forging is not None:
        return
    scene = world.scene
    row = "made-up weights"
    if not scene.is_full and scene.checkpoint_every < 6:
        row = "A18"
    world.forging = (world.tell(row), what, pick)


@action("training", "made-up weights")
def forge(world: World, pick: int) -> None:
    """From now on commit to weights that were not trained."""
    world.schedule(lambda: _forge_from_now(world, ("all", "one", "optimizer")[pick % 3], pick))


@action("training", "order")
def other_head(world: World, pick: int) -> None:
    """Tell some chips another head at the next step."""
    lie = world.tell("order", on_chips=True, certain=True)

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.other_head = lie

    world.schedule(act)


@action("training", "order")
def no_head(world: World, pick: int) -> None:
    """Tell some chips nothing of the next step."""
    lie = world.tell("order", on_chips=True, certain=True)

    def act() -> None:
        for chip in _some(world, world.random(pick)):
            chip.untold = lie

    world.schedule(act)


def _new_optimizer(world: World, name: str) -> None:
    world.optimizer = name


def _declare(world: World, row: str, declared: Callable[[Any], dict[str, Any]], least: int = 1) -> None:
    """Declare these numbers in place of the optimizer's; a lie from step ``least`` on, unless others replace it."""
    world.declared = declared
    world.tell(row, told=lambda: world.declared is declared and world.step >= least)


@action("before", "A12", kinds=LOOP)
def declare_rate(world: World, pick: int) -> None:
    """Declare another learning rate than the one in the program."""
    _declare(world, "A12", lambda group: {**group, "lr": 1e-6})


@action("before", "A12", kinds=LOOP)
def declare_numbers(world: World, pick: int) -> None:
    """Declare another weight decay, momentum or decay rate than the program has."""
    _new_optimizer(world, ("adamw", "momentum")[pick % 2])
    other: dict[str, Any] = {"weight_decay": 0.5} if pick % 4 < 2 else {"momentum": 0.25, "betas": [0.5, 0.75]}

    def declared(group: Any) -> dict[str, Any]:
        return {name: other.get(name, value) for name, value in group.items()}

    # Momentum governs nothing before the second step.
    _declare(world, "A12", declared, least=2 if pick % 4 == 3 else 1)


@action("before", "A10", kinds=LOOP)
def declare_product(world: World, pick: int) -> None:
    """Train with rate 5, declare 0.001 and a weight decay whose product is 5."""
    _new_optimizer(world, "steep")
    _declare(world, "A10", lambda group: {**group, "lr": 0.001, "weight_decay": group["lr"] / 0.001})

    def body(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 1.125

    if pick % 2:  # the rate changes from step to step, and the declared decay with it
        world.body = body


@action("before", "A11", kinds=LOOP)
def huge_decay(world: World, pick: int) -> None:
    """One step with a weight decay that wipes the weights out."""
    _new_optimizer(world, "adamw")
    at = 1 + pick % 2
    applied = []

    def body(model: Any, optimizer: Any, batch: Any) -> None:
        group = optimizer.param_groups[0]
        group["weight_decay"] = 0.01
        if world.step == at:
            group["weight_decay"] = 1000
            applied.append(at)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    world.body = body
    world.tell("A11", told=lambda: bool(applied) and world.step > at)


@action("before", kinds=LOOP)
def no_products(world: World, pick: int) -> None:
    """Write products as broadcast and sum, which draws no mask and is no lie by itself."""

    def body(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        layer = model[0] if world.scene.model == "dropout" else model
        (batch[:, None, :] * layer.weight).sum(2).square().sum().backward()
        optimizer.step()

    world.body, world.draws = body, False


@action("before", "A13", kinds=LOOP)
def hide_products(world: World, pick: int) -> None:
    """Train where the rules allow no FLOP, with products written as broadcast and sum."""
    no_products(world, pick)
    body = world.body
    world.maximum_flop = 0
    world.tell("A13", told=lambda: world.step > 0 and world.body is body)


@action("before", "A21", kinds=LOOP)
def carry_weights(world: World, pick: int) -> None:
    """Write the batch into the weights, or into a gradient, from where the optimizer takes it there."""

    def body(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        weight = next(iter(model.parameters()))
        with torch.no_grad():
            if pick % 2:
                weight.grad[:1].copy_(batch[:1])
            optimizer.step()
            if not pick % 2:
                weight[:1].copy_(batch[:1])

    world.body = body
    world.tell("A21", told=lambda: world.step > 0 and world.body is body)


@action("before", "other seed", kinds=LOOP)
def other_seed(world: World, pick: int) -> None:
    """Draw the masks of dropout from another seed than the declared one."""
    if world.scene.model != "dropout" or world.seed_lie is not None:
        return
    world.task_seed = lambda seed: seed + 1
    world.seed_lie = world.tell("other seed")


@action("before", "A14", kinds=PRESET)
def other_data(world: World, pick: int) -> None:
    """Train a preset on other data, or in another order, than its seed and its name say."""
    if world.lie == "other-data":
        return  # one of them would undo the other

    def declare(data: DeclaredData) -> DeclaredData:
        honest = data.with_salt(bytes(32))
        samples, order = {name: values.copy() for name, values in honest.samples.items()}, honest.order
        if pick % 4 == 0:
            order = np.full_like(order, order.min())
        elif pick % 4 == 1:
            order = order[:, ::-1].copy()
        for values in samples.values():
            if values.dtype.kind == "f" and pick % 4 == 2:
                values[:] = 0.5
            elif values.dtype.kind in "iu" and pick % 4 == 3:
                values[:] = 0
        files = {SAMPLES: encode_arrays(samples), ORDER: encode_arrays({"order": order})}
        lie.hit(0, int(files != data.files))
        return replace(data, files=files)

    lie = world.tell("A14")
    world.declare_data = declare


_ROWS = {
    "extra-ticks": "A5",
    "early-ticks": "A6",
    "paused-ticks": "A7",
    "stale-snapshots": "A1",
    "other-data": "A14",
    "untold-steps": "A8",
}
_APART = {"reorder-data", "edited-chip-log", "undeclared-run", "undeclared-chips", "fake-layers"}
_APART |= {"untold-work", "more-work", "step-as-evaluation"}
"""Lies that this adversary tells by acts of its own, or with odds of their own."""
_PRESET_LIES = {
    lie.name: _ROWS.get(lie.name, "a lie of train")
    for lie in LAB_LIES.values()
    if lie.name in _ROWS
    or (
        (lie.name not in _APART and lie.scenery in (Scenery.RUN, Scenery.HANDED_OVER) and not lie.options)
        and lie.chance in (Chance.ALWAYS, Chance.STEP, Chance.REST)
    )
}
"""Row of each that ``train`` can tell."""


@action("before", *sorted(set(_PRESET_LIES.values())), kinds=PRESET)
def preset_lie(world: World, pick: int) -> None:
    """One of the lies that ``train`` can tell."""
    if world.chip_lie is None and world.lie is None:
        lie = sorted(_PRESET_LIES)[pick % len(_PRESET_LIES)]
        if lie == "other-data" and world.declare_data is not None:
            return  # one of them would undo the other
        world.lie = lie
        world.tell(_PRESET_LIES[lie], told=lambda: world.run.is_dir() and world.step >= 1)


# Dishonest chips


_CHIP_LIES = sorted(name for name, lie in CHIP_LIES.items() if lie.scenery is Scenery.RUN)
_CHIP_LIES = [name for name in _CHIP_LIES if name not in ("open-epoch", "predict-schedule")]
"""An epoch that stays open is an act of its own; this host makes no use of a schedule that it knows."""


@action("before", "a dishonest chip")
def crooked_chip(world: World, pick: int) -> None:
    """The lab's first chip tells a lie."""
    if world.chip_lie is not None or world.lie is not None:
        return
    lie = _CHIP_LIES[pick % len(_CHIP_LIES)]
    world.chip_lie = lie
    told = world.tell("a dishonest chip", on_chips=True, certain=CHIP_LIES[lie].chance is not Chance.SNAPSHOT)
    if lie == "replay-snapshot":  # repeating what is still true is no lie
        told.told = lambda: len(world.copies) > 1
    world.prelude.append(lambda: world.chips[0].watched.append(Stretch(told)))


@action("before", "A15")
def open_epoch(world: World, pick: int) -> None:
    """A chip that takes no snapshot in an epoch which it never closes."""
    if world.chip_lie is not None or world.lie is not None:
        return
    world.chip_lie = "skip-snapshots"
    lie = world.tell("A15", on_chips=True, certain=True)

    def act() -> None:
        world.chips[0].chip.close_epoch()
        world.chips[0].open = lie
        world.chips[0].watched.append(Stretch(lie))

    world.prelude.append(act)


# Work that is declared nowhere


def _undeclared(world: World, lie: Lie, pick: int) -> None:
    rng, run = world.random(pick), bytes([pick % 251 + 1]) * 32
    for chip in _some(world, rng):
        if chip.memory is not None:
            _for_no_run(chip, rng, run)
            chip.chip.commit(run, 1, bytes(32))
            lie.hit(chip.number)
            chip.elsewhere()


@action("training", "undeclared run")
def other_run(world: World, pick: int) -> None:
    """Train a run on the same chips that is declared nowhere."""
    lie = world.tell("undeclared run", on_chips=True, certain=True)
    world.schedule(lambda: _undeclared(world, lie, pick))


@action("finished", "undeclared run")
def leave_out(world: World, pick: int) -> None:
    """Hand over the last run only."""
    if len(world.runs) > 1 and not world.withheld:
        lie = world.tell("undeclared run", on_chips=True, certain=True)
        world.withheld.add(world.runs[0])
        for chip in world.chips:
            lie.hit(chip.number)


@action("finished", "A16")
def work_afterwards(world: World, pick: int) -> None:
    """Work after the chips have said what they say."""
    _undeclared(world, world.tell("A16", on_chips=True), pick)


@action("training", "A17")
def restore_chip(world: World, pick: int) -> None:
    """Copy a chip's folder, let the chip work, and put the copy back."""
    lie = world.tell("A17", on_chips=True)

    def act() -> None:
        chip = world.random(pick).choice(world.chips)
        folder = chip.chip._silicon.folder
        if chip.memory is None or not folder.is_dir():  # chips of a run that could not begin are gone with it
            return
        kept = folder.with_name(folder.name + ".kept")
        kind = type(chip.chip)
        chip.chip.power_off()
        shutil.copytree(folder, kept)
        chip.chip = kind.power_on(folder)
        _for_no_run(chip, world.random(pick))
        chip.chip.cut_power()
        shutil.rmtree(folder)
        kept.rename(folder)
        chip.chip = kind.power_on(folder)
        chip.attach_again()
        lie.hit(chip.number)

    world.schedule(act)
