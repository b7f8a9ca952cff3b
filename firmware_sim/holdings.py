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

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def note(self, made: Any) -> None:
        """Count what an operator returned: a tensor, or any in a tuple or list; anything else is no memory."""
        if isinstance(made, (tuple, list)):
            for each in made:
                self.note(each)
            return
        torch: Any = sys.modules.get("torch")  # without it there is no tensor
        if torch is not None and type(made) is torch.Tensor:
            storage = torch.Tensor.untyped_storage(made)
            if id(storage) not in self._held:
                count = torch.Tensor.numel(made) * torch.Tensor.element_size(made)
                self._held[id(storage)] = _Held(storage, count, self._held)

    @property
    def byte_count(self) -> int:
        """Bytes that are held now."""
        return sum(each.bytes for each in list(self._held.values()))


class _Held(weakref.ref[Any]):
    """One storage: PyTorch keeps its object, and so the reference, as long as anything holds the memory."""

    __slots__ = ("bytes", "key")
    bytes: int
    key: int

    def __new__(cls, storage: Any, count: int, held: dict[int, _Held]) -> _Held:
        key = id(storage)
        reference = super().__new__(cls, storage, lambda _: held.pop(key, None))
        reference.bytes, reference.key = count, key
        return reference

    def __init__(self, *_: object) -> None:
        """A reference is whole when it is made."""
