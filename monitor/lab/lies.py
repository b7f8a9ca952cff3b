"""How a lab behaves that tells exactly one lie.

Each lie overrides the moments of ``monitor.lab.conduct.Conduct`` at which it departs from honesty; everything else,
signatures and chips included, runs through the same code. Lies about what the transcript says are here; those about
which training the chips take part in are in ``monitor.lab.evasions``, those about work outside the programs and about
evaluations in ``monitor.lab.side_state_lies``, those of ranks in ``monitor.distributed.lies``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firmware_sim.dishonest_chips import CHIP_LIES
from firmware_sim.errors import CallerError
from firmware_sim.evidence import ZERO_DIGEST, RecordKind, parse_log
from firmware_sim.lies import Chance, Lie, Scenery, find_lie
from monitor import numerics
from monitor.lab import evasions, side_state_lies  # noqa: F401  # which describe their lies when they are imported
from monitor.lab.conduct import LAB_LIES, Conduct, LabLie, shuffle_weights, tells, undeclared
from monitor.lab.rounding_log_edits import LogEdit, Survey, apply_edit, far_additions
from monitor.numerics import Bound
from monitor.presets import initialise
from monitor.presets.training import build
from monitor.replay.repetition import ProgramTraining
from monitor.transcript.draft import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from monitor.declaration.statement import Declaration
    from monitor.lab.host import Host
    from monitor.lab.simulated_lab import LabConfig, SimulatedLab
    from monitor.numerics import Observer
    from monitor.replay.moment import Moment
    from monitor.sharding import ShardedMemory
    from monitor.transcript import Batches, Leaf

__all__ = ["LAB_LIES", "EditRoundingLog", "conduct", "every_lie", "lie_name"]


_PRODUCTS = frozenset({"aten.addmm.default", "aten.bmm.default", "aten.convolution.default", "aten.mm.default"})


@tells(
    "change-sample", "trains on one other sample than it declares", Chance.STEP, "replay", aliases=("swapped-sample",)
)
class _ChangeSample(Conduct):
    """Trains on one sample reversed, by default the first one, in one step."""

    def __init__(self, step: int, place: int = 0) -> None:
        self._step, self._place = step, place

    def batch(self, step: int, declared: Mapping[str, Tensor], batches: Batches) -> Mapping[str, Tensor]:
        if step != self._step:
            return declared
        changed = {name: values.clone() for name, values in declared.items()}
        inputs = max(changed.values(), key=lambda values: values.numel())
        sample = inputs[self._place % len(inputs)]
        sample.copy_(sample.reshape(-1).flip(0).view(sample.shape) if inputs.dim() > 1 else inputs[-1])
        return changed


@tells("reorder-data", "trains on the declared samples in another order", Chance.STEP, "replay")
class _ReorderData(Conduct):
    """Exchanges the batch of one step with that of the next one, or for the last step with that of the one before.

    Where batches come as the run goes, the step trains once more on the batch of the step before, the first on its own.
    """

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.length is not None and declared.length < 2:
            raise CallerError("a run of one step has one order of data; take at least two steps")

    def batch(self, step: int, declared: Mapping[str, Tensor], batches: Batches) -> Mapping[str, Tensor]:
        if batches.length is None:
            return batches.batch(step - 1) if step == max(self._step, 2) else declared
        first = min(self._step, batches.length - 1)
        other = {first: first + 1, first + 1: first}.get(step, step)
        return declared if other == step else batches.batch(other)


@tells("unseen-write", "writes to the weights where no operator shows it", Chance.STEP, "replay")
class _WriteUnseen(Conduct):
    """Alters a weight, by default the first, after one step by a view to which no operator of the program writes."""

    def __init__(self, step: int, place: int = 0) -> None:
        self._step, self._place = step, place

    def before_commit(self, moment: Moment) -> None:
        if moment.step == self._step:
            held = [tensor for (kind, _), tensor in moment.memory.tensors.items() if kind == "weight"]
            _number_at(self._place, held).add_(2.0**-10)


def _number_at(place: int, tensors: Sequence[Tensor]) -> Tensor:
    """A view, (1,), of the number at this place of all tensors one after the other, which begin again at their end."""
    place %= sum(tensor.numel() for tensor in tensors)
    for tensor in tensors:
        if place < tensor.numel():
            break
        place -= tensor.numel()
    return tensor.detach().view(-1)[place : place + 1]


@tells("tolerated-drift", "drifts by less than an inspector with a tolerance would see", Chance.REST, "replay")
class _Drift(Conduct):
    """Moves every weight by one unit in the last place, away from zero, after each step from one on.

    An inspector that compares a step's weights within a tolerance of 2^-22 sees nothing.
    """

    def before_commit(self, moment: Moment) -> None:
        if moment.step >= self._step:
            for (kind, _), tensor in moment.memory.tensors.items():
                if kind == "weight":
                    values = tensor.detach()
                    values.copy_(torch.nextafter(values, torch.copysign(torch.full_like(values, torch.inf), values)))


@tells("truncated-transcript", "hands over a transcript without the end", Chance.ALWAYS, scenery=Scenery.HANDED_OVER)
class _TruncateTranscript(Conduct):
    """Trains to the end, then hands over the transcript as if the run were still going on before one step."""

    def publish(self, run: Path, lab: SimulatedLab) -> None:
        draft = Draft.read(run, lab.key)
        draft.cut(run, self._step - 1)
        draft.sign(run, lab.key)


@tells("self-made-trust", "puts its own trust anchors into the run", Chance.ALWAYS, scenery=Scenery.HANDED_OVER)
class _MakeTrust(Conduct):
    """Puts a trust file into the run that names the lab's own maker, registry and chips."""

    def publish(self, run: Path, lab: SimulatedLab) -> None:
        shutil.copy(run.with_name(f"{run.name}.trust.json"), run / "trust.json")


