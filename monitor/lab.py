"""The prover: trains a task on monitored chips and leaves a run folder behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from firmware_sim import Chip, encode_epoch_keys
from firmware_sim.errors import CallerError
from monitor.conduct import conduct
from monitor.declared_data import declared_data
from monitor.environment import check_subnormals, fingerprint, settings, versions
from monitor.recorder import PresetRecorder
from monitor.site import Site, SiteConfig, site_path
from monitor.task import Task
from monitor.training import Training
from monitor.transcript import Leaf, Metadata, RunData, RunFolder, TranscriptWriter
from monitor.transcript.layout import SALT, chip_path, log_path

__all__ = ["Progress", "TrainResult", "chip_evidence", "resume", "train", "write_answers"]

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, loss bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished training says about itself."""

    run: Path
    run_id: str
    state_digest: str
    steps: int
    rounding_log_bytes: int


def train(task: Task, out: Path, config: SiteConfig, *, device: str, progress: Progress | None = None) -> TrainResult:
    """Train from the first step and write ``out`` (evidence) and ``out.lab`` (the lab's private side).

    Args:
        device: name of the replay device that this process runs as, for the metadata.
    Raises:
        CallerError: ``out`` exists, or the task or configuration is impossible.
    """
    if out.exists():
        raise CallerError(f"{out} exists already; choose another --out or resume it")
    behaviour = conduct(config.lie, config.lie_step)
    behaviour.check(task, config)
    check_subnormals()
    declared = behaviour.declare_data(declared_data(task, Path(config.source) if config.source else None))
    site = Site.create(site_path(out), config)
    # The salt is the task's, not the lab's: two labs that train the same task commit to the same data.
    salt = hashlib.sha256(f"chipwitness/salt/{config.secret}".encode()).digest()
    data = declared.with_salt(salt)
    metadata = Metadata(
        lab=config.lab,
        task=task,
        data={**data.commitment(), "set": declared.name},
        chips=tuple(chip.chip_id for chip in site.chips),
        device={"name": device, "fingerprint": str(fingerprint())},
        versions=versions(),
        settings=settings(),
        started=config.started,
        declared_end=config.declared_end,
    )
    writer = TranscriptWriter.create(
        out,
        site.staging,
        site.key,
        run=metadata.run_id.hex(),
        metadata=metadata.to_json(),
        data={**declared.files, SALT: data.salt},
    )
    return _continue(task, data, site, writer, metadata, committed=[], run=None, progress=progress)


def resume(out: Path, *, progress: Progress | None = None) -> TrainResult:
    """Go on with a run that was killed: replay the committed steps with their logs, then record.

    Only the steps after the last checkpoint are replayed. Works on any device.
    """
    if not out.is_dir():
        raise CallerError(f"there is no run folder {out}")
    check_subnormals()
    folder = site_path(out)
    key = Site.lab_key(Site.read_config(folder))
    writer = TranscriptWriter.reopen(out, folder / "staging", key)
    run = RunFolder(out, key.verifying)
    leaves, _ = run.load_steps()
    if writer.holds_chip_evidence:
        writer.finish({})
        return _result(out, run.metadata, leaves, run)
    site = Site.reopen(folder)
    site.remove_staging()
    return _continue(run.task, run.data(), site, writer, run.metadata, committed=leaves, run=run, progress=progress)


def _continue(
    task: Task,
    data: RunData,
    site: Site,
    writer: TranscriptWriter,
    metadata: Metadata,
    *,
    committed: list[Leaf],
    run: RunFolder | None,
    progress: Progress | None,
) -> TrainResult:
    behaviour = conduct(site.config.lie, site.config.lie_step)
    if not committed:
        behaviour.before_run(task, data, site)
    training = Training(task)
    behaviour.initialise(training, site)
    recorder = PresetRecorder(
        training, data, writer, site.chips, run_id=metadata.run_id, conduct=behaviour, idle=site.idle
    )
    for leaf in committed:
        writer.tree.append(leaf.encoded())
        recorder.leaves.append(leaf)
    start = 0
    if run is not None and committed:
        start = (len(committed) - 1) // task.checkpoint_every * task.checkpoint_every
        training.memory.load(run.checkpoint(start))
        training.step = start
    recorder.attach_memory(start)
    if not committed:
        recorder.commit_initial_state()
    elif run is not None:
        recorder.announce(start)
        for leaf in committed[start + 1 :]:
            recorder.replay_step(leaf, run.rounding_log(leaf.step))
            recorder.announce(leaf.step)
    while training.step < task.steps:
        leaf = recorder.record_step()
        if progress is not None:
            progress(leaf.step, task.steps, leaf.loss)
    evidence = chip_evidence(site, recorder.hand_over)
    write_answers(site, writer.folder)
    writer.finish(evidence)
    site.power_off()
    finished = RunFolder(writer.folder, site.key.verifying)
    result = _result(writer.folder, metadata, recorder.leaves, finished)
    behaviour.publish(writer.folder, site)
    return result


def _result(out: Path, metadata: Metadata, leaves: list[Leaf], run: RunFolder) -> TrainResult:
    steps = range(1, len(leaves))
    return TrainResult(
        run=out,
        run_id=metadata.run_id.hex(),
        state_digest=str(leaves[-1].state.root),
        steps=len(leaves) - 1,
        rounding_log_bytes=sum(run.files[log_path(step)].length for step in steps),
    )


def chip_evidence(site: Site, hand_over: Callable[[int, dict[str, bytes]], dict[str, bytes]]) -> dict[str, bytes]:
    """Close the epochs of all chips and collect what they say, as ``hand_over(shard, evidence)`` gives it."""
    files = {}
    for shard, chip in enumerate(site.chips):
        for name, content in hand_over(shard, _answer(chip, site.config)).items():
            files[chip_path(chip.chip_id, name)] = content
    return files


def write_answers(site: Site, run: Path) -> None:
    """Ask the chips that take no part in a run, and leave what they say in ``RUN.answers``."""
    run = run if run.name else run.resolve()
    for chip in site.idle:
        folder = run.with_name(run.name + ".answers") / chip.chip_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _answer(chip, site.config).items():
            (folder / name).write_bytes(content)


def _answer(chip: Chip, config: SiteConfig) -> dict[str, bytes]:
    """The four files with which a chip answers the verifier's challenge."""
    chip.close_epoch()
    quote = chip.quote(bytes.fromhex(config.challenge), config.verifier)
    return {
        "quote.json": quote,
        "log.bin": chip.log_bytes(),
        "chain.pem": chip.certificate_chain(),
        "epochs.json": encode_epoch_keys(chip.reveal()),
    }
