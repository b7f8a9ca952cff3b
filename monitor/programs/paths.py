"""Paths by which elements of a batch, or of a constant, reach what a step commits without passing a loss.

The rule: take the gradients of all losses as zero. Whatever batch and constants can then still change in the new state,
they reach *directly*. A backward pass begins with ones in the shape of the loss, a value that depends on the weights;
these seeds are what is taken as zero, so that every gradient vanishes, and with it all that reaches the state through
one. What the analysis cannot see to vanish, it lets through: it may name a path too many, never one too few.

- A number that is zero in the program counts as zero, unless the program's numbers may change from step to step, or
  it belongs to an update of the optimizer.
- A constant whose elements are all equal is a number, like the scalars of the program, and no source.
- What a batch norm writes as its running statistics is listed apart, as long as it stays in buffers and nothing else
  than batch norms computes with it.

A loss may deliver a model too: the gradient of ``(w * target).sum()`` is the target. No rule about paths sees that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from firmware_sim.errors import EvidenceError
from monitor.programs.memory import Access, Form, Memory, Spot
from monitor.programs.moves import MOVES
from monitor.programs.parts import Part, parts_of
from monitor.programs.zero import is_zero, visible

__all__ = ["Flow", "Path", "direct_paths", "flows", "seeds"]

_BATCH_NORMS = frozenset({"native_batch_norm", "native_batch_norm_backward"})
_STATISTICS = ("running_mean", "running_var")
_COMMITTED = "commit"
_KEEPING = MOVES | {"mean"}
"""What may be done with running statistics that stay running statistics: an instance norm averages them."""
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A direct path: the program's digest, the tensor that it ends in, its source, and the operator that writes there.

    Attributes:
        call: number of that operator's call; None where the tensor is the source itself.
        statistic: it ends in the running statistics of a batch norm.
    """

    program: str
    tensor: str
    source: str
    operator: str
    call: int | None
    statistic: bool

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "program": self.program,
            "tensor": self.tensor,
            "source": self.source,
            "operator": self.operator,
            "call": self.call,
            "running_statistic": self.statistic,
        }


@dataclass(frozen=True, slots=True)
class Flow:
    """Direct influences on one tensor of the new state: with all gradients zero.

    Attributes:
        direct: each source (batch, constant, or tensor of the old state) with the operator and the call that brings it.
        statistics: the same for sources that come as a batch norm's running statistics.
        used: buffers that something else than batch norms and copies computes with on the way, gradients included.
    """

    direct: Mapping[str, tuple[str, int | None]]
    statistics: Mapping[str, tuple[str, int | None]]
    used: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Value:
    """What a region may depend on, as sets of sources (bits): directly, as statistics, and by any way at all."""

    direct: int = 0
    statistics: int = 0
    used: int = 0
    zero: bool = False


@dataclass(slots=True)
class _Written:
    """A region's value, and the calls that wrote what it may depend on: (call, operator, sources)."""

    value: _Value
    calls: list[tuple[int, str, int]] = field(default_factory=list)


def flows(program: Form, state: Mapping[str, Sequence[int]] | None = None, *, is_free: bool = False) -> dict[str, Flow]:
    """Sources that reach each tensor which a program commits.

    Args:
        state: shapes of the declared state, under ``kind/name``.
        is_free: steps may give the program's numbers other values, so that none of them counts as zero.

    Raises:
        EvidenceError: a call names memory that is not its own, or has other arguments than its operator.
    """
    try:
        return _Analysis(program, state, is_free).flows()
    except _MISFITS as error:
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError("a program's call has other arguments than its operator") from None


def seeds(program: Form, state: Mapping[str, Sequence[int]] | None = None) -> frozenset[int]:
    """The calls that make the ones with which backward passes begin.

    Raises:
        EvidenceError: as ``flows``.
    """
    analysis = _Analysis(program, state, False)
    analysis.flows()
    return frozenset(analysis.seeds)


def direct_paths(
    programs: Mapping[str, Form],
    state: Mapping[str, Sequence[int]] | None = None,
    *,
    free: Collection[str] = (),
) -> list[Path]:
    """All direct paths of a run's programs, which may lead from step to step through the state.

    Args:
        programs: by digest.
        state: shapes of the declared state, under ``kind/name``.
        free: those of the programs whose numbers steps may change outside the optimizer's updates.
    """
    found = {digest: flows(program, state, is_free=digest in free) for digest, program in programs.items()}
    used = frozenset().union(*(flow.used for each in found.values() for flow in each.values()))
    dirty: dict[str, bool] = {}  # tensors of the state that hold what came directly -> only as unused statistics
    paths: dict[tuple[str, str, str], Path] = {}
    grown = True
    while grown:
        grown = False
        for digest, each in found.items():
            for tensor, flow in each.items():
                for path in _paths_into(digest, tensor, flow, dirty, used):
                    key = (digest, tensor, path.source)
                    if key in paths and (paths[key].statistic == path.statistic or not paths[key].statistic):
                        continue
                    paths[key], grown = path, True
                    dirty[tensor] = dirty.get(tensor, True) and path.statistic
    return sorted(paths.values(), key=lambda path: (path.statistic, path.tensor, path.source, path.program))


def _paths_into(
    digest: str, tensor: str, flow: Flow, dirty: Mapping[str, bool], used: frozenset[str]
) -> Iterable[Path]:
    keeps = tensor.startswith("buffer/") and tensor not in used
    for sources, statistic in ((flow.direct, False), (flow.statistics, True)):
        for source, (operator, call) in sources.items():
            name = source.removeprefix("state:")
            if source.startswith("state:") and (name not in dirty or name == tensor):
                continue
            harmless = statistic and keeps and dirty.get(name, True)
            yield Path(program=digest, tensor=tensor, source=source, operator=operator, call=call, statistic=harmless)


