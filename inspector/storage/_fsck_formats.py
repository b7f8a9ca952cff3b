"""The formats of a run folder, written down a second time from their descriptions, with the standard library alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = [
    "WIDTHS",
    "Frontier",
    "Problem",
    "RawTensor",
    "batch_root",
    "chip_commits",
    "constants_apart",
    "labelled",
    "need",
    "open_envelope",
    "opened_state",
    "read_json",
    "sample_root",
    "tensors",
]

Buffer: TypeAlias = bytes | memoryview

_CHUNK = 1 << 20
_ALGORITHM = f"sha256-tree/{_CHUNK}"
_DTYPES = {
    "BOOL": ("bool", 1, "|b1"), "U8": ("uint8", 1, "|u1"), "I8": ("int8", 1, "|i1"), "I16": ("int16", 2, "<i2"),
    "U16": ("uint16", 2, "<u2"), "I32": ("int32", 4, "<i4"), "U32": ("uint32", 4, "<u4"), "I64": ("int64", 8, "<i8"),
    "U64": ("uint64", 8, "<u8"), "F16": ("float16", 2, "<f2"), "BF16": ("bfloat16", 2, ""),
    "F32": ("float32", 4, "<f4"), "F64": ("float64", 8, "<f8"), "C64": ("complex64", 8, "<c8"),
    "F8_E4M3": ("float8_e4m3fn", 1, ""), "F8_E5M2": ("float8_e5m2", 1, ""),
}  # fmt: skip
"""safetensors' name of a type; the project's, its bytes and NumPy's."""
WIDTHS = {name: width for name, width, _ in _DTYPES.values()}
"""Bytes of an element, by the project's names of types."""
_CHIP_RECORD = struct.Struct(">QHIQQ24x32sQQ32s32s")
_COMMIT = 8


class Problem(Exception):
    """A violation of a format in a run folder."""


def need(holds: object, text: str) -> None:
    """Problem unless something holds."""
    if not holds:
        raise Problem(text)


def read_json(data: Buffer) -> Any:
    """Parse JSON in the one form that has sorted keys, no white space and no escapes that UTF-8 does not need."""
    try:
        value = json.loads(bytes(data).decode())
        again = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise Problem(f"is not JSON: {str(error)[:80]}") from None
    need(again == bytes(data), "is not in its canonical encoding")
    return value


def open_envelope(data: bytes, kind: str, keys: Mapping[str, bytes]) -> tuple[Any, str]:
    """Payload of a DSSE envelope, and the name of the one among ``keys`` (Ed25519, 32 bytes each) that signed it."""
    envelope = read_json(data)
    need(
        isinstance(envelope, dict) and set(envelope) == {"payload", "payloadType", "signatures"},
        "is not a DSSE envelope",
    )
    need(envelope["payloadType"] == kind, "has an unexpected payload type")
    need(
        isinstance(envelope["signatures"], list) and len(envelope["signatures"]) == 1,
        "does not have exactly one signature",
    )
    signature = envelope["signatures"][0]
    need(isinstance(signature, dict) and set(signature) == {"keyid", "sig"}, "has a malformed signature")
    body, raw = _base64(envelope["payload"]), _base64(signature["sig"])
    name = {f"sha256:{labelled('ed25519-public-key', key).hex()}": lab for lab, key in keys.items()}
    need(isinstance(signature["keyid"], str) and signature["keyid"] in name, "is signed by no registered lab")
    lab = name[signature["keyid"]]
    encoded = kind.encode()
    message = b"DSSEv1 %d %b %d %b" % (len(encoded), encoded, len(body), body)
    try:
        Ed25519PublicKey.from_public_bytes(keys[lab]).verify(raw, message)
    except (InvalidSignature, ValueError):
        raise Problem("has a signature that does not verify") from None
    return read_json(body), lab


def labelled(label: str, *data: Buffer) -> bytes:
    """SHA-256 over the project's prefix, a label and data, each after its length in 8 bytes."""
    hasher = hashlib.sha256()
    hasher.update(_prefixed("chipwitness/bytes/1", label))
    hasher.update(struct.pack(">Q", sum(len(part) for part in data)))
    for part in data:
        hasher.update(part)
    return hasher.digest()


class Frontier:
    """RFC 9162 root over leaves that come one by one: the complete subtrees on the right edge, and no more."""

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, bytes]] = []

    def add(self, leaf: Buffer) -> None:
        """Add a leaf's bytes."""
        size, value = 1, hashlib.sha256(b"\x00" + bytes(leaf)).digest()
        while self._subtrees and self._subtrees[-1][0] == size:
            _, left = self._subtrees.pop()
            size, value = 2 * size, hashlib.sha256(b"\x01" + left + value).digest()
        self._subtrees.append((size, value))

    def root(self) -> bytes:
        """The root so far."""
        if not self._subtrees:
            return hashlib.sha256(b"").digest()
        value = self._subtrees[-1][1]
        for _, left in reversed(self._subtrees[:-1]):
            value = hashlib.sha256(b"\x01" + left + value).digest()
        return value


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor of a safetensors file: safetensors' name of its type, its shape and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: memoryview


