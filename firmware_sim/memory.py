"""Device memory: the regions of real tensors that a chip holds.

A region is a contiguous slice of a tensor's storage, flattened in row-major order. Nothing is copied until a snapshot:
what the training writes is what the chip sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

__all__ = ["REGION_KINDS", "DeviceMemory", "MemoryCopy", "Region", "RegionEntry", "parse_table", "table_digest"]

REGION_KINDS = ("weight", "gradient", "optimizer", "buffer")
_MAX_REGIONS = 1 << 20
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

    `tensor` is a torch tensor (any device) or a numpy array, contiguous, of `dtype` and `shape`; it is looked at anew
    at each snapshot, so `tensor.data = …` is seen. bfloat16, float16, bool and integers are read as bytes.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    tensor: Any

    def __post_init__(self) -> None:
        _check_tensor(self.entry, self.tensor)

    @classmethod
    def of(
        cls, name: str, tensor: Any, *, kind: str = "weight", offset: int = 0, elements: int | None = None
    ) -> Region:
        """Return the region for `elements` of `tensor` from `offset` on (to the end by default)."""
        shape = tuple(int(size) for size in tensor.shape)
        count = math.prod(shape) - offset if elements is None else elements
        return cls(
            name=name, kind=kind, dtype=_dtype_name(tensor), shape=shape, offset=offset, elements=count, tensor=tensor
        )

    @property
    def entry(self) -> RegionEntry:
        return RegionEntry(
            name=self.name,
            kind=self.kind,
            dtype=self.dtype,
            shape=self.shape,
            offset=self.offset,
            elements=self.elements,
        )

    def view(self) -> _Bytes:
        """Return the slice's bytes, shared with the tensor on a CPU and copied from another device.

        Raises:
            CallerError: the tensor no longer has the dtype, shape or layout of the region.
        """
        _check_tensor(self.entry, self.tensor)
        return _flat_bytes(self.tensor, self.offset, self.elements)


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


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(entry: RegionEntry, tensor: Any) -> None:
    if _dtype_name(tensor) != entry.dtype:
        raise CallerError(f"region {entry.name!r}: tensor is {_dtype_name(tensor)}, not {entry.dtype}")
    if tuple(tensor.shape) != entry.shape:
        raise CallerError(f"region {entry.name!r}: tensor has shape {tuple(tensor.shape)}, not {entry.shape}")
    contiguous = tensor.flags.c_contiguous if isinstance(tensor, np.ndarray) else tensor.is_contiguous()
    if not contiguous:
        raise CallerError(f"region {entry.name!r}: tensor is not contiguous")


def _flat_bytes(tensor: Any, offset: int, elements: int) -> _Bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)[offset : offset + elements].view(np.uint8)
    import torch  # only a torch tensor comes here, so it is loaded already

    flat = tensor.detach().reshape(-1)[offset : offset + elements].view(torch.uint8)
    bytes_view: _Bytes = flat.cpu().numpy()
    return bytes_view
