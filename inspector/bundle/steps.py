"""Opened steps of a run: leaves with proofs that the lab's signed head holds them (RFC 9162, sections 2.1.3, 2.1.4)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree, canonical, decode_base64, verify_consistency, verify_inclusion
from monitor.sharding import Layout
from monitor.transcript import Leaf
from monitor.transcript.manifest import Manifest

__all__ = ["Opened", "open_steps"]

_KEYS = {"leaves", "roots"}


def open_steps(leaves: Iterable[Leaf], tree: MerkleTree, sizes: Iterable[int]) -> bytes:
    """The leaves, each with its proof of inclusion, and the root of each earlier size with its proof of consistency."""
    data = {
        "leaves": {
            str(leaf.step): {
                "leaf": base64.b64encode(leaf.encoded()).decode(),
                "proof": [each.hex() for each in tree.inclusion_proof(leaf.step)],
            }
            for leaf in leaves
        },
        "roots": {
            str(size): {"root": tree.root(size).hex(), "proof": [each.hex() for each in tree.consistency_proof(size)]}
            for size in sizes
        },
    }
    return canonical.encode(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Leaves and roots that the head proves: ``leaves`` by step, ``roots`` by number of leaves."""

    leaves: Mapping[int, Leaf]
    roots: Mapping[int, bytes]

    @classmethod
    def read(cls, data: bytes, head: Manifest, layout: Layout) -> Opened:
        """Parse and check every proof; EvidenceError if one does not hold."""
        parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
        if not isinstance(parsed, dict) or set(parsed) != _KEYS:
            raise EvidenceError("opened steps have missing or extra keys")
        size = head.steps + 1
        leaves, roots = {}, {}
        for step, entry in _numbered(parsed["leaves"], {"leaf", "proof"}):
            encoded = decode_base64(entry["leaf"])
            verify_inclusion(leaf=encoded, index=step, size=size, proof=_hashes(entry["proof"]), root=head.root)
            leaf = Leaf.decode(encoded, layout)
            if leaf.step != step:
                raise EvidenceError(f"leaf {step} holds step {leaf.step}")
            if leaf.encoded() != encoded:
                raise EvidenceError(f"leaf {step} is not in its canonical form")
            leaves[step] = leaf
        for old, entry in _numbered(parsed["roots"], {"root", "proof"}):
            [root] = _hashes([entry["root"]])
            verify_consistency(old=old, new=size, old_root=root, new_root=head.root, proof=_hashes(entry["proof"]))
            roots[old] = root
        return cls(leaves=leaves, roots=roots)


def _numbered(entries: object, keys: set[str]) -> list[tuple[int, dict[str, object]]]:
    if not isinstance(entries, dict):
        raise EvidenceError("opened steps are malformed")
    found = []
    for text, entry in entries.items():
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and str(int(text)) == text):
            raise EvidenceError("an opened step's number is malformed")
        if not isinstance(entry, dict) or set(entry) != keys:
            raise EvidenceError("an opened step is malformed")
        found.append((int(text), entry))
    return found


def _hashes(texts: object) -> list[bytes]:
    if not isinstance(texts, list) or not all(isinstance(each, str) and len(each) == 64 for each in texts):
        raise EvidenceError("a proof is malformed")
    try:
        return [bytes.fromhex(each) for each in texts]
    except ValueError:
        raise EvidenceError("a proof is malformed") from None