def tensors(data: memoryview) -> dict[str, RawTensor]:
    """Parse safetensors: a length, a JSON header padded with spaces, then all tensors without gaps."""
    need(len(data) >= 8, "is not a safetensors file")
    length = int.from_bytes(data[:8], "little")
    need(8 + length <= len(data) and length % 8 == 0, "has a header that does not fit")
    text = bytes(data[8 : 8 + length])
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise Problem("has a header that is not JSON") from None
    compact = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    need(isinstance(header, dict), "has a malformed header")
    need(text == compact.ljust(-(-len(compact) // 8) * 8), "has a header that is not in its canonical encoding")
    found, offset = {}, 0
    for name, entry in header.items():
        need(isinstance(entry, dict) and list(entry) == ["dtype", "shape", "data_offsets"], "has a malformed header")
        shape, place = entry["shape"], entry["data_offsets"]
        need(isinstance(shape, list) and len(shape) <= 32, "has a malformed shape")
        need(all(type(size) is int and 0 <= size < 1 << 40 for size in shape), "has a malformed shape")
        need(isinstance(entry["dtype"], str) and entry["dtype"] in _DTYPES, "has a tensor of an unknown type")
        size = math.prod(shape) * _DTYPES[entry["dtype"]][1]
        need(place == [offset, offset + size], "has tensors that overlap, or a gap")
        need(8 + length + offset + size <= len(data), "ends within a tensor")
        start = 8 + length + offset
        found[name] = RawTensor(entry["dtype"], tuple(shape), data[start : start + size])
        offset += size
    need(8 + length + offset == len(data), "has bytes after its last tensor")
    return found


def batch_root(salt: bytes, step: int, content: Buffer) -> bytes:
    """Root of a batch that was not declared: one leaf, the salted digest of its file."""
    own = hmac.new(salt, b"batch" + struct.pack("<Q", step), hashlib.sha256).digest()
    frontier = Frontier()
    frontier.add(labelled("batch", own, content))
    return frontier.root()


def sample_root(salt: bytes, samples: Mapping[str, RawTensor], rows: Sequence[int]) -> bytes:
    """Root of a preset's batch: a leaf for each sample, salted by its row."""
    frontier = Frontier()
    for row in rows:
        parts: list[bytes] = [hmac.new(salt, struct.pack("<Q", row), hashlib.sha256).digest()]
        for name in sorted(samples):
            tensor = samples[name]
            need(tensor.shape and 0 <= row < tensor.shape[0], "names a sample that does not exist")
            size = len(tensor.data) // tensor.shape[0]
            header = f"{name}\0{_DTYPES[tensor.kind][2]}\0{tensor.shape[1:]}".encode()
            body = bytes(tensor.data[row * size : (row + 1) * size])
            parts += [struct.pack("<QQ", len(header), len(body)), header, body]
        frontier.add(labelled("sample", b"".join(parts)))
    return frontier.root()


def opened_state(declared: Sequence[Sequence[Any]], found: Mapping[str, RawTensor], shares: Sequence[int]) -> str:
    """What a step states of a checkpoint: hashes of the largest subtrees of its blocks between any two chips' edges.

    Where a tensor is left out, ``proof`` has the hashes of the largest subtrees of its blocks, in order.

    Args:
        declared: kind, name, type and shape of each tensor; chips share those of one kind and type by elements.
        shares: how many equal parts each chip holds.
    """
    state = {name: tensor for name, tensor in found.items() if name != "proof"}
    names = {f"{kind}/{name}" for kind, name, _, _ in declared}
    need(names == set(state) or ("proof" in found and names > set(state)), "does not hold exactly the declared tensors")
    total: Counter[tuple[str, str]] = Counter()
    for kind, name, dtype, shape in declared:
        tensor = state.get(f"{kind}/{name}")
        same = tensor is None or (_DTYPES[tensor.kind][0], list(tensor.shape)) == (dtype, shape)
        need(same, f"has a {kind}/{name} that is not as declared")
        total[kind, dtype] += math.prod(shape)
    blocks: list[bytes | str] = []
    done: Counter[tuple[str, str]] = Counter()
    need(all(type(share) is int and share > 0 for share in shares), "declares impossible shares")
    parts = list(accumulate(shares, initial=0))
    ends = [-1] * len(shares)
    edges: set[int] = set()
    for kind, name, dtype, shape in sorted(declared, key=lambda entry: (entry[0], entry[1])):
        tensor, size, first = state.get(f"{kind}/{name}"), math.prod(shape), len(blocks)
        step = _block_elements(shape, WIDTHS[dtype] if size else 0)
        if tensor is None:
            blocks += [f"{kind}/{name}"] * max(-(-size // step), 1)
        else:
            blocks += _blocks(kind, name, dtype, shape, step, tensor.data)
        for shard in range(len(shares)):
            cuts = parts[shard : shard + 2]
            low, high = (total[kind, dtype] * part // parts[-1] - done[kind, dtype] for part in cuts)
            if max(low, 0) < min(high, size):
                start = first + max(low, 0) // step
                if start > ends[shard]:
                    edges |= {start, ends[shard]}
                ends[shard] = first - -min(high, size) // step
        done[kind, dtype] += size
    sides = sorted({0, len(blocks), *edges, *ends} - {-1})
    proof = _Proof(found.get("proof"))
    opened = [proof.root(blocks[low:high]) for low, high in _aligned(sides)]
    need(not proof.rest, "has more hashes of left-out blocks than there are blocks")
    return base64.b64encode(b"".join(opened)).decode()


def chip_commits(log: memoryview) -> Iterator[tuple[str, int, bytes]]:
    """Run, step and root of each commit in a chip's log, whose records must be a chain.

    One that does not begin with record 0 follows a checkpoint, whose signer only an inspection knows.
    """
    count, rest = divmod(len(log), _CHIP_RECORD.size)
    need(count and not rest, "is not a whole number of records")
    label = b"chipwitness/chip-log-record/4"
    prefix = struct.pack(">Q", len(label)) + label + struct.pack(">Q", _CHIP_RECORD.size)
    first, *_, behind = _CHIP_RECORD.unpack(bytes(log[: _CHIP_RECORD.size]))
    previous = behind if first else bytes(32)
    for number in range(count):
        record = bytes(log[number * _CHIP_RECORD.size : (number + 1) * _CHIP_RECORD.size])
        counter, kind, _, _, _, run, step, _, digest, before = _CHIP_RECORD.unpack(record)
        need(counter == first + number and before == previous, f"breaks the hash chain at record {first + number}")
        previous = hashlib.sha256(prefix + record).digest()
        if kind == _COMMIT:
            yield run.hex(), step, digest


def _base64(text: object) -> bytes:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "*", validate=True)
    except ValueError:
        raise Problem("holds malformed base64") from None
    need(base64.b64encode(data).decode() == text, "holds malformed base64")
    return data


def _prefixed(*parts: str) -> bytes:
    return b"".join(struct.pack(">Q", len(part.encode())) + part.encode() for part in parts)


def _block_elements(shape: Sequence[int], width: int) -> int:
    """Elements of a block: whole rows, over as many of the last dimensions as a row of a mebibyte has room for."""
    row, room = 1, _CHUNK // max(width, 1)
    for number in range(len(shape)):
        longer = math.prod(shape[number:])
        if 0 < longer <= room:
            row = longer
            break
    return room // row * row


def _blocks(kind: str, name: str, dtype: str, shape: Sequence[int], step: int, data: memoryview) -> Iterator[bytes]:
    """Leaf hash of each block of a tensor; of an empty one, one without bytes."""
    size = math.prod(shape)
    prefix = b"\x00" + _prefixed("chipwitness/block/1", _ALGORITHM, kind, name, dtype)
    prefix += struct.pack(f">Q{len(shape)}Q", len(shape), *shape)
    for low in range(0, max(size, 1), step):
        high = min(low + step, size)
        hasher = hashlib.sha256(prefix + struct.pack(">QQ", low, high - low))
        hasher.update(data[low * len(data) // max(size, 1) : high * len(data) // max(size, 1)])
        yield hasher.digest()


def _aligned(cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Between any two cuts, the ranges whose length is a power of two that divides where they begin."""
    for low, high in itertools.pairwise(cuts):
        while low < high:
            size = 1
            while low % (2 * size) == 0 and low + 2 * size <= high:
                size *= 2
            yield low, low + size
            low += size


class _Proof:
    """Hashes that replace blocks which a checkpoint leaves out, taken in order."""

    def __init__(self, tensor: RawTensor | None) -> None:
        self.rest: list[bytes] = []
        if tensor is not None:
            need(tensor.kind == "U8" and tensor.shape[1:] == (32,), "has a malformed proof")
            self.rest = [bytes(tensor.data[at : at + 32]) for at in range(0, len(tensor.data), 32)]

    def root(self, hashes: Sequence[bytes | str]) -> bytes:
        """Root of a complete subtree; the name of its tensor replaces a leaf that is left out."""
        first = hashes[0]
        if isinstance(first, str) and set(hashes) == {first}:
            need(self.rest, "leaves out blocks for which it has no hash")
            return self.rest.pop(0)
        if len(hashes) == 1 and isinstance(first, bytes):
            return first
        half = len(hashes) // 2
        return hashlib.sha256(b"\x01" + self.root(hashes[:half]) + self.root(hashes[half:])).digest()


def constants_apart(program: Any) -> list[tuple[int, str]]:
    """Bytes and SHA-256, in hex, of each constant that lies outside its program."""
    apart = [each for each in program.get("constants", []) if "sha256" in each]
    widths = {**WIDTHS, "complex128": 16}
    return [(each["elements"] * widths[each["dtype"]], each["sha256"]) for each in apart]
