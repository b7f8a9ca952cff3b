"""Records a training loop: each step becomes a program, a committed leaf and a state on the chips."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor.declaration.origin import Origin, Parent
from monitor.declaration.reference import SCHEDULES
from monitor.declaration.schedules import Schedule
from monitor.declaration.slots import StepNumbers
from monitor.declaration.statement import Declaration, class_name, hyper_of, is_hyper_name, members_of
from monitor.environment import check_subnormals, device_name, fingerprint, settings, versions
from monitor.lab.conduct import conduct, simulated_lie
from monitor.lab.evidence import chip_evidence, write_answers
from monitor.lab.host import Host
from monitor.lab.reexecution import LabSteps
from monitor.lab.site import Site, SiteConfig, new_site_config, next_site_config, site_path
from monitor.presets.task import Task
from monitor.programs.batches import batch_layout, flatten_batch
from monitor.programs.bits import same_bytes
from monitor.programs.capture import Capture, digest_reads
from monitor.programs.interpreter import loss_bits
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.program import MAXIMUM_PROGRAMS, Program
from monitor.programs.watching import WriteWatch
from monitor.recording.following import Follower
from monitor.recording.inspectorate import SimulatedInspectorate
from monitor.recording.parents import hold, start_from
from monitor.recording.sources import DeclaredSource, Source, StreamSource
from monitor.recording.state import LoopState
from monitor.recording.stateful import HostState
from monitor.replay.moment import Moment
from monitor.replay.replaying import ProgramTraining
from monitor.replay.steps import ProgramSteps, execution_of
from monitor.transcript import Execution, Leaf, Metadata, RunFolder, TranscriptWriter, encode_state
from monitor.transcript.layout import checkpoint_path, log_path, program_path
from monitor.transcript.state import decode_state

__all__ = ["RecordedStep", "Recorder"]

_SAMPLED = 16
"""Of how many steps one is repeated from its program, unless the caller says otherwise."""
_SCHEDULED = "initial_lr"
"""What a schedule of learning rates adds to each parameter group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a caller may choose beside the declaration.

    Attributes:
        data: digests of samples and orders that lab and inspector agreed on, where they are not a preset's own.
        reference: the trust file but for the countersigned declaration, if not what the simulated world says.
        trusted: the body cannot do anything else than its program, so that it is captured once, then followed.
    """

    free_slots: bool = False
    free: frozenset[str] = frozenset()
    direct_paths: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    reference: Mapping[str, Any] | None = None
    one_in: int = _SAMPLED
    trusted: bool = False

    @classmethod
    def of(cls, free_slots: bool, free: Sequence[str], direct_paths: Sequence[str], check_writes: object) -> _Options:
        """Check a caller's arguments."""
        if isinstance(free, str) or not all(map(is_hyper_name, free)):
            raise CallerError(f"free lists names of hyper-parameters, not {free!r}")
        if isinstance(direct_paths, str):
            raise CallerError(f"direct_paths lists tensors of the state, not {direct_paths!r}")
        return cls(
            free_slots=free_slots,
            free=frozenset(free),
            direct_paths=frozenset(direct_paths),
            one_in=_one_in(check_writes),
        )


