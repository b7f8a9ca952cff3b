"""Paths by which elements of a batch, or of a constant, reach what a step commits without passing a loss.

There are two rules.

*Directly*: take the gradients of all losses as zero. Whatever batch and constants can then still change in the new
state, they reach directly. A backward pass begins with ones in the shape of a loss, a value that depends on the
weights; these seeds are what is taken as zero, so that every gradient vanishes, and with it all that reaches the state
through one. What the analysis cannot see to vanish, it lets through: it may name a path too many, never one too few.

*Through a gradient*: what is computed from a gradient may end in gradients and, by the optimizer's updates, in weights
and in the optimizer's state. In any other tensor it is a path, whatever it was multiplied with or divided by.

- A seed is a ``ones_like`` of one element; one of several elements is a seed where it ends in gradients and in no
  later loss, as with losses by sample. Any other is a number like those of a mask.
- A gradient that the state holds between two steps is zero too, if no program leaves anything else in it.
- A number that is zero in the program counts as zero, unless the program's numbers may change from step to step, or
  it belongs to an update of the optimizer.
- A constant whose elements are all equal is a number, like the scalars of the program, and no source.
- A buffer that a program leaves as a copy of a weight, in another type or not, is one of the weights that make a loss:
  the working copy of an FP32 master.
- What a batch norm writes as its running statistics is listed apart, as long as it stays in buffers, and nothing else
  than batch norms, copies and averages computes with it.
- Buffers of at most 16 numbers in all that reach no loss and no other tensor are listed apart too: running losses,
  counters.
- A gradient scaler learns one bit a step, whether a gradient was infinite. The scale and the count that
  ``_amp_update_scale`` makes take nothing else of its inputs, so long as a program has at most 8 scalers, and a
  run at most 16 such numbers. They may be part of losses; in any other tensor a bit of theirs is a path.

A loss may deliver a model too: the gradient of ``(w * target).sum()`` is the target. No rule about paths sees that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import prod

from monitor.programs.calls import base_name
from monitor.programs.flows import FOUND_INF, GRADIENT, LOSS, OPTIMIZER, SCALER, Flow, flows
from monitor.programs.memory import Form
from monitor.programs.moves import MOVES

__all__ = ["FEW", "Path", "PathsSoFar", "differentiates", "direct_paths", "is_agreed"]

FEW = 16
"""Numbers in all that buffers may hold which reach nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A direct path: the program's digest, the tensor that it ends in, its source, and the operator that writes there.

    Attributes:
        call: number of that operator's call; None where the tensor is the source itself.
        statistic: it ends in the running statistics of a batch norm.
        few: it ends in one of few numbers that reach nothing else.
        graded: it leads through a gradient.
    """

    program: str
    tensor: str
    source: str
    operator: str
    call: int | None
    statistic: bool
    few: bool = False
    graded: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether it needs no agreement."""
        return self.statistic or self.few

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "program": self.program,
            "tensor": self.tensor,
            "source": self.source,
            "operator": self.operator,
            "call": self.call,
            "running_statistic": self.statistic,
            "few_numbers": self.few,
            "through_a_gradient": self.graded,
        }


def differentiates(program: Form) -> bool:
    """Whether a program takes a derivative that no update and no gradient of the state is for.

    Its operators tell: one of PyTorch's own of a backward pass, or the ones in the shape of a computed number with
    which such a pass begins. A derivative by hand has no name. A step whose update a gradient scaler passes over takes
    gradients of the state for the scaler, and writes what this learns into the state.
    """
    kept = ((name, place) for name, place in program.commit.items() if name.startswith(GRADIENT))
    if program.updates or any(place is not None and place["source"] != f"state:{name}" for name, place in kept):
        return False
    if _is_passed_over(program):
        return False
    for call in program.calls:
        name, places = base_name(call["operator"]), call["sources"]
        begins = name == "ones_like" and prod(places[0]["shape"]) == 1 and places[0]["source"].startswith("node:")
        if begins or ("_backward" in name and name not in MOVES and name != "unfold_backward"):  # which istft calls
            return True
    return False


def _is_passed_over(program: Form) -> bool:
    scaled = any(base_name(call["operator"]) == SCALER for call in program.calls)
    graded = any(place["source"].startswith(f"state:{GRADIENT}") for call in program.calls for place in call["sources"])
    buffers = ((name, place) for name, place in program.commit.items() if name.startswith("buffer/"))
    return scaled and graded and any(place and place["source"] != f"state:{name}" for name, place in buffers)


def is_agreed(tensor: str, patterns: Collection[str]) -> bool:
    """Whether one of the patterns names a tensor of the state, like names of files in a shell: ``buffer/*.mean``."""
    return tensor in patterns or any(fnmatchcase(tensor, pattern) for pattern in patterns)


def direct_paths(
    programs: Mapping[str, Form],
    state: Mapping[str, Sequence[int]] | None = None,
    *,
    free: Collection[str] = (),
    agreed: Collection[str] = (),
) -> list[Path]:
    """All paths of a run's programs, which may lead from step to step through the state.

    Args:
        programs: by digest.
        state: shapes of the declared state, under ``kind/name``.
        free: those of the programs whose numbers steps may change outside the optimizer's updates.
        agreed: patterns of tensors that paths may end in; these do not count among few numbers.
    """
    found = PathsSoFar(state, agreed)
    for digest, program in programs.items():
        found.add(digest, program, is_free=digest in free)
    return found.paths()


