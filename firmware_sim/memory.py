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

import ctypes
import errno
import math
import os
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import numpy as np

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
            held, place = _on_host(self.tensor), _checked_place(self.name, self.place)
            _check_tensor(self.entry, held)
            reached = blocks_of(self.dtype, self.shape, self.offset, self.elements)
            step = block_elements(self.dtype, self.shape)
            stop = min(reached.stop * step, math.prod(self.shape))
            raw = _flat_bytes(self.name, held, reached.start * step, max(stop - reached.start * step, 0))
            here = cast(_Bytes, raw) if isinstance(raw, np.ndarray) else b""
            part = BlockSlice(self.kind, self.name, self.dtype, self.shape, place, reached.start, here)
            return Pinned(part, raw, _fastened(held))

    def span(self) -> tuple[str, int, int, str]:
        """Device and addresses between which the slice itself lies, and its name."""
        with without_overrides():
            held = _on_host(self.tensor)
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
        pairs = pairs[_read_at_once(pairs) :]
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
                _read(kernel, cast(_Bytes, data).ctypes.data, memoryview(cast(Any, mine)))
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
            raise EvidenceError(f"a shard has {len(data)} bytes, and its chip holds another number")
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
            raise CallerError("a device memory has a meter, and a share of what it counts")
        if self.share[0] != max(self.byte_count, 1):
            raise CallerError(f"a memory of {self.byte_count} bytes is no share of {self.share[0]}")
        if any(type(region) is not Region for region in self._regions):
            raise CallerError("a device memory consists of objects of type Region")
        regions = [replace(region) for region in self._regions]
        mine = DeviceMemory(regions, meter=self.meter, share=self.share)
        mine._pinned = tuple(region.pinned() for region in mine._regions)
        spans = [region.span() for region in mine._regions]
        check_apart(spans)
        _check_own(spans)
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
            raise CallerError(f"two regions are {entry.key!r}")
        seen.add(entry.key)


def _digest(leaves: Iterable[Node], algorithm: str) -> Digest:
    """Two regions of one tensor may reach into the same block: it counts once, or with each content that it has."""
    return part_digest(merge(sorted(set(leaves))), algorithm)


def _checked_place(name: str, place: object) -> int:
    if type(place) is not int or not 0 <= place < _MAX_BLOCKS:
        raise CallerError(f"region {name!r}: its place among the blocks of the state is not known")
    return place


_SIMULATED: dict[type, Callable[[Any], Any]] = {}
"""How the memory of a simulated device is read, by the exact class of its tensors."""


def simulate_device(tensor_class: type, held: Callable[[Any], Any]) -> None:
    """Let chips hold the tensors of a simulated device; `held` returns the plain tensor that holds its memory.

    Class and function are simulated silicon, like this module, and no part of the host's program: only code that builds
    the device into the simulation calls this, once in a process.

    Raises:
        CallerError: there is another simulated device already.
    """
    if _SIMULATED and tensor_class not in _SIMULATED:
        raise CallerError("there is another simulated device already")
    _SIMULATED.setdefault(tensor_class, held)


def is_simulated(tensor_class: type) -> bool:
    """Whether the tensors of a class are those of a simulated device."""
    return tensor_class in _SIMULATED


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


def check_apart(spans: Iterable[tuple[str, int, int, str]]) -> None:
    """Check that two regions share all of their bytes, as tied parameters do, or none.

    Raises:
        CallerError: names two that share some.
    """
    held = sorted(span for span in spans if span[1] < span[2])
    for (device, start, stop, name), (place, begin, end, other) in pairwise(held):
        if place == device and begin < stop and (begin, end) != (start, stop):
            raise CallerError(f"regions {name!r} and {other!r} share a part of their bytes")


def _check_own(spans: Iterable[tuple[str, int, int, str]]) -> None:
    """Check that all memory of the host belongs to this process alone, by the kernel's list of its mappings.

    Raises:
        CallerError: names the region, and what else has a hand in its memory.
    """
    held = sorted((start, stop, name) for device, start, stop, name in spans if device == "cpu" and start < stop)
    if not held:
        return
    try:
        is_served = any(_link(each) == _USERFAULTFD for each in os.scandir("/proc/self/fd"))
        with open(f"/proc/self/{'smaps' if is_served else 'maps'}", "rb", buffering=0) as file:
            _check_mapped(held, _Asked(file) if not is_served and _Asked.answers(file) else _Read(file))
    except OSError:
        return