class _Analysis:
    def __init__(self, program: Form, state: Mapping[str, Sequence[int]] | None, is_free: bool) -> None:
        self._program = program
        self._is_free = is_free
        self._updates = {call for first, last in program.updates for call in range(first, last)}
        self._memory = Memory(program, state)
        self._sources: dict[str, int] = {}
        self.seeds: set[int] = set()
        self._weights = self._buffers = 0
        self._regions = {number: _Written(self._start(each.source)) for number, each in enumerate(self._memory.regions)}

    def flows(self) -> dict[str, Flow]:
        for access in self._memory.accesses:
            self._take(access)
        return {name: self._flow(spot) for name, spot in self._memory.commit.items()}

    def _start(self, source: str) -> _Value:
        kind, _, name = source.partition(":")
        if kind == "node":
            return _Value(zero=True)
        if kind == "constant":
            constant = self._program.constants[int(name)]
            if constant.is_uniform:
                return _Value(zero=not any(constant.unit or b""))
        bit = 1 << len(self._sources)
        self._sources[source] = bit
        if name.startswith("weight/") and kind == "state":
            self._weights |= bit
        if name.startswith("buffer/") and kind == "state":
            self._buffers |= bit
            return _Value(statistics=bit)
        return _Value(direct=bit, used=bit)

    def _take(self, access: Access) -> None:
        if access.is_view:
            return
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        inputs = [self._regions[spot.region].value for spot in access.inputs]
        if (
            parts_of(access)[0].name == "ones_like"
            and inputs[0].used & self._weights
            and access.inputs[0].elements == 1
        ):
            self.seeds.add(access.number)
        for part in parts_of(access):
            if not self._is_free and access.number not in self._updates:
                part = replace(part, others={name: self._number(value) for name, value in part.others.items()})
            values = self._outcome(part, inputs, len(access.results))
            for output in part.outputs:
                value = values.get(output, values[-1])
                self._store(access, targets[output], value, fresh=output < len(access.results))

    def _number(self, argument: Any) -> Any:
        """A fractional number in place of the scalar that stands for it; any other argument as it is."""
        if isinstance(argument, dict) and set(argument) == {"$scalar"}:
            return float.fromhex(self._program.scalars[argument["$scalar"]])
        return argument

    def _store(self, access: Access, spot: Spot, value: _Value, *, fresh: bool) -> None:
        region = self._regions[spot.region]
        if not fresh and not spot.whole:
            old = region.value
            value = _Value(
                old.direct | value.direct,
                old.statistics | value.statistics,
                old.used | value.used,
                old.zero and value.zero,
            )
        region.value = value
        region.calls.append((access.number, access.operator, value.direct | value.statistics))

    def _outcome(self, part: Part, inputs: list[_Value], returned: int) -> dict[int, _Value]:
        """Values of a part's outputs by number; -1 stands for all others."""
        if part.name == "ones_like" and inputs[0].used & self._weights:
            return {-1: _Value(zero=True)}  # the seed of a backward pass
        zeros = [value.zero for value in inputs]
        if part.name in _BATCH_NORMS:
            return self._batch_norm(part, inputs, zeros, returned)
        seen = [inputs[slot] for slot in visible(part, zeros)]
        every = [inputs[slot] for slot in part.read] if part.name not in {"copy", "fill"} else seen
        return {-1: self._joined(seen, every, part.name in _KEEPING, is_zero(part, zeros))}

    def _batch_norm(self, part: Part, inputs: list[_Value], zeros: list[bool], returned: int) -> dict[int, _Value]:
        """Running statistics may be read by a batch norm, and written by one in training."""
        mine = [slot for each in _STATISTICS for slot in part.slots.get(each, ())]
        seen = [
            _Value(value.direct, 0, value.used, value.zero) if slot in mine else value
            for slot, value in enumerate(inputs)
            if slot in part.read
        ]
        made = self._joined(seen, seen, False, is_zero(part, zeros))
        values = {-1: made}
        if part.name == "native_batch_norm":
            taken = [value for slot, value in enumerate(inputs) if slot in part.slots["input"]]
            fresh = 0
            for value in taken:
                fresh |= value.direct | value.statistics
            for output, slot in enumerate(mine, start=returned):
                old = inputs[slot]
                used = old.used
                for value in taken:
                    used |= value.used | value.statistics
                values[output] = _Value(old.direct, old.statistics | fresh, used)
        return values

    @staticmethod
    def _joined(seen: Iterable[_Value], every: Iterable[_Value], moves: bool, zero: bool) -> _Value:
        direct = statistics = used = 0
        for value in every:
            used |= value.used if moves else value.used | value.statistics
        if not zero:
            for value in seen:
                direct |= value.direct if moves else value.direct | value.statistics
                statistics |= value.statistics if moves else 0
        return _Value(direct, statistics, used, zero)

    def _flow(self, spot: Spot | None) -> Flow:
        if spot is None:
            return Flow({}, {}, frozenset())
        region = self._regions[spot.region]
        value = region.value
        return Flow(
            self._named(value.direct, region),
            self._named(value.statistics & ~value.direct, region),
            frozenset(name.removeprefix("state:") for name in self._names(value.used & self._buffers)),
        )

    def _named(self, bits: int, region: _Written) -> dict[str, tuple[str, int | None]]:
        """Each source with the last call that brings it."""
        found: dict[str, tuple[str, int | None]] = {}
        for name in self._names(bits):
            bit = self._sources[name]
            found[name] = next(
                ((operator, call) for call, operator, brought in reversed(region.calls) if brought & bit),
                (_COMMITTED, None),
            )
        return found

    def _names(self, bits: int) -> list[str]:
        return [name for name, bit in self._sources.items() if bits & bit]
