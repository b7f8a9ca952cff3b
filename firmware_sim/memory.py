"""Device memory: the regions of real tensors that a chip holds.

A region is a contiguous slice of a tensor's storage, flattened in row-major order. Nothing is copied until a snapshot:
what the training writes is what the chip sees. A chip to which memory is attached goes by addresses from then on, so
that nothing which a tensor becomes later can spoil a snapshot. A snapshot covers each block of a tensor that a region
reaches into (`firmware_sim.evidence.blocks`); the rest of a block that is cut comes from the chip that holds it.

A read of the host's memory is the chip's own act: the kernel copies it (process_vm_readv(2), and where rights of pages
forbid that, ``/proc/self/mem``, see proc(5)), so that no fault lets the host answer in its place. Memory that somebody
else may serve or change, mapped files and shared mappings, is refused by what ``/proc/self/maps`` says when it is
attached; so are pages whose faults the process has served by userfaultfd(2). Where there are no such files, as outside
of Linux, memory is copied like any other, and nothing of this is claimed; nor is it of what a host does to its page
tables later, or of a userfaultfd that another process holds alone.

Reading memory runs no code of the host: tensors are of the exact types `numpy.ndarray`, `torch.Tensor` or
`torch.nn.Parameter`, their methods are looked up on these types and not on the object, and PyTorch's function and
dispatch overrides, of subclasses and of modes, are off meanwhile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias, cast

import numpy as np

from firmware_sim._process_memory import check_own, read, read_at_once
from firmware_sim._tensors import (
    check_plain,
    dtype_name,
    fastened,
    flat_bytes,
    is_simulated,
    loaded_torch,
    on_host,
    simulate_device,
    without_overrides,
)
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.blocks import (
    BlockSlice,
    Node,
    ReadyBlocks,
    block_elements,
    block_places,
    blocks_of,
    hash_blocks,
    merge,
    part_digest,
)
from firmware_sim.evidence.digest import DEFAULT_ALGORITHM, DTYPE_SIZES, Digest, digest_bytes
from firmware_sim.meter import Meter

__all__ = [
    "REGION_KINDS",
    "DeviceMemory",
    "MemoryCopy",
    "Region",
    "RegionEntry",
    "is_simulated",
    "parse_table",
    "simulate_device",
    "table_digest",
]

REGION_KINDS = ("weight", "gradient", "optimizer", "buffer")
_MAX_REGIONS = 1 << 20
_MAX_BLOCKS = 1 << 62
_MAX_DIMENSIONS = 32

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
            raise CallerError("a region's name, kind and dtype must be of type str, and its shape of type tuple")
        if any(type(size) is not int for size in (*sizes, *self.shape)):
            raise CallerError("a region's offset, elements and sizes must be of type int")
        if not self.name:
            raise CallerError("a region needs a name")
        if self.kind not in REGION_KINDS:
            raise CallerError(f"region {self.name!r}: kind {self.kind!r} is not one of {', '.join(REGION_KINDS)}")
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
    it is looked at anew each time, so `tensor.data = …` is seen, until a chip owns the memory. bfloat16, float16, bool
    and integers are read as bytes. A region over the meta device describes memory and has none: `blocks` refuses it.
    `place` is the index of the tensor's first block among all blocks of the state that the region is a part of.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    tensor: Any
    place: int | None = None
    entry: RegionEntry = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.place is not None:
            _checked_place(self.name, self.place)
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
            _check_tensor(entry, on_host(self.tensor))

    @classmethod
    def of(
        cls, name: str, tensor: Any, *, kind: str = "weight", offset: int = 0, elements: int | None = None
    ) -> Region:
        """Return the region for `elements` of `tensor` from `offset` on (to the end by default)."""
        with without_overrides():
            held = on_host(tensor)
            check_plain(name, held)
            shape, dtype = tuple(held.shape), dtype_name(held)
        count = math.prod(shape) - offset if elements is None else elements
        return cls(name=name, kind=kind, dtype=dtype, shape=shape, offset=offset, elements=count, tensor=tensor)

    def blocks(self) -> BlockSlice:
        """Return the blocks that the slice reaches into; bytes are shared with a tensor on a CPU, copied from others.

        Raises:
            CallerError: the tensor no longer has the dtype, shape or layout of the region, or no place is known.
        """
        return self.pinned().blocks()

    def pinned(self) -> Pinned:
        """Return where the blocks lie that the slice reaches into.

        Raises:
            CallerError: as `blocks`; or the tensor has no memory, or less than its shape says.
        """
        with without_overrides():
            held, place = on_host(self.tensor), _checked_place(self.name, self.place)
            _check_tensor(self.entry, held)
            reached = blocks_of(self.dtype, self.shape, self.offset, self.elements)
            step = block_elements(self.dtype, self.shape)
            stop = min(reached.stop * step, math.prod(self.shape))
            raw = flat_bytes(self.name, held, reached.start * step, max(stop - reached.start * step, 0))
            here = cast(_Bytes, raw) if isinstance(raw, np.ndarray) else b""
            part = BlockSlice(self.kind, self.name, self.dtype, self.shape, place, reached.start, here)
            return Pinned(part, raw, fastened(held))

    def span(self) -> tuple[str, int, int, str]:
        """Device and addresses between which the slice itself lies, and its name."""
        with without_overrides():
            held = on_host(self.tensor)
            numpy = isinstance(held, np.ndarray)
            start = (held.ctypes.data if numpy else held.data_ptr()) + self.offset * DTYPE_SIZES[self.dtype]
            return "cpu" if numpy else str(held.device), start, start + self.entry.byte_count, self.name


@dataclass(frozen=True, slots=True)
class Pinned:
    """Memory of a region by its address: whatever its tensor becomes, these bytes stay there, as `fast` sees to."""

    part: BlockSlice
    raw: Any
    fast: object

    def blocks(self) -> BlockSlice:
        """Return the blocks as they are now; bytes are shared with memory of the host, copied from any other."""
        if isinstance(self.raw, np.ndarray):
            return self.part
        with without_overrides():
            return self.part._replace(data=self.raw.cpu().numpy())


class MemoryCopy:
    """Bytes of a device memory at one moment; no one else holds them."""

    __slots__ = ("_ready", "_slices")

    def __init__(self, slices: Sequence[BlockSlice]) -> None:
        self._slices = tuple(part._replace(data=np.array(part.data)) for part in slices)
        self._ready: dict[str, ReadyBlocks] = {}

    @classmethod
    def blank(cls, slices: Sequence[BlockSlice]) -> MemoryCopy:
        """Buffers for the bytes of `slices`, all of them at hand; these are not read."""
        return cls([part._replace(data=np.full(len(part.data), 0, np.uint8)) for part in slices])

    def refill(self, slices: Sequence[BlockSlice]) -> MemoryCopy:
        """Copy the bytes of `slices`, which are of the same blocks, into this copy's buffers; OSError if one fails."""
        pairs = [(mine.data, part.data) for mine, part in zip(self._slices, slices, strict=True) if len(part.data)]
        pairs = pairs[read_at_once(pairs) :]
        if not pairs:
            return self
        try:
            kernel = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            for mine, data in pairs:
                np.copyto(mine, data)  # type: ignore[arg-type, unused-ignore]
            return self
        try:
            for mine, data in pairs:
                read(kernel, cast(_Bytes, data).ctypes.data, memoryview(cast(Any, mine)))
        finally:
            os.close(kernel)
        return self

    @property
    def byte_count(self) -> int:
        """Bytes that a digest hashes."""
        return sum(len(part.data) for part in self._slices)

    def to_bytes(self) -> bytes:
        """Return the bytes, one region after another in the order of the region table; each begins with a block."""
        return b"".join(bytes(part.data) for part in self._slices)

    @classmethod
    def from_bytes(cls, data: bytes, like: DeviceMemory) -> MemoryCopy:
        """Parse `to_bytes` of a memory with the regions of another one; EvidenceError on another length."""
        parts = like.slices()
        if len(data) != sum(len(part.data) for part in parts):
            raise EvidenceError(f"a shard has {len(data)} bytes, but its chip holds a different number")
        view, start, slices = np.frombuffer(data, np.uint8), 0, []
        for part in parts:
            slices.append(part._replace(data=view[start : start + len(part.data)]))
            start += len(part.data)
        return cls(slices)

    @property
    def slices(self) -> tuple[BlockSlice, ...]:
        """What it holds of each region."""
        return self._slices

    def digest(self, algorithm: str = DEFAULT_ALGORITHM) -> Digest:
        """Return the same digest as the memory had."""
        if algorithm not in self._ready:
            self._ready[algorithm] = ReadyBlocks(self._slices, algorithm)
        return _digest(self._ready[algorithm].leaves(), algorithm)