def _link(entry: os.DirEntry[str]) -> str:
    """Where an entry leads; nowhere, if it is gone: the directory has listed its own descriptor."""
    try:
        return os.readlink(entry.path)
    except OSError:
        return ""


def _check_mapped(held: Iterable[tuple[int, int, str]], mappings: _Asked | _Read) -> None:
    end = 0
    for start, stop, name in held:
        at = max(start, min(end, stop))
        while at < stop:
            end, foreign = mappings.at(at)
            if foreign or not at < end:
                raise CallerError(
                    f"region {name!r}: its memory is {foreign or 'not mapped'}; clone the tensor, so that it lies in "
                    "memory of this process alone"
                )
            at = end


class _Query(ctypes.Structure):
    """``struct procmap_query`` of Linux 6.11."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("size", "query", "address", "start", "end", "flags")),
        *((name, ctypes.c_uint64) for name in ("page_size", "offset", "inode")),
        *((name, ctypes.c_uint32) for name in ("major", "minor", "name_size", "build_id_size")),
        *((name, ctypes.c_uint64) for name in ("name", "build_id")),
    )


_PROCMAP_QUERY = 0xC0686611
_SHARED = 8
"""``PROCMAP_QUERY_VMA_SHARED``."""


class _Asked:
    """The process's mappings, one after another asked of the kernel, where it answers (Linux 6.11)."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    @classmethod
    def answers(cls, file: FileIO) -> bool:
        """Whether this kernel does."""
        return _LIBC.ioctl(file.fileno(), ctypes.c_ulong(_PROCMAP_QUERY), ctypes.byref(_asked_at(0))) == 0 or (
            ctypes.get_errno() == errno.ENOENT
        )

    def at(self, address: int) -> tuple[int, str]:
        """End of the mapping at an address, 0 if there is none; and why others have a hand in it, if they have."""
        query = _asked_at(address)
        if _LIBC.ioctl(self._file.fileno(), ctypes.c_ulong(_PROCMAP_QUERY), ctypes.byref(query)):
            return 0, ""
        return query.end, _foreign(is_shared=bool(query.flags & _SHARED), is_file=bool(query.inode))


class _Read:
    """The process's mappings, read at once; with flags that say who serves their faults, where ``smaps`` is read."""

    def __init__(self, file: FileIO) -> None:
        text = file.read()
        found, flags = _MAPPING.findall(text), _FLAGS.findall(text)
        self._mappings = [
            (
                int(start, 16),
                int(stop, 16),
                _foreign(is_shared=kind == b"s", is_file=inode != b"0", is_served=not _SERVED.isdisjoint(flag.split())),
            )
            for (start, stop, kind, inode), flag in zip(found, flags or [b""] * len(found), strict=True)
        ]
        self._starts = [start for start, _, _ in self._mappings]

    def at(self, address: int) -> tuple[int, str]:
        """End of the mapping at an address, 0 if there is none; and why others have a hand in it, if they have."""
        at = bisect_right(self._starts, address) - 1
        _, end, foreign = self._mappings[at] if at >= 0 else (0, 0, "")
        return end, foreign


def _asked_at(address: int) -> _Query:
    return _Query(size=ctypes.sizeof(_Query), address=address)


def _foreign(*, is_shared: bool, is_file: bool, is_served: bool = False) -> str:
    """Why others than this process have a hand in a mapping, if they have."""
    if is_served:
        return "served by userfaultfd"
    return "shared with other processes" if is_shared else "a mapped file" if is_file else ""


