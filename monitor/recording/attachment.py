"""A caller's model, optimizer and further objects, taken into chip memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from monitor.environment import check_subnormals
from monitor.lab.conduct import Conduct
from monitor.loops.state import LoopState
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.recording.first_state import FirstState
from monitor.recording.follower import Follower
from monitor.recording.options import RunConfig, check_objects
from monitor.recording.path_warnings import LinedCapture
from monitor.recording.state_watch import Earlier, HeldState
from monitor.recording.step_programs import StepPrograms
from monitor.recording.updates import OptimizerUpdates

__all__ = ["AttachedLoop"]


class AttachedLoop:
    """What a training loop computes with: its state lies in chip memory, and its writes are watched.

    Args:
        shares: how many equal parts of the state each chip holds.
        conduct: how the lab behaves; a lie is not looked for.
        objects: further objects whose tensors the steps write, by name.
        trusted: the body cannot do anything else than its program, so that it is captured once, then followed.

    Attributes:
        state: weights, buffers, gradients, optimizer state and tensors of ``objects``, in chip memory.
        earlier: what committed states held.
        held: a copy of them after the last committed step.
        updates: of the optimizer in the open step.
        first_state: brings what the optimizer makes into memory.
        groups: its hyper-parameters, by parameter group.
        is_checked: whether what the body does is compared with what its programs say.

    Raises:
        CallerError: model, optimizer or objects cannot be recorded, or ``options`` name tensors that are not there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        shares: Sequence[int],
        conduct: Conduct,
        options: RunConfig,
        objects: Mapping[str, object] | None = None,
        *,
        trusted: bool = False,
    ) -> None:
        check_objects(model, optimizer)
        check_subnormals()
        self.model, self.optimizer = model, optimizer
        self.conduct, self.options = conduct, options
        self.trusted, self.is_checked = trusted, not trusted and not conduct.lies
        self.state = LoopState(model, optimizer, shares, complete=trusted, objects=objects)
        options.require_named({f"{entry.kind}/{entry.name}" for entry in self.state.entries})
        self.earlier = Earlier(self.state.memory)
        self.held = HeldState(self.state, watched=not trusted, kept=conduct.needs_before)
        self.updates = OptimizerUpdates(optimizer)
        self.first_state = FirstState(self.state)
        self.groups = tuple(self.updates.used)
        self._hooks: dict[str, RemovableHandle] = {}
        self._watch: Callable[[str, nn.Parameter], None] | None = None

    @property
    def root(self) -> str:
        """Digest of the state that lies in memory."""
        return str(self.state.memory.digest().root)

    def watch_gradients(self, watch: Callable[[str, nn.Parameter], None]) -> None:
        """From now on call ``watch`` with name and parameter when a parameter's gradient has been accumulated."""
        self._watch = None if self.trusted else watch
        self._watch_learning()

    def _watch_learning(self) -> None:
        """Watch the gradients of all parameters that learn by now."""
        if self._watch is not None:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad and name not in self._hooks:
                    hook = functools.partial(self._watch, name)
                    self._hooks[name] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def observe(
        self,
        step: int,
        batch: Mapping[str, Tensor],
        keys: RecordedKeys,
        watch: WriteWatch,
        programs: StepPrograms,
    ) -> Capture | Follower:
        """Whatever looks at the operators of a step that is about to begin; ``programs`` are the run's so far."""
        self._watch_learning()
        observer, meter = self.conduct.observer(step), self.state.memory.meter
        if self.trusted and programs.known:
            return Follower(next(iter(programs.known.values())), keys, meter, observer)
        capture = LinedCapture(
            keys,
            watch,
            self.first_state.begin(observer),
            meter=meter,
            known=programs.recent,
        )
        self.first_state.capture = capture
        capture.declare_inputs(self.state.inputs(), batch)
        return capture

    def release(self) -> None:
        """Leave model and optimizer as they were found, but for their tensors, which stay where they are."""
        self.updates.remove()
        for hook in self._hooks.values():
            hook.remove()
