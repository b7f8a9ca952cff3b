"""Device memory: the regions of real tensors that a chip holds.

A region is a contiguous slice of a tensor's storage, flattened in row-major order. Nothing is copied until a snapshot:
what the training writes is what the chip sees.

Reading memory runs no code of the host: tensors are of the exact types `numpy.ndarray`, `torch.Tensor` or
`torch.nn.Parameter`, their methods are looked up on these types and not on the object, and PyTorch's function and
dispatch overrides, of subclasses and of modes, are off meanwhile.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.digest import (
    DEFAULT_ALGORITHM,
    DTYPE_SIZES,
    Digest,
    digest_bytes,
    digest_list,
    digest_tensor,
)

__all__ = [
    "REGION_KINDS",
    "DeviceMemory",
    "MemoryCopy",
    "Region",
    "RegionEntry",
    "parse_table",
    "simulate_device",
    "table_digest",
]

REGION_KINDS = ("weight", "gradient", "optimizer", "buffer")
_MAX_REGIONS = 1 << 20
_MAX_DIMENSIONS = 32

# By type, since the text of a data type may be the host's. The first name of each type is its own.
_NUMPY_DTYPES = {
    type(np.dtype(code)): str(np.dtype(code)) for code in "?bBhHiIlLqQefdFD" if str(np.dtype(code)) in DTYPE_SIZES
}

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionEntry:
    """A line of the region table: where a slice lies in which tensor. `name` is the tensor's, unique within a kind."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    elements: int

    def __post_init__(self) -> None:
        texts, sizes = (self.name, self.kind, self.dtype), (self.offset, self.elements)
        if any(type(text) is not str for text in texts) or type(self.shape) is not tuple:
            raise CallerError("a region's name, kind and dtype are of type str, its shape is of type tuple")
        if any(type(size) is not int for size in (*sizes, *self.shape)):
            raise CallerError("a region's offset, elements and sizes are of type int")
        if not self.name:
            raise CallerError("a region needs a name")
        if self.kind not in REGION_KINDS:
            raise CallerError(f"region {self.name!r}: kind {self.kind!r} is none of {', '.join(REGION_KINDS)}")
        if self.dtype not in DTYPE_SIZES:
            raise CallerError(f"region {self.name!r}: unknown dtype {self.dtype!r}")
        if self.offset < 0 or self.elements < 0 or any(size < 0 for size in self.shape):
            raise CallerError(f"region {self.name!r}: negative size or offset")
        if self.offset + self.elements > math.prod(self.shape):
            raise CallerError(
                f"region {self.name!r}: elements {self.offset} to {self.offset + self.elements} "
                f"do not lie in shape {self.shape}"
            )

    @property
    def key(self) -> str:
        """What names the region in a memory digest; a tensor may have several slices on one chip."""
        return f"{self.kind}/{self.name}@{self.offset}"

    @property
    def byte_count(self) -> int:
        return self.elements * DTYPE_SIZES[self.dtype]

    def to_json(self) -> dict[str, object]:
        return {
            "dtype": self.dtype,
            "elements": self.elements,
            "kind": self.kind,
            "name": self.name,
            "offset": self.offset,
            "shape": list(self.shape),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A slice of a live tensor: `elements` from `offset` on in the flattened `tensor`.

    `tensor` is a torch tensor (any device) or a numpy array, no subclass of either, contiguous, of `dtype` and `shape`;
    it is looked at anew at each snapshot, so `tensor.data = …` is seen. bfloat16, float16, bool and integers are read
    as bytes. A region over the meta device describes memory and has none: `view` and `check_readable` refuse it.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    tensor: Any
    entry: RegionEntry = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entry = RegionEntry(
            name=self.name,
            kind=self.kind,
            dtype=self.dtype,
            shape=self.shape,
            offset=self.offset,
            elements=self.elements,
        )
        object.__setattr__(self, "entry", entry)
        with without_overrides():
            _check_tensor(entry, _on_host(self.tensor))

    @classmethod
    def of(
        cls, name: str, tensor: Any, *, kind: str = "weight", offset: int = 0, elements: int | None = None
    ) -> Region:
        """Return the region for `elements` of `tensor` from `offset` on (to the end by default)."""
        with without_overrides():
            held = _on_host(tensor)
            check_plain(name, held)
            shape, dtype = tuple(held.shape), _dtype_name(held)
        count = math.prod(shape) - offset if elements is None else elements
        return cls(name=name, kind=kind, dtype=dtype, shape=shape, offset=offset, elements=count, tensor=tensor)

    def view(self) -> _Bytes:
        """Return the slice's bytes, shared with the tensor on a CPU and copied from another device.

        Raises:
            CallerError: the tensor no longer has the dtype, shape or layout of the region.
        """
        with without_overrides():
            held = _on_host(self.tensor)
            _check_tensor(self.entry, held)
            _check_present(self.name, held)
            return _flat_bytes(held, self.entry.offset, self.entry.elements)

    def check_readable(self) -> None:
        """Read no element as a snapshot would read some; wrapped and lazily conjugated tensors fail here.

        Raises:
            CallerError: the tensor has no bytes of its own.
        """
        with without_overrides():
            _check_tensor(self.entry, _on_host(self.tensor))
            _check_present(self.name, _on_host(self.tensor))
            _check_readable(self.name, _on_host(self.tensor))


class MemoryCopy:
    """Bytes of a device memory at one moment; nobody else holds them."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[RegionEntry, _Bytes]]) -> None:
        self._parts = tuple(parts)

    def refill(self, views: Sequence[_Bytes]) -> MemoryCopy:
        """Copy `views` into this copy's buffers, region by region."""
        for (_, buffer), view in zip(self._parts, views, strict=True):
            np.copyto(buffer, view)
        return self

    def digest(self, algorithm: str = DEFAULT_ALGORITHM) -> Digest:
        """Return the same digest as the memory had."""
        return _digest(self._parts, algorithm)

    def region_digests(self, algorithm: str = DEFAULT_ALGORITHM) -> dict[str, Digest]:
        """Return each region's digest by its key, for saying which one differs."""
        return {entry.key: _region_digest(entry, data, algorithm) for entry, data in self._parts}


class DeviceMemory:
    """The regions one chip holds, in the order given.

    The digest does not depend on the order; two memories have one digest exactly if they have the same regions (kind,
    name, dtype, shape, offset, length) with the same bytes.
    """

    __slots__ = ("_regions",)

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = tuple(regions)
        if not self._regions:
            raise CallerError("a device memory needs at least one region")
        _check_keys([region.entry for region in self._regions])

    @classmethod
    def from_table(cls, table: object, tensors: Mapping[tuple[str, str], Any]) -> DeviceMemory:
        """Return the memory that the declared `table` describes over `tensors`, keyed by (kind, name).

        Raises:
            EvidenceError: malformed table, or a region whose tensor is missing or has another dtype or shape.
        """
        regions = []
        for entry in parse_table(table):
            tensor = tensors.get((entry.kind, entry.name))
            if tensor is None:
                raise EvidenceError(f"region table names the {entry.kind} {entry.name!r}, which does not exist")
            try:
                regions.append(
                    Region(
                        name=entry.name, kind=entry.kind, dtype=entry.dtype, shape=entry.shape,
                        offset=entry.offset, elements=entry.elements, tensor=tensor,
                    )
                )  # fmt: skip
            except CallerError as error:
                raise EvidenceError(f"region table: {error}") from None
        return cls(regions)

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    def owned(self) -> DeviceMemory:
        """Return the same memory as an object that nobody else holds, ready for a snapshot.

        Raises:
            CallerError: a region is no `Region`, or can't be read.
        """
        for region in self._regions:
            if type(region) is not Region:
                raise CallerError("a device memory consists of objects of type Region")
            region.check_readable()
        return DeviceMemory(self._regions)

    @property
    def byte_count(self) -> int:
        return sum(region.entry.byte_count for region in self._regions)

    def table(self) -> list[dict[str, object]]:
        """Return the region table, ready for JSON."""
        return [region.entry.to_json() for region in self._regions]

    def table_digest(self) -> Digest:
        return table_digest(self.table())

    def copy(self, reuse: MemoryCopy | None = None) -> MemoryCopy:
        """Return an owned copy of all regions' bytes; it takes over the buffers of `reuse`, an older copy, if given.

        Fresh buffers cost more than the copying: the system hands them out page by page.
        """
        if reuse is not None:
            return reuse.refill([region.view() for region in self._regions])
        return MemoryCopy([(region.entry, region.view().copy()) for region in self._regions])

    def digest(self, algorithm: str = DEFAULT_ALGORITHM) -> Digest:
        """Return the digest over the list of the regions' typed digests, without a copy."""
        return _digest([(region.entry, region.view()) for region in self._regions], algorithm)


def table_digest(table: Sequence[Mapping[str, object]]) -> Digest:
    """Return the digest of a region table as JSON; the order of its lines counts."""
    return digest_bytes("region-table", canonical.encode([dict(line) for line in table]))


def parse_table(table: object) -> list[RegionEntry]:
    """Return the lines of a region table that came as evidence.

    Raises:
        EvidenceError: empty, malformed, or two lines with one key; names the line.
    """
    if not isinstance(table, list) or not 0 < len(table) <= _MAX_REGIONS:
        raise EvidenceError("region table is not a list with at least one region")
    entries = [_parse_entry(number, line) for number, line in enumerate(table)]
    try:
        _check_keys(entries)
    except CallerError as error:
        raise EvidenceError(f"region table: {error}") from None
    return entries


def _parse_entry(number: int, line: object) -> RegionEntry:
    if not isinstance(line, dict) or set(line) != {"dtype", "elements", "kind", "name", "offset", "shape"}:
        raise EvidenceError(f"region table, line {number}: fields are missing or unknown")
    shape = line["shape"]
    texts = all(type(line[name]) is str for name in ("dtype", "kind", "name"))
    if not texts or not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise EvidenceError(f"region table, line {number}: malformed")
    if not all(type(size) is int and size < 1 << 63 for size in (line["elements"], line["offset"], *shape)):
        raise EvidenceError(f"region table, line {number}: malformed size")
    try:
        return RegionEntry(**{**line, "shape": tuple(shape)})
    except CallerError as error:
        raise EvidenceError(f"region table, line {number}: {error}") from None


def _check_keys(entries: Sequence[RegionEntry]) -> None:
    seen = set()
    for entry in entries:
        if entry.key in seen:
            raise CallerError(f"two regions are {entry.key!r}")
        seen.add(entry.key)


def _digest(parts: Sequence[tuple[RegionEntry, _Bytes]], algorithm: str) -> Digest:
    return digest_list("device-memory", [(entry.key, _region_digest(entry, data, algorithm)) for entry, data in parts])


def _region_digest(entry: RegionEntry, data: _Bytes, algorithm: str) -> Digest:
    return digest_tensor(
        name=f"{entry.kind}/{entry.name}",
        dtype=entry.dtype,
        shape=entry.shape,
        offset=entry.offset,
        data=data,
        algorithm=algorithm,
    )


_SIMULATED: dict[type, Callable[[Any], Any]] = {}
"""How the memory of a simulated device is read, by the exact class of its tensors."""


def simulate_device(tensor_class: type, held: Callable[[Any], Any]) -> None:
    """Let chips hold the tensors of a simulated device; `held` returns the plain tensor that stands for its memory.

    Class and function are simulated silicon, like this module, and no part of the host's program: only whoever builds
    the device into the simulation calls this, once in a process.

    Raises:
        CallerError: there is another simulated device already.
    """
    if _SIMULATED and tensor_class not in _SIMULATED:
        raise CallerError("there is another simulated device already")
    _SIMULATED.setdefault(tensor_class, held)


def _on_host(tensor: Any) -> Any:
    """Return what holds a tensor's bytes: itself, but for the tensors of a simulated device."""
    held = _SIMULATED.get(type(tensor))
    return tensor if held is None else held(tensor)


def check_plain(name: str, tensor: Any) -> None:
    """Check that a tensor is what it is by type, and no subclass, whose methods are the host's.

    Raises:
        CallerError: it is anything else.
    """
    kind: type = type(tensor)
    if kind is np.ndarray:
        return
    torch = _torch()
    if torch is None or kind not in (torch.Tensor, torch.nn.Parameter):
        raise CallerError(
            f"region {name!r}: is of type {kind.__name__!r:.100}, not a plain NumPy array or torch tensor"
        )

    if tensor.is_nested or tensor.layout is not torch.strided:
        raise CallerError(f"region {name!r}: tensor is sparse or nested")


def _dtype_name(tensor: Any) -> str:
    if isinstance(tensor, np.ndarray):
        name = _NUMPY_DTYPES.get(type(tensor.dtype))
        return name if name is not None and tensor.dtype.isnative else "of another kind"
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(entry: RegionEntry, tensor: Any) -> None:
    check_plain(entry.name, tensor)
    if _dtype_name(tensor) != entry.dtype:
        raise CallerError(f"region {entry.name!r}: tensor is {_dtype_name(tensor)}, not {entry.dtype}")
    if tuple(tensor.shape) != entry.shape:
        raise CallerError(f"region {entry.name!r}: tensor has shape {tuple(tensor.shape)}, not {entry.shape}")
    numpy = isinstance(tensor, np.ndarray)
    contiguous = tensor.flags.c_contiguous if numpy else _torch().Tensor.is_contiguous(tensor)
    if not contiguous:
        raise CallerError(f"region {entry.name!r}: tensor is not contiguous")


def _flat_bytes(tensor: Any, offset: int, elements: int) -> _Bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)[offset : offset + elements].view(np.uint8)
    bytes_view: _Bytes = _flat(tensor, offset, elements).cpu().numpy()
    return bytes_view


def _flat(tensor: Any, offset: int, elements: int) -> Any:
    # The method of the class: a tensor's own attribute of that name would be the host's.
    return _torch().Tensor.detach(tensor).reshape(-1)[offset : offset + elements].view(_torch().uint8)


def _check_present(name: str, tensor: Any) -> None:
    if isinstance(tensor, np.ndarray):
        return
    if tensor.device.type == "meta":
        raise CallerError(f"region {name!r}: tensor has no memory")


def _check_readable(name: str, tensor: Any) -> None:
    if isinstance(tensor, np.ndarray):
        return
    try:
        _flat(tensor, 0, 0).cpu().clone().numpy()  # the clone leaves the tensor's storage resizable
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise CallerError(f"region {name!r}: the bytes of its tensor can't be read: {text}") from None


@contextmanager
def without_overrides() -> Iterator[None]:
    """Switch off what Python code can put before PyTorch's operators: overrides of subclasses and modes."""
    torch = _torch()
    if torch is None:
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _torch() -> Any:
    """Return PyTorch if it is loaded: without it there is no tensor of its types."""
    return sys.modules.get("torch")