_LIBC = ctypes.CDLL(None, use_errno=True)
_USERFAULTFD = "anon_inode:[userfaultfd]"
_SERVED = frozenset((b"um", b"uw", b"ui"))
"""Flags of mappings whose faults, writes or minor faults go to a userfaultfd, see proc(5)."""
_FLAGS = re.compile(rb"^VmFlags:(.*)$", re.MULTILINE)
_MOST_SPANS = 1024
"""``IOV_MAX`` of Linux."""
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ (\d+)", re.MULTILINE)
"""A line of ``/proc/self/maps``, see proc(5)."""


class _Span(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read_at_once(pairs: Sequence[tuple[Any, Any]]) -> int:
    """Have the kernel copy this process's memory by ``process_vm_readv(2)``, as fast as a copy within a program.

    It keeps to the rights of pages; what lies behind the first page that may not be read is left to ``_read``.

    Args:
        pairs: of arrays of bytes and what is copied into them.

    Returns:
        How many of the pairs are complete.
    """
    read, done = getattr(_LIBC, "process_vm_readv", None), 0
    if read is None:
        return 0
    read.restype = ctypes.c_ssize_t
    while done < len(pairs):
        some = pairs[done : done + _MOST_SPANS]
        mine, held = (
            (_Span * len(some))(*[_Span(array.ctypes.data, array.nbytes) for array in arrays])
            for arrays in zip(*some, strict=True)
        )
        copied = int(read(os.getpid(), mine, len(some), held, len(some), 0))
        if copied != sum(array.nbytes for array, _ in some):
            sizes = accumulate(array.nbytes for array, _ in some)
            return done + sum(1 for size in sizes if size <= copied)
        done += len(some)
    return done


def _read(kernel: int, address: int, into: memoryview) -> None:
    """Have the kernel copy this process's memory from an address on."""
    done = 0
    while done < len(into):
        count = os.preadv(kernel, [into[done:]], address + done)
        if not count:
            raise OSError(errno.EFAULT, "memory is gone")
        done += count


def _flat_bytes(name: str, tensor: Any, offset: int, elements: int) -> Any:
    """The bytes of some elements, where they lie: an array in the host's memory, a tensor in any other."""
    if isinstance(tensor, np.ndarray):
        _check_present(name, tensor)
        return tensor.reshape(-1)[offset : offset + elements].view(np.uint8)
    if tensor.device.type == "meta":
        raise CallerError(f"region {name!r}: tensor has no memory")
    torch = _torch()
    try:
        # The method of the class: a tensor's own attribute of that name would be the host's.
        flat = torch.Tensor.detach(tensor).reshape(-1)[offset : offset + elements].view(torch.uint8)
        far = flat.device.type != "cpu"
        raw = flat[:0].cpu().numpy() if far else flat.numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise CallerError(f"region {name!r}: the bytes of its tensor can't be read: {text}") from None
    return flat if far else raw


def _check_present(name: str, tensor: Any) -> None:
    """Check that an array has as much memory as its shape says; torch checks that of its tensors."""
    owner, last = tensor.base, tensor
    while type(owner) is np.ndarray:  # a subclass may say anything
        owner, last = owner.base, owner
    low, high = _bounds(last) if owner is None else _buffer_bounds(owner)
    start, stop = _bounds(tensor)
    if start < stop and not low <= start < stop <= high:
        raise CallerError(f"region {name!r}: array reaches beyond the memory that it is a part of")


def _fastened(tensor: Any) -> object:
    """Keep memory where it is: NumPy resizes no array with weak references to it, and torch none that NumPy reads."""
    while type(tensor) is np.ndarray and type(tensor.base) is np.ndarray:
        tensor = tensor.base
    return weakref.ref(tensor) if type(tensor) is np.ndarray else None


def _bounds(array: Any) -> tuple[int, int]:
    """Addresses between which a contiguous array lies."""
    start = array.ctypes.data
    return start, start + array.nbytes


def _buffer_bounds(owner: Any) -> tuple[int, int]:
    """Addresses of memory that belongs to no array; nowhere, if it is of no type that says so truly."""
    if type(owner) in (bytes, bytearray, memoryview):
        return _bounds(np.frombuffer(owner, dtype=np.uint8))
    torch = _torch()
    if torch is not None and type(owner) is torch.Tensor:
        storage = torch.Tensor.untyped_storage(owner)
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return 0, 0


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