class DeviceMemory:
    """The regions one chip holds, in the order given.

    The digest does not depend on the order; two memories have one digest exactly if their regions reach into the same
    blocks (place among all blocks, kind, name, dtype, shape, rows) with the same bytes. Regions without a place
    count as if their tensors were all of the state.

    Attributes:
        meter: counts the operators that run on the memory, of this chip and of those that hold the rest of the state.
        share: the chip's part of that: its bytes, and those of all of them.
    """

    __slots__ = ("_pinned", "_regions", "meter", "share")

    def __init__(
        self, regions: Iterable[Region], *, meter: Meter | None = None, share: tuple[int, int] | None = None
    ) -> None:
        self._regions = tuple(regions)
        self._pinned: tuple[Pinned, ...] | None = None
        self.meter = Meter() if meter is None else meter
        own = max(self.byte_count, 1)
        self.share = (own, own) if share is None else share
        if not self._regions:
            raise CallerError("a device memory needs at least one region")
        entries = [region.entry for region in self._regions]
        _check_keys(entries)
        if all(region.place is None for region in self._regions):
            places, _ = block_places({(entry.kind, entry.name): (entry.dtype, entry.shape) for entry in entries})
            placed = zip(self._regions, entries, strict=True)
            self._regions = tuple(replace(region, place=places[entry.kind, entry.name]) for region, entry in placed)

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    def owned(self) -> DeviceMemory:
        """Return the same memory as an object that no one else holds, by addresses.

        Raises:
            CallerError: a region is no `Region`, or can't be read, or shares some of its bytes with another one; or the
                meter is none, or the share no part of 1.
        """
        if type(self.meter) is not Meter or not _is_share(self.share):
            raise CallerError("a device memory needs a meter, and the share of the meter's count that belongs to it")
        if self.share[0] != max(self.byte_count, 1):
            raise CallerError(f"a memory of {self.byte_count} bytes cannot be a share of {self.share[0]} bytes")
        if any(type(region) is not Region for region in self._regions):
            raise CallerError("a device memory must consist of objects of type Region")
        regions = [replace(region) for region in self._regions]
        mine = DeviceMemory(regions, meter=self.meter, share=self.share)
        mine._pinned = tuple(region.pinned() for region in mine._regions)
        spans = [region.span() for region in mine._regions]
        check_apart(spans)
        check_own(spans)
        return mine

    def without_last(self) -> DeviceMemory:
        """The same but for the last region, if there are more, with the same share: what a chip holds that hides it."""
        hidden = DeviceMemory(self._regions[:-1] or self._regions, meter=self.meter, share=self.share)
        hidden._pinned = tuple(region.pinned() for region in hidden._regions)
        return hidden

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

        Raises:
            OSError: some of the memory is gone.
        """
        slices = self.slices()
        return (MemoryCopy.blank(slices) if reuse is None else reuse).refill(slices)

    def slices(self) -> list[BlockSlice]:
        """Return the blocks that each region reaches into; one that reaches into none has no line."""
        held = self._regions if self._pinned is None else self._pinned
        parts = [each.blocks() for each in held]
        return [part for part in parts if len(part.data) or not math.prod(part.shape)]

    def leaves(self, algorithm: str = DEFAULT_ALGORITHM) -> list[Node]:
        """Return the leaves of all blocks that the regions reach into, in order, without a copy."""
        return hash_blocks(self.slices(), algorithm)

    def digest(self, algorithm: str = DEFAULT_ALGORITHM) -> Digest:
        """Return the digest of the blocks that the regions reach into, without a copy."""
        return _digest(self.leaves(algorithm), algorithm)


def _is_share(share: object) -> bool:
    if type(share) is not tuple or [type(part) for part in share] != [int, int]:
        return False
    part, whole = cast(tuple[int, int], share)
    return 0 < part <= whole < _MAX_BLOCKS


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
            raise CallerError(f"two regions are named {entry.key!r}")
        seen.add(entry.key)


def _digest(leaves: Iterable[Node], algorithm: str) -> Digest:
    """Two regions of one tensor may reach into the same block: it counts once, or with each content that it has."""
    return part_digest(merge(sorted(set(leaves))), algorithm)


def _checked_place(name: str, place: object) -> int:
    if type(place) is not int or not 0 <= place < _MAX_BLOCKS:
        raise CallerError(
            f"memory region {name!r}: its place, the number of its first block in the state, must be 0 to "
            f"{_MAX_BLOCKS - 1}"
        )
    return place


def _check_tensor(entry: RegionEntry, tensor: Any) -> None:
    check_plain(entry.name, tensor)
    if dtype_name(tensor) != entry.dtype:
        raise CallerError(f"region {entry.name!r}: tensor is {dtype_name(tensor)}, not {entry.dtype}")
    if tuple(tensor.shape) != entry.shape:
        raise CallerError(f"region {entry.name!r}: tensor has shape {tuple(tensor.shape)}, not {entry.shape}")
    numpy = isinstance(tensor, np.ndarray)
    contiguous = tensor.flags.c_contiguous if numpy else loaded_torch().Tensor.is_contiguous(tensor)
    if not contiguous:
        raise CallerError(f"region {entry.name!r}: tensor is not contiguous")


def check_apart(spans: Iterable[tuple[str, int, int, str]]) -> None:
    """Check that two regions share all of their bytes, as tied parameters do, or none.

    Raises:
        CallerError: names two that share some.
    """
    held = sorted(span for span in spans if span[1] < span[2])
    for (device, start, stop, name), (place, begin, end, other) in pairwise(held):
        if place == device and begin < stop and (begin, end) != (start, stop):
            raise CallerError(f"regions {name!r} and {other!r} share a part of their bytes")
