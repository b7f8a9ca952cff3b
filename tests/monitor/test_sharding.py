from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firmware_sim.evidence.blocks as blocks
from firmware_sim import REGION_KINDS, DeviceMemory, Region, limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Node, merge, part_digest
from firmware_sim.limits import Limit
from inspector.storage._fsck_formats import RawTensor, opened_state
from monitor.programs.bits import same_bytes
from monitor.sharding import PROOF, Layout, ShardedMemory, Slice, StateDigest
from tests.guards import off

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool")
KEYS = st.tuples(st.sampled_from(REGION_KINDS), st.sampled_from(["a", "b", "a.b", "h.10.w", "h.9.w", "é"]))
TYPES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3).map(tuple))
OTHERS = {kind: sorted({*REGION_KINDS} - {kind}) for kind in REGION_KINDS}
STATES = st.dictionaries(KEYS, TYPES, min_size=1, max_size=6)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of 32 bytes, so that a few numbers are many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 32)
        blocks.block_elements.cache_clear()
        yield
    blocks.block_elements.cache_clear()


def tensors_of(state, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(0, 2, shape, generator=generator).to(getattr(torch, dtype))
        for key, (dtype, shape) in state.items()
    }


@st.composite
def cut_anywhere(draw, state):
    """A layout over some chips whose cuts fall anywhere, so that most blocks are cut and shards differ in size."""
    chips = draw(st.integers(1, 5))
    shards: list[list[Any]] = [[] for _ in range(chips)]
    for key, (_, shape) in state.items():
        total = math.prod(shape)
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=4))})
        for low, high in pairwise(cuts):
            shards[draw(st.integers(0, chips - 1))].append(Slice(key, low, high - low))
    held = [shard for shard in shards if shard]
    return Layout(state, held) if held else None


@given(STATES, st.integers(0, 99), st.data())
def test_root_is_one_for_all_cuts_and_snapshots_follow_from_it(state, seed, data):
    layout = data.draw(cut_anywhere(state))
    if layout is None:
        return
    tensors = tensors_of(state, seed)
    memory = ShardedMemory(tensors, layout)
    digest = memory.digest()
    assert [shard.digest() for shard in memory.shards] == list(digest.shards)
    assert StateDigest.from_json(digest.to_json(), layout) == digest
    alone = Layout(state, [[Slice(key, 0, math.prod(shape)) for key, (_, shape) in state.items()]])
    order = data.draw(st.permutations(sorted(tensors)))
    assert ShardedMemory({key: tensors[key] for key in order}, alone).digest().root == digest.root


