"""What the lab does to its evidence before it hands it over, and while the inspector reads."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import torch

from firmware_sim import RecordKind, parse_log
from firmware_sim.evidence import SigningKey
from firmware_sim.evidence.chiplog import RECORD_BYTES
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import LabConfig, SimulatedLab
from monitor.programs.batches import batch_root, step_salt
from monitor.transcript import Leaf, encode_state
from monitor.transcript.data import decode_batch, encode_batch
from monitor.transcript.layout import (
    CHIP_FILES,
    JOURNAL,
    MANIFEST,
    METADATA,
    SALT,
    batch_path,
    checkpoint_path,
    chip_path,
    log_path,
)
from monitor.transcript.state import decode_state
from tests.adversary.actions import action
from tests.adversary.evidence import Evidence
from tests.adversary.host_actions import LOOP
from tests.adversary.world import STARTED, World
from tests.handing import hand_over

ROW = "tampering"


def _tell(world: World, *paths: str) -> None:
    """A lie in files of the run; where all of them are chips', only these chips show it."""
    owners = {path.split("/")[1] if path.startswith("chips/") else "" for path in paths}
    numbers = [chip.number for chip in world.chips if chip.chip_id in owners]
    on_chips = "" not in owners and len(numbers) == len(owners)
    lie = world.tell(ROW, told=world.altered(*paths), on_chips=on_chips, certain=True)
    for number in numbers if on_chips else ():
        lie.hit(number)


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


@action("finished", ROW)
def flip_bit(world: World, pick: int) -> None:
    """Alter one bit of any file, journal and manifest included."""
    rng, files = world.random(pick), world.evidence()
    path = rng.choice([*files.paths, JOURNAL, MANIFEST])
    (files.folder / path).write_bytes(_flip(files.read(path), rng))
    _tell(world, path)


@action("finished", ROW)
def flip_bit_and_sign(world: World, pick: int) -> None:
    """Alter one bit of any file and sign again."""
    rng, files = world.random(pick), world.evidence()
    path = rng.choice(files.paths)
    files.write(path, _flip(files.read(path), rng))
    files.sign()
    _tell(world, path)


@action("finished", ROW)
def drop_file(world: World, pick: int) -> None:
    """Leave a file out, with or without its line in the journal."""
    rng, files = world.random(pick), world.evidence()
    path = rng.choice(files.paths)
    files.drop(path)
    if rng.random() < 0.7:
        files.sign()
    _tell(world, path)


@action("finished", ROW)
def add_file(world: World, pick: int) -> None:
    """Put a file in that is no part of the run."""
    rng, files = world.random(pick), world.evidence()
    stray = ["programs/" + "0" * 64 + ".json", checkpoint_path(99), log_path(99), "chips/stranger/log.bin"]
    path = rng.choice([*stray, "trust.json", batch_path(77)])
    target = files.folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"{}")
    if path in stray and rng.random() < 0.8:
        files.write(path, b"{}")
        files.sign()
    world.tell(ROW, told=world.altered(path))


@action("finished", ROW)
def exchange_files(world: World, pick: int) -> None:
    """Let two files of one kind change places."""
    rng, files = world.random(pick), world.evidence()
    kinds = [path.split("/")[0] for path in files.paths if path.count("/") == 1]
    one, other = _two(rng, [p for p in files.paths if p.split("/")[0] == rng.choice(kinds)] or files.paths)
    first, second = files.read(one), files.read(other)
    files.write(one, second)
    files.write(other, first)
    files.sign()
    _tell(world, one, other)


@action("finished", ROW)
def copy_file(world: World, pick: int) -> None:
    """Put one file's content in another's place: duplicates of steps, batches, logs or chips."""
    rng, files = world.random(pick), world.evidence()
    one, other = _two(rng, files.paths)
    files.write(other, files.read(one))
    files.sign()
    _tell(world, other)


def _two(rng: random.Random, paths: list[str]) -> tuple[str, str]:
    pair = rng.sample(paths, 2) if len(paths) > 1 else [paths[0], paths[0]]
    return pair[0], pair[1]


