"""A state as typed blocks under one Merkle root, however its parts are spread over chips.

A tensor is cut into blocks of whole rows, at most 1 MiB each, by its type and shape alone. A block's leaf hash binds
kind, name, type, shape and place to its bytes. The blocks of all tensors, ordered by kind, name and row, are the
leaves of one RFC 9162 tree: the *root* of a state depends neither on how many chips hold it nor on their cuts.

A chip that holds some of the blocks hashes them to the largest complete subtrees that consist of its blocks alone (a
compact range) and signs a digest of that list. A block that a cut runs through is hashed by every holder of a part of
it; the others hand over the rest. They cannot help a lie: the hash fits only if all bytes do. So one list of subtrees,
fine enough for each holder's edges, is a multiproof of all their digests against the root.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from firmware_sim.errors import CallerError
from firmware_sim.evidence.digest import (
    BLAKE3,
    DEFAULT_ALGORITHM,
    DTYPE_SIZES,
    BytesLike,
    Digest,
    blake3_of,
    byte_view,
    length_prefixed,
    sha256_of,
)
from firmware_sim.evidence.merkle import EMPTY_ROOT, node_hash

__all__ = [
    "Block",
    "BlockSlice",
    "Node",
    "ReadyBlocks",
    "TensorKey",
    "TensorType",
    "block_elements",
    "block_places",
    "blocks_in",
    "blocks_of",
    "hash_blocks",
    "merge",
    "part_digest",
    "prepare",
    "root_digest",
    "subtrees",
]

BLOCK_BYTES = 1 << 20
_UNLOCKED_BYTES = BLOCK_BYTES
"""Of a share, from which on the lock costs more than making ready what does without."""
_THREADED_BYTES = 4 * BLOCK_BYTES
_BLOCK_LABEL = "chipwitness/block/1"
_PART_LABEL = "chipwitness/part/1"
_ROOT_LABEL = "chipwitness/state/1"

TensorKey: TypeAlias = tuple[str, str]
"""Kind and name of a tensor."""
TensorType: TypeAlias = tuple[str, tuple[int, ...]]
"""Its data type and shape."""


class Node(NamedTuple):
    """A complete subtree: its first leaf, its number of leaves (a power of two that divides the first), its hash."""

    start: int
    size: int
    hash: bytes


class Block(NamedTuple):
    """One block: its place among all leaves, what its hash begins with, and its bytes."""

    place: int
    header: bytes
    data: memoryview


class BlockSlice(NamedTuple):
    """Whole blocks of a tensor from its block ``first`` on; ``place`` is the index of its block 0 among all leaves."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int
    first: int
    data: BytesLike


@lru_cache(maxsize=1 << 16)
def block_elements(dtype: str, shape: tuple[int, ...]) -> int:
    """Elements of a block, but the last: as many whole rows as fit, rows over as many trailing dimensions as fit."""
    most, row = BLOCK_BYTES // DTYPE_SIZES[dtype], 1
    for size in reversed(shape):
        if not 0 < row * size <= most:
            break
        row *= size
    return most // row * row


