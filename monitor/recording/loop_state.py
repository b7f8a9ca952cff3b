"""What a training loop keeps outside of chip memory: the states of its data loader, schedules and random generators."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from monitor.files import Files
from monitor.loops.optimizers import groups_of, load_groups

__all__ = ["HostState", "Stateful", "decode", "encode"]

_LISTS: Mapping[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "torch.Size": torch.Size}
_REMOVED = "without stateful, after you delete host-state-*.json from the lab's folder"
_DICTS: Mapping[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@runtime_checkable
class Stateful(Protocol):
    """The protocol of PyTorch's distributed checkpoints, which schedules and stateful data loaders follow."""

    def state_dict(self) -> Any:
        """The object's state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore that state."""


class HostState:
    """Keeps on the lab's side, with every step, what an exact resume needs in addition to the memory of the chips.

    These are the states of the caller's objects, the optimizer's hyper-parameters, and the global random generators of
    Python, NumPy and PyTorch (CPU). It is no evidence: an inspection sees the batches and learning rates themselves.

    Two files take turns, so that a process which dies while one is written leaves the other.

    Args:
        objects: by the name under which their states are kept.
        optimizer: whose parameter groups are kept.
        folder: the lab's.
        files: writes them there.

    Attributes:
        kept: what was kept or loaded last, as JSON.

    Raises:
        CallerError: an object without ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self, objects: Mapping[str, object], optimizer: Optimizer, folder: Path, files: Files | None = None
    ) -> None:
        self._objects: dict[str, Stateful] = {}
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise CallerError(f"{name} is a {type(thing).__name__}, without state_dict() and load_state_dict()")
            self._objects[name] = thing
        self._optimizer = optimizer
        self._folder, self._files = folder, files or Files()
        self._groups: object = None
        self.kept: dict[str, object] = {}

    def keep(self, step: int, *, again: bool = False) -> None:
        """Write the states after a step that is about to be committed; CallerError names what cannot be written.

        Args:
            again: those of the step before; a loop that has written between two steps may have its next batch already.
        """
        if not again or not self.kept:
            self._groups = groups_of(self._optimizer)
            random_state = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
            self.kept = {
                "groups": encode(self._groups, "the optimizer's hyper-parameters"),
                "random": encode(random_state, "a random generator"),
                "objects": {name: encode(thing.state_dict(), name) for name, thing in self._objects.items()},
            }
        content = {"step": step, **self.kept}
        text = canonical.encode(content)
        self._files.overwrite(str(_path(self._folder, step)), b"%b\n%b" % (_digest(text), text))
        self._files.flush(self._folder)

    def give_back(self, step: int) -> None:
        """Load the states that were kept with the last committed step.

        Raises:
            CallerError: nothing was kept with that step, or other names than the objects'.
        """
        kept = _read(self._folder, step)
        if kept is None:
            raise CallerError(f"no state outside the chips' memory was kept with step {step}; resume {_REMOVED}")
        self.load(kept)

    def load(self, kept: Mapping[str, Any]) -> None:
        """Load states that were kept, here or in another process of the same job; CallerError on other names."""
        if set(kept["objects"]) != set(self._objects):
            raise CallerError(
                f"the run has saved states of {sorted(kept['objects'])}, but stateful= lists {sorted(self._objects)}"
            )
        for name, thing in self._objects.items():
            thing.load_state_dict(decode(kept["objects"][name]))
        self._groups = decode(kept["groups"])
        self.kept = {name: part for name, part in kept.items() if name != "step"}
        load_groups(self._optimizer, decode(kept["groups"]))
        python, numpy, pytorch = decode(kept["random"])
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)

    def require_unchanged(self) -> None:
        """CallerError if a schedule has gone on between steps, where a crash would lose that."""
        if self._groups != groups_of(self._optimizer):
            raise CallerError(
                "hyper-parameters changed between steps; in a run with stateful, call schedule.step() inside the "
                "step's with statement; a distributed job passes its schedule as Job.scheduler"
            )

    @staticmethod
    def require_none(folder: Path, step: int) -> None:
        """CallerError if states were kept, which a resume without them would ignore."""
        kept = _read(folder, step)
        if kept is not None:
            names = ", ".join(f"{name!r}: …" for name in sorted(kept["objects"]))
            raise CallerError(f"this run keeps states outside the chips' memory; resume with stateful={{{names}}}")
        if _path(folder, 0).exists() or _path(folder, 1).exists():
            raise CallerError(
                f"this run keeps states outside the chips' memory, but those of step {step} are lost; resume {_REMOVED}"
            )


def encode(value: object, what: str, *path: object) -> Any:
    """A state as canonical JSON has it; law: ``decode(encode(x))`` has the values and types of x.

    Raises:
        CallerError: names the first part that is no plain value, list, tuple, dict, bytes, array or tensor.
    """
    kind = type(value)
    if value is None or kind in (bool, str) or (isinstance(value, int) and value.bit_length() <= 128):
        return value
    if isinstance(value, float) and kind is float:
        return {"float": value.hex()}
    if isinstance(value, bytes) and kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, Tensor) and kind is Tensor:
        flat = value.detach().cpu().contiguous().reshape(-1)
        form = [str(value.dtype).removeprefix("torch."), list(value.shape)]
        return {"tensor": [*form, flat.view(torch.uint8).numpy().tobytes().hex()]}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    name = next((name for name, maker in {**_LISTS, **_DICTS}.items() if kind is maker), None)
    if name is not None and isinstance(value, Mapping):
        return {name: [[encode(key, what, *path, key), encode(part, what, *path, key)] for key, part in value.items()]}
    if name is not None and isinstance(value, Sequence):
        return {name: [encode(part, what, *path, index) for index, part in enumerate(value)]}
    where = "".join([what, *(f"[{part!r}]" for part in path)])
    raise CallerError(f"{where:.200} is a {kind.__name__}, which JSON cannot hold; give numbers, text or a tensor")


def decode(text: Any) -> Any:
    """The value that `encode` made this of."""
    if not isinstance(text, dict):
        return text
    ((kind, content),) = text.items()
    if kind == "float":
        return float.fromhex(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tensor":
        dtype, shape, data = content
        flat = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        return flat.view(getattr(torch, dtype)).reshape(shape)
    if kind == "array":
        dtype, shape, data = content
        array = np.frombuffer(bytes.fromhex(data), dtype=dtype).reshape(shape)
        return array.copy() if shape else array[()]
    if kind in _LISTS:
        return _LISTS[kind](decode(part) for part in content)
    return _DICTS[kind]({decode(key): decode(part) for key, part in content})


def _path(folder: Path, step: int) -> Path:
    return folder / f"host-state-{step % 2}.json"


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _read(folder: Path, step: int) -> Any:
    """What was kept with a step; None if that file is of another step, torn or not there."""
    try:
        digest, _, text = _path(folder, step).read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(text):
        return None
    kept = canonical.loads(text)
    return kept if kept["step"] == step else None
