"""Which tests run: all in a file that is named, and with ``--whole``; a drawn part of what takes long in a folder.

``durations.json`` says how long each test function took when all members ran. A function that is not listed is short,
or new, and runs with all its members. The draw is a hash of names and of ``DRAW``: it is the same in each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
DRAW = "0.2.0"
"""A new release draws anew."""
BUDGET = 0.4
"""Seconds of a function. Of its members as many run as fit, and one for each value of what ``sampled`` names."""
LONG = 0.7
"""A function whose member takes twice as many seconds is drawn with a chance of one half, and so on."""
_LISTED = 0.5
"""Seconds from which a function is listed."""

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that have to be free there; a run of the suite takes one GiB."""

Durations = dict[str, tuple[int, float]]


def read_durations() -> Durations:
    """Members and seconds in all, by function."""
    if not DURATIONS.exists():
        return {}
    files = json.loads(DURATIONS.read_text())["files"]
    rows = {f"{file}::{name}": row for file, names in files.items() for name, row in names.items()}
    return {name: (int(count), float(seconds)) for name, (count, seconds) in rows.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all members of all tests, and list how long they took")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("whole"):
        return
    named = {Path(each.partition("::")[0]).name for each in map(str, config.args) if ".py" in each}
    drawn = chosen([item for item in items if item.path.name not in named], read_durations())
    left = [item for item in items if item.path.name not in named and item.nodeid not in drawn]
    items[:] = [item for item in items if item.path.name in named or item.nodeid in drawn]
    config.hook.pytest_deselected(items=left)


def chosen(items: list[Any], durations: Durations) -> set[str]:
    """Names of the members that run."""
    functions: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        functions[_function(item.nodeid)].append(item)
    short = (1, 0.0)
    return {
        nodeid
        for name, members in functions.items()
        if _is_drawn(name, durations.get(name, short))
        for nodeid in _members_that_run(members, durations.get(name, short))
    }


def _is_drawn(name: str, duration: tuple[int, float]) -> bool:
    members, seconds = duration
    mean = seconds / members
    return mean <= LONG or _lot(name) < LONG / mean


def _members_that_run(members: list[Any], duration: tuple[int, float]) -> set[str]:
    count, seconds = duration
    drawn = sorted((each.nodeid for each in members), key=_lot)
    fit = len(members) if seconds <= BUDGET else max(1, int(BUDGET * count / seconds))
    kept: dict[object, str] = {}
    for item in sorted(members, key=lambda each: _lot(each.nodeid)):
        for mark in item.iter_markers("sampled"):
            kept.setdefault(tuple(str(item.callspec.params[name]) for name in mark.args), item.nodeid)
    return set(kept.values()) or set(drawn[:fit])


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _lot(name: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{DRAW} {name}".encode()).digest()[:8], "big") / 2**64


class Clock:
    """Adds up how long tests took, and lists it after a run of all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: dict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        members: dict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self.seconds.items():
            members[_function(nodeid)].append(seconds)
        files: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for name, each in sorted(members.items()):
            if sum(each) >= _LISTED:
                file, _, function = name.partition("::")
                files[file][function] = [len(each), round(sum(each), 2)]
        from analysis.bench.origin import commit, hardware

        whole = {"seconds": round(sum(self.seconds.values())), "files": files}
        found = {"hardware": hardware(), **commit(), "outcomes": self.outcomes, **whole}
        DURATIONS.write_text(json.dumps(found, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files stay in memory where it has room: recorded runs are files that some disks take minutes to delete.

    Durations are listed by the process that has given the tests out, after a whole run of the whole folder.
    """
    if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
        os.environ["TMPDIR"], tempfile.tempdir = str(_MEMORY), None
    is_whole = config.getoption("whole") and not any(".py" in str(each) for each in config.args)
    if is_whole and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Clock())