class Recorder:
    """Makes a run folder out of a training loop.

        recorder = Recorder(model, optimizer, out="RUN", numerics="exact", seed=1)
        for batch in loader:
            with recorder.step(batch):
                ...  # zero_grad, forward, backward, optimizer.step(), as ever
        recorder.finish()

    It moves weights, buffers, gradients and optimizer state into chip memory. A step is on disk before the chips hear
    of it. Beside ``RUN`` lie ``RUN.lab`` (the lab's private side) and ``RUN.trust.json``: what maker and registry say,
    and the declaration as a simulated inspectorate countersigned it, with each program as soon as it appears.

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
        schedule: rule that the learning rates of all parameter groups follow; None declares them step by step.
        free_slots: let numbers change from step to step although no rule explains them; the inspector lists them.
        free: names of hyper-parameters that lab and inspector agree to leave unbound to the arithmetic, or to change.
        direct_paths: tensors of the state, such as ``buffer/codes``, that lab and inspector agree batches and constants
            may reach without passing a loss.
        check_writes: which steps are repeated from their programs before they are committed (see below): ``sampled``
            (one step in 16), ``every``, or a number n (one step in n).
        stateful: data loader, schedules and whatever else decides how the loop goes on, by name, each with
            ``state_dict()`` and ``load_state_dict()``. Their states are kept in ``RUN.lab`` with every step, beside the
            hyper-parameters and the global random generators, and ``resume`` gives them back.
        started: UTC time of the start; now, if None.
        hours: until the declared end of the run.
        after: the same lab's earlier run, whose chips go on in this one.
        parent: a finished run of a model with the same tensors, whose last weights and buffers this one starts from.
        lie: simulates a lab that tells this one lie, from step ``lie_step`` on; ``train --lie list`` names them. Its
            recorder does not repeat steps.

    Raises:
        CallerError: here and in every step, on anything that cannot be recorded; nothing is committed then.
    """

    _state: Literal["ready", "open", "failed", "quoted", "finished"]
    _loop: LoopState
    _declared: Declaration
    _source: Source
    _host: Host
    _hooks: list[RemovableHandle]
    _rules: StepNumbers | None = None
    _step: RecordedStep | None = None
    _host_state: HostState | None = None

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
        schedule: Schedule | None = None,
        lab: str = "lab-1",
        snapshot_rate: Fraction = Fraction(1, 4),
        free_slots: bool = False,
        free: Sequence[str] = (),
        direct_paths: Sequence[str] = (),
        check_writes: Literal["sampled", "every"] | int = "sampled",
        stateful: Mapping[str, object] | None = None,
        started: datetime | None = None,
        hours: float = 24.0,
        after: str | Path | None = None,
        parent: str | Path | None = None,
        lie: str | None = None,
        lie_step: int = 1,
    ) -> None:
        folder = Path(out)
        _require_new(folder)
        begin, duration = started or datetime.now(UTC).replace(microsecond=0), timedelta(hours=hours)
        lie = _checked_lie(lie, lie_step)
        if after is not None:
            config = next_site_config(
                Path(after), lie=lie, lie_step=lie_step, source=None, started=begin, duration=duration
            )
        else:
            config = new_site_config(
                lab=lab,
                seed=seed,
                chips=chips,
                idle_chips=idle_chips,
                lie=lie,
                lie_step=lie_step,
                snapshot_rate=snapshot_rate,
                started=begin,
                duration=duration,
            )
        past = None if parent is None else start_from(model, Path(parent))
        self._adopt(model, optimizer, folder, config, _Options.of(free_slots, free, direct_paths, check_writes))
        declared = Declaration(
            numerics=numerics,
            seed=seed,
            checkpoint_every=checkpoint_every,
            shards=config.chips,
            optimizer=class_name(optimizer),
            groups=self._groups,
            parameters=members_of(model, optimizer),
            state=self._loop.entries,
            schedule=schedule,
            origin=Origin(state=self._root, parent=past),
        )
        self._keep_states(stateful)
        self._begin(declared, StreamSource(lab_salt(config), folder), config, None)

    @classmethod
    def of_recipe(
        cls,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        source: DeclaredSource,
        *,
        out: Path,
        config: SiteConfig,
        device: str,
        parent: Parent | None = None,
        reference: Mapping[str, Any] | None = None,
    ) -> Self:
        """Record a run that follows a recipe; its body does what the recipe's program says, and nothing else.

        Args:
            task: the recipe, which decides the declaration.
            model, optimizer: as the task builds them (``monitor.recording.training.build``).
            device: name of the replay device that this process runs as, for the metadata.
            parent: the run whose final weights the model holds, if it holds some.
            reference: the trust file but for the countersigned declaration; by default what the simulation says.
        """
        _require_new(out)
        recorder = cls.__new__(cls)
        recorder._adopt(model, optimizer, out, config, _Options(trusted=True, data=source.agreed, reference=reference))
        declared = Declaration.of_recipe(task, model, optimizer, recorder._loop.entries)
        if parent is not None:
            declared = replace(declared, origin=Origin(state=recorder._root, parent=parent))
        recorder._begin(declared, source, config, device)
        return recorder

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
        stateful: Mapping[str, object] | None = None,
    ) -> Self:
        """Go on with a run whose process died: the steps after its last checkpoint are repeated from their programs.

        Objects under ``stateful`` get the states that they had at the last committed step, so that the same loop goes
        on with the next batch. Without them it goes on with batch ``recorder.steps``, and the caller steps its
        schedule of learning rates as often.

        Args:
            model: made as for the first part of the run; its values are overwritten with the run's.
            optimizer: likewise, with the same groups of hyper-parameters.
            out: the run folder, with the lab's folder beside it.
            free_slots, free, direct_paths, check_writes: as for the first part.
            stateful: objects made as for the first part, under the same names.

        Raises:
            CallerError: the run is finished, belongs to another model or optimizer, or keeps other objects' states.
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
        if run.declared.origin.parent is not None and run.committed >= 0:
            hold(model, run.checkpoint(0))
        recorder = cls.__new__(cls)
        options = replace(
            _Options.of(free_slots, free, direct_paths, check_writes),
            trusted=run.declared.recipe is not None,
        )
        recorder._adopt(model, optimizer, folder, config, options)
        recorder._keep_states(stateful)
        last = max(writer.steps, 0)
        if stateful is None:
            HostState.require_none(lab_folder, last)
        recorder._take_over(run, writer, members_of(model, optimizer), config)
        if recorder._host_state is not None and recorder._state == "ready":
            recorder._host_state.give_back(last)
        return recorder

    @property
    def steps(self) -> int:
        """Number of steps that are recorded."""
        return self._writer.steps

    @property
    def run_id(self) -> str:
        """Name of the run, hex."""
        return self._run_id.hex()

    @property
    def rounding_log_bytes(self) -> int:
        """Bytes of the rounding logs of all recorded steps."""
        return self._log_bytes

    def step(self, batch: object) -> RecordedStep:
        """Record the body of the ``with`` statement as the next step, which trains on ``batch``.

        Args:
            batch: every tensor that the body reads from outside: a tensor, or dicts, tuples and lists of them.
        """
        return RecordedStep(self, batch)

    @property
    def _root(self) -> str:
        """Digest of the state that lies in memory."""
        return str(self._loop.memory.digest().root)

    def finish(self) -> str:
        """Close the run: last checkpoint, the chips' evidence. Returns the digest of the last state."""
        root = self._root
        if self._state == "quoted":
            self._writer.finish({})
            self._state = "finished"
            return root
        self._require_ready()
        steps, declared = self._writer.steps, self._declared
        if steps < max(declared.length or 1, 1):
            raise CallerError(
                "no step was recorded; there is no run to finish"
                if steps < 1
                else f"{steps} of {declared.length} declared steps are recorded; the run is not finished"
            )
        self._check_untouched()
        if self._is_checked and steps % declared.checkpoint_every and steps != declared.length:
            self._repeat_segment(steps)
        state = encode_state(self._loop.memory.export())
        self._conduct.before_evidence(self._host)
        evidence = chip_evidence(self._site, self._host.hand_over)
        write_answers(self._site, self.folder)
        self._writer.finish({checkpoint_path(steps): state, **evidence})
        self._site.power_off()
        for hook in self._hooks:
            hook.remove()
        self._state = "finished"
        self._conduct.publish(self.folder, self._site)
        return root

    def _adopt(
        self, model: nn.Module, optimizer: Optimizer, folder: Path, config: SiteConfig, options: _Options
    ) -> None:
        """Take model and optimizer into chip memory; nothing is on disk yet."""
        _check_objects(model, optimizer)
        check_subnormals()
        self.folder = folder
        self._optimizer = optimizer
        self._options = options
        self._conduct = conduct(config.lie, config.lie_step)
        self._is_watched = not options.trusted
        self._is_checked = not options.trusted and not self._conduct.lies
        self._state = "ready"
        self._groups: tuple[Mapping[str, Any], ...] = tuple(hyper_of(group) for group in optimizer.param_groups)
        self._loop = LoopState(model, optimizer, config.chips, complete=options.trusted)
        names = {f"{entry.kind}/{entry.name}" for entry in self._loop.entries}
        if not options.direct_paths <= names:
            raise CallerError(f"direct_paths lists tensors of the state such as {sorted(names)[0]!a}")
        self._before: dict[str, Tensor] = {}
        if self._is_watched or self._conduct.needs_before:
            self._before = {name: tensor.clone() for name, tensor in self._loop.memory.export().items()}
        self._copies: dict[str, Tensor] = {}
        if self._is_watched:
            self._copies = {name: held.clone() for name, held in self._before.items() if held.device.type == "cpu"}
        self._programs: dict[str, Program] = {}
        self._late: dict[str, bytes] = {}
        self._observed: Capture | Follower | None = None
        self._updates: list[tuple[int, int]] = []
        self._update_start = 0
        self._used: list[Mapping[str, Any]] = list(self._groups)
        self._log_bytes = 0
        self._hooks = [
            optimizer.register_step_pre_hook(self._note_update),
            optimizer.register_step_post_hook(self._note_updated),
        ]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and self._is_watched:
                hold = functools.partial(self._watch_gradient, f"gradient/{name}")
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hold))  # type: ignore[no-untyped-call]
        self._inspectorate = SimulatedInspectorate(
            folder,
            config,
            reference=options.reference,
            free=options.free,
            direct_paths=options.direct_paths,
            data=options.data,
        )

    def _keep_states(self, stateful: Mapping[str, object] | None) -> None:
        """Keep with every step the states of the caller's objects."""
        if stateful is not None:
            self._host_state = HostState(stateful, self._optimizer, site_path(self.folder))

    def _begin(self, declared: Declaration, source: Source, config: SiteConfig, device: str | None) -> None:
        """Make the lab's and the run folder, and commit the initial state."""
        self._conduct.check(declared, config)
        self._declared, self._source = declared, source
        if self._is_checked:
            self._rules = StepNumbers(declared, self._before)
        self._site = Site.create(site_path(self.folder), config)
        if self._host_state is not None:
            self._host_state.keep(0)
        self._agree()
        place = self._loop.memory.place
        name = device_name(place) if device is None else device
        metadata = Metadata(
            lab=config.lab,
            task=declared,
            data=dict(source.commitment),
            chips=tuple(chip.chip_id for chip in self._site.chips),
            device={"name": name, "fingerprint": str(fingerprint(place))},
            versions=versions(),
            settings=settings(place),
            started=config.started,
            declared_end=config.declared_end,
        )
        self._writer = TranscriptWriter.create(
            self.folder,
            self._site.staging,
            self._site.key,
            run=metadata.run_id.hex(),
            metadata=metadata.to_json(),
            data=source.files,
        )
        self._run_id = metadata.run_id
        self._make_host()
        self._commit_start()

    def _make_host(self) -> None:
        self._host = Host(
            self._declared,
            self._loop.memory,
            self._source.batches,
            self._site,
            self._writer,
            self._conduct,
            self._run_id,
        )

    def _take_over(
        self, run: RunFolder, writer: TranscriptWriter, parameters: tuple[tuple[str, ...], ...], config: SiteConfig
    ) -> None:
        """Bring memory and chips to the last committed step of an unfinished run."""
        leaves, _ = run.load_steps()
        declared, self._writer, self._run_id = run.declared, writer, run.metadata.run_id
        name = class_name(self._optimizer)
        mine = replace(declared, optimizer=name, parameters=parameters, state=self._loop.entries)
        keys = [set(group) - {_SCHEDULED} for group in declared.groups]  # a schedule may come before or after
        if mine != declared or [set(group) - {_SCHEDULED} for group in self._groups] != keys:
            raise CallerError(f"{run.folder.name} was recorded with another model or optimizer")
        self._declared, self._groups, self._used = declared, tuple(declared.groups), list(declared.groups)
        self._source = (
            StreamSource(lab_salt(config), run.folder)
            if declared.recipe is None
            else DeclaredSource(run.data(), run.metadata.data["set"], {})
        )
        self._inspectorate.recall()
        if not leaves and declared.origin.state not in (None, self._root):
            raise CallerError("the model or the optimizer does not hold the state that the run declares")
        if len(leaves) == 1 and not self._conduct.lies:
            self._loop.require_start(leaves[0].state)
        elif leaves and self._loop.numbers:
            raise CallerError(
                f"the optimizer keeps {self._loop.numbers[0]} outside tensors, where no checkpoint has it"
            )
        if self._is_checked:
            self._rules = StepNumbers(declared, run.checkpoint(0) if leaves else self._before)
        for leaf in leaves[1:]:
            execution = execution_of(leaf)
            program = self._programs.setdefault(execution.program, run.program(execution.program))
            if self._rules is not None:
                self._rules.take(program, execution.slots, execution.hyper)
            self._log_bytes += run.files[log_path(leaf.step)].length
        self._agree()
        if writer.holds_chip_evidence:
            self._loop.memory.load(run.checkpoint(declared.steps))
            self._state = "quoted"
            return
        self._site = Site.reopen(site_path(run.folder))
        self._site.remove_staging()
        for leaf in leaves:
            writer.tree.append(leaf.encoded())
        self._make_host()
        if leaves:
            self._repeat_committed(run, leaves)
        else:
            self._commit_start()

    def _repeat_committed(self, run: RunFolder, leaves: list[Leaf]) -> None:
        """Show the chips the steps since the last checkpoint again; model and optimizer hold the last one's state."""
        start = self._declared.checkpoint_before(leaves[-1].step)
        first = start + (start > 0)  # the first that is whole again: of a checkpoint there is what its next step reads
        for leaf in leaves[:first]:
            self._host.keep(leaf)
        steps = LabSteps(run, start, self._conduct, device=self._loop.memory.place)
        for leaf in leaves[first:]:
            if leaf.step and steps.take()[0] != leaf:
                raise EvidenceError(
                    f"step {leaf.step} does not lead to its committed state; this run cannot be resumed"
                )
            self._loop.memory.load(steps.memory.export())
            if leaf.step == first:
                self._host.attach_memory(first)
            self._host.keep(leaf)
            self._host.announce(leaf.step)
        self._remember()
        if len(leaves) > 1:
            program = self._programs[execution_of(leaves[-1]).program]
            self._loop.hold({name for name, place in program.commit.items() if place is not None})
            self._late = self._checkpoint(leaves[-1].step, program) if self._options.trusted else {}

    def _commit_start(self) -> None:
        self._conduct.before_run(self._site)
        self._conduct.initialise(self._declared, self._loop.memory, self._site)
        self._host.attach_memory(0)
        self._remember()
        leaf = Leaf(step=0, batch="", state=self._loop.memory.digest(), log="", loss="", flop=0)
        self._host.commit(leaf, {checkpoint_path(0): encode_state(self._loop.memory.export())})

    def _note_update(self, *_: object) -> None:
        """Called before each ``optimizer.step``; a scheduler may change the learning rate right after it."""
        if self._observed is None:
            return  # between steps, where a write of the state is found
        used: list[Mapping[str, Any]] = [hyper_of(group) for group in self._optimizer.param_groups]
        if self._updates and used != self._used:
            raise CallerError("hyper-parameters change between two updates of one step; record one step for each")
        self._used, self._update_start = used, self._observed.taken

    def _note_updated(self, *_: object) -> None:
        """Called after each ``optimizer.step``."""
        if self._observed is not None:
            self._updates.append((self._update_start, self._observed.taken))

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
        if not self._is_watched:
            return
        strays = self._loop.strays()
        if strays:
            raise CallerError(f"{strays[0]} was put elsewhere than in chip memory between steps")
        for name, tensor in self._loop.memory.export().items():
            if not same_bytes(tensor, self._before[name]):
                raise CallerError(f"{name} was written between steps; only a recorded step may write the state")

    def _watch_step(self, step: int, batch: Mapping[str, Tensor]) -> WriteWatch:
        """A watch over the state and the batch of a step that is about to begin."""
        watch = WriteWatch(step)
        if self._is_watched:
            for name, tensor in self._loop.memory.export().items():
                watch.add(name, tensor, self._copies.get(name))
            for name, tensor in batch.items():
                watch.add(f"batch tensor {name}", tensor)
        return watch

    def _observe(self, step: int, batch: Mapping[str, Tensor], keys: RecordedKeys) -> Capture | Follower:
        """Whatever looks at the operators of a step that is about to begin."""
        observer = self._conduct.observer(step)
        if self._options.trusted and self._programs:
            return Follower(next(iter(self._programs.values())), keys, observer)
        capture = Capture(keys, self._watch_step(step, batch), observer)
        present = {name: tensor for name, tensor in self._loop.current().items() if tensor is not None}
        capture.declare_inputs({name: tensor.detach() for name, tensor in present.items()}, batch)
        return capture

    def _record(self, taken: RecordedStep, batch: Mapping[str, Tensor], content: bytes, log: bytes) -> None:
        """Turn what was seen of a step into a committed one; ``content`` is the declared batch as a file."""
        step = self._writer.steps + 1
        assert self._observed is not None
        program, execution = self._name(self._observed, taken.loss, batch)
        loss = "" if taken.loss is None else loss_bits(taken.loss)
        taken.loss = None
        self._loop.settle()
        moment = Moment(
            step=step,
            declared=self._declared,
            program=program,
            execution=execution,
            batch=batch,
            memory=self._loop.memory,
            before=self._before or None,
            log=log,
            loss=loss,
        )
        self._host.moment = moment
        log, loss = self._conduct.record(moment)
        self._conduct.before_commit(moment)
        root = self._source.root(step, content)
        leaf = self._conduct.declare(
            Leaf(
                step=step,
                batch=root.hex(),
                state=self._loop.memory.digest(),
                log=str(digest_bytes("rounding-log", log)),
                loss=loss,
                flop=program.flop,
                execution=execution,
            )
        )
        is_kept = step % self._declared.checkpoint_every == 0 or step == self._declared.length
        is_new = program.digest not in self._programs
        is_due = is_new or is_kept or _is_picked(self._declared.seed, step, self._options.one_in)
        if self._is_checked and is_due:
            self._repeat(program, leaf, batch, root, log)
        files = {log_path(step): log, **self._source.step_files(step, content), **self._due(program)}
        if is_new:
            self._programs[program.digest] = program
            self._agree()
            files[program_path(program.digest)] = program.encoded
        self._remember()
        self._late = self._checkpoint(step, program) if self._options.trusted else {}
        self._log_bytes += len(log)
        if self._host_state is not None:
            self._host_state.keep(step)
        self._host.commit(leaf, files)
        self._conduct.after_step(step, self._host)

    def _due(self, following: Program) -> dict[str, bytes]:
        """The checkpoint that comes with the next step, for which a body that may run any program was waited for."""
        return self._late if self._options.trusted else self._checkpoint(self._writer.steps, following)

    def _checkpoint(self, step: int, following: Program) -> dict[str, bytes]:
        """A step's checkpoint, if it has one, without what the next step overwrites before it reads it."""
        if step % self._declared.checkpoint_every or step in (0, self._declared.length):
            return {}
        memory = self._loop.memory
        state = memory.export() if self._options.trusted else self._before
        return {checkpoint_path(step): encode_state(memory.trimmed(state, following.unread))}

    def _remember(self) -> None:
        """Keep the state, so that whatever writes it between steps or beside a step's operators is seen."""
        with torch.no_grad():
            for name, tensor in self._loop.memory.export().items():
                for kept in (self._before, self._copies):
                    if name in kept:
                        kept[name].copy_(tensor)

    def _name(
        self, observed: Capture | Follower, loss: Tensor | None, batch: Mapping[str, Tensor]
    ) -> tuple[Program, Execution]:
        """The program that this step runs, an earlier one if there is one of its structure, and the step's values."""
        changes = self._changes()
        if isinstance(observed, Follower):
            program, slots = observed.program, observed.slots()
        else:
            captured = observed.program(self._loop.current(), batch_layout(batch), self._updates, loss)
            program = self._known(captured, observed)
            slots = _differences(captured, program)
        if self._rules is not None:
            try:
                self._rules.take(program, slots, changes)
            except EvidenceError as error:
                raise CallerError(f"this step cannot be recorded: {error}") from None
            unbound = sorted(set(self._rules.unbound) - self._options.free)
            if self._rules.contradicted and unbound:
                raise CallerError(
                    f"this step cannot be recorded: {unbound[0]} is not bound to the arithmetic, since "
                    f"{self._rules.unbound[unbound[0]]}; lab and inspector may agree to that: free={tuple(unbound)!r}"
                )
            unexplained = self._rules.unexplained()
            if unexplained and not self._options.free_slots:
                raise CallerError(
                    f"a number that {unexplained[0].operator} takes changes from step to step outside the optimizer's "
                    "updates; pass it as a tensor of the batch, or allow free_slots=True"
                )
        reads = digest_reads(observed.reads)
        return program, Execution(program=program.digest, slots=slots, hyper=changes, reads=reads)

    def _known(self, captured: Program, capture: Capture) -> Program:
        """The program of the captured one's structure that a step ran before, or the captured one itself."""
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
                f"the run has {MAXIMUM_PROGRAMS} different programs already; keep the shapes of batches, whole "
                "numbers among arguments and branches the same from step to step"
            )
        return program

    def _changes(self) -> tuple[Mapping[str, Any], ...]:
        """For each parameter group, the hyper-parameters of this step that differ from the declared ones."""
        if len(self._used) != len(self._groups):
            raise CallerError("the optimizer has got another parameter group since the recorder was made")
        changes: list[Mapping[str, Any]] = []
        step, schedule = self._writer.steps + 1, self._declared.schedule
        for now, declared in zip(self._used, self._groups, strict=True):
            # A schedule made after the recorder adds keys of its own to the groups; they decide nothing.
            changes.append({name: now[name] for name in declared if name in now and now[name] != declared[name]})
            if self._is_checked:
                _require_constant(changes[-1], declared, self._options.free)
            if self._updates and schedule is not None and not schedule.agrees(declared["lr"], now["lr"], step):
                raise CallerError(
                    f"the learning rate of step {step} is {now['lr']}, but the declared schedule gives "
                    f"{schedule.rate(declared['lr'], step)}"
                )
        return tuple(changes)

    def _repeat(self, program: Program, leaf: Leaf, batch: Mapping[str, Tensor], root: bytes, log: bytes) -> None:
        """Interpret the step from the state before it: what it reaches must lie in memory now."""
        assert leaf.execution is not None
        training = ProgramTraining(self._declared, device=self._loop.memory.place)
        training.memory.load(self._before)
        training.step = leaf.step - 1
        try:
            reached, _ = training.take_step(program, leaf.execution, batch, root, log)
        except EvidenceError as error:
            raise CallerError(f"step {leaf.step} cannot be recorded: {error}") from None
        self._require_equal(training, leaf.step)
        if reached != leaf:
            raise CallerError(f"step {leaf.step} reads other values when its program is repeated")

    def _repeat_segment(self, last: int) -> None:
        """Repeat the steps since the last checkpoint, from disk."""
        run = RunFolder(self.folder, self._site.key.verifying)
        start = last // self._declared.checkpoint_every * self._declared.checkpoint_every
        steps = ProgramSteps(run, start, device=self._loop.memory.place)
        for _ in range(start, last):
            steps.take()
        self._require_equal(steps.training, last)

    def _require_equal(self, training: ProgramTraining, step: int) -> None:
        mine = self._loop.memory.export()
        for name, tensor in training.memory.export().items():
            if not same_bytes(tensor, mine[name]):
                raise CallerError(f"{name} was written in step {step} by something that is no recorded operator")

    def _agree(self) -> None:
        """Have the declaration countersigned as far as the run came."""
        self._inspectorate.sign(self._declared, self._programs, free_slots=self._options.free_slots)


