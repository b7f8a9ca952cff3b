"""What lies in a chip's memory beside its declared regions: results of operators, as long as anybody holds them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

__all__ = ["KEPT_BYTES", "Holdings"]

KEPT_BYTES = 1 << 20
"""Results of earlier steps that a lab may keep, losses for instance: an escape, of which verdicts tell."""


class Holdings:
    """Results of operators on one memory that are still held.

    A result counts with the bytes of its elements; views share the storage of what they view and count once. Tensors of
    a simulated device are not counted.
    """

    __slots__ = ("_forget", "_held")

    def __init__(self) -> None:
        held: dict[weakref.ref[Any], int] = {}
        self._held = held
        self._forget = lambda gone: held.pop(gone, None)

    def note(self, made: Any) -> None:
        """Count what an operator returned: a tensor, or any in a tuple or list; anything else is no memory.

        PyTorch keeps the object of a storage, and so the reference to it, as long as anything holds the memory.
        """
        if isinstance(made, (tuple, list)):
            for each in made:
                self.note(each)
            return
        torch: Any = sys.modules.get("torch")  # without it there is no tensor
        if torch is not None and type(made) is torch.Tensor:
            self._held.setdefault(weakref.ref(torch.Tensor.untyped_storage(made), self._forget), made.nbytes)

    def holds(self, tensor: Any) -> bool:
        """Whether a plain tensor lies in the memory of such a result."""
        torch: Any = sys.modules["torch"]
        return weakref.ref(torch.Tensor.untyped_storage(tensor)) in self._held

    @property
    def byte_count(self) -> int:
        """Bytes that are held now."""
        return sum(list(self._held.values()))
