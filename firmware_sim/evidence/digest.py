"""Digests that carry their algorithm, and the typed digest of a tensor.

Everything that is hashed starts with a length-prefixed label, so that no two kinds of data share an encoding.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.merkle import root_of_hashes

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BLAKE3",
    "CHUNK_BYTES",
    "DEFAULT_ALGORITHM",
    "DTYPE_SIZES",
    "SHA256",
    "SHA256_LIST",
    "BytesLike",
    "Digest",
    "chunk_hash",
    "digest_bytes",
    "digest_list",
    "digest_of_chunks",
    "digest_tensor",
    "length_prefixed",
]

BytesLike: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"

SHA256 = "sha256"
SHA256_LIST = "sha256-list"
CHUNK_BYTES = 1 << 20
DEFAULT_ALGORITHM = f"sha256-tree/{CHUNK_BYTES}"
BLAKE3 = "blake3"

_ALGORITHMS = frozenset({SHA256, SHA256_LIST, DEFAULT_ALGORITHM, BLAKE3})
_DIGEST_BYTES = 32
_THREADED_BYTES = 4 * CHUNK_BYTES

DTYPE_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

_TENSOR_LABEL = "chipwitness/tensor/1"
_LIST_LABEL = "chipwitness/list/1"
_BYTES_LABEL = "chipwitness/bytes/1"


@dataclass(frozen=True, slots=True)
class Digest:
    """A hash value and the name of the function that made it; the name holds every parameter that changes the value.

    Law: `Digest.parse(str(d)) == d`, and no other text parses to `d`.
    """

    algorithm: str
    value: bytes

    def __post_init__(self) -> None:
        if self.algorithm not in _ALGORITHMS:
            raise CallerError(f"unknown digest algorithm {self.algorithm!r}")
        if type(self.value) is not bytes or len(self.value) != _DIGEST_BYTES:
            raise CallerError(f"a {self.algorithm} digest must have {_DIGEST_BYTES} bytes")

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.value.hex()}"

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Return the digest written as `algorithm:hex` (lower case).

        Raises:
            EvidenceError: `text` is not a string of that form or names an unknown algorithm.
        """
        if not isinstance(text, str):
            raise EvidenceError(f"a digest must be text, not {type(text).__name__}")
        algorithm, _, value = text.rpartition(":")
        if algorithm not in _ALGORITHMS:
            raise EvidenceError(f"unknown digest algorithm in {text[:100]!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", value):
            raise EvidenceError(f"malformed digest {text[:100]!r}")
        return cls(algorithm, bytes.fromhex(value))


def length_prefixed(*parts: bytes | str) -> bytes:
    """Return the parts, each after its length in bytes as 8 bytes big-endian: an injective encoding of the list."""
    encoded = [part.encode("utf-8") if isinstance(part, str) else part for part in parts]
    return b"".join(struct.pack(">Q", len(part)) + part for part in encoded)


def digest_bytes(label: str, data: bytes) -> Digest:
    """Return SHA-256 over the length-prefixed label and data; another label gives an unrelated digest."""
    return Digest(SHA256, hashlib.sha256(length_prefixed(_BYTES_LABEL, label, data)).digest())


def digest_list(label: str, items: Sequence[tuple[str, Digest]], *, allow_empty: bool = False) -> Digest:
    """Return the digest of a set of named digests: sorted by name, counted, each name and digest length-prefixed.

    The order of `items` does not matter.

    Raises:
        CallerError: two items have one name, or there is none and `allow_empty` is False.
    """
    if not items and not allow_empty:
        raise CallerError(f"digest list {label!r} is empty")
    ordered = sorted(items, key=lambda item: item[0])
    for (name, _), (following, _) in itertools.pairwise(ordered):
        if name == following:
            raise CallerError(f"digest list {label!r} holds the name {name!r} twice")
    hasher = hashlib.sha256(length_prefixed(_LIST_LABEL, label))
    hasher.update(struct.pack(">Q", len(ordered)))
    for name, digest in ordered:
        hasher.update(length_prefixed(name, str(digest)))
    return Digest(SHA256_LIST, hasher.digest())


