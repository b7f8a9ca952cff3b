"""Records a training loop: each step becomes a program, a committed leaf and a state on the chips."""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from firmware_sim import KEPT_BYTES, Meter, Work
from firmware_sim.errors import CallerError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor.declaration.origin import Origin, Parent
from monitor.declaration.schedules import Schedule
from monitor.declaration.statement import BESIDE, Declaration, members_of, optimizer_name
from monitor.environment import check_subnormals, device_name, fingerprint, settings, versions
from monitor.files import Files
from monitor.lab.conduct import conduct
from monitor.lab.desk import Desk
from monitor.lab.evidence import chip_evidence, open_desk, write_answers
from monitor.lab.host import Host
from monitor.lab.simulated import LabConfig, SimulatedLab, lab_path, new_lab_config, next_lab_config
from monitor.presets.task import Task
from monitor.programs.batches import flatten_batch
from monitor.programs.capture import Capture
from monitor.programs.interpreter import Prepared, loss_bits, loss_of
from monitor.programs.keys import RecordedKeys, RepeatedKeys, step_seed
from monitor.programs.program import Program
from monitor.programs.watching import WriteWatch
from monitor.recording.between import Between
from monitor.recording.checkpoints import Checkpoints
from monitor.recording.following import Follower
from monitor.recording.held import HeldState
from monitor.recording.initialising import start_again, with_start
from monitor.recording.inspectorate import SimulatedInspectorate
from monitor.recording.objects import named_objects, one_optimizer, original
from monitor.recording.options import Options, check_objects, checked_lie, checked_shares, require_new
from monitor.recording.parents import hold, start_from
from monitor.recording.refusals import Refusal
from monitor.recording.rehearsal import Rehearsal
from monitor.recording.resuming import heard_beyond, repeat_committed, require_same, require_start
from monitor.recording.shown import Shown
from monitor.recording.sources import DeclaredSource, Source, StreamSource
from monitor.recording.starting import free_again, freeing
from monitor.recording.state import LoopState
from monitor.recording.stateful import HostState
from monitor.recording.step import OpenStep, RecordedStep, TakenElsewhere, exchange
from monitor.recording.step_programs import StepPrograms, require_unwritten
from monitor.recording.updates import OptimizerUpdates
from monitor.replay.moment import Moment
from monitor.replay.replaying import scalars_of
from monitor.replay.steps import execution_of
from monitor.transcript import (
    EVALUATION,
    STEP,
    Execution,
    Leaf,
    Metadata,
    RunFolder,
    TranscriptWriter,
    encode_state,
)
from monitor.transcript.layout import log_path, program_path
from monitor.transcript.state import decode_state

__all__ = ["Recorder"]


