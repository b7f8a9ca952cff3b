"""Lies about which training the chips take part in: other runs, other chips, other logs, other models, other data."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from firmware_sim import DeviceMemory, RecordKind, Region, parse_log
from firmware_sim.errors import CallerError
from firmware_sim.evidence import MerkleTree
from firmware_sim.lies import Chance, Scenery
from monitor.lab.conduct import Conduct, shuffle_weights, tells, undeclared
from monitor.lab.simulated_lab import LabConfig, SimulatedLab
from monitor.programs.flop import live_work
from monitor.replay.repetition import ProgramTraining
from monitor.transcript import RunFolder, encode_arrays
from monitor.transcript.layout import ORDER, SAMPLES

if TYPE_CHECKING:
    from monitor.declaration.statement import Declaration
    from monitor.lab.host import Host
    from monitor.replay.moment import Moment
    from monitor.sharding import ShardedMemory
    from monitor.transcript import Leaf
    from monitor.transcript.data import DeclaredData

_NORM = torch.ops.aten.linalg_vector_norm.default


def _other_model(moment: Moment) -> ShardedMemory:
    """The same layout with other weights: what the lab is really after."""
    memory = ProgramTraining(moment.declared, device=moment.memory.place).memory
    memory.load(moment.memory.export())
    shuffle_weights(memory, moment.declared.seed + 1)
    return memory


@tells("undeclared-run", "trains a run for which it has no transcript", Chance.ALWAYS, "snapshot meter commitment")
class _UndeclaredRun(Conduct):
    """Trains another model on the chips for some steps after the declared run, and hands no transcript of it over."""

    def __init__(self, step: int) -> None:
        """``step`` is the number of steps of the other run."""
        self._steps = step

    def before_evidence(self, host: Host) -> None:
        if host.moment is None:
            return
        other = _other_model(host.moment)
        run_id = hashlib.sha256(f"chipwitness/undeclared/{host.lab.config.secret}".encode()).digest()
        for chip, shard in zip(host.lab.chips, other.shards, strict=True):
            chip.attach(shard, run_id, 0)
        batch = undeclared(host.moment.batch)
        for _ in range(self._steps):
            host.moment.train(other, batch)


@tells("undeclared-chips", "trains on chips that no registry knows", Chance.ALWAYS, "identity")
class _UndeclaredChips(Conduct):
    """Trains on one chip more than the registry knows; the simulated registry leaves it out (``SimulatedLab``)."""

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.shards < 2:
            raise CallerError("a registry without any chip leaves nothing to inspect; give --chips 2 or more")


@tells("two-transcripts", "keeps two transcripts for one run", Chance.HALF, "commitment")
class _TwoTranscripts(Conduct):
    """From one step on tells the second half of its chips the heads of another log, with half the FLOP."""

    keeps_leaves = True

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.shards < 2:
            raise CallerError("this lie needs two transcripts, and one chip hears of only one; give --chips 2 or more")

    def head(self, step: int, shard: int, host: Host) -> bytes:
        if shard < (host.declared.shards + 1) // 2:
            return host.root(step)
        return MerkleTree(self._other(leaf).encoded() for leaf in host.leaves[: step + 1]).root()

    def _other(self, leaf: Leaf) -> Leaf:
        return replace(leaf, flop=leaf.flop // 2) if leaf.step >= self._step else leaf


@tells("fake-layers", "surrounds the sampled shard with made-up layers", Chance.REST, "replay")
class _FakeLayers(Conduct):
    """From one step on the first chip's shard is that of another training; the declared rest is made up around it.

    What the transcript states is what the chips hold, so that every snapshot is explained; no step leads there.
    """

    def before_commit(self, moment: Moment) -> None:
        if moment.step < self._step:
            return
        hidden = ProgramTraining(moment.declared, device=moment.memory.place).memory
        shuffle_weights(hidden, moment.declared.seed)
        for _ in range(moment.step - self._step + 1):
            moment.train(hidden, {name: torch.zeros_like(values) for name, values in moment.batch.items()})
        regions = zip(moment.memory.shards[0].regions, hidden.shards[0].regions, strict=True)
        with torch.no_grad():
            for shown, real in regions:
                if not shown.shape:
                    continue  # a counter of steps, by which the optimizer would betray the lie to itself
                part = slice(shown.offset, shown.offset + shown.elements)
                shown.tensor.view(-1)[part].copy_(real.tensor.view(-1)[part])


@tells(
    "chained-runs",
    "declares one long run as several short ones",
    Chance.ALWAYS,
    "initialisation snapshot",
    scenery=Scenery.TWO_RUNS,
)
class _ChainedRuns(Conduct):
    """Goes on from where the lab's earlier run ended, and claims to start from the declared seed."""

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if config.silicon is None:
            raise CallerError("a run is chained to an earlier one of the same lab; give --after RUN")
        earlier = _first_run(config).declared
        if earlier.state != declared.state or earlier.shares != declared.shares:
            raise CallerError(
                "a run can only be chained to a run of the same model and optimizer, and the earlier run has others"
            )

    def initialise(self, declared: Declaration, memory: ShardedMemory, lab: SimulatedLab) -> None:
        run = _first_run(lab.config)
        memory.load(run.checkpoint(run.declared.steps))


