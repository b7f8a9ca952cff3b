"""Records somebody's own training loop: each step becomes a program, a committed leaf and a state on the chips."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from firmware_sim import LabLie
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor._conduct import Conduct
from monitor.conduct import conduct
from monitor.environment import check_subnormals, device_name, fingerprint, settings, versions
from monitor.lab import chip_evidence, write_answers
from monitor.loops.batches import batch_layout, batch_root, flatten_batch
from monitor.loops.capture import Capture, digest_reads
from monitor.loops.keys import RecordedKeys, step_seed
from monitor.loops.program import MAXIMUM_PROGRAMS, Program
from monitor.loops.replaying import ProgramTraining
from monitor.loops.slots import StepNumbers
from monitor.loops.state import LoopState, same_bytes
from monitor.loops.steps import ProgramSteps, execution_of
from monitor.loops.task import LoopTask, class_name, hyper_of, is_hyper_name, members_of
from monitor.loops.watching import WriteWatch
from monitor.sharding import StateDigest
from monitor.site import Site, SiteConfig, new_site_config, site_path
from monitor.transcript import Execution, Leaf, Metadata, RunFolder, TranscriptWriter, encode_state
from monitor.transcript.batches import salt_commitment
from monitor.transcript.layout import SALT, batch_path, checkpoint_path, log_path, program_path
from monitor.transcript.state import decode_state

__all__ = ["Recorder"]

_SAMPLED = 16
"""Of how many steps one is repeated from its program, unless the caller says otherwise."""
_SCHEDULED = "initial_lr"
"""What a schedule of learning rates adds to each parameter group."""


class Recorder:
    """Makes a run folder out of a training loop that somebody else wrote.

        recorder = Recorder(model, optimizer, out="RUN", numerics="exact", seed=1)
        for batch in loader:
            with recorder.step(batch):
                ...  # zero_grad, forward, backward, optimizer.step(), as ever
        recorder.finish()

    It moves weights, buffers, gradients and optimizer state into chip memory. A step is on disk before the chips hear
    of it. Beside ``RUN`` lie ``RUN.lab`` (the lab's private side) and ``RUN.trust.json``: what maker, registry and the
    agreement between lab and inspector say, here written by one hand because this is a simulation.

    A write that no operator shows (through NumPy, a pointer, another thread) makes a step that its program does not
    explain. Such a write to weights, buffers, optimizer state, a parameter's gradient once it is accumulated, or the
    batch is noticed in the step in which it happens, where these lie in the host's memory. One to anything else that a
    step computes with is noticed where the step is repeated from its program before it is committed. So are the first
    step of each program, each step with a checkpoint, and of all others those that the run's seed picks as
    ``check_writes`` says; ``finish`` repeats those after the last checkpoint. A step in which a write is noticed is
    not committed.

    Args:
        model: any module, on the CPU or an accelerator; its parameters and buffers are adopted.
        optimizer: of the model's parameters.
        out: run folder that does not exist yet.
        numerics: ``exact`` or ``rounded``.
        seed: decides the lab's keys and the masks of dropout.
        chips: number of chips that the state is spread over.
        idle_chips: registered chips of the lab that take no part; what they say is left in ``RUN.answers``.
        checkpoint_every: steps from one full state to the next.
        free_slots: let numbers change from step to step although no rule explains them; the inspector lists them.
        free: names of hyper-parameters that lab and inspector agree to leave unbound to the arithmetic.
        direct_paths: tensors of the state, such as ``buffer/codes``, that lab and inspector agree batches and constants
            may reach without passing a loss.
        check_writes: which steps are repeated from their programs before they are committed (see below): ``sampled``
            (one step in 16), ``every``, or a number n (one step in n).
        started: UTC time of the start; now, if None.
        hours: until the declared end of the run.
        lie: ``wrong-operator`` simulates a lab in whose step ``lie_step`` one operator returns one wrong number.

    Raises:
        CallerError: here and in every step, on anything that cannot be recorded; nothing is committed then.
    """

    _state: Literal["ready", "open", "failed", "quoted", "finished"]
    _loop: LoopState
    _start: StateDigest
    _hooks: list[RemovableHandle]
    _step: _Step | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        out: str | Path,
        numerics: str = "exact",
        seed: int = 0,
        chips: int = 4,
        idle_chips: int = 0,
        checkpoint_every: int = 4,
        lab: str = "lab-1",
        snapshot_rate: Fraction = Fraction(1, 4),
        free_slots: bool = False,
        free: Sequence[str] = (),
        direct_paths: Sequence[str] = (),
        check_writes: Literal["sampled", "every"] | int = "sampled",
        started: datetime | None = None,
        hours: float = 24.0,
        lie: str | None = None,
        lie_step: int = 1,
    ) -> None:
        folder = Path(out)
        if folder.exists():
            raise CallerError(f"{folder} exists already; choose another folder, or go on with Recorder.resume")
        _conduct_of(lie, lie_step)
        begin = started or datetime.now(UTC).replace(microsecond=0)
        config = new_site_config(
            lab=lab,
            seed=seed,
            chips=chips,
            idle_chips=idle_chips,
            lie=lie,
            lie_step=lie_step,
            snapshot_rate=snapshot_rate,
            started=begin,
            duration=timedelta(hours=hours),
        )
        self._adopt(model, optimizer, folder, config, free_slots, free, direct_paths, check_writes)
        self._task = LoopTask(
            numerics=numerics,
            seed=seed,
            checkpoint_every=checkpoint_every,
            shards=chips,
            optimizer=class_name(optimizer),
            groups=self._groups,
            parameters=members_of(model, optimizer),
            state=self._loop.entries,
        )
        self._rules = StepNumbers(self._task, self._before)
        self._site = Site.create(site_path(folder), config)
        self._start = self._loop.memory.digest()
        self._write_trust()
        self._begin(lab, begin, config.declared_end)

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        out: str | Path,
        free_slots: bool = False,
        free: Sequence[str] = (),
        direct_paths: Sequence[str] = (),
        check_writes: Literal["sampled", "every"] | int = "sampled",
    ) -> Self:
        """Go on with a run whose process died: the steps after its last checkpoint are repeated from their programs.

        The loop goes on with batch ``recorder.steps``; its schedule of learning rates is the caller's to put forward.

        Args:
            model: made as for the first part of the run; its values are overwritten with the run's.
            optimizer: likewise, with the same groups of hyper-parameters.
            out: the run folder, with the lab's folder beside it.
            free_slots, free, direct_paths, check_writes: as for the first part.

        Raises:
            CallerError: the run is finished, or belongs to another model or optimizer.
            EvidenceError: a committed step does not lead to its committed state again.
        """
        folder = Path(out)
        lab_folder = site_path(folder)
        config = Site.read_config(lab_folder)
        key = Site.lab_key(config)
        if not folder.is_dir():
            raise CallerError(f"there is no run folder {folder}")
        writer = TranscriptWriter.reopen(folder, lab_folder / "staging", key)
        run = RunFolder(folder, key.verifying)
        recorder = cls.__new__(cls)
        recorder._adopt(model, optimizer, folder, config, free_slots, free, direct_paths, check_writes)
        recorder._take_over(run, writer, members_of(model, optimizer))
        return recorder

    @property
    def steps(self) -> int:
        """Number of steps that are recorded."""
        return self._writer.steps

    def step(self, batch: object) -> AbstractContextManager[None]:
        """Record the body of the ``with`` statement as the next step, which trains on ``batch``.

        Args:
            batch: every tensor that the body reads from outside: a tensor, or dicts, tuples and lists of them.
        """
        return _Step(self, batch)

    def finish(self) -> str:
        """Close the run: last checkpoint, the chips' evidence. Returns the digest of the last state."""
        if self._state == "quoted":
            self._writer.finish({})
            self._state = "finished"
            return str(self._loop.memory.digest().root)
        self._require_ready()
        steps = self._writer.steps
        if steps < 1:
            raise CallerError("no step was recorded; there is no run to finish")
        self._check_untouched()
        files = {}
        if steps % self._task.checkpoint_every:
            self._repeat_segment(steps)
            files[checkpoint_path(steps)] = encode_state(self._loop.memory.export())
        evidence = chip_evidence(self._site, lambda _, evidence: evidence)
        write_answers(self._site, self.folder)
        self._writer.finish({**files, **evidence})
        self._site.power_off()
        for hook in self._hooks:
            hook.remove()
        self._state = "finished"
        return str(self._loop.memory.digest().root)

    def _adopt(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: Path,
        config: SiteConfig,
        free_slots: bool,
        free: Sequence[str],
        direct_paths: Sequence[str],
        check_writes: str | int,
    ) -> None:
        """Take the loop's objects into chip memory; nothing is on disk yet."""
        _check_objects(model, optimizer)
        if isinstance(free, str) or not all(map(is_hyper_name, free)):
            raise CallerError(f"free lists names of hyper-parameters, not {free!r}")
        check_subnormals()
        self.folder = folder
        self._optimizer = optimizer
        self._free_slots, self._free = free_slots, frozenset(free)
        self._one_in = _one_in(check_writes)
        self._conduct = _conduct_of(config.lie, config.lie_step)
        self._state = "ready"
        self._groups: tuple[Mapping[str, Any], ...] = tuple(hyper_of(group) for group in optimizer.param_groups)
        self._loop = LoopState(model, optimizer, config.chips)
        names = {f"{entry.kind}/{entry.name}" for entry in self._loop.entries}
        if isinstance(direct_paths, str) or not set(direct_paths) <= names:
            raise CallerError(f"direct_paths lists tensors of the state such as {sorted(names)[0]!a}")
        self._direct_paths = sorted(set(direct_paths))
        self._before = {name: tensor.clone() for name, tensor in self._loop.memory.export().items()}
        self._copies = {name: tensor.clone() for name, tensor in self._before.items() if tensor.device.type == "cpu"}
        self._programs: dict[str, Program] = {}
        self._capture: Capture | None = None
        self._updates: list[tuple[int, int]] = []
        self._update_start = 0
        self._used: list[Mapping[str, Any]] = list(self._groups)
        self._hooks = [
            optimizer.register_step_pre_hook(self._note_update),
            optimizer.register_step_post_hook(self._note_updated),
        ]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hold = functools.partial(self._watch_gradient, f"gradient/{name}")
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hold))  # type: ignore[no-untyped-call]
        self._salt = hashlib.sha256(f"chipwitness/salt/{config.secret}".encode()).digest()
        self._reference = Site.reference_values(config)

    def _take_over(self, run: RunFolder, writer: TranscriptWriter, parameters: tuple[tuple[str, ...], ...]) -> None:
        """Bring memory and chips to the last committed step of an unfinished run."""
        leaves, _ = run.load_steps()
        task, self._run_id, self._writer = run.loop, run.metadata.run_id, writer
        name = class_name(self._optimizer)
        mine = replace(task, optimizer=name, parameters=parameters, state=self._loop.entries)
        keys = [set(group) - {_SCHEDULED} for group in task.groups]  # a schedule may come before or after the recorder
        if mine != task or [set(group) - {_SCHEDULED} for group in self._groups] != keys:
            raise CallerError(f"{run.folder.name} was recorded with another model or optimizer")
        self._task, self._groups, self._used = task, tuple(task.groups), list(task.groups)
        if len(leaves) == 1:
            self._loop.require_start(leaves[0].state)
        elif leaves and self._loop.numbers:
            raise CallerError(
                f"the optimizer keeps {self._loop.numbers[0]} outside tensors, where no checkpoint has it"
            )
        self._rules = StepNumbers(task, run.checkpoint(0) if leaves else self._before)
        for leaf in leaves[1:]:
            execution = execution_of(leaf)
            program = self._programs.setdefault(execution.program, run.program(execution.program))
            self._rules.take(program, execution.slots, execution.hyper)
        self._start = leaves[0].state if leaves else self._loop.memory.digest()
        self._write_trust()
        if writer.holds_chip_evidence:
            self._loop.memory.load(run.checkpoint(task.steps))
            self._state = "quoted"
            return
        self._site = Site.reopen(site_path(run.folder))
        self._site.remove_staging()
        for leaf in leaves:
            writer.tree.append(leaf.encoded())
        self._repeat_committed(run, leaves)

    def _repeat_committed(self, run: RunFolder, leaves: list[Leaf]) -> None:
        """Show the chips the last checkpoint and the steps since then once more; the loop holds what they hold."""
        start = max(len(leaves) - 1, 0) // self._task.checkpoint_every * self._task.checkpoint_every
        if leaves:
            self._loop.memory.load(run.checkpoint(start))
        for chip, shard in zip(self._site.chips, self._loop.memory.shards, strict=True):
            chip.attach(shard, self._run_id, start)
        if not leaves:
            self._commit_start()
            return
        self._announce(start)
        steps = ProgramSteps(run, start, device=self._loop.memory.place)
        for leaf in leaves[start + 1 :]:
            reached, _ = steps.take(observer=self._conduct.observer(leaf.step))
            if reached != leaf:
                raise EvidenceError(
                    f"step {leaf.step} does not lead to its committed state; this run cannot be resumed"
                )
            self._loop.memory.load(steps.training.memory.export())
            self._announce(leaf.step)
        if len(leaves) > 1:
            commit = self._programs[execution_of(leaves[-1]).program].commit
            self._loop.hold({name for name, place in commit.items() if place is not None})
        self._remember()

    def _begin(self, lab: str, begin: datetime, declared_end: str) -> None:
        place = self._loop.memory.place
        metadata = Metadata(
            lab=lab,
            task=self._task,
            data=salt_commitment(self._salt),
            chips=tuple(chip.chip_id for chip in self._site.chips),
            device={"name": device_name(place), "fingerprint": str(fingerprint(place))},
            versions=versions(),
            settings=settings(place),
            started=begin.strftime("%Y-%m-%dT%H:%M:%SZ"),
            declared_end=declared_end,
        )
        self._run_id = metadata.run_id
        self._writer = TranscriptWriter.create(
            self.folder,
            self._site.staging,
            self._site.key,
            run=self._run_id.hex(),
            metadata=metadata.to_json(),
            data={SALT: self._salt},
        )
        for chip, shard in zip(self._site.chips, self._loop.memory.shards, strict=True):
            chip.attach(shard, self._run_id, 0)
        self._commit_start()

    def _commit_start(self) -> None:
        leaf = Leaf(step=0, batch="", state=self._loop.memory.digest(), log="", loss="", flop=0)
        self._commit(leaf, {checkpoint_path(0): encode_state(self._loop.memory.export())})

    def _note_update(self, *_: object) -> None:
        """Called before each ``optimizer.step``; a scheduler may change the learning rate right after it."""
        if self._capture is None:
            return  # between steps, where a write of the state is found
        used: list[Mapping[str, Any]] = [hyper_of(group) for group in self._optimizer.param_groups]
        if self._updates and used != self._used:
            raise CallerError("hyper-parameters change between two updates of one step; record one step for each")
        self._used, self._update_start = used, len(self._capture.nodes)

    def _note_updated(self, *_: object) -> None:
        """Called after each ``optimizer.step``."""
        if self._capture is not None:
            self._updates.append((self._update_start, len(self._capture.nodes)))

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        """Called when a gradient has been accumulated, also outside steps."""
        if self._step is not None and parameter.grad is not None:
            self._step.watch(name, parameter.grad)

    def _require_ready(self) -> None:
        if self._state != "ready":
            reasons = {
                "open": "a step is open; leave its with statement first",
                "failed": "a step failed, so this recorder cannot go on; Recorder.resume can, from the last step",
                "quoted": "the chips have given their evidence; only finish() is left",
                "finished": "the run is finished",
            }
            raise CallerError(reasons[self._state])

    def _check_untouched(self) -> None:
        """Between steps nobody may write the state."""
        strays = self._loop.strays()
        if strays:
            raise CallerError(f"{strays[0]} was put elsewhere than in chip memory between steps")
        for name, tensor in self._loop.memory.export().items():
            if not same_bytes(tensor, self._before[name]):
                raise CallerError(f"{name} was written between steps; only a recorded step may write the state")

    def _watch_step(self, step: int, batch: Mapping[str, Tensor]) -> WriteWatch:
        """A watch over the state and the batch of a step that is about to begin."""
        watch = WriteWatch(step)
        for name, tensor in self._loop.memory.export().items():
            watch.add(name, tensor, self._copies.get(name))
        for name, tensor in batch.items():
            watch.add(f"batch tensor {name}", tensor)
        return watch

    def _record(self, capture: Capture, content: bytes, log: bytes) -> None:
        """Turn what was captured into a committed step; ``content`` is the batch before the step could write it."""
        step = self._writer.steps + 1
        batch = decode_state(content, "the batch")
        captured = capture.program(self._loop.current(), batch_layout(batch), self._updates)
        program, execution = self._name(captured, capture)
        self._loop.settle()
        root = batch_root(self._salt, step, content)
        leaf = Leaf(
            step=step,
            batch=root.hex(),
            state=self._loop.memory.digest(),
            log=str(digest_bytes("rounding-log", log)),
            loss="",
            flop=program.flop,
            execution=execution,
        )
        is_checkpoint = step % self._task.checkpoint_every == 0
        is_new = program.digest not in self._programs
        if is_new or is_checkpoint or _is_picked(self._task.seed, step, self._one_in):
            self._repeat(program, leaf, batch, root, log)
        files = {log_path(step): log, batch_path(step): content}
        if is_new:
            self._programs[program.digest] = program
            self._write_trust()
            files[program_path(program.digest)] = program.encoded
        if is_checkpoint:
            files[checkpoint_path(step)] = encode_state(self._loop.memory.export())
        self._remember()
        self._commit(leaf, files)

    def _remember(self) -> None:
        """Keep the state, so that whatever writes it between steps or beside a step's operators is seen."""
        with torch.no_grad():
            for name, tensor in self._loop.memory.export().items():
                self._before[name].copy_(tensor)
                if name in self._copies:
                    self._copies[name].copy_(tensor)

    def _name(self, captured: Program, capture: Capture) -> tuple[Program, Execution]:
        """The program that this step runs, an earlier one if there is one of its structure, and the step's values."""
        structure = captured.structure()
        program = next((known for known in self._programs.values() if known.structure() == structure), captured)
        for number, (one, other) in enumerate(zip(captured.constants, program.constants, strict=True)):
            if one != other:
                raise CallerError(
                    f"{capture.reader_of(number)} reads a tensor that changes from step to step, and that no recorded "
                    "operator, state or batch produced; declare it in the batch or register it as a buffer"
                )
        if program is captured and len(self._programs) == MAXIMUM_PROGRAMS:
            raise CallerError(
                f"the loop has run {MAXIMUM_PROGRAMS} different programs already; keep the shapes of batches, whole "
                "numbers among arguments and branches the same from step to step"
            )
        slots: dict[str, list[int]] = {}
        for number, (mine, known) in enumerate(zip(captured.scalars, program.scalars, strict=True)):
            if mine != known:
                slots.setdefault(mine, []).append(number)
        if len(self._used) != len(self._groups):
            raise CallerError("the optimizer has got another parameter group since the recorder was made")
        changes = []
        for now, declared in zip(self._used, self._groups, strict=True):
            # A schedule made after the recorder adds keys of its own to the groups; they decide nothing.
            changes.append({name: now[name] for name in declared if name in now and now[name] != declared[name]})
        try:
            self._rules.take(program, slots, changes)
        except EvidenceError as error:
            raise CallerError(f"this step cannot be recorded: {error}") from None
        unexplained = self._rules.unexplained()
        if unexplained and not self._free_slots:
            raise CallerError(
                f"a number that {unexplained[0].operator} takes changes from step to step outside the optimizer's "
                "updates; pass it as a tensor of the batch, or allow free_slots=True"
            )
        return program, Execution(
            program=program.digest,
            slots={text: tuple(numbers) for text, numbers in slots.items()},
            hyper=tuple(changes),
            reads=digest_reads(capture.reads),
        )

    def _repeat(self, program: Program, leaf: Leaf, batch: Mapping[str, Tensor], root: bytes, log: bytes) -> None:
        """Interpret the step from the state before it: what it reaches must lie in memory now."""
        assert leaf.execution is not None
        training = ProgramTraining(self._task, device=self._loop.memory.place)
        training.memory.load(self._before)
        training.step = leaf.step - 1
        try:
            observer = self._conduct.observer(leaf.step)
            reached, _ = training.take_step(program, leaf.execution, batch, root, log, observer=observer)
        except EvidenceError as error:
            raise CallerError(f"step {leaf.step} cannot be recorded: {error}") from None
        self._require_equal(training, leaf.step)
        if reached != leaf:
            raise CallerError(f"step {leaf.step} reads other values when its program is repeated")

    def _repeat_segment(self, last: int) -> None:
        """Repeat the steps since the last checkpoint, from disk."""
        run = RunFolder(self.folder, self._site.key.verifying)
        start = last // self._task.checkpoint_every * self._task.checkpoint_every
        steps = ProgramSteps(run, start, device=self._loop.memory.place)
        for step in range(start + 1, last + 1):
            steps.take(observer=self._conduct.observer(step))
        self._require_equal(steps.training, last)

    def _require_equal(self, training: ProgramTraining, step: int) -> None:
        mine = self._loop.memory.export()
        for name, tensor in training.memory.export().items():
            if not same_bytes(tensor, mine[name]):
                raise CallerError(f"{name} was written in step {step} by something that is no recorded operator")

    def _commit(self, leaf: Leaf, files: dict[str, bytes]) -> None:
        self._writer.append(leaf, files)
        self._announce(leaf.step)

    def _announce(self, step: int) -> None:
        """Tell the chips the head of the log that ends with a committed step, and let one tick pass."""
        for chip in self._site.chips:
            chip.commit(self._run_id, step, self._writer.tree.root(step + 1))
        for chip in self._site.chips:
            chip.tick(self._run_id, step)
        for chip in self._site.idle:
            chip.idle(1)

    def _write_trust(self) -> None:
        """Write what is agreed as far as the run came."""
        programs = sorted(self._programs)
        trust = {
            **self._reference,
            "programs": programs,
            "initial_states": [str(self._start.root)],
            "free": sorted(self._free | set(programs if self._free_slots else ())),
            "data": [],
            **({"direct_paths": self._direct_paths} if self._direct_paths else {}),
        }
        path = self.folder.resolve().with_name(self.folder.resolve().name + ".trust.json")
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps(trust, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)


