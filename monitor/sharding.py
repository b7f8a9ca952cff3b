"""Training tensors laid out in the memory of chips: flat buffers, cut into contiguous shards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firmware_sim import DEFAULT_ALGORITHM, DeviceMemory, Digest, Region, digest_list
from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["ShardedMemory", "StateDigest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """The digests of all shards of one state, in shard order, and of the state as a whole.

    A chip's snapshot of its shard *is* one of these digests, so an honest snapshot is explained by one committed step.
    """

    shards: tuple[Digest, ...]

    @property
    def root(self) -> Digest:
        """Digest of the whole state: a sorted, counted list of the shards."""
        return digest_list("state", [(f"shard-{index:04d}", shard) for index, shard in enumerate(self.shards)])

    def to_json(self) -> list[str]:
        """Return the shard digests as text."""
        return [str(shard) for shard in self.shards]

    @classmethod
    def from_json(cls, data: object, shards: int) -> StateDigest:
        """Parse ``to_json``; EvidenceError unless there are exactly that many well-formed digests."""
        if not isinstance(data, list) or len(data) != shards:
            raise EvidenceError(f"a state digest does not list {shards} shards")
        parsed = tuple(Digest.parse(text) for text in data)
        if any(shard.algorithm != parsed[0].algorithm for shard in parsed):
            raise EvidenceError("a state digest mixes digest algorithms")
        return cls(shards=parsed)


_HOST = torch.device("cpu")


class ShardedMemory:
    """All training state as views into flat buffers, cut over ``shards`` chips.

    Chip c of N holds elements [⌊n·c/N⌋, ⌊n·(c+1)/N⌋) of the n elements of each (kind, dtype), wherever they lie: Adam
    keeps its step counters on the host. The tensors that training writes *are* the chips' memory: nothing is copied
    before a snapshot.

    Attributes:
        place: where the training computes; a few tensors may lie on the host all the same.
    """

    def __init__(self, tensors: Mapping[tuple[str, str], Tensor], shards: int) -> None:
        """Lay out ``tensors``, keyed by (kind, name); their values are copied into the flat buffers."""
        self.tensors: dict[tuple[str, str], Tensor] = {}
        others = {tensor.device for tensor in tensors.values()} - {_HOST}
        if len(others) > 1:
            raise CallerError(f"the state lies on several devices: {', '.join(sorted(map(str, others)))}")
        self.place = others.pop() if others else _HOST
        self._regions: list[list[Region]] = [[] for _ in range(shards)]
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for (kind, name), tensor in tensors.items():
            groups.setdefault((kind, tensor.dtype), []).append(name)
        for (kind, _), names in groups.items():
            self._lay_out({(kind, name): tensors[kind, name] for name in names})
            self._cut(kind, names, shards)
        self.shards = [DeviceMemory(regions) for regions in self._regions]

    def _lay_out(self, members: Mapping[tuple[str, str], Tensor]) -> None:
        """Copy tensors of one dtype one after another into a flat buffer on each device that has some."""
        sizes: Counter[torch.device] = Counter()
        for member in members.values():
            sizes[member.device] += member.numel()
        dtype = next(iter(members.values())).dtype
        rest = {device: torch.empty(size, dtype=dtype, device=device) for device, size in sizes.items()}
        for key, member in members.items():
            place, rest[member.device] = rest[member.device].tensor_split([member.numel()])
            self.tensors[key] = place.view(member.shape)
            with torch.no_grad():
                self.tensors[key].copy_(member)

    def _cut(self, kind: str, names: list[str], shards: int) -> None:
        total = sum(self.tensors[kind, name].numel() for name in names)
        bounds = [total * index // shards for index in range(shards + 1)]
        start = 0
        for name in names:
            tensor = self.tensors[kind, name]
            stop = start + tensor.numel()
            for chip in range(bisect_right(bounds, start) - 1, bisect_left(bounds, stop)):
                low, high = max(start, bounds[chip]), min(stop, bounds[chip + 1])
                if low < high:
                    self._regions[chip].append(
                        Region(
                            name=name,
                            kind=kind,
                            dtype=str(tensor.dtype).removeprefix("torch."),
                            shape=tuple(tensor.shape),
                            offset=low - start,
                            elements=high - low,
                            tensor=tensor,
                        )
                    )
            start = stop

    def digest(self, algorithm: str = DEFAULT_ALGORITHM) -> StateDigest:
        """Hash every shard as its chip would."""
        return StateDigest(shards=tuple(shard.digest(algorithm) for shard in self.shards))

    def export(self) -> dict[str, Tensor]:
        """Return all tensors under ``kind/name``: the full state W of a checkpoint (weights, optimizer, gradients)."""
        return {f"{kind}/{name}": tensor for (kind, name), tensor in self.tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all memory from an exported state; EvidenceError unless names, shapes and dtypes match exactly."""
        mine = self.export()
        if set(state) != set(mine):
            odd = sorted(set(state) ^ set(mine))[0]
            raise EvidenceError(f"a checkpoint does not hold exactly the declared tensors (first: {odd})")
        for name, tensor in mine.items():
            given = state[name]
            if given.dtype != tensor.dtype or given.shape != tensor.shape:
                raise EvidenceError(f"checkpoint tensor {name} is {given.dtype}{list(given.shape)}, not as declared")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])