@tells(
    "stale-snapshots",
    "shows the initial weights whenever its chips idle; later ones are made up",
    Chance.SHOWN,
    "snapshot replay commitment",
    options={"checkpoint_every": 1},
)
class _StaleSnapshots(Conduct):
    """Commits every head, then shows W_0 for an idle tick; from step 2 on weights are noise.

    Where snapshots may show any committed step, only the first segment is ever replayed.
    """

    def __init__(self, step: int) -> None:
        """The lie applies from step 2 on, whatever ``step`` is."""
        self._shown: dict[str, Tensor] = {}

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.checkpoint_every != 1:
            raise CallerError("the first segment must end before the weights are made up; give --checkpoint-every 1")

    def before_commit(self, moment: Moment) -> None:
        if moment.step < 2:
            return
        generator = torch.Generator().manual_seed(moment.step)
        with torch.no_grad():
            for (kind, _), tensor in moment.memory.tensors.items():
                if kind == "weight":
                    tensor.detach().copy_(torch.randn(tensor.shape, generator=generator))

    def rest(self, host: Host) -> None:
        held = {name: tensor.clone() for name, tensor in host.memory.export().items()}
        self._shown = self._shown or held
        host.memory.load(self._shown)
        host.idle_chips()
        host.memory.load(held)


@tells(
    "other-memory",
    "keeps another model in its chips' memory while they idle, put there past every operator",
    Chance.HELD,
    "snapshot",
)
class _OtherMemory(Conduct):
    """Keeps another model in its chips' memory for some idle ticks after one step, then puts the declared state back.

    It was trained elsewhere, and no operator of the chips puts it there.
    """

    def __init__(self, step: int, ticks: int = 6) -> None:
        self._step = step
        self._ticks = ticks

    def after_step(self, step: int, host: Host) -> None:
        if step != self._step or host.moment is None:
            return
        declared = {name: tensor.clone() for name, tensor in host.memory.export().items()}
        other, batch = _other_model(host.moment), undeclared(host.moment.batch)
        for _ in range(self._ticks):
            host.moment.train(other, batch)
            host.memory.load(other.export())
            host.idle_chips()
        host.memory.load(declared)


@tells("unseen-step", "ends a segment in which its chips took no snapshot with other weights", Chance.NEVER)
class _UnseenStep(Conduct):
    """Watches its chips' logs, and once a segment after a step goes by without a snapshot, ends it with other weights.

    The chips see what the transcript states; that step alone does not lead there, and nothing points to it.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._every = self._seen = self._chosen = 0
        self._lab: SimulatedLab | None = None

    def check(self, declared: Declaration, config: LabConfig) -> None:
        self._every = declared.checkpoint_every

    def before_run(self, lab: SimulatedLab) -> None:
        self._lab = lab

    def before_commit(self, moment: Moment) -> None:
        is_last = moment.step % self._every == 0
        if not self._chosen and is_last and moment.step > max(self._step, self._every) and self._look() == self._seen:
            self._chosen = moment.step
            shuffle_weights(moment.memory, moment.step)

    def after_step(self, step: int, host: Host) -> None:
        if step % self._every == 0:
            self._seen = self._look()

    def _look(self) -> int:
        """Snapshots in all chips' logs."""
        assert self._lab is not None
        logs = [parse_log(chip.log_bytes()) for chip in self._lab.chips]
        return sum(record.kind is RecordKind.SNAPSHOT for log in logs for record in log)


