"""A rank's step under controlled numerics: the model's operators are the step's, everything of the job's is aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from monitor import numerics
from monitor.distributed.metering import RankMeter
from monitor.numerics.arguments import Arguments, Keywords
from monitor.programs.keys import RecordedKeys, step_seed

__all__ = ["rank_session"]

_COLLECTIVES = ("c10d", "_c10d_functional")


class _Aside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands distributed tensors back, so that they become operators on local ones, and keeps collectives out.

    Calls on tensors without values are those by which PyTorch finds out how results are sharded.
    """

    def __init__(self, session: numerics.Session, meter: RankMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session, self._meter = session, meter

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "aten" and not _have_shapes_alone((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            self._meter.moves(func, args)
        with self._session.aside():
            return func(*args, **kwargs)


def _have_shapes_alone(values: Iterable[object]) -> bool:
    """Whether a tensor without values is among a call's arguments, or a device of such."""
    for value in values:
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor) or value.is_meta:
                return True
        elif isinstance(value, torch.device):
            if value.type == "meta":
                return True
        elif isinstance(value, list | tuple) and _have_shapes_alone(value):
            return True
    return False


@contextmanager
def rank_session(
    name: numerics.Numerics, keys: RecordedKeys, seed: int, step: int, meter: RankMeter
) -> Iterator[numerics.Session]:
    """Control one rank's part of a step, whose operators a meter counts."""
    random = torch.get_rng_state()
    torch.default_generator.manual_seed(step_seed(seed, step))
    session = meter.session = numerics.recording(name, keys=keys, observer=meter)
    torch.clear_autocast_cache()
    try:
        with session, _Aside(session, meter):
            yield session
    finally:
        torch.clear_autocast_cache()
        torch.set_rng_state(random)
