"""Proofs against RFC 9162 itself: the recursive definitions of section 2.1, and sigstore's verifier."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from sigstore._internal.merkle import verify_merkle_inclusion
from sigstore.errors import VerificationError

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree, root_of_hashes, verify_consistency, verify_inclusion

SIZES = range(301)
DENSE = 100
LEAVES = [b"leaf %d" % number for number in range(max(SIZES))]
TREE = MerkleTree(LEAVES)


def _split(count):
    """The largest power of two smaller than the count."""
    power = 1
    while 2 * power < count:
        power *= 2
    return power


@cache
def _mth(start, end):
    """2.1.1: the root of leaves start … end - 1."""
    if start == end:
        return hashlib.sha256(b"").digest()
    if end - start == 1:
        return hashlib.sha256(b"\x00" + LEAVES[start]).digest()
    middle = start + _split(end - start)
    return hashlib.sha256(b"\x01" + _mth(start, middle) + _mth(middle, end)).digest()


def _path(index, start, end):
    """2.1.3.1: PATH(m, D[n])."""
    if end - start == 1:
        return []
    split = _split(end - start)
    if index < split:
        return [*_path(index, start, start + split), _mth(start + split, end)]
    return [*_path(index - split, start + split, end), _mth(start, start + split)]


def _subproof(old, start, end, known):
    """2.1.4.1: SUBPROOF(m, D[n], b)."""
    if old == end - start:
        return [] if known else [_mth(start, end)]
    split = _split(end - start)
    if old <= split:
        return [*_subproof(old, start, start + split, known), _mth(start + split, end)]
    return [*_subproof(old - split, start + split, end, False), _mth(start, start + split)]


def _roots(old, new, nodes, old_root, known=True):
    """Roots of the old and the new tree that a consistency proof gives, by the recursion that made it."""
    if old == new:
        own = old_root if known else nodes.pop(0)
        return own, own
    split = _split(new)
    first, second = _roots(
        *((old, split) if old <= split else (old - split, new - split)), nodes, old_root, known and old <= split
    )
    node = nodes.pop(0)
    if old <= split:
        return first, hashlib.sha256(b"\x01" + second + node).digest()
    return tuple(hashlib.sha256(b"\x01" + node + each).digest() for each in (first, second))


def _consistent(old, new, proof, old_root, new_root):
    nodes = list(proof)
    try:
        found = _roots(old, new, nodes, old_root)
    except IndexError:
        return False
    return not nodes and found == (old_root, new_root)


def _picked(size, draws):
    """All places of a small tree, the edges of a large one and some others."""
    if size <= DENSE:
        return range(size)
    edges = {0, 1, _split(size) - 1, _split(size), size - 2, size - 1}
    return sorted(edges | {draws.randrange(size) for _ in range(6)})


def _sigstore(leaf, index, size, proof, root):
    inclusion = SimpleNamespace(log_index=index, tree_size=size, hashes=list(proof), root_hash=root)
    entry: Any = SimpleNamespace(_inner=SimpleNamespace(inclusion_proof=inclusion, canonicalized_body=leaf))
    verify_merkle_inclusion(entry)


def test_roots_are_those_of_the_definition():
    hashes = [hashlib.sha256(b"\x00" + leaf).digest() for leaf in LEAVES]
    for size in SIZES:
        assert TREE.root(size) == root_of_hashes(hashes[:size]) == _mth(0, size)


def test_inclusion_proofs_are_those_of_the_definition():
    draws = random.Random(1)
    for size in SIZES:
        for index in _picked(size, draws):
            proof = TREE.inclusion_proof(index, size)
            assert proof == _path(index, 0, size)
            verify_inclusion(leaf=LEAVES[index], index=index, size=size, proof=proof, root=_mth(0, size))
            _sigstore(LEAVES[index], index, size, proof, _mth(0, size))


def test_consistency_proofs_are_those_of_the_definition():
    draws = random.Random(2)
    for new in SIZES:
        for old in [*_picked(new, draws), new]:
            proof = TREE.consistency_proof(old, new)
            assert proof == (_subproof(old, 0, new, True) if old else [])
            verify_consistency(old=old, new=new, proof=proof, old_root=_mth(0, old), new_root=_mth(0, new))
            assert not old or _consistent(old, new, proof, _mth(0, old), _mth(0, new))


def _flipped(value, draws):
    place = draws.randrange(8 * len(value))
    return (int.from_bytes(value, "big") ^ 1 << place).to_bytes(len(value), "big")


def _altered(proof, draws):
    """Each node with a bit flipped, left out, doubled, preceded by another, swapped with the next; and longer ends."""
    for place, node in enumerate(proof):
        before, after = proof[:place], proof[place + 1 :]
        yield [*before, _flipped(node, draws), *after]
        yield [*before, *after]
        yield [*before, node, node, *after]
        yield [*before, draws.randbytes(32), node, *after]
        if after:
            yield [*before, after[0], node, *after[1:]]
    yield [*proof, draws.randbytes(32)]


def test_altered_inclusion_proofs_are_refused_here_and_by_sigstore():
    draws = random.Random(3)
    refused = 0
    for size in SIZES[1:]:
        index = draws.randrange(size)
        good = {
            "leaf": LEAVES[index],
            "index": index,
            "size": size,
            "proof": _path(index, 0, size),
            "root": _mth(0, size),
        }
        bad = [{**good, "proof": proof} for proof in _altered(good["proof"], draws)]
        bad += [{**good, "index": other} for other in {index - 1, index + 1, draws.randrange(size)} - {-1, index, size}]
        bad += [{**good, "root": _flipped(good["root"], draws)}, {**good, "leaf": good["leaf"] + b"x"}]
        for case in bad:
            with pytest.raises(EvidenceError):
                verify_inclusion(**case)
            with pytest.raises(VerificationError):
                _sigstore(**case)
        refused += len(bad)
    assert refused > 10_000


def test_altered_consistency_proofs_are_refused_here_and_by_the_recursion():
    draws = random.Random(4)
    refused = 0
    for new in SIZES[2:]:
        old = draws.randrange(1, new)
        good = {"old": old, "new": new, "proof": TREE.consistency_proof(old, new)}
        good |= {"old_root": _mth(0, old), "new_root": _mth(0, new)}
        bad = [{**good, "proof": proof} for proof in _altered(good["proof"], draws)]
        bad += [{**good, "old": other} for other in {old - 1, old + 1, draws.randrange(1, new)} - {0, old, new}]
        bad += [{**good, name: _flipped(good[name], draws)} for name in ("old_root", "new_root")]
        for case in bad:
            with pytest.raises(EvidenceError):
                verify_consistency(**case)
            assert not _consistent(**case)
        refused += len(bad)
    assert refused > 10_000