class PathsSoFar:
    """Paths of the programs that a run has had so far; each program is looked at once.

    Args:
        state, agreed: as for ``direct_paths``.
    """

    def __init__(self, state: Mapping[str, Sequence[int]] | None, agreed: Collection[str]) -> None:
        self._state, self._agreed = state, agreed
        self._flows: dict[str, dict[str, Flow]] = {}
        self._going_on: dict[str, Callable[[frozenset[str]], dict[str, Flow]]] = {}
        self._derived: set[str] = set()

    def add(self, digest: str, program: Form, *, is_free: bool) -> None:
        """Look at another program; EvidenceError as ``flows``."""
        self._flows[digest] = found = flows(program, self._state, is_free=is_free)
        if any(source.startswith(f"state:{GRADIENT}") for flow in found.values() for source in flow.direct):
            self._going_on[digest] = cache(lambda zero: flows(program, self._state, is_free=is_free, zero=zero))
        if differentiates(program):
            self._derived.add(digest)

    def paths(self) -> list[Path]:
        """All of them."""
        every = self._with_gradients_zero()
        used = frozenset().union(*(flow.used for each in every.values() for flow in each.values()))
        scaled = self._scaled()
        # Tensors of the state that hold what came directly -> only as unused statistics.
        dirty = dict.fromkeys(scaled, False)
        paths: dict[tuple[str, str, str], Path] = {}
        grown = True
        while grown:
            grown = False
            for digest, each in every.items():
                for tensor, flow in each.items():
                    for path in _paths_into(digest, tensor, flow, dirty, used) if tensor != LOSS else ():
                        if tensor in scaled and path.source.removeprefix("state:") in {FOUND_INF, *scaled}:
                            continue
                        key = (digest, tensor, path.source)
                        if key in paths and (paths[key].statistic == path.statistic or not paths[key].statistic):
                            continue
                        paths[key], grown = path, True
                        dirty[tensor] = dirty.get(tensor, True) and path.statistic
        few = self._few({path.tensor for path in paths.values() if not path.statistic})
        found = [replace(path, few=True) if path.tensor in few else path for path in paths.values()]
        return sorted(found, key=lambda path: (path.is_harmless, path.tensor, path.source, path.program))

    def _with_gradients_zero(self) -> Mapping[str, Mapping[str, Flow]]:
        """What reaches each tensor where all gradients are zero, those that steps before have left among them."""
        zero = frozenset(
            source.removeprefix("state:")
            for digest in self._going_on
            for flow in self._flows[digest].values()
            for source in flow.direct
            if source.startswith(f"state:{GRADIENT}")
        )
        while True:
            found = self._flows | {digest: known(zero) for digest, known in self._going_on.items()}
            other = {name for each in found.values() for name in zero & each.keys() if not each[name].zero}
            if not other:
                return found
            zero -= other

    def differentiating(self) -> set[str]:
        """The programs that differentiate, and put what they get into nothing of the state but few numbers."""
        flows = ((digest, flow) for digest in self._derived for flow in self._flows[digest].values())
        return self._derived - {
            digest for digest, flow in flows if flow.slope and (flow.elements is None or flow.elements > FEW)
        }

    def slopes(self) -> dict[str, tuple[str, str]]:
        """Tensors that take a gradient past all updates, each with a program and its operator.

        They hand it on to others of their size. A gradient is one of them if a loss is made of it a step later. Buffers
        of few numbers in all are left out.
        """
        found: dict[str, tuple[str, str]] = {}
        sizes: dict[str, int | None] = {}
        while more := {
            name: (digest, flow.slope or "a later step")
            for digest, each in self._flows.items()
            for name, flow in each.items()
            if name.startswith(("weight/", "buffer/", GRADIENT)) and name not in found
            if flow.slope or any(sizes[one] == flow.elements and f"state:{one}" in flow.sources for one in found)
        }:
            found |= more
            sizes |= {name: self._flows[digest][name].elements for name, (digest, _) in more.items()}
        few = sum(size if size is not None and name.startswith("buffer/") else FEW + 1 for name, size in sizes.items())
        return found if few > FEW else {}

    def _scaled(self) -> set[str]:
        """Single numbers that scalers leave, if they are few in all."""
        found = {
            tensor
            for each in self._flows.values()
            for tensor, flow in each.items()
            if tensor.startswith("buffer/") and flow.elements == 1 and FOUND_INF in flow.sources
        }
        return found if len(found) <= FEW else set()

    def _few(self, reached: Collection[str]) -> set[str]:
        """Those of the tensors that reach nothing but one another, if they have few numbers in all."""
        sizes: dict[str, int] = {}
        readers: dict[str, set[str]] = {}
        for each in self._flows.values():
            for tensor, flow in each.items():
                sizes[tensor] = max(sizes.get(tensor, 0), FEW + 1 if flow.elements is None else flow.elements)
                for name in flow.read:
                    readers.setdefault(name, set()).add(tensor)
        found = {name for name in reached if name.startswith("buffer/") and not is_agreed(name, self._agreed)}
        while more := {name for name in found if not readers.get(name, set()) <= found}:
            found -= more
        return found if sum(sizes[tensor] for tensor in found) <= FEW else set()


def _paths_into(
    digest: str, tensor: str, flow: Flow, dirty: Mapping[str, bool], used: frozenset[str]
) -> Iterable[Path]:
    keeps = tensor.startswith("buffer/") and tensor not in used
    for sources, statistic, graded in (
        (flow.direct, False, False),
        (flow.statistics, True, False),
        (flow.graded, False, True),
    ):
        for source, (operator, call) in sources.items():
            name = source.removeprefix("state:")
            holds = name in dirty or (graded and name.startswith((OPTIMIZER, GRADIENT)))
            if source.startswith("state:") and (name == tensor or not holds):
                continue
            yield Path(
                program=digest,
                tensor=tensor,
                source=source,
                operator=operator,
                call=call,
                statistic=statistic and keeps and dirty.get(name, True),
                graded=graded,
            )
