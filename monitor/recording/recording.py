"""A run while it is recorded: its folder and its lab's chips, and how one step after another is committed to both."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from firmware_sim import KEPT_BYTES, NO_WORK, Meter, Roofline, Work, scaled_device
from firmware_sim.errors import CallerError
from firmware_sim.evidence import digest_bytes
from monitor.declaration.statement import MOST_SLACK, Declaration
from monitor.environment import device_name, fingerprint, settings, versions
from monitor.files import Files
from monitor.lab.desk import Desk
from monitor.lab.evidence import chip_evidence, open_desk, write_answers
from monitor.lab.host import Host
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.programs.keys import step_seed
from monitor.programs.program import Program
from monitor.recording.attachment import AttachedLoop
from monitor.recording.checkpoints import Checkpoints
from monitor.recording.inspectorate import SimulatedInspectorate
from monitor.recording.loop_state import HostState
from monitor.recording.resumption import (
    STOPPED,
    booked_so_far,
    heard_beyond,
    repeat_committed,
    repeated_from,
    require_same,
    require_start,
)
from monitor.recording.sources import BatchSource, DeclaredSource, StreamSource
from monitor.recording.step_programs import StepPrograms
from monitor.replay.derivation import clocks_of
from monitor.replay.ledger import Book, Kind, excused_work, needs_of, total
from monitor.replay.moment import Moment
from monitor.replay.steps import execution_of
from monitor.transcript import (
    EVALUATION,
    STEP,
    WRITE,
    Execution,
    Leaf,
    Metadata,
    RunFolder,
    Staged,
    TranscriptWriter,
    encode_state,
)
from monitor.transcript.layout import SALT, constants_path, log_path, program_path

__all__ = ["Recording"]


class Recording:
    """A run folder and its lab's chips, step by step; nothing is on disk before ``begin``.

    Attributes:
        loop: what the steps compute with.
        host_state: keeps the states of the caller's objects with every step, where there are such.
        declared: what the lab says of the run.
        lab: the simulated lab, with its chips.
        run_id: 32 bytes.
        programs: those of the steps so far.
        evaluations: bits of the loss of each committed evaluation; empty where it commits none.
        reported: what the steps since the last training step reported of work outside programs, when taken over.
        writes: number of committed writes between steps.
        log_bytes: bytes of the rounding logs of all steps.
        loss: bits of the last committed loss; empty if none is.
        book: what the first chip has counted of this run.
    """

    declared: Declaration
    lab: SimulatedLab
    run_id: bytes
    programs: StepPrograms
    source: BatchSource
    host: Host
    writer: TranscriptWriter
    _desk: Desk
    _checkpoints: Checkpoints

    def __init__(
        self,
        loop: AttachedLoop,
        folder: Path,
        config: LabConfig,
        *,
        start: Program | None = None,
        host_state: HostState | None = None,
    ) -> None:
        """``start`` is the program of the initial state, if one made it."""
        self.loop, self.folder, self.host_state = loop, folder, host_state
        self.evaluations: list[str] = []
        self.writes = self.log_bytes = self._made = 0
        self.reported = NO_WORK
        self._is_warned = False
        self.loss, self.book = "", Book()
        self._config, self._start, self._conduct = config, start, loop.conduct
        self._files = Files(sync=loop.options.sync)
        self.inspectorate = SimulatedInspectorate(folder, config, loop.options, self._files)

    @property
    def lab_name(self) -> str:
        """Name of the simulated lab."""
        return self._config.lab

    @property
    def steps(self) -> int:
        """Number of committed steps, evaluations among them."""
        return self.writer.steps

    @property
    def is_repeatable(self) -> bool:
        """Whether a step that is taken again from its program must lead to the same bits."""
        return self.loop.is_checked and self.declared.numerics != "native"

    def begin(self, declared: Declaration, source: BatchSource, device: str | None) -> None:
        """Make the lab's and the run folder, and commit the initial state.

        Args:
            device: name of the replay device that this process runs as; by default the place's own.
        """
        self._conduct.check(declared, self._config)
        self.declared, self.source = declared, source
        self.programs = self._step_programs(self.loop.held.before)
        self.lab = SimulatedLab.create(lab_path(self.folder), self._config, self._clocks(), self._files)
        self.inspectorate.register(self.lab.clocks, source.agreed)
        if self.host_state is not None:
            self.host_state.keep(0)
        place = self.loop.state.memory.place
        metadata = Metadata(
            lab=self._config.lab,
            task=declared,
            data=dict(source.commitment),
            chips=tuple(chip.chip_id for chip in self.lab.chips),
            device={"name": device_name(place) if device is None else device, "fingerprint": str(fingerprint(place))},
            versions=versions(),
            settings=settings(place),
            started=self._config.begin,
            declared_end=self._config.end,
        )
        self.run_id = metadata.run_id
        self._agree()
        self.writer = TranscriptWriter.create(
            self.folder,
            self.lab.staging,
            self.lab.key,
            run=metadata.run_id.hex(),
            metadata=metadata.to_json(),
            data=source.files,
            files=self._files,
        )
        self._make_host()
        self._commit_start()
        self._settle()

    def _clocks(self) -> list[Roofline]:
        """How much the simulated chips do in a tick: a step of a preset, or else as much as a device of their size."""
        if self.declared.recipe is not None:
            return clocks_of(self.declared.recipe, self.declared.layout)
        return [scaled_device(part) for part, _ in (shard.share for shard in self.loop.state.memory.shards)]

    def take_over(self, run: RunFolder, writer: TranscriptWriter, parameters: tuple[tuple[str, ...], ...]) -> bool:
        """Bring memory and chips to the last committed step of an unfinished run.

        Args:
            parameters: names of each group's, as in the declaration.

        Returns:
            Whether further steps can follow; False where the chips have given their evidence.
        """
        leaves, _ = run.load_steps()
        self.writer, self.run_id = writer, run.metadata.run_id
        loop, state = self.loop, self.loop.state
        declared = self.declared = require_same(run, loop.optimizer, loop.groups, parameters, state)
        loop.groups = tuple(declared.groups)
        self.source = (
            StreamSource(run.read(SALT), run.folder)
            if declared.recipe is None
            else DeclaredSource(run.data(), run.metadata.data["set"], {})
        )
        self.inspectorate.recall()
        require_start(declared, leaves, state, honest=not self._conduct.lies)
        self.programs = self._step_programs(run.checkpoint(0) if leaves else loop.held.before)
        for leaf in leaves[1:]:
            execution = execution_of(leaf)
            program = run.program(execution.program)
            self.programs.recall(program, execution)
            self._count(execution.kind, leaf.loss, run.files[log_path(leaf.step)].length, program.made)
            self.reported = NO_WORK if execution.kind == STEP else self.reported + execution.outside
        self._agree()
        if writer.holds_chip_evidence:
            state.memory.load(run.checkpoint(declared.steps))
            return False
        self.lab = SimulatedLab.reopen(lab_path(run.folder), self._files)
        self.lab.remove_staging()
        for leaf in leaves:
            writer.tree.append(leaf.encoded())
        beyond = heard_beyond(self.lab.chips, run, writer.tree) if self._config.lie is None else {}
        self._make_host()
        self.host.heard = beyond
        if leaves:
            self._tell_share(run, leaves)
            self._checkpoints.release(leaves[-1].step)
            repeat_committed(run, leaves, self.host, state, self._conduct)
            loop.held.remember()
            if len(leaves) > 1:
                self._checkpoints.reached(leaves[-1].step, run.program(execution_of(leaves[-1]).program))
        else:
            self._commit_start()
        self._settle()
        return True

    def commit(
        self,
        program: Program,
        execution: Execution,
        batch: Mapping[str, Tensor],
        content: bytes,
        log: bytes,
        loss: str,
    ) -> None:
        """Commit a step that has led to what lies in memory.

        Args:
            batch: what it trained on.
            content: the declared batch as a file, where the run keeps it.
            log: the rounding log.
            loss: bits of the loss; empty if the step commits none.

        Raises:
            CallerError: the step is repeated from its program, and leads elsewhere; or results of it are still held.
        """
        step, held, memory = self.steps + 1, self.loop.held, self.loop.state.memory
        moment = Moment(
            step=step,
            declared=self.declared,
            program=program,
            execution=execution,
            batch=batch,
            memory=memory,
            before=held.before or None,
            log=log,
            loss=loss,
        )
        self.host.moment = moment
        log, loss = self._conduct.record(moment)
        self._conduct.before_commit(moment)
        root = self.source.root(step, content)
        leaf = self._conduct.declare(
            Leaf(
                step=step,
                batch=root.hex(),
                state=memory.digest(),
                log=str(digest_bytes("rounding-log", log)),
                loss=loss,
                flop=program.flop,
                execution=execution,
            )
        )
        is_new = program.digest not in self.programs.known
        is_due = is_new or _is_picked(self.declared.seed, step, self.loop.options.one_in)
        if self.is_repeatable and is_due:
            held.repeat(self.declared, program, leaf, batch, root, log)
        files: dict[str, bytes | Staged] = {log_path(step): log, **self.source.step_files(step, content)}
        files |= self._checkpoints.of_past(step, program)
        if is_new:
            self.programs.know(program)
            self._agree()
            files |= _program_files(program)
        if self.loop.is_checked:
            _require_let_go(memory.meter, step, program.made + (self._made if execution.kind == WRITE else 0))
        held.remember()
        self.loop.earlier.remember(step)
        self._checkpoints.reached(step, program)
        self._count(execution.kind, loss, len(log), program.made)
        kind = Kind.DECLARED if execution.kind == STEP else Kind.EVALUATIONS
        self.book.add(kind, self._share(program.work.left(program.dead)))
        self.book.add(Kind.DEAD, self._share(program.dead))
        self.book.add(Kind.OUTSIDE, self._share(execution.outside))
        if step >= _FIRST_LOOK and not step & (step - 1):
            self.warn_of_slack()
        if self.host_state is not None:
            self.host_state.keep(step, again=execution.kind == WRITE)
        self.host.commit(leaf, files)
        self._checkpoints.release(step)
        self._conduct.after_step(step, self.host)
        self.answer()

    def _count(self, kind: str, loss: str, log_bytes: int, made: int) -> None:
        """One more is committed; a write follows a step, whose loss and results are still there."""
        self.log_bytes += log_bytes
        if kind == WRITE:
            self.writes += 1
            return
        self.loss, self._made = loss, made
        if kind == EVALUATION:
            self.evaluations.append(loss)

    def answer(self) -> None:
        """Answer what an inspection has asked of the lab."""
        self._desk.serve()

    def finish(self) -> None:
        """Write the last checkpoint and the chips' evidence, and close the run."""
        steps = self.steps
        self._checkpoints.stop()
        if self.is_repeatable and steps % self.declared.checkpoint_every and steps != self.declared.length:
            self.loop.held.repeat_segment(RunFolder(self.folder, self.lab.key.verifying), steps)
        files = self._checkpoints.whole(steps)
        self.warn_of_slack()
        self._conduct.before_evidence(self.host)
        self.host.show_time(steps)
        evidence = chip_evidence(self.lab, self.host.hand_over)
        self.host.store_shards()
        write_answers(self.lab, self.folder)
        self.writer.finish({**files, **evidence})
        self.lab.power_off()
        self._desk.close()
        self.loop.release()

    def shut_down(self) -> None:
        """Keep the state for the next process and shut the chips down in order, so that it need not repeat anything."""
        self._checkpoints.stop()
        self._files.write(str(self.lab.folder / STOPPED), encode_state(self.loop.state.memory.export()))
        self._files.settle(self.lab.folder)
        self.lab.power_off()
        self._desk.close()
        self.loop.release()

    @property
    def slack(self) -> float:
        """Share of the declared work that the chips have counted on top, but for what two boots may repeat."""
        declared, steps = self.declared, self.steps
        trained = steps - len(self.evaluations) - self.writes or steps
        return self.book.share(excused_work(self.book.measure, trained, declared.checkpoint_every, steps))

    @property
    def is_open(self) -> bool:
        """Whether undeclared steps may come."""
        return self.declared.length is None and isinstance(self.source, StreamSource)

    def warn_of_slack(self, *, what: str = "this run") -> None:
        """Warn where work that no one can replay nears the share that inspections allow."""
        declared = self.declared.maximum_slack
        limit, found = float(MOST_SLACK if declared is None else declared), self.slack
        if found > limit / 2 and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"chips count {found:.1%} more work than is declared in {what}; inspections are inconclusive above "
                f"{limit:.1%}; {self._remedy()}",
                stacklevel=2,
            )

    def _remedy(self) -> str:
        counts = self.book.counts
        if counts[Kind.DEAD].moved > self.book.slack.moved // 2:
            return "remove what a step computes but does not use, or read it inside the step with .item()"
        between, again = (Kind.OUTSIDE, Kind.BEHIND), (Kind.REPEATS, Kind.CUTS)
        if sum(counts[kind].moved for kind in between) > sum(counts[kind].moved for kind in again):
            return "move logging between steps into 'with recorder.evaluation(batch):', which is replayed"
        return "end a process with Recorder.shutdown(), after which nothing is repeated, or lower checkpoint_every"

    def _share(self, work: Work) -> Work:
        return work.share(*self.loop.state.memory.shards[0].share)

    def _tell_share(self, run: RunFolder, leaves: Sequence[Leaf]) -> None:
        """Say what the chips have counted, before anything is repeated."""
        share = self.loop.state.memory.shards[0].share
        self.book = booked_so_far(self.lab.chips[0], self.lab.folder, run, leaves, share)
        if (self.lab.folder / STOPPED).is_file():
            return
        _, first = repeated_from(run, leaves[-1].step)
        works = {digest: program.work for digest, program in self.programs.known.items()}
        dead = {digest: program.dead for digest, program in self.programs.known.items()}
        needs = needs_of(self.declared, share, leaves, works, dead)
        self.book.add(Kind.REPEATS, self._share(total(map(needs.of, range(first + 1, len(leaves))))))
        self.warn_of_slack(what=f"this run once {max(leaves[-1].step - first, 0)} steps are repeated")

    def break_off(self) -> None:
        """Leave the run as a crash does: nothing more is written, and the chips' power is cut."""
        self._checkpoints.stop()
        self.lab.cut_power()
        self._desk.close()

    def publish(self) -> None:
        """Show the finished run to others."""
        self._conduct.publish(self.folder, self.lab)

    def _make_host(self) -> None:
        memory = self.loop.state.memory
        self._desk = open_desk(self.lab, self.folder)
        self.host = Host(self.declared, memory, self.source.batches, self.lab, self.writer, self._conduct, self.run_id)
        self._checkpoints = Checkpoints(self.folder, self.declared, memory, self.loop.held.before, self.writer)

    def _step_programs(self, start: Mapping[str, Tensor]) -> StepPrograms:
        loop = self.loop
        return StepPrograms(self.declared, loop.groups, loop.options, checked=loop.is_checked, start=start)

    def _commit_start(self) -> None:
        start, memory = self._start, self.loop.state.memory
        self._conduct.before_run(self.lab)
        self._conduct.initialise(self.declared, memory, self.lab)
        self.host.attach_memory(0)
        self.loop.held.remember()
        flop = 0 if start is None else start.flop
        leaf = Leaf(step=0, batch="", state=memory.digest(), log="", loss="", flop=flop)
        self.loop.earlier.remember(0)
        files = {} if start is None else _program_files(start)
        self.host.commit(leaf, {**files, **self._checkpoints.whole(0)})

    def _settle(self) -> None:
        """Wait until all files of the run are on the medium, by whatever process."""
        for folder in (self.folder, lab_path(self.folder)):
            self._files.settle(folder)

    def _agree(self) -> None:
        """Have the declaration countersigned as far as the run came."""
        start = {} if self._start is None else {self._start.digest: self._start}
        self.inspectorate.sign(self.declared, {**start, **self.programs.known}, run=self.run_id.hex())


_FIRST_LOOK = 8
"""No share is reported before this step; from then on at each power of two."""


def _require_let_go(meter: Meter, step: int, made: int) -> None:
    """CallerError if more results are held than a step makes: chips count them, and inspections reject that."""
    most = made + KEPT_BYTES
    if meter.holdings.byte_count > most:
        gc.collect()  # what only cycles hold is garbage
    if meter.holdings.byte_count > most:
        raise CallerError(
            f"step {step}: the loop holds {meter.holdings.byte_count} bytes of results, but a step makes only {made}; "
            "keep numbers (.item(), .tolist()) or NumPy copies of earlier results, and delete the tensors"
        )


def _program_files(program: Program) -> dict[str, bytes]:
    """A program, and the bytes of its constants that lie apart."""
    files = {program_path(program.digest): program.encoded}
    return {**files, constants_path(program.digest): program.apart} if program.apart_bytes else files


def _is_picked(seed: int, step: int, one_in: int) -> bool:
    """Whether a step that need not be repeated is."""
    return step_seed(seed, step) % one_in == 0