def digest_tensor(
    *,
    name: str,
    dtype: str,
    shape: Sequence[int],
    offset: int,
    data: BytesLike,
    algorithm: str = DEFAULT_ALGORITHM,
) -> Digest:
    """Return the typed digest of a contiguous slice of a tensor.

    `shape` is the whole tensor's, `offset` the index of the slice's first element in the flattened tensor, `data` the
    slice's bytes, little-endian. `sha256-tree/1048576` is SHA-256(0x02 ‖ header ‖ root), where root is the RFC 6962
    tree over 1 MiB chunks (the empty tree's root for no bytes) and header holds name, dtype, shape, offset, byte
    length, chunk size and leaf count, each length-prefixed or of fixed width. `blake3` is BLAKE3(0x02 ‖ header ‖ data).

    Raises:
        CallerError: unknown dtype or algorithm, a slice that does not lie in the tensor, BLAKE3 not installed.
    """
    if sys.byteorder != "little":
        raise CallerError("tensor digests are defined over little-endian bytes; this machine is big-endian")
    view = byte_view(data)
    header = _header(name, dtype, tuple(shape), offset, len(view), algorithm)
    if algorithm == DEFAULT_ALGORITHM:
        return Digest(algorithm, hashlib.sha256(b"\x02" + header + root_of_hashes(_chunk_hashes(view))).digest())
    if algorithm == BLAKE3:
        return Digest(algorithm, blake3_of(b"\x02" + header, view))
    raise CallerError(f"unknown digest algorithm {algorithm!r} for a tensor")


def digest_of_chunks(*, dtype: str, shape: Sequence[int], hashes: Sequence[bytes]) -> Digest:
    """The digest of a whole tensor without a name, from the hashes of its chunks of ``CHUNK_BYTES`` (``chunk_hash``).

    Raises:
        CallerError: unknown dtype, another number of hashes than the tensor has chunks, a hash of another length.
    """
    length = math.prod(shape) * DTYPE_SIZES.get(dtype, 0)
    header = _header("", dtype, tuple(shape), 0, length, DEFAULT_ALGORITHM)
    if len(hashes) != -(-length // CHUNK_BYTES) or any(len(each) != _DIGEST_BYTES for each in hashes):
        raise CallerError(
            f"{len(hashes)} hashes do not fit a tensor of {length} bytes: their number or a length is wrong"
        )
    return Digest(DEFAULT_ALGORITHM, hashlib.sha256(b"\x02" + header + root_of_hashes(hashes)).digest())


def chunk_hash(data: BytesLike) -> bytes:
    """The leaf hash of a chunk of a tensor: SHA-256(0x00 ‖ bytes)."""
    return _chunk_hash(byte_view(data))


@lru_cache(maxsize=1 << 14, typed=True)
def _header(name: str, dtype: str, shape: tuple[int, ...], offset: int, length: int, algorithm: str) -> bytes:
    """What is hashed before a slice's content, once the slice is known to lie in its tensor."""
    _check_slice(name, dtype, shape, offset, length)
    chunked = algorithm == DEFAULT_ALGORITHM
    sizes = offset, length, CHUNK_BYTES if chunked else length, -(-length // CHUNK_BYTES) if chunked else 1
    return length_prefixed(_TENSOR_LABEL, algorithm, name, dtype) + struct.pack(
        f">Q{len(shape)}QQQQQ", len(shape), *shape, *sizes
    )


def _chunk_hashes(view: memoryview) -> list[bytes]:
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    workers = 1 if len(view) < _THREADED_BYTES else min(len(chunks), os.cpu_count() or 1)
    if workers < 2:
        return [_chunk_hash(chunk) for chunk in chunks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(_chunk_hash, chunks))


def _chunk_hash(chunk: memoryview) -> bytes:
    return sha256_of(b"\x00", chunk)


def sha256_of(prefix: bytes, view: memoryview) -> bytes:
    hasher = hashlib.sha256(prefix)
    hasher.update(view)  # releases the interpreter lock; no copy of the bytes
    return hasher.digest()


def blake3_of(prefix: bytes, view: memoryview) -> bytes:
    try:
        from blake3 import blake3
    except ImportError:
        raise CallerError("algorithm blake3 needs the blake3 package: pip install 'chipwitness[blake3]'") from None
    hasher = blake3(prefix, max_threads=blake3.AUTO)
    hasher.update(view)
    return bytes(hasher.digest())


def byte_view(data: BytesLike) -> memoryview:
    try:
        view = memoryview(cast(Any, data))
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError, BufferError):
        raise CallerError("tensor bytes must be a C-contiguous buffer; view other dtypes as uint8") from None


def _check_slice(name: str, dtype: str, shape: Sequence[int], offset: int, length: int) -> None:
    if dtype not in DTYPE_SIZES:
        raise CallerError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if offset < 0 or any(size < 0 for size in shape):
        raise CallerError(f"tensor {name!r} has a negative size or offset")
    elements, rest = divmod(length, DTYPE_SIZES[dtype])
    if rest or offset + elements > math.prod(shape):
        raise CallerError(
            f"tensor {name!r}: {length} bytes of {dtype} from element {offset} do not lie in shape {tuple(shape)}"
        )