@action("finished", ROW)
def exchange_chips(world: World, pick: int) -> None:
    """Hand one chip's evidence, or a part of it, over as another's."""
    if len(world.chips) < 2:
        return
    rng, files = world.random(pick), world.evidence()
    one, other = rng.sample([chip.chip_id for chip in world.chips], 2)
    names = CHIP_FILES if rng.random() < 0.5 else (rng.choice(CHIP_FILES),)
    for name in names:
        first, second = files.read(chip_path(one, name)), files.read(chip_path(other, name))
        files.write(chip_path(one, name), second)
        if rng.random() < 0.7:
            files.write(chip_path(other, name), first)
    files.sign()
    _tell(world, *(chip_path(one, name) for name in names))


@action("finished", ROW)
def edit_leaf(world: World, pick: int) -> None:
    """Commit to another leaf and sign all heads again."""
    rng, files = world.random(pick), world.evidence()
    leaves = files.leaves()
    at = rng.randrange(1, len(leaves))
    leaf = leaves[at]
    changes: list[Callable[[], Leaf]] = [
        lambda: replace(leaf, flop=rng.choice([0, 1, leaf.flop - 1, 10**30])),
        lambda: replace(leaf, batch="00" * 32),
        lambda: replace(leaf, state=leaves[at - 1].state),
        lambda: replace(leaf, log=str(leaves[at].state.root)),
        lambda: replace(leaf, loss="3f800000"),
    ]
    if leaf.execution is not None:
        run = leaf.execution
        changes += [
            lambda: replace(leaf, execution=replace(run, hyper=tuple({**each, "lr": 1e-6} for each in run.hyper))),
            lambda: replace(leaf, execution=replace(run, slots={(0.25).hex(): (0,)})),
            lambda: replace(leaf, execution=replace(run, reads=str(leaf.state.root))),
            lambda: replace(leaf, execution=None, loss="3f800000"),
        ]
    leaves[at] = rng.choice(changes)()
    files.rewrite(leaves)
    _tell(world, JOURNAL)


@action("finished", ROW)
def reorder_leaves(world: World, pick: int) -> None:
    """Let two steps change places in the log of steps, files and all."""
    rng, files = world.random(pick), world.evidence()
    leaves = files.leaves()
    if len(leaves) < 3:
        return
    one, other = rng.sample(range(1, len(leaves)), 2)
    leaves[one], leaves[other] = replace(leaves[other], step=one), replace(leaves[one], step=other)
    for place in (batch_path, log_path):
        paths = place(one), place(other)
        if all(path in files.draft.files for path in paths):
            first, second = files.read(paths[0]), files.read(paths[1])
            files.write(paths[0], second)
            files.write(paths[1], first)
    files.rewrite(leaves)
    _tell(world, JOURNAL)


@action("finished", ROW)
def edit_metadata(world: World, pick: int) -> None:
    """Declare something else afterwards."""
    rng = world.random(pick)

    def change(data: dict[str, Any]) -> None:
        task = data["task"]
        options: list[Callable[[], object]] = [
            lambda: data.update(chips=list(reversed(data["chips"]))),
            lambda: data["chips"].__setitem__(0, "rival-chip-0000"),
            lambda: data.update(chips=data["chips"][:-1]),
            lambda: data.update(lab="lab-2"),
            lambda: data.update(declared_end="2031-01-01T00:00:00Z"),
            lambda: data.update(started="2025-12-31T23:00:00Z"),
            lambda: data["device"].update(name="cuda", fingerprint="sha256:" + "1" * 64),
            lambda: data["versions"].update(torch="0.0"),
            lambda: data["settings"].update(x=1),
            lambda: task.update(seed=task["seed"] + 1),
            lambda: task.update(checkpoint_every=task["checkpoint_every"] + 1),
            lambda: task.update(numerics="rounded" if task["numerics"] == "exact" else "exact"),
            lambda: task.update(shares=[*task["shares"], 1]),
            lambda: data.update(extra=1),
        ]
        if "groups" in task:
            options.append(lambda: task["groups"][0].update(lr=1e-6))
            options.append(lambda: task.update(optimizer="torch.optim.adam.Adam"))
        else:
            options.append(lambda: task.update(learning_rate=1e-6))
        rng.choice(options)()

    world.evidence().change_metadata(change)
    _tell(world, METADATA)