@given(STATES, st.integers(0, 99), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_shares_open_what_the_second_opinion_computes(state, seed, shares):
    """Tensors smaller than the number of chips and empty ones are among them."""
    tensors = tensors_of(state, seed)
    try:
        memory = ShardedMemory(tensors, Layout.shared(state, shares))
    except CallerError:
        groups: dict[Any, Any] = {}
        for (kind, _), (dtype, shape) in state.items():
            groups[kind, dtype] = groups.get((kind, dtype), 0) + math.prod(shape)
        cuts = [[total * part // sum(shares) for part in accumulate(shares, initial=0)] for total in groups.values()]
        assert any(all(each[chip] == each[chip + 1] for each in cuts) for chip in range(len(shares)))
        return
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "uint8": "U8"}
    raw, declared = {}, []
    for (kind, name), tensor in memory.tensors.items():
        dtype, shape = state[kind, name]
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        raw[f"{kind}/{name}"] = RawTensor(names.get(dtype, "BOOL"), shape, data)
        declared.append([kind, name, dtype, list(shape)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspector.storage._fsck_formats._CHUNK", 32)
        assert opened_state(declared, raw, shares) == memory.digest().to_json()
        absent = sorted(raw)[seed % 3 :: 2]
        proof = memory.trimmed(memory.export(), absent).get(PROOF)
        if proof is not None:
            left = {name: tensor for name, tensor in raw.items() if name not in absent}
            left["proof"] = RawTensor("U8", tuple(proof.shape), memoryview(proof.numpy().tobytes()))
            assert opened_state(declared, left, shares) == memory.digest().to_json()
    held = sum(region.elements for shard in memory.shards for region in shard.regions)
    assert held == sum(math.prod(shape) for _, shape in state.values())


@given(STATES, st.integers(0, 99), st.data())
def test_a_checkpoint_that_leaves_tensors_out_proves_the_whole_state(state, seed, data):
    layout = data.draw(cut_anywhere(state))
    if layout is None:
        return
    memory = ShardedMemory(tensors_of(state, seed), layout)
    digest, names = memory.digest(), sorted(memory.export())
    absent = frozenset(data.draw(st.sets(st.sampled_from(names))))
    held = {name: tensor.clone() for name, tensor in memory.trimmed(memory.export(), absent).items()}
    assert set(held) == set(names) - absent | ({PROOF} if absent else set())
    other = ShardedMemory(tensors_of(state, seed + 1), layout)
    left_out, restored = other.restore(held)
    assert (frozenset(left_out), restored) == (absent, digest)
    assert all(same_bytes(tensor, held.get(name, tensor * 0)) for name, tensor in other.export().items())
    written = data.draw(st.sets(st.sampled_from(sorted(absent)))) if absent else set()
    for name in written:  # the step has given these their old values again
        other.export()[name].copy_(memory.export()[name])
    assert other.digest({name: nodes for name, nodes in left_out.items() if name not in written}) == digest
    for name, tensor in held.items():
        if tensor.numel():
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[0] ^= 1
            assert other.restore({**held, name: changed})[1] != digest
    for name in sorted(absent):
        with pytest.raises(EvidenceError, match="without the hashes that replace them"):
            other.restore({name: tensor for name, tensor in held.items() if name != PROOF})
        with pytest.raises(EvidenceError, match="without the hashes that replace them"):
            other.restore({**held, PROOF: torch.cat([held[PROOF], held[PROOF][:1]])})
        with pytest.raises(EvidenceError, match="does not hold exactly"):
            other.load(held)
    with pytest.raises(EvidenceError, match="does not hold exactly the declared tensors"):
        other.restore({**held, "weight/stranger": torch.ones(1)})


@given(STATES, st.integers(0, 99), st.data())
def test_another_state_has_another_root(state, seed, data):
    tensors = tensors_of(state, seed)
    digest = ShardedMemory(tensors, whole(state)).digest()
    key = data.draw(st.sampled_from(sorted(state)))
    dtype, shape = state[key]
    others = [
        {**without(tensors, key), (key[0], key[1] + "'"): tensors[key]},
        {
            **without(tensors, key),
            (data.draw(st.sampled_from(sorted({*REGION_KINDS} - {key[0]}))), "new"): tensors[key],
        },
        {**tensors, key: tensors[key].reshape(1, *shape)},
        {**tensors, ("weight", "more"): torch.zeros(0)},
    ]
    if math.prod(shape):
        changed = tensors[key].clone()
        flat = changed.view(-1).view(torch.uint8)
        flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 if dtype == "bool" else 1 << data.draw(st.integers(0, 7))
        others.append({**tensors, key: changed})
    if dtype in ("float16", "bfloat16"):
        other = torch.bfloat16 if dtype == "float16" else torch.float16
        others.append({**tensors, key: tensors[key].view(other)})
    for held in others:
        types = {each: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for each, t in held.items()}
        assert ShardedMemory(held, whole(types)).digest().root != digest.root


def whole(state):
    return Layout(state, [[Slice(key, 0, math.prod(shape)) for key, (_, shape) in state.items()]])


def without(tensors, key):
    return {each: tensor for each, tensor in tensors.items() if each != key}


def test_swapped_blocks_are_another_root():
    tensor = torch.arange(32.0)
    memory = ShardedMemory({("weight", "w"): tensor}, 3)
    digest = memory.digest()
    held = memory.tensors["weight", "w"]
    held.copy_(torch.cat([tensor[8:16], tensor[:8], tensor[16:]]))
    assert memory.digest().root != digest.root


@given(st.integers(2, 60), st.integers(1, 5), st.data())
def test_a_multiproof_verifies_only_its_own_blocks(count, shards, data):
    """Whatever subtree is exchanged for another, the root is another or the opening is malformed."""
    state = {("weight", "w"): ("float32", (count * 8,))}
    layout = data.draw(cut_anywhere(state)) or Layout.even(state, shards)
    digest = ShardedMemory(tensors_of(state, 1), layout).digest()
    at = data.draw(st.integers(0, len(digest.hashes) - 1))
    hashes = list(digest.hashes)
    hashes[at] = bytes(32)
    forged = StateDigest(layout, tuple(hashes))
    assert forged.root != digest.root
    start, _ = layout.subtrees[at]
    for shard in range(len(layout.shards)):
        holds = any(node.start == start for node in layout.nodes_of(shard, nodes(digest)))
        assert (forged.shard(shard) != digest.shard(shard)) == holds
    other = data.draw(st.integers(0, len(digest.hashes) - 1))
    hashes = list(digest.hashes)
    hashes[at], hashes[other] = hashes[other], hashes[at]
    assert (StateDigest(layout, tuple(hashes)).root == digest.root) == (hashes == list(digest.hashes))


def nodes(digest):
    pairs = zip(digest.layout.subtrees, digest.hashes, strict=True)
    return [Node(start, size, value) for (start, size), value in pairs]


def test_a_chip_that_holds_something_else_in_a_cut_block_is_found_by_both_sides():
    state = {("weight", "w"): ("float32", (24,))}
    layout = Layout(state, [[Slice(("weight", "w"), 0, 12)], [Slice(("weight", "w"), 12, 12)]])
    memory = ShardedMemory(tensors_of(state, 1), layout)
    digest = memory.digest()
    assert layout.subtrees == [(0, 1), (1, 1), (2, 1)]
    memory.tensors["weight", "w"][13] += 1
    assert all(memory.shards[chip].digest() != digest.shard(chip) for chip in (0, 1))
    memory.tensors["weight", "w"][13] -= 1
    memory.tensors["weight", "w"][20] += 1
    assert memory.shards[0].digest() == digest.shard(0)
    assert memory.shards[1].digest() != digest.shard(1)


def test_a_snapshot_is_no_part_at_another_place():
    """The same hashes elsewhere in the tree are another snapshot."""
    leaves = [Node(number, 1, bytes([number]) * 32) for number in range(4)]
    moved = [leaf._replace(start=leaf.start + 4) for leaf in leaves]
    assert part_digest(merge(leaves)) != part_digest(merge(moved))


@pytest.mark.parametrize("change", ["short", "long", "no base64", "other base64", "number", "padding"])
def test_malformed_opening_is_refused(change):
    state = {("weight", "w"): ("float32", (80,))}
    layout = Layout.even(state, 3)
    text = ShardedMemory(tensors_of(state, 1), layout).digest().to_json()
    assert StateDigest.from_json(text, layout).to_json() == text
    bad = {
        "short": text[:-4],
        "long": text + "AAAA",
        "no base64": "*" + text[1:],
        "other base64": text[:-2] + chr(ord(text[-2]) + 1) + "=" if text.endswith("=") else text[:-1] + "=",
        "number": 5,
        "padding": text[:-4] + "====",
    }[change]
    with pytest.raises(EvidenceError, match="state digest"):
        StateDigest.from_json(bad, layout)


def test_a_shard_that_holds_nothing_is_refused():
    state = {("weight", "w"): ("float32", (2,)), ("buffer", "n"): ("int64", ())}
    with pytest.raises(CallerError, match="would hold nothing"):
        Layout.even(state, 3)
    layout = Layout.even(state, 2)
    assert [len(slices) for slices in layout.shards] == [1, 2]


def test_a_chip_with_parts_of_one_tensor_only_says_so_in_its_table():
    """Blocks that are not a chip's are in no snapshot of it; what it claims to hold stands in its region table."""
    memory = ShardedMemory({("weight", "w"): torch.arange(64.0)}, 4)
    first = memory.shards[0].regions[0]
    assert DeviceMemory([replace(first, elements=9)]).table_digest() != memory.shards[0].table_digest()
    assert isinstance(first, Region)


@pytest.mark.parametrize(
    ("guard", "state", "shards"),
    [
        ("state blocks", {("weight", "w"): ("float32", (1 << 30,))}, 1),
        ("opened subtrees", {(kind, "w"): ("float32", (33_333_333,)) for kind in REGION_KINDS[:3]}, 4096),
    ],
)
def test_declared_states_have_bounds(guard, state, shards):
    with pytest.raises(EvidenceError, match="at most"):
        Layout.even(state, shards)
    with off(guard):
        assert Layout.even(state, shards).subtrees


def test_bounds_hold_what_they_say():
    assert isinstance(limits.STATE_BLOCKS, Limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 1 << 20)
        blocks.block_elements.cache_clear()
        hundred_gb = {(kind, "w"): ("float32", (25 * 10**9 // 3,)) for kind in REGION_KINDS[:3]}
        assert len(Layout.even(hundred_gb, 4096).subtrees) <= limits.STATE_NODES.most
    blocks.block_elements.cache_clear()
