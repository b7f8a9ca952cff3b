"""``chipwitness operators``: the table of controlled ATen operators, and the battery that compares devices."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from analysis.commands._answers import keys_text
from analysis.commands._common import add_json, finish
from firmware_sim import limits
from firmware_sim.errors import DeviceError
from firmware_sim.evidence import canonical

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operator.

    Attributes:
        tile: the part that a referee recomputes in a dispute with exact numerics; "whole": all of it.
        whole: why the referee recomputes all of it, or in which cases.
        parts: true if a dispute about one FP32 element can be settled by a part of its sum.
        battery: equal, differs or not run.
        groups: groups of devices that agree, where not all do.
    """

    operator: str
    kind: str
    tile: str
    whole: str
    parts: bool
    battery: str
    groups: Sequence[Sequence[str]]

    def line(self, width: int) -> str:
        """For people."""
        tile = f"{self.tile}, parts" if self.parts else self.tile
        shown = f"{self.operator:{width}}  {self.kind:11}  {tile:21}  {self.battery:7}"
        return "  ".join(filter(None, (shown, "  ".join(map("=".join, self.groups)), self.whole))).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorsAnswer:
    """What ``operators`` answers.

    Attributes:
        devices: names.
        counts: by kind, by result of the battery, and how many have tiles.
    """

    numerics: str
    devices: Sequence[str]
    operators: Sequence[Row]
    counts: Mapping[str, int]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``operators``."""
    parser = subparsers.add_parser(
        "operators",
        description="Lists every ATen operator that runs under controlled numerics (arithmetic that gives the same "
        'bits on every device). An operator is of one of four kinds. "exact" and "arithmetic" run natively: the '
        'first only moves data, the second does one IEEE operation. "implemented" is built from exact primitives. '
        '"decomposed" is divided into others by PyTorch\'s rules. Every other operator is refused by name.',
        epilog=f"{keys_text(OperatorsAnswer)} Exit code 1: an operator differs between devices.",
    )
    parser.add_argument("--battery", action="store_true", help="run hard inputs on each device and compare the results")
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="device for the battery (repeat; default: every known device)"
    )
    parser.add_argument(
        "--numerics",
        choices=("exact", "native"),
        default="exact",
        help="arithmetic of the battery; native shows the differences that controlled numerics avoids (default: exact)",
    )
    add_json(parser)
    parser.set_defaults(handler=_operators)


def _digests(name: str, numerics: str) -> dict[str, str]:
    """Run the battery in a process that is the named device."""
    from inspector.devices import device
    from monitor import processes

    done = processes.run(processes.python("analysis.bench.battery", numerics), variables=device(name).variables)
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0:
        raise DeviceError(
            f"the test battery on device {name} failed: {lines[-1] if lines else f'exit code {done.returncode}'}"
        )
    result: dict[str, str] = canonical.loads(done.stdout)
    return result


def _at_hand() -> list[str]:
    from inspector.devices import DEVICES

    return [name for name, entry in DEVICES.items() if entry.missing() is None]


def _compare(results: dict[str, dict[str, str]], operator: str) -> tuple[str, list[list[str]]]:
    """Battery result of one operator, and the groups of devices that agree where they differ."""
    groups: dict[str | None, list[str]] = {}
    for name, digests in results.items():
        groups.setdefault(digests.get(operator), []).append(name)
    if not results or set(groups) == {None}:
        return "not run", []
    return ("equal", []) if len(groups) == 1 else ("differs", list(groups.values()))


def _operators(arguments: argparse.Namespace) -> int:
    from inspector.devices import device
    from monitor.numerics.operators import operator_table

    names = [device(name).name for name in arguments.device or _at_hand()] if arguments.battery else []
    results = {name: _digests(name, arguments.numerics) for name in names}
    rows, counts = list[Row](), Counter[str]()
    for operator, rule in sorted(operator_table().items()):
        outcome, groups = _compare(results, operator)
        tile = "whole" if rule.tile is None else rule.tile.__name__.replace("_", " ")
        row = Row(
            operator=operator,
            kind=rule.kind,
            tile=tile,
            whole=rule.whole,
            parts=rule.parts is not None,
            battery=outcome,
            groups=groups,
        )
        rows.append(row)
        counts.update([rule.kind, outcome, *(["tiled"] if rule.tile else [])])
    width = max(len(row.operator) for row in rows)
    lines = [f"{'operator':{width}}  {'kind':11}  {'tile':21}  battery", *(row.line(width) for row in rows)]
    lines += ["", ", ".join(f"{count} {name}" for name, count in counts.items())]
    lines += [
        "In a dispute one tile of a result decides, or one part of an FP32 element. Under rounded numerics a tile",
        "takes what the rounding log says of it; scattered sums, and calls that round inside, have no tiles there.",
        "Of others, and of other types, all of it decides: operands are opened,",
        f"{limits.OPERANDS_BYTES.most >> 20} MiB at most, else it is undecided.",
    ]
    lines.append("Every other operator is refused by name under rounded and exact numerics.")
    answer = OperatorsAnswer(numerics=arguments.numerics, devices=names, operators=rows, counts=dict(counts))
    code = finish(arguments, asdict(answer), lines)
    return 1 if counts.get("differs") and arguments.numerics == "exact" else code
