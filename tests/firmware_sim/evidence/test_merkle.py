from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    EMPTY_ROOT,
    MerkleTree,
    leaf_hash,
    node_hash,
    root_of_hashes,
    verify_consistency,
    verify_inclusion,
)

# Test data of the Certificate Transparency reference implementation (RFC 6962): eight leaves, all prefixes' roots.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
INCLUSION_5_OF_8 = [
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]
CONSISTENCY_6_TO_8 = [
    "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]
CONSISTENCY_2_TO_5 = [
    "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
]


def _reference_root(leaves):
    """The definition of RFC 9162, 2.1.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + _reference_root(leaves[:split]) + _reference_root(leaves[split:])).digest()


def test_known_hashes_of_the_transparency_dev_test_suite():
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert leaf_hash(b"L123456").hex() == "395aa064aa4c29f7010acfe3f25db9485bbd4b91897b6ad7ad547639252b4d56"
    assert node_hash(b"N123", b"N456").hex() == "aa217fe888e47007fa15edab33c2b492a722cb106c64667fc2b044444de66bbb"


def test_known_roots_and_proofs_of_certificate_transparency():
    tree = MerkleTree(LEAVES)
    assert [tree.root(size).hex() for size in range(1, 9)] == ROOTS
    assert [value.hex() for value in tree.inclusion_proof(5, 8)] == INCLUSION_5_OF_8
    assert [value.hex() for value in tree.consistency_proof(6, 8)] == CONSISTENCY_6_TO_8
    assert [value.hex() for value in tree.consistency_proof(2, 5)] == CONSISTENCY_2_TO_5


@given(st.lists(st.binary(max_size=4), max_size=40))
def test_root_is_that_of_the_definition(leaves):
    tree = MerkleTree(leaves)
    assert tree.root() == _reference_root(leaves)
    assert root_of_hashes([leaf_hash(leaf) for leaf in leaves]) == tree.root()
    assert all(tree.root(size) == _reference_root(leaves[:size]) for size in range(len(leaves) + 1))


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=40), st.data())
def test_every_inclusion_proof_verifies_and_no_altered_one_does(leaves, data):
    tree = MerkleTree(leaves)
    size = data.draw(st.integers(1, len(leaves)))
    index = data.draw(st.integers(0, size - 1))
    proof = tree.inclusion_proof(index, size)
    good = {"leaf": leaves[index], "index": index, "size": size, "proof": proof, "root": tree.root(size)}
    verify_inclusion(**good)
    bad = [
        {**good, "leaf": leaves[index] + b"x"},
        {**good, "root": bytes(32)},
        {**good, "index": size},
        {**good, "index": -1},
        {**good, "proof": [*proof, bytes(32)]},
    ]
    if proof:
        altered = data.draw(st.integers(0, len(proof) - 1))
        flipped = bytes([proof[altered][0] ^ 1]) + proof[altered][1:]
        bad.append({**good, "proof": [*proof[:altered], flipped, *proof[altered + 1 :]]})
        bad.append({**good, "proof": proof[:-1]})
        bad.append({**good, "proof": [*proof[:-1], proof[-1][:-1]]})
    for case in bad:
        with pytest.raises(EvidenceError):
            verify_inclusion(**case)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=40), st.data())
def test_every_consistency_proof_verifies_and_no_altered_one_does(leaves, data):
    tree = MerkleTree(leaves)
    new = data.draw(st.integers(0, len(leaves)))
    old = data.draw(st.integers(0, new))
    proof = tree.consistency_proof(old, new)
    good = {"old": old, "new": new, "proof": proof, "old_root": tree.root(old), "new_root": tree.root(new)}
    verify_consistency(**good)
    bad = [{**good, "old_root": b"\x01" * 32}, {**good, "proof": [*proof, bytes(32)]}]
    if old:
        bad.append({**good, "new_root": b"\x01" * 32})
    for index, value in enumerate(proof):
        flipped = bytes([value[0] ^ 1]) + value[1:]
        bad.append({**good, "proof": [*proof[:index], flipped, *proof[index + 1 :]]})
        bad.append({**good, "proof": proof[:index] + proof[index + 1 :]})
    for case in bad:
        with pytest.raises(EvidenceError):
            verify_consistency(**case)


def test_proof_for_another_size_is_refused_though_its_hashes_fit():
    """The root of a smaller or larger tree must not pass for this one: the proof's length is part of the claim."""
    leaf, sibling = b"leaf", bytes(32)
    with pytest.raises(EvidenceError, match="inclusion proof of leaf 0 is too short"):
        verify_inclusion(leaf=leaf, index=0, size=2, proof=[], root=leaf_hash(leaf))
    with pytest.raises(EvidenceError, match="inclusion proof of leaf 0 is too long"):
        verify_inclusion(leaf=leaf, index=0, size=1, proof=[sibling], root=node_hash(sibling, leaf_hash(leaf)))
    first, second = MerkleTree([b"a"]).root(), node_hash(MerkleTree([b"a"]).root(), sibling)
    verify_consistency(old=1, new=2, proof=[sibling], old_root=first, new_root=second)
    with pytest.raises(EvidenceError, match="consistency proof from 1 to 3 leaves is too short"):
        verify_consistency(old=1, new=3, proof=[sibling], old_root=first, new_root=second)
    with pytest.raises(EvidenceError, match="consistency proof from 1 to 2 leaves is too long"):
        verify_consistency(
            old=1, new=2, proof=[sibling, sibling], old_root=node_hash(sibling, first),
            new_root=node_hash(sibling, second),
        )  # fmt: skip


def test_missing_consistency_proof_is_named():
    with pytest.raises(EvidenceError, match="consistency proof from 3 to 5 leaves is empty"):
        verify_consistency(old=3, new=5, proof=[], old_root=bytes(32), new_root=bytes(32))


def test_forked_tree_is_not_consistent():
    old = MerkleTree(LEAVES[:6])
    forked = MerkleTree([*LEAVES[:5], b"other", *LEAVES[6:]])
    with pytest.raises(EvidenceError, match="the tree of 8 leaves does not extend the tree of 6"):
        verify_consistency(
            old=6, new=8, proof=forked.consistency_proof(6, 8), old_root=old.root(), new_root=forked.root()
        )


def test_two_roots_of_one_size_are_named():
    with pytest.raises(EvidenceError, match="two different roots are given for 3 leaves"):
        verify_consistency(old=3, new=3, proof=[], old_root=bytes(32), new_root=b"\x01" * 32)


def test_shrunk_log_is_named():
    with pytest.raises(EvidenceError, match="a tree of 3 leaves can't extend one of 4"):
        verify_consistency(old=4, new=3, proof=[], old_root=bytes(32), new_root=bytes(32))


def test_empty_trees_root_is_checked():
    with pytest.raises(EvidenceError, match="root of the empty tree is wrong"):
        verify_consistency(old=0, new=1, proof=[], old_root=bytes(32), new_root=bytes(32))


def test_endless_proof_is_refused_before_it_is_hashed():
    with pytest.raises(EvidenceError, match="65 hashes of a Merkle proof; at most 64"):
        verify_inclusion(leaf=b"", index=0, size=1, proof=[bytes(32)] * 65, root=bytes(32))
    with pytest.raises(EvidenceError, match="65 hashes of a Merkle proof; at most 64"):
        verify_consistency(old=1, new=2, proof=[bytes(32)] * 65, old_root=bytes(32), new_root=bytes(32))
    with pytest.raises(EvidenceError, match="has 31 bytes, not 32"):
        verify_consistency(old=1, new=2, proof=[bytes(31)], old_root=bytes(32), new_root=bytes(32))


def test_questions_beyond_the_tree_are_the_callers_mistake():
    tree = MerkleTree(LEAVES)
    for question in (
        lambda: tree.root(9),
        lambda: tree.root(-1),
        lambda: tree.inclusion_proof(8),
        lambda: tree.inclusion_proof(3, 3),
        lambda: tree.consistency_proof(5, 4),
        lambda: tree.append_hash(b"short"),
    ):
        with pytest.raises(CallerError):
            question()
    assert tree.size == len(tree) == 8
    assert tree.append(b"ninth") == 8
    assert tree.root() == _reference_root([*LEAVES, b"ninth"])