@tells("elsewhere-steps", "trains steps that the transcript does not show, on no registered chip", Chance.NEVER)
class _ElsewhereSteps(Conduct):
    """Trains hidden steps where no chip of the registry is. Nothing that its chips record shows it."""

    def __init__(self, step: int, hidden: int = 6) -> None:
        self._step = step
        self._hidden = hidden

    def after_step(self, step: int, host: Host) -> None:
        if step == self._step and host.moment is not None:
            other, batch = _other_model(host.moment), undeclared(host.moment.batch)
            self.place(other, host)
            for _ in range(self._hidden):
                host.moment.train(other, batch)

    def place(self, other: ShardedMemory, host: Host) -> None:
        """No chip counts what runs on the other model."""


@tells(
    "extra-ticks", "lets its chips work on something that the transcript does not show", Chance.ALWAYS, "meter snapshot"
)
class _ExtraTicks(_ElsewhereSteps):
    """Trains another model on the chips after one step, in memory outside the declared one."""

    def place(self, other: ShardedMemory, host: Host) -> None:
        """The lab's chips count it."""
        other.meter = host.memory.meter


@tells("early-ticks", "lets its chips work for no run before the run", Chance.ALWAYS, "meter snapshot")
class _EarlyTicks(Conduct):
    """Lets the chips work on memory of no run before the run's is attached."""

    def __init__(self, step: int, passes: int = 300) -> None:
        """The lie applies before the first step, whatever ``step`` is."""
        self._passes = passes

    def before_run(self, lab: SimulatedLab) -> None:
        _work_on_memory_of_no_run(lab, self._passes)


@tells(
    "paused-ticks",
    "shuts its chips down in mid-run, lets them work for no run, and goes on",
    Chance.ALWAYS,
    "meter snapshot",
)
class _PausedTicks(Conduct):
    """Shuts the chips down in order after a step, lets them work for no run, and attaches the memory again."""

    def __init__(self, step: int, passes: int = 200) -> None:
        self._step = step
        self._passes = passes

    def after_step(self, step: int, host: Host) -> None:
        if step == self._step:
            host.lab.restart()
            _work_on_memory_of_no_run(host.lab, self._passes)
            host.attach_memory(step)
            host.announce(step)


def _work_on_memory_of_no_run(lab: SimulatedLab, passes: int) -> None:
    """Take the norm of some memory again and again on each chip."""
    run_id = hashlib.sha256(b"chipwitness/no-run").digest()
    for chip in lab.chips:
        held = torch.ones(1 << 12)
        memory = DeviceMemory([Region.of("unknown", held)])
        chip.attach(memory, run_id, 0)
        for _ in range(passes):
            memory.meter.charge(live_work(_NORM, (held,), {}, _NORM(held)))


@tells(
    "other-data",
    "declares one sample of noise over and over in place of the preset's data",
    Chance.ALWAYS,
    "data",
    scenery=Scenery.PRESET,
)
class _OtherData(Conduct):
    """Declares and trains on the first sample only, with noise for its values, and calls that the preset's data."""

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.recipe is None:
            raise CallerError("only a run whose recipe names its data can declare others in their place")

    def declare_data(self, data: DeclaredData) -> DeclaredData:
        honest = data.with_salt(bytes(32))
        noise = np.random.default_rng(1)
        samples = {}
        for name, values in honest.samples.items():
            one = np.zeros_like(values[:1]) if values.ndim == 1 else values[:1]
            samples[name] = noise.permutation(one.reshape(-1)).reshape(one.shape)
        files = {SAMPLES: encode_arrays(samples), ORDER: encode_arrays({"order": np.zeros_like(honest.order)})}
        return replace(data, files=files)


def _first_run(config: LabConfig) -> RunFolder:
    """The run for which the lab's chips were made."""
    assert config.silicon is not None
    lab = Path(config.silicon).parent
    return RunFolder(lab.with_name(lab.name.removesuffix(".lab")), SimulatedLab.lab_key(config).verifying)
