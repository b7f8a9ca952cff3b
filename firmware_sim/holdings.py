"""What lies in a chip's memory outside its declared regions: results of operators, as long as something holds them."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from typing import Any

__all__ = ["KEPT_BYTES", "Holdings"]

KEPT_BYTES = 1 << 20
"""Results of earlier steps that a lab may keep, losses for instance: an escape, of which verdicts tell."""


class Holdings:
    """Results of operators on one memory that are still held.

    A result counts with the bytes of its elements; views share the storage of what they view and count once. Tensors of
    a simulated device are not counted.
    """

    __slots__ = ("__weakref__", "_forget", "_held", "_ranges")

    def __init__(self) -> None:
        self._held: dict[weakref.ref[Any], int] = {}
        self._ranges: list[tuple[int, int]] | None = []
        mine = weakref.ref(self)

        def forget(gone: weakref.ref[Any]) -> None:
            self = mine()
            if self is not None:
                self._held.pop(gone, None)
                self._ranges = None

        self._forget = forget

    def note(self, made: Any) -> None:
        """Count what an operator returned: a tensor, or any in a tuple or list; anything else is no memory.

        PyTorch keeps the object of a storage, and so the reference to it, as long as anything holds the memory.
        """
        if isinstance(made, (tuple, list)):
            for each in made:
                self.note(each)
            return
        torch: Any = sys.modules.get("torch")  # without it there is no tensor
        if torch is not None and type(made) is torch.Tensor and made.layout is torch.strided:
            self._ranges = None
            self._held.setdefault(weakref.ref(torch.Tensor.untyped_storage(made), self._forget), made.nbytes)

    def holds(self, tensor: Any) -> bool:
        """Whether a plain tensor lies in the memory of such a result, by its address, as any alias does."""
        torch: Any = sys.modules["torch"]
        if not self._held:
            return False
        if weakref.ref(torch.Tensor.untyped_storage(tensor)) in self._held:
            return True
        if (ranges := self._ranges) is None:
            storages = [each() for each in list(self._held)]
            ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each is not None)
            self._ranges = ranges
        at = bisect_right(ranges, (torch.Tensor.data_ptr(tensor), sys.maxsize)) - 1
        return at >= 0 and torch.Tensor.data_ptr(tensor) < ranges[at][1]

    @property
    def byte_count(self) -> int:
        """Bytes that are held now."""
        return sum(list(self._held.values()))
