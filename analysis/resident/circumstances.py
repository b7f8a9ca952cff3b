"""What of a process a command's result may depend on, beside its arguments, folder and files."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys

__all__ = ["PROGRAM_ENVIRONMENT", "circumstances"]

PROGRAM_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Variables that the program sets where they are not: threads that spin stall those of other processes."""

_OF_A_TERMINAL = frozenset(
    {"PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "DISPLAY", "TMPDIR", "TMUX"}
    | {"TMUX_PANE", "STY", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "GPG_TTY"}
)
"""Variables that no library reads when it is loaded: a copy takes the command's."""


def circumstances() -> str:
    """SHA-256, in hex, of the interpreter, its options, this process's limits and its environment.

    Left out are the variables of a terminal, and where temporary files go, which a copy takes over.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_TERMINAL}
    kinds = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    told = {
        "interpreter": [sys.executable, sys.version, list(sys.flags), sys.warnoptions, sorted(sys._xoptions.items())],
        "limits": [[name, *resource.getrlimit(getattr(resource, name))] for name in kinds],
        "environment": {**PROGRAM_ENVIRONMENT, **kept},
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
