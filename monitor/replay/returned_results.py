"""Results of programs that only compute, where later batches bring them back: rows, or short tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.programs.program import Program

__all__ = ["MOST_RETURNED", "Returned", "Returns"]

_LEAST, MOST_RETURNED = 64, 16
"""Elements of a result below which it is not looked for, and results after which nothing is."""
Returned = tuple[int, int, int, int]
"""The step that computed a result, the later one whose batch holds it, that tensor's place among the names there in
order, and how many elements come back at least."""
_Form = tuple[str, int]


class Returns:
    """Watches steps (``monitor.programs.interpreter.Watch``) for results that the batches of later ones hold.

    Args:
        batch, program: of a step.
        last: up to which step a result is looked for.

    Attributes:
        found: at most 16.
    """

    def __init__(
        self, batch: Callable[[int], Mapping[str, Tensor]], program: Callable[[int], Program], last: int
    ) -> None:
        self._batch, self._program, self._last, self._step = batch, program, last, 0
        self._held: dict[int, dict[_Form, dict[int, int]]] = {}
        self._forms: set[_Form] = set()
        self.found: list[Returned] = []

    def at(self, step: int) -> Returns | None:
        """Itself, ready to watch a step; None where it makes nothing that has the form of a part of a later batch."""
        made = {_form(each["dtype"], each["shape"]) for call in self._program(step).calls for each in call["results"]}
        later = set().union(*map(self._forms_in, range(step + 1, self._last + 1)))
        self._step = step
        self._forms = {(dtype, row) for dtype, row in made & later if dtype != "bool" and row >= _LEAST}
        return self if self._forms else None

    def _forms_in(self, step: int) -> set[_Form]:
        """Of a batch; none where the program that reads it is not there, as after a segment."""
        try:
            return {_form(each["dtype"], each["shape"]) for each in self._program(step).batch.values()}
        except EvidenceError:
            return set()

    def before(self, inputs: Sequence[Tensor]) -> None:
        """Nothing to see."""

    def after(self, outputs: Sequence[Tensor]) -> None:
        """Look for the first row of what a call has returned or written, unless the step's own batch holds it."""
        for form, tensor in ((_form_of(tensor), tensor) for tensor in outputs):
            marks = _marks(tensor, rows=1) if form in self._forms and len(self.found) < MOST_RETURNED else []
            for mark in marks if not marks or marks[0] not in self._of(self._step).get(form, {}) else []:
                steps = range(self._step + 1, self._last + 1)
                places = ((later, self._of(later).get(form, {}).get(mark)) for later in steps)
                hit = next(((self._step, later, place, form[1]) for later, place in places if place is not None), None)
                self.found += [hit] if hit is not None and hit not in self.found else []

    def _of(self, step: int) -> Mapping[_Form, Mapping[int, int]]:
        """What is long enough in a step's batch, and where; nothing of one that is not there."""
        if step not in self._held:
            held = self._held[step] = {}
            try:
                batch = self._batch(step)
            except EvidenceError:
                batch = {}
            for place, name in enumerate(sorted(batch)):
                if (form := _form_of(batch[name]))[1] >= _LEAST:
                    held.setdefault(form, {}).update(dict.fromkeys(_marks(batch[name]), place))
        return self._held[step]


def _form(dtype: str, shape: Sequence[int]) -> _Form:
    """Type and elements of a tensor's rows, or of all of it where these are short."""
    size = prod(shape)
    row = size // shape[0] if len(shape) > 1 and size else size
    return dtype, row if row >= _LEAST else size


def _form_of(tensor: Tensor) -> _Form:
    return _form(str(tensor.dtype).removeprefix("torch."), tensor.shape)


def _marks(tensor: Tensor, rows: int | None = None) -> list[int]:
    """A mark of the bits of each of the first rows, but for those that are all one number."""
    _, row = _form_of(tensor)
    content = tensor.detach().reshape(-1, row)[:rows].contiguous().cpu().view(torch.uint8).numpy()
    words = np.pad(content, ((0, 0), (0, -content.shape[1] % 4))).view(np.uint32)
    varied = words[(words != words[:, :1]).any(1)].astype(np.uint64)
    return [int(mark) for mark in varied @ _factors(words.shape[1])]


@lru_cache(maxsize=64)
def _factors(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.random.Philox(key=count).random_raw(count) | np.uint64(1)
