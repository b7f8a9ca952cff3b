"""Where figures come from: the machine, its versions, the formats and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firmware_sim.compilation import numba
from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import canonical
from inspector.bundle.contents import FORMAT as BUNDLE
from inspector.dispute.game import FORMAT as GAME
from inspector.inspection.trust import FORMAT as TRUST
from monitor import processes
from monitor.environment import processor
from monitor.transcript.metadata import FORMAT as RUN

__all__ = ["DATA", "FORMATS", "Row", "commit", "hardware", "machine", "write", "write_among"]

DATA = Path(__file__).resolve().parents[1] / "data"
"""Measurements that come with the program."""
Row = dict[str, Any]
"""One measurement: ``work``, ``mode``, ``seconds``, perhaps ``ratio``, and what each kind adds."""
FORMATS = [RUN, BUNDLE, TRUST, GAME]
"""Formats of today's runs, bundles, trust files and games."""


def machine() -> dict[str, str]:
    """The machine of a measurement: processor, C library and versions."""
    return {
        "processor": processor(),
        "c_library": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "torch": torch.__version__,
    }


def hardware() -> dict[str, Any]:
    """Processor, cores and versions, and the CUDA device where there is one."""
    found = {**machine(), "cores": os.cpu_count()}
    return {**found, "accelerator": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else found


def commit() -> dict[str, str]:
    """``commit`` of the checkout that this file is part of, with ``+`` where more than measurements was changed there.

    Empty outside a checkout.
    """
    file = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        done = processes.run(command)
        done.check_returncode()
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", ":/", f":(exclude){DATA}")
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": f"{name}+" if changed else name}


def write(rows: Sequence[Row], path: Path, **more: str) -> None:
    """Put the rows in a file with the machine, formats and commit of their measurement; CallerError if that fails."""
    document = {"hardware": hardware(), "formats": FORMATS, **commit(), **more, "rows": list(rows)}
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from None


def write_among(rows: Sequence[Row], path: Path, *, by: Sequence[str] = ("work",), **more: str) -> None:
    """Put the rows in a file as ``write`` does, each with its commit; others that are there stay, with their machine.

    So what takes hours is measured in parts.

    Args:
        by: what a row and the one that takes its place have in common.

    Raises:
        CallerError: the file cannot be written, or what is there is no such file.
    """
    new = {tuple(row.get(name) for name in by) for row in rows}
    earlier: list[Row] = []
    if path.exists():
        try:
            found = canonical.loads(path.read_text(encoding="utf-8"))
            origin = {"commit": found["commit"]} if "commit" in found else {}
            if found.get("hardware", hardware()) != hardware():
                origin |= {"hardware": found["hardware"]}
            earlier = [{**origin, **row} for row in found["rows"] if tuple(row.get(name) for name in by) not in new]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CallerError(f"{path} holds no measurements to which these can be added: {error}") from None
    write([*earlier, *({**commit(), **row} for row in rows)], path, **more)