@tells("edited-optimizer", "edits the optimizer state between two steps", Chance.STEP, "replay")
class _EditOptimizer(Conduct):
    """Doubles a number of the optimizer's state after one step, by default the first of its largest rank."""

    def __init__(self, step: int, place: int = 0) -> None:
        self._step, self._place = step, place

    def before_commit(self, moment: Moment) -> None:
        if moment.step == self._step:
            held = [tensor for (kind, _), tensor in moment.memory.tensors.items() if kind == "optimizer"]
            if not held:
                raise CallerError("the optimizer keeps no state that this lie could edit")
            _number_at(self._place, sorted(held, key=lambda tensor: -tensor.dim())).mul_(2)


@tells("under-reported-flop", "declares fewer FLOP than the run took", Chance.ALWAYS, "rules replay")
class _UnderReportFlop(Conduct):
    """Declares half the FLOP of every step from one on."""

    def declare(self, leaf: Leaf) -> Leaf:
        return replace(leaf, flop=leaf.flop // 2) if leaf.step >= self._step else leaf


@tells("other-learning-rate", "trains with another learning rate than it declares", Chance.REST, "replay")
class _OtherLearningRate(Conduct):
    """Moves the weights twice as far in each step from one on, as twice the declared learning rate does."""

    needs_before = True

    def before_commit(self, moment: Moment) -> None:
        if moment.step < self._step:
            return
        assert moment.before is not None
        with torch.no_grad():
            for (kind, name), tensor in moment.memory.tensors.items():
                if kind == "weight":
                    tensor.detach().add_(tensor.detach() - moment.before[f"weight/{name}"])


@tells(
    "forged-initialisation",
    "starts from weights that the declared seed does not give",
    Chance.ALWAYS,
    "initialisation",
    aliases=("forged-start",),
)
class _ForgeInitialisation(Conduct):
    """Starts from other weights and claims that the declared seed gave them, or that they are the agreed ones."""

    def initialise(self, declared: Declaration, memory: ShardedMemory, lab: SimulatedLab) -> None:
        if declared.recipe is None:
            shuffle_weights(memory, declared.seed + 1)
            return
        model, _ = build(declared.recipe, memory.place)
        initialise(model, declared.seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                memory.tensors["weight", name].copy_(parameter)


@tells(
    "extra-steps",
    "trains steps that the transcript does not show, while its chips believe that they idle",
    Chance.ALWAYS,
    "meter snapshot schedule log-chain",
    aliases=("hidden-steps",),
)
class _HiddenSteps(Conduct):
    """Trains hidden extra steps on undeclared data, then puts the declared state back.

    The transcript is spotless; only the chips see the hidden states, and count what runs on them.
    """

    def __init__(self, step: int, hidden: int = 6) -> None:
        self._step = step
        self._hidden = hidden

    def after_step(self, step: int, host: Host) -> None:
        if step != self._step or host.moment is None:
            return
        saved = {name: tensor.clone() for name, tensor in host.memory.export().items()}
        batch = undeclared(host.moment.batch)
        for _ in range(self._hidden):
            host.moment.train(host.memory, batch)
            self.tell_chips(step, host)
        host.memory.load(saved)

    def tell_chips(self, step: int, host: Host) -> None:
        """What the chips hear of a hidden step."""
        host.idle_chips()


@tells(
    "untold-steps",
    "trains steps that the transcript does not show, and tells its chips nothing",
    Chance.ALWAYS,
    "meter snapshot",
)
class _UntoldSteps(_HiddenSteps):
    """Trains hidden extra steps while no time passes on its chips. Only their meters show it."""

    def tell_chips(self, step: int, host: Host) -> None:
        """Nothing."""


@tells(
    "edited-chip-log",
    "trains hidden steps and edits the chips' logs to hide them",
    Chance.ALWAYS,
    "log-chain meter snapshot schedule",
    aliases=("edited-log",),
)
class _EditLog(_HiddenSteps):
    """Trains hidden extra steps, then edits the chips' logs so that each hidden snapshot shows the declared state.

    The edited log is chained anew and hangs together; the chip's quote still covers the one that it wrote.
    """

    keeps_leaves = True

    def hand_over(self, shard: int, evidence: dict[str, bytes], host: Host) -> dict[str, bytes]:
        previous = ZERO_DIGEST
        edited = []
        for record in parse_log(evidence["log.bin"]):
            digest = record.digest
            if record.kind is RecordKind.SNAPSHOT:
                digest = host.leaves[record.step].state.shard(shard).value
            record = replace(record, digest=digest, previous=previous)
            previous = record.hash()
            edited.append(record.to_bytes())
        return {**evidence, "log.bin": b"".join(edited)}


@tells(
    "edited-rounding-log",
    "steers rounding by a forged log, all downstream recomputed",
    Chance.STEP,
    "rounding snapshot",
    options={"numerics": "rounded"},
)
class EditRoundingLog(Conduct):
    """Edits one entry of one step's rounding log and trains on under it; everything after it is honest.

    The step is recorded as it should be, then taken again from the same state under the edited log, obeyed without
    checks. State, loss, log and all that follows are committed and signed as they then are, so that every record of
    the run agrees with every other.

    Args:
        edit: by default an added entry outside the window of its error bound, against the lab's own arithmetic: the
            first that changes the state.
        place: number of the sub-operation with which the search for such an entry begins.
    """

    bound = Bound(check=False)
    needs_before = True

    def __init__(self, step: int, edit: LogEdit | None = None, place: int = 0) -> None:
        self._step, self._edit, self._place = step, edit, place

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.numerics != "rounded":
            raise CallerError(
                "this lie edits the log of rounded numerics with worst-case bounds, but the run declares "
                f"{declared.numerics}"
            )

    def record(self, moment: Moment) -> tuple[bytes, str]:
        if moment.step != self._step:
            return super().record(moment)
        assert moment.before is not None
        honest = moment.memory.digest()
        keys = moment.keys()
        survey, session = Survey.recording(keys=keys)
        memory = ProgramTraining(moment.declared, device=moment.memory.place).memory  # elsewhere: its chips would count
        memory.load(moment.before)
        moment.take(memory, moment.batch, session, keys)
        edits = far_additions(survey.roundings) if self._edit is None else [self._edit]
        if not edits:
            raise CallerError(f"step {moment.step} rounds no element outside the window of its error bound")
        first = self._place % len(edits)
        for edit in [*edits[first:], *edits[:first]]:
            log = apply_edit(session.log, edit, survey.roundings)
            memory.load(moment.before)
            keys = moment.keys()
            replaying = numerics.replaying("rounded", log, bound=self.bound, keys=keys)
            loss = moment.take(memory, moment.batch, replaying, keys)
            if memory.digest() != honest:
                break
        moment.memory.load(memory.export())
        return log, loss


@tells("wrong-operator", "returns one wrong result of one operator", Chance.STEP, "replay")
class _WrongOperator(Conduct):
    """Returns one wrong element from one operator of one step: by default its first matrix product or convolution."""

    def __init__(self, step: int, place: int | None = None) -> None:
        self._step, self._place = step, place

    def observer(self, step: int) -> Observer | None:
        return _Nudge(self._place) if step == self._step else None


class _Nudge:
    """Alters the last element of the first floating-point result at or after one operator index."""

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._done = False

    def before(self, index: int, func: object, args: object, kwargs: object) -> None:
        """Nothing to do."""

    def after(self, index: int, func: object, args: object, kwargs: object, out: object) -> None:
        """Alter the result once."""
        due = str(func) in _PRODUCTS if self._index is None else index >= self._index
        if self._done or not due or not isinstance(out, Tensor):
            return
        if not out.is_floating_point() or out.numel() == 0 or _shares_memory(out, args):
            return
        with torch.no_grad():
            last = out[tuple(size - 1 for size in out.shape)]
            last.mul_(1.0078125).add_(2.0**-10)
        self._done = True


def _shares_memory(out: Tensor, args: object) -> bool:
    """Tell whether the result is a view of an argument, or the argument itself."""
    if isinstance(args, Tensor):
        return bool(args.untyped_storage()._cdata == out.untyped_storage()._cdata)
    return isinstance(args, list | tuple) and any(_shares_memory(out, item) for item in args)


def every_lie() -> dict[str, Lie]:
    """The lies that ``train`` can tell, by name: those of labs, then those of chips."""
    return {**LAB_LIES, **CHIP_LIES}


def lie_name(name: str) -> str:
    """Return the name of the lie that has or had this name; CallerError with the names that exist if there is none."""
    return find_lie(every_lie(), name).name


def conduct(lie: str | None, step: int) -> Conduct:
    """Return the conduct that tells this lie at that step; honest if there is none, or if a chip tells it."""
    found = None if lie is None else find_lie(every_lie(), lie)
    return found.conduct(step) if isinstance(found, LabLie) else Conduct()