class _Step(AbstractContextManager[None]):
    """One recorded step; used once."""

    def __init__(self, recorder: Recorder, batch: object) -> None:
        self._recorder = recorder
        self._given = batch

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._require_ready()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CallerError("autocast is on; switch it off, a recorded loop computes in FP32")
        recorder._check_untouched()
        batch = flatten_batch(self._given)
        self._content = encode_state(batch)
        step = recorder._writer.steps + 1
        keys = RecordedKeys(recorder._task.seed, step)
        self._watch = recorder._watch_step(step, batch)
        self._capture = Capture(keys, self._watch, recorder._conduct.observer(step))
        present = {name: tensor for name, tensor in recorder._loop.current().items() if tensor is not None}
        self._capture.declare_inputs({name: tensor.detach() for name, tensor in present.items()}, batch)
        self._random = torch.get_rng_state()
        torch.default_generator.manual_seed(step_seed(recorder._task.seed, step))
        recorder._capture, recorder._updates, recorder._used = self._capture, [], list(recorder._groups)
        recorder._state, recorder._step = "open", self
        self._session = numerics.recording(recorder._task.numerics, observer=self._capture, keys=keys)
        self._session.__enter__()

    def watch(self, name: str, tensor: Tensor) -> None:
        """Notice from now on whatever writes a tensor beside recorded operators."""
        with self._session.aside():
            self._watch.add(name, tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        recorder._state, recorder._capture, recorder._step = "failed", None, None
        try:
            try:
                self._session.__exit__(kind, error, trace)
            finally:
                torch.set_rng_state(self._random)
            if kind is None:
                self._watch.close()
                recorder._record(self._capture, self._content, self._session.log)
                recorder._state = "ready"
        finally:
            if recorder._state == "failed":
                recorder._site.cut_power()


def _is_picked(seed: int, step: int, one_in: int) -> bool:
    """Whether a step that need not be repeated is."""
    return step_seed(seed, step) % one_in == 0


def _one_in(check_writes: object) -> int:
    """Of how many steps one is repeated beside those that always are."""
    if check_writes in ("sampled", "every"):
        return _SAMPLED if check_writes == "sampled" else 1
    if type(check_writes) is not int or check_writes < 1:
        raise CallerError(f"check_writes is 'sampled', 'every' or a number of steps from 1 on, not {check_writes!r}")
    return check_writes


def _conduct_of(lie: str | None, step: int) -> Conduct:
    if lie is not None and lie != LabLie.WRONG_OPERATOR.value:
        raise CallerError(f"a recorded loop simulates the lie {LabLie.WRONG_OPERATOR.value!r} only, not {lie!r}")
    if type(step) is not int or step < 1:
        raise CallerError(f"lie_step must be at least 1, not {step!r}")
    return conduct(lie, step)


def _check_objects(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise CallerError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise CallerError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise CallerError(f"{name or 'the model'} is compiled; record the model without torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise CallerError(f"{name or 'the model'} is a script module; record the model without torch.jit")