@action("finished", ROW)
def edit_checkpoint(world: World, pick: int) -> None:
    """Store another state than was committed, with or without committing to it."""
    rng, files = world.random(pick), world.evidence()
    path = rng.choice([path for path in files.paths if path.startswith("checkpoints/")])
    with torch.no_grad():
        state = {name: tensor.clone() for name, tensor in decode_state(files.read(path), path).items()}
        name = rng.choice(sorted(state))
        state[name].view(-1)[:1].add_(1)
    files.write(path, encode_state(state))
    files.sign()
    _tell(world, path)


@action("finished", ROW, kinds=LOOP)
def edit_batch(world: World, pick: int) -> None:
    """Declare another batch, all commitments of the transcript redone."""
    rng, files = world.random(pick), world.evidence()
    at = rng.randrange(1, files.steps + 1)
    own = step_salt(files.read(SALT), at)
    batch = decode_batch(files.read(batch_path(at)), "batch", own)
    content = encode_batch({name: tensor + 1 for name, tensor in batch.items()}, own)
    files.write(batch_path(at), content)
    leaves = files.leaves()
    leaves[at] = replace(leaves[at], batch=batch_root(files.read(SALT), at, content).hex())
    files.rewrite(leaves) if rng.random() < 0.7 else files.sign()
    _tell(world, batch_path(at))


@action("finished", ROW, kinds=LOOP)
def edit_program(world: World, pick: int) -> None:
    """Hand over another program than the one that was agreed, under its own or the old name."""
    rng, files = world.random(pick), world.evidence()
    path = rng.choice([path for path in files.paths if path.startswith("programs/")])
    program = json.loads(files.read(path))
    if not program["scalars"]:
        return
    at = rng.randrange(len(program["scalars"]))
    program["scalars"][at] = (float.fromhex(program["scalars"][at]) * 2 + 1).hex()
    files.write(path, json.dumps(program, separators=(",", ":"), sort_keys=True).encode())
    files.sign()
    _tell(world, path)


@action("finished", ROW)
def truncate_run(world: World, pick: int) -> None:
    """Hand over the transcript without its last steps, finished or not."""
    rng, files = world.random(pick), world.evidence()
    if files.steps < 2:
        return
    last = rng.randrange(1, files.steps)
    finished = rng.random() < 0.7
    said = {path: files.read(path) for path in files.paths if path.startswith("chips/")}
    files.draft.cut(files.folder, last)
    if finished:
        files.draft.finished = True
        files.draft.places = {path: at for path, at in files.draft.places.items() if not path.startswith("chips/")}
        for path, data in said.items():
            files.write(path, data)
    files.sign()
    _tell(world, JOURNAL)


@action("finished", ROW)
def cut_log(world: World, pick: int) -> None:
    """Hand over a chip's log without its end, or without one record."""
    rng, files = world.random(pick), world.evidence()
    path = chip_path(rng.choice(world.chips).chip_id, "log.bin")
    data = files.read(path)
    count = len(data) // RECORD_BYTES
    data = data[: rng.randrange(1, count) * RECORD_BYTES] if rng.random() < 0.5 else _without(data, rng)
    files.write(path, data)
    files.sign()
    _tell(world, path)


def _without(data: bytes, rng: random.Random) -> bytes:
    """The log without one record after the first, counters and links made to fit."""
    records = parse_log(data)
    wanted = [r for r in records[1:] if r.kind is RecordKind.SNAPSHOT] or records[1:]
    records.remove(rng.choice(wanted))
    parts, previous = [], bytes(32)
    for number, record in enumerate(records):
        linked = replace(record, counter=number, previous=previous)
        previous = linked.hash()
        parts.append(linked.to_bytes())
    return b"".join(parts)


@action("finished", ROW)
def other_challenge(world: World, pick: int) -> None:
    """Hand over a quote that answers another challenge, or another inspector's."""
    rng, files = world.random(pick), world.evidence()
    chip = rng.choice(world.chips)
    challenge = rng.choice([(b"another nonce...", "inspectorate"), (world.trust.nonce, "nobody")])  # type: ignore[union-attr]
    _hand_over(files, chip, *challenge)
    files.sign()
    _tell(world, chip_path(chip.chip_id, "quote.json"))


def _hand_over(files: Evidence, chip: Any, nonce: bytes, verifier: str) -> None:
    files.write(chip_path(chip.chip_id, "quote.json"), chip.quote(nonce, verifier))
    files.write(chip_path(chip.chip_id, "log.bin"), chip.log_bytes())


