"""Starts every process of the product: installed code alone, in an empty folder, with variables that are named.

None of them finds what a lab puts next to its run, into it or above it. Only ``check``, and the module
that a user has ``launch`` run, are the user's code on purpose.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firmware_sim.folders import own_folder
from monitor._begin import OWN

__all__ = ["environment", "forget_unnamed", "python", "run", "start"]

_NAMED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"}
    | {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    | {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "GLOO_SOCKET_IFNAME"}
)
_PREFIXES = ("LC_", "RAY_")
_OF_A_COMMAND = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"}
    | {"MKL_ENABLE_INSTRUCTIONS", "TERM", "COLUMNS", "LINES", "NO_COLOR", "DISPLAY", "PLAYWRIGHT_BROWSERS_PATH"}
)
"""What a command's own process keeps too: threads and kernels, a device's among them, its terminal and its database."""
_PREFIXES_OF_A_COMMAND = ("CHIPWITNESS_", "PG")
_FIXED = {"OMP_WAIT_POLICY": "passive", "MPLBACKEND": "agg"}
"""Threads that spin stall those of other processes; no module of a figure's backend is loaded."""
_LIBRARIES = "LD_LIBRARY_PATH"


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a process: what is named here of this one's, and these variables."""
    kept = {name: value for name, value in os.environ.items() if name in _NAMED or name.startswith(_PREFIXES)}
    libraries = _needed_libraries()
    return {**kept, **({_LIBRARIES: libraries} if libraries else {}), **_fixed(), **(variables or {})}


def _fixed() -> dict[str, str]:
    """Variables of every process: code that PyTorch compiles is kept where the user alone can write, or as it works."""
    return {**_FIXED, "TORCHINDUCTOR_CACHE_DIR": own_folder("inductor") or os.path.abspath("torchinductor")}


def _needed_libraries() -> str:
    """Folders of ``LD_LIBRARY_PATH`` from which this process has loaded libraries; the interpreter may need them."""
    folders = [place for place in os.environ.get(_LIBRARIES, "").split(os.pathsep) if os.path.isabs(place)]
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return os.pathsep.join(folders)
    loaded = {os.path.dirname(line.split(maxsplit=5)[-1]) for line in lines}
    return os.pathsep.join(place for place in folders if os.path.realpath(place) in loaded)


def forget_unnamed() -> None:
    """Take the variables that are not named from a command's own process, before a library reads them."""
    prefixes = (*_PREFIXES, *_PREFIXES_OF_A_COMMAND)
    for name in set(os.environ) - _NAMED - _OF_A_COMMAND - {_LIBRARIES}:
        if not name.startswith(prefixes):
            del os.environ[name]
    os.environ.update(_fixed())


def python(module: str, *arguments: str, begun: str | None = None) -> list[str]:
    """Command that runs a module in a process that finds installed code alone.

    A module that is none of the product's is the user's own: the folder in which it lies comes last.

    Args:
        begun: a module that is run in its place, with its name as first argument.
    """
    options = ["-E", "-P", "-S", *(["-s"] if sys.flags.no_user_site else [])]
    options += ["-B"] if sys.flags.dont_write_bytecode else []
    words = [_folder(module), *filter(None, [begun]), module, *arguments]
    return [sys.executable, *options, str(Path(__file__).with_name("_begin.py")), *words]


def _folder(module: str) -> str:
    """Where the package of a user's own module lies; empty for those of the product."""
    top = module.partition(".")[0]
    found = None if top in OWN else importlib.util.find_spec(top)
    place = None if found is None else next(iter(found.submodule_search_locations or ()), found.origin)
    return "" if place is None else os.path.dirname(os.path.abspath(place))


def start(command: Sequence[str], folder: str, variables: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process in a folder, which is empty and stays so, with these variables in addition to the named ones.

    Args:
        streams: as ``subprocess.Popen`` takes them.
    """
    return subprocess.Popen(command, cwd=folder, env=environment(variables), **streams)


def run(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    given: str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a process in a new empty folder until it ends; its output and errors are text.

    Args:
        given: its input.

    Raises:
        OSError: there is no such program.
        subprocess.TimeoutExpired: it took longer.
    """
    with tempfile.TemporaryDirectory(prefix="chipwitness-", ignore_cleanup_errors=True) as folder:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment(variables),
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