class RecordedStep(AbstractContextManager["RecordedStep"]):
    """One recorded step; used once."""

    def __init__(self, recorder: Recorder, batch: object) -> None:
        self._recorder = recorder
        self._given = batch
        self._displaced: list[tuple[Tensor, Tensor]] = []
        self.loss: Tensor | None = None

    def commit(self, loss: Tensor) -> None:
        """Commit to the step's loss, a scalar FP32 tensor that the body computed; called inside the step."""
        if self._recorder._step is not self:
            raise CallerError("a loss is committed inside the with statement of its step")
        if not isinstance(loss, Tensor) or loss.dtype != torch.float32 or loss.dim():
            raise CallerError("the loss of a step is a tensor of one FP32 number without dimensions")
        self.loss = loss.detach()

    def watch(self, name: str, tensor: Tensor) -> None:
        """Notice from now on whatever writes a tensor beside recorded operators."""
        with self._session.aside():
            self._watch.add(name, tensor)

    def __enter__(self) -> Self:
        recorder = self._recorder
        recorder._require_ready()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CallerError("autocast is on; switch it off, a recorded step computes in FP32")
        recorder._check_untouched()
        if recorder._host_state is not None:
            recorder._host_state.require_unchanged()
        batch = flatten_batch(self._given)
        step = recorder._writer.steps + 1
        if recorder._declared.length is not None and step > recorder._declared.length:
            raise CallerError(f"the run declares {recorder._declared.length} steps, and all of them are recorded")
        self._content = encode_state(batch) if recorder._source.keeps else b""
        self._batch = self._exchange(batch, step)
        keys = RecordedKeys(recorder._declared.seed, step)
        observed = recorder._observe(step, batch, keys)
        self._watch = observed.writes if isinstance(observed, Capture) else WriteWatch(step)
        self._random = torch.get_rng_state()
        torch.default_generator.manual_seed(step_seed(recorder._declared.seed, step))
        recorder._observed, recorder._updates, recorder._used = observed, [], list(recorder._groups)
        recorder._state, recorder._step = "open", self
        self._session = numerics.recording(recorder._declared.numerics, observer=observed, keys=keys)
        self._session.__enter__()
        return self

    def _exchange(self, batch: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """Let a lying lab put another batch where the body reads; returns what is really trained on."""
        recorder = self._recorder
        other = recorder._conduct.batch(step, batch, recorder._source.batches)
        if other is batch:
            return decode_state(self._content, "the batch") if recorder._source.keeps else batch
        if batch_layout(other) != batch_layout(batch):
            raise CallerError("this lie puts another batch of the same shapes in place of a step's")
        trained = {name: tensor.clone() for name, tensor in other.items()}
        self._displaced = [(tensor, tensor.clone()) for tensor in batch.values()]
        for name, tensor in batch.items():
            tensor.copy_(trained[name])
        return trained

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        recorder._state, recorder._step = "failed", None
        try:
            try:
                self._session.__exit__(kind, error, trace)
            finally:
                torch.set_rng_state(self._random)
            if kind is None:
                self._watch.close()
                recorder._record(self, self._batch, self._content, self._session.log)
                recorder._state = "ready"
        finally:
            recorder._observed = None
            for tensor, content in self._displaced:
                tensor.copy_(content)
            if recorder._state == "failed":
                recorder._site.cut_power()


def lab_salt(config: SiteConfig) -> bytes:
    """Key of the salts of a simulated lab's data: 32 bytes."""
    return hashlib.sha256(f"chipwitness/salt/{config.secret}".encode()).digest()


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise CallerError(f"{folder} exists already; choose another folder, or go on with Recorder.resume")


def _differences(captured: Program, program: Program) -> dict[str, tuple[int, ...]]:
    """Each value of a captured step that differs from its program's own, with the numbers of its scalars."""
    slots: dict[str, list[int]] = {}
    for number, (mine, known) in enumerate(zip(captured.scalars, program.scalars, strict=True)):
        if mine != known:
            slots.setdefault(mine, []).append(number)
    return {text: tuple(numbers) for text, numbers in slots.items()}


def _require_constant(changed: Mapping[str, Any], declared: Mapping[str, Any], free: frozenset[str]) -> None:
    """CallerError if something else than a learning rate differs from its declaration, and was not agreed to."""
    for name in sorted(changed.keys() - {"lr"} - SCHEDULES - free):
        raise CallerError(
            f"{name} is {changed[name]!r:.60} in this step, but was declared as {declared[name]!r:.60}; only learning "
            f"rates may change, and what lab and inspector agree to: free=({name!r},)"
        )


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


def _checked_lie(lie: str | None, step: int) -> str | None:
    if type(step) is not int or step < 1:
        raise CallerError(f"lie_step must be at least 1, not {step!r}")
    return None if lie is None else simulated_lie(lie).value


def _check_objects(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise CallerError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise CallerError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise CallerError(f"{name} lies on meta; a recorded model has tensors with values")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise CallerError(f"{name or 'the model'} is compiled; record the model without torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise CallerError(f"{name or 'the model'} is a script module; record the model without torch.jit")