@action("finished")
def quote_again(world: World, pick: int) -> None:
    """Answer the challenge once more: no lie."""
    if world.chip_lie is not None or world.altered()():
        return
    files = world.evidence()
    assert world.trust is not None
    for chip in world.random(pick).sample(world.chips, 1):
        _hand_over(files, chip, world.trust.nonce, world.trust.verifier)
    files.sign()
    world.keep()


@action("finished", ROW)
def other_key(world: World, pick: int) -> None:
    """Sign with a key that nobody registered."""
    world.evidence().sign(SigningKey.generate(pick.to_bytes(32, "big")))
    _tell(world, MANIFEST)


@action("finished", ROW)
def copy_between_runs(world: World, pick: int) -> None:
    """Hand an earlier run's evidence of a chip over in a later run, or the other way round."""
    if len(world.runs) < 2:
        return
    rng = world.random(pick)
    files, other = world.evidence(), world.evidence(world.runs[0])
    chip = rng.choice(world.chips).chip_id
    for name in CHIP_FILES if rng.random() < 0.7 else ("log.bin",):
        files.write(chip_path(chip, name), other.read(chip_path(chip, name)))
    files.sign()
    _tell(world, *(chip_path(chip, name) for name in CHIP_FILES))


@action("finished", "A20")
def clean_afterwards(world: World, pick: int) -> None:
    """Have a false folder rejected, then put the true one in its place."""
    if world.altered()() or world.trust is None:
        return
    files = world.evidence()
    path = world.random(pick).choice(files.paths)
    data = files.read(path)
    (files.folder / path).write_bytes(b"false" + data)
    hand_over(world.run, world.key)
    verdict = inspect([world.run], world.trust, world.settings(), now=world.now, worker=world.worker)
    (files.folder / path).write_bytes(data)
    world.tell("A20", told=lambda: verdict.outcome is Outcome.REJECT)


@action("finished", "A19")
def silent_lab(world: World, pick: int) -> None:
    """Let another registered lab work, which declares nothing."""
    if world.trust is None or world.stranger_trust:
        return
    config = LabConfig(
        lab="silent",
        seed=pick,
        chips=2,
        snapshot_rate=Fraction(*world.scene.rate),
        started=STARTED,
        duration=timedelta(hours=1),
    )
    challenge = {"verifier": world.trust.verifier, "nonce": world.trust.nonce.hex()}
    world.stranger_trust.append(
        Trust.from_json({**SimulatedLab.reference_values(config), **challenge}, "the silent lab's")
    )
    world.tell("A19", told=lambda: True)


@action("finished", ROW)
def two_transcripts(world: World, pick: int) -> None:
    """Hand over two transcripts of one run, or the same one twice."""
    rng = world.random(pick)
    other = world.run.with_name(world.run.name + "-again")
    if other.exists():
        return
    shutil.copytree(world.run, other)
    world.strangers.append(other)
    files = world.evidence(other)
    if rng.random() < 0.8:
        leaves = files.leaves()
        leaves[-1] = replace(leaves[-1], state=leaves[0].state)
        files.rewrite(leaves)
    world.tell(ROW)
    world.lies[-1].told = other.is_dir


@action("finished", "A3", kinds=LOOP)
def swap_folder(world: World, pick: int) -> None:
    """Rename a folder that holds what was really trained into place once the false one is verified."""
    if world.task_seed is None or world.swap is not None:
        return
    clean = world.run.with_name(world.run.name + "-clean")
    shutil.copytree(world.run, clean)
    true = world.task_seed(world.scene.seed)
    world.evidence(clean).change_metadata(lambda data: data["task"].update(seed=true))
    world.swap = (world.run, clean)
    for lie in world.lies:
        if lie.row == "other seed":
            lie.row = "A3"


@action("finished", "A4")
def grind(world: World, pick: int) -> None:
    """Quote again until the draw, as far as the lab can foresee it, misses the cheater."""
    if world.trust is None or world.chip_lie is not None or world.altered()():  # None: the run could not begin
        return
    world.fresh_draw = True
    world.tell("A4", told=lambda: False)
    for _ in range(9):
        verdict = inspect([world.run], world.trust, world.settings(), now=world.now, worker=world.worker)
        if verdict.outcome is Outcome.ACCEPT:
            break
        files = world.evidence()
        _hand_over(files, world.chips[-1], world.trust.nonce, world.trust.verifier)
        files.sign()
        world.keep()
