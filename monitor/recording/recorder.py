"""Records a training loop: each step becomes a program, a committed leaf and a state on the chips."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.origin import Origin, Parent
from monitor.declaration.schedules import declared_groups
from monitor.declaration.statement import Declaration, members_of
from monitor.files import Files
from monitor.lab.lies import conduct
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.loops.objects import named_objects, original, whole
from monitor.loops.optimizers import one_optimizer, scaler_of
from monitor.presets.task import Task
from monitor.programs.interpreter import loss_of
from monitor.recording.attachment import AttachedLoop
from monitor.recording.display import Shown
from monitor.recording.live_run import LiveRun
from monitor.recording.loop_state import HostState
from monitor.recording.model_initialisation import start_again, with_start
from monitor.recording.options import RunConfig, checked_lie, checked_shares, require_new
from monitor.recording.parents import hold, start_from
from monitor.recording.recording import Recording
from monitor.recording.refusals import Refusal
from monitor.recording.rehearsal import Rehearsal
from monitor.recording.run_start import freeing
from monitor.recording.sources import DeclaredSource, StreamSource, lab_salt
from monitor.recording.step import RecordedStep
from monitor.transcript import EVALUATION, STEP, RunFolder, TranscriptWriter

__all__ = ["Recorder"]

_OF_LABS = {"hours", *LabConfig.__slots__}
"""Keywords of a recorder that its lab's configuration takes."""


