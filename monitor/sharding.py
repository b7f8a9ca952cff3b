"""Training tensors laid out in the memory of chips: flat buffers, cut into contiguous shards.

A state's root is that of its blocks (``firmware_sim.evidence.blocks``) and knows nothing of chips. What a step commits
to is the root opened as far as its chips' edges need: the largest subtrees of the tree between any two edges. They
give the root, and each chip's snapshot, by hashing alone.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import prod
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from firmware_sim import DeviceMemory, Digest, Meter, Region, limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    DTYPE_SIZES,
    Node,
    ReadyBlocks,
    TensorKey,
    TensorType,
    block_places,
    blocks_of,
    digest_bytes,
    merge,
    part_digest,
    root_digest,
    subtrees,
)

__all__ = ["PROOF", "Layout", "LeftOut", "ShardedMemory", "Slice", "StateDigest"]

PROOF = "proof"
"""Name, among a checkpoint's tensors, of the hashes that replace those that it leaves out; no tensor has such one."""
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Slice:
    """What a shard holds of one tensor: ``elements`` from ``offset`` on, flattened."""

    key: TensorKey
    offset: int
    elements: int


class Layout:
    """Which blocks of a state lie on which chips, by names, types, shapes and cuts alone.

    Attributes:
        byte_counts: what each chip holds, in bytes.
        blocks: numbers of each tensor's blocks in the tree.
        shards: what each chip holds.
        subtrees: first leaf and size of each subtree that a state's digest opens: the largest ones between any two
            edges of what chips hash.
    """

    def __init__(self, tensors: Mapping[TensorKey, TensorType], shards: Sequence[Sequence[Slice]]) -> None:
        """EvidenceError if there are more blocks or edges than are read; CallerError if a shard holds nothing."""
        places, count = block_places(tensors)
        limits.STATE_BLOCKS.check(count)
        self.blocks = {
            key: range(place, place + len(blocks_of(*tensors[key], 0, prod(tensors[key][1]))))
            for key, place in places.items()
        }
        self.shards = tuple(map(tuple, shards))
        self.byte_counts = tuple(
            sum(each.elements * DTYPE_SIZES[tensors[each.key][0]] for each in slices) for slices in self.shards
        )
        self._ranges = [self._reached(tensors, slices) for slices in self.shards]
        edges = sorted({0, count, *(edge for ranges in self._ranges for pair in ranges for edge in pair)})
        self.subtrees: list[tuple[int, int]] = []
        for start, stop in pairwise(edges):
            self.subtrees += subtrees(start, stop)
            limits.STATE_NODES.check(len(self.subtrees))
        self._starts = [start for start, _ in self.subtrees]

    @classmethod
    def even(cls, tensors: Mapping[TensorKey, TensorType], shards: int) -> Layout:
        """All of that many chips hold equal shares (``shared``)."""
        return cls.shared(tensors, (1,) * shards)

    @classmethod
    def shared(cls, tensors: Mapping[TensorKey, TensorType], shares: Sequence[int]) -> Layout:
        """Chips hold the n elements of each (kind, type), sorted by name, in proportion to their shares.

        With s shares in all, of which c are those of the chips before one, it begins at element ⌊n·c/s⌋.

        Raises:
            CallerError: a chip would hold nothing.
        """
        parts = list(accumulate(shares, initial=0))
        groups: dict[tuple[str, str], list[TensorKey]] = {}
        for key in sorted(tensors):
            groups.setdefault((key[0], tensors[key][0]), []).append(key)
        held: list[list[Slice]] = [[] for _ in shares]
        for keys in groups.values():
            total = sum(prod(tensors[key][1]) for key in keys)
            cuts = [total * part // parts[-1] for part in parts]
            start = 0
            for key in keys:
                stop = start + prod(tensors[key][1])
                for chip in range(bisect_right(cuts, start) - 1, bisect_left(cuts, stop)):
                    low, high = max(start, cuts[chip]), min(stop, cuts[chip + 1])
                    if low < high:
                        held[chip].append(Slice(key, low - start, high - low))
                start = stop
        return cls(tensors, held)

    def _reached(self, tensors: Mapping[TensorKey, TensorType], slices: Sequence[Slice]) -> list[tuple[int, int]]:
        """First and last block of each run of blocks that a shard reaches into, one after another."""
        if not slices:
            raise CallerError(
                "a shard of the state would hold nothing; there are more chips than elements, give fewer chips"
            )
        runs: list[tuple[int, int]] = []
        for each in sorted(slices, key=lambda item: (item.key, item.offset)):
            reached = blocks_of(*tensors[each.key], each.offset, each.elements)
            start, stop = (self.blocks[each.key].start + edge for edge in (reached.start, reached.stop))
            if runs and start <= runs[-1][1]:
                start, stop = runs[-1][0], max(stop, runs.pop()[1])
            runs.append((start, stop))
        return runs

    def share(self, shard: int) -> tuple[int, int]:
        """A chip's part of the state and of whatever runs on it: its bytes, and those of all chips."""
        return self.byte_counts[shard], sum(self.byte_counts)

    def nodes_of(self, shard: int, nodes: Sequence[Node]) -> list[Node]:
        """Those of a state's opened subtrees that a shard's chip hashes."""
        edges = ((bisect_left(self._starts, edge) for edge in pair) for pair in self._ranges[shard])
        return [node for low, high in edges for node in nodes[low:high]]

    def around(self, key: TensorKey, number: int) -> list[tuple[int, int]]:
        """First leaf and size of the largest subtrees of all blocks but one of a tensor's: an inclusion proof of that.

        IndexError where it has no such block.
        """
        mine, count = self.blocks[key][number], max(each.stop for each in self.blocks.values())
        return [*subtrees(0, mine), *subtrees(mine + 1, count)]

    def left_out(self, key: TensorKey) -> list[tuple[int, int]]:
        """First leaf and size of the largest subtrees of one tensor's blocks alone, each inside an opened one."""
        start, stop = self.blocks[key].start, self.blocks[key].stop
        inside = self._starts[bisect_right(self._starts, start) : bisect_left(self._starts, stop)]
        return [tree for low, high in pairwise([start, *inside, stop]) for tree in subtrees(low, high)]

    def opened(self, nodes: Sequence[Node]) -> list[Node]:
        """The opened subtrees, from nodes for all blocks in order, none of which reaches over an opened one's edge."""
        starts = [node.start for node in nodes]
        cuts = [bisect_left(starts, start) for start in self._starts] + [len(nodes)]
        return [merge(nodes[low:high])[0] for low, high in pairwise(cuts)]


@dataclass(frozen=True, slots=True, eq=False)
class StateDigest:
    """The root of one state, opened as far as the edges of its chips' memories need.

    A chip's snapshot of its shard is the digest of some of these subtrees, so an honest one is explained by the root
    of one committed step.
    """

    layout: Layout
    hashes: tuple[bytes, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateDigest) and self.hashes == other.hashes

    def __hash__(self) -> int:
        return hash(self.hashes)

    @property
    def _nodes(self) -> list[Node]:
        return [Node(*tree, value) for tree, value in zip(self.layout.subtrees, self.hashes, strict=True)]

    @property
    def root(self) -> Digest:
        """Digest of the whole state, however its parts are spread."""
        return root_digest(self._nodes)

    def shard(self, index: int) -> Digest:
        """What a chip's snapshot of its shard is."""
        return part_digest(merge(self.layout.nodes_of(index, self._nodes)))

    @property
    def shards(self) -> tuple[Digest, ...]:
        """What the chips' snapshots are, in shard order."""
        return tuple(self.shard(index) for index in range(len(self.layout.shards)))

    def to_json(self) -> str:
        """Return the subtrees' hashes, in order, as base64."""
        return base64.b64encode(b"".join(self.hashes)).decode()

    @classmethod
    def from_json(cls, data: object, layout: Layout) -> StateDigest:
        """Parse ``to_json``; EvidenceError unless it opens exactly the subtrees that the layout needs."""
        if not isinstance(data, str) or len(data) != -(-len(layout.subtrees) * _HASH_BYTES // 3) * 4:
            raise EvidenceError(f"a state digest does not open {len(layout.subtrees)} subtrees")
        try:
            raw = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise EvidenceError("a state digest is not base64") from None
        state = cls(layout, tuple(raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)))
        if len(raw) != len(layout.subtrees) * _HASH_BYTES or state.to_json() != data:
            raise EvidenceError(f"a state digest does not open {len(layout.subtrees)} subtrees")
        return state


LeftOut: TypeAlias = Mapping[str, Sequence[Node]]
"""Tensors that a checkpoint leaves out, ``kind/name``, with the hashes of their blocks."""

_NOTHING: LeftOut = MappingProxyType({})
_HOST = torch.device("cpu")
_NO_PROOF = torch.empty(0, _HASH_BYTES, dtype=torch.uint8)


class ShardedMemory:
    """All training state as views into flat buffers, cut over ``shards`` chips.

    Tensors lie wherever they lie: Adam keeps its step counters on the host. The tensors that training writes *are* the
    chips' memory: nothing is copied before a snapshot.

    Attributes:
        layout: where the blocks lie; chips share the memory evenly by default (``Layout.even``).
        place: where the training computes; a few tensors may lie on the host all the same.
        buffers: flat, one for each kind, type and device, and for each tensor without elements.
        spots: of each tensor, the number of the buffer in which it lies, and its first element there.
        shards: the memory of each chip.
        meter: what counts the operators that run on it, for all chips.
    """

    def __init__(self, tensors: Mapping[TensorKey, Tensor], shards: int | Layout) -> None:
        """Lay out ``tensors``; their values are copied into the flat buffers."""
        self.tensors: dict[TensorKey, Tensor] = {}
        self.buffers: list[Tensor] = []
        self.spots: dict[TensorKey, tuple[int, int]] = {}
        others = {tensor.device for tensor in tensors.values()} - {_HOST}
        if len(others) > 1:
            raise CallerError(f"the state lies on several devices: {', '.join(sorted(map(str, others)))}")
        self.place = others.pop() if others else _HOST
        groups: dict[tuple[str, torch.dtype], list[TensorKey]] = {}
        for key, tensor in tensors.items():
            groups.setdefault((key[0], tensor.dtype), []).append(key)
        for keys in groups.values():
            self._lay_out({key: tensors[key] for key in keys})
        types = {key: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for key, each in tensors.items()}
        self.layout = Layout.even(types, shards) if isinstance(shards, int) else shards
        self.meter = Meter()
        self.shards = [
            DeviceMemory(
                (self._region(each, self.tensors[each.key]) for each in slices),
                meter=self.meter,
                share=self.layout.share(number),
            )
            for number, slices in enumerate(self.layout.shards)
        ]
        self._whole = DeviceMemory(
            self._region(Slice(key, 0, each.numel()), each) for key, each in self.tensors.items()
        )
        self._ready: ReadyBlocks | None = None
        self._leaves: Sequence[Node] = ()

    def _lay_out(self, members: Mapping[TensorKey, Tensor]) -> None:
        """Copy tensors of one dtype one after another into a flat buffer on each device that has some.

        One without elements has separate memory: in the buffer nothing would distinguish it from its neighbour.
        """
        sizes: Counter[torch.device] = Counter()
        for member in members.values():
            sizes[member.device] += member.numel()
        dtype = next(iter(members.values())).dtype
        numbers = {device: number for number, device in enumerate(sizes, start=len(self.buffers))}
        self.buffers += [torch.empty(size, dtype=dtype, device=device) for device, size in sizes.items()]
        begun: Counter[torch.device] = Counter()
        for key, member in members.items():
            number, first = numbers[member.device], begun[member.device]
            begun[member.device] += member.numel()
            place = _alone(self.buffers[number][first : first + member.numel()])
            if not member.numel():
                number, first = len(self.buffers), 0
                self.buffers.append(place)
            self.tensors[key], self.spots[key] = place.view(member.shape), (number, first)
            with torch.no_grad():
                self.tensors[key].copy_(member)

    def _region(self, part: Slice, tensor: Tensor) -> Region:
        return Region(
            name=part.key[1],
            kind=part.key[0],
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=part.offset,
            elements=part.elements,
            tensor=tensor,
            place=self.layout.blocks[part.key].start,
        )

    def digest(self, left_out: LeftOut = _NOTHING) -> StateDigest:
        """Hash every block once, wherever it lies, but for what a checkpoint says of tensors that it leaves out."""
        if left_out:
            present = [region for region in self._whole.regions if _name((region.kind, region.name)) not in left_out]
            leaves = DeviceMemory(present).leaves() if present else []
            self._leaves = sorted([*leaves, *chain.from_iterable(left_out.values())])
        elif self.place != _HOST:
            self._leaves = self._whole.leaves()
        else:
            if self._ready is None:
                self._ready = ReadyBlocks(self._whole.slices())
            self._leaves = self._ready.leaves()
        return StateDigest(self.layout, tuple(node.hash for node in self.layout.opened(self._leaves)))

    @property
    def leaves(self) -> Sequence[Node]:
        """Hashes of the blocks, as ``digest`` found them last."""
        return self._leaves

    def leaves_of(self, state: Mapping[str, Tensor]) -> list[Node]:
        """Hashes of the blocks of these tensors, as they would be if the memory held them."""
        keys = {_name(key): key for key in self.tensors}
        held = ((keys[name], each) for name, each in state.items())
        return DeviceMemory(self._region(Slice(key, 0, each.numel()), each) for key, each in held).leaves()

    def proof(self, leaves: Sequence[Node], without: Collection[str]) -> Tensor:
        """Hashes that replace the tensors that are not ``without``: a row of 32 bytes for each subtree of theirs.

        Args:
            leaves: hashes of at least their blocks, in order.
        """
        starts = [leaf.start for leaf in leaves]
        firsts = [(bisect_left(starts, start), size) for _, (start, size) in self._trees(without)]
        hashes = b"".join(merge(leaves[first : first + size])[0].hash for first, size in firsts)
        return torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(-1, _HASH_BYTES) if hashes else _NO_PROOF

    def digest_with(self, state: Mapping[str, Tensor], proof: Tensor) -> StateDigest:
        """Digest of the state that holds these tensors, and others with these hashes; the memory stays as it is.

        Raises:
            EvidenceError: other hashes than for the blocks of the others.
        """
        left_out = self._left_out(state, proof)
        nodes = sorted([*self.leaves_of(state), *chain.from_iterable(left_out.values())])
        return StateDigest(self.layout, tuple(node.hash for node in self.layout.opened(nodes)))

    def _trees(self, without: Collection[str]) -> list[tuple[str, tuple[int, int]]]:
        """Name, first leaf and size of each subtree of the tensors that are not ``without``."""
        keys = [key for key in sorted(self.tensors) if _name(key) not in without]
        return [(_name(key), tree) for key in keys for tree in self.layout.left_out(key)]

    def _left_out(self, held: Collection[str], proof: Tensor) -> dict[str, list[Node]]:
        """What a proof says of the tensors that are not ``held``; EvidenceError if it is of other blocks."""
        trees = self._trees(held)
        if proof.dtype != torch.uint8 or proof.shape != (len(trees), _HASH_BYTES):
            count = len({name for name, _ in trees})
            raise EvidenceError(f"a checkpoint leaves {count} tensors out, without the hashes that replace them")
        left_out: dict[str, list[Node]] = {}
        for (name, tree), row in zip(trees, proof.cpu().numpy(), strict=True):
            left_out.setdefault(name, []).append(Node(*tree, row.tobytes()))
        return left_out

    def digest_of(self, kinds: Collection[str]) -> Digest:
        """Digest over the blocks of these kinds alone, as ``digest`` found them last, when none was left out.

        A block's hash binds it to its tensor's name, type and shape, and not to what else the state holds.
        """
        every = (self.layout.blocks[key] for key in sorted(self.tensors) if key[0] in kinds)
        wanted = {place for blocks in every for place in blocks}
        return digest_bytes("model", b"".join(node.hash for node in self._leaves if node.start in wanted))

    def export(self) -> dict[str, Tensor]:
        """Return all tensors under ``kind/name``: the full state W (weights, optimizer, gradients)."""
        return {_name(key): tensor for key, tensor in self.tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all memory from an exported state; EvidenceError unless names, shapes and dtypes match exactly."""
        if absent := self._missing_from(state):
            raise EvidenceError(f"a checkpoint does not hold exactly the declared tensors (first: {min(absent)})")
        self._fill(state)

    def trimmed(self, state: Mapping[str, Tensor], without: Collection[str]) -> dict[str, Tensor]:
        """A state of this layout as the checkpoint that leaves some tensors out: ``restore`` is the inverse.

        Hashes replace the blocks of those, under ``PROOF``: one of 32 bytes for each subtree (``Layout.left_out``).
        """
        kept = {name: tensor for name, tensor in state.items() if name not in without}
        absent = {name: state[name] for name in map(_name, self.tensors) if name in without}
        if absent:
            kept[PROOF] = self.proof(self.leaves_of(absent), kept.keys())
        return kept

    def restore(self, checkpoint: Mapping[str, Tensor]) -> tuple[LeftOut, StateDigest]:
        """Overwrite all memory from a checkpoint, with zeros where it leaves tensors out.

        Returns what it says of those, and the digest of the state that it is a checkpoint of.

        Raises:
            EvidenceError: other tensors than declared, or other hashes than for the blocks of those left out.
        """
        state = {name: tensor for name, tensor in checkpoint.items() if name != PROOF}
        self._missing_from(state)
        left_out = self._left_out(state, checkpoint.get(PROOF, _NO_PROOF))
        self._fill(state)
        return left_out, self.digest(left_out)

    def _missing_from(self, state: Mapping[str, Tensor]) -> frozenset[str]:
        """The tensors that a state lacks; EvidenceError if it has others, or of another type or shape."""
        mine = self.export()
        if odd := sorted(state.keys() - mine.keys()):
            raise EvidenceError(f"a checkpoint does not hold exactly the declared tensors (first: {odd[0]})")
        for name, given in state.items():
            if given.dtype != mine[name].dtype or given.shape != mine[name].shape:
                raise EvidenceError(f"checkpoint tensor {name} is {given.dtype}{list(given.shape)}, not as declared")
        return frozenset(mine.keys() - state.keys())

    def _fill(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.export().items():
                tensor.copy_(state[name]) if name in state else tensor.zero_()


def _alone(place: Tensor) -> Tensor:
    """The same memory as a storage that ends with it: libraries save no tensor that is a part of a larger storage."""
    if not place.numel():
        return torch.empty_like(place)
    if type(place) is not Tensor or place.device != _HOST:
        return place
    return torch.frombuffer(place.view(torch.uint8).numpy(), dtype=place.dtype)


def _name(key: TensorKey) -> str:
    return "/".join(key)