def blocks_of(dtype: str, shape: tuple[int, ...], offset: int, elements: int) -> range:
    """The blocks of a tensor that a slice of it reaches into; an empty tensor has one block, without bytes."""
    if math.prod(shape) == 0:
        return range(1)
    step = block_elements(dtype, shape)
    return range(offset // step, -(-(offset + elements) // step) if elements else offset // step)


def block_places(tensors: Mapping[TensorKey, TensorType]) -> tuple[dict[TensorKey, int], int]:
    """Number of each tensor's first block among the blocks of all, and how many there are."""
    places, count = {}, 0
    for key in sorted(tensors):
        dtype, shape = tensors[key]
        places[key] = count
        count += len(blocks_of(dtype, shape, 0, math.prod(shape)))
    return places, count


def hash_blocks(slices: Iterable[BlockSlice], algorithm: str = DEFAULT_ALGORITHM) -> list[Node]:
    """Return the leaves of all blocks, in their order in the tree.

    Raises:
        CallerError: as `blocks_in`; BLAKE3 not installed.
    """
    shares = _shares(blocks_in(slices, algorithm))
    places = [block.place for share in shares for block in share]
    return _leaves(places, [_hashing(share, algorithm, often=False) for share in shares])


def blocks_in(slices: Iterable[BlockSlice], algorithm: str = DEFAULT_ALGORITHM) -> list[Block]:
    """Return the blocks that slices consist of; they stay good while the memory behind the slices stays where it is.

    A leaf hash is SHA-256(0x00 ‖ header ‖ bytes), the header being kind, name, data type, shape, first element and
    number of elements of the block, length-prefixed or of fixed width, and the bytes little-endian; for ``blake3`` it
    is BLAKE3 of the same.

    Raises:
        CallerError: unknown algorithm, a slice of something else than whole blocks.
    """
    if sys.byteorder != "little":
        raise CallerError("block digests are defined over little-endian bytes; this machine is big-endian")
    if algorithm not in (DEFAULT_ALGORITHM, BLAKE3):
        raise CallerError(f"unknown digest algorithm {algorithm!r} for blocks")
    blocks: list[Block] = []
    for kind, name, dtype, shape, place, first, data in slices:
        view, width, step = byte_view(data), DTYPE_SIZES[dtype], block_elements(dtype, shape)
        length, whole = len(view) // width, math.prod(shape)
        end = first * step + length
        if len(view) % width or bool(length) != bool(whole) or end > whole or (length % step and end < whole):
            raise CallerError(f"{kind} {name!r}: {len(view)} bytes from block {first} on are not whole blocks")
        prefix = _prefix(algorithm, kind, name, dtype, shape)
        for number, start in enumerate(range(0, max(length, 1), step)):
            chunk = view[start * width : (start + step) * width]
            header = prefix + struct.pack(">QQ", first * step + start, len(chunk) // width)
            blocks.append(Block(place + first + number, header, chunk))
    return blocks


class ReadyBlocks:
    """Blocks of memory that stays where it is, made ready to be hashed as often as wanted.

    Many bytes are hashed by threads that hold no interpreter lock meanwhile.
    """

    def __init__(self, slices: Iterable[BlockSlice], algorithm: str = DEFAULT_ALGORITHM) -> None:
        """Find the blocks; CallerError as from `blocks_in`."""
        shares = _shares(blocks_in(slices, algorithm))
        self._places = [block.place for share in shares for block in share]
        self._hashing = [_hashing(share, algorithm, often=True) for share in shares]

    def leaves(self) -> list[Node]:
        """Return the leaves as the blocks are now, in their order in the tree; CallerError if BLAKE3 is missing."""
        return _leaves(self._places, self._hashing)


def prepare() -> None:
    """Make ready what hashes many bytes, so that the first ones are not kept waiting for it."""
    from firmware_sim.evidence.batch_hashing import compiled

    compiled()


def _shares(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    """Cut blocks into a share for each thread that may hash some; a thread gets its share at once."""
    workers = min(len(blocks), os.cpu_count() or 1)
    if workers < 2 or sum(len(block.data) for block in blocks) < _THREADED_BYTES:
        return [blocks]
    return [blocks[number::workers] for number in range(workers)]


def _hashing(share: Sequence[Block], algorithm: str, *, often: bool) -> Callable[[], list[bytes]]:
    """Return what hashes a share of the blocks."""
    messages = [(block.header, block.data) for block in share]
    if algorithm == BLAKE3:
        return lambda: [blake3_of(*message) for message in messages]
    if often and sum(len(block.data) for block in share) >= _UNLOCKED_BYTES:
        from firmware_sim.evidence.batch_hashing import Messages

        return Messages(messages).digests
    return lambda: [sha256_of(*message) for message in messages]


def _leaves(places: Sequence[int], hashing: Sequence[Callable[[], list[bytes]]]) -> list[Node]:
    """Hash all shares, each in its own thread where there are several."""
    if len(hashing) < 2:
        digests = [digest for each in hashing for digest in each()]
    else:
        with ThreadPoolExecutor(len(hashing)) as pool:
            digests = [digest for found in pool.map(lambda each: each(), hashing) for digest in found]
    return sorted(Node(place, 1, digest) for place, digest in zip(places, digests, strict=True))


def merge(nodes: Iterable[Node]) -> list[Node]:
    """Return the largest complete subtrees that consist of these nodes, which come in order."""
    merged: list[Node] = []
    for node in nodes:
        while merged:
            left = merged[-1]
            if left.size != node.size or left.start + left.size != node.start or left.start % (2 * left.size):
                break
            merged.pop()
            node = Node(left.start, 2 * left.size, node_hash(left.hash, node.hash))
        merged.append(node)
    return merged


def subtrees(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """First leaf and size of the largest complete subtrees of the leaves ``start`` … ``stop`` - 1, in order."""
    while start < stop:
        size = 1 << ((stop - start).bit_length() - 1)
        if start:
            size = min(size, start & -start)
        yield start, size
        start += size


def part_digest(nodes: Sequence[Node], algorithm: str = DEFAULT_ALGORITHM) -> Digest:
    """Return the digest of a part of a state: of its largest subtrees (``merge``), each with its place and size."""
    hasher = hashlib.sha256(b"\x02" + length_prefixed(_PART_LABEL, algorithm) + struct.pack(">Q", len(nodes)))
    for start, size, value in nodes:
        hasher.update(struct.pack(">QQ", start, size) + value)
    return Digest(algorithm, hasher.digest())


def root_digest(nodes: Iterable[Node], algorithm: str = DEFAULT_ALGORITHM) -> Digest:
    """Return the root of a whole state, over the number of its blocks and the RFC 9162 root of its tree."""
    peaks = merge(nodes)
    value = peaks[-1].hash if peaks else EMPTY_ROOT
    for left in peaks[-2::-1]:
        value = node_hash(left.hash, value)
    count = peaks[-1].start + peaks[-1].size if peaks else 0
    header = length_prefixed(_ROOT_LABEL, algorithm) + struct.pack(">Q", count)
    return Digest(algorithm, hashlib.sha256(b"\x02" + header + value).digest())


@lru_cache(maxsize=1 << 16)
def _prefix(algorithm: str, kind: str, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    head = length_prefixed(_BLOCK_LABEL, algorithm, kind, name, dtype)
    return b"\x00" + head + struct.pack(f">Q{len(shape)}Q", len(shape), *shape)