class Recorder:
    """Makes a run folder out of a training loop.

        recorder = Recorder(model, optimizer, out="RUN", numerics="exact", seed=1)
        for batch in loader:
            with recorder.step(batch):
                ...  # zero_grad, forward, backward, optimizer.step(), as ever
        recorder.finish()

    It moves weights, buffers, gradients and optimizer state into chip memory. A step is on disk before the chips hear
    of it: once its body is left, it outlives the process, and with ``sync`` a power loss. Beside ``RUN`` lie
    ``RUN.lab`` (the lab's private side) and ``RUN.trust.json``: what maker and registry say, and the declaration as a
    simulated inspectorate countersigned it, with each program as soon as it appears.

    A write that no operator shows (through NumPy, a pointer, another thread) makes a step that its program does not
    explain. Such a write to weights, buffers, optimizer state, a parameter's gradient once it is accumulated, or the
    batch is noticed in the step in which it happens, where these lie in the host's memory. One to anything else that a
    step computes with is noticed where the step is repeated from its program before it is committed. So are the first
    step of each program, each step with a checkpoint, and of all others those that the run's seed picks as
    ``check_writes`` says; ``finish`` repeats those after the last checkpoint. A step in which a write is noticed is
    not committed.

    Args:
        model: any module, on the CPU or an accelerator; its parameters and buffers are adopted. Its values count as
            supplied, unless ``monitor.initialised`` built it.
        optimizer: of the model's parameters; several in a list, or None for steps that only compute. Those that are
            frozen when the run begins may learn later. PyTorch's fused updates are taken by their plain operators.
        out: run folder that does not exist yet.
        numerics: ``exact`` or ``rounded``; or ``native``, PyTorch's own kernels, to see what recording alone costs.
            Such a run verifies, but no other device can repeat it, so that inspections reject it; no step of it is
            repeated for ``check_writes``, and attention is made of its plain operators.
        seed: decides the lab's keys and the masks of dropout.
        chips: number of chips that the state is spread over, evenly.
        shares: instead of ``chips``, how many equal parts of the state each chip holds, such as (3, 1, 2).
        idle_chips: registered chips of the lab that take no part; what they say is left in ``RUN.answers``.
        beacon_every: steps from one beacon of the simulated inspectorate, to the next; 0: none.
        checkpoint_every: steps from one checkpoint to the next.
        keep: how many of the newest checkpoints stay on disk, beside the first and sparser ones between; None for all.
        beside: how often operators between two steps, such as those that log a norm, may read or write as much as the
            whole state; whatever else looks at the state is an ``evaluation``.
        lab: name of the simulated lab: small letters, digits and ``-``; runs of one world have labs of different names.
        snapshot_rate: how likely a chip takes a snapshot in a tick, a fraction.
        schedule: rule that the learning rates of all parameter groups follow; None declares them step by step.
        free_slots: let numbers change from step to step although no rule explains them; the inspector lists them.
        free: names of hyper-parameters that lab and inspector agree to leave unbound to the arithmetic, or to change.
        direct_paths: tensors of the state, such as ``buffer/codes``, that lab and inspector agree batches and constants
            may reach without passing a loss.
        check_writes: which steps are repeated from their programs before they are committed (see below): ``sampled``
            (one step in 16), ``every``, or a number n (one step in n).
        sync: wait in each step until it is on the disk's medium (``fsync``). Without it, a run whose machine lost power
            goes on to the same bits or is refused by ``resume``.
        stateful: data loader, schedules and whatever else decides how the loop goes on, by name, each with
            ``state_dict()`` and ``load_state_dict()``. Their states are kept in ``RUN.lab`` with every step, beside the
            hyper-parameters and the global random generators, and ``resume`` gives them back.
        state: further objects whose tensors the steps write, such as averaged weights, in a list or by name: modules,
            dicts, lists, and anything with tensors as attributes. They are recorded like the model's buffers.
        started: UTC time of the start; now, if None.
        hours: until the declared end of the run.
        after: the same lab's earlier run, whose chips go on in this one.
        parent: a finished run of a model with the same tensors, whose last weights and buffers this one starts from.
        lie: simulates a lab that tells this one lie, from step ``lie_step`` on; ``train --lie list`` names them. Its
            recorder does not repeat steps.
        dry_run: write, sign and tell chips nothing; note each refusal under ``refusals`` and go on. ``finish`` raises
            them all. The arithmetic after a refusal is not that of a recorded run.

    Raises:
        CallerError: here and in every step, on anything that cannot be recorded; nothing is committed then.
    """

    _state: Literal["ready", "open", "failed", "withdrawn", "quoted", "finished"]
    _loop: LoopState
    _declared: Declaration
    _source: Source
    _host: Host
    _desk: Desk
    _programs: StepPrograms
    _hooks: list[RemovableHandle]
    _start: Program | None = None
    _step: RecordedStep | None = None
    _host_state: HostState | None = None
    _rehearsal: Rehearsal | None = None
    _between: Between
    _evaluations: int = 0
    _loss: str = ""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        out: str | Path,
        numerics: str = "exact",
        seed: int = 0,
        chips: int = 4,
        shares: Sequence[int] | None = None,
        idle_chips: int = 0,
        beacon_every: int = 0,
        checkpoint_every: int = 4,
        keep: int | None = None,
        beside: int = BESIDE,
        schedule: Schedule | None = None,
        lab: str = "lab-1",
        snapshot_rate: Fraction = Fraction(1, 4),
        free_slots: bool = False,
        free: Sequence[str] = (),
        direct_paths: Sequence[str] = (),
        check_writes: Literal["sampled", "every"] | int = "sampled",
        sync: bool = False,
        stateful: Mapping[str, object] | None = None,
        state: Mapping[str, object] | Sequence[object] = (),
        started: datetime | None = None,
        hours: float = 24.0,
        after: str | Path | None = None,
        parent: str | Path | None = None,
        lie: str | None = None,
        lie_step: int = 1,
        dry_run: bool = False,
    ) -> None:
        model, chosen = original(model), one_optimizer(optimizer)
        objects = named_objects(state)
        if dry_run or Rehearsal.is_wanted():
            options = Options.of(free_slots, free, direct_paths, check_writes, sync)
            self._rehearsal = Rehearsal(
                model,
                chosen,
                objects,
                numerics=numerics,
                seed=seed,
                schedule=schedule,
                options=options,
            )
            return
        folder = Path(out)
        require_new(folder)
        begin, duration = started or datetime.now(UTC).replace(microsecond=0), timedelta(hours=hours)
        lie = checked_lie(lie, lie_step)
        if after is not None:
            config = next_lab_config(
                Path(after), lie=lie, lie_step=lie_step, source=None, started=begin, duration=duration
            )
        else:
            config = new_lab_config(
                lab=lab,
                seed=seed,
                chips=chips if shares is None else len(shares),
                idle_chips=idle_chips,
                beacon_every=beacon_every,
                lie=lie,
                lie_step=lie_step,
                snapshot_rate=snapshot_rate,
                started=begin,
                duration=duration,
            )
        past = None if parent is None else start_from(model, Path(parent))
        shares = checked_shares(shares, config.chips)
        options = Options.of(free_slots, free, direct_paths, check_writes, sync)
        self._adopt(model, chosen, folder, config, shares, options, objects)
        declared = Declaration(
            numerics=numerics,
            seed=seed,
            checkpoint_every=checkpoint_every,
            shares=shares,
            optimizer=optimizer_name(chosen),
            groups=self._groups,
            parameters=members_of(model, chosen),
            state=self._loop.entries,
            schedule=schedule,
            origin=Origin(state=self._root, parent=past),
            keep=keep,
            beside=beside,
        )
        if past is None:
            declared, self._start = with_start(declared, model, self._loop.memory.place)
        self._keep_states(stateful)
        with freeing(folder, config):
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
        config: LabConfig,
        device: str,
        shares: Sequence[int] | None = None,
        parent: Parent | None = None,
        reference: Mapping[str, Any] | None = None,
        sync: bool = False,
    ) -> Self:
        """Record a run that follows a recipe; its body does what the recipe's program says, and nothing else.

        Args:
            task: the recipe, which decides the declaration.
            model, optimizer: as the task builds them (``monitor.presets.training.build``).
            device: name of the replay device that this process runs as, for the metadata.
            shares: how many equal parts of the state each chip holds; by default one.
            parent: the run whose final weights the model holds, if it holds some.
            reference: the trust file but for the countersigned declaration; by default what the simulation says.
            sync: as for any other recorder.
        """
        require_new(out)
        recorder = cls.__new__(cls)
        shares = checked_shares(shares, config.chips)
        options = Options(trusted=True, data=source.agreed, reference=reference, sync=sync)
        recorder._adopt(model, optimizer, out, config, shares, options)
        declared = replace(Declaration.of_recipe(task, model, optimizer, recorder._loop.entries), shares=shares)
        if parent is not None:
            declared = replace(declared, origin=Origin(state=recorder._root, parent=parent))
        recorder._begin(declared, source, config, device)
        return recorder

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        out: str | Path,
        free_slots: bool = False,
        free: Sequence[str] = (),
        direct_paths: Sequence[str] = (),
        check_writes: Literal["sampled", "every"] | int = "sampled",
        sync: bool = False,
        stateful: Mapping[str, object] | None = None,
        state: Mapping[str, object] | Sequence[object] = (),
    ) -> Self:
        """Go on with a run whose process died: the steps after its last checkpoint are repeated from their programs.

        Objects under ``stateful`` get the states that they had at the last committed step, so that the same loop goes
        on with the next batch. Without them it goes on with batch ``recorder.steps``, and the caller steps its
        schedule of learning rates as often.

        Args:
            model: made as for the first part of the run; its values are overwritten with the run's.
            optimizer: likewise, with the same groups of hyper-parameters.
            out: the run folder, with the lab's folder beside it.
            free_slots, free, direct_paths, check_writes, sync: as for the first part.
            stateful, state: objects made as for the first part, under the same names.

        Raises:
            CallerError: the run is finished, belongs to another model or optimizer, or keeps other objects' states; or
                the chips heard of other steps than lie on disk. Where they heard of later ones, which a power loss
                took, each of these must come again, and any other one is refused.
            EvidenceError: a file of the run is not what was committed, or a committed step does not lead to its
                committed state again.
        """
        if Rehearsal.is_wanted():
            return cls(
                model,
                optimizer,
                out=out,
                state=state,
                free_slots=free_slots,
                free=free,
                direct_paths=direct_paths,
            )
        model, chosen = original(model), one_optimizer(optimizer)
        folder = Path(out)
        lab_folder = lab_path(folder)
        config = SimulatedLab.read_config(lab_folder)
        key = SimulatedLab.lab_key(config)
        if not folder.is_dir():
            raise CallerError(f"there is no run folder {folder}")
        writer = TranscriptWriter.reopen(folder, lab_folder / "staging", key, files=Files(sync=sync))
        run = RunFolder(folder, key.verifying)
        if config.lie is None:
            run.check_listing()
            run.check_contents()
        if run.declared.origin.parent is not None and run.committed >= 0:
            hold(model, run.checkpoint(0))
        recorder = cls.__new__(cls)
        options = replace(
            Options.of(free_slots, free, direct_paths, check_writes, sync),
            trusted=run.declared.recipe is not None,
        )
        recorder._adopt(model, chosen, folder, config, run.declared.shares, options, named_objects(state))
        recorder._keep_states(stateful)
        last = max(writer.steps, 0)
        if stateful is None:
            HostState.require_none(lab_folder, last)
        recorder._start = start_again(model, run)
        recorder._take_over(run, writer, members_of(model, chosen), config)
        if recorder._host_state is not None and recorder._state == "ready":
            recorder._host_state.give_back(last)
        return recorder

    @property
    def steps(self) -> int:
        """Number of steps that are recorded, without evaluations."""
        return self._writer.steps - self._evaluations if self._rehearsal is None else self._rehearsal.steps

    @property
    def evaluations(self) -> int:
        """Number of evaluations that are recorded."""
        return self._evaluations if self._rehearsal is None else self._rehearsal.evaluations

    @property
    def refusals(self) -> Sequence[Refusal]:
        """What a dry run has found so far that cannot be recorded."""
        return () if self._rehearsal is None else tuple(self._rehearsal.refusals)

    def __repr__(self) -> str:
        return self._shown().line()

    def _repr_html_(self) -> str:
        return self._shown().table()

    def _shown(self) -> Shown:
        """What there is to show, in a line and in a notebook's table."""
        if self._rehearsal is not None:
            return Shown("Recorder, dry run", {"step": self.steps, "refusals": len(self.refusals)})
        every, is_whole, last = self._declared.checkpoint_every, self._state == "finished", self._writer.steps
        facts = {
            "lab": self._lab_name,
            "step": self.steps,
            "loss": f"{float(loss_of(self._loss)):.6g}" if self._loss else "none committed",
            "last checkpoint": last if is_whole else max(last - 1, 0) // every * every,
            "numerics": self._declared.numerics,
            "chips": len(self._declared.shares),
            "state": self._state,
        }
        return Shown(f"Recorder {self.folder}", facts)

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
        if self._rehearsal is not None:
            return self._rehearsal.step(batch)
        return RecordedStep(functools.partial(self._open_step, batch, STEP), self._close_step)

    def evaluation(self, batch: object) -> RecordedStep:
        """Record the body of the ``with`` statement as an evaluation on ``batch``, which writes nothing of the state.

            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(loss(model(batch)))

        It is a program like that of a step, and committed, declared and inspected like one; the transcript counts it
        among the steps, learning rates do not. Put a model with batch statistics into ``eval()``.
        """
        if self._rehearsal is not None:
            return self._rehearsal.step(batch, kind=EVALUATION)
        return RecordedStep(functools.partial(self._open_step, batch, EVALUATION), self._close_step)

    @property
    def _root(self) -> str:
        """Digest of the state that lies in memory."""
        return str(self._loop.memory.digest().root)

    @property
    def _is_repeatable(self) -> bool:
        """Whether a step that is taken again from its program must lead to the same bits."""
        return self._is_checked and self._declared.numerics != "native"

    def finish(self) -> str:
        """Close the run: last checkpoint, the chips' evidence. Returns the digest of the last state.

        Raises:
            CallerError: no step was recorded, or the state was written since; after a dry run, with all refusals.
        """
        if self._rehearsal is not None:
            return self._rehearsal.finish()
        if self._state == "quoted":
            self._writer.finish({})
            self._state = "finished"
            return self._root
        self._require_ready()
        self._between.end()
        try:
            return self._finish()
        except BaseException:
            self._go_on()
            raise

    def _finish(self) -> str:
        root = self._root
        steps, declared = self._writer.steps, self._declared
        if steps < max(declared.length or 1, 1):
            raise CallerError(
                "no step was recorded; there is no run to finish"
                if steps < 1
                else f"{steps} of {declared.length} declared steps are recorded; the run is not finished"
            )
        self._held.require_untouched()
        if self._is_repeatable and steps % declared.checkpoint_every and steps != declared.length:
            self._held.repeat_segment(RunFolder(self.folder, self._lab.key.verifying), steps)
        files = self._checkpoints.whole(steps)
        self._conduct.before_evidence(self._host)
        self._host.show_time(steps)
        evidence = chip_evidence(self._lab, self._host.hand_over)
        write_answers(self._lab, self.folder)
        self._writer.finish({**files, **evidence})
        self._lab.power_off()
        self._desk.close()
        self._updates.remove()
        for hook in self._hooks:
            hook.remove()
        self._state = "finished"
        self._conduct.publish(self.folder, self._lab)
        return root

    def _adopt(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: Path,
        config: LabConfig,
        shares: Sequence[int],
        options: Options,
        objects: Mapping[str, object] | None = None,
    ) -> None:
        """Take model and optimizer into chip memory; nothing is on disk yet."""
        check_objects(model, optimizer)
        check_subnormals()
        self.folder = folder
        self._lab_name = config.lab
        self._optimizer = optimizer
        self._options = options
        self._conduct = conduct(config.lie, config.lie_step)
        self._is_watched = not options.trusted
        self._is_checked = not options.trusted and not self._conduct.lies
        self._state = "ready"
        self._loop = LoopState(model, optimizer, shares, complete=options.trusted, objects=objects)
        names = {f"{entry.kind}/{entry.name}" for entry in self._loop.entries}
        if not options.direct_paths <= names:
            raise CallerError(f"direct_paths lists tensors of the state such as {sorted(names)[0]!a}")
        self._held = HeldState(self._loop, watched=self._is_watched, kept=self._conduct.needs_before)
        self._updates = OptimizerUpdates(optimizer)
        self._groups = tuple(self._updates.used)
        self._files = Files(sync=options.sync)
        self._log_bytes = 0
        self._hooks = []
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
            files=self._files,
        )

    def _keep_states(self, stateful: Mapping[str, object] | None) -> None:
        """Keep with every step the states of the caller's objects."""
        if stateful is not None:
            self._host_state = HostState(stateful, self._optimizer, lab_path(self.folder), self._files)

    def _begin(self, declared: Declaration, source: Source, config: LabConfig, device: str | None) -> None:
        """Make the lab's and the run folder, and commit the initial state."""
        self._conduct.check(declared, config)
        self._declared, self._source = declared, source
        self._programs = self._step_programs(self._held.before)
        self._lab = SimulatedLab.create(lab_path(self.folder), config, self._files)
        if self._host_state is not None:
            self._host_state.keep(0)
        self._agree()
        place = self._loop.memory.place
        name = device_name(place) if device is None else device
        metadata = Metadata(
            lab=config.lab,
            task=declared,
            data=dict(source.commitment),
            chips=tuple(chip.chip_id for chip in self._lab.chips),
            device={"name": name, "fingerprint": str(fingerprint(place))},
            versions=versions(),
            settings=settings(place),
            started=config.started,
            declared_end=config.declared_end,
        )
        self._writer = TranscriptWriter.create(
            self.folder,
            self._lab.staging,
            self._lab.key,
            run=metadata.run_id.hex(),
            metadata=metadata.to_json(),
            data=source.files,
            files=self._files,
        )
        self._run_id = metadata.run_id
        self._make_host()
        self._commit_start()
        self._settle()

    def answer(self) -> None:
        """Answer what an inspection has asked of the lab; each step does so, and a loop that waits for long may."""
        self._require_ready()
        with self._between.paused():
            self._desk.serve()

    def _make_host(self) -> None:
        self._desk = open_desk(self._lab, self.folder)
        self._host = Host(
            self._declared,
            self._loop.memory,
            self._source.batches,
            self._lab,
            self._writer,
            self._conduct,
            self._run_id,
        )
        self._checkpoints = Checkpoints(self.folder, self._declared, self._loop.memory, self._held.before)
        self._between = Between(
            self,
            self._loop.memory.meter,
            self._loop.memory.tensors.values(),
            self._declared.allowance,
            written=lambda recorder: recorder._held.require_untouched(),
            exceeded=Recorder._stop,
        )

    def _step_programs(self, start: Mapping[str, Tensor]) -> StepPrograms:
        return StepPrograms(self._declared, self._groups, self._options, checked=self._is_checked, start=start)

    def _take_over(
        self, run: RunFolder, writer: TranscriptWriter, parameters: tuple[tuple[str, ...], ...], config: LabConfig
    ) -> None:
        """Bring memory and chips to the last committed step of an unfinished run."""
        leaves, _ = run.load_steps()
        self._writer, self._run_id = writer, run.metadata.run_id
        declared = self._declared = require_same(run, self._optimizer, self._groups, parameters, self._loop)
        self._groups = tuple(declared.groups)
        self._source = (
            StreamSource(lab_salt(config), run.folder)
            if declared.recipe is None
            else DeclaredSource(run.data(), run.metadata.data["set"], {})
        )
        self._inspectorate.recall()
        require_start(declared, leaves, self._loop, honest=not self._conduct.lies)
        self._programs = self._step_programs(run.checkpoint(0) if leaves else self._held.before)
        for leaf in leaves[1:]:
            execution = execution_of(leaf)
            self._programs.recall(run.program(execution.program), execution)
            self._log_bytes += run.files[log_path(leaf.step)].length
            self._loss = leaf.loss
            self._evaluations += execution.kind == EVALUATION
        self._agree()
        if writer.holds_chip_evidence:
            self._loop.memory.load(run.checkpoint(declared.steps))
            self._state = "quoted"
            return
        self._lab = SimulatedLab.reopen(lab_path(run.folder), self._files)
        self._lab.remove_staging()
        for leaf in leaves:
            writer.tree.append(leaf.encoded())
        beyond = heard_beyond(self._lab.chips, run, writer.tree) if config.lie is None else {}
        self._make_host()
        self._host.heard = beyond
        if leaves:
            self._checkpoints.release(leaves[-1].step)
            repeat_committed(run, leaves, self._host, self._loop, self._conduct)
            self._held.remember()
            if len(leaves) > 1:
                self._checkpoints.reached(leaves[-1].step, run.program(execution_of(leaves[-1]).program))
        else:
            self._commit_start()
        self._settle()

    def _settle(self) -> None:
        """Wait until all that there is of the run is on the medium, whoever wrote it."""
        for folder in (self.folder, lab_path(self.folder)):
            self._files.settle(folder)
        self._go_on()

    def _go_on(self) -> None:
        """Let the loop's own operators run, and meter them."""
        if self._is_watched and self._state == "ready":
            self._between.begin()

    def _stop(self) -> None:
        """Nothing but ``resume`` goes on."""
        self._state = "failed"
        self._lab.cut_power()

    def _commit_start(self) -> None:
        start = self._start
        self._conduct.before_run(self._lab)
        self._conduct.initialise(self._declared, self._loop.memory, self._lab)
        self._host.attach_memory(0)
        self._held.remember()
        flop = 0 if start is None else start.flop
        leaf = Leaf(step=0, batch="", state=self._loop.memory.digest(), log="", loss="", flop=flop)
        files = {} if start is None else {program_path(start.digest): start.encoded}
        self._host.commit(leaf, {**files, **self._checkpoints.whole(0)})

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        """Called when a gradient has been accumulated, also outside steps."""
        if self._step is not None and parameter.grad is not None:
            self._step.watch(name, parameter.grad)

    def _require_ready(self) -> None:
        if self._state != "ready":
            reasons = {
                "open": "a step is open; leave its with statement first",
                "failed": "a step failed, so this recorder cannot go on; Recorder.resume can, from the last step",
                "withdrawn": "the first step was refused, and the folder is free again; make model, optimizer and "
                "recorder anew",
                "quoted": "the chips have given their evidence; only finish() is left",
                "finished": "the run is finished",
            }
            raise CallerError(reasons[self._state])

    def _open_step(self, given: object, kind: str, step: RecordedStep) -> OpenStep:
        """Check that a step may begin, and look at whatever it will compute."""
        self._require_ready()
        self._between.end()
        try:
            return self._look_at(given, kind, step)
        except BaseException:
            self._go_on()
            raise

    def _look_at(self, given: object, kind: str, step: RecordedStep) -> OpenStep:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CallerError("autocast is on; switch it off, a recorded step computes in FP32")
        self._held.require_untouched()
        if self._host_state is not None:
            self._host_state.require_unchanged()
        batch, number, declared = flatten_batch(given), self._writer.steps + 1, self._declared
        if declared.length is not None and number > declared.length:
            raise CallerError(f"the run declares {declared.length} steps, and all of them are recorded")
        content = encode_state(batch) if self._source.keeps else b""
        keys = RecordedKeys(declared.seed, number)
        trained, displaced = decode_state(content, "the batch") if self._source.keeps else batch, []
        other = self._conduct.batch(number, batch, self._source.batches)
        if other is not batch:
            trained = {name: tensor.clone() for name, tensor in other.items()}
            displaced = exchange(batch, trained)
        watch = self._held.watch(number, batch)
        observed = self._observe(number, batch, keys, watch)
        self._updates.begin(observed, self._groups)
        self._state, self._step = "open", step
        return OpenStep(
            observed=observed,
            session=numerics.recording(declared.numerics, observer=observed, keys=keys),
            watch=watch,
            seed=step_seed(declared.seed, number),
            content=content,
            batch=trained,
            displaced=displaced,
            given=given,
            parameters=dict(self._loop.model.named_parameters()),
            keys=keys,
            kind=kind,
        )

    def _observe(
        self, step: int, batch: Mapping[str, Tensor], keys: RecordedKeys, watch: WriteWatch
    ) -> Capture | Follower:
        """Whatever looks at the operators of a step that is about to begin."""
        observer = self._conduct.observer(step)
        if self._options.trusted and self._programs.known:
            return Follower(next(iter(self._programs.known.values())), keys, self._loop.memory.meter, observer)
        capture = Capture(keys, watch, observer, meter=self._loop.memory.meter)
        present = {name: tensor for name, tensor in self._loop.current().items() if tensor is not None}
        capture.declare_inputs({name: tensor.detach() for name, tensor in present.items()}, batch)
        return capture

    def _close_step(self, step: RecordedStep, opened: OpenStep, whole: bool) -> None:
        """Record a step whose body came to its end; after any other, nothing but ``resume`` goes on."""
        self._state, self._step = "failed", None
        try:
            if whole:
                self._record(step, opened)
                self._state = "ready"
        finally:
            self._updates.end()
            self._go_on()
            if self._state == "failed":
                self._lab.cut_power()
                is_refusal = isinstance(sys.exception(), CallerError)
                if is_refusal and not self._writer.steps and free_again(self.folder, self._lab.config):
                    self._state = "withdrawn"

    def _record(self, taken: RecordedStep, opened: OpenStep) -> None:
        """Turn what was seen of a step into a committed one."""
        step, batch = self._writer.steps + 1, opened.batch
        program, execution = self._programs.explain(
            step - self._evaluations, opened.observed, self._updates, self._loop.current(), batch, taken.loss
        )
        if opened.kind == EVALUATION:
            require_unwritten(program)
        execution = replace(execution, kind=opened.kind)
        loss = "" if taken.loss is None else loss_bits(taken.loss)
        taken.loss = None
        self._loop.settle()
        self._commit(program, execution, batch, opened.content, opened.session.log, loss)

    def leave_to_others(self) -> None:
        """All steps are taken by other processes, whose devices have meters of their own (``commit_elsewhere``)."""
        self._between.end()
        self._is_watched = False

    def commit_elsewhere(
        self,
        given: object,
        taken: TakenElsewhere,
        reached: Mapping[str, Tensor],
        loss: Tensor,
        beside: Callable[[Program], Work],
    ) -> None:
        """Record a step that other processes took.

        Args:
            given: the batch.
            taken: the operators that one process would have run.
            reached: the state that the processes came to, under ``kind/name``.
            loss: the step's loss.
            beside: what their devices counted beside the program.

        Raises:
            CallerError: as for any step; also where a step that is repeated from its program leads elsewhere.
        """
        self._require_ready()
        self._held.require_untouched()
        batch, step = flatten_batch(given), self._writer.steps + 1
        self._state = "failed"
        try:
            program, execution = self._programs.explain(
                step - self._evaluations, taken.observed, taken.updates, taken.state, batch, taken.loss
            )
            taken.settle()
            self._count(step, program, execution, batch)
            self._loop.memory.meter.charge(beside(program))
            self._loop.memory.load(reached)
            self._commit(program, execution, batch, encode_state(batch), b"", loss_bits(loss))
            self._state = "ready"
        finally:
            if self._state == "failed":
                self._lab.cut_power()

    def _count(self, step: int, program: Program, execution: Execution, batch: Mapping[str, Tensor]) -> None:
        """Have the chips' meter count a step that others took.

        Where a chip waits for one of its operators, the memory goes through them one by one, as one process would.
        """
        memory = self._loop.memory
        if memory.meter.is_awaited(len(program.calls)):
            keys = RepeatedKeys(self._declared.seed, step)
            session = numerics.recording(self._declared.numerics, keys=keys)
            Prepared(program, memory).run(batch, scalars_of(program, execution), session, keys)
            return
        for work in program.works:
            memory.meter.charge(work)

    def _commit(
        self,
        program: Program,
        execution: Execution,
        batch: Mapping[str, Tensor],
        content: bytes,
        log: bytes,
        loss: str,
    ) -> None:
        """Commit a step that has led to what lies in memory."""
        step = self._writer.steps + 1
        execution = replace(execution, beside=self._between.take())
        moment = Moment(
            step=step,
            declared=self._declared,
            program=program,
            execution=execution,
            batch=batch,
            memory=self._loop.memory,
            before=self._held.before or None,
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
        is_new = program.digest not in self._programs.known
        is_due = is_new or is_kept or _is_picked(self._declared.seed, step, self._options.one_in)
        if self._is_repeatable and is_due:
            self._held.repeat(self._declared, program, leaf, batch, root, log)
        files = {log_path(step): log, **self._source.step_files(step, content)}
        files |= self._checkpoints.of_past(step, program)
        if is_new:
            self._programs.know(program)
            self._agree()
            files[program_path(program.digest)] = program.encoded
        if self._is_checked:
            _require_let_go(self._loop.memory.meter, step, program)
        self._held.remember()
        self._checkpoints.reached(step, program)
        self._log_bytes += len(log)
        self._evaluations += execution.kind == EVALUATION
        self._loss = loss
        if self._host_state is not None:
            self._host_state.keep(step)
        self._host.commit(leaf, files)
        self._checkpoints.release(step)
        self._conduct.after_step(step, self._host)
        self._desk.serve()

    def _agree(self) -> None:
        """Have the declaration countersigned as far as the run came."""
        start = {} if self._start is None else {self._start.digest: self._start}
        self._inspectorate.sign(self._declared, {**start, **self._programs.known}, free_slots=self._options.free_slots)


def _require_let_go(meter: Meter, step: int, program: Program) -> None:
    """CallerError if more results are held than a step makes: chips count them, and inspections reject that."""
    most = program.made + KEPT_BYTES
    if meter.holdings.byte_count > most:
        gc.collect()  # what only cycles hold, nobody keeps
    if meter.holdings.byte_count > most:
        raise CallerError(
            f"step {step}: {meter.holdings.byte_count} bytes of results are held, and a step makes {program.made}; "
            "keep numbers (.item(), .tolist()) or NumPy copies of what earlier steps made, and let go of the tensors"
        )


def lab_salt(config: LabConfig) -> bytes:
    """Key of the salts of a run's data: 32 bytes, and others for each run of a simulated lab."""
    label = f"chipwitness/salt/{config.secret}" + (f"/{config.number}" if config.number else "")
    return hashlib.sha256(label.encode()).digest()


def _is_picked(seed: int, step: int, one_in: int) -> bool:
    """Whether a step that need not be repeated is."""
    return step_seed(seed, step) % one_in == 0
