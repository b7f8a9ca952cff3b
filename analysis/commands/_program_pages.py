"""What a person who agrees to a run reads: its declaration, and a few lines for each program; ``--json`` has all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.declaration.origin import Origin
    from monitor.declaration.statement import Declaration

__all__ = ["declared_lines", "page_lines"]

_FEW, _NAMES, _CONSTANTS, _PATHS = 3, 6, 8, 20
"""How many names of tensors are shown, of batch tensors, constants and paths."""


def declared_lines(declared: Declaration) -> list[str]:
    """A declaration: its digest, what it starts from, its numbers by group, and what it allows outside its programs."""
    from monitor.declaration.countersignature import declaration_digest
    from monitor.declaration.statement import MOST_SLACK

    recipe = "a loop of the lab's own" if declared.recipe is None else f"preset {declared.recipe.preset}"
    end = "open end" if declared.length is None else f"{declared.length} steps"
    schedule = declared.schedule
    kept = "" if declared.keep is None else f" (the last {declared.keep} stay, and sparser ones before)"
    checkpoints = f"a checkpoint every {declared.checkpoint_every} steps{kept}"
    calls, flop, moved = astuple(declared.allowance)
    slack = MOST_SLACK if declared.maximum_slack is None else declared.maximum_slack
    lines = [
        f"declaration    {declaration_digest(declared)}",
        f"training       {recipe}, {end}, {checkpoints}, seed {declared.seed}",
        f"numerics       {declared.numerics}",
        f"initial state  {_origin(declared.origin, declared.seed)}",
        f"state          {len(declared.state)} tensors of {declared.byte_count} bytes",
        f"optimizer      {declared.optimizer!a:.200}",
        f"learning rate  {'declared in each step' if schedule is None else f'by schedule {schedule.to_json()!a:.500}'}",
    ]
    for number, group in enumerate(declared.groups):
        values = ", ".join(f"{name!a:.60} {value!a:.60}" for name, value in group.items())
        lines.append(f"group {number:<9}{values}")
    allowed = f"{calls} calls, {flop} FLOP, {moved} bytes outside each training step; slack {100 * float(slack):.3g} %"
    return [*lines, f"allowed        {allowed}"]


def page_lines(page: Mapping[str, Any]) -> Iterator[str]:
    """What a program (``Page.to_json``) reads, writes and brings, and by which paths past every loss."""
    batch = [f"{name!a:.60} {each['dtype']}{each['shape']}" for name, each in page["inputs"].items()]
    yield f"  reads        batch {_few(batch) or 'nothing'}; {_state(page['reads'])}"
    yield f"  writes       {_state(page['writes'])}"
    if page["differentiates"]:
        yield "  derivatives  it only computes, and takes derivatives: it may train what its batch carries"
    large = page["large_constants"]
    for each in large[:_CONSTANTS]:
        text = "not shown here"
        if "distinct" in each:
            least, most, mean = (f"{float(each[name]):.4g}" for name in ("min", "max", "mean"))  # "inf" is a text
            span = f"{least} … {most}, mean {mean}"
            text = f"{span}, {each['distinct']} distinct"
        yield f"  constant {each['number']:<4}{each['elements']} × {each['dtype']}, sha256 {each['sha256']}: {text}"
    if len(large) > _CONSTANTS:
        yield f"  … and {len(large) - _CONSTANTS} more constants"
    paths = page["direct_paths"]
    if not paths:
        yield "direct paths   none: batches and constants reach the new state by gradients of a loss only"
    for path in paths[:_PATHS]:
        kind = "running stat." if path["running_statistic"] else "few numbers" if path["few_numbers"] else "direct path"
        yield f"{kind:14} {path['source']!a} reaches {path['tensor']!a} by {path['operator']} (call {path['call']})"
    if len(paths) > _PATHS:
        yield f"… and {len(paths) - _PATHS} more paths"


def _state(names: Sequence[str]) -> str:
    """How many tensors of the state of each kind, and which, where these are few."""
    kinds: dict[str, list[str]] = {}
    for kind, _, name in (name.partition("/") for name in names):
        kinds.setdefault(kind, []).append(f"{name!a:.60}")
    parts = (
        f"{len(each)} {kind}" + (f" {', '.join(each)}" if len(each) <= _FEW else "") for kind, each in kinds.items()
    )
    return "; ".join(parts) or "nothing of the state"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _origin(origin: Origin, seed: int) -> str:
    if origin.state is None:
        return f"what seed {seed} gives"
    if origin.initialisation is not None:
        begun = origin.initialisation
        return f"{origin.state}, made by program {begun.program} with seed {begun.seed}"
    if origin.parent is None:
        return f"{origin.state}, supplied: past FLOP is unknown"
    past = origin.parent
    return f"{' and '.join(past.kinds)} of run {past.run} after its last step {past.step}, else zero: {origin.state}"
