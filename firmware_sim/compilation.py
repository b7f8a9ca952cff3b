"""Numba, as every compiled function of the product is made with it: no settings of a folder, and no foreign cache.

It reads ``.numba_config.yaml`` where a process works, at its import and at each compilation, and loads compiled code
from where that says. Here it finds no such file, and its cache lies where only the user can write, or nowhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from firmware_sim.folders import in_empty_folder, own_folder

with in_empty_folder():
    import numba as _numba
    import numba.extending as _  # noqa: F401 - makes it part of the package
    from numba.core import config as _config

numba: Any = _numba
config: Any = _config
config._config_fname = os.path.join(os.devnull, "none")
config.reload_config()

__all__ = ["compiled", "numba"]


def compiled(function: Callable[..., Any], *signature: str, **options: Any) -> Any:
    """A function compiled by ``numba.njit``, or read from the user's own cache; compiled anew where there is none."""
    folder = _folder()
    if folder is not None:
        before = {name: getattr(config, name, "") for name in ("CACHE_DIR", "CACHE_LOCATOR_CLASSES")}
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = folder, ""
        try:
            return numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError:  # it cannot be written
            pass
        finally:
            for name, value in before.items():
                setattr(config, name, value)
    return numba.njit(*signature, **options)(function)


@cache
def _folder() -> str | None:
    return own_folder(f"compiled-{sys.implementation.cache_tag}")