class Recorder(LiveRun):
    """Makes a run folder out of a training loop.

        recorder = Recorder(model, optimizer, out="RUN", numerics="exact", seed=1)
        for batch in loader:
            with recorder.step(batch):
                ...  # zero_grad, forward, backward, optimizer.step(), as ever
        recorder.finish()

    It moves weights, buffers, gradients and optimizer state into chip memory. A step is on disk before the chips hear
    of it: once its body is left, it outlives the process, and with ``sync`` a power loss. Next to ``RUN`` lie
    ``RUN.lab`` (the lab's private side) and ``RUN.trust.json``: what maker and registry say, and the declaration as a
    simulated inspectorate countersigned it, with each program as soon as it appears.

    A write that no operator shows (through NumPy, a pointer, another thread) makes a step that its program does not
    explain. Such a write to weights, buffers, optimizer state, a parameter's gradient once it is accumulated, or the
    batch is noticed in the step in which it happens, where these lie in the host's memory. One to anything else that a
    step computes with is noticed where the step is repeated from its program before it is committed. So are the first
    step of each program, and of all others those that the run's seed picks as ``check_writes`` says; ``finish``
    repeats those after the last checkpoint. A step in which a write is noticed is not committed.

    What operators do with the state between two steps is metered and computed under ``numerics`` too. Where they write
    weights or buffers (a target network, merged adapters, ``update_bn``), it is recorded as the next step begins, as a
    separate program; gradients and the optimizer's state are written in steps alone.

    Args:
        model: any module, on the CPU or an accelerator; its parameters and buffers are adopted. Its values count as
            supplied, unless ``monitor.initialised`` built it.
        optimizer: of the model's parameters, or of FP32 masters of half-precision ones, which then are weights named
            ``optimizer..GROUP.PLACE``; several in a list, or None for steps that only compute. Those that are frozen
            when the run begins may learn later. PyTorch's fused updates are taken by their plain operators.
        out: run folder that does not exist yet.
        run: how the run is recorded; by default ``RunConfig()``.
        lab: whose chips it is recorded on: a name, or the whole configuration of a simulated lab; by default
            ``LabConfig()``, its seed being the run's and its chips as many as there are shares.
        stateful: data loader, schedules and whatever else decides how the loop goes on, by name, each with
            ``state_dict()`` and ``load_state_dict()``. Their states are kept in ``RUN.lab`` with every step, with the
            hyper-parameters and the global random generators, and ``resume`` gives them back.
        state: further objects whose tensors the steps write, such as averaged weights or a gradient scaler, in a list
            or by name: modules, dicts, lists, and anything with tensors as attributes. They are recorded like the
            model's buffers.
        after: the same lab's earlier run, whose chips go on in this one.
        parent: a finished run of a model with the same tensors, whose last weights and buffers this one starts from.
        dry_run: write, sign and tell chips nothing; note each refusal under ``refusals`` and go on. ``finish`` raises
            them all. The arithmetic after a refusal is not that of a recorded run.
        settings: fields of ``RunConfig`` and ``LabConfig`` by their names, in place of what ``run`` and ``lab`` have;
            and ``hours`` until the declared end of the run.

    Raises:
        CallerError: here and in every step, on anything that cannot be recorded; nothing is committed then.
    """

    _rehearsal: Rehearsal | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        out: str | Path,
        run: RunConfig | None = None,
        lab: LabConfig | str | None = None,
        stateful: Mapping[str, object] | None = None,
        state: Mapping[str, object] | Sequence[object] = (),
        after: str | Path | None = None,
        parent: str | Path | None = None,
        dry_run: bool = False,
        **settings: Any,
    ) -> None:
        of_lab = {name: settings.pop(name) for name in _OF_LABS & settings.keys()}
        options = replace(run or RunConfig(), **settings)
        chosen = one_optimizer(optimizer)
        model = whole(original(model), chosen)
        objects = named_objects({**scaler_of(optimizer), **named_objects(state)})
        if dry_run or Rehearsal.is_wanted():
            self._rehearsal = Rehearsal(model, chosen, objects, options)
            return
        folder = Path(out)
        require_new(folder)
        config = _lab_of(lab, options, None if after is None else Path(after), of_lab)
        past = None if parent is None else start_from(model, Path(parent))
        shares = checked_shares(options.shares, config.chips)
        loop = self._attach(model, chosen, config, shares, options, objects)
        loop.groups = declared_groups(options.schedule, loop.groups, stateful or {})
        declared = options.declare(model, chosen, loop.state, loop.groups, shares, past)
        declared, start = (declared, None) if past else with_start(declared, model, loop.state.memory.place)
        files = Files(sync=options.sync)
        host_state = None if stateful is None else HostState(stateful, chosen, lab_path(folder), files)
        self._run = Recording(loop, folder, config, start=start, host_state=host_state)
        with freeing(folder, config):
            self._run.begin(declared, StreamSource(lab_salt(config, declared.to_json()), folder), None)
        self._meter_loop()

    @classmethod
    def of_recipe(
        cls,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        source: DeclaredSource,
        *,
        out: Path,
        run: RunConfig,
        lab: LabConfig,
        device: str,
        parent: Parent | None = None,
    ) -> Self:
        """Record a run that follows a recipe; its body does what the recipe's program says, and nothing else.

        Args:
            task: the recipe, which decides the declaration.
            model, optimizer: as the task builds them (``monitor.presets.training.build``).
            run: of it counts what no recipe says: shares, ``sync`` and ``reference``.
            device: name of the replay device that this process runs as, for the metadata.
            parent: the run whose final weights the model holds, if it holds some.
        """
        require_new(out)
        recorder = cls.__new__(cls)
        shares = checked_shares(run.shares, lab.chips)
        loop = recorder._attach(model, optimizer, lab, shares, run, trusted=True)
        declared = replace(Declaration.of_recipe(task, model, optimizer, loop.state.entries), shares=shares)
        if parent is not None:
            declared = replace(declared, origin=Origin(state=loop.root, parent=parent))
        recorder._run = Recording(loop, out, lab)
        with freeing(out, lab):
            recorder._run.begin(declared, source, device)
        return recorder

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        out: str | Path,
        run: RunConfig | None = None,
        stateful: Mapping[str, object] | None = None,
        state: Mapping[str, object] | Sequence[object] = (),
        **settings: Any,
    ) -> Self:
        """Go on with a run whose process died: the steps after its last checkpoint are repeated from their programs.

        Objects under ``stateful`` get the states that they had at the last committed step, so that the same loop goes
        on with the next batch. Without them it goes on with batch ``recorder.steps``, and the caller steps its
        schedule of learning rates as often.

        Args:
            model: made as for the first part of the run; its values are overwritten with the run's.
            optimizer: likewise, with the same groups of hyper-parameters.
            out: the run folder, with the lab's folder next to it.
            run: as for the first part; what the run declares may be left out.
            stateful, state: objects made as for the first part, under the same names.
            settings: fields of ``RunConfig``, in place of what ``run`` has.

        Raises:
            CallerError: the run is finished, belongs to another model or optimizer, or keeps other objects' states; or
                the chips heard of other steps than lie on disk. Where they heard of later ones, which a power loss
                took, each of these must come again, and any other one is refused.
            EvidenceError: a file of the run is not what was committed, or a committed step does not lead to its
                committed state again.
        """
        if Rehearsal.is_wanted():
            return cls(model, optimizer, out=out, run=run, state=state, **settings)
        options = replace(run or RunConfig(), **settings)
        chosen = one_optimizer(optimizer)
        model = whole(original(model), chosen)
        objects = named_objects({**scaler_of(optimizer), **named_objects(state)})
        folder = Path(out)
        lab_folder = lab_path(folder)
        config, files = SimulatedLab.read_config(lab_folder), Files(sync=options.sync)
        writer, begun = _reopened(folder, config, files)
        declared = begun.declared
        options.require_declared(declared, settings if run is None else RunConfig.__slots__)
        if declared.origin.parent is not None and begun.committed >= 0:
            hold(model, begun.checkpoint(0))
        recorder = cls.__new__(cls)
        is_recipe = declared.recipe is not None
        loop = recorder._attach(model, chosen, config, declared.shares, options, objects, trusted=is_recipe)
        last = max(writer.steps, 0)
        if stateful is None:
            HostState.require_none(lab_folder, last)
        host_state = None if stateful is None else HostState(stateful, chosen, lab_folder, files)
        recorder._run = Recording(loop, folder, config, start=start_again(model, begun), host_state=host_state)
        if not recorder._run.take_over(begun, writer, members_of(model, chosen)):
            recorder._state = "quoted"
        elif host_state is not None:
            host_state.give_back(last)
        recorder._meter_loop()
        return recorder

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._run.folder

    @property
    def steps(self) -> int:
        """Number of steps that are recorded, without evaluations and writes between steps."""
        return (
            self._run.steps - len(self._run.evaluations) - self._run.writes
            if self._rehearsal is None
            else self._rehearsal.steps
        )

    @property
    def evaluations(self) -> Sequence[float | None]:
        """Loss of each evaluation that is recorded; None where it committed none."""
        if self._rehearsal is not None:
            return [None] * self._rehearsal.evaluations
        return [float(loss_of(bits)) if bits else None for bits in self._run.evaluations]

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
        declared, loss, is_whole = self._run.declared, self._run.loss, self._state == "finished"
        every, last = declared.checkpoint_every, self._run.steps
        facts = {
            "lab": self._run.lab_name,
            "step": self.steps,
            "loss": f"{float(loss_of(loss)):.6g}" if loss else "none committed",
            "last checkpoint": last if is_whole else max(last - 1, 0) // every * every,
            "numerics": declared.numerics,
            "chips": len(declared.shares),
            "state": self._state,
        }
        return Shown(f"Recorder {self.folder}", facts)

    @property
    def run_id(self) -> str:
        """Name of the run, hex."""
        return self._run.run_id.hex()

    @property
    def rounding_log_bytes(self) -> int:
        """Bytes of the rounding logs of all recorded steps."""
        return self._run.log_bytes

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
        among the steps, learning rates do not. A model with batch statistics has to be in ``eval()``.
        """
        if self._rehearsal is not None:
            return self._rehearsal.step(batch, kind=EVALUATION)
        return RecordedStep(functools.partial(self._open_step, batch, EVALUATION), self._close_step)

    def finish(self) -> str:
        """Close the run: last checkpoint, the chips' evidence. Returns the digest of the last state.

        Raises:
            CallerError: no step was recorded, or the state was written since; after a dry run, with all refusals.
        """
        if self._rehearsal is not None:
            return self._rehearsal.finish()
        with self._aside():
            run, root = self._run, self._run.loop.root
        if self._state == "quoted":
            run.writer.finish({})
            self._state = "finished"
            return root
        self._require_ready()
        steps, declared = run.steps, run.declared
        if steps < max(declared.length or 1, 1):
            raise CallerError(
                "no step was recorded; there is no run to finish"
                if steps < 1
                else f"{steps} of {declared.length} declared steps are recorded; the run is not finished"
            )
        with self._aside():
            self._end_interval()
            run.finish()
            self._state = "finished"
            run.publish()
        return root

    def shutdown(self) -> None:
        """Shut the chips down in order, after the last step; ``resume`` goes on from there and repeats nothing."""
        if self._rehearsal is not None:
            return
        self._require_ready()
        with self._aside():
            self._run.loop.held.require_untouched()
            self._run.shut_down()
            self._state = "stopped"

    @property
    def slack(self) -> float:
        """Share of the declared work that its chips have counted on top, but for what two boots may repeat."""
        return 0.0 if self._rehearsal is not None else self._run.slack

    def answer(self) -> None:
        """Answer what an inspection has asked of the lab; each step does so, and a loop that waits for long may."""
        self._require_ready()
        with self._aside():
            self._run.answer()

    def _attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: LabConfig,
        shares: Sequence[int],
        options: RunConfig,
        objects: Mapping[str, object] | None = None,
        *,
        trusted: bool = False,
    ) -> AttachedLoop:
        """Take model and optimizer into chip memory; nothing is on disk yet."""
        behaviour = conduct(config.lie, config.lie_step)
        loop = AttachedLoop(model, optimizer, shares, behaviour, options, objects, trusted=trusted)
        loop.watch_gradients(functools.partial(_watch_gradient, weakref.ref(self)))
        self._state = "ready"
        return loop


def _reopened(folder: Path, config: LabConfig, files: Files) -> tuple[TranscriptWriter, RunFolder]:
    """A run whose process died, to write on and to read; an honest lab checks first that its files are what it wrote.

    Raises:
        CallerError: there is no such folder.
        EvidenceError: a file is not what was committed.
    """
    key = SimulatedLab.lab_key(config)
    if not folder.is_dir():
        raise CallerError(f"there is no run folder {folder}")
    writer = TranscriptWriter.reopen(folder, lab_path(folder) / "staging", key, files=files)
    begun = RunFolder(folder, key.verifying)
    if config.lie is None:
        begun.check_listing()
        begun.check_contents()
    return writer, begun


def _lab_of(lab: LabConfig | str | None, options: RunConfig, after: Path | None, of_lab: dict[str, Any]) -> LabConfig:
    """The lab that records a run; of one that goes on on the chips of an earlier run, its times and its lie are new."""
    if "hours" in of_lab:
        of_lab["duration"] = timedelta(hours=of_lab.pop("hours"))
    if of_lab.get("started", ...) is None:
        del of_lab["started"]
    if isinstance(lab, LabConfig):
        config = replace(lab, **of_lab)
    else:
        chips = {} if options.shares is None else {"chips": len(options.shares)}
        config = LabConfig(**{"seed": options.seed, **({} if lab is None else {"lab": lab}), **of_lab, **chips})
    config = replace(config, lie=checked_lie(config.lie, config.lie_step))
    if after is None:
        return config
    new = {name: getattr(config, name) for name in ("started", "duration", "lie", "lie_step")}
    return LabConfig.following(after, **new)


def _watch_gradient(recorder: weakref.ref[Recorder], name: str, parameter: nn.Parameter) -> None:
    """Called when a gradient has been accumulated, also outside steps; a parameter's hook keeps no recorder alive."""
    found = recorder()
    if found is not None and found._step is not None:
        found._step.accumulated(name, parameter)
