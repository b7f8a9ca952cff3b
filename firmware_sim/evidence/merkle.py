"""Merkle trees of RFC 9162 (section 2.1) over SHA-256: roots, inclusion proofs, consistency proofs.

Leaf hash = H(0x00 ‖ leaf), node hash = H(0x01 ‖ left ‖ right); the empty tree's root is H("").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError

__all__ = [
    "EMPTY_ROOT",
    "MerkleTree",
    "leaf_hash",
    "node_hash",
    "root_of_hashes",
    "verify_consistency",
    "verify_inclusion",
]

EMPTY_ROOT = hashlib.sha256(b"").digest()
_HASH_SIZE = 32


def leaf_hash(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """An append-only tree that keeps the hash of every complete subtree, in 64 bytes a leaf.

    Laws: appending costs O(1) hashes amortised, a root O(log n), a proof O(log² n); `root(size)` never changes once
    `size` leaves are there.
    """

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._levels = [bytearray()]
        for leaf in leaves:
            self.append(leaf)

    def __len__(self) -> int:
        return len(self._levels[0]) // _HASH_SIZE

    @property
    def size(self) -> int:
        return len(self)

    def append(self, leaf: bytes) -> int:
        """Add `leaf` and return its index."""
        return self.append_hash(leaf_hash(leaf))

    def append_hash(self, value: bytes) -> int:
        """Add a leaf whose `leaf_hash` is `value` and return its index."""
        if len(value) != _HASH_SIZE:
            raise CallerError(f"a leaf hash must have {_HASH_SIZE} bytes, not {len(value)}")
        index = len(self)
        self._levels[0] += value
        level, count = 0, index + 1
        while count % 2 == 0:
            if level + 1 == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level + 1] += node_hash(self._at(level, count - 2), self._at(level, count - 1))
            level, count = level + 1, count // 2
        return index

    def root(self, size: int | None = None) -> bytes:
        """Return the root over the first `size` leaves (all by default)."""
        size = self._checked_size(size)
        return EMPTY_ROOT if size == 0 else self._subtree(0, size)

    def inclusion_proof(self, index: int, size: int | None = None) -> list[bytes]:
        """Return the audit path of leaf `index` in the tree of the first `size` leaves (RFC 9162, 2.1.3.1)."""
        size = self._checked_size(size)
        if not 0 <= index < size:
            raise CallerError(f"leaf {index} is not in a tree of {size}")
        proof: list[bytes] = []
        start, end = 0, size
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(start, middle))
                start = middle
        proof.reverse()
        return proof

    def consistency_proof(self, old: int, new: int | None = None) -> list[bytes]:
        """Return the proof that the tree of `new` leaves extends the tree of `old` leaves (RFC 9162, 2.1.4.1)."""
        new = self._checked_size(new)
        if not 0 <= old <= new:
            raise CallerError(f"there is no consistency proof from {old} to {new} leaves")
        if old in (0, new):
            return []
        proof: list[bytes] = []
        start, end = 0, new
        old_is_subtree = True
        while old != end:
            middle = start + _split(end - start)
            if old <= middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(start, middle))
                start = middle
                old_is_subtree = False
        if not old_is_subtree:
            proof.append(self._subtree(start, end))
        proof.reverse()
        return proof

    def _checked_size(self, size: int | None) -> int:
        if size is None:
            return len(self)
        if not 0 <= size <= len(self):
            raise CallerError(f"tree has {len(self)} leaves, not {size}")
        return size

    def _at(self, level: int, index: int) -> bytes:
        return bytes(self._levels[level][index * _HASH_SIZE : (index + 1) * _HASH_SIZE])

    def _subtree(self, start: int, end: int) -> bytes:
        count = end - start
        if count & (count - 1) == 0:
            level = count.bit_length() - 1
            return self._at(level, start >> level)
        middle = start + _split(count)
        return node_hash(self._subtree(start, middle), self._subtree(middle, end))


def root_of_hashes(hashes: Sequence[bytes]) -> bytes:
    """Return the root of the tree with these leaf hashes, `EMPTY_ROOT` if there are none."""
    if not hashes:
        return EMPTY_ROOT
    level = list(hashes)
    while len(level) > 1:
        paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return level[0]


def verify_inclusion(*, leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that `leaf` (its bytes, not its hash) is leaf `index` of the tree (`size`, `root`); RFC 9162, 2.1.3.2.

    Raises:
        EvidenceError: it is not, or the proof is malformed.
    """
    _check_hashes(proof, root)
    if not 0 <= index < size:
        raise EvidenceError(f"leaf {index} is not in a tree of {size}")
    value = leaf_hash(leaf)
    for is_left, sibling in _siblings(proof, index, size - 1, f"inclusion proof of leaf {index}"):
        value = node_hash(sibling, value) if is_left else node_hash(value, sibling)
    if value != root:
        raise EvidenceError(f"leaf {index} is not included under the root {root.hex()}")


def verify_consistency(*, old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> None:
    """Check that the tree (`new`, `new_root`) extends (`old`, `old_root`); RFC 9162, 2.1.4.2.

    Raises:
        EvidenceError: it does not, or the proof is malformed.
    """
    _check_hashes(proof, old_root, new_root)
    if not 0 <= old <= new:
        raise EvidenceError(f"a tree of {new} leaves can't extend one of {old}")
    if old == 0 or old == new:
        if proof:
            raise EvidenceError(f"consistency proof from {old} to {new} leaves must be empty")
        if old == 0 and old_root != EMPTY_ROOT:
            raise EvidenceError("root of the empty tree is wrong")
        if old == new and old_root != new_root:
            raise EvidenceError(
                f"two different roots are given for {old} leaves: {old_root.hex()} and {new_root.hex()}"
            )
        return
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    if not path:
        raise EvidenceError(f"consistency proof from {old} to {new} leaves is empty")
    from_old = from_new = path[0]
    lowest = (old & -old).bit_length() - 1  # the level of the largest complete subtree that ends the old tree
    what = f"consistency proof from {old} to {new} leaves"
    for is_left, sibling in _siblings(path[1:], (old - 1) >> lowest, (new - 1) >> lowest, what):
        from_new = node_hash(sibling, from_new) if is_left else node_hash(from_new, sibling)
        from_old = node_hash(sibling, from_old) if is_left else from_old
    if from_old != old_root or from_new != new_root:
        raise EvidenceError(f"the tree of {new} leaves does not extend the tree of {old}")


def _siblings(proof: Sequence[bytes], node: int, last: int, what: str) -> Iterator[tuple[bool, bytes]]:
    """The hashes of a proof on the way up, each with whether it lies left of the path.

    Raises:
        EvidenceError: the proof, which is called `what`, is too long or too short.
    """
    for sibling in proof:
        if last == 0:
            raise EvidenceError(f"{what} is too long")
        is_left = bool(node & 1) or node == last
        while is_left and node and not node & 1:
            node, last = node >> 1, last >> 1
        yield is_left, sibling
        node, last = node >> 1, last >> 1
    if last != 0:
        raise EvidenceError(f"{what} is too short")


def _split(count: int) -> int:
    """Return the largest power of two below `count` (≥ 2)."""
    return 1 << ((count - 1).bit_length() - 1)


def _check_hashes(proof: Sequence[bytes], *roots: bytes) -> None:
    limits.PROOF_HASHES.check(len(proof))
    for value in (*proof, *roots):
        if len(value) != _HASH_SIZE:
            raise EvidenceError(f"a hash in a Merkle proof has {len(value)} bytes, not {_HASH_SIZE}")
